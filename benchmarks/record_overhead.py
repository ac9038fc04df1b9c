"""Time that a record takes of a training step: the session with its record against the session without, on a step of about 5 ms.

An MLP whose batch is chosen so that its step takes about 5 ms on one thread, AdamW, clipping to norm 1, bf16 autocast where the processor has it. Blocks of 100
steps, with their flushes and sampled observations, are interleaved in a shuffled order; the loop without a record stands twice to show the noise. The limit is
1 % of the step, by the medians of the blocks.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import mpbackend

WIDTH, STEPS, TARGET_MS, LIMIT = 256, 100, 5.0, 0.01
Loop = Callable[[], None]


def build(batch: int, record: Path | None, stack: ExitStack) -> Loop:
    """Return what trains a block of steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    x, y = torch.randn(batch, WIDTH), torch.randn(batch, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = stack.enter_context(mpbackend.select("cpu").prepare(model, optimizer, "bf16", clip_norm=1.0, record=record, on_unsupported="emulate"))

    def loop() -> None:
        for inputs, wanted in session.watch([(x, y)] * STEPS, resume=False):
            with session.autocast():
                loss = functional.mse_loss(model(inputs), wanted)
            session.backward(loss)
            session.step()

    return loop


def seconds(loop: Loop) -> float:
    """Return the seconds of a step of one block."""
    start = time.perf_counter()
    loop()
    return (time.perf_counter() - start) / STEPS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        trial = build(256, None, stack)
        trial()
        batch = max(1, round(256 * TARGET_MS / (seconds(trial) * 1e3)))
        loops = {
            "no record": build(batch, None, stack),
            "no record again": build(batch, None, stack),
            "record": build(batch, folder / "record", stack),
        }
        times: dict[str, list[float]] = {name: [] for name in loops}
        order, shuffle = list(loops), random.Random(0).shuffle
        for number in range(rounds + 1):
            shuffle(order)
            for name in order:
                taken = seconds(loops[name])
                if number:
                    times[name].append(taken)
    medians = {name: statistics.median(values) for name, values in times.items()}
    base = medians["no record"]
    print(f"batch {batch}, {rounds} rounds of {STEPS} steps, one thread")
    for name, median in medians.items():
        print(f"{name:<16} {median * 1e3:7.3f} ms a step  {100 * (median / base - 1):+6.2f} %")
    within = medians["record"] / base - 1 <= LIMIT
    print(f"within {LIMIT:.0%}" if within else f"BEYOND {LIMIT:.0%}")
    return 0 if within else 1


if __name__ == "__main__":
    raise SystemExit(main())
