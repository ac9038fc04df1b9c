"""Which module an operation belongs to: by hooks in the forward pass, by the number of its autograd node in the backward pass."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

ROOT = "(model)"
"""Stands for the model itself, which has no path."""

LAST = 2**62
"""Nodes that add to a parameter's ``grad`` have a number above this instead of one of their own (torch/csrc/autograd/function.h, AccumulateGrad)."""


class ModulePaths:
    """Follows the modules of a model.

    An autograd node gets the next number of its thread when the forward operation runs, so the numbers at which modules were entered and left tell, of any
    node of the backward pass, the module that made it.

    Args:
        model: the model.

    Attributes:
        strangers: threads other than the one that watches in which modules ran, as (module, whether autocast was on there).
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._owners = {id(p): name.rpartition(".")[0] or ROOT for name, p in model.named_parameters()}
        self._thread = threading.get_ident()
        self._stack: list[str] = []
        self._numbers: list[int] = []
        self._paths: list[str] = []
        self.strangers: dict[str, bool] = {}

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Follow the modules inside. Compiled modules are left alone: a hook would make torch compile them again."""
        handles = []
        for name, module in self._model.named_modules():
            if isinstance(module, torch._dynamo.OptimizedModule) or getattr(module, "_compiled_call_impl", None) is not None:
                continue
            handles.append(module.register_forward_pre_hook(partial(self._enter, name)))
            handles.append(module.register_forward_hook(partial(self._leave, name), always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._stack.clear()

    def _enter(self, name: str, module: torch.nn.Module, args: Any) -> None:
        if threading.get_ident() != self._thread:
            device = next((p.device.type for p in self._model.parameters()), "cpu")
            self.strangers[name or ROOT] = torch.is_autocast_enabled(device)
            return
        self._stack.append(name or ROOT)
        self._mark()

    def _leave(self, name: str, module: torch.nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == self._thread and self._stack:
            self._stack.pop()
            self._mark()

    def _mark(self) -> None:
        if torch._C._current_graph_task_id() == -1:
            self._numbers.append(torch._C._autograd._get_sequence_nr())
            self._paths.append(self._stack[-1] if self._stack else "")

    def forget(self) -> None:
        """Forget the numbers of the passes so far; before a step, so that they do not grow."""
        self._numbers.clear()
        self._paths.clear()

    def path(self) -> str:
        """Return the module of the operation that runs now; empty when it is outside of all of them."""
        if self._stack:
            return self._stack[-1]
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return ""
        number = node._sequence_nr()
        if number >= LAST or number < 0:
            return self._owners.get(id(getattr(node, "variable", None)), "")
        found = bisect.bisect_right(self._numbers, number) - 1
        return self._paths[found] if found >= 0 else ""
