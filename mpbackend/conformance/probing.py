"""Checks of the product that a backend hands to probes: it is what sessions run, and what it shows contradicts no claim."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch
from torch import Tensor

from mpbackend.conformance.answer import Answer, FigureValue, fault, fine, skip, together
from mpbackend.conformance.operands import normal, placed
from mpbackend.conformance.subject import PLAIN, Running, Subject
from mpbackend.conformance.tolerances import claim_for
from mpbackend.errors import UnknownNameError
from mpbackend.formats import FORMATS
from mpbackend.numerics.accumulate import arithmetic_for
from mpbackend.numerics.arithmetic import Arithmetic
from mpbackend.numerics.fingerprint import compare
from mpbackend.numerics.probes import probe

QUICK_SHAPES = ((64, 64, 64),)
LONG_SHAPES = ((64, 64, 64), (64, 64, 256), (16, 16, 1024))
OTHERS = ("fp8_e4m3", "tf32", "hf32_e8m11", "hf32_e8m10", "fp8_e5m2")
"""Formats whose products stay in the format of their sums; one that the device does not multiply is left out."""

UNSTATED = ("operand_subnormals", "output_subnormals", "overflow")
"""Questions that no row answers: what a device does there is a figure. Overflow has checks of its own."""

CONTRADICTS = "contradicts"

SAME_SHAPES = ((17, 33, 65), (64, 128, 48))
"""M, K and N of the products that are compared bit for bit."""


def check_probed_product_is_what_runs(subject: Subject) -> Answer:
    """What a backend hands to probes multiplies with the bits of a product in a session of that format."""
    make = getattr(subject.backend, "product", None)
    if make is None:
        return skip("the backend has no product for probes")

    def judge(running: Running, name: str) -> Answer:
        try:
            multiply = make(subject.device, name)
        except UnknownNameError as error:
            return fault(f"a session runs in it, and there is no product for probes: {error}")
        for case, (m, k, n) in enumerate(SAME_SHAPES):
            a, b = normal((m, k), name, case), normal((k, n), name, 100 + case)
            with running.forward():
                wanted = (placed(a, name, subject.place) @ placed(b, name, subject.place)).cpu().double()
            found = multiply(a, b)
            if found.dtype is not torch.float64 or found.device.type != "cpu":
                return fault(f"it returns {found.dtype} on {found.device}, and not fp64 in main memory")
            if not torch.equal(found, wanted):
                return fault(f"{int((found != wanted).sum())} of {wanted.numel()} elements of a product of {m} x {k} x {n} have other bits")
        return fine()

    return subject.each_format(judge)


def check_probe_contradicts_no_claim(subject: Subject) -> Answer:
    """A probe of the sums of every format finds nothing that the device's row rules out: steps, alignment, register, rounding, promotion."""
    make = getattr(subject.backend, "product", None)
    if make is None:
        return skip("the backend has no product for probes")
    answers: dict[str, Answer] = {}
    for name in PLAIN:
        plan = subject.plan(name)
        if isinstance(plan, str):
            answers[name] = skip(plan)
            continue
        with subject.running(plan):
            answers[name] = probed(subject, make(subject.device, name), claim_of_stored(claim_for(subject, plan), name), name, name)
    for name in OTHERS[: 1 if subject.quick else None]:
        try:
            claim, multiply = arithmetic_for(subject.matrix, subject.device.arch, name, name), make(subject.device, name)
        except UnknownNameError:
            continue
        answers[name] = probed(subject, multiply, claim, name, claim.output)
    return together(answers)


def probed(subject: Subject, multiply: Callable[[Tensor, Tensor], Tensor], claim: Arithmetic, name: str, output: str) -> Answer:
    """Return the answer about one product.

    Args:
        subject: the backend and device.
        multiply: the product, of fp64 matrices in main memory.
        claim: what the device's row says.
        name: format of the operands.
        output: format of the results.
    """
    fingerprint = probe(multiply, a=name, b=name, output=output, shapes=QUICK_SHAPES if subject.quick else LONG_SHAPES)
    findings = [finding for finding in compare(fingerprint, claim) if finding.question not in UNSTATED]
    wrong = [
        f"{found.question}: {found.reason}, and the probe finds {' or '.join(map(str, found.probed.values))}"
        for found in findings
        if found.verdict == CONTRADICTS
    ]
    seen = {question: " or ".join(map(str, fingerprint.answers[question].values)) for question in UNSTATED}
    figures: dict[str, FigureValue] = {question: text for question, text in seen.items() if text}
    figures |= {verdict: sum(found.verdict == verdict for found in findings) for verdict in ("agrees", "adds", "open")}
    return Answer(fault="; ".join(wrong), figures=figures)


def claim_of_stored(claim: Arithmetic, name: str) -> Arithmetic:
    """Return a claim about operands that are stored in a format: a unit that takes a wider one sees no other numbers, and no probe can tell."""
    seen = {side: name for side in ("a", "b") if FORMATS[getattr(claim, side)].mantissa_bits > FORMATS[name].mantissa_bits}
    return msgspec.structs.replace(claim, **seen)
