"""What a refusal says and suggests. A suggestion is drafted first, so that it is granted when it is taken."""

from __future__ import annotations

import msgspec

from mpbackend.decisions import Request
from mpbackend.drafting import Draft, draft
from mpbackend.errors import PlanError
from mpbackend.formats import FORMATS
from mpbackend.granting import OnUnsupported
from mpbackend.recipe import FAST, PRESETS, Recipe, canonical_text

PLAIN = ("fp32", "bf16", "fp16")
"""Presets that are suggested where nothing nearer is granted, as they are or with the sums that the unit has."""


def refusal(made: Draft) -> PlanError:
    """Return the error for a draft with refused decisions: what was asked, the level and source, and what would be granted."""
    request, first = made.request, made.refused[0]
    found = f"{first.reason} [{first.source}]" if first.source else first.reason
    asked = f"{canonical_text(request.recipe, request.presets)} is refused on {request.device.key}: {first.role}"
    return PlanError(asked, found=found, remedy=suggest(made), decisions=made.refused)


def suggest(made: Draft) -> str:
    """Return what would be granted instead.

    In this order: the next rung of the ladder; the recipe with what stands against it changed; a plain preset; the recipe as it is, without ``strict``.
    """
    request, nearest = made.request, made
    if request.on_unsupported != "nearest" and any(decision.grant == "refused" for decision in made.compute):
        nearest = draft(msgspec.structs.replace(request, effective=request.recipe, on_unsupported="nearest"))
        if not nearest.refused:
            compute, scale = nearest.request.effective.compute.forward, nearest.request.effective.loss_scale
            return f"nearest: {compute}{' + dynamic loss scaling' if scale.mode == 'dynamic' else ''}, taken by `--on-unsupported nearest`"
    changed = change_refused(nearest)
    if changed is not None and grants(request, changed):
        return f"`{canonical_text(changed, request.presets)}` is granted there"
    presets = {name: PRESETS[name] for name in PLAIN}
    for candidates in (presets, {f"{name}:accumulate={FAST}": preset.evolve(accumulate=FAST) for name, preset in presets.items()}):
        granted = [text for text, recipe in candidates.items() if grants(request, recipe)]
        if granted:
            return f"granted there: {', '.join(granted)}"
    if request.strict and grants(msgspec.structs.replace(request, strict=False), request.recipe):
        return "without strict it is granted with a warning"
    return f"`mpbackend matrix --device {request.device.key}` shows what it has"


def change_refused(made: Draft) -> Recipe | None:
    """Return the drafted recipe with every refused role changed to what the device has; None where a product itself is refused."""
    changes: dict[str, str] = {}
    for decision in made.refused:
        if decision.role.startswith("accumulate."):
            changes[decision.role] = decision.granted if decision.granted in FORMATS else FAST
        elif decision.role == "reduce.format":
            changes[decision.role] = "fp32"
        elif decision.role == "loss_scale.mode":
            changes[decision.role] = "static"
        else:
            return None
    return made.request.effective.evolve(**changes)


def grants(request: Request, recipe: Recipe) -> bool:
    """Tell whether a recipe would be granted as it is: under the policy of the request, but without taking rungs."""
    policy: OnUnsupported = "error" if request.on_unsupported == "nearest" else request.on_unsupported
    return not draft(msgspec.structs.replace(request, recipe=recipe, effective=recipe, on_unsupported=policy, replaced=())).refused
