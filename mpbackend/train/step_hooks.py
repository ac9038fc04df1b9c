"""Hooks around the steps of an optimizer: the session's own, and those of others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks


def put_first(optimizer: torch.optim.Optimizer, hook: Callable[..., None]) -> Any:
    """Register a hook after steps before those of others, which are to see the new weights; returns what removes it."""
    handle = optimizer.register_step_post_hook(hook)
    cast("OrderedDict[int, Any]", optimizer._optimizer_step_post_hooks).move_to_end(handle.id, last=False)
    return handle


def is_watched(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether somebody else has hooks on the steps of an optimizer: they are to see one call a step."""
    hooks = [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
    hooks += [*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values()]
    return any(not str(getattr(hook, "__module__", "")).startswith("mpbackend.") for hook in hooks)
