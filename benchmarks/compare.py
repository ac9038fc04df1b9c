"""Comparing two runs of 100,000 steps: wall-clock time and peak memory of `mpbackend compare`.

The records are written first, with losses that part after 1,000 steps and a validation metric every 500. The command runs in a fresh process, whose peak
resident set is read by its parent; a process that only starts stands beside it. Required: less than 5 s and less than 500 MiB.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mpbackend.decisions import Decision
from mpbackend.device import Device
from mpbackend.observe.record import RecipeName, Run, RunRecord, StepRow
from mpbackend.observe.record_writer import RecordWriter, count_totals

STEPS = 100_000
TIME_LIMIT_S = 5.0
MEMORY_LIMIT_MIB = 500.0
SETTINGS = {"clip_norm": "1", "clip_value": "none", "average": "true", "optimizers": "AdamW", "communication": "none, one process"}


def write_run(folder: Path, device: Device, parting: float) -> None:
    """Write a record whose losses lie ``parting`` above the common curve from step 1,000 on."""
    steps = [
        StepRow(
            step=step,
            loss=2 + 2 * math.exp(-step / 4000) + 0.01 * math.sin(step) + (parting if step > 1000 else 0.0),
            grad_norm=1 + 0.1 * math.cos(step),
            stepped=True,
            lr=1e-3 * (1 - step / (STEPS + 1)),
            ms=10.0 + step % 3,
            samples=8,
            tokens=4096,
            metrics={"val_loss": 2.1 + 2 / step + parting} if step % 500 == 0 else {},
        )
        for step in range(1, STEPS + 1)
    ]
    decisions = tuple(Decision(role=f"compute.{name}", op="matmul", asked="bf16", granted="bf16", level="native", reason="") for name in ("forward", "dgrad"))
    writer = RecordWriter(folder)
    writer.append(steps)
    record = RunRecord(
        run=Run(id=folder.name, seed=1),
        environment={"torch": "2.13.0"},
        device=device,
        recipe=RecipeName(text="bf16", hash="0", granted="bf16"),
        plan=decisions,
        settings=SETTINGS,
        fingerprints={"data": "d", "weights": "w"},
        totals=count_totals(steps),
    )
    writer.write(record)
    writer.close()


def measure(command: list[str]) -> tuple[float, float]:
    """Return seconds and peak resident set (MiB) of a command in a fresh process."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with status {process.returncode}")
    return time.perf_counter() - start, usage.ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def main() -> int:
    """Print time and memory; return 1 when a limit is passed."""
    with tempfile.TemporaryDirectory() as folder:
        first, second = Path(folder, "a"), Path(folder, "b")
        write_run(first, Device(key="one", arch="one", name="one"), 0.0)
        write_run(second, Device(key="two", arch="two", name="two"), 0.003)
        mpbackend = [sys.executable, "-m", "mpbackend.cli.main"]
        figures = {"python -m mpbackend.cli.main --help": measure([*mpbackend, "--help"])}
        for output in ("text", "json"):
            figures[f"compare two runs of {STEPS:,} steps, {output}"] = measure([*mpbackend, "compare", str(first), str(second), "--format", output])
    for name, (seconds, peak) in figures.items():
        print(f"{name:<46}{seconds:>8.2f} s{peak:>10.0f} MiB")
    seconds, peak = (max(figure[index] for figure in figures.values()) for index in (0, 1))
    holds = {f"time < {TIME_LIMIT_S:g} s": seconds < TIME_LIMIT_S, f"memory < {MEMORY_LIMIT_MIB:g} MiB": peak < MEMORY_LIMIT_MIB}
    for limit, kept in holds.items():
        print(f"{limit}: {'yes' if kept else 'NO'}")
    return 0 if all(holds.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
