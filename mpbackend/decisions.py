"""The decisions of a plan, one function a role. Each answers from the matrix and says why."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from mpbackend.capability import Level
from mpbackend.device import Device
from mpbackend.formats import DEVICE_RESOLVED, FORMATS
from mpbackend.granting import Grant, OnUnsupported, Verdict, describe_accumulator, grant, judge
from mpbackend.matrix import Matrix, effective_fraction_bits
from mpbackend.recipe import FAST, Recipe
from mpbackend.roles import PASSES

CONV_FORMAT_OF_LOW_BIT = "bf16"
"""What layers run in that a low-bit recipe does not convert: the rung below it."""

SIXTEEN_BIT = ("bf16", "fp16")


LOGITS_MEMORY = "; cross_entropy keeps 4 B a logit for backward and needs 12 B at its peak (6 B and 10 B where a backend runs its log-softmax in 16 bits)"
"""What the pinned ``cross_entropy`` costs: measured on torch 2.13 with its profiler and saved-tensor hooks, see ``tests/train/test_pinned_values.py``."""


class Decision(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One role of the recipe on the device.

    Attributes:
        role: dotted path of the recipe.
        op: operation, for compute and accumulate roles.
        asked: value in the recipe.
        granted: value that will run.
        level: level of the deciding row; ``storage`` where only storage is concerned.
        grant: granted, granted with a warning, or refused.
        reason: why, in one clause.
        source: citation of the row; empty where no row speaks.
        pair: operand formats of a compute role.
    """

    role: str
    asked: str
    granted: str
    level: Level
    reason: str
    source: str = ""
    op: str = ""
    grant: Grant = "granted"
    pair: tuple[str, str] = ("", "")


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What is being planned: the recipe as asked, as lowered so far with the decisions that made it so, and the policy."""

    recipe: Recipe
    effective: Recipe
    device: Device
    matrix: Matrix
    on_unsupported: OnUnsupported
    strict: bool
    replaced: tuple[Decision, ...] = ()

    def asked(self, role: str) -> str:
        """Return the value of a role in the recipe as asked."""
        return str(self.recipe.flat()[role])


def is_low_bit(name: str) -> bool:
    """Tell whether a format needs scaled tensors: 8 bits or fewer."""
    return name in FORMATS and FORMATS[name].bits <= 8


def wanted_in_16_bits(recipe: Recipe) -> bool:
    """Tell whether autocast runs in a 16-bit format under a recipe: by itself, or for what a low-bit recipe does not convert."""
    return recipe.compute.forward in SIXTEEN_BIT or is_low_bit(recipe.compute.forward)


def lower_recipe(recipe: Recipe) -> Recipe | None:
    """Return the recipe one rung down the ladder fp8 -> bf16 -> fp16 + dynamic scaling -> fp32, or None from fp32."""
    present = recipe.compute.forward.split("|")[-1]
    if present == "fp32" and all(getattr(recipe.compute, name).split("|")[-1] == "fp32" for name in PASSES):
        return None
    if is_low_bit(present) or is_low_bit(recipe.compute.dgrad) or is_low_bit(recipe.compute.wgrad):
        return recipe.evolve(
            compute="bf16", accumulate="fp32", **{"scaling.mode": "none", "scaling.inputs": "none", "scaling.weights": "none", "scaling.format": "fp32"}
        )
    if present == "bf16":
        changes = {"compute": "fp16", "loss_scale.mode": "dynamic"}
        if recipe.params == "bf16":
            changes |= {"params": "fp16", "master": "fp32", "grads": "fp32", "optimizer": "fp32"}
        return recipe.evolve(**changes)
    return recipe.evolve(compute="fp32", params="fp32", master="none", grads="fp32", optimizer="fp32", **{"loss_scale.mode": "none"})


def resolve(matrix: Matrix, arch: str, name: str) -> str:
    """Return the format that a device means by a device-resolved name; the name itself when it offers none of them."""
    if name not in DEVICE_RESOLVED:
        return name
    offered = [choice for choice in DEVICE_RESOLVED[name] if matrix.rows(arch, a=choice)]
    return offered[0] if len(offered) == 1 else name


def judge_format(request: Request, op: str, name: str, other: str, accumulate: str) -> tuple[Verdict, tuple[str, str]]:
    """Judge one operand pair of the effective recipe."""
    pair = (resolve(request.matrix, request.device.arch, name), resolve(request.matrix, request.device.arch, other))
    scaling = request.effective.scaling
    granularity = (scaling.inputs, scaling.weights) if is_low_bit(pair[0]) or is_low_bit(pair[1]) else ("none", "none")
    wanted = "fp32" if accumulate == FAST else accumulate
    return judge(request.matrix, request.device.arch, op, pair, granularity, wanted), pair


def decide_compute(request: Request) -> list[Decision]:
    """Decide the format of each matrix product, and of convolution."""
    recipe = request.effective
    forward = decide_choice(request, "compute.forward", "matmul", recipe.compute.forward, None)
    decisions = [forward]
    for name in PASSES[1:]:
        choice: str = getattr(recipe.compute, name)
        same = choice == recipe.compute.forward  # one choice for all passes is made once
        decisions.append(decide_choice(request, f"compute.{name}", "matmul", forward.granted if same else choice, forward.granted))
    if is_low_bit(forward.granted):
        conv = decide_choice(request, "compute.forward", "conv", CONV_FORMAT_OF_LOW_BIT, None)
        reason = f"a low-bit recipe converts linear layers; {conv.reason}"
        decisions.append(msgspec.structs.replace(conv, reason=reason))
    else:
        decisions.append(decide_choice(request, "compute.forward", "conv", recipe.compute.forward, None))
    return decisions


def decide_choice(request: Request, role: str, op: str, choice: str, forward: str | None) -> Decision:
    """Take the first format of an ordered choice that is granted, else the first granted with a warning, else refuse the last.

    Args:
        request: what is being planned.
        role: ``compute.forward``, ``compute.dgrad`` or ``compute.wgrad``.
        op: operation.
        choice: formats joined by ``|``.
        forward: granted format of the forward pass, the second operand of a gradient pass; None for the forward pass itself.
    """
    accumulate = getattr(request.effective.accumulate, role.split(".")[1])
    asked = request.asked(role)
    if op == "conv" and is_low_bit(asked.split("|")[0]):
        asked = CONV_FORMAT_OF_LOW_BIT
    replaced = [decision for decision in request.replaced if (decision.role, decision.op) == (role, op)] or list(request.replaced)
    options: list[Decision] = []
    for name in choice.split("|"):
        verdict, pair = judge_format(request, op, name, forward or name, accumulate)
        outcome = grant(verdict.level, request.on_unsupported, strict=request.strict)
        reason = verdict.reason
        if replaced:
            reason += f"; {replaced[0].asked} was refused: {replaced[0].reason}"
        options.append(
            Decision(
                role=role,
                op=op,
                asked=asked,
                granted=pair[0],
                level=verdict.level,
                grant=outcome,
                reason=reason,
                source=verdict.source,
                pair=pair,
            )
        )
    for wanted in ("granted", "warned"):
        for option in options:
            if option.grant == wanted:
                return option
    return options[-1]


def decide_accumulate(request: Request, compute: Sequence[Decision]) -> list[Decision]:
    """Decide the accumulator of each matrix product: the format the sums must effectively have against what the unit keeps."""
    decisions = []
    for decision in compute:
        if decision.op != "matmul":
            continue
        name = decision.role.split(".")[1]
        wanted = getattr(request.effective.accumulate, name)
        verdict, _ = judge_format(request, "matmul", decision.pair[0], decision.pair[1], wanted)
        decisions.append(judge_accumulator(request, f"accumulate.{name}", wanted, verdict))
    return decisions


def judge_accumulator(request: Request, role: str, wanted: str, verdict: Verdict) -> Decision:
    """Compare a wanted accumulator with the deciding row."""
    base = Decision(role=role, op="matmul", asked=request.asked(role), granted=wanted, level=verdict.level, reason="", source=verdict.source)
    row = verdict.row
    if row is None or row.accumulate in ("unknown", "none") or verdict.level in ("absent", "storage"):
        reason = "no source states the accumulator"
        outcome = grant("unknown", request.on_unsupported, strict=request.strict)
        return msgspec.structs.replace(base, granted="unknown", level="unknown", grant=outcome, reason=reason)
    if verdict.accumulators:
        reason = f"the unit sums in {' or '.join(verdict.accumulators)} and the operator does not say which"
        outcome = grant("unknown", request.on_unsupported, strict=request.strict)
        return msgspec.structs.replace(base, granted="unknown", level="unknown", grant=outcome, reason=reason)
    words = describe_accumulator(row)
    bits = effective_fraction_bits(row.accumulator)
    if wanted == FAST:
        return msgspec.structs.replace(base, granted=row.accumulate, reason=f"{words}; {FAST} takes it as it is")
    if row.accumulate != wanted:
        return msgspec.structs.replace(
            base, granted=row.accumulate, level="absent", grant="refused", reason=f"the deciding row accumulates in {row.accumulate}"
        )
    if bits is not None and bits < FORMATS[wanted].mantissa_bits:
        reason = f"{words} unless promoted; the plan asks for promotion to {wanted}"
        return msgspec.structs.replace(base, granted=f"{wanted} by promotion", reason=reason)
    return msgspec.structs.replace(base, reason=words)


def decide_stored(request: Request) -> list[Decision]:
    """Decide the roles that are a matter of storage and of the session, not of the device."""
    recipe = request.effective
    reasons = {
        "params": ("storage of the parameters", "granted"),
        "master": ("what keeps the bits an update loses", "granted"),
        "grads": ("sum of the gradients over micro-batches", "granted"),
        "optimizer.exp_avg": ("first moment", "granted"),
        "optimizer.exp_avg_sq": ("second moment", "granted"),
        "buffers": ("floating-point buffers", "granted"),
        "sensitive": ("norms, softmax and losses", "granted"),
        "scaling.mode": ("scaling of low-bit tensors", "granted"),
    }
    if recipe.scaling.mode == "none" and is_low_bit(recipe.compute.forward):
        reasons["scaling.mode"] = (f"no scaling: values outside the range of {recipe.compute.forward} are lost; the recipe asks for it", "warned")
    if recipe.params in SIXTEEN_BIT and recipe.master == "none":
        eps = FORMATS[recipe.params].eps
        reasons["params"] = (f"no master copy: an update below {eps / 2:g} of a weight is lost; bf16-kahan and bf16-sr keep it", "warned")
    if recipe.sensitive == "fp32":
        reasons["sensitive"] = (f"the same list is pinned to fp32 on every backend{LOGITS_MEMORY if wanted_in_16_bits(recipe) else ''}", "granted")
    flat = recipe.flat()
    return [
        Decision(
            role=role, asked=request.asked(role), granted=str(flat[role]), level="storage", reason=reason, grant="warned" if outcome == "warned" else "granted"
        )
        for role, (reason, outcome) in reasons.items()
    ]


def decide_reduce(request: Request) -> Decision:
    """Decide the gradient reduction between ranks from the collective table."""
    reduce = request.effective.reduce
    arch = request.device.arch
    asked = f"{request.recipe.reduce.format}, divide {request.recipe.reduce.divide}"
    base = Decision(role="reduce.format", asked=asked, granted=f"{reduce.format}, divide {reduce.divide}", level="unknown", reason="")
    records = request.matrix.collectives(arch) if arch in request.matrix.archs else []
    for record in records:
        if record.op == "all_reduce_sum" and record.format == reduce.format:
            outcome = grant(record.level, request.on_unsupported, strict=request.strict)
            reason = f"sum of {reduce.format} between ranks is {record.level}"
            if reduce.divide == "after" and reduce.format == "fp16":
                reason += "; the sum is divided afterwards and can overflow"
            return msgspec.structs.replace(base, level=record.level, grant=outcome, reason=reason, source=request.matrix.citation(record, arch))
    outcome = grant("unknown", request.on_unsupported, strict=request.strict)
    return msgspec.structs.replace(base, grant=outcome, reason=f"no source speaks about a sum of {reduce.format} between ranks; one rank does not need it")


def decide_loss_scale(request: Request, compute: Sequence[Decision]) -> Decision:
    """Decide loss scaling: refused where an overflow cannot be seen, warned where it is missing or does nothing."""
    scale = request.effective.loss_scale
    arch = request.device.arch
    granted = scale.mode if scale.mode == "none" else f"{scale.mode} from {scale.init:g}"
    base = Decision(role="loss_scale.mode", asked=request.recipe.loss_scale.mode, granted=granted, level="storage", reason="")
    formats = {decision.pair[0] for decision in compute}
    overflow = request.matrix.overflow(arch) if arch in request.matrix.archs else None
    source = request.matrix.citation(overflow, arch) if overflow is not None else ""
    if scale.mode == "none":
        if "fp16" in formats:
            return msgspec.structs.replace(base, grant="warned", reason="fp16 without loss scaling: gradients below 6e-8 become 0; the recipe asks for it")
        saturating = overflow is not None and overflow.mode == "saturating"
        low_bit = any(is_low_bit(name) for name in formats)
        reason = "low-bit tensors have scales of their own" if low_bit else "the range of the compute format needs none"
        reason += "; the device saturates, so inf and NaN never show an overflow" if saturating else ""
        return msgspec.structs.replace(base, reason=reason, source=source if saturating else "")
    if scale.mode == "static":
        wide = all(name not in FORMATS or FORMATS[name].exponent_bits >= FORMATS["fp32"].exponent_bits for name in formats)
        reason = "powers of two change no bit here: the exponent range is that of fp32" if wide else f"constant scale {scale.init:g}"
        return msgspec.structs.replace(base, reason=reason)
    if overflow is None or overflow.mode == "unknown":
        outcome = grant("unknown", request.on_unsupported, strict=request.strict)
        return msgspec.structs.replace(base, grant=outcome, reason="no source says whether this device overflows to inf or saturates")
    if overflow.mode == "saturating" and overflow.status_register is not True:
        reason = "the device saturates and no status register tells of an overflow, so dynamic scaling would never back off"
        return msgspec.structs.replace(base, grant="refused", reason=reason, source=source)
    seen = "the status register" if overflow.mode == "saturating" else "inf and NaN in the gradients"
    return msgspec.structs.replace(base, reason=f"an overflow is seen by {seen}", source=source)
