"""What ``select`` returns: a device with the backend that answers for it, from which plans and sessions are made."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch

from mpbackend.backend import Backend
from mpbackend.decisions import CONV_FORMAT_OF_LOW_BIT
from mpbackend.device import Device
from mpbackend.errors import PlanError, SessionError
from mpbackend.granting import OnUnsupported
from mpbackend.lowbit import is_low_bit_recipe
from mpbackend.planning import Plan
from mpbackend.plugins import Plugins, load_plugins
from mpbackend.recipe import Recipe
from mpbackend.selection import plan as plan_for
from mpbackend.selection import select_device
from mpbackend.train.checks import (
    check_eps,
    check_model,
    check_optimizers,
    check_options,
    check_schedulers,
    check_stateful,
    check_strangers,
    check_unscalable,
    warn_of_lost_precision,
)
from mpbackend.train.clipping import check_limits
from mpbackend.train.data import weights_fingerprint
from mpbackend.train.distributed import find_ranks
from mpbackend.train.fence import Fence
from mpbackend.train.gradients import own_limits
from mpbackend.train.hazards import warn_of_hazards
from mpbackend.train.ownership import claim
from mpbackend.train.policy import NativePolicy, PinnedPolicy
from mpbackend.train.recording import Recording
from mpbackend.train.schedule import Scheduler
from mpbackend.train.session import Session
from mpbackend.train.switches import ENCODER_FASTPATH
from mpbackend.train.weights import make_weights
from mpbackend.train.wrapping import buffers_beside, fsdp_policy

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
Schedulers = Scheduler | Sequence[Scheduler]


def select(spec: str = "auto", *, environ: Mapping[str, str] | None = None) -> Target:
    """Select the device to train on.

    Args:
        spec: ``auto``, or a backend's name or device type with ``:`` and an index or device key: ``cpu``, ``cpu:0``. ``auto`` is overridden by the environment
            variable ``MPBACKEND``.
        environ: environment; the process's own when omitted.

    Raises:
        UnknownNameError: no installed plugin answers for the spec.
        BackendError: the device is not usable; gives cause and remedy.
    """
    plugins = load_plugins()
    selection = select_device(spec, plugins, environ)
    return Target(selection.backend, selection.device, plugins)


class Target:
    """A device and its backend.

    Args:
        backend: the backend.
        info: the device as the backend found it.
        plugins: the loaded plugins, for matrices and presets.

    Attributes:
        device: the torch device; ``model.to(target.device)``.
        info: the device as the backend found it.
    """

    def __init__(self, backend: Backend, info: Device, plugins: Plugins) -> None:
        self.backend = backend
        self.info = info
        self.plugins = plugins
        self.device = torch.device(info.type) if info.type == "cpu" else torch.device(info.type, info.index)

    def plan(self, recipe: Recipe | str, *, on_unsupported: OnUnsupported = "error", strict: bool = False, micro_batches: int = 1) -> Plan:
        """Plan a recipe onto this device; see ``mpbackend.plan``."""
        return plan_for(recipe, self.info, plugins=self.plugins, on_unsupported=on_unsupported, strict=strict, micro_batches=micro_batches)

    def prepare(
        self,
        model: torch.nn.Module,
        optimizer: Optimizers,
        recipe: Recipe | str | None = None,
        *,
        plan: Plan | None = None,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        micro_batches: int | None = None,
        average: bool = False,
        scheduler: Schedulers = (),
        stateful: Mapping[str, Any] | None = None,
        record: str | os.PathLike[str] | None = None,
        seed: int | None = None,
        fence: Literal["set", "report"] = "set",
        on_unsupported: OnUnsupported | None = None,
    ) -> Session:
        """Make a session.

        Args:
            model: the model, on ``device``.
            optimizer: one optimizer or several, over the model's parameters.
            recipe: recipe to plan; or give ``plan``.
            plan: a plan made for this device.
            clip_norm: clip gradients to this L2 norm; None leaves them. A parameter group that holds ``clip_norm`` or ``clip_value`` is clipped by itself.
            clip_value: clip each element of the gradients to this absolute value; not together with ``clip_norm``.
            micro_batches: micro-batches a step, summed; the plan's when a plan is given, else 1.
            average: divide the sum by the micro-batches seen.
            scheduler: learning-rate schedulers to step after every taken step; one that needs a metric is yours to step.
            stateful: objects of your own that have ``state_dict`` and ``load_state_dict``, by name, such as a sampler; saved and loaded with the session.
            record: folder to write the record to.
            seed: seed of the run, for the record.
            fence: ``set`` the global switches of the plan, or only ``report`` them.
            on_unsupported: policy when ``recipe`` is planned here, ``error`` by default; not with ``plan``, which was made under one.

        Raises:
            PlanError: the plan is refused, or no installed plugin runs it here.
            SessionError: the model is elsewhere, or its parameters are not in the format that the recipe says.
        """
        limits = check_limits(clip_norm, clip_value)
        seed = check_options(fence, record, seed)
        if (recipe is None) == (plan is None):
            raise SessionError("prepare()", found="recipe and plan" if plan is not None else "neither recipe nor plan", remedy="give exactly one of them")
        if plan is None:
            plan = self.plan(recipe or "", on_unsupported=on_unsupported or "error", micro_batches=1 if micro_batches is None else micro_batches)
        elif on_unsupported is not None or micro_batches not in (None, plan.micro_batches):
            found = f"a plan for micro_batches={plan.micro_batches}, on_unsupported={plan.on_unsupported!r}, and other values beside it"
            raise SessionError("prepare()", found=found, remedy="give them to target.plan()")
        chosen = plan
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        schedulers = [scheduler] if isinstance(scheduler, Scheduler) else list(scheduler)
        check_schedulers(schedulers)
        own = check_stateful(stateful)
        dtype = autocast_dtype(chosen)
        settings = {
            "clip_norm": "none" if clip_norm is None else f"{clip_norm:g}",
            "clip_value": "none" if clip_value is None else f"{clip_value:g}",
            "micro_batches": str(chosen.micro_batches),
            "average": str(average).lower(),
            "on_unsupported": chosen.on_unsupported,
            "fence": fence,
            "optimizers": ", ".join(type(item).__name__ for item in optimizers),
            "schedulers": ", ".join(type(item).__name__ for item in schedulers) or "none",
        }
        switches = [*self.backend.switches(self.info), ENCODER_FASTPATH]
        wanted = {**chosen.switches, **({} if dtype is None else {ENCODER_FASTPATH.name: "false"})}
        resources = ExitStack()
        recording = None
        try:
            owner = f"the session of {chosen.recipe}"
            ranks = find_ranks(model, optimizers, chosen, self.backend, settings)
            if ranks is not None:
                resources.callback(ranks.close)
            with nullcontext() if ranks is None else ranks.together("prepare()"):
                resources.callback(claim(model, optimizers, owner))
                self._check(chosen, model, optimizers)
                for hook in warn_of_hazards(model):
                    resources.callback(hook.remove)
                held = Fence(switches, wanted, mode=fence, backend=self.backend.name, owner=owner)
                resources.enter_context(held)
                resources.callback(warn_of_changes, held)
                if dtype is not None:
                    pinned = chosen.effective.sensitive == "fp32"
                    policy = PinnedPolicy(self.backend.autocast_key, self.backend.op_policy(self.info)) if pinned else NativePolicy(self.backend.autocast_key)
                    resources.enter_context(policy)
                if limits.value is not None or own_limits(optimizers):
                    check_unscalable(chosen, "prepare() with limits of single values or groups")
                # Before formats change: the same start has the same fingerprint under every recipe.
                start = weights_fingerprint(model) if record is not None else ""
                conversion = list(self.backend.convert(model, chosen))
                weights = make_weights(model, optimizers, chosen.effective, seed=seed, reduces=ranks is not None and ranks.own_sums)
                if weights is not None:
                    resources.callback(weights.close)
                conversion += buffers_beside(model, chosen) if weights is None else weights.rows()
                if record is not None and (ranks is None or ranks.rank == 0):
                    recording = Recording(
                        record, chosen, self.backend, model, conversion, held.report, seed, settings, start=start, weights=weights, ranks=ranks
                    )
            session = Session(
                model,
                optimizers,
                chosen,
                self.backend,
                autocast_dtype=dtype,
                limits=limits,
                average=average,
                schedulers=schedulers,
                recording=recording,
                conversion=conversion,
                resources=resources,
                weights=weights,
                ranks=ranks,
                recorded=record is not None,
                stateful=own,
            )
            if weights is not None:
                weights.commit()
            return session
        except BaseException:
            if recording is not None:
                recording.discard()
            resources.close()
            raise

    def fsdp_policy(self, plan: Plan) -> MixedPrecisionPolicy:
        """Return the policy for ``fully_shard(module, mp_policy=...)`` that carries a plan out; see ``mpbackend.train.wrapping.fsdp_policy``."""
        return fsdp_policy(plan)

    def _check(self, plan: Plan, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Check that the plan runs here and fits the model; see ``prepare``."""
        if plan.device != self.info:
            raise PlanError(f"plan for {plan.device.key}", found=f"the target is {self.info.key}", remedy="make the plan with target.plan()")
        if not plan.runnable:
            raise PlanError(f"{plan.granted} on {plan.device.key}", found="; ".join(plan.blockers), remedy="`mpbackend plan` shows what runs")
        check_model(model, self.device, plan.effective.params, plan.effective.compute.forward)
        check_optimizers(optimizers, model)
        check_strangers(optimizers, model, plan.effective)
        check_eps(optimizers, plan.effective)
        warn_of_lost_precision(plan, optimizers)


def autocast_dtype(plan: Plan) -> torch.dtype | None:
    """Return the dtype of autocast under a plan: the 16-bit compute format, None for fp32; under a low-bit recipe what runs that is not converted."""
    name = CONV_FORMAT_OF_LOW_BIT if is_low_bit_recipe(plan.effective) else plan.effective.compute.forward
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name)


def warn_of_changes(fence: Fence) -> None:
    """Warn when somebody changed a switch under a live session: part of the run had other arithmetic than the record's plan."""
    if fence.changed():
        warnings.warn(f"switches changed while the session was live: {', '.join(fence.changed())}", stacklevel=2)
