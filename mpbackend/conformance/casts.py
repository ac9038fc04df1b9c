"""Checks of conversions between formats, against the scalar definition of each format."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from mpbackend.conformance.answer import Answer, fault, fine, skip, together
from mpbackend.conformance.operands import SEED
from mpbackend.conformance.subject import DTYPES, Running, Subject
from mpbackend.formats import FORMATS
from mpbackend.inquiry import ask_implementations
from mpbackend.numerics.rounding_rules import round_value

NARROW = ("bf16", "fp16")
LOW_BIT = ("fp8_e4m3", "fp8_e5m2")
RANDOM = 500


def check_cast_rounding(subject: Subject) -> Answer:
    """Casts from fp32 to bf16 and fp16 round to nearest, ties to even, subnormals kept; overflow gives inf, or the largest value on a device that saturates."""
    return subject.each_format(lambda running, name: rounding(subject, running, name), NARROW)


def rounding(subject: Subject, running: Running, name: str) -> Answer:
    """Return the answer about casts from fp32 to one format."""
    values = numbers(name)
    with running.backward():
        found = values.to(subject.place).to(DTYPES[name]).cpu().double()
    limit = FORMATS[name].max if saturates(subject) else math.inf
    wanted = [max(-limit, min(limit, round_value(value, name))) for value in values.double().tolist()]
    for value, got, right in zip(values.tolist(), found.tolist(), wanted, strict=True):
        if got != right:
            return fault(f"{value:.9g} becomes {got:.9g}, not {right:.9g}")
    return fine()


def numbers(name: str) -> Tensor:
    """Return fp32 numbers that a cast to a format can get wrong: random bits, values of the format, their middles and neighbors, and what overflows."""
    generator = torch.Generator().manual_seed(SEED)
    spec = FORMATS[name]
    bits = torch.randint(0, 2**32, (RANDOM,), generator=generator, dtype=torch.int64)
    anything = bits.to(torch.int32).view(torch.float32)
    codes = torch.randint(0, 2**15, (RANDOM,), generator=generator).to(torch.int16)
    low, high = (shifted.view(DTYPES[name]).double() for shifted in (codes, codes + 1))
    middles = ((low + high) / 2).float()
    above, below = torch.nextafter(middles, torch.tensor(math.inf)), torch.nextafter(middles, torch.tensor(-math.inf))
    edge = spec.max * (1 + spec.eps / 4) if name == "fp16" else spec.max
    edges = torch.tensor([0.0, -0.0, spec.max, edge, spec.smallest_normal, spec.smallest_subnormal, spec.smallest_subnormal / 2, 3e38])
    every = torch.cat((anything, low.float(), middles, above, below, edges, -edges))
    every = every[torch.isfinite(every)]
    # A device may take subnormals of fp32 for zeros; what it does with them is another question than how it rounds.
    return every[(every == 0) | (every.abs() >= FORMATS["fp32"].smallest_normal)]


def saturates(subject: Subject) -> bool:
    """Tell whether 16-bit results that overflow become the largest value here: what the matrix says, and the backend's register with it."""
    record = subject.matrix.overflow(subject.device.arch) if subject.device.arch in subject.matrix.archs else None
    return record is not None and record.mode == "saturating" and subject.backend.overflow(subject.device) is not None


def check_casts_back(subject: Subject) -> Answer:
    """Every bf16 and fp16 code goes to fp32 and back unchanged, subnormals and both zeros too; where nothing saturates also infinities, and NaN stays NaN."""

    def judge(running: Running, name: str) -> Answer:
        codes = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
        values = codes.view(DTYPES[name])
        codes, values = (tensor[values.isfinite()] for tensor in (codes, values)) if saturates(subject) else (codes, values)
        with running.backward():
            wide = values.to(subject.place).float()
            back = wide.to(DTYPES[name]).cpu()
        number = ~values.isnan()
        changed = (back.view(torch.int16) != codes) & number
        widened = (wide.cpu().double() != values.double()) & number
        lost = ~back.isnan() & ~number
        if not bool((changed | widened | lost).any()):
            return fine()
        first = int((changed | widened | lost).nonzero()[0])
        return fault(f"{values[first].item():g} becomes {wide[first].item():g} and then {back[first].item():g}")

    return subject.each_format(judge, NARROW)


def check_low_bit_casts(subject: Subject) -> Answer:
    """Every code of fp8_e4m3 and fp8_e5m2 has the value that the specification gives it, and finite numbers in range are rounded to the nearest."""
    plan = subject.plan("bf16")
    if isinstance(plan, str):
        return skip(plan)
    rows = [row for row in ask_implementations(subject.backend, subject.device) if row.level is not None]
    with subject.running(plan) as running:
        computed = {name: any(name in (row.a, row.b) for row in rows) for name in LOW_BIT}
        return together({name: codes_and_rounding(subject, running, name) if computed[name] else skip("no product in it runs here") for name in LOW_BIT})


def codes_and_rounding(subject: Subject, running: Running, name: str) -> Answer:
    """Return the answer about one 8-bit format: what its codes are worth, and what a cast to it gives."""
    spec = FORMATS[name]
    dtype: torch.dtype = getattr(torch, str(spec.torch_dtype))
    with running.backward():
        decoded = torch.arange(256, dtype=torch.int32).to(torch.uint8).to(subject.place).view(dtype).float().cpu().tolist()
    values = [spec.value(code) for code in range(256)]
    wrong = [code for code, value in enumerate(decoded) if value != values[code] and not (math.isnan(value) and math.isnan(values[code]))]
    if wrong:
        return fault(f"code {wrong[0]:#04x} is {decoded[wrong[0]]:g}, not {values[wrong[0]]:g}")
    generator = torch.Generator().manual_seed(SEED)
    random = torch.randn(RANDOM, generator=generator) * 2.0 ** torch.randint(-9, 6, (RANDOM,), generator=generator)
    middles = torch.tensor([(low + high) / 2 for low, high in itertools.pairwise(sorted({value for value in values if math.isfinite(value)}))])
    numbers = torch.cat((random, middles)).clamp(-spec.max, spec.max)
    with running.backward():
        found = numbers.to(subject.place).to(dtype).float().cpu().tolist()
    faults = [(value, got) for value, got in zip(numbers.tolist(), found, strict=True) if got != round_value(value, name)]
    return fault(f"{faults[0][0]:.9g} becomes {faults[0][1]:g}, not {round_value(faults[0][0], name):g}") if faults else fine()
