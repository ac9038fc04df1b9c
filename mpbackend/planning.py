"""Planning: one recipe on one device, with a reason for every decision.

``plan_recipe`` is pure: recipe, device, matrix and what a plugin can run go in, a ``Plan`` comes out. It sets nothing and imports no torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import msgspec

from mpbackend.backend import Implementation
from mpbackend.decisions import Decision, Request, decide_accumulate, decide_compute, decide_loss_scale, decide_reduce, decide_stored, lower_recipe
from mpbackend.device import Device
from mpbackend.errors import DocumentError, PlanError
from mpbackend.formats import FORMATS
from mpbackend.granting import OnUnsupported
from mpbackend.matrix import Matrix
from mpbackend.recipe import PRESETS, Recipe, canonical_text, recipe_hash

NO_PLUGIN = "no installed plugin runs this"

TRAINED = {"params": "fp32", "master": "none", "grads": "fp32", "optimizer.exp_avg": "fp32", "optimizer.exp_avg_sq": "fp32", "buffers": "keep"}
"""Storage roles to the one value that the session carries out; recipes with other values plan and are refused by ``prepare``."""


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
        micro_batches: micro-batches a step, >= 1.
        presets: presets that texts start from; those of this distribution when omitted.

    Raises:
        PlanError: a format is refused; names the device, the level, the source and the nearest recipe that would be granted.
        DocumentError: ``micro_batches`` is below 1.
    """
    if micro_batches < 1:
        raise DocumentError(f"micro_batches = {micro_batches}", found="below 1", remedy="use 1 for no accumulation")
    request = Request(recipe=recipe, effective=recipe, device=device, matrix=matrix, on_unsupported=on_unsupported, strict=strict)
    compute = decide_compute(request)
    notes: list[Decision] = []
    while on_unsupported == "nearest" and any(decision.grant == "refused" for decision in compute):
        lowered = lower_recipe(request.effective)
        if lowered is None:
            break
        notes = notes or [decision for decision in compute if decision.grant == "refused"]
        request = msgspec.structs.replace(request, effective=lowered, replaced=tuple(notes))
        compute = decide_compute(request)
    effective = settle(request.effective, compute)
    request = msgspec.structs.replace(request, effective=effective)
    others = [*decide_accumulate(request, compute), *decide_stored(request), decide_reduce(request), decide_loss_scale(request, compute)]
    decisions = (*compute, *(follow(request, decision) for decision in others))
    refused = [decision for decision in decisions if decision.grant == "refused"]
    if refused:
        raise refusal(request, refused)
    runnable, blockers = find_blockers(device, implementations, compute, others)
    return Plan(
        recipe=canonical_text(recipe, presets),
        recipe_hash=recipe_hash(recipe, presets),
        granted=canonical_text(effective, presets),
        effective=effective,
        device=device,
        on_unsupported=on_unsupported,
        decisions=decisions,
        switches=choose_switches(request, compute),
        micro_batches=micro_batches,
        synchronizations=synchronizations(effective),
        runnable=runnable,
        blockers=blockers,
    )


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


def refusal(request: Request, refused: Sequence[Decision]) -> PlanError:
    """Return the error for refused decisions: what was asked, the level and source, and the nearest recipe that would be granted."""
    first = refused[0]
    if first.role.startswith("compute"):
        remedy = suggest(request)
    elif first.role.startswith("accumulate"):
        remedy = f"`accumulate={first.granted}` in the recipe takes what the unit has"
    else:
        remedy = f"change {first.role} in the recipe: `{request.recipe.preset}:{first.role}=...`"
    found = f"{first.reason} [{first.source}]" if first.source else first.reason
    return PlanError(f"{canonical_text(request.recipe)} is refused on {request.device.key}: {first.role}", found=found, remedy=remedy, decisions=tuple(refused))


def suggest(request: Request) -> str:
    """Return what would be granted instead: the next rung of the ladder, else the plain presets that the device grants."""
    lowered: Recipe | None = request.recipe
    while lowered is not None and (lowered := lower_recipe(lowered)) is not None:
        if computes(request, lowered):
            scaling = " + dynamic loss scaling" if lowered.loss_scale.mode == "dynamic" else ""
            return f"nearest: {lowered.compute.forward}{scaling}, taken by `--on-unsupported nearest`"
    granted = [name for name in ("fp32", "bf16", "fp16") if computes(request, PRESETS[name])]
    return f"granted there: {', '.join(granted)}" if granted else f"`mpbackend matrix --device {request.device.key}` shows what it has"


def computes(request: Request, recipe: Recipe) -> bool:
    """Tell whether every compute decision of another recipe would be granted on the same device."""
    trial = msgspec.structs.replace(request, recipe=recipe, effective=recipe, on_unsupported="error", replaced=())
    return all(decision.grant != "refused" for decision in decide_compute(trial))


def find_blockers(
    device: Device, implementations: Sequence[Implementation] | None, compute: Sequence[Decision], others: Sequence[Decision]
) -> tuple[bool, tuple[str, ...]]:
    """Tell whether a plugin runs every compute decision and the session every other one, and why not."""
    if implementations is None:
        return False, (f"{NO_PLUGIN} (none found the device {device.key} here)",)
    blockers = [] if device.usable else [f"{device.key} is not usable: {device.cause}"]
    for decision in compute:
        matching = [i for i in implementations if (i.op, i.a, i.b) == (decision.op, *decision.pair)]
        if any(implementation.level is not None for implementation in matching):
            continue
        reason = matching[0].reason if matching else NO_PLUGIN
        blockers.append(f"{decision.role} ({decision.op}) in {decision.granted}: {reason}")
    blockers += [
        f"{decision.role}={decision.granted}: this version's session trains {decision.role}={TRAINED[decision.role]} only"
        for decision in others
        if TRAINED.get(decision.role, decision.granted) != decision.granted
    ]
    return not blockers, tuple(dict.fromkeys(blockers))


def choose_switches(request: Request, compute: Sequence[Decision]) -> dict[str, str]:
    """Choose the setting of every global switch so that it computes what was granted for its operation (for matmul where no decision names the operation)."""
    granted = {decision.op: decision.granted for decision in compute if decision.role == "compute.forward"}
    chosen: dict[str, str] = {}
    for switch in request.matrix.switches(request.device.arch) if request.device.arch in request.matrix.archs else ():
        name = granted.get(switch.op, granted["matmul"])
        reduced = name in FORMATS and FORMATS[name].storage == "fp32"
        wanted = ((name, "fp32") if reduced else ("fp32",)) if switch.format == "fp32" else (request.effective.accumulate.forward, "fp32")
        for target in wanted:
            setting = next((setting for setting, computes in switch.computes.items() if computes == target), None)
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
            "step(): one scalar read of the overflow verdict before the optimizer",
            "a skipped step: the loss and the gradients are read to name the cause",
            "the first taken step: one read tells which buffers the forward pass changes",
            *points,
        ]
    return tuple(points)
