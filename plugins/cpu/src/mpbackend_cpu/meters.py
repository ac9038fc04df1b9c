"""Memory and time of the host."""

from __future__ import annotations

import time
from pathlib import Path

from mpbackend.backend import MemoryReading

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""Written to ``clear_refs``, resets the peak of the resident set: proc_pid_clear_refs(5)."""

BASIS = "process resident set"
SAMPLED = f"{BASIS}; peak of the samples taken"
UNREADABLE = f"{BASIS}; this system does not tell"


def resident(status: str, name: str) -> int | None:
    """Return a size in bytes from the text of ``/proc/self/status``, whose unit is KiB; None where it does not say."""
    for line in status.splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


class ResidentSetMeter:
    """Reads the resident set of this process: weights, activations, and everything else that the process holds.

    The peak is the kernel's own where it can be reset; else the largest of the readings since ``reset_peak``, and the basis says so.
    """

    def __init__(self) -> None:
        self._kernel_peak = False
        self._largest = 0
        self.reset_peak()

    def reset_peak(self) -> None:
        """Start a new peak. The kernel keeps one peak for the process, so this also restarts it for any other reader."""
        self._largest = 0
        try:
            CLEAR_REFS.write_text(RESET_PEAK, encoding="ascii")
            self._kernel_peak = True
        except OSError:
            self._kernel_peak = False

    def read(self) -> MemoryReading:
        """Return the resident set now and at its peak, bytes; None for both where the system has no ``/proc``."""
        try:
            status = STATUS.read_text(encoding="ascii", errors="replace")
        except OSError:
            status = ""
        allocated = resident(status, "VmRSS")
        if allocated is None:
            return MemoryReading(allocated=None, peak=None, basis=UNREADABLE)
        if self._kernel_peak:
            return MemoryReading(allocated=allocated, peak=resident(status, "VmHWM"), basis=BASIS)
        self._largest = max(allocated, self._largest)
        return MemoryReading(allocated=allocated, peak=self._largest, basis=SAMPLED)


class HostClock:
    """The monotonic clock of the host. A CPU has no queue, so a mark is the time itself."""

    def mark(self) -> float:
        """Return the present time, seconds."""
        return time.perf_counter()

    def elapsed_ms(self, start: float, end: float) -> float:
        """Return the milliseconds between two marks."""
        return (end - start) * 1e3
