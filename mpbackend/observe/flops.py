"""Which operations multiply matrices, with which operands, and how many floating-point operations that takes.

A multiply-add counts as two. The counts are those of ``torch.utils.flop_counter`` except where its formula is wrong or missing, which is said here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from mpbackend.observe.memory import dtype_name

Formula = Callable[[Sequence[Any], Mapping[str, Any], Any], int]
"""From the arguments, keyword arguments and result of a call to its floating-point operations."""

PRODUCTS: Mapping[str, tuple[int, int]] = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot", "_int_mm", "_scaled_mm", "_scaled_mm_v2", "_grouped_mm", "_scaled_grouped_mm"), (0, 1)),
    **dict.fromkeys(("addmm", "baddbmm", "addmv", "addbmm", "_addmm_activation"), (1, 2)),
}
"""Matrix products of aten, and the positions of their two operands."""

SAME_FLOPS: Mapping[str, str] = {
    "_scaled_dot_product_flash_attention_for_cpu": "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_fused_attention_overrideable": "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_fused_attention_overrideable_backward": "_scaled_dot_product_flash_attention_backward",
}
"""Operations that ``torch.utils.flop_counter`` has no formula for, and the one whose formula holds: the leading arguments are the same."""

CONVOLUTIONS = ("convolution", "convolution_overrideable")

HIDES_PRODUCTS = re.compile(r"attention|convolution|matmul|gemm|_rnn|(^|_)mm(_|$)|^(?!.*upsample).*linear")
"""Names of operations that multiply matrices; those without a formula are listed as uncounted instead of being left out in silence."""


class Operation:
    """What is known about an operation before it is called.

    Args:
        func: an ``OpOverload`` or a ``HigherOrderOperator``.

    Attributes:
        name: with its namespace, without its overload: ``aten::mm``.
        base: without the namespace.
        ignored: computes nothing: a view, a question about a tensor, a mark of the profiler.
        composite: is made of others, which are to be looked at instead; such operations arrive whole in inference mode only.
        operands: positions of the tensors that are multiplied.
        flops: formula, or None.
        hides_products: multiplies matrices, going by its name, but has no formula.
    """

    def __init__(self, func: Any) -> None:
        overload = isinstance(func, torch._ops.OpOverload)
        self.name: str = func.name().partition(".")[0]
        self.base = self.name.rpartition("::")[2]
        self.ignored = overload and (func.is_view or func.namespace in ("prim", "profiler"))
        self.operands, self.flops = find_formula(self.base, func.overloadpacket if overload else func, aten=overload and func.namespace == "aten")
        self.composite = overload and self.flops is None and is_composite(func)
        self.hides_products = self.flops is None and HIDES_PRODUCTS.search(self.base) is not None


def is_composite(func: torch._ops.OpOverload) -> bool:
    """Tell whether an operation is made of others; False for those of TorchScript, which the dispatcher does not know."""
    try:
        return bool(func._can_decompose())
    except RuntimeError:
        return False


def find_formula(base: str, packet: Any, *, aten: bool) -> tuple[tuple[int, ...], Formula | None]:
    """Return the positions of the operands and the formula of an operation; ``((), None)`` when there is none."""
    if aten and base in PRODUCTS:
        first, second = PRODUCTS[base]
        return (first, second), lambda args, _, __: product_flops(args[first], args[second])
    if aten and base == "matmul":
        return (0, 1), lambda args, _, out: 2 * out.numel() * args[0].shape[-1]
    if aten and base == "matmul_backward":
        return (0, 1, 2), lambda args, _, __: 2 * args[0].numel() * args[1].shape[-1] * (bool(args[3][0]) + bool(args[3][1]))
    if aten and base in CONVOLUTIONS:
        return (0, 1), lambda args, _, out: convolution_flops(args[0], args[1], out, transposed=args[6])
    if aten and base == "convolution_backward":
        return (0, 1, 2), convolution_backward_flops
    known = flop_registry.get(getattr(torch.ops.aten, SAME_FLOPS[base]) if aten and base in SAME_FLOPS else packet)
    if known is None:
        return (), None
    count = 2 + base.endswith("_backward") + ("attention" in base)
    return tuple(range(count)), lambda args, kwargs, out: int(known(*args, **kwargs, out_val=out))


def product_flops(a: torch.Tensor, b: torch.Tensor) -> int:
    """Return the operations of a matrix product: ``2 * M * N * K``, times the batch.

    Args:
        a: (..., M, K); or (G, M, K) against (K, N) whose columns belong to G groups.
        b: (..., K, N), or (K,).
    """
    columns = b.shape[-1] if b.dim() > 1 else 1
    groups = a.shape[0] if a.dim() == 3 and b.dim() == 2 else 1
    packed = 2 if dtype_name(a.dtype) == "fp4_e2m1" else 1  # an element of that dtype holds two numbers
    return 2 * a.numel() * columns * packed // max(groups, 1)


def convolution_flops(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, transposed: bool) -> int:
    """Return ``2 * batch * positions * elements of the weight``; positions are those of the output, of the input when transposed."""
    return 2 * x.shape[0] * math.prod((x if transposed else out).shape[2:]) * weight.numel()


def convolution_backward_flops(args: Sequence[Any], _: Mapping[str, Any], __: Any) -> int:
    """Return the operations of the gradients that are asked for: those of input and weight each take as many as the forward pass.

    The formula of ``torch.utils.flop_counter`` does not divide by the groups in the weight's gradient, and so counts a depthwise one ``groups`` times.
    """
    grad, x, weight, transposed, wanted = args[0], args[1], args[2], args[7], args[10]
    return convolution_flops(x, weight, grad, transposed=transposed) * (bool(wanted[0]) + bool(wanted[1]))
