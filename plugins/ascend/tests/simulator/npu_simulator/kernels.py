"""aten kernels of the simulated device: each runs torch's CPU kernel over the device's bytes.

torch_npu's autograd, autocast, allocator, streams and Python layer stay as they are; what is replaced is the code that would launch an operator on the device.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from npu_simulator.memory import alias, assign, on_device, upload
from npu_simulator.saturation import MOVING, saturate, saturates, words

KEY = "PrivateUse1"
NAMESPACE = "aten::"
HOST_KEYS = ("CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd", "CompositeExplicitAutogradNonFunctional")

OWN = words("""
_has_compatible_shallow_copy_type _nested_tensor_from_mask _pin_memory _record_function_enter_new _reshape_alias _to_copy alias as_strided as_strided_
contiguous data_ptr detach empty.memory_format empty_like empty_strided empty_with_format empty_with_swapped_memory expand get_npu_format is_pinned is_set_to
new_empty_strided npu_format_cast npu_format_cast_ permute record_stream resize_ resize_as_ set_ set_.source_Storage set_.source_Storage_storage_offset
set_.source_Tensor squeeze squeeze.dim squeeze_ squeeze_.dim storage_resize t transpose.int unfold unsafe_empty_with_format unsqueeze unsqueeze_ view
view_as_complex view_as_real
""")
"""What torch_npu does itself: memory and geometry."""

BY_REGISTER = "_amp_foreach_non_finite_check_and_unscale_"
"""The gradient check of loss scaling. On a saturating device torch_npu's own reads the status register, which the stand-in runtime simulates."""

PRODUCTS = words("""
mm addmm bmm baddbmm addbmm mv addmv dot linear matmul matmul_backward convolution convolution_overrideable convolution_backward
""")
"""Products of fp16 operands run in fp32 and are rounded once: an fp32 sum, and 16 to 183 times faster than torch's own loop."""

calls: Counter[str] = Counter()
"""How often each kernel ran, for tests."""


class Converted:
    """The arguments of one call with every device tensor replaced by its alias.

    Attributes:
        device: the device of the first device tensor or argument; the current one when there is none.
        pairs: alias and original of each device tensor, once.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._device: torch.device | None = None
        self._seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def device(self) -> torch.device:
        return self._device or torch.device("npu", torch.npu.current_device())  # type: ignore[attr-defined] # torch_npu adds the module

    @property
    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return list(self._seen.values())

    def convert(self, value: Any) -> Any:
        """Return an argument for the CPU kernel."""
        if on_device(value):
            self._device = self._device or value.device
            return self._seen.setdefault(id(value), (alias(value), value))[0]
        if isinstance(value, (list, tuple)):
            return type(value)(self.convert(item) for item in value)
        if isinstance(value, torch.device) and value.type == "npu":
            self._device = self._device or value
            return torch.device("cpu")
        if isinstance(value, torch.Generator) and value.device.type == "npu":
            generator = torch.Generator()
            generator.manual_seed(value.initial_seed() + calls[self._name])
            return generator
        return value

    def restore(self, value: Any) -> Any:
        """Return a result of the CPU kernel for the caller: an argument that was written, or a new device tensor."""
        if isinstance(value, torch.Tensor):
            for mine, original in self._seen.values():
                if mine is value:
                    assign(original, value)
                    return original
            return upload(value, self.device)
        if isinstance(value, (list, tuple)):
            return type(value)(self.restore(item) for item in value)
        return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a nesting of lists and tuples."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in tensors_in(item)] if isinstance(value, (list, tuple)) else []


def widen(value: Any) -> Any:
    """Return an fp16 tensor in fp32; anything else as it is."""
    return value.float() if isinstance(value, torch.Tensor) and value.dtype is torch.float16 else value


def narrow(value: Any) -> Any:
    """Return fp32 tensors rounded to fp16."""
    if isinstance(value, (list, tuple)):
        return type(value)(narrow(item) for item in value)
    return value.half() if isinstance(value, torch.Tensor) and value.dtype is torch.float32 else value


def make_kernel(name: str, host: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Return the kernel of one operator.

    Args:
        name: ``name`` or ``name.overload``.
        host: what computes it on CPU tensors; torch's own operator when omitted.
    """
    packet, _, overload = name.partition(".")
    op = host or getattr(getattr(torch.ops.aten, packet), overload or "default")
    moves = packet in MOVING

    def compute(args: list[Any], kwargs: dict[str, Any]) -> Any:
        halves = packet in PRODUCTS and overload != "out" and any(tensor.dtype is torch.float16 for tensor in tensors_in(args))
        if not halves:
            return op(*args, **kwargs)
        return narrow(op(*[widen(arg) for arg in args], **{key: widen(value) for key, value in kwargs.items()}))

    def kernel(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        call = Converted(name)
        with torch._C._AutoDispatchBelowAutograd(), torch.no_grad():
            host_args = [call.convert(arg) for arg in args]
            host_kwargs = {key: call.convert(value) for key, value in kwargs.items()}
            checked = not moves and saturates()
            before = [mine.clone() for mine, _ in call.pairs] if checked else []
            result = compute(host_args, host_kwargs)
            if checked:
                saturate([*tensors_in(result), *(mine for mine, _ in call.pairs)], before)
            restored = call.restore(result)
            for mine, original in call.pairs:
                assign(original, mine)
            return restored

    return kernel


def copy_(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy between host and device, or within one; a conversion to a 16-bit format saturates as arithmetic does."""
    calls["copy_"] += 1
    with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
        target = alias(self) if on_device(self) else self
        values = alias(source) if on_device(source) else source
        target.copy_(values)
        if on_device(self) and on_device(source) and self.dtype != source.dtype and saturates():
            saturate([target], [values])
    return self


def local_scalar_dense(tensor: torch.Tensor) -> Any:
    """Read one element."""
    calls["_local_scalar_dense"] += 1
    return alias(tensor).item()


def native_dropout(tensor: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Drop elements, with a mask of bools instead of the device's packed one."""
    if train is False or p == 0:
        return tensor.clone(), torch.ones_like(tensor, dtype=torch.bool)
    mask = torch.rand(tensor.size(), device=tensor.device) >= p
    return tensor * mask.to(tensor.dtype) / (1 - p), mask


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Compute attention by torch's reference, in place of the vendor's fused operator."""
    math = torch.ops.aten._scaled_dot_product_attention_math
    return math(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]


def softmax(tensor: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Compute softmax by torch's differentiable operator, in place of the vendor's."""
    return torch._softmax(tensor if dtype is None else tensor.to(dtype), dim, False)


def matmul_backward(grad: torch.Tensor, first: torch.Tensor, second: torch.Tensor, mask: list[bool]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of ``matmul``, an operator of torch_npu's own; vectors are matrices of one row or column."""
    a, b = (first.unsqueeze(0) if first.dim() == 1 else first), (second.unsqueeze(1) if second.dim() == 1 else second)
    result = grad.unsqueeze(-2) if first.dim() == 1 else grad
    result = result.unsqueeze(-1) if second.dim() == 1 else result
    to_first = (result @ b.mT).sum_to_size(a.shape).reshape(first.shape) if mask[0] else None
    to_second = (a.mT @ result).sum_to_size(b.shape).reshape(second.shape) if mask[1] else None
    return to_first, to_second


def l1_loss_backward(grad: torch.Tensor, first: torch.Tensor, second: torch.Tensor, reduction: int) -> torch.Tensor:
    """Return the gradient of ``l1_loss``, an operator of torch_npu's own; reduction 1 is the mean."""
    signed = torch.sign(first - second) * grad
    return signed / first.numel() if reduction == 1 else signed


SPECIAL: dict[str, Callable[..., Any]] = {"copy_": copy_, "_local_scalar_dense": local_scalar_dense}
OF_TORCH_NPU: dict[str, Callable[..., Any]] = {"matmul_backward": matmul_backward, "l1_loss_backward": l1_loss_backward}
AUTOGRAD: dict[str, Callable[..., Any]] = {"native_dropout": native_dropout, "scaled_dot_product_attention": attention, "softmax.int": softmax}


def install(library: Any, *, saturating: bool) -> int:
    """Register the kernels of every operator that torch_npu has a device kernel for and torch a host kernel; returns how many.

    Args:
        library: a ``torch.library.Library`` of the namespace aten.
        saturating: whether the device never shows inf and NaN.
    """
    count = 0
    own = OWN | {BY_REGISTER} if saturating else OWN
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of each replaced kernel, which is the purpose here
        for qualified in torch._C._dispatch_get_registrations_for_dispatch_key(KEY):
            name = qualified.removeprefix(NAMESPACE)
            if not qualified.startswith(NAMESPACE) or name in own or "npu" in name:
                continue
            if any(torch._C._dispatch_has_kernel_for_dispatch_key(qualified, key) for key in HOST_KEYS) and exists(name):
                library.impl(name, SPECIAL.get(name) or make_kernel(name), KEY, allow_override=True)
                count += 1
        for name, host in OF_TORCH_NPU.items():
            library.impl(name, make_kernel(name, host), KEY, allow_override=True)
        for name, kernel in AUTOGRAD.items():
            library.impl(name, kernel, f"Autograd{KEY}", allow_override=True)
    return count


def exists(name: str) -> bool:
    """Tell whether torch offers an operator to Python."""
    packet, _, overload = name.partition(".")
    return hasattr(getattr(torch.ops.aten, packet, None), overload or "default")
