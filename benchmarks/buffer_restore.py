"""What it costs that a skipped step puts buffers back: the copies at the start of every step, and the restore on a skip.

A network of 53 convolutions with BatchNorm, as many as a ResNet-50 has, at a width that makes a CPU step short, trained under dynamic loss scaling. The same
session with the guard and with a guard that watches nothing are interleaved; the second stands twice to show the noise.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

import mpbackend
from mpbackend.train.session import Session

LAYERS = 53


def build(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers)


def prepare(width: int, *, guarded: bool) -> tuple[nn.Sequential, Session]:
    model = build(width)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    session = mpbackend.select("cpu").prepare(model, optimizer, "fp32:loss_scale.mode=dynamic,loss_scale.init=1024")
    if not guarded and session._guard is not None:
        session._guard._budget = 0
        session._guard._always = set()
        session._guard._watched = []
        session._guard._learning = False
    return model, session


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--width", type=int, default=32)
    options = parser.parse_args()
    torch.set_num_threads(1)
    x = torch.randn(4, options.width, 8, 8)
    broken = x * float("inf")
    prepared = {name: prepare(options.width, guarded=name == "guarded") for name in ("without", "without again", "guarded")}

    def step(name: str, batch: torch.Tensor) -> Callable[[], None]:
        model, session = prepared[name]

        def run() -> None:
            with session.autocast():
                loss = functional.mse_loss(model(batch), x)
            session.backward(loss)
            session.step()

        return run

    rows = {name: step(name, x) for name in prepared}
    times: dict[str, list[float]] = {name: [] for name in rows}
    shuffle, order = random.Random(0).shuffle, list(rows)
    for number in range(options.rounds + 5):
        shuffle(order)
        for name in order:
            start = time.perf_counter()
            rows[name]()
            if number >= 5:
                times[name].append((time.perf_counter() - start) * 1e3)
    base = statistics.median(times["without"])
    held = sum(buffer.nbytes for buffer in prepared["guarded"][0].buffers())
    print(f"{LAYERS} BatchNorms, {held:,} B of buffers, {options.rounds} rounds\n{'session':<16} {'median ms':>10} {'ratio':>7}")
    for name, values in times.items():
        print(f"{name:<16} {statistics.median(values):>10.2f} {statistics.median(values) / base:>7.3f}")
    guard = prepared["guarded"][1]._guard
    if guard is not None:
        step("guarded", broken)()
        start = time.perf_counter()
        names = guard.restore()
        print(f"one restore of {len(names)} buffers: {(time.perf_counter() - start) * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
