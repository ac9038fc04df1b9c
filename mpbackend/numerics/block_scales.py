"""Groups of a matrix that share a scale, and how each rule makes the scale from the group's largest magnitude (amax).

A rule gives two numbers. The *multiplier* is what the group's elements are multiplied by before they are rounded; the *scale* is what is stored beside them and
gives their values back. Transformer Engine calls them scale and scale_inv; in OCP Microscaling Formats (MX) v1.0 the scale is X. A group of zeros has
multiplier 1. A group that holds an infinity or NaN has the scale NaN, in every rule: then all of its values are NaN, as MX v1.0 has it, and nothing hides it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from mpbackend.errors import BackendError, UnknownNameError
from mpbackend.formats import FORMATS
from mpbackend.roles import Granularity

ScaleRule = Literal["fp32", "e8m0_floor", "e8m0_round_up", "ue4m3"]
"""``fp32``: ``amax / top``. ``e8m0_floor``: ``2^(floor(log2 amax) - emax)``, MX v1.0, 6.3: an amax whose fraction exceeds that of the largest value saturates.
``e8m0_round_up``: the smallest power of two that lets nothing saturate, as cuBLAS ("D block quantization"), Transformer Engine and torchao (RCEIL) make it.
``ue4m3``: a scale of 7 bits for each block under one fp32 scale of the tensor (NVFP4)."""

RULES: tuple[ScaleRule, ...] = ("fp32", "e8m0_floor", "e8m0_round_up", "ue4m3")
GRANULARITIES: tuple[Granularity, ...] = ("tensor", "row", "1x128", "128x128", "1x32", "1x16")
USUAL_RULE: dict[Granularity, ScaleRule] = {"1x32": "e8m0_round_up", "1x16": "ue4m3"}
"""The rule of a granularity where none is asked for: that of ``mpbackend.lowbit``; ``fp32`` for the others."""

FP32_MAX = FORMATS["fp32"].max
UE4M3_MAX = FORMATS["ue4m3"].max
E8M0 = FORMATS["e8m0"]
E8M0_NAN = 0xFF


class Scales(NamedTuple):
    """The scales of a matrix's groups.

    Attributes:
        multiplier: (groups of rows, groups of columns) fp32: what elements are multiplied by before rounding; 1 where the amax is 0 or not finite.
        scale: same shape, in float32, float8_e8m0fnu or float8_e4m3fn: what rounded elements are multiplied by; NaN for a group that is not finite.
        tensor_scale: () fp32: multiplies every scale too; None where the rule has one level.
    """

    multiplier: Tensor
    scale: Tensor
    tensor_scale: Tensor | None = None


def rule_for(granularity: Granularity, rule: ScaleRule | None) -> ScaleRule:
    """Return the rule that scales a granularity.

    Args:
        granularity: one of ``GRANULARITIES``.
        rule: None takes the usual one.

    Raises:
        UnknownNameError: no such granularity or rule.
        BackendError: ``ue4m3`` for groups other than 1x16.
    """
    if granularity not in GRANULARITIES:
        raise UnknownNameError("granularity of scales", granularity, GRANULARITIES, remedy="take one of these")
    rule = rule or USUAL_RULE.get(granularity, "fp32")
    if rule not in RULES:
        raise UnknownNameError("rule of scales", rule, RULES, remedy="take one of these")
    if rule == "ue4m3" and granularity != "1x16":
        raise BackendError("scales in ue4m3", found=f"groups of {granularity}", allowed=["1x16"], remedy="they belong to blocks of 16")
    return rule


def group_shape(granularity: Granularity, shape: torch.Size) -> tuple[int, int]:
    """Return rows and columns of a group, at least 1 each."""
    rows, columns = (max(1, size) for size in shape)
    if granularity == "tensor":
        return rows, columns
    if granularity == "row":
        return 1, columns
    high, _, wide = granularity.partition("x")
    return int(high), int(wide)


def tiled(x: Tensor, granularity: Granularity) -> Tensor:
    """Return a matrix as (groups of rows, rows of a group, groups of columns, columns of a group), with zeros where the last groups are not full."""
    high, wide = group_shape(granularity, x.shape)
    rows, columns = -(-x.shape[0] // high), -(-x.shape[1] // wide)
    if (rows * high, columns * wide) != tuple(x.shape):
        x = functional.pad(x, (0, columns * wide - x.shape[1], 0, rows * high - x.shape[0]))
    return x.reshape(rows, high, columns, wide)


def group_amax(x: Tensor, granularity: Granularity) -> Tensor:
    """Return the largest magnitude of each group.

    Args:
        x: (rows, K), any floating dtype. A group at the edge counts what it has.
        granularity: extent of a group.

    Returns:
        (groups of rows, groups of K) fp32; NaN where a group holds one; 0 for a matrix without elements.
    """
    if x.numel() == 0:
        high, wide = group_shape(granularity, x.shape)
        return torch.zeros(-(-x.shape[0] // high), -(-x.shape[1] // wide), device=x.device)
    if granularity == "tensor":
        low, top = torch.aminmax(x)
        return torch.maximum(-low, top).abs().float().reshape(1, 1)
    groups = tiled(x, granularity)
    # Two reductions read the matrix twice; magnitudes would be written too.
    return torch.maximum(-groups.amin((1, 3)), groups.amax((1, 3))).abs().float()


def scales_of(amax: Tensor, name: str, rule: ScaleRule, *, top: float | None = None, tensor_amax: Tensor | None = None) -> Scales:
    """Return the scales of groups.

    Args:
        amax: (groups of rows, groups of columns) fp32, not negative; NaN or infinite for a group that is not finite.
        name: element format.
        rule: how a scale is made.
        top: value that an amax is scaled to; None for the largest of the format. ``e8m0_floor`` has none but the format's largest exponent.
        tensor_amax: () fp32: for ``ue4m3`` what the scale of the tensor is made from; None for the largest finite amax.
    """
    largest = FORMATS[name].max if top is None else top
    if rule == "ue4m3":
        return two_level(amax, largest, tensor_amax)
    return free(amax, largest) if rule == "fp32" else powers_of_two(amax, largest, rule)


def usable(amax: Tensor) -> Tensor:
    """Return where an amax makes a scale: positive and finite."""
    return (amax > 0) & amax.isfinite()


def free(amax: Tensor, top: float) -> Scales:
    """Return fp32 scales: multiplier ``top / amax`` in fp32, at most the largest fp32 number, and its rounded reciprocal, as ``mpbackend.lowbit`` says."""
    # A plain number divided by a tensor would be the number times a rounded reciprocal.
    multiplier = torch.where(usable(amax), (torch.full_like(amax, top) / amax).clamp_(max=FP32_MAX), 1.0)
    return Scales(multiplier, torch.where(amax.isfinite(), multiplier.reciprocal(), torch.nan))


def powers_of_two(amax: Tensor, top: float, rule: ScaleRule) -> Scales:
    """Return e8m0 scales; the exponent is limited to -127..127, and a group of zeros has exponent 0.

    Exponents are read from the bits of float64, in which every fp32 number is normal: those of ``amax`` less those of ``top``, and one more for a fraction that
    is larger, which carries when all ones are added below.
    """
    fraction = FORMATS["fp64"].mantissa_bits
    bits = torch.where(usable(amax), amax, top).double().view(torch.int64)
    of_top = torch.tensor(top, dtype=torch.float64).view(torch.int64).item()
    if rule == "e8m0_floor":
        exponent = (bits >> fraction) - (int(of_top) >> fraction)
    else:
        exponent = bits - int(of_top) + (1 << fraction) - 1 >> fraction
    exponent = exponent.where(usable(amax), 0).clamp_(-E8M0.bias, E8M0.bias)
    codes = torch.where(amax.isfinite(), exponent + E8M0.bias, E8M0_NAN).to(torch.uint8)
    # The pattern of 2^-exponent; 2^-127 is subnormal.
    multiplier = ((127 - exponent) << 23).clamp_(min=1 << 22).to(torch.int32).view(torch.float32)
    return Scales(multiplier, codes.view(torch.float8_e8m0fnu))


def two_level(amax: Tensor, top: float, tensor_amax: Tensor | None) -> Scales:
    """Return NVFP4 scales (arXiv 2509.25149; torchao, nvfp4_tensor.py; the order of operations is that of ``mpbackend.lowbit``).

    The tensor's scale is ``amax(tensor) / (448 * top)``. A block stores ``d = amax(block) / top`` in units of it, rounded to nearest even in ue4m3, and its
    elements are multiplied by ``(448 * top / amax(tensor)) / d``. A block that is so much smaller than the tensor that d is 0 becomes zero.
    """
    finite = torch.where(amax.isfinite(), amax, 0.0)
    if tensor_amax is None:
        tensor_amax = finite.amax() if finite.numel() else finite.new_zeros(())
    largest = tensor_amax.reshape(())
    present = usable(largest)
    encode = torch.where(present, (torch.full_like(largest, UE4M3_MAX * top) / largest).clamp(max=FP32_MAX), 1.0)
    stored = (finite / torch.full_like(largest, top) * encode).clamp_(max=UE4M3_MAX).to(torch.float8_e4m3fn)
    multiplier = (encode / stored.float()).clamp_(max=FP32_MAX)
    multiplier = multiplier.where(usable(amax), 1.0)
    scale = stored.float().where(amax.isfinite(), torch.nan).to(torch.float8_e4m3fn)
    return Scales(multiplier, scale, torch.where(present, largest / torch.full_like(largest, UE4M3_MAX * top), 1.0))
