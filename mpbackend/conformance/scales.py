"""Checks that a lowering makes the scales and values that a low-bit recipe means.

``check_scale_stream`` runs them all. Each gives a lowering a stream of tensors and compares the scales it used with those of the plain lowering, or with what
the recipe says by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

import msgspec
import torch

from mpbackend.conformance.lowering import Lowering, Reference, Step
from mpbackend.conformance.streams import nearest, probe_tensor, stream, tensor_of, uneven
from mpbackend.errors import UnknownNameError
from mpbackend.formats import FORMATS
from mpbackend.lowbit import LowBit, Operand, low_bit
from mpbackend.recipe import parse_recipe

TOLERANCE = 2.0**-22
"""Relative: two units in the last place of fp32, the largest error of an approximate division on a GPU (CUDA C++ Programming Guide, ``__fdividef``)."""

Outcome = Literal["passed", "failed", "expected", "skipped"]


class CheckResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The result of one check.

    Attributes:
        lowering: name of the lowering.
        check: name of the check.
        outcome: passed; failed; expected, where a failure was announced with its reason; skipped, where the lowering runs none of the check's recipes.
        detail: what went wrong, at which step; or the reason.
    """

    lowering: str
    check: str
    outcome: Outcome
    detail: str = ""


class Case(NamedTuple):
    """One recipe and the stream that it quantizes, as input or weight of the forward pass, or as gradient."""

    recipe: str
    steps: tuple[Step, ...]
    operand: Literal["input", "weight", "gradient"] = "input"

    def meaning(self) -> tuple[LowBit, Operand]:
        """Return the recipe's meaning and the operand."""
        rules = low_bit(parse_recipe(self.recipe))
        return rules, {"input": rules.forward.a, "weight": rules.forward.b, "gradient": rules.dgrad.a}[self.operand]


Judge = Callable[[Lowering, LowBit, Operand, Sequence[Step]], str]
"""Returns what is wrong with a lowering on one case; empty when nothing is."""


class Check(NamedTuple):
    """A property, the cases that show it, and what decides."""

    meaning: str
    cases: tuple[Case, ...]
    judge: Judge


def same_scales(lowering: Lowering, rules: LowBit, operand: Operand, steps: Sequence[Step]) -> str:
    """Compare the scales of every step with those of the plain lowering."""
    wanted = Reference().scales(rules, operand, steps)
    found = lowering.scales(rules, operand, steps)
    if len(found) != len(wanted):
        return f"{len(found)} scales for {len(wanted)} steps"
    for number, (mine, theirs) in enumerate(zip(wanted, found, strict=True), 1):
        scales = theirs.detach().to("cpu", torch.float32).reshape(-1)
        if scales.shape != mine.shape:
            return f"step {number}: {scales.numel()} scales, {mine.numel()} groups"
        wrong = ~((scales - mine).abs() <= TOLERANCE * mine.abs())
        if wrong.any():
            group = int(wrong.nonzero()[0])
            return f"step {number}: scale {scales[group]:g}, not {mine[group]:g} (group {group}, amax {steps[number - 1].tensor.abs().max():g})"
    return ""


def multiplies(lowering: Lowering, rules: LowBit, operand: Operand, steps: Sequence[Step]) -> str:
    """Check that scale times amax is the largest value of the format, not its inverse."""
    for number, (step, scale) in enumerate(zip(steps, lowering.scales(rules, operand, steps), strict=True), 1):
        product = float(step.tensor.abs().max()) * float(scale.reshape(-1)[0])
        if not abs(product / operand.top - 1) <= TOLERANCE:
            return f"step {number}: amax times scale is {product:g}, not {operand.top:g}"
    return ""


def nearest_values(lowering: Lowering, rules: LowBit, operand: Operand, steps: Sequence[Step]) -> str:
    """Check every rounding against the values of the format; the steps play no part."""
    tensor = probe_tensor(operand)
    found = lowering.values(rules, operand, tensor).detach().to("cpu", torch.float32)
    for value, got in zip(tensor.flatten().tolist(), found.flatten().tolist(), strict=True):
        if got != (wanted := nearest(value, operand)):
            return f"{value:.9g} becomes {got:.9g}, not {wanted:.9g}: not the numbers or the rounding of {operand.format}"
    return ""


def saturates(lowering: Lowering, rules: LowBit, operand: Operand, steps: Sequence[Step]) -> str:
    """Check that what a scale leaves above the largest value becomes that; the first scale of delayed scaling is 1."""
    largest = FORMATS[operand.format].max
    for step in steps:
        found = lowering.values(rules, operand, step.tensor).detach().to("cpu", torch.float32)
        if not torch.equal(found[step.tensor.abs() > largest].abs().unique(), torch.tensor([largest])):
            return f"values up to {step.tensor.abs().max():g} become {found.abs().max():g}, not {largest:g}"
    return ""


def stays_visible(lowering: Lowering, rules: LowBit, operand: Operand, steps: Sequence[Step]) -> str:
    """Check that inf and NaN are still seen after quantizing."""
    for step in steps:
        hidden = lowering.values(rules, operand, step.tensor).detach().to("cpu", torch.float32)[~step.tensor.isfinite()].isfinite()
        if hidden.any():
            return "a non-finite value became a finite one"
    return ""


INF, NAN = float("inf"), float("nan")
ORDINARY = stream(1.0, 3.0, 0.1, 500.0, 7e-3, 448.0, 57344.0, 1e-8, 1e8, 1.0)
EDGES = stream(448.0, 447.99997, 448.00003, 449.0, 256.0, 255.99998, 256.00003, 511.0, 512.0, 57344.0, 57343.996, 57344.004, 1.75, 1.7500001, 0.4375)
OUTLIER = stream(1.0, 1000.0, *[1.0] * 9)
SHRINKING = stream(*(2.0**-n * 3 for n in range(12)))
GROWING = stream(*(2.0**n * 3 for n in range(12)))
UNEVEN = (Step(uneven()), Step(uneven((48, 256)) * 64))


def delayed(window: int, algorithm: str = "max") -> str:
    """Return the text of a recipe with a short window."""
    return f"fp8-delayed:scaling.history={window},scaling.algorithm={algorithm}"


ROW = "fp8:scaling.inputs=row,scaling.weights=row"

CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        "direction": Check(
            "a scale is what the tensor is multiplied by, not its inverse", (Case("fp8", ORDINARY), Case("fp8", ORDINARY, "gradient")), multiplies
        ),
        "current_tensor": Check(
            "a current scale is made from this tensor alone", (Case("fp8", ORDINARY), Case("fp8", SHRINKING, "gradient"), Case("fp8", UNEVEN)), same_scales
        ),
        "current_row": Check("row scales run along the summed dimension", (Case(ROW, UNEVEN), Case(ROW, UNEVEN, "gradient")), same_scales),
        "current_block": Check("scales of 1x128 and 128x128", (Case("fp8-block", UNEVEN), Case("fp8-block", UNEVEN, "weight")), same_scales),
        "current_mx": Check("e8m0 scales of 32 elements", (Case("mxfp8", UNEVEN), Case("mxfp8", EDGES)), same_scales),
        "current_two_level": Check("ue4m3 scales of 16 elements under one of the tensor", (Case("nvfp4", UNEVEN), Case("nvfp4", ORDINARY)), same_scales),
        "current_hif8": Check("hif8 scales to the band with most fraction bits", (Case("hif8", ORDINARY), Case("hif8", ORDINARY, "gradient")), same_scales),
        "margin": Check(
            "a margin lowers the scale by a power of two",
            (Case("fp8:scaling.margin=3", ORDINARY), Case("fp8-delayed:scaling.margin=2", ORDINARY)),
            same_scales,
        ),
        "power_of_two": Check(
            "a power-of-two scale is rounded down",
            (Case("fp8:scaling.format=e8m0", EDGES), Case("fp8:scaling.format=e8m0", EDGES, "gradient"), Case("mxfp8", EDGES)),
            same_scales,
        ),
        "zero_amax": Check(
            "an amax of zero leaves the present scale, without one 1",
            (Case("fp8", stream(0.0, 1.0, 0.0)), Case(delayed(2), stream(0.0, 0.0, 5.0, 0.0, 0.0, 0.0, 2.0, 0.0)), Case(ROW, UNEVEN)),
            same_scales,
        ),
        "inf_amax": Check(
            "a non-finite amax leaves the present scale, without one 1, until it has left the window",
            (Case("fp8", stream(1.0, INF, 2.0)), Case(delayed(3), stream(INF, 1.0, INF, 7.0, 5.0, 3.0, 2.0)), Case(delayed(3), stream(1.0, NAN, 1.0))),
            same_scales,
        ),
        "tiny_amax": Check("a scale beyond fp32 becomes its largest value", (Case("fp8", stream(1e-30, 1e-37, 1e-40, 1e-13)),), same_scales),
        "delayed_first": Check("the first delayed scale is 1: no tensor scales itself", (Case(delayed(4), GROWING), Case(delayed(1), SHRINKING)), same_scales),
        "delayed_expiry": Check(
            "the oldest amax leaves the window, so that an early outlier does not pin the scale",
            (Case(delayed(4), OUTLIER), Case(delayed(2), OUTLIER, "gradient"), Case(delayed(3), SHRINKING)),
            same_scales,
        ),
        "delayed_max": Check("the scale is that of the largest amax in the window", (Case(delayed(16), ORDINARY), Case(delayed(1024), SHRINKING)), same_scales),
        "most_recent": Check(
            "the most recent amax is that of the step before, not of the present one",
            (Case(delayed(4, "most_recent"), ORDINARY), Case(delayed(1, "most_recent"), SHRINKING)),
            same_scales,
        ),
        "evaluation": Check(
            "evaluation reads the scale and writes no amax", (Case(delayed(3), stream(1.0, 2.0, 900.0, 800.0, 3.0, 1.0, frozen=(2, 3))),), same_scales
        ),
        "values": Check(
            "values are rounded to the numbers of the format, ties as it says",
            (Case("fp8", ()), Case("fp8", (), "gradient"), Case(ROW, ()), Case("mxfp8", ()), Case("nvfp4", ()), Case("hif8", ())),
            nearest_values,
        ),
        "saturation": Check(
            "a finite value beyond the largest becomes the largest",
            (Case(delayed(4), (Step(tensor_of(1e4)),)), Case(delayed(4), (Step(tensor_of(1e6)),), "gradient")),
            saturates,
        ),
        "nonfinite": Check(
            "inf and NaN are not turned into numbers",
            tuple(Case("fp8", stream(INF, NAN), kind) for kind in ("input", "gradient")) + (Case("nvfp4", stream(INF)), Case(delayed(4), stream(INF))),
            stays_visible,
        ),
    }
)
"""The checks by name."""


def check_scale_stream(lowering: Lowering, expected: Mapping[str, str] | None = None) -> list[CheckResult]:
    """Run every check.

    Args:
        lowering: what is checked.
        expected: checks that fail, to the reason. One that passes nevertheless is a failure, so that the list stays true.

    Raises:
        UnknownNameError: ``expected`` names no check.
    """
    expected = expected or {}
    for name in expected:
        if name not in CHECKS:
            raise UnknownNameError("conformance check", name, CHECKS)
    return [run_check(name, lowering, expected.get(name, "")) for name in CHECKS]


def run_check(name: str, lowering: Lowering, expected: str = "") -> CheckResult:
    """Run one check; see ``check_scale_stream``."""
    check = CHECKS[name]
    refusals, faults = [], []
    for case in check.cases:
        rules, operand = case.meaning()
        if refusal := lowering.refuses(rules):
            refusals.append(f"{case.recipe}: {refusal}")
            continue
        try:
            fault = check.judge(lowering, rules, operand, case.steps)
        except Exception as error:  # noqa: BLE001 - whatever a lowering raises is its failure
            fault = f"{type(error).__name__}: {error}"
        if fault:
            faults.append(f"{case.recipe}, {case.operand}: {fault}")
    outcome, detail = conclude(refusals, faults, expected, len(check.cases))
    return CheckResult(lowering=lowering.name, check=name, outcome=outcome, detail=detail)


def conclude(refusals: Sequence[str], faults: Sequence[str], expected: str, cases: int) -> tuple[Outcome, str]:
    """Return the outcome of a check from what its cases gave."""
    if faults:
        return ("expected", f"{expected} ({faults[0]})") if expected else ("failed", faults[0])
    if len(refusals) == cases:
        return "skipped", refusals[0]
    return ("failed", f"it passes, but was expected to fail: {expected}") if expected else ("passed", "; ".join(refusals))
