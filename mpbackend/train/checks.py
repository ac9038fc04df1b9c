"""What ``prepare`` checks before it touches anything: the model, the optimizers, and the words of its options."""

from __future__ import annotations

import inspect
import operator
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mpbackend.decisions import steps_natively
from mpbackend.errors import SessionError
from mpbackend.formats import FORMATS

if TYPE_CHECKING:
    from mpbackend.planning import Plan
    from mpbackend.recipe import Recipe

NAMED = 3
"""Parameters that a refusal names at most."""


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


def check_unscalable(plan: Plan, asked: str = "unscale()") -> None:
    """Refuse to unscale 16-bit gradient sums where they are: small ones would become zero. The session itself unscales them in fp32, as they are used.

    Raises:
        SessionError: names the format.
    """
    recipe = plan.effective
    if recipe.loss_scale.mode != "none" and recipe.grads != "fp32":
        remedy = "sum them in fp32 (grads=fp32), or clip with prepare(clip_norm=...)"
        raise SessionError(asked, found=f"gradients are summed in {recipe.grads} under a loss scale, and unscaling them there loses small ones", remedy=remedy)


def check_stateful(stateful: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the user's objects to save and load, checked.

    Raises:
        SessionError: one cannot tell or take its state.
    """
    found = dict(stateful or {})
    for name, item in found.items():
        missing = [method for method in ("state_dict", "load_state_dict") if not callable(getattr(item, method, None))]
        if missing or not isinstance(name, str) or not name:
            raise SessionError(f"prepare(stateful={{{name!r}: ...}})", found=f"{type(item).__name__} has no {missing[0]}()" if missing else "not a name")
    return found


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


def check_strangers(optimizers: Sequence[torch.optim.Optimizer], model: torch.nn.Module, recipe: Recipe) -> None:
    """Refuse tensors that the optimizers hold, that are no parameters of the model, and that the recipe does not update right.

    A session casts parameters of the model only and keeps masters for them only. Another tensor in 16 bits would be updated in 16 bits, and its gradient
    unscaled in them; one in fp64 or a complex one has no place in the norm of the gradients.

    Args:
        optimizers: the optimizers.
        model: the model.
        recipe: the effective recipe. A 16-bit format is accepted where the optimizers update the model's own parameters in it by themselves.

    Raises:
        SessionError: names shape, format and optimizer.
    """
    accepted = {torch.float32} | ({getattr(torch, str(FORMATS[recipe.params].torch_dtype))} if steps_natively(recipe) else set())
    own = {id(parameter) for parameter in model.parameters()}
    for optimizer in optimizers:
        misfits = [
            f"a tensor of shape {tuple(tensor.shape)} is {tensor.dtype}"
            for group in optimizer.param_groups
            for tensor in group["params"]
            if id(tensor) not in own and (tensor.is_complex() or (tensor.is_floating_point() and tensor.dtype not in accepted))
        ]
        if misfits:
            more = f" and {len(misfits) - NAMED} more" if len(misfits) > NAMED else ""
            found = f"in {type(optimizer).__name__}, beside the parameters of the model, {', '.join(misfits[:NAMED])}{more}"
            remedy = "make it fp32, or a parameter of the model: the session knows formats and masters of those only"
            raise SessionError("prepare()", found=found, remedy=remedy)


def check_model(model: torch.nn.Module, device: torch.device, params: str, compute: str) -> None:
    """Refuse a model whose parameters are elsewhere, not there yet, or in a format that the recipe neither keeps nor makes.

    Args:
        model: the model.
        device: where it must be.
        params: format that the recipe keeps parameters in; a 16-bit one is made of fp32 parameters by the session.
        compute: format of its matrix products.

    Raises:
        SessionError: names the parameters or the module.
    """
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True and isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
            raise SessionError("prepare()", found=f"{name or 'the model'} has sparse gradients", remedy="build it with sparse=False")
    accepted = {getattr(torch, str(FORMATS[name].torch_dtype)) for name in (params, "fp32")}
    misfits: list[tuple[str, torch.dtype]] = []
    for name, parameter in model.named_parameters():
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            raise SessionError("prepare()", found=f"parameter {name} is not initialized", remedy="run one forward pass of the lazy modules first")
        if parameter.device.type != device.type:
            raise SessionError("prepare()", found=f"parameter {name} is on {parameter.device}", remedy=f"model.to({str(device)!r}) first")
        if parameter.is_complex() or (parameter.is_floating_point() and parameter.dtype not in accepted):
            misfits.append((name, parameter.dtype))
    if misfits:
        shown = ", ".join(f"{name} is {dtype}" for name, dtype in misfits[:NAMED])
        more = f" and {len(misfits) - NAMED} more" if len(misfits) > NAMED else ""
        found = f"{'parameters' if len(misfits) > 1 else 'parameter'} {shown}{more}; the recipe keeps {params}"
        raise SessionError("prepare()", found=found, remedy=remedy_for(misfits[0][1], params, compute))


def remedy_for(found: torch.dtype, params: str, compute: str) -> str:
    """Return what to do about parameters in a format that a recipe does not keep."""
    masters = {torch.float16: "fp16-master", torch.bfloat16: "bf16-master"}.get(found)
    if params == "fp32" and masters is not None:
        return f"recipe {masters!r} trains them with fp32 masters; or model.float(): the recipe computes in {compute} by itself"
    if params == "fp32":
        return f"model.float(): the recipe computes in {compute} by itself"
    return f"model.float() first: the session makes {params} of fp32 parameters and keeps buffers"


def check_eps(optimizers: Sequence[torch.optim.Optimizer], recipe: Recipe) -> None:
    """Refuse an ``eps`` that is zero where it is added: dividing by the root of a vanished second moment would give infinity.

    Args:
        optimizers: the optimizers.
        recipe: the effective recipe; its arithmetic is fp32 unless the optimizers update 16-bit parameters by themselves.

    Raises:
        SessionError: names the optimizer, the format and the smallest ``eps`` that it holds.
    """
    for role, fmt in (
        ("updates", FORMATS[recipe.params if steps_natively(recipe) else "fp32"]),
        ("optimizer.exp_avg_sq", FORMATS[recipe.optimizer.exp_avg_sq]),
    ):
        for optimizer in optimizers:
            for index, group in enumerate(optimizer.param_groups):
                values = group.get("eps")
                for eps in values if isinstance(values, (tuple, list)) else (values,):
                    if isinstance(eps, float) and 0 < eps <= fmt.smallest_subnormal / 2:  # ties to even: half of it is zero
                        found = f"eps {eps:g} of group {index} is 0 in {fmt}, the format of {role}"
                        remedy = f"give an eps of {fmt.smallest_subnormal:.1e} or more, or keep {role} in fp32: a master and fp32 moments"
                        raise SessionError(f"prepare() with {type(optimizer).__name__}", found=found, remedy=remedy)


def warn_of_lost_precision(plan: Plan, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Warn of updates that the recipe loses: of weights without anything that keeps them, and of second moments that hardly move.

    A second moment v moves by (1 - beta2)(g^2 - v). While g^2 is near v that is below half a spacing of v, so that v stands still: in a format with m fraction
    bits half a spacing is from 2^-(m+2) to 2^-(m+1) of v.

    Args:
        plan: the plan.
        optimizers: the optimizers; ``betas`` of their groups are read.
    """
    for decision in plan.decisions:
        if decision.role == "params" and decision.grant == "warned":
            warnings.warn(f"{plan.granted}: {decision.reason}", stacklevel=3)
    fmt = FORMATS[plan.effective.optimizer.exp_avg_sq]
    least = fmt.eps / 2
    for optimizer in optimizers:
        decays = {decay for group in optimizer.param_groups if (decay := second_decay(group)) is not None}
        slow = sorted(decay for decay in decays if 1 - decay < least)
        if slow:
            found = f"beta2 {slow[-1]:g} moves a second moment in {fmt} by {1 - slow[-1]:.1e} of the difference"
            remedy = f"half a spacing is up to {least:.1e} of it, so it hardly moves; keep optimizer.exp_avg_sq=fp32"
            warnings.warn(f"{type(optimizer).__name__}: {found}, {remedy}", stacklevel=3)


def second_decay(group: dict[str, Any]) -> float | None:
    """Return the decay of the second moment of a parameter group; None where it has none."""
    betas = group.get("betas")
    decay = betas[1] if isinstance(betas, (tuple, list)) and len(betas) > 1 else None
    return float(decay) if isinstance(decay, (int, float)) else None
