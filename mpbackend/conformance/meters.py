"""Checks of memory and time: a meter that is off by a unit, or a clock that runs backward, would show in every report."""

from __future__ import annotations

import gc
import time

import torch

from mpbackend.conformance.answer import Answer, fault, fine, skip
from mpbackend.conformance.subject import Subject

BYTES = 64 * 2**20
"""Large enough that no allocator serves it from what it holds."""

SLACK = BYTES // 8
"""What else a process may take or give back meanwhile."""

WORK = 512
"""Side of the matrices that the clock measures a product of."""


def check_memory_is_counted(subject: Subject) -> Answer:
    """A tensor of 64 MiB raises the allocated bytes by that, and freeing it lowers them; the peak keeps it until it is reset."""
    gc.collect()  # what earlier work left must not be freed in between
    meter = subject.backend.memory(subject.device)
    meter.reset_peak()
    before = meter.read()
    if not before.basis:
        return fault("the reading does not say what was measured")
    if before.allocated is None:
        return skip(f"the backend cannot tell: {before.basis}")
    tensor = torch.ones(BYTES // 4, device=subject.place)
    tensor.add_(1.0)
    during = meter.read()
    del tensor
    after = meter.read()
    meter.reset_peak()
    anew = meter.read()
    readings = {"before": before, "during": during, "after": after, "anew": anew}
    unknown = [name for name, reading in readings.items() if reading.allocated is None]
    if unknown:
        return fault(f"it can tell before and cannot {unknown[0]}")
    allocated = {name: int(reading.allocated or 0) for name, reading in readings.items()}
    grown = allocated["during"] - allocated["before"]
    if not abs(grown - BYTES) <= SLACK:
        return fault(f"a tensor of {BYTES} bytes raises the reading by {grown}")
    freed = allocated["during"] - allocated["after"]
    if not abs(freed - BYTES) <= SLACK:
        return fault(f"freeing {BYTES} bytes lowers the reading by {freed}")
    peaks = {name: reading.peak for name, reading in readings.items()}
    if peaks["after"] is None:
        return fine(basis=before.basis, grown=grown)
    if peaks["after"] < allocated["before"] + BYTES - SLACK:
        return fault(f"the peak is {peaks['after']} after {BYTES} bytes on top of {allocated['before']}")
    if peaks["anew"] is not None and peaks["anew"] > peaks["after"] - BYTES + SLACK:
        return fault(f"the peak is still {peaks['anew']} after it was reset")
    return fine(basis=before.basis, grown=grown)


def check_clock(subject: Subject) -> Answer:
    """Marks are in order, intervals add up, and a millisecond of the device's clock is one of the host's."""
    clock = subject.backend.clock(subject.device)
    a = torch.ones(WORK, WORK).to(subject.place)
    float((a @ a)[0, 0])  # what starts up at the first product is not part of the interval
    outer = time.perf_counter()
    first = clock.mark()
    inner = time.perf_counter()
    for _ in range(4):
        float((a @ a)[0, 0])  # waits for the device
    inner_ms = (time.perf_counter() - inner) * 1e3
    middle = clock.mark()
    float((a @ a)[0, 0])
    last = clock.mark()
    first_part, second_part, whole = (clock.elapsed_ms(start, end) for start, end in ((first, middle), (middle, last), (first, last)))
    outer_ms = (time.perf_counter() - outer) * 1e3
    if not first_part > 0 or not second_part > 0:
        return fault(f"the intervals are {first_part:g} and {second_part:g} ms")
    if not abs(first_part + second_part - whole) <= 0.01 * whole + 0.01:
        return fault(f"{first_part:g} and {second_part:g} ms are {whole:g} ms together")
    # The interval holds the work between two readings of the host's clock, and lies between two others.
    if not inner_ms / 2 <= first_part <= outer_ms * 1.01 + 0.1:
        return fault(f"an interval of {first_part:g} ms, which the host saw take between {inner_ms:g} and {outer_ms:g} ms")
    return fine()
