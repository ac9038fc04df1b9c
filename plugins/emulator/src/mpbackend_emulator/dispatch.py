"""Running a plan: while entered, the matrix products of CPU tensors have the arithmetic of the emulated device, in forward and in backward passes.

Dispatch modes belong to a thread; autograd runs the backward pass of CPU tensors in the thread that asks for it, so a session that enters the context around
both reaches both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from mpbackend_emulator.attention import attention, attention_backward
from mpbackend_emulator.convolution import convolution, convolution_backward
from mpbackend_emulator.products import Products, fits
from mpbackend_emulator.saturation import saturate

aten = torch.ops.aten


class Handler(NamedTuple):
    """What replaces an operator, and how many of its leading arguments are operands of one dtype."""

    run: Callable[..., Any]
    operands: int


HANDLERS: Mapping[Any, Handler] = {
    aten.mm.default: Handler(Products.mm, 2),
    aten.addmm.default: Handler(Products.addmm, 3),
    aten.bmm.default: Handler(Products.bmm, 2),
    aten.baddbmm.default: Handler(Products.baddbmm, 3),
    aten.convolution.default: Handler(convolution, 3),
    aten.convolution_backward.default: Handler(convolution_backward, 3),
    aten._scaled_dot_product_flash_attention_for_cpu.default: Handler(attention, 3),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: Handler(attention_backward, 5),
}
"""The operators that are emulated, as they reach a dispatch mode."""

WRITING: Mapping[Any, Any] = {
    aten.addmm_.default: aten.addmm.default,
    aten.baddbmm_.default: aten.baddbmm.default,
    aten.mm.out: aten.mm.default,
    aten.addmm.out: aten.addmm.default,
    aten.bmm.out: aten.bmm.default,
    aten.baddbmm.out: aten.baddbmm.default,
}
"""Operators that write into a tensor of the caller's, to what computes the result."""


class EmulatedProducts(TorchDispatchMode):
    """Replaces the products of CPU tensors.

    Args:
        products: those of the device.
    """

    def __init__(self, products: Products) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch leaves it unannotated
        self._products = products

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Run ``func``, or what replaces it."""
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # the subclass runs first; what it computes below comes back here
        kwargs = kwargs or {}
        base = WRITING.get(func, func)
        handler = HANDLERS.get(base)
        if handler is not None and fits(args[: handler.operands]):
            with torch._C._DisableTorchDispatch():
                out = written(func, args, kwargs, handler.run(self._products, *args, **{name: value for name, value in kwargs.items() if name != "out"}))
        elif is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        else:
            out = func(*args, **kwargs)
        return saturate(self._products, func, args, out) if self._products.unit.saturates else out


def written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Any:
    """Return the result of an operator, in the caller's tensor where it has one."""
    if func not in WRITING:
        return result
    target: Tensor = kwargs["out"] if "out" in kwargs else args[0]
    return (target.resize_(result.shape) if "out" in kwargs else target).copy_(result)


@functools.cache
def is_composite(func: Any) -> bool:
    """Tell whether an operator is made of others: in inference mode such a one reaches a dispatch mode whole."""
    return func not in HANDLERS and bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))
