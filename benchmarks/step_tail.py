"""The tail of a step, from gradients to updated weights: the session against what a training script writes around ``torch.amp.GradScaler``.

50 million parameters in 200 tensors under AdamW, dynamic loss scaling, clipping to norm 1 that is active in every step. Theirs: ``scaler.unscale_``,
``clip_grad_norm_``, ``scaler.step``, ``scaler.update``. Both work on the same kind of optimizer, foreach and fused, on gradients that are put there before the
clock starts; steps are interleaved in a shuffled order, and theirs stands twice to show the noise. ``norm + optimizer`` is the least that clipping can cost.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import mpbackend

TENSORS = 200
SCALE = 1024.0
Step = Callable[[], None]


class Weights(nn.Module):
    """Parameters and nothing else."""

    def __init__(self, total: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(total // TENSORS) * 0.02 for _ in range(TENSORS))


def build(total: int, kind: str) -> tuple[Weights, torch.optim.AdamW]:
    torch.manual_seed(0)
    model = Weights(total)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=kind == "fused", foreach=kind == "foreach")


def fill(model: Weights, gradients: list[torch.Tensor]) -> None:
    """Put gradients in place, scaled."""
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        if parameter.grad is None:
            parameter.grad = gradient * SCALE
        else:
            torch.mul(gradient, SCALE, out=parameter.grad)


def theirs(model: Weights, optimizer: torch.optim.Optimizer) -> Step:
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=10**9)
    scaler.scale(torch.zeros(()))

    def step() -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return step


def least(model: Weights, optimizer: torch.optim.Optimizer) -> Step:
    def step() -> None:
        nn.utils.get_total_norm([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
        optimizer.step()

    return step


def measure(kind: str, total: int, rounds: int) -> dict[str, float]:
    """Return the median milliseconds of each tail."""
    gradients = [torch.randn(total // TENSORS) for _ in range(TENSORS)]
    models = {name: build(total, kind) for name in ("GradScaler", "GradScaler again", "norm + optimizer", "mpbackend session")}
    steps: dict[str, Step] = {name: theirs(*models[name]) for name in ("GradScaler", "GradScaler again")}
    steps["norm + optimizer"] = least(*models["norm + optimizer"])
    model, optimizer = models["mpbackend session"]
    recipe = f"fp32:loss_scale.mode=dynamic,loss_scale.init={SCALE:g},loss_scale.interval=1000000000"
    times: dict[str, list[float]] = {name: [] for name in models}
    with mpbackend.select("cpu").prepare(model, optimizer, recipe, clip_norm=1.0) as session:
        anchor = model.weights[0]

        def mine() -> None:
            session.step()

        steps["mpbackend session"] = mine
        order = list(steps)
        shuffle = random.Random(0).shuffle
        for number in range(rounds + 2):
            shuffle(order)
            for name in order:
                if name == "mpbackend session":
                    session.backward((anchor[:1] * 0.0).sum())
                    session._marks.forget()  # the gradients below are not those of that backward pass
                fill(models[name][0], gradients)
                start = time.perf_counter()
                steps[name]()
                if number >= 2:
                    times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--parameters", type=int, default=50_000_000)
    options = parser.parse_args()
    for kind in ("foreach", "fused"):
        results = measure(kind, options.parameters, options.rounds)
        base = results["GradScaler"]
        print(f"\n{kind} AdamW, {options.parameters:,} parameters, {options.rounds} rounds\n{'tail':<20} {'median ms':>10} {'ratio':>7}")
        for name, median in results.items():
            print(f"{name:<20} {median:>10.1f} {median / base:>7.3f}")


if __name__ == "__main__":
    main()
