"""Planning: one recipe on one device, with a reason for every decision.

``plan_recipe`` is pure: recipe, device, matrix and what a plugin can run go in, a ``Plan`` comes out. It sets nothing and imports no torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import msgspec

from mpbackend.backend import Implementation
from mpbackend.decisions import Decision, Request, autocast_format, is_low_bit
from mpbackend.device import Device
from mpbackend.drafting import draft
from mpbackend.errors import DocumentError
from mpbackend.granting import SCALING_ROWS, OnUnsupported, kept_in_fp32, setting_for
from mpbackend.matrix import Matrix
from mpbackend.recipe import Recipe, canonical_text, recipe_hash
from mpbackend.remedies import refusal

NO_PLUGIN = "no installed plugin runs this"

MOST_MICRO_BATCHES = 2**31 - 1

STORED = ("fp32", "bf16", "fp16")
"""Formats in which a session keeps parameters, gradient sums, moments and buffers."""


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a recipe becomes on a device.

    Attributes:
        recipe: canonical text of what was asked.
        recipe_hash: its hash, the same on every device.
        granted: canonical text of what is granted; equal to ``recipe`` unless a rung of the ladder was taken.
        effective: the granted recipe.
        device: the device.
        on_unsupported: the policy that was applied.
        decisions: one per role (and operation), with reason and source.
        switches: global precision switches to set, name to setting.
        micro_batches: micro-batches a step.
        synchronizations: every point at which the session waits for the device.
        runnable: whether an installed plugin runs it here.
        blockers: why it does not run; empty when it does.
        notes: what the backend says about the plan besides, a sentence each.
    """

    recipe: str
    recipe_hash: str
    granted: str
    effective: Recipe
    device: Device
    on_unsupported: OnUnsupported = "error"
    decisions: tuple[Decision, ...] = ()
    switches: dict[str, str] = {}
    micro_batches: int = 1
    synchronizations: tuple[str, ...] = ()
    runnable: bool = False
    blockers: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def decision(self, role: str, op: str = "") -> Decision:
        """Return the decision about a role (``compute.forward`` has one per ``op``); ``KeyError`` if there is none."""
        for decision in self.decisions:
            if decision.role == role and op in ("", decision.op):
                return decision
        raise KeyError(role)

    @property
    def warnings(self) -> list[str]:
        """The reasons of every decision that was granted with a warning."""
        return [f"{decision.role}: {decision.reason}" for decision in self.decisions if decision.grant == "warned"]

    @property
    def hash(self) -> str:
        """SHA-256 of what is computed (not of why), 16 hexadecimal digits; equal on ranks that do the same arithmetic."""
        decided = [(decision.role, decision.op, decision.granted, decision.level, decision.pair) for decision in self.decisions]
        document = msgspec.json.encode((self.granted, self.device.arch, decided, self.switches, self.micro_batches), order="deterministic")
        return hashlib.sha256(document).hexdigest()[:16]


def plan_recipe(
    recipe: Recipe,
    device: Device,
    matrix: Matrix,
    implementations: Sequence[Implementation] | None = None,
    *,
    on_unsupported: OnUnsupported = "error",
    strict: bool = False,
    micro_batches: int = 1,
    presets: Mapping[str, Recipe] | None = None,
) -> Plan:
    """Plan a recipe onto a device.

    Args:
        recipe: what is asked.
        device: where.
        matrix: the capability matrices.
        implementations: what the device's plugin can run; None when no installed plugin answers for the device.
        on_unsupported: ``error`` refuses what the device lacks, ``nearest`` takes the next rung of fp8 -> bf16 -> fp16 + dynamic scaling -> fp32,
            ``emulate`` grants emulated levels.
        strict: refuse what no source speaks about.
        micro_batches: micro-batches a step, from 1 to 2^31 - 1.
        presets: presets that texts start from; those of this distribution when omitted.

    Raises:
        PlanError: a format is refused; names the device, the level, the source and the nearest recipe that would be granted.
        DocumentError: ``micro_batches`` is below 1 or above 2^31 - 1.
    """
    if not 1 <= micro_batches <= MOST_MICRO_BATCHES:
        found = "below 1" if micro_batches < 1 else f"above {MOST_MICRO_BATCHES}"
        raise DocumentError(f"micro_batches = {micro_batches}", found=found, remedy="use 1 for no accumulation")
    asked = Request(recipe=recipe, effective=recipe, device=device, matrix=matrix, on_unsupported=on_unsupported, strict=strict, presets=presets)
    made = draft(asked)
    if made.refused:
        raise refusal(made)
    effective = made.request.effective
    runnable, blockers = find_blockers(made.request, implementations, made.compute, made.others)
    return Plan(
        recipe=canonical_text(recipe, presets),
        recipe_hash=recipe_hash(recipe, presets),
        granted=canonical_text(effective, presets),
        effective=effective,
        device=device,
        on_unsupported=on_unsupported,
        decisions=made.decisions,
        switches=choose_switches(made.request, made.compute),
        micro_batches=micro_batches,
        synchronizations=synchronizations(effective),
        runnable=runnable,
        blockers=blockers,
    )


def find_blockers(
    request: Request, implementations: Sequence[Implementation] | None, compute: Sequence[Decision], others: Sequence[Decision]
) -> tuple[bool, tuple[str, ...]]:
    """Tell whether a plugin runs every compute decision and the session every other one, and why not."""
    device = request.device
    if implementations is None:
        return False, (f"{NO_PLUGIN} (none found the device {device.key} here)",)
    blockers = [] if device.usable else [f"{device.key} is not usable: {device.cause}"]
    for decision in compute:
        scaling = request.effective.scaling
        scaled = any(is_low_bit(name) for name in decision.pair)
        layouts = SCALING_ROWS.get((scaling.inputs, scaling.weights), ()) if scaled else ("none",)
        formats = [i for i in implementations if (i.op, i.a, i.b) == (decision.op, *decision.pair)]
        matching = [i for i in formats if i.scaling in layouts] or [i for i in formats if i.level is None]
        if any(implementation.level is not None for implementation in matching):
            continue
        reason = matching[0].reason if matching else NO_PLUGIN
        blockers.append(f"{decision.role} ({decision.op}) in {decision.granted}: {reason}")
    unlike = storage_blockers(request.effective)
    blockers += [f"{decision.role}={decision.granted}: {unlike[decision.role]}" for decision in others if decision.role in unlike]
    return not blockers, tuple(dict.fromkeys(blockers))


def storage_blockers(recipe: Recipe) -> dict[str, str]:
    """Return the storage roles that a session does not carry out, each with the reason; empty for a recipe that trains.

    Args:
        recipe: the effective recipe, ordered choices settled.
    """
    flat = recipe.flat()
    stored = {role: str(flat[role]) for role in ("params", "grads", "optimizer.exp_avg", "optimizer.exp_avg_sq", "buffers")}
    found = {role: f"a session keeps it in {', '.join(STORED)}" for role, name in stored.items() if name not in STORED and name != "keep"}
    low = recipe.params != "fp32"
    if "params" not in found and low and recipe.params != (lowered := autocast_format(recipe)):
        others = f"autocast casts it to {lowered} for every product" if lowered else f"without autocast its layers would compute in {recipe.params}"
        found["params"] = f"compute.forward is {recipe.compute.forward}: {others}; keep params=fp32, or compute in {recipe.params}"
    if not low and recipe.master != "none":
        found["master"] = "fp32 parameters lose nothing that it would keep; write master=none"
    if "grads" not in found and recipe.grads not in ("fp32", recipe.params):
        found["grads"] = f"gradients arrive in {recipe.params}; sum them in {' or '.join(dict.fromkeys((recipe.params, 'fp32')))}"
    return found


def choose_switches(request: Request, compute: Sequence[Decision]) -> dict[str, str]:
    """Choose the setting of every global switch so that it computes what was granted for its operation (for matmul where no decision names the operation)."""
    granted = {decision.op: decision.granted for decision in compute if decision.role == "compute.forward"}
    chosen: dict[str, str] = {}
    for switch in request.matrix.switches(request.device.arch) if request.device.arch in request.matrix.archs else ():
        name = granted.get(switch.op, granted["matmul"])
        wanted = ((name, "fp32") if kept_in_fp32(name) else ("fp32",)) if switch.format == "fp32" else (request.effective.accumulate.forward, "fp32")
        for target in wanted:
            setting = setting_for(switch, target)
            if setting is not None:
                chosen[switch.name] = setting
                break
    return dict(sorted(chosen.items()))


def synchronizations(recipe: Recipe) -> tuple[str, ...]:
    """Return every point at which a session of this recipe waits for the device."""
    points = [
        "reading rows, for drain() or the record: one transfer of the buffered values, after step 1, every 50 steps or 5 s, and after a non-finite step",
        "watch(): a batch that is on the device is copied to be hashed, the first 8 and then one in 50",
    ]
    if recipe.loss_scale.mode == "dynamic":
        points = [
            "step(): one scalar read of the overflow verdict before the optimizer; none where every optimizer is fused, whose verdict is copied to a scheduler "
            "while the next step is queued; without one it is looked at every 128 steps, for loss_scale.patience",
            "a skipped step: the loss and the gradients are read to name the cause",
            "the first taken step: one read tells which buffers the forward pass changes",
            *points,
        ]
    return tuple(points)
