"""The subject of the checks: one backend on one device, and the ways in which a session would run on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mpbackend.backend import Backend
from mpbackend.conformance.answer import Answer, skip, together
from mpbackend.decisions import Decision
from mpbackend.device import Device
from mpbackend.errors import MpbackendError, PlanError
from mpbackend.matrix import Matrix
from mpbackend.planning import Plan
from mpbackend.plugins import Plugins
from mpbackend.target import Target, autocast_dtype
from mpbackend.train.fence import Fence
from mpbackend.train.policy import PinnedPolicy
from mpbackend.train.session import Session

PLAIN = ("fp32", "bf16", "fp16")
"""Formats of plain operands that a preset of the same name computes in."""

DTYPES: Mapping[str, torch.dtype] = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

OWNER = "the conformance checks"


@dataclass(frozen=True)
class Running:
    """A plan whose switches and policy are set.

    Attributes:
        plan: the plan.
        backend: what executes it.
    """

    plan: Plan
    backend: Backend

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Enter what a session enters around a forward pass: the execution context, and autocast inside."""
        dtype = autocast_dtype(self.plan)
        with self.backend.execute(self.plan), torch.autocast(self.plan.device.type, dtype=dtype, enabled=dtype is not None):
            yield

    def backward(self) -> AbstractContextManager[None]:
        """Return what a session enters around a backward pass."""
        return self.backend.execute(self.plan)


@dataclass(frozen=True)
class Subject:
    """What every check is given.

    Attributes:
        backend: the backend.
        device: one of its devices.
        plugins: the loaded plugins, in which ``backend`` answers for its name.
        quick: leave out the sizes that take long.
        matrix: the capability matrices.
        target: what ``mpbackend.select`` would return.
        plans: plans by recipe, or why there is none.
        told: what a fresh process told about the backend: its status and its last line, for the checks that need one.
    """

    backend: Backend
    device: Device
    plugins: Plugins
    quick: bool = False
    matrix: Matrix = field(init=False)
    target: Target = field(init=False)
    plans: dict[str, Plan | str] = field(init=False, default_factory=dict, repr=False, compare=False)
    told: list[tuple[int, str]] = field(init=False, default_factory=list, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Let the very backend answer for its name, whatever the plugins hold under it."""
        plugins = replace(self.plugins, backends={**self.plugins.backends, self.backend.name: self.backend})
        object.__setattr__(self, "plugins", plugins)
        object.__setattr__(self, "matrix", plugins.matrix())
        object.__setattr__(self, "target", Target(self.backend, self.device, plugins))

    @property
    def place(self) -> torch.device:
        """The torch device."""
        return self.target.device

    def plan(self, recipe: str) -> Plan | str:
        """Return the plan of a recipe that runs here, or why there is none; made once."""
        if recipe not in self.plans:
            self.plans[recipe] = self._plan(recipe)
        return self.plans[recipe]

    def _plan(self, recipe: str) -> Plan | str:
        try:
            plan = self.target.plan(recipe, on_unsupported="emulate")
        except PlanError as error:
            reasons = [decision.reason for decision in error.decisions if isinstance(decision, Decision)]
            return f"refused: {reasons[0]}" if reasons else str(error)
        except MpbackendError as error:
            return str(error)
        return plan if plan.runnable else plan.blockers[0]

    @contextmanager
    def running(self, plan: Plan) -> Iterator[Running]:
        """Set switches and policy as a session of a plan does, and restore them."""
        with ExitStack() as stack:
            stack.enter_context(Fence(self.backend.switches(self.device), plan.switches, backend=self.backend.name, owner=OWNER))
            if autocast_dtype(plan) is not None and plan.effective.sensitive == "fp32":
                stack.enter_context(PinnedPolicy(self.backend.autocast_key, self.backend.op_policy(self.device)))
            yield Running(plan, self.backend)

    def session(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, recipe: str, **options: Any) -> Session:
        """Return a session, emulating what the device lacks; options as for ``Target.prepare``.

        Raises:
            PlanError: the recipe does not run here.
        """
        plan = self.plan(recipe)
        if isinstance(plan, str):
            raise PlanError(recipe, found=plan)
        return self.target.prepare(model, optimizer, plan=plan, **options)

    def each_format(self, judge: Callable[[Running, str], Answer], formats: tuple[str, ...] = PLAIN) -> Answer:
        """Return one answer over every plain format that the device computes in.

        Args:
            judge: gives the answer for one format, while its plan's switches and policy are set.
            formats: presets to go through.
        """
        answers: dict[str, Answer] = {}
        for name in formats:
            plan = self.plan(name)
            if isinstance(plan, str):
                answers[name] = skip(plan)
                continue
            with self.running(plan) as running:
                answers[name] = judge(running, name)
        return together(answers)
