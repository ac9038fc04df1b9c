"""Finding where the first non-finite value of a step comes from: the module and the operator.

Watching every operator reads the device each time, so a step is watched only when the steps before it were skipped in a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mpbackend.observe.memory import dtype_name, nested_tensors

CONSTANTS = frozenset({"full", "full_like", "fill_", "fill", "masked_fill", "masked_fill_", "where", "scalar_tensor", "new_full", "_to_copy", "copy_", "clone"})
"""Operators that put minus infinity into a mask on purpose, or carry it on."""

MADE = frozenset({"full", "full_like", "new_full", "fill", "fill_", "scalar_tensor"})
"""Operators that make a number on purpose, whatever it is; what computes with it is seen."""


class Diagnosis:
    """Watches one step.

    Args:
        model: names modules and parameters in the finding.

    Attributes:
        finding: where the first non-finite value came from, in words; empty while there was none.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._path: list[str] = []
        self._arrived = ""
        self._hint = ""
        self._first = ""

    @property
    def finding(self) -> str:
        """Where the first non-finite value came from; a minus infinity counts only where there is nothing worse, for masks are made of it."""
        return self._first or self._hint

    @contextmanager
    def watch(self, phase: Literal["forward", "backward"]) -> Iterator[None]:
        """Watch a forward or a backward pass."""
        handles = list(self._hook()) if phase == "forward" else []
        try:
            with _Watch(partial(self._see, phase)):
                yield
        finally:
            self._path.clear()
            for handle in handles:
                handle.remove()

    def _hook(self) -> Iterator[Any]:
        for name, module in self._model.named_modules():
            if isinstance(module, torch._dynamo.OptimizedModule) or getattr(module, "_compiled_call_impl", None) is not None:
                continue  # a hook would make torch compile the module again
            label = f"{name or 'the model'} ({type(module).__name__})"
            yield module.register_forward_pre_hook(partial(self._enter, label))
            yield module.register_forward_hook(partial(self._leave, label))

    def _enter(self, label: str, _module: object, _args: object) -> None:
        self._path.append(label)

    def _leave(self, label: str, _module: object, _args: object, output: object) -> None:
        if self._path:
            self._path.pop()
        for tensor in nested_tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._arrive, label))

    def _arrive(self, label: str, _gradient: torch.Tensor) -> None:
        self._arrived = label

    def _see(self, phase: str, op: str, inputs: object, outputs: object) -> None:
        """Look at one operator's operands and results."""
        if self._first:
            return
        broken = next((tensor for tensor in nested_tensors(outputs) if kind_of(tensor)), None)
        if broken is None:
            return
        kind = kind_of(broken)
        given = next((tensor for tensor in nested_tensors(inputs) if kind_of(tensor) in ("nan", "inf")), None)
        place = (self._path[-1] if self._path else "outside every module") if phase == "forward" else f"behind {self._arrived or 'the loss'}"
        text = f"{phase} pass, {place}, {op}: result of {tuple(broken.shape)} in {dtype_name(broken.dtype)} holds {kind}"
        if given is not None:
            name = self._names.get(id(given))
            text += f"; its operand {f'parameter {name}' if name else f'of {tuple(given.shape)}'} held {kind_of(given)} already"
        base = op.split(".")[0]
        if kind != "-inf" and base not in MADE:
            self._first = text
        elif base not in CONSTANTS and not self._hint:
            self._hint = text


class _Watch(TorchDispatchMode):
    """Shows every operator to a function."""

    def __init__(self, see: Callable[[str, object, object], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch leaves it unannotated
        self._see = see

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._see(str(func).removeprefix("aten."), (args, kwargs or {}), out)
        return out


def kind_of(tensor: torch.Tensor) -> str:
    """Return ``nan``, ``inf`` or ``-inf``, the worst that a tensor holds; empty when it is finite or no floating-point one. Reads the device."""
    if not tensor.is_floating_point() or tensor.numel() == 0 or tensor.is_meta or tensor.element_size() < 2:
        return ""
    low, high = torch.stack(torch.aminmax(tensor.detach().float())).tolist()
    if low != low:
        return "nan"
    return "inf" if high == float("inf") else ("-inf" if low == float("-inf") else "")
