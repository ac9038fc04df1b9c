"""The plain lowering of a ``LowBit``: a linear layer whose three products are quantized with nothing but torch.

It runs on any device and in any format of ``mpbackend.formats``. It is what other lowerings are compared with, and what a CPU trains with where no library is
installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mpbackend.lowbit import LowBit, Operand
from mpbackend.train.quantize import UNIFORM, Quantized, Stored, group_amax, multiply, quantize

X, W, G = range(3)
"""The tensors of a layer that have a window: input, weight, gradient of the output."""


class AmaxWindow(nn.Module):
    """The amaxes of earlier steps that delayed scales are made from.

    State dicts of models without one load: the window then starts empty.

    Args:
        tensors: number of tensors.
        length: steps in the window, >= 1.
        algorithm: ``max`` of the window, or its ``most_recent`` entry.
        reduce: take the largest amax over the ranks of the default process group.

    Attributes:
        window: (tensors, length) fp32: amaxes by step; the oldest is overwritten by the next.
        steps: int64 scalar: steps written so far.
        present: (tensors,) fp32: what scales are made from now; 0 for a tensor that has had no usable amax.
    """

    window: Tensor
    steps: Tensor
    present: Tensor

    def __init__(self, tensors: int, length: int, algorithm: Literal["max", "most_recent"], *, reduce: bool = False) -> None:
        super().__init__()
        self.length = length
        self.algorithm = algorithm
        self.reduce = reduce
        self.register_buffer("window", torch.zeros(tensors, length))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("present", torch.zeros(tensors))

    @torch.no_grad()
    def push(self, amaxes: Tensor) -> None:
        """Let the amaxes of a finished step enter and the oldest leave; a window whose result is 0 or not finite leaves ``present`` as it is.

        Args:
            amaxes: (tensors,) fp32.
        """
        if self.reduce:
            amaxes = largest_over_ranks(amaxes)
        self.window.index_copy_(1, (self.steps % self.length).reshape(1), amaxes.reshape(-1, 1))
        self.steps += 1
        latest = self.window.amax(1) if self.algorithm == "max" else amaxes
        self.present.copy_(torch.where((latest > 0) & latest.isfinite(), latest, self.present))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Load the buffers, or empty them where the state holds none of them: that of a model that was not low-bit."""
        names = [name for name, _ in self.named_buffers()]
        if any(prefix + name in state_dict for name in names):
            super()._load_from_state_dict(state_dict, prefix, *args)
            return
        for buffer in self.buffers():
            buffer.zero_()


def largest_over_ranks(amaxes: Tensor) -> Tensor:
    """Return the largest of each amax over the ranks of the default process group; the amaxes themselves in a single process."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        amaxes = amaxes.clone()
        distributed.all_reduce(amaxes, op=distributed.ReduceOp.MAX)
    return amaxes


class LowBitLinear(nn.Linear):
    """A linear layer whose products are quantized as a ``LowBit`` says; its parameters stay as they are.

    Under delayed scaling a step is one backward pass of the layer, so that recomputed forward passes use the scales of the first one; where there is nothing
    to differentiate it is a forward pass. A layer used twice in a step makes two entries. Sizes need no alignment: what is missing counts as zeros.

    Args:
        in_features: size of each input row.
        out_features: size of each output row.
        bias: whether a bias is added, in fp32, before the result is rounded.
        low_bit: the meaning of the recipe.
        device: as in ``torch.nn.Linear``.
        dtype: as in ``torch.nn.Linear``.

    Attributes:
        amaxes: the windows of input, weight and output gradient under delayed scaling, else None.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, low_bit: LowBit, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.low_bit = low_bit
        self.amaxes = window_of(low_bit, self.weight.device)

    @classmethod
    def from_linear(cls, linear: nn.Linear, low_bit: LowBit) -> LowBitLinear:
        """Return a layer with the very parameters of ``linear``."""
        made = cls(linear.in_features, linear.out_features, bias=False, low_bit=low_bit, device=torch.device("meta"))
        made.weight = linear.weight
        made.bias = linear.bias
        made.amaxes = window_of(low_bit, linear.weight.device)
        return made.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name in torch.nn.Linear
        """Map (..., in_features) to (..., out_features), in autocast's dtype inside autocast, else in the input's."""
        with without_autocast(input.device.type) as dtype:
            cast = input if dtype is None else input.to(dtype)
            out: Tensor = LowBitProducts.apply(cast, self.weight, self.bias, self)  # type: ignore[no-untyped-call] # torch leaves it unannotated
            if self.amaxes is not None and self.training and torch.is_grad_enabled() and not out.requires_grad:
                amaxes = [group_amax(tensor, "tensor").reshape(()) for tensor in (cast.reshape(-1, cast.shape[-1]), self.weight)]
                self.amaxes.push(torch.stack([*amaxes, torch.zeros_like(amaxes[0])]))
        return out

    def amax(self, tensor: int) -> Tensor | None:
        """Return what the delayed scale of a tensor is made from now, or None under current scaling."""
        return None if self.amaxes is None else self.amaxes.present[tensor]

    def quantize(self, tensor: Tensor, operand: Operand, amax: Tensor | None) -> Quantized:
        """Quantize a matrix as one operand of a product; a lowering that casts on its own device overrides this.

        Args:
            tensor: (rows, K).
            operand: format and granularity.
            amax: scalar that a delayed scale is made from; None takes the tensor's own.
        """
        return quantize(tensor, operand, self.low_bit, amax)

    def multiply(self, a: Stored, b: Stored, output: torch.dtype) -> Tensor:
        """Return ``a @ b^T`` of (M, K) and (N, K), summed in fp32 and rounded once to ``output``; a lowering with its own product overrides this."""
        return multiply(a, b).to(output)

    def extra_repr(self) -> str:
        """Return the sizes, and the formats of the three products."""
        products = (self.low_bit.forward, self.low_bit.dgrad, self.low_bit.wgrad)
        return f"{super().extra_repr()}, {self.low_bit.mode}: " + ", ".join(f"{product.a.format} x {product.b.format}" for product in products)


def window_of(low_bit: LowBit, device: torch.device) -> AmaxWindow | None:
    """Return the empty windows of a layer, None under current scaling."""
    if low_bit.mode == "current":
        return None
    return AmaxWindow(3, low_bit.window, low_bit.algorithm, reduce=low_bit.reduce_amax).to(device)


@contextmanager
def without_autocast(kind: str) -> Iterator[torch.dtype | None]:
    """Turn autocast off, which would round the operands of dequantized products; yields its dtype where it was on.

    Args:
        kind: torch device type.
    """
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        yield None
        return
    dtype = torch.get_autocast_dtype(kind)
    with torch.autocast(kind, enabled=False):
        yield dtype


class LowBitProducts(torch.autograd.Function):
    """The three products of a ``LowBitLinear``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: LowBitLinear) -> Tensor:
        """Return the output, and keep the second operands of the gradients' products, quantized."""
        low_bit = layer.low_bit
        rows = x.reshape(-1, x.shape[-1])
        a = layer.quantize(rows, low_bit.forward.a, layer.amax(X))
        b = layer.quantize(weight, low_bit.forward.b, layer.amax(W))
        out = layer.multiply(a, b, x.dtype if bias is None else torch.float32)
        if bias is not None:
            out += bias
        dgrad_b = turned(layer, b, low_bit.forward.b, weight, low_bit.dgrad.b, layer.amax(W)) if ctx.needs_input_grad[0] else None
        wgrad_b = turned(layer, a, low_bit.forward.a, rows, low_bit.wgrad.b, layer.amax(X)) if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(*(part for kept in (dgrad_b, wgrad_b) for part in ((None, None) if kept is None else (kept.stored, kept.inverse))))
        ctx.layer = layer
        ctx.x = x.shape, x.dtype
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        ctx.amaxes = (a.amax, b.amax) if layer.amaxes is not None and layer.training else None
        return out.to(x.dtype).reshape(*x.shape[:-1], out.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        """Return the gradients of input, weight and bias, and let the step's amaxes enter their windows."""
        layer: LowBitLinear = ctx.layer
        low_bit = layer.low_bit
        shape, dtype = ctx.x
        weight_dtype, bias_dtype = ctx.dtypes
        rows = gradient.reshape(-1, gradient.shape[-1])
        amax = layer.amax(G)
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        weight, weight_inverse, x, x_inverse = ctx.saved_tensors
        x_gradient = weight_gradient = bias_gradient = None
        with without_autocast(gradient.device.type):
            a = layer.quantize(rows, low_bit.dgrad.a, amax)
            if wants_x:
                x_gradient = layer.multiply(a, stored(weight, weight_inverse, low_bit.dgrad.b), dtype).reshape(shape)
            if wants_weight:
                turned_a = turned(layer, a, low_bit.dgrad.a, rows, low_bit.wgrad.a, amax)
                weight_gradient = layer.multiply(turned_a, stored(x, x_inverse, low_bit.wgrad.b), dtype).to(weight_dtype)
            if wants_bias:
                bias_gradient = rows.float().sum(0).to(bias_dtype)
            if ctx.amaxes is not None and layer.amaxes is not None:
                layer.amaxes.push(torch.stack([value.reshape(()) for value in (*ctx.amaxes, a.amax)]))
        return x_gradient, weight_gradient, bias_gradient, None


def turned(layer: LowBitLinear, present: Quantized, operand: Operand, tensor: Tensor, wanted: Operand, amax: Tensor | None) -> Stored:
    """Return the transpose of a tensor as another product needs it: the quantized one turned where that is the same, else quantized along its other side.

    Args:
        layer: whose casts and rules hold.
        present: ``tensor``, quantized as ``operand``.
        operand: how.
        tensor: (rows, K).
        wanted: how its transpose is wanted.
        amax: as in ``quantize``.
    """
    if wanted == operand and operand.granularity in UNIFORM:
        return present.transposed()
    return layer.quantize(tensor.t(), wanted, amax)


def stored(elements: Tensor, inverse: Tensor, operand: Operand) -> Stored:
    """Return a saved operand."""
    return Stored(stored=elements, inverse=inverse, format=operand.format, granularity=operand.granularity)


def plain_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return a model's state without the windows of delayed scaling: what the same model with plain linear layers loads."""
    windows = {f"{path}." for path, module in model.named_modules(remove_duplicate=False) if isinstance(module, AmaxWindow)}
    return {name: value for name, value in model.state_dict().items() if f"{name.rpartition('.')[0]}." not in windows}
