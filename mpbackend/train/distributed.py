"""The ranks of one run: that they run the same plan, how their gradients are reduced, and that they decide alike."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from mpbackend.errors import SessionError
from mpbackend.train.agreement import Agreement, libraries, total_count
from mpbackend.train.reduction import Wire, install, reduce_flat
from mpbackend.train.sharded import is_sharded
from mpbackend.train.wrapping import Wrapping, check_policies, dtype_of, forget_held, library_division, reduce_held, set_gradient_sync

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

    from mpbackend.backend import Backend
    from mpbackend.planning import Plan


def find_ranks(
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    plan: Plan,
    backend: Backend,
    settings: Mapping[str, str] | None = None,
) -> Ranks | None:
    """Return the ranks that this process trains with; None without a process group, and for one rank whose parameters are not sharded.

    Called by every rank. A rank that finds something wrong tells the others, so that all of them raise.

    Args:
        model: the model, wrapped by its user or not.
        optimizers: its optimizers.
        plan: the plan of this rank.
        backend: tells which formats its collective library sums.
        settings: how the session is prepared, compared between the ranks like the plan.

    Raises:
        SessionError: ranks differ in plan or settings; the collective library cannot sum the plan's format; a sharded module has another policy than the plan.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    sharded = any(is_sharded(parameter) for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"])
    if dist.get_world_size() == 1 and not sharded:
        return None
    agreement = Agreement()
    try:
        facts = {"recipe": plan.recipe, "granted": plan.granted, "device": plan.device.arch, "micro_batches": str(plan.micro_batches), **(settings or {})}
        agreement.same("prepare()", {**facts, "plan": plan.hash}, remedy="prepare every rank with the same plan and settings")
        with agreement.together("prepare()"):
            wrapping = Wrapping(model)
            members = wrapping.members()
            check_policies(wrapping, plan)
            check_wire(plan, backend, wrapping)
        return Ranks(wrapping, agreement, plan, members, sharded=sharded)
    except BaseException:
        agreement.close()
        raise


def check_wire(plan: Plan, backend: Backend, wrapping: Wrapping) -> None:
    """Check that the collective library sums the plan's format; warn where it is not the one that the backend speaks for.

    Raises:
        SessionError: it does not; cites the row of the plan.
    """
    collectives = backend.collectives(plan.device)
    wire = plan.effective.reduce.format
    if wire not in collectives.reduces:
        decision = plan.decision("reduce.format")
        found = (
            f"{collectives.name} on {plan.device.key} sums {', '.join(collectives.reduces) or 'nothing'}; {decision.reason} ({decision.source or 'no source'})"
        )
        remedy = next((f"reduce.format={name}" for name in ("fp32", "bf16", "fp16") if name in collectives.reduces), "")
        raise SessionError(f"prepare() with reduce.format={wire}", found=found, remedy=remedy)
    group = wrapping.replicated[0].process_group if wrapping.replicated else None
    used = libraries(group).get(plan.device.type, "nothing")
    if used != collectives.name:
        found = f"the process group reduces {plan.device.type} tensors through {used}"
        warnings.warn(f"{found}; what is summed exactly is known of {collectives.name} only", stacklevel=4)


class Ranks:
    """The ranks of one run.

    Args:
        wrapping: what the model is wrapped in.
        agreement: exchanges values on the host.
        plan: the plan, the same on every rank.
        members: ranks over which gradients are averaged.
        sharded: whether optimizers hold parts of parameters.

    Attributes:
        rank: this process's rank.
        size: all ranks of the run.
        joined: whether gradients are reduced between the ranks, or parameters sharded over them; otherwise each rank trains a model of its own.
        sharded: whether gradients are ``DTensor``s, of which a rank may hold a part.
        own_sums: whether the session itself reduces gradients, once a step: DDP would reduce those of 16-bit parameters, not the fp32 sums made of them, and
            does not know parameters that were cast after it was made.
        communication: who reduces gradients and how, for the record.
    """

    def __init__(self, wrapping: Wrapping, agreement: Agreement, plan: Plan, members: Sequence[int], *, sharded: bool) -> None:
        self.rank, self.size = agreement.rank, agreement.size
        self.joined = bool(wrapping) or sharded
        self.sharded = sharded
        self.own_sums = bool(wrapping.replicated) and plan.effective.params != "fp32"
        self._members = list(members)
        self._agreement = agreement
        self._replicated = wrapping.replicated
        self._sharded_modules = list(wrapping.sharded.values())
        self._roots = wrapping.roots()
        self._divisor = wrapping.divisor() if wrapping else 1.0
        self._suppressed = Suppressed(self._replicated)
        self._reducing = not self.own_sums  # a forward pass outside the session's autocast is one that DDP and FSDP2 reduce by themselves
        self._told: bool | None = None
        self._pending = False
        reduce = plan.effective.reduce
        group = self._replicated[0].process_group if self._replicated else None
        self._wire = Wire(dtype_of(reduce.format), reduce.divide, len(self._members), group)
        self.communication = self._arrange(f"{reduce.format}, divide {reduce.divide}")

    def _arrange(self, planned: str) -> str:
        """Make the wrapper reduce as planned, or warn; return who reduces."""
        if self.own_sums:
            return f"{planned}: sums of all micro-batches, by the session"
        if self._replicated:
            return "; ".join(dict.fromkeys(install(model, self._wire) for model in self._replicated))
        if self._roots:
            before, after = library_division(self._wire.dtype, round(self._divisor))
            if before > 1 and (after if self._wire.divide == "before" else before) > 1:
                warnings.warn(f"FSDP2 divides sums in {self._wire.dtype} by {before} before and {after} after; the plan says {planned}", stacklevel=5)
            return f"{planned.partition(',')[0]}: FSDP2 divides by {before} before and {after} after" if before > 1 else f"{planned.partition(',')[0]}: FSDP2"
        if not self.sharded:
            wrappers = "neither DDP nor fully_shard wraps the model"
            warnings.warn(f"{self.size} ranks, and {wrappers}: gradients are not reduced between them", stacklevel=4)
        return "none: the model is not wrapped"

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self._agreement.barrier()

    def together(self, asked: str) -> AbstractContextManager[None]:
        """Return a context whose body raises on every rank when it raises on one; see ``Agreement.together``."""
        return self._agreement.together(asked)

    def no_sync(self, last: bool) -> AbstractContextManager[object] | None:
        """Return what to enter around the forward pass of a micro-batch so that gradients are reduced once a step; None where there is nothing to enter.

        Args:
            last: whether the micro-batch is the last of its step; only that one reduces.
        """
        self._reducing = last and not self.own_sums
        if self._roots and self._reducing is not self._told:  # FSDP2 looks when it comes to the backward pass
            self._told = self._reducing
            set_gradient_sync(self._roots, self._reducing)
        return None if self._reducing or not self._replicated else self._suppressed

    def went_backward(self) -> None:
        """Note that a backward pass has ended: its gradients, and those of earlier ones, are reduced now or still wait for it."""
        self._pending = not self._reducing

    def settle(self, sources: Sequence[torch.Tensor]) -> None:
        """Reduce what no wrapper has reduced: the sums of a session that makes its own, and a group of micro-batches that ended early. Else do nothing.

        Called at the boundary of a step before its gradients are collected, on every rank; a second call does nothing.

        Args:
            sources: the tensors whose ``grad`` the step uses, the same on every rank.
        """
        if not self._pending:
            return
        self._pending = False
        if self._roots:
            self._told = True
            reduce_held(self._roots)
        elif self._replicated:
            reduced = {id(parameter) for model in self._replicated for parameter in model.parameters()}
            mine = [source for source in sources if self.own_sums or id(source) in reduced]
            if not self.own_sums or any(model.find_unused_parameters for model in self._replicated):
                self._fill(mine)
            self.reduce_sums([source.grad for source in mine if source.grad is not None])

    def drop(self) -> None:
        """Give up what waits to be reduced: the step's gradients are dropped, and FSDP2 holds some that no parameter shows."""
        if self._pending:
            self._pending = False
            forget_held(self._sharded_modules)

    def _fill(self, sources: Sequence[torch.Tensor]) -> None:
        """Give a gradient of zeros to every source that has one on another rank only, as DDP does."""
        having = self._agreement.objects([index for index, source in enumerate(sources) if source.grad is not None])
        for index in sorted({index for rank in self._members for index in having[rank]}):
            if sources[index].grad is None:
                sources[index].grad = torch.zeros_like(sources[index])

    def reduce_sums(self, sums: Sequence[torch.Tensor]) -> None:
        """Average tensors over the ranks in place, in the plan's format and with its division; no host synchronization."""
        reduce_flat(sums, self._wire)

    def agree_found(self, found: torch.Tensor) -> torch.Tensor:
        """Return whether something was found on any rank, by element: a bool tensor of the shape of ``found``, on its device. Reads nothing."""
        if not self.joined:
            return found
        flags = found.to(torch.float32, copy=True)  # the one format that every library compares
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return flags > 0

    def first_of(self, order: Sequence[str], own: str) -> str:
        """Return the word that stands first in ``order`` among those of all ranks, so that ranks give one reason; waits on the host.

        Args:
            order: the possible words, the gravest first.
            own: this rank's.
        """
        said = set(self._agreement.objects(own)) if self.joined else {own}
        return next((word for word in order if word in said), own)

    def total(self, count: float) -> float:
        """Return the sum of a count over the ranks whose gradients are averaged, rounded once in fp64; waits on the host, not on the device.

        Args:
            count: this rank's, 0 or more.

        Raises:
            SessionError: a rank's count is negative or not finite, or all are 0.
        """
        if not self.joined:
            return total_count([count])
        counts = self._agreement.numbers(count)
        return total_count([counts[rank] for rank in self._members])

    def factor(self) -> float:
        """Return what reduced gradients are multiplied by to be the sum over ranks: the number that the reduction divided by."""
        return self._divisor

    def agree_error(self, message: str | None) -> str | None:
        """Return what went wrong on any rank, the same text on all; None when nothing did."""
        return self._agreement.error(message)

    def close(self) -> None:
        """Give up what was made for the run."""
        self._agreement.close()


class Suppressed:
    """A context in which DDP does not arrange the reduction of a forward pass; made once and entered often, also inside itself.

    Args:
        models: the DDP modules.
    """

    def __init__(self, models: Sequence[DistributedDataParallel]) -> None:
        self._models = models
        self._before: list[list[bool]] = []

    def __enter__(self) -> None:
        self._before.append([model.require_backward_grad_sync for model in self._models])
        for model in self._models:
            model.require_backward_grad_sync = False

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for model, before in zip(self._models, self._before.pop(), strict=True):
            model.require_backward_grad_sync = before
