"""The global settings of torch that change the arithmetic on a CPU."""

from __future__ import annotations

from typing import Any

import torch

from mpbackend.backend import Switch
from mpbackend.train.switches import DETERMINISTIC

PRECISIONS = ("none", "ieee", "tf32", "bf16")
"""What torch 2.9 and later take. ``none`` inherits the setting of all of oneDNN, then of all of torch, and fp32 where those are ``none`` too."""

BOOLEANS = ("false", "true")

SUBNORMAL = 2.0**-130
"""A subnormal of fp32, whose smallest normal is 2**-126."""


def switches() -> list[Switch]:
    """Return every switch. A precision setting reads as what is in effect, so one that is inherited reads as what it inherits."""
    return [
        precision("matmul", "fp32 matrix products of oneDNN"),
        precision("conv", "fp32 convolutions of oneDNN"),
        precision("rnn", "fp32 recurrent layers of oneDNN"),
        Switch(
            name="flush_denormal",
            get=lambda: boolean(flushes_denormals()),
            set=lambda value: ignore(torch.set_flush_denormal(value == "true")),
            allowed=BOOLEANS,
            meaning="subnormal operands and results become zero on the thread that sets it",
        ),
        DETERMINISTIC,
        Switch(
            name="mkldnn.enabled",
            get=lambda: boolean(mkldnn().enabled),
            set=lambda value: setattr(mkldnn(), "enabled", value == "true"),
            allowed=BOOLEANS,
            meaning="torch hands operators to oneDNN; without it bf16 runs in torch's own loops",
        ),
    ]


def mkldnn() -> Any:
    """Return torch's module of oneDNN settings, whose attributes are properties that type checkers do not see."""
    return torch.backends.mkldnn


def precision(op: str, meaning: str) -> Switch:
    """Return the switch of the precision that oneDNN may use inside an fp32 operation."""
    setting = getattr(mkldnn(), op)
    return Switch(
        name=f"{op}.fp32_precision",
        get=lambda: str(setting.fp32_precision),
        set=lambda value: setattr(setting, "fp32_precision", value),
        allowed=PRECISIONS,
        meaning=meaning,
    )


def flushes_denormals() -> bool:
    """Tell whether this thread flushes subnormals; measured, since torch has no getter."""
    return bool((torch.full((1,), SUBNORMAL, dtype=torch.float32) * 1.0).item() == 0.0)


def boolean(value: bool) -> str:
    """Return ``true`` or ``false``."""
    return BOOLEANS[value]


def ignore(_result: object) -> None:
    """Drop a result: the fence reads every setting back."""
