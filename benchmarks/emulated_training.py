"""Time of an emulated training step: the demo's GPT on emulated devices against its fp32 step on the CPU.

Every loop does the same work on the same data: autocast, forward, backward, clipping to norm 1, AdamW. Steps are interleaved in a shuffled order; the median
of each loop and its ratio to the plain fp32 step are printed, and that step stands twice to show the noise. Target: ``emu:h100`` under ``fp8`` takes at most 5
times as long as the fp32 step.

    python benchmarks/emulated_training.py --steps 15
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from itertools import cycle

import torch
from mpbackend.examples import gpt  # type: ignore[import-not-found] # the name that the examples have once they are installed
from torch.nn import functional

import mpbackend

LOOPS = (
    ("cpu", "fp32"),
    ("cpu", "fp32 "),
    ("emu:h100", "fp8"),
    ("emu:h100", "bf16"),
    ("emu:h100", "fp32"),
    ("emu:b200", "mxfp8"),
    ("emu:ascend-910b3", "bf16"),
    ("emu:ascend-950", "fp8"),
)
"""Devices and recipes; the blank makes the second plain step a loop of its own."""

Step = Callable[[], None]


def loop(spec: str, recipe: str, config: gpt.Config) -> Step:
    """Return one training step."""
    torch.manual_seed(1)
    target = mpbackend.select(spec)
    model = gpt.GPT(config)
    session = target.prepare(model, torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95)), recipe.strip(), clip_norm=1.0)
    data = cycle(list(gpt.batches(gpt.corpus(), config, 4, seed=1)))

    def step() -> None:
        inputs, wanted = next(data)
        with session.autocast():
            loss = functional.cross_entropy(model(inputs).flatten(0, 1), wanted.flatten())
        session.backward(loss)
        session.step()

    return step


def measure(loops: dict[tuple[str, str], Step], steps: int) -> dict[tuple[str, str], float]:
    """Return the median of each loop in milliseconds; the first step of each is a warm-up and not counted."""
    times: dict[tuple[str, str], list[float]] = {name: [] for name in loops}
    order = random.Random(0)
    for count in range(steps + 1):
        names = list(loops)
        order.shuffle(names)
        for name in names:
            start = time.perf_counter()
            loops[name]()
            if count:
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(series) for name, series in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    config = gpt.Config()
    print(f"{config}, {chosen.steps} steps, {chosen.threads} threads")
    medians = measure({name: loop(*name, config) for name in LOOPS}, chosen.steps)
    plain = medians[LOOPS[0]]
    for (spec, recipe), median in medians.items():
        print(f"{spec:<18} {recipe.strip():<6} {median:8.1f} ms  {median / plain:5.2f} x the fp32 step")


if __name__ == "__main__":
    main()
