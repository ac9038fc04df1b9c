"""Memory and time of an NPU, from torch_npu's allocator and events."""

from __future__ import annotations

from typing import Any

from mpbackend.backend import MemoryReading
from mpbackend_ascend.npu import npu

BASIS = "torch_npu's caching allocator"


class AllocatorMeter:
    """Reads what torch_npu's allocator has given out: tensors, not the pools behind them and not what CANN holds.

    Args:
        index: index of the device.
    """

    def __init__(self, index: int) -> None:
        self._index = index

    def reset_peak(self) -> None:
        """Start a new peak. The allocator keeps one peak for the process, so this also restarts it for any other reader."""
        npu().reset_peak_memory_stats(self._index)

    def read(self) -> MemoryReading:
        """Return the allocated bytes now and at their peak; no synchronization."""
        device = npu()
        return MemoryReading(allocated=device.memory_allocated(self._index), peak=device.max_memory_allocated(self._index), basis=BASIS)


class EventClock:
    """Marks are events of the current stream of one device.

    Args:
        index: index of the device.
    """

    def __init__(self, index: int) -> None:
        self._index = index

    def mark(self) -> Any:
        """Return an event that was recorded now; no synchronization."""
        device = npu()
        event = device.Event(enable_timing=True)
        event.record(device.current_stream(self._index))
        return event

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Return the milliseconds between two marks; waits until the device has reached the later one."""
        end.synchronize()
        return float(start.elapsed_time(end))
