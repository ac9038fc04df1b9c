"""Gradients that are part of a loss, such as a gradient penalty, taken without the loss scale leaking into them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

FP16_SCALE = 2.0**15
"""The largest power of two in fp16."""


def unscaled_gradients(
    outputs: torch.Tensor | Sequence[torch.Tensor],
    inputs: torch.Tensor | Sequence[torch.Tensor],
    scale: float | torch.Tensor,
    *,
    create_graph: bool,
    allow_unused: bool,
) -> tuple[torch.Tensor, ...]:
    """Return ``d sum(outputs) / d inputs``, computed under the loss scale so that small gradients survive 16 bits, then divided by it.

    Args:
        outputs: tensors of any shape; 16-bit ones are scaled in fp32.
        inputs: what to differentiate by.
        scale: the loss scale, a power of two; at most 2^15 is used where an output is fp16, whose own gradient it is.
        create_graph: whether the gradients can be part of a loss.
        allow_unused: as in ``torch.autograd.grad``; an unused input gets zeros.
    """
    ends = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    starts = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    if any(end.dtype == torch.float16 for end in ends):
        scale = torch.clamp(scale, max=FP16_SCALE) if isinstance(scale, torch.Tensor) else min(scale, FP16_SCALE)
    total = torch.stack([end.sum(dtype=torch.float64 if end.dtype == torch.float64 else torch.float32) for end in ends]).sum()
    found = torch.autograd.grad(total * scale, starts, create_graph=create_graph, retain_graph=True, allow_unused=allow_unused, materialize_grads=allow_unused)
    return tuple(gradient.to(torch.float32 if gradient.element_size() < 4 else gradient.dtype) / scale for gradient in found)
