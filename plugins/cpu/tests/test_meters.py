"""Memory and time of the host."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mpbackend_cpu import meters
from mpbackend_cpu.meters import HostClock, ResidentSetMeter

MIB = 1024 * 1024


@pytest.mark.skipif(not meters.CLEAR_REFS.exists(), reason="needs Linux's /proc")
def test_the_peak_remembers_what_was_freed_until_it_is_reset() -> None:
    meter = ResidentSetMeter()
    start = meter.read()
    assert start.allocated is not None
    block = torch.ones(64 * MIB, dtype=torch.uint8)
    held = meter.read()
    assert held.allocated is not None
    assert held.allocated - start.allocated > 60 * MIB
    del block
    after = meter.read()
    assert after.basis == "process resident set"
    assert after.allocated is not None
    assert after.peak is not None
    assert after.allocated < held.allocated - 60 * MIB, "64 MiB is above the allocator's threshold for returning memory at once"
    assert after.peak >= held.allocated - MIB
    meter.reset_peak()
    fresh = meter.read()
    assert fresh.peak is not None
    assert fresh.peak < held.allocated - 50 * MIB


def test_without_permission_the_peak_is_of_the_samples_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = tmp_path / "status"
    monkeypatch.setattr(meters, "CLEAR_REFS", tmp_path)
    monkeypatch.setattr(meters, "STATUS", status)
    meter = ResidentSetMeter()
    for kib in (1000, 3000, 2000):
        status.write_text(f"VmHWM:\t    9999 kB\nVmRSS:\t    {kib} kB\n", encoding="ascii")
        reading = meter.read()
    assert (reading.allocated, reading.peak) == (2000 * 1024, 3000 * 1024)
    assert reading.basis == "process resident set; peak of the samples taken"
    meter.reset_peak()
    assert meter.read().peak == 2000 * 1024


def test_without_proc_nothing_is_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meters, "CLEAR_REFS", tmp_path)
    monkeypatch.setattr(meters, "STATUS", tmp_path / "none")
    reading = ResidentSetMeter().read()
    assert (reading.allocated, reading.peak) == (None, None)
    assert "does not tell" in reading.basis


def test_clock_is_monotonic_and_in_milliseconds() -> None:
    clock = HostClock()
    start = clock.mark()
    assert clock.mark() >= start
    assert clock.elapsed_ms(1.5, 1.75) == 250.0
