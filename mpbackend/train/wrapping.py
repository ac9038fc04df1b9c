"""What a model is wrapped in to run on several ranks: DDP, FSDP2's ``fully_shard``, or nothing; and the policy that FSDP2 gets from a plan."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mpbackend.errors import SessionError
from mpbackend.formats import FORMATS, format_name

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

    from mpbackend.planning import Plan

DIVIDED_AT_ONCE = (torch.float32, torch.bfloat16)
"""Formats that FSDP2 averages in one operation; in others it divides partly before and partly after the sum (torch 2.13, ``_get_gradient_divide_factors``)."""


def dtype_of(name: str) -> torch.dtype:
    """Return the torch dtype that a format is stored in."""
    dtype: torch.dtype = getattr(torch, str(FORMATS[name].torch_dtype))
    return dtype


class Wrapping:
    """The wrappers found in a model.

    Args:
        model: the model that is trained; a wrapper is the model itself or a module of it.

    Attributes:
        replicated: the DDP modules.
        sharded: the modules that ``fully_shard`` was applied to, by name, outermost first.

    Raises:
        SessionError: a wrapper whose arithmetic the plan cannot answer for.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        loaded: Any = sys.modules.get("torch.distributed.fsdp")
        modules = dict(model.named_modules())
        self.replicated = [module for module in modules.values() if isinstance(module, DistributedDataParallel)]
        self.sharded: dict[str, FSDPModule] = {}
        if loaded is not None:
            self.sharded = {name: module for name, module in modules.items() if isinstance(module, loaded.FSDPModule)}
            if any(isinstance(module, loaded.FullyShardedDataParallel) for module in modules.values()):
                raise SessionError("prepare()", found="a FullyShardedDataParallel, which flattens parameters", remedy="wrap with fully_shard (FSDP2)")
        for module in self.replicated:
            if getattr(module, "mixed_precision", None) is not None:
                raise SessionError("prepare()", found="a DDP with mixed precision of its own", remedy="leave its mixed_precision out: the plan says it")

    def __bool__(self) -> bool:
        """Whether there is any wrapper."""
        return bool(self.replicated or self.sharded)

    def roots(self) -> list[FSDPModule]:
        """Return the sharded modules that no other sharded module holds."""
        inner = {id(child) for module in self.sharded.values() for child in module.modules() if child is not module}  # type: ignore[attr-defined] # mixed into nn.Module
        return [module for module in self.sharded.values() if id(module) not in inner]

    def members(self) -> list[int]:
        """Return the ranks, counted in the default group, over which gradients are averaged; this rank alone where nothing averages.

        Raises:
            SessionError: parts of the model average over different ranks.
        """
        found = {tuple(dist.get_process_group_ranks(module.process_group)) for module in self.replicated}
        found |= {tuple(sorted(group.mesh_info.mesh.mesh.flatten().tolist())) for module in self.sharded.values() for group in parameter_groups(module)}
        if len(found) > 1:
            sizes = " and ".join(str(len(ranks)) for ranks in sorted(found))
            raise SessionError("prepare()", found=f"parts of the model average gradients over {sizes} ranks", remedy="average all of it over the same ranks")
        return list(found.pop()) if found else [dist.get_rank()]

    def divisor(self) -> float:
        """Return what a sum over ranks is divided by when gradients arrive: the number of ranks, unless FSDP2 was told another one."""
        told = {group.gradient_divide_factor for module in self.sharded.values() for group in parameter_groups(module)} - {None}
        return float(told.pop()) if len(told) == 1 else float(len(self.members()))


def parameter_groups(module: FSDPModule) -> Iterator[Any]:
    """Yield what FSDP2 keeps about the parameters of one module; torch has no public name for it."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch < 2.13 has one group a module
    yield from [state._fsdp_param_group] if groups is None and state._fsdp_param_group is not None else groups or []


def gathered_format(plan: Plan) -> str | None:
    """Return the format that FSDP2 gathers parameters in, None for the one that they are stored in.

    Under a recipe with low-precision working weights and fp32 masters the sharded parameters are the masters and the gathered ones the working weights.
    """
    recipe = plan.effective
    return recipe.params if recipe.master == "fp32" and recipe.params != "fp32" else None


def fsdp_policy(plan: Plan) -> MixedPrecisionPolicy:
    """Return the policy for ``fully_shard(module, mp_policy=...)`` that carries a plan out.

    With fp32 parameters FSDP2 gathers fp32 and autocast casts; with working weights it gathers those from the sharded fp32 masters, of which there is no second
    copy. Gradients are summed in the plan's ``reduce.format`` and arrive in the format of the sharded parameters.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    gathered = gathered_format(plan)
    return MixedPrecisionPolicy(param_dtype=None if gathered is None else dtype_of(gathered), reduce_dtype=dtype_of(plan.effective.reduce.format))


def check_policies(wrapping: Wrapping, plan: Plan) -> None:
    """Compare the policy of every sharded module with the plan's.

    Raises:
        SessionError: they differ, or the masters would not be fp32; names the module and what was found.
    """
    wanted = fsdp_policy(plan) if wrapping.sharded else None
    for name, module in wrapping.sharded.items():
        stored = next((parameter.dtype for parameter in module.parameters()), torch.float32)  # type: ignore[attr-defined] # mixed into nn.Module
        if gathered_format(plan) is not None and stored != torch.float32:
            found = f"{name or 'the model'} was sharded in {stored}, and its parts are the masters that the recipe keeps in fp32"
            raise SessionError("prepare()", found=found, remedy="apply fully_shard to the fp32 model")
        found, asked = in_words(module._get_fsdp_state()._mp_policy, stored), in_words(wanted, stored)
        if found != asked:
            remedy = "fully_shard(module, mp_policy=target.fsdp_policy(plan))"
            raise SessionError("prepare()", found=f"{name or 'the model'} was sharded with {found}, the plan has {asked}", remedy=remedy)


def in_words(policy: Any, stored: torch.dtype) -> str:
    """Return a policy as the formats that it gathers and sums in, its defaults filled in."""
    gathers = policy.param_dtype or stored
    return f"param_dtype={gathers}, reduce_dtype={policy.reduce_dtype or gathers}"


def library_division(dtype: torch.dtype, size: int) -> tuple[int, int]:
    """Return by what FSDP2 divides before and after its sum over ``size`` ranks: about the square root each, where the format may overflow."""
    before = 1
    while dtype not in DIVIDED_AT_ONCE and size % before == 0 and size / before > before:
        before *= 2
    return before, size // before


def buffers_beside(model: torch.nn.Module, plan: Plan) -> list[Mapping[str, str]]:
    """Return a row for each floating-point buffer that meets parameters of a lower precision in a forward pass: layer, action, reason.

    FSDP2 casts parameters and inputs, never buffers; ``model.to(dtype)`` casts all of them.
    """
    low = gathered_format(plan) or plan.effective.params
    if dtype_of(low).itemsize > 2:
        return []
    return [
        {"layer": name, "action": "kept", "reason": f"a buffer in {format_name(buffer.dtype)} beside parameters in {low}"}
        for name, buffer in model.named_buffers()
        if buffer.is_floating_point() and buffer.dtype != dtype_of(low)
    ]


def set_gradient_sync(roots: list[FSDPModule], last: bool) -> None:
    """Tell FSDP2 whether the next backward pass reduces gradients."""
    for root in roots:
        root.set_requires_gradient_sync(last)


def reduce_held(roots: list[FSDPModule]) -> None:
    """Reduce the gradients that FSDP2 holds back since it was told not to reduce: what the end of a backward pass would have done.

    Raises:
        SessionError: this version of torch has another inside.
    """
    set_gradient_sync(roots, True)
    for root in roots:
        finish = getattr(root._get_fsdp_state(), "_root_post_backward_final_callback", None)
        if finish is None:
            found = f"gradients that FSDP2 of torch {torch.__version__} has not reduced, and no way to make it"
            raise SessionError("flush()", found=found, remedy="let the number of batches be a multiple of micro_batches")
        finish()


def forget_held(modules: Iterable[FSDPModule]) -> None:
    """Drop the gradients that FSDP2 holds back: a window that was given up must not reach the next one."""
    for module in modules:
        for group in parameter_groups(module):
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if (whole := getattr(parameter, "_unsharded_param", None)) is not None:
                    whole.grad = None
