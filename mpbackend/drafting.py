"""Drafting a plan: every decision about a recipe on a device, refused ones included, after the rungs of the ladder that the policy takes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from mpbackend.accumulation import decide_accumulate
from mpbackend.decisions import Decision, Request, decide_compute, decide_loss_scale, decide_reduce, decide_stored, is_low_bit
from mpbackend.formats import FORMATS
from mpbackend.recipe import Recipe
from mpbackend.roles import PASSES


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    """The decisions about a recipe.

    Attributes:
        request: what was planned; its effective recipe is the one that the decisions are about.
        compute: decisions about matrix products and convolution.
        others: decisions about the other roles.
    """

    request: Request
    compute: tuple[Decision, ...]
    others: tuple[Decision, ...]

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """All decisions, in the order of the plan."""
        return (*self.compute, *self.others)

    @property
    def refused(self) -> tuple[Decision, ...]:
        """The refused decisions; a plan has none."""
        return tuple(decision for decision in self.decisions if decision.grant == "refused")


def draft(request: Request) -> Draft:
    """Decide every role of ``request.effective``; under the policy ``nearest`` the rungs below it are taken until its products are granted."""
    compute = decide_compute(request)
    notes: list[Decision] = []
    while request.on_unsupported == "nearest" and any(decision.grant == "refused" for decision in compute):
        lowered = lower_recipe(request.effective)
        if lowered is None:
            break
        notes = notes or [decision for decision in compute if decision.grant == "refused"]
        request = msgspec.structs.replace(request, effective=lowered, replaced=tuple(notes))
        compute = decide_compute(request)
    request = msgspec.structs.replace(request, effective=settle(request.effective, compute))
    others = [*decide_accumulate(request, compute), *decide_stored(request), decide_reduce(request), decide_loss_scale(request, compute)]
    return Draft(request=request, compute=tuple(compute), others=tuple(follow(request, decision) for decision in others))


def lower_recipe(recipe: Recipe) -> Recipe | None:
    """Return the recipe one rung down the ladder fp8 -> bf16 -> fp16 + dynamic scaling -> fp32, or None from fp32."""
    present = recipe.compute.forward.split("|")[-1]
    if present == "fp32" and all(getattr(recipe.compute, name).split("|")[-1] == "fp32" for name in PASSES):
        return None
    if is_low_bit(present) or is_low_bit(recipe.compute.dgrad) or is_low_bit(recipe.compute.wgrad):
        unscaled = {f"scaling.{name}": "none" for name in ("mode", "inputs", "weights")} | {"scaling.format": "fp32", "scaling.keep": ""}
        return recipe.evolve(compute="bf16", accumulate="fp32", **unscaled)
    if present == "bf16":
        changes = {"compute": "fp16", "loss_scale.mode": "dynamic"}
        if recipe.params == "bf16":
            changes |= {"params": "fp16", "master": "fp32", "grads": "fp32", "optimizer": "fp32"}
        return recipe.evolve(**changes)
    return recipe.evolve(compute="fp32", params="fp32", master="none", grads="fp32", optimizer="fp32", **{"loss_scale.mode": "none"})


def settle(recipe: Recipe, compute: Sequence[Decision]) -> Recipe:
    """Return ``recipe`` with every ordered choice replaced by the format that was granted."""
    granted = {decision.role: decision.granted for decision in compute if decision.op == "matmul" and decision.grant != "refused"}
    changes = {role: value for role, value in granted.items() if value in FORMATS and recipe.flat()[role] != value}
    return recipe.evolve(**changes) if changes else recipe


def follow(request: Request, decision: Decision) -> Decision:
    """Return a decision about a role that changed with the compute formats, its reason saying so; any other decision as it is."""
    if not request.replaced or request.asked(decision.role) == str(request.effective.flat()[decision.role]):
        return decision
    return msgspec.structs.replace(decision, reason=f"{decision.reason}; changed with compute, where {request.replaced[0].asked} was refused")
