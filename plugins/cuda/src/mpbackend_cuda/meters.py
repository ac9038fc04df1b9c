"""Memory and time of one GPU."""

from __future__ import annotations

from typing import Any

import torch

from mpbackend.backend import MemoryReading

BASIS = "torch's CUDA allocator: bytes of live tensors"


class AllocatorMeter:
    """Reads the bytes that torch's allocator has handed out on one GPU. Memory of the context, of libraries and of other processes is not in it.

    Args:
        index: index of the GPU.
    """

    def __init__(self, index: int) -> None:
        self._index = index

    def reset_peak(self) -> None:
        """Start a new peak; it is one for the process."""
        torch.cuda.reset_peak_memory_stats(self._index)

    def read(self) -> MemoryReading:
        """Return the bytes allocated now and at the peak. The host keeps count, so nothing is synchronized."""
        return MemoryReading(
            allocated=torch.cuda.memory_allocated(self._index),
            peak=torch.cuda.max_memory_allocated(self._index),
            basis=BASIS,
        )


class EventClock:
    """Measures with CUDA events on the present stream of one GPU.

    Args:
        index: index of the GPU.
    """

    def __init__(self, index: int) -> None:
        self._index = index

    def mark(self) -> Any:
        """Return an event at the present point of the stream; no synchronization."""
        event: Any = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._index))
        return event

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Return the milliseconds between two marks; waits for the later one."""
        end.synchronize()
        return float(start.elapsed_time(end))
