"""Low-bit linear layers on an Ascend 950: operands scaled as the recipe means, cast by the device, multiplied by its quantized product.

Scales are made by the core's own rules, so that they are those of every other lowering; torch_npu's fused quantizers are not used, because their pages do
not say what an amax of zero gives, and they take 16-bit tensors only. torch's own cast is not used either: torch_npu moves casts to fp8 to the host.

Source of shapes, scales and pairings: Ascend/op-plugin, docs/context/torch_npu-npu_quant_matmul.md, tables 3 to 8.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mpbackend.errors import BackendError
from mpbackend.lowbit import LowBit, Operand, Product, is_low_bit_recipe, low_bit
from mpbackend.planning import Plan
from mpbackend.train.conversion import check_plain, convert_linears
from mpbackend.train.quantize import Quantized, Stored, group_amax, saturate_, scale_of, spread
from mpbackend.train.reference import LowBitLinear
from mpbackend_ascend.npu import torch_npu

OPERATOR = "torch_npu.npu_quant_matmul"

NAMES = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "hif8": "hifloat8"}
"""Formats to torch_npu's names of them; what a name holds is a number."""
E8M0 = "float8_e8m0fnu"
HIF8 = "hif8"

MX = "1x32"
ANY = ("tensor", "row")
GROUPS: Mapping[tuple[str, str], list[int]] = {("1x128", "128x128"): [1, 128, 128], ("128x128", "128x128"): [128, 128, 128], (MX, MX): [1, 1, 32]}
"""Granularities of both operands to the extent of a scale along (m, n, k). Pairs of ``tensor`` and ``row`` need none."""

EXPONENT_SHIFT = 23
EXPONENT_MASK = 0xFF
MX_PAIR = 2
"""Scales of microscaling are stored in pairs along the summed dimension."""


def convert(model: nn.Module, plan: Plan) -> Sequence[Mapping[str, str]]:
    """Make the linear layers of a model low-bit where the plan is; see ``convert_linears``.

    Raises:
        BackendError: the operator does not pair the recipe's operands, no layer can be converted, or the plan is not low-bit and layers of an earlier recipe
            are.
    """
    if not is_low_bit_recipe(plan.effective):
        check_plain(model)
        return []
    meaning = low_bit(plan.effective)
    found = misfit(meaning)
    if found:
        remedy = (
            "scaling.inputs=128x128 pairs in all three products" if "1x128" in found else "`mpbackend matrix --device ascend-950 --op matmul` shows what it has"
        )
        raise BackendError(f"{plan.granted} on {plan.device.key}", found=found, remedy=remedy)
    return convert_linears(model, lambda name, linear: AscendLinear.from_linear(linear, meaning), meaning, by=OPERATOR)


def misfit(meaning: LowBit) -> str:
    """Return what in a recipe the operator does not multiply; empty when it multiplies all three products."""
    products = {"output": meaning.forward, "input's gradient": meaning.dgrad, "weight's gradient": meaning.wgrad}
    for name, product in products.items():
        reason = product_misfit(product, meaning)
        if reason:
            return f"the product of the {name}: {reason}"
    return ""


def product_misfit(product: Product, meaning: LowBit) -> str:
    """Return why the operator does not run one product; empty when it does."""
    operands = (product.a, product.b)
    pair = (product.a.granularity, product.b.granularity)
    unknown = [operand.format for operand in operands if operand.format not in NAMES]
    if unknown:
        return f"{OPERATOR} has no operand in {unknown[0]}"
    if (product.a.format == HIF8) != (product.b.format == HIF8):
        return f"{OPERATOR} does not pair {product.a.format} with {product.b.format}"
    if pair not in GROUPS and not set(pair) <= set(ANY):
        return f"{OPERATOR} does not pair scales per {pair[0]} with scales per {pair[1]}"
    if MX in pair and (product.a.format == HIF8 or meaning.scale_format != "e8m0"):
        return f"{OPERATOR} takes blocks of 32 in fp8 with e8m0 scales only"
    return ""


def quantize(tensor: Tensor, operand: Operand, low_bit: LowBit, amax: Tensor | None = None) -> Quantized:
    """Quantize a matrix as one operand of a product, as ``mpbackend.train.quantize.quantize`` does, the cast being the device's.

    Args:
        tensor: (rows, K), any floating dtype; K is the dimension that the product sums over.
        operand: format and granularity.
        low_bit: the rules of scales.
        amax: scalar that a delayed scale is made from, 0 for none; None takes the tensor's own.
    """
    groups = group_amax(tensor, operand.granularity)
    scale = scale_of(groups if amax is None else amax.reshape(1, 1), operand.top, low_bit)
    inverse = torch.where(groups.isfinite(), scale.reciprocal(), math.nan)
    values = saturate_(tensor * spread(scale, tensor.shape, operand.granularity), operand.format)
    library = torch_npu()
    elements = library.npu_dtype_cast(values, getattr(library, NAMES[operand.format]))
    return Quantized(stored=elements, inverse=inverse, format=operand.format, granularity=operand.granularity, scale=scale, amax=groups)


def multiply(a: Stored, b: Stored, output: torch.dtype) -> Tensor:
    """Return ``a @ b^T``, summed in fp32 and rounded once to ``output``.

    Args:
        a: (M, K).
        b: (N, K).
        output: fp32, bf16 or fp16.
    """
    library = torch_npu()
    pair = (a.granularity, b.granularity)
    options: dict[str, Any] = {"output_dtype": output}
    if a.format == HIF8:
        options |= {"x1_dtype": library.hifloat8, "x2_dtype": library.hifloat8}
    if pair in GROUPS:
        options["group_sizes"] = GROUPS[pair]
    if a.granularity == MX:
        scale_type = getattr(library, E8M0)
        options |= {"scale_dtype": scale_type, "pertoken_scale_dtype": scale_type}
        left, right = exponents(a.inverse), exponents(b.inverse).transpose(0, 1)
    elif pair in GROUPS:
        left, right = a.inverse, b.inverse.t()
    else:
        left, right = a.inverse.reshape(-1), b.inverse.reshape(-1)
    product: Tensor = library.npu_quant_matmul(a.stored, b.stored.t(), right, pertoken_scale=left, **options)
    return product


def exponents(inverse: Tensor) -> Tensor:
    """Return e8m0 codes of powers of two: the exponent field of fp32, whose bias is that of e8m0; NaN keeps its code.

    Args:
        inverse: (rows, groups) fp32.

    Returns:
        uint8 (rows, half the groups rounded up, 2), a scale of 2^-127 where a pair has no second group.
    """
    codes = ((inverse.contiguous().view(torch.int32) >> EXPONENT_SHIFT) & EXPONENT_MASK).to(torch.uint8)
    padded = nn.functional.pad(codes, (0, codes.shape[1] % MX_PAIR))
    return padded.reshape(codes.shape[0], -1, MX_PAIR)


class AscendLinear(LowBitLinear):
    """A linear layer whose casts and products are the device's; parameters, windows and the order of things are those of the core's layer."""

    def quantize(self, tensor: Tensor, operand: Operand, amax: Tensor | None) -> Quantized:
        """Quantize a matrix with the device's cast; see ``quantize``."""
        return quantize(tensor, operand, self.low_bit, amax)

    def multiply(self, a: Stored, b: Stored, output: torch.dtype) -> Tensor:
        """Multiply with the device's quantized operator; see ``multiply``."""
        return multiply(a, b, output)
