"""Records of runs that nobody trained: every condition is set by name, so that a test plants exactly one difference."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import msgspec

from mpbackend.decisions import Decision
from mpbackend.device import Device
from mpbackend.observe.record import ClassReading, ComputeReading, Number, RecipeName, Recorded, Run, RunRecord, StepRow, SwitchReading
from mpbackend.observe.record_writer import count_totals

SETTINGS = {
    "clip_norm": "1",
    "clip_value": "none",
    "average": "true",
    "optimizers": "AdamW",
    "micro_batches": "1",
    "communication": "none, one process",
}


def rows(
    losses: Sequence[Number | None], *, ms: float = 10.0, lr: float = 1e-3, skipped: Sequence[int] = (), start: int = 1, **fields: Any
) -> tuple[StepRow, ...]:
    """Return steps with these losses; a skipped one did not step."""
    return tuple(
        StepRow(
            step=step,
            loss=loss,
            grad_norm=1.0,
            stepped=step not in skipped,
            lr=lr,
            ms=None if step == start else ms,
            samples=8,
            tokens=64,
            nonfinite=isinstance(loss, str),
            **fields,
        )
        for step, loss in enumerate(losses, start)
    )


def falling(steps: int = 400, *, end: float = 2.0, seed: int = 1, noise: float = 0.0) -> list[float]:
    """Return losses that fall to ``end``, with noise of a generator seeded by ``seed``."""
    generator = random.Random(seed)
    return [end + 2.0 * math.exp(-step / 40) + noise * generator.gauss(0, 1) for step in range(steps)]


def plan(compute: str = "fp32", conv: str = "", **granted: str) -> tuple[Decision, ...]:
    """Return the decisions about products; ``granted`` replaces what a role is granted, dots written as two underscores."""
    roles = [(f"compute.{name}", "matmul", compute) for name in ("forward", "dgrad", "wgrad")]
    roles += [("compute.forward", "conv", conv or compute), ("accumulate.forward", "matmul", "fp32"), ("params", "", "fp32"), ("loss_scale.mode", "", "none")]
    return tuple(
        Decision(
            role=role, op=op, asked=value, granted=granted.get(f"{role.replace('.', '__')}{'_conv' if op == 'conv' else ''}", value), level="native", reason=""
        )
        for role, op, value in roles
    )


def recorded(
    losses: Sequence[Number | None] | None = None,
    *,
    steps: tuple[StepRow, ...] | None = None,
    seed: int | None = 1,
    recipe: str = "fp32",
    device: str = "h100",
    arch: str = "sm_90",
    name: str = "",
    **changes: Any,
) -> Recorded:
    """Return a record; ``changes`` replace fields of the document."""
    steps = rows(falling() if losses is None else losses) if steps is None else steps
    record = RunRecord(
        run=Run(id=name or f"{recipe}-{device}-{seed}", seed=seed),
        environment={"torch": "2.13.0+x"},
        device=Device(key=device, arch=arch, name=device),
        recipe=RecipeName(text=recipe, hash=f"hash of {recipe}", granted=recipe),
        plan=plan(recipe if recipe in ("bf16", "fp16", "fp32") else "fp32"),
        switches={},
        classes={"parameters": ClassReading(asked="fp32", observed={"fp32": 4096})},
        compute=ComputeReading(shares={recipe: 1.0}, level="native"),
        settings=SETTINGS,
        fingerprints={"data": f"data of {seed}", "weights": f"weights of {seed}"},
        memory={"peak": 2**20},
        memory_basis="device allocator",
        totals=count_totals(steps),
    )
    return Recorded(msgspec.structs.replace(record, **changes), steps)


def switch(value: str, *, planned: str = "", before: str = "") -> SwitchReading:
    """Return a switch that stood at a value during the whole run."""
    return SwitchReading(before=before or value, set=planned, read_back=value, after=value)
