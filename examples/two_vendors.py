"""One recipe on two emulated vendors: the same model, data and seed, and where the two runs part and why.

    python examples/two_vendors.py --recipe bf16 --steps 20

Nothing here needs either device. Each run trains on the CPU in the arithmetic of the device's matrix unit, as far as sources state it; the notes of the plans
say what is assumed and what is left to the host.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from mpbackend.examples import gpt  # type: ignore[import-not-found] # the name that this folder has once it is installed

import mpbackend
from mpbackend.observe.record import Recorded, from_number, load_record

DEVICES = ("emu:h100", "emu:ascend-910b3")
SMALL = gpt.Config(layers=2, heads=4, width=64, context=32, batch=8)


class Parting(NamedTuple):
    """Where two runs part.

    Attributes:
        step: first step whose losses differ, counted from 1; None when none does.
        first: loss of the first run at that step, or at the last.
        second: loss of the second run there.
        largest: largest difference of two losses over all steps.
    """

    step: int | None
    first: float
    second: float
    largest: float


def train(spec: str, recipe: str, steps: int, folder: Path, seed: int = 1, config: gpt.Config = SMALL) -> Recorded:
    """Train the example's model on one device and return its record."""
    target = mpbackend.select(spec)
    plan = target.plan(recipe)
    for _ in gpt.train(target, plan, str(folder), steps, seed, config):
        pass
    return load_record(folder)


def parting(first: Recorded, second: Recorded) -> Parting:
    """Return where the losses of two runs part."""
    losses = [[from_number(row.loss) for row in run.steps if row.loss is not None] for run in (first, second)]
    pairs = list(zip(*losses, strict=True))
    step = next((number for number, (a, b) in enumerate(pairs, 1) if a != b), None)
    a, b = pairs[(step or len(pairs)) - 1]
    return Parting(step, a, b, max(abs(a - b) for a, b in pairs))


def differences(first: Recorded, second: Recorded) -> Iterator[str]:
    """Yield in words what was planned otherwise: the decisions, then the switches, then what each plan notes about its sums and the other's does not."""
    names = [run.record.device.key for run in (first, second)]
    roles: dict[str, list[str]] = {}
    for left, right in zip(first.record.plan, second.record.plan, strict=True):
        role = f"{left.role} ({left.op})" if left.op not in ("", "matmul") else left.role
        if (left.granted, left.level) != (right.granted, right.level):
            roles.setdefault(f"{left.granted} ({left.level}) on {names[0]}, {right.granted} ({right.level}) on {names[1]}", []).append(role)
        elif left.reason != right.reason:
            roles.setdefault(f"{left.reason} on {names[0]}; {right.reason} on {names[1]}", []).append(role)
    yield from (f"{', '.join(same)}: {text}" for text, same in roles.items())
    for name, run, other in zip(names, (first, second), (second, first), strict=True):
        settings = {key: reading.set for key, reading in run.record.switches.items() if reading.set}
        own = sorted(f"{key}={value}" for key, value in settings.items() if key not in other.record.switches)
        if own:
            yield f"switches that only {name} has: {', '.join(own)}"
        yield from (f"{name}: {note}" for note in run.record.notes if note not in other.record.notes)


def describe(first: Recorded, second: Recorded) -> str:
    """Return the comparison as text."""
    names = [f"{run.record.device.key} ({run.record.run.kind})" for run in (first, second)]
    found = parting(first, second)
    same = first.record.fingerprints == second.record.fingerprints
    lines = [f"{first.record.recipe.text} on {names[0]} and on {names[1]}, {len(first.steps)} steps"]
    lines.append("the same weights at the start and the same data" if same else "the runs did NOT start from the same weights and data")
    if found.step is None:
        lines.append(f"no step's loss differs; the last is {found.first!r}")
    else:
        lines.append(f"the losses part at step {found.step}: {found.first!r} and {found.second!r}; the largest difference is {found.largest:.3g}")
    lines += ["", "what was planned otherwise:", *(f"- {text}" for text in differences(first, second))]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train on both devices and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--recipe", default="bf16", help="recipe to train under")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of each run")
    parser.add_argument("--devices", nargs=2, default=DEVICES, metavar="SPEC", help="the two devices")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        runs = [train(spec, chosen.recipe, chosen.steps, Path(folder, str(index))) for index, spec in enumerate(chosen.devices)]
    print(describe(runs[0], runs[1]))


if __name__ == "__main__":
    main()
