"""What ``prepare`` checks before it touches anything: the model, the optimizers, and the words of its options."""

from __future__ import annotations

import inspect
import operator
import os
from collections.abc import Sequence
from typing import Any

import torch

from mpbackend.errors import SessionError
from mpbackend.formats import FORMATS


def check_options(fence: object, record: object, seed: object) -> int | None:
    """Check options that are easily misspelt, and return the seed as a plain number.

    Raises:
        SessionError: names the option and what it takes.
    """
    if fence not in ("set", "report"):
        raise SessionError(f"prepare(fence={fence!r})", found="not a mode", allowed=["set", "report"])
    if record is not None and (not isinstance(record, (str, os.PathLike)) or not str(record) or "\0" in str(record)):
        raise SessionError(f"prepare(record={record!r})", found="not a folder name", remedy="leave it out for no record")
    if seed is None:
        return None
    try:
        if isinstance(seed, bool):
            raise TypeError
        return operator.index(seed)  # type: ignore[arg-type] # whatever counts as a whole number
    except TypeError:
        raise SessionError(f"prepare(seed={seed!r})", found="not a whole number") from None


def check_schedulers(schedulers: Sequence[Any]) -> None:
    """Refuse a scheduler that the session cannot step by itself."""
    if any(isinstance(item, torch.optim.lr_scheduler.ReduceLROnPlateau) for item in schedulers):
        raise SessionError("prepare()", found="a ReduceLROnPlateau, which needs a metric", remedy="leave it out and step it after evaluating")


def check_optimizers(optimizers: Sequence[torch.optim.Optimizer], model: torch.nn.Module) -> None:
    """Refuse optimizers that would make a step wrong.

    Raises:
        SessionError: there is none, one stands twice, one needs a closure, one updates nothing of the model, or gradients are there already.
    """
    if not optimizers:
        raise SessionError("prepare()", found="no optimizer")
    if len({id(optimizer) for optimizer in optimizers}) != len(optimizers):
        raise SessionError("prepare()", found="one optimizer twice", remedy="give each once: it would step twice")
    own = {id(parameter) for parameter in model.parameters()}
    for optimizer in optimizers:
        name = type(optimizer).__name__
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise SessionError("prepare()", found=f"{name}, whose step needs a closure that runs backward several times", remedy="use one without")
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if own and not any(id(parameter) in own for parameter in held):
            raise SessionError("prepare()", found=f"{name} updates no parameter of the model", remedy="build it from model.parameters() after moving the model")
        if any(parameter.grad is not None for parameter in held):
            raise SessionError("prepare()", found="gradients from before the session", remedy="optimizer.zero_grad() first")


def check_model(model: torch.nn.Module, device: torch.device, params: str, compute: str) -> None:
    """Refuse a model whose parameters are elsewhere, not there yet, or not in the format of the recipe.

    Raises:
        SessionError: names the parameter or module.
    """
    wanted = FORMATS[params].torch_dtype
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True and isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
            raise SessionError("prepare()", found=f"{name or 'the model'} has sparse gradients", remedy="build it with sparse=False")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            raise SessionError("prepare()", found=f"parameter {name} is not initialized", remedy="run one forward pass of the lazy modules first")
        if parameter.device.type != device.type:
            raise SessionError("prepare()", found=f"parameter {name} is on {parameter.device}", remedy=f"model.to({str(device)!r}) first")
        real = parameter.is_floating_point()
        if parameter.is_complex() or (real and str(parameter.dtype) != f"torch.{wanted}"):
            remedy = f"model.to(torch.{wanted}): the recipe computes in {compute} by itself"
            raise SessionError("prepare()", found=f"parameter {name} is {parameter.dtype}, the recipe keeps {wanted}", remedy=remedy)
