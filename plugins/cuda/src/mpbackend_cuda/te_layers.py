"""Linear layers of Transformer Engine that hold the parameters of the ``torch.nn.Linear`` they replace.

Optimizers, checkpoints and wrappers keep working: the parameters are the same objects under the same names.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn import functional

from mpbackend.errors import DocumentError
from mpbackend.train.conversion import pad_rows
from mpbackend_cuda.execution import EngineExecution, read_window, write_window

EXTRA_STATE = "_extra_state"


class LowBitLinear(torch.nn.Module):
    """What this plugin adds to ``transformer_engine.pytorch.Linear``; mixed in front of it.

    - Outside a session it is an ordinary linear layer: Transformer Engine would compute fp32 in tf32 whatever torch says.
    - Tokens are padded with zeros to the multiple that all three products need. A row of zeros adds nothing to an amax or to a gradient, and its output and its
      gradient are dropped.
    - Over the micro-batches of a step the quantized weight is kept.

    Attributes:
        execution: the execution of the plan.
        multiple: what the number of tokens is padded to.
        keeps_weight: whether the quantized weight is kept over micro-batches.
    """

    execution: EngineExecution
    multiple: int
    keeps_weight: bool
    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None
    _quantized_version: int | None = None

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        """Map (..., in_features) to (..., out_features)."""
        tokens = inp.numel() // inp.shape[-1] if inp.shape[-1] else 0
        if tokens == 0 or not self.execution.enter():
            bias = self.bias if isinstance(self.bias, torch.nn.Parameter) else None
            return functional.linear(inp, self.weight, bias)
        if not self.training:
            self.execution.keep_window(self)
        if tokens % self.multiple == 0:
            whole: torch.Tensor = super().forward(inp, is_first_microbatch=self.first_of_step())
            return whole
        padded = pad_rows(inp.reshape(tokens, inp.shape[-1]), self.multiple)
        out: torch.Tensor = super().forward(padded, is_first_microbatch=self.first_of_step())
        return out[:tokens].reshape(*inp.shape[:-1], out.shape[-1])

    def first_of_step(self) -> bool | None:
        """Tell whether the weight must be quantized anew: True for the first micro-batch of a step, False where the kept one is right, None to keep none.

        The kept one is right when a gradient stands in the parameter, which a session clears with every step, and nothing wrote to the parameter since.
        """
        if not self.keeps_weight or not self.training or not torch.is_grad_enabled():
            return None
        version = self.weight._version
        first = self.weight.grad is None or version != self._quantized_version
        self._quantized_version = version
        return first

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Drop the extra state that Transformer Engine saves for recipes without state: it holds nothing."""
        state_dict.pop(prefix + EXTRA_STATE, None)
        super()._load_from_state_dict(state_dict, prefix, *args)


class StatelessLinear(LowBitLinear):
    """A layer whose recipe has no state: its checkpoint has the keys of ``torch.nn.Linear``."""

    get_extra_state = torch.nn.Module.get_extra_state
    set_extra_state = torch.nn.Module.set_extra_state


class DelayedLinear(LowBitLinear):
    """A layer with the window of delayed scaling. It is saved as plain tensors; Transformer Engine pickles it, and refuses to load what it pickled."""

    _pending: dict[str, torch.Tensor] | None = None

    def get_extra_state(self) -> dict[str, torch.Tensor]:
        """Return a copy of the window in main memory; empty before the first forward pass."""
        if self._pending is not None:
            return self._pending
        return {name: value.cpu() for name, value in read_window(self).items()}

    def set_extra_state(self, state: Any) -> None:
        """Take a window; it goes into the layer at its next forward pass, when its tensors are there.

        Raises:
            DocumentError: the state was pickled by Transformer Engine.
        """
        if isinstance(state, torch.Tensor) and state.numel() == 0:
            state = {}
        if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
            found = "it was pickled by Transformer Engine, which refuses to read it back for safety"
            raise DocumentError("the window of delayed scaling in a checkpoint", found=found, remedy="load it without the keys that end in _extra_state")
        self._pending = dict(state) or None

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        """Map (..., in_features) to (..., out_features); see ``LowBitLinear``."""
        if self._pending is not None and inp.numel() and self.execution.enter():
            initialize: Any = self.init_fp8_metadata
            initialize(num_gemms=1)
            write_window(self, self._pending)
            self._pending = None
        return super().forward(inp)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Take a checkpoint without a window, such as one of ``torch.nn.Linear``: the window starts anew."""
        state_dict.setdefault(prefix + EXTRA_STATE, {})
        torch.nn.Module._load_from_state_dict(self, state_dict, prefix, *args)


@functools.cache
def layer_class(linear: type[torch.nn.Module], *, delayed: bool) -> type[LowBitLinear]:
    """Return the class of converted layers.

    Args:
        linear: ``transformer_engine.pytorch.Linear``.
        delayed: whether the recipe scales by a window of earlier steps.
    """
    return type("LowBitLinear", (DelayedLinear if delayed else StatelessLinear, linear), {})


def convert_layer(linear: torch.nn.Linear, kind: Any, execution: EngineExecution, multiple: int, *, keeps_weight: bool) -> LowBitLinear:
    """Return the layer that replaces a linear one and holds its parameters.

    It is made on the meta device, so that neither memory nor a random number is spent on weights that are dropped at once.

    Args:
        linear: the layer to replace.
        kind: ``transformer_engine.pytorch.Linear``.
        execution: the execution of the plan.
        multiple: what tokens are padded to.
        keeps_weight: whether to keep the quantized weight over micro-batches.
    """
    make: Any = layer_class(kind, delayed=execution.delayed)
    layer: LowBitLinear = make(linear.in_features, linear.out_features, bias=linear.bias is not None, params_dtype=linear.weight.dtype, device="meta")
    for name, parameter in linear.named_parameters(recurse=False):
        layer.register_parameter(name, parameter)
    layer.execution = execution
    layer.multiple = multiple
    layer.keeps_weight = keeps_weight
    return layer.train(linear.training)
