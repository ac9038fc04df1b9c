"""What a lowering offers to be checked, and the plain one that others are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mpbackend.lowbit import LowBit, Operand
from mpbackend.train.quantize import quantize
from mpbackend.train.reference import AmaxWindow


class Step(NamedTuple):
    """One step of a stream: a tensor to quantize, (rows, K) fp32, and whether the layer is in training mode."""

    tensor: Tensor
    training: bool = True


class Lowering(Protocol):
    """A way to carry out a ``LowBit``, seen from outside.

    Attributes:
        name: what reports call it.
    """

    name: str

    def refuses(self, low_bit: LowBit) -> str:
        """Return why this lowering does not run a recipe; empty when it does."""
        ...

    def scales(self, low_bit: LowBit, operand: Operand, steps: Sequence[Step]) -> Sequence[Tensor]:
        """Quantize one tensor of a fresh layer step after step, and return the scales that each step used.

        Args:
            low_bit: the recipe.
            operand: the operand that the tensor is.
            steps: the steps in order; under delayed scaling the amax of a step enters the window after the step.

        Returns:
            For each step the fp32 scales, in the direction of ``LowBit`` (what the tensor was multiplied by), one for each group, row by row.
        """
        ...

    def values(self, low_bit: LowBit, operand: Operand, tensor: Tensor) -> Tensor:
        """Return a tensor, (rows, K), quantized in the first step of a fresh layer and dequantized to fp32."""
        ...


class Reference:
    """The plain lowering of the core."""

    name = "plain torch"

    def refuses(self, low_bit: LowBit) -> str:
        """Return nothing: it runs every recipe."""
        return ""

    def scales(self, low_bit: LowBit, operand: Operand, steps: Sequence[Step]) -> Sequence[Tensor]:
        """Return the scales of ``quantize``, under delayed scaling with an ``AmaxWindow``."""
        window = AmaxWindow(1, low_bit.window, low_bit.algorithm)
        found = []
        for step in steps:
            quantized = quantize(step.tensor, operand, low_bit, window.present[0] if low_bit.mode == "delayed" else None)
            found.append(quantized.scale.reshape(-1))
            if step.training:
                window.push(quantized.amax.amax().reshape(1))
        return found

    def values(self, low_bit: LowBit, operand: Operand, tensor: Tensor) -> Tensor:
        """Return what ``quantize`` keeps of a tensor."""
        return quantize(tensor, operand, low_bit, torch.zeros(()) if low_bit.mode == "delayed" else None).dequantized()
