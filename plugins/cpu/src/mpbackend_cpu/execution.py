"""fp16 matrix products on a CPU: operands in fp16, sums in fp32, each result rounded once to fp16.

torch's own fp16 loops take the same operands, but run 16 to 183 times as long as the fp32 product of the same size, and some of them (addbmm, transposed
convolution, conv_tbc) round partial sums to fp16. Here the product runs in fp32 and only its result is rounded. Attention rounds its result alike: its
probabilities stay in fp32, where a device with fp16 matrix units would round them too.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mpbackend.granting import EXPOSING
from mpbackend.planning import Plan

aten = torch.ops.aten


class Product(NamedTuple):
    """A matrix product: how many leading arguments are its operands, and how many leading results have their format."""

    operands: int
    results: int = 1


PRODUCTS: Mapping[Any, Product] = {
    aten.mm.default: Product(2),
    aten.bmm.default: Product(2),
    aten.mv.default: Product(2),
    aten.dot.default: Product(2),
    aten.vdot.default: Product(2),
    aten.addmm.default: Product(3),
    aten._addmm_activation.default: Product(3),
    aten.addbmm.default: Product(3),
    aten.baddbmm.default: Product(3),
    aten.addmv.default: Product(3),
    aten.linear.default: Product(3),
    aten.conv_tbc.default: Product(3),
    aten.convolution.default: Product(3),
    aten.convolution_backward.default: Product(3, 3),
    aten._scaled_dot_product_flash_attention_for_cpu.default: Product(3),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: Product(5, 3),
}
"""The products below autograd, as they reach a dispatch mode. Every other operator is left to torch, and the ``out=`` variants of these too."""

IN_PLACE: Mapping[Any, Any] = {
    aten.addmm_.default: aten.addmm.default,
    aten.addbmm_.default: aten.addbmm.default,
    aten.baddbmm_.default: aten.baddbmm.default,
    aten.addmv_.default: aten.addmv.default,
}
"""In-place products to what computes their result."""


def is_half(value: Any) -> bool:
    """Tell whether an argument is an fp16 tensor in main memory."""
    return isinstance(value, torch.Tensor) and value.dtype is torch.float16 and value.is_cpu


def widen(value: Any) -> Any:
    """Return an fp16 tensor in fp32, which is exact; anything else as it is."""
    return value.float() if is_half(value) else value


def narrow(value: Any) -> Any:
    """Return an fp32 tensor rounded to fp16, to nearest even, overflow to inf; anything else (a gradient that is not asked for) as it is."""
    return value.half() if isinstance(value, torch.Tensor) and value.dtype is torch.float32 else value


class HalfProducts(TorchDispatchMode):
    """While entered, computes the matrix products of fp16 tensors in fp32 and rounds their results. Covers backward passes of the thread that enters it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        product = PRODUCTS.get(func)
        if product is None and func not in IN_PLACE:
            return func(*args, **kwargs) if kwargs else func(*args)
        return round_around(func, args, kwargs or {})


def round_around(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run one product in fp32 and round its results. One that is not all fp16 runs as it is: torch refuses mixed operands, and so must this.

    Args:
        func: a key of ``PRODUCTS`` or ``IN_PLACE``.
        args: its arguments.
        kwargs: its named arguments.
    """
    computed = IN_PLACE.get(func, func)
    product = PRODUCTS[computed]
    if not all(operand is None or is_half(operand) for operand in args[: product.operands]):
        return func(*args, **kwargs)
    result = computed(*[widen(arg) for arg in args], **{name: widen(value) for name, value in kwargs.items()})
    if computed is not func:
        return args[0].copy_(result)
    if isinstance(result, torch.Tensor):
        return narrow(result)
    return tuple(narrow(value) if index < product.results else value for index, value in enumerate(result))


def rounds_half(plan: Plan) -> bool:
    """Tell whether a plan computes in fp16 without an instruction for it: the decision's level says so."""
    return any("fp16" in decision.pair and decision.level not in EXPOSING for decision in plan.decisions)


def execution(plan: Plan) -> AbstractContextManager[None]:
    """Return the context to enter around a forward or a backward pass; one that does nothing where torch computes what is planned by itself."""
    return HalfProducts() if rounds_half(plan) else nullcontext()  # type: ignore[no-untyped-call] # torch's dispatch mode is not annotated
