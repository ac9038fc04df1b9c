"""The records that a recipe is made of: one for each role that has members."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args, get_origin

import msgspec

PASSES = ("forward", "dgrad", "wgrad")
"""The three matrix products of a linear layer: output, gradient of the input, gradient of the weight."""

Granularity = Literal["none", "tensor", "row", "1x128", "128x128", "1x32", "1x16"]
MasterKind = Literal["none", "fp32", "kahan", "stochastic"]


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the records a recipe is made of: immutable, unknown fields refused."""


class Gemm(Part, frozen=True, kw_only=True):
    """One value for each of the three matrix products.

    As ``compute``: the format of the operand that the pass brings in (input, output gradient, output gradient); the other operand of a gradient pass
    keeps the format of the forward pass. As ``accumulate``: the format sums must effectively have, or ``fast`` for whatever the unit's own register keeps.
    """

    forward: str
    dgrad: str
    wgrad: str


class OptimizerState(Part, frozen=True, kw_only=True):
    """Formats of the optimizer's moments."""

    exp_avg: str = "fp32"
    exp_avg_sq: str = "fp32"


class Reduce(Part, frozen=True, kw_only=True):
    """Gradient reduction between ranks: format on the wire, and whether the division by the number of ranks comes before or after the sum."""

    format: str = "fp32"
    divide: Literal["before", "after"] = "before"


class LossScaling(Part, frozen=True, kw_only=True):
    """Loss scaling. All factors are powers of two, so that scaling and unscaling lose nothing.

    Attributes:
        mode: ``none``, ``static`` or ``dynamic``.
        init: scale at the start.
        growth: factor after ``interval`` steps without overflow, > 1.
        backoff: factor after an overflow, < 1.
        interval: steps without overflow before growth, >= 1.
        hysteresis: overflows before a backoff, >= 1.
        min: lower bound of the scale.
        max: upper bound of the scale.
        patience: skipped steps in a row before an error, >= 1; in the search for a first scale only those count that a smaller scale cannot cure.
    """

    mode: Literal["none", "static", "dynamic"] = "none"
    init: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    hysteresis: int = 1
    min: float = 1.0
    max: float = 16777216.0
    patience: int = 20


class TensorScaling(Part, frozen=True, kw_only=True):
    """Scaling of low-bit tensors.

    Attributes:
        mode: ``none``, ``current`` (amax of this tensor) or ``delayed`` (amax of a window of earlier steps).
        inputs: granularity of activations and gradients.
        weights: granularity of weights.
        format: format of a scale.
        history: steps in the window of delayed scaling.
        algorithm: how the window gives one amax.
        margin: power of two by which the scale stays below the largest representable value.
        keep: layers that are not converted: name patterns such as ``head|*.gate``.
    """

    mode: Literal["none", "current", "delayed"] = "none"
    inputs: Granularity = "none"
    weights: Granularity = "none"
    format: str = "fp32"
    history: int = 1024
    algorithm: Literal["max", "most_recent"] = "max"
    margin: int = 0
    keep: str = ""


def flatten(part: Part, prefix: str = "") -> dict[str, Any]:
    """Return the leaves of a record as dotted paths, the preset name left out."""
    leaves: dict[str, Any] = {}
    for name in part.__struct_fields__:
        value = getattr(part, name)
        if isinstance(value, Part):
            leaves |= flatten(value, f"{prefix}{name}.")
        elif name != "preset":
            leaves[prefix + name] = value
    return leaves


def words(kind: type[Part], prefix: str = "") -> dict[str, tuple[str, ...]]:
    """Return the values of every role that takes one of a few words, by dotted path."""
    found: dict[str, tuple[str, ...]] = {}
    for field in msgspec.structs.fields(kind):
        if get_origin(field.type) is Literal:
            found[prefix + field.name] = get_args(field.type)
        elif isinstance(field.type, type) and issubclass(field.type, Part):
            found |= words(field.type, f"{prefix}{field.name}.")
    return found


def power_of_two(value: float) -> bool:
    """Tell whether a positive finite value is a power of two."""
    return math.isfinite(value) and value > 0 and math.frexp(value)[0] == 0.5


def scale_within(low: float, high: float) -> Callable[[float], bool]:
    """Return a test for powers of two within bounds that are themselves allowed."""
    return lambda value: power_of_two(value) and low <= value <= high


def count_within(low: int, high: int) -> Callable[[float], bool]:
    """Return a test for whole numbers within bounds that are themselves allowed."""
    return lambda value: low <= value <= high


PATTERNS = re.compile(r"(?:[\w.*?\[\]!-]+(?:\|[\w.*?\[\]!-]+)*)?")
"""Name patterns joined by ``|``: no character that the text form of a recipe uses."""

RANGES: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "loss_scale.init": ("a power of two from loss_scale.min to loss_scale.max", power_of_two),
    "loss_scale.growth": ("a power of two from 2 to 2^126", scale_within(2.0, 2.0**126)),
    "loss_scale.backoff": ("a power of two from 2^-126 to 0.5", scale_within(2.0**-126, 0.5)),
    "loss_scale.min": ("a power of two from 2^-126 to 2^126", scale_within(2.0**-126, 2.0**126)),
    "loss_scale.max": ("a power of two from 2^-126 to 2^126", scale_within(2.0**-126, 2.0**126)),
    "loss_scale.interval": ("a whole number from 1 to 2^31 - 1", count_within(1, 2**31 - 1)),
    "loss_scale.hysteresis": ("a whole number from 1 to 2^31 - 1", count_within(1, 2**31 - 1)),
    "loss_scale.patience": ("a whole number from 1 to 2^31 - 1", count_within(1, 2**31 - 1)),
    "scaling.history": ("a whole number from 1 to 2^31 - 1", count_within(1, 2**31 - 1)),
    "scaling.margin": ("a whole number from 0 to 15", count_within(0, 15)),
    "scaling.keep": ("name patterns joined by | (head|*.gate); empty for none", lambda value: PATTERNS.fullmatch(value) is not None),
}
"""Ranges of numeric roles, and the form of name patterns.

Powers of two scale without rounding; within 2^-126 to 2^126 fp32 holds a scale and its inverse as normal numbers.
"""
