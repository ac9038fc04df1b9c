"""Memory and time against a ``torch.cuda`` that records how it is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mpbackend_cuda.meters import AllocatorMeter, EventClock


def test_memory_of_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[str, int]] = []

    def answer(name: str, value: int) -> Callable[[int], int]:
        def ask(index: int) -> int:
            called.append((name, index))
            return value

        return ask

    for name, value in (("memory_allocated", 7), ("max_memory_allocated", 9), ("reset_peak_memory_stats", 0)):
        monkeypatch.setattr(torch.cuda, name, answer(name, value))
    meter = AllocatorMeter(3)
    meter.reset_peak()
    reading = meter.read()
    assert (reading.allocated, reading.peak) == (7, 9)
    assert "allocator" in reading.basis
    assert called == [("reset_peak_memory_stats", 3), ("memory_allocated", 3), ("max_memory_allocated", 3)]


class Event:
    """An event that notes what happens to it."""

    log: list[str] = []  # noqa: RUF012 - one log for every event of a test

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: str) -> None:
        self.log.append(f"record on {stream}")

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def elapsed_time(self, end: Any) -> float:
        assert isinstance(end, Event)
        return 1.5


def test_a_mark_waits_for_nothing_and_the_reading_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: f"stream of {index}")
    Event.log.clear()
    clock = EventClock(2)
    start, end = clock.mark(), clock.mark()
    assert Event.log == ["record on stream of 2", "record on stream of 2"]
    assert clock.elapsed_ms(start, end) == 1.5
    assert Event.log[2:] == ["synchronize"]
