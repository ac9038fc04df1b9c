"""Working weights: what stands between the parameters of a model and the arithmetic of its optimizers.

A recipe may keep parameters in 16 bits and update them in fp32, and may keep moments in other formats than the arithmetic has. The optimizers then hold
shadows (``mpbackend.train.shadow``) instead of the parameters, whoever wrote them; moments are cast up before a step and down after it. What a step needs only
while it runs is made for a part of the parameters at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mpbackend.decisions import steps_natively
from mpbackend.errors import SessionError
from mpbackend.recipe import Recipe
from mpbackend.train.casting import Casting, Row, is_fp32_shard
from mpbackend.train.holdings import Holdings
from mpbackend.train.kept import Kept, check_kept
from mpbackend.train.lost_updates import LostUpdates
from mpbackend.train.moments import Moments, dtype_of
from mpbackend.train.shadow import fill, write_back
from mpbackend.train.step_hooks import is_watched, put_first
from mpbackend.train.stochastic import StochasticRounding

PART_ELEMENTS = 1 << 24
"""Elements whose fp32 tensors exist at once during a step; a larger parameter makes a part of its own. Optimizers of ``torch.optim`` only: they treat each
parameter by itself. Any other steps once, on all of them."""

Optimizers = Sequence[torch.optim.Optimizer]
Part = list[list[Tensor]]
"""Parameters of each group of an optimizer that one call of its step updates."""


def make_weights(model: nn.Module, optimizers: Optimizers, recipe: Recipe, *, seed: int | None, reduces: bool = False) -> WorkingWeights | None:
    """Prepare a model and its optimizers for the storage roles of a recipe; see ``WorkingWeights``.

    Returns:
        None where there is nothing to do: everything is fp32 and buffers stay; or the parameters are fp32 shards of a wrapper that gathers them in the
        working format, so that they are the masters themselves.
    """
    others = {recipe.grads, recipe.optimizer.exp_avg, recipe.optimizer.exp_avg_sq} == {"fp32"} and recipe.buffers == "keep"
    masters = recipe.master == "fp32" and all(is_fp32_shard(parameter) for parameter in model.parameters())
    return None if others and (recipe.params == "fp32" or masters) else WorkingWeights(model, optimizers, recipe, seed=seed, reduces=reduces)


class WorkingWeights:
    """The weights of one session. Changes model and optimizers in place; ``close`` gives the optimizers their parameters back.

    Where the optimizers can update 16-bit parameters by themselves (no master, gradients and moments in the same format) they do, and nothing is held.
    A parameter that somebody else writes between two steps keeps what was written; see ``mpbackend.train.edits``.

    Where gradients are summed in fp32, a parameter's own ``grad`` is None after the backward pass: the sum is the ``grad`` of ``source(parameter)``. Whoever
    clips or logs gradients takes them from ``sources()``, which ``session.unscale()`` returns; ``clip_grad_norm_(model.parameters())`` sees no gradient,
    returns 0 and clips nothing.

    Args:
        model: parameters in fp32 or in the working format, checked by ``check_model``.
        optimizers: over parameters of the model; what else they hold is left as it is.
        recipe: a recipe without blockers, see ``mpbackend.planning.storage_blockers``.
        seed: seed of stochastic rounding; 0 when None. Ranks that hold the same weights need the same.
        reduces: whether the session reduces ``sources()`` between ranks itself. A wrapper that reduces would see neither fp32 sums nor cast parameters.

    Attributes:
        sample: set it to count lost updates from the next step on; ``take_lost`` clears it.

    Raises:
        SessionError: a parameter stands twice or cannot be cast, or a wrapper reduces its gradients. Model and optimizers are as they were.
    """

    def __init__(self, model: nn.Module, optimizers: Optimizers, recipe: Recipe, *, seed: int | None, reduces: bool = False) -> None:
        self._optimizers = tuple(optimizers)
        self._master = recipe.master
        self._dtype = dtype_of(recipe.params)
        low = recipe.params != "fp32"
        shadowed = low and not steps_natively(recipe)
        sums = shadowed and recipe.grads == "fp32"
        self._moments = Moments(recipe)
        self._stochastic = StochasticRounding(recipe.params, seed or 0) if recipe.master == "stochastic" else None
        self._lost = LostUpdates() if low and recipe.master == "none" else None
        self._casts = self._moments.differ(torch.float32)
        self._whole = not self._casts and (not shadowed or (recipe.master == "fp32" and sums))
        self._open: list[Tensor] = []
        self._hooks: list[Any] = []
        self._committed = self._closed = False
        self.sample = False
        if low and not reduces and any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
            remedy = "let the session reduce, or use a recipe with fp32 parameters"
            raise SessionError(f"{recipe.params} parameters", found="a wrapper reduces the gradients and would not see them", remedy=remedy)
        self._casting = Casting(model, self._dtype, None if recipe.buffers == "keep" else dtype_of(recipe.buffers))
        self._holdings = Holdings(
            model,
            self._optimizers,
            self._casting,
            self._moments,
            dtype=self._dtype,
            master=recipe.master if shadowed else None,
            sums=sums,
            rounding=None if self._stochastic is None else self._stochastic.round_into,
        )
        try:
            self._holdings.refresh()
            for optimizer in self._optimizers:
                self._hooks.append(put_first(optimizer, self._finish_part))
                self._hooks.append(optimizer.register_load_state_dict_post_hook(self._settle_moments))
                self._settle_moments(optimizer)
        except BaseException:
            self.close()
            raise

    def sources(self) -> list[Tensor]:
        """Return the tensors whose ``grad`` holds the gradient sums, each once, of what the optimizers hold now."""
        return list({id(source): source for source in self._holdings.sources()}.values())

    def source(self, tensor: Tensor) -> Tensor:
        """Return the tensor whose ``grad`` holds the gradient sum of a tensor that an optimizer holds."""
        return self._holdings.source(tensor)

    # a step

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer, multiplier: Tensor | float = 1.0) -> None:
        """Step one optimizer and round what it updated into the parameters.

        Args:
            optimizer: one of the session's.
            multiplier: factor to every gradient that the optimizer takes, applied in fp32 where it takes shadows: 16-bit gradients that carry a loss scale are
                not unscaled in 16 bits, which would flush small ones to zero.

        Raises:
            SessionError: the model was cast or moved since the session took it; nothing was updated.
            Exception: whatever the optimizer raises; the parameters of the part that it was updating are as they were.
        """
        self._holdings.refresh()
        self._holdings.check_kinds("step()")
        self.commit()
        groups = optimizer.param_groups
        full: Part = [group["params"] for group in groups]
        try:
            for part in self._parts(optimizer, full):
                for group, tensors in zip(groups, part, strict=True):
                    group["params"] = tensors
                self._begin_part(optimizer, part, multiplier)
                optimizer.step()
        finally:
            for group, tensors in zip(groups, full, strict=True):
                group["params"] = tensors
            if self._open:
                self._release(optimizer)

    def _parts(self, optimizer: torch.optim.Optimizer, full: Part) -> Iterator[Part]:
        """Yield what to update by one call each: everything, or as much as ``PART_ELEMENTS`` allows; parameters without a gradient are left out then."""
        if self._whole or not f"{type(optimizer).__module__}.".startswith("torch.optim.") or is_watched(optimizer):
            yield full
            return
        part: Part = [[] for _ in full]
        size = 0
        for index, tensors in enumerate(full):
            for tensor in tensors:
                if self._holdings.source(tensor).grad is None:
                    continue
                needed = tensor.numel() if self._holdings.shadow(tensor) is not None or self._moments.differ(tensor.dtype) else 0
                if size and size + needed > PART_ELEMENTS:
                    yield part
                    part, size = [[] for _ in full], 0
                part[index].append(tensor)
                size += needed
        yield part

    def _begin_part(self, optimizer: torch.optim.Optimizer, part: Part, multiplier: Tensor | float) -> None:
        """Fill what the optimizer is going to read."""
        self._open = [tensor for tensors in part for tensor in tensors]
        shadows = [shadow for tensor in self._open if (shadow := self._holdings.shadow(tensor)) is not None]
        self._holdings.follow(shadows)
        fill(shadows)
        for tensor in self._open if self._casts else ():
            if tensor in optimizer.state:
                self._moments.widen(optimizer.state[tensor], tensor.dtype)
        if self.sample and self._lost is not None:
            for tensor in self._open:
                shadow = self._holdings.shadow(tensor)
                self._lost.open(tensor if shadow is None else shadow.parameter, tensor.grad)
        gradients = [tensor.grad for tensor in self._open if tensor.grad is not None]
        if gradients and (isinstance(multiplier, Tensor) or multiplier != 1.0):
            torch._foreach_mul_(gradients, multiplier)

    def _finish_part(self, optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        """Round what was updated into the parameters; called by the optimizer before the step hooks of others."""
        write_back([shadow for tensor in self._open if (shadow := self._holdings.shadow(tensor)) is not None])
        if self._lost is not None:
            self._lost.close()
        self._release(optimizer)

    def _release(self, optimizer: torch.optim.Optimizer) -> None:
        """Free what a part needed, and cast its moments down."""
        for tensor in self._open:
            shadow = self._holdings.shadow(tensor)
            if shadow is not None:
                shadow.release()
            if self._casts and tensor in optimizer.state:
                self._moments.narrow(optimizer.state[tensor])
        if self._lost is not None:
            self._lost.drop()
        self._open = []

    def _settle_moments(self, optimizer: torch.optim.Optimizer) -> None:
        """Give moments the recipe's formats: torch loads them in the format of what the optimizer holds."""
        for state in optimizer.state.values():
            self._moments.narrow(state)

    # what is told

    def take_lost(self) -> tuple[Tensor, Tensor] | None:
        """Return lost updates and updates considered since ``sample`` was set, int64 scalars on the device, and clear it.

        None where nothing was sampled, or where the recipe keeps what rounding loses.
        """
        self.sample = False
        return None if self._lost is None else self._lost.take()

    def stand_ins(self) -> list[tuple[Tensor, Tensor]]:
        """Return what the optimizers hold instead of a parameter, with the parameter."""
        return [(shadow.tensor, shadow.parameter) for shadow in self._holdings.shadows.values()]

    def held(self) -> list[Tensor]:
        """Return what is kept beside parameters, masters and the optimizers' state: Kahan terms."""
        return list(self._holdings.kept()["compensation"].values())

    def rows(self) -> list[Row]:
        """Return layer, action and reason of what was cast or left, and of how the parameters are updated."""
        told = [dict(row) for row in self._casting.rows]
        kept = {"fp32": "fp32 masters", "kahan": "Kahan terms", "stochastic": "stochastic rounding", "none": "nothing that keeps what rounding loses"}
        if self._holdings.shadows:
            count = len(self._holdings.shadows)
            reason = f"{count} parameter{'s are' if count > 1 else ' is'} updated in fp32, with {kept[self._master]}"
            told.append({"layer": "the optimizers", "action": "replaced", "reason": reason})
        if self._dtype != torch.float32:
            others = self._holdings.others()
            if others:
                told.append({"layer": "the optimizers", "action": "kept", "reason": f"{others} tensors are no parameters of the model: updated as they are"})
        return told

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return masters and Kahan terms by the parameter's name, and the states of stochastic rounding; not copied.

        They are those of the parameters as they are now, whoever wrote them.
        """
        self._holdings.follow_all()
        return self._holdings.kept() | {"stochastic": {} if self._stochastic is None else self._stochastic.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: Kept) -> None:
        """Continue from what ``state_dict`` returned; parameters follow their masters.

        Raises:
            DocumentError: names or shapes differ from those of this model and recipe; nothing was changed.
        """
        self._holdings.refresh()
        check_kept(self._holdings.kept(), state)
        if self._stochastic is not None:
            self._stochastic.load_state_dict(state.get("stochastic", {}))
        self.commit()
        for shadow in self._holdings.shadows.values():
            kept = state["masters"].get(shadow.name, state["compensation"].get(shadow.name))
            if kept is not None:
                shadow.restore(kept)

    # the end

    def commit(self) -> None:
        """Forget what the model was before: from here on ``close`` does not undo what was cast. A step commits by itself."""
        if not self._committed or self._casting.originals:
            self._committed = True
            self._casting.commit()

    def close(self) -> None:
        """Give the optimizers their parameters back; may be called twice.

        Before ``commit`` the model is as it was, bit for bit. Afterwards parameters that came in fp32 and have masters leave with the masters' values, or with
        what somebody else wrote since; others stay in the working format. Moments wider than their parameter stay so, for a session to come.
        """
        if self._closed:
            return
        self._closed = True
        for hook in self._hooks:
            hook.remove()
        self._holdings.give_back()
        if not self._committed:
            self._casting.undo()
        elif self._master == "fp32":
            self._holdings.follow_all()
            for shadow in self._holdings.shadows.values():
                if self._casting.came_as(shadow.parameter) == torch.float32:
                    shadow.parameter.grad = None
                    shadow.parameter.data = shadow.tensor.data
            self._casting.widen()
        self._holdings.settle()
