"""Overhead of a training step: the session against a raw torch loop, Accelerate and Lightning Fabric.

A tiny MLP (three linears, batch 32, width 64, SGD, bf16 autocast) on one thread, so that the layer on top is what is measured. Every loop does the same work
with the same data. Rounds of five steps are interleaved in a shuffled order; the median and the mean over rounds are printed, and the raw loop stands twice
to show the noise.

(a) autocast, forward, backward, step. (b) the same with clipping to norm 1 and the loss recorded every step.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import mpbackend

WIDTH, BATCH, STEPS = 64, 32, 5
Loop = Callable[[], None]


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


X = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1))
Y = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(2))


def raw(*, clip: bool) -> Iterator[Loop]:
    """Torch by hand."""
    model, optimizer = build()
    losses: list[float] = []

    def loop() -> None:
        for _ in range(STEPS):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = functional.mse_loss(model(X), Y)
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()

    yield loop


def session(*, clip: bool) -> Iterator[Loop]:
    """The session of mpbackend; with ``clip`` it also writes its record."""
    model, optimizer = build()
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record" if clip else None
        target = mpbackend.select("cpu")
        with target.prepare(model, optimizer, "bf16", clip_norm=1.0 if clip else None, record=record, on_unsupported="emulate") as run:

            def loop() -> None:
                for _ in range(STEPS):
                    with run.autocast():
                        loss = functional.mse_loss(model(X), Y)
                    run.backward(loss)
                    run.step()

            yield loop


def accelerate(*, clip: bool) -> Iterator[Loop]:
    """Hugging Face Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model, optimizer = accelerator.prepare(*build())
    losses: list[float] = []

    def loop() -> None:
        for _ in range(STEPS):
            with accelerator.accumulate(model):
                with accelerator.autocast():
                    loss = functional.mse_loss(model(X), Y)
                accelerator.backward(loss)
                if clip:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    losses.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()

    yield loop


def fabric(*, clip: bool) -> Iterator[Loop]:
    """Lightning Fabric."""
    from lightning_fabric import Fabric

    layer = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    model, optimizer = layer.setup(*build())
    losses: list[float] = []

    def loop() -> None:
        for _ in range(STEPS):
            with layer.autocast():
                loss = functional.mse_loss(model(X), Y)
            layer.backward(loss)
            if clip:
                layer.clip_gradients(model, optimizer, max_norm=1.0)
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()

    yield loop


ROWS: dict[str, Callable[..., Iterator[Loop]]] = {
    "raw torch": raw,
    "raw torch again": raw,
    "mpbackend session": session,
    "accelerate": accelerate,
    "lightning fabric": fabric,
}


def measure(rounds: int, *, clip: bool) -> dict[str, tuple[float, float]]:
    """Return median and mean microseconds a step for every row that is installed."""
    generators: dict[str, Iterator[Loop]] = {}
    loops: dict[str, Loop] = {}
    for name, make in ROWS.items():
        try:
            generators[name] = make(clip=clip)
            loops[name] = next(generators[name])
        except ImportError as error:
            print(f"  left out: {name} ({error})")
    times: dict[str, list[float]] = {name: [] for name in loops}
    order = list(loops)
    shuffle = random.Random(0).shuffle
    for number in range(rounds + 10):
        shuffle(order)
        for name in order:
            start = time.perf_counter()
            loops[name]()
            if number >= 10:
                times[name].append((time.perf_counter() - start) / STEPS * 1e6)
    for generator in generators.values():
        for _ in generator:
            pass
    return {name: (statistics.median(values), statistics.fmean(values)) for name, values in times.items()}


def show(title: str, results: dict[str, tuple[float, float]]) -> None:
    """Print one table."""
    base = results["raw torch"][0]
    print(f"\n{title}\n{'loop':<20} {'median us':>10} {'mean us':>10} {'over raw us':>12} {'ratio':>7}")
    for name, (median, mean) in results.items():
        print(f"{name:<20} {median:>10.1f} {mean:>10.1f} {median - base:>+12.1f} {median / base:>7.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    for letter, clip in (("a", False), ("b", True)):
        title = "clip + record" if clip else "no clip, no record"
        results = measure(rounds, clip=clip)
        show(f"({letter}) {title}: {rounds} rounds of {STEPS} steps", results)


if __name__ == "__main__":
    main()
