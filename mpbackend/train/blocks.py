"""Updating the parameters in blocks, where caches decide: each block's gradients are scaled, used and freed before the next block's are touched.

Optimizers of ``torch.optim`` run a dozen operators over all parameters, one operator after the other. Where those fit in no cache, every operator moves all of
them through memory. Updating a part at a time gives the same bits, because these optimizers treat each parameter by itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mpbackend.train.gradients import local
from mpbackend.train.step_hooks import is_watched

Block = list[list[torch.Tensor]]
"""Parameters of each group of an optimizer that are updated together."""


def takes_blocks(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether an optimizer treats each parameter by itself and nobody counts its steps; a fused one passes over the parameters once anyway."""
    own = f"{type(optimizer).__module__}.".startswith("torch.optim.") and not isinstance(optimizer, torch.optim.LBFGS)
    return own and not any(group.get("fused") for group in optimizer.param_groups) and not is_watched(optimizer)


def blocks_of(optimizer: torch.optim.Optimizer, elements: int) -> list[Block]:
    """Return the parameters that have gradients, in blocks of at most ``elements``; a larger parameter is a block of its own."""
    blocks: list[Block] = []
    size = elements
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            if size + parameter.numel() > elements:
                blocks.append([[] for _ in optimizer.param_groups])
                size = 0
            blocks[-1][index].append(parameter)
            size += parameter.numel()
    return blocks


def step_in_blocks(optimizer: torch.optim.Optimizer, elements: int, multiplier: torch.Tensor | float, *, free: bool) -> None:
    """Step an optimizer block by block.

    Args:
        optimizer: one that ``takes_blocks``.
        elements: of a block, at most.
        multiplier: what every gradient is multiplied with first.
        free: whether a gradient is dropped once it was used.
    """
    blocks = blocks_of(optimizer, elements)
    if len(blocks) < 2:
        scale_all(optimizer, multiplier)
        optimizer.step()
        return
    full = [group["params"] for group in optimizer.param_groups]
    try:
        for block in blocks:
            for group, part in zip(optimizer.param_groups, block, strict=True):
                group["params"] = part
            scale(block, multiplier)
            optimizer.step()
            if free:
                for parameter in parameters_in(block):
                    parameter.grad = None
    finally:
        for group, params in zip(optimizer.param_groups, full, strict=True):
            group["params"] = params


def scale_all(optimizer: torch.optim.Optimizer, multiplier: torch.Tensor | float) -> None:
    """Multiply the gradients of an optimizer in place; 1.0 touches nothing."""
    scale([group["params"] for group in optimizer.param_groups], multiplier)


def scale(block: Block, multiplier: torch.Tensor | float) -> None:
    """Multiply the gradients of a block in place; 1.0 touches nothing."""
    if isinstance(multiplier, torch.Tensor) or multiplier != 1.0:
        gradients = local([parameter.grad for parameter in parameters_in(block) if parameter.grad is not None])
        if gradients:
            torch._foreach_mul_(gradients, multiplier)


def parameters_in(block: Block) -> Iterator[torch.Tensor]:
    """Yield the parameters of a block."""
    for part in block:
        yield from part
