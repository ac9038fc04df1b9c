"""What is known to go wrong silently when a model is compiled or recomputes activations; found from the names that its code uses, and warned of."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from types import CodeType

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.hooks import RemovableHandle


def warn_of_hazards(model: torch.nn.Module) -> list[RemovableHandle]:
    """Warn of combinations that change the arithmetic without an error; returns the hooks that still watch.

    - A compiled model with an autocast of its own: compiled code runs the backward pass under the outer autocast, so what the inner one kept in fp32 is
      differentiated in 16 bits (a linear layer under bf16: 2.5e-3 of the gradient's norm off, torch 2.13, ``tests/train/test_hazards.py``). Told at once.
    - A batch norm inside activation checkpointing: its statistics are updated again when the forward pass is repeated. Told in the first backward pass.

    Args:
        model: the model, as given to ``prepare``.
    """
    roots = list(compiled(model))
    inner = sorted({type(module).__name__ for root in roots for module in root.modules() if uses(module, "autocast")})
    if inner:
        found = f"{', '.join(inner)} opens an autocast of its own in a compiled model: compiled code differentiates it under the session's autocast"
        warnings.warn(f"{found}; leave it out of the compilation (torch.compiler.disable)", stacklevel=3)
    inside = {id(module) for root in roots for module in root.modules()}  # a hook would make torch compile these again
    return [
        Recomputed(name).watch(module)
        for name, module in model.named_modules()
        if isinstance(module, _NormBase) and module.track_running_stats and id(module) not in inside
    ]


class Recomputed:
    """Watches the first training passes of a norm, and warns when one of them is made inside a backward pass.

    Args:
        name: its name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._passes = 0

    def watch(self, module: torch.nn.Module) -> RemovableHandle:
        """Watch a module until its second pass, when the first must have gone backward; returns the hook."""
        self._handle = module.register_forward_pre_hook(self._see)
        return self._handle

    def _see(self, module: torch.nn.Module, _args: object) -> None:
        if not module.training or not torch.is_grad_enabled():
            return
        self._passes += 1
        repeated = torch._C._current_graph_task_id() != -1
        if repeated:
            found = f"activation checkpointing repeats the forward pass of {self._name}: its running statistics are updated twice a step"
            warnings.warn(f"{found}; keep the norm outside, or halve its momentum", stacklevel=2)
        if repeated or self._passes > 1:
            self._handle.remove()


def compiled(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the modules that torch compiles when they are called."""
    for module in model.modules():
        if isinstance(module, torch._dynamo.OptimizedModule) or getattr(module, "_compiled_call_impl", None) is not None:
            yield module


def uses(module: torch.nn.Module, *names: str) -> bool:
    """Tell whether the forward method of a module's class uses one of some names."""
    code = getattr(type(module).forward, "__code__", None)
    if code is None or type(module).__module__.startswith("torch."):
        return False
    return any(name in found.co_names or name in found.co_freevars for found in codes(code) for name in names)


def codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and those of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)
