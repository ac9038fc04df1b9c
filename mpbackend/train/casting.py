"""Casting a model in place to the formats of a recipe, saying of every layer what became of it, and undoing it.

Only parameters are cast. A buffer keeps its format unless the recipe names one: a rotary table or a running mean in 16 bits changes what the model computes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from mpbackend.errors import SessionError

Row = dict[str, str]


class Casting:
    """A model whose parameters were cast in place; the ``Parameter`` objects stay the same, so that tied ones stay tied.

    Batch and instance norms keep fp32 parameters while their running statistics are fp32: torch takes both in one format.

    Args:
        model: the model, parameters in fp32 or in the working format.
        params: the working format.
        buffers: format of floating-point buffers, or None to leave them.

    Attributes:
        originals: what was cast, by the id of the tensor that stays: the tensor and the data it had. Emptied by ``commit``.
        rows: layer, action and reason of what was cast, and of what was left although the recipe names another format.

    Raises:
        SessionError: a parameter is a subclass of ``torch.Tensor``: a wrapper looks after its data. The model is as it was.
    """

    def __init__(self, model: nn.Module, params: torch.dtype, buffers: torch.dtype | None) -> None:
        self.originals: dict[int, tuple[Tensor, Tensor]] = {}
        self.rows: list[Row] = []
        self._was: dict[int, tuple[Tensor, torch.dtype]] = {}
        self._kept = kept_parameters(model, params, buffers)
        for name, parameter in model.named_parameters():
            if type(parameter.data) is not Tensor:
                found = f"parameter {name} is a {type(parameter.data).__name__}, which no session casts or shadows"
                raise SessionError(f"{short(params)} parameters", found=found, remedy="use a recipe with fp32 parameters, or bf16-master over fp32 shards")
        planned = list(self._plan(model, params, buffers))
        try:
            for tensor, dtype in planned:
                self.cast(tensor, dtype)
        except BaseException:
            self.undo()
            raise
        for module in model.modules():
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()  # the weights of a fused kernel lie in one block of memory

    def _plan(self, model: nn.Module, params: torch.dtype, buffers: torch.dtype | None) -> Iterator[tuple[Tensor, torch.dtype]]:
        """Yield every tensor to cast with its new format, and write the rows."""
        seen: set[int] = set()
        for prefix, module in model.named_modules():
            cast: list[str] = []
            kept: list[str] = []
            for name, parameter in module.named_parameters(recurse=False):
                if not parameter.is_floating_point() or id(parameter) in seen:
                    continue
                seen.add(id(parameter))
                stays = id(parameter) in self._kept
                if stays or parameter.dtype != params:
                    (kept if stays else cast).append(name)
                if parameter.dtype != (dtype := torch.float32 if stays else params):
                    yield parameter, dtype
            layer = prefix or "the model"
            if cast and params != torch.float32:
                self.rows.append({"layer": layer, "action": "lowered", "reason": f"{', '.join(cast)}: {short(params)} working weights"})
            if kept:
                self.rows.append(
                    {"layer": layer, "action": "kept", "reason": f"{', '.join(kept)}: fp32 like the running statistics, which torch takes with them"}
                )
            for name, buffer in module.named_buffers(recurse=False):
                if not buffer.is_floating_point() or id(buffer) in seen:
                    continue
                seen.add(id(buffer))
                reason = f"{name}: a {short(buffer.dtype)} buffer beside {short(params)} parameters"
                if buffers is not None and buffer.dtype != buffers:
                    self.rows.append({"layer": layer, "action": "lowered", "reason": f"{name}: {short(buffers)} buffer, as the recipe says"})
                    yield buffer, buffers
                elif buffers is None and buffer.dtype != torch.float32:
                    self.rows.append({"layer": layer, "action": "found", "reason": f"{reason}; it came so, its fp32 values are lost"})
                elif buffers is None and params != torch.float32 and not isinstance(module, _NormBase):
                    self.rows.append({"layer": layer, "action": "kept", "reason": reason})

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> None:
        """Replace the data of a tensor by its rounding to a format, and remember what it was."""
        self.originals[id(tensor)] = (tensor, tensor.data)
        self._was[id(tensor)] = (tensor, tensor.dtype)
        tensor.grad = None
        tensor.data = tensor.data.to(dtype)

    def keeps(self, tensor: Tensor) -> bool:
        """Tell whether a parameter stays fp32 although the recipe's are in 16 bits."""
        return id(tensor) in self._kept

    def came_as(self, tensor: Tensor) -> torch.dtype:
        """Return the format that a tensor had before it was cast."""
        return self._was[id(tensor)][1] if id(tensor) in self._was else tensor.dtype

    def commit(self) -> None:
        """Forget what the tensors were; ``undo`` does nothing from here on."""
        self.originals = {}

    def undo(self) -> None:
        """Give every tensor that was cast the data it had, bit for bit."""
        for tensor, data in self.originals.values():
            tensor.grad = None
            tensor.data = data
        self.originals = {}

    def widen(self) -> None:
        """Cast every tensor that was cast back to the format it came in; values stay those of the working format."""
        for tensor, dtype in self._was.values():
            if tensor.dtype != dtype:
                tensor.grad = None
                tensor.data = tensor.data.to(dtype)


def kept_parameters(model: nn.Module, params: torch.dtype, buffers: torch.dtype | None) -> dict[int, Tensor]:
    """Return the parameters of norms with running statistics that stay fp32: those whose statistics are not going to be in the working format."""
    kept: dict[int, Tensor] = {}
    for module in model.modules() if params != torch.float32 else ():
        statistics = module.running_mean if isinstance(module, _NormBase) else None
        if statistics is not None and (buffers or statistics.dtype) != params:
            kept |= {id(parameter): parameter for parameter in module.parameters(recurse=False)}
    return kept


def is_fp32_shard(parameter: Tensor) -> bool:
    """Tell whether a parameter is an fp32 tensor of a wrapper's own class."""
    return type(parameter.data) is not Tensor and parameter.dtype == torch.float32


def short(dtype: torch.dtype) -> str:
    """Return the name of a floating format as recipes write it."""
    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
    return names.get(dtype, str(dtype).removeprefix("torch."))
