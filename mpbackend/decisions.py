"""The decisions of a plan, one function a role. Each answers from the matrix and says why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from mpbackend.capability import Level
from mpbackend.device import Device
from mpbackend.formats import DEVICE_RESOLVED, FORMATS
from mpbackend.granting import Grant, OnUnsupported, Verdict, fraction_bits, grant, judge, kept_in_fp32, limit_to_settings
from mpbackend.matrix import Matrix
from mpbackend.recipe import FAST, Recipe
from mpbackend.roles import PASSES, MasterKind

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
    """What is being planned: the recipe as asked, as lowered so far with the decisions that made it so, the policy, and the presets of texts."""

    recipe: Recipe
    effective: Recipe
    device: Device
    matrix: Matrix
    on_unsupported: OnUnsupported
    strict: bool
    replaced: tuple[Decision, ...] = ()
    presets: Mapping[str, Recipe] | None = None

    def asked(self, role: str) -> str:
        """Return the value of a role in the recipe as asked."""
        return str(self.recipe.flat()[role])


def is_low_bit(name: str) -> bool:
    """Tell whether a format needs scaled tensors: 8 bits or fewer."""
    return name in FORMATS and FORMATS[name].bits <= 8


def wanted_in_16_bits(recipe: Recipe) -> bool:
    """Tell whether autocast runs in a 16-bit format under a recipe: by itself, or for what a low-bit recipe does not convert."""
    return autocast_format(recipe) != ""


def autocast_format(recipe: Recipe) -> str:
    """Return the 16-bit format that autocast runs in under a recipe, for what a low-bit recipe does not convert too; empty where there is no autocast."""
    forward = recipe.compute.forward
    return forward if forward in SIXTEEN_BIT else CONV_FORMAT_OF_LOW_BIT if is_low_bit(forward) else ""


def steps_natively(recipe: Recipe) -> bool:
    """Tell whether optimizers update the parameters of a recipe by themselves: no master, gradients and moments in the format of the parameters."""
    return recipe.master == "none" and {recipe.grads, recipe.optimizer.exp_avg, recipe.optimizer.exp_avg_sq} == {recipe.params}


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
    verdict = judge(request.matrix, request.device.arch, op, pair, granularity, wanted)
    return limit_to_settings(request.matrix, request.device.arch, op, pair, verdict), pair


def decide_compute(request: Request) -> list[Decision]:
    """Decide the format of each matrix product, and of convolution. Of an ordered choice, one that both operations have comes first."""
    recipe = request.effective
    offered = [(forward, decide_conv(request, forward)) for forward in offers(request, "compute.forward", "matmul", recipe.compute.forward, None)]
    forward, conv = next((pair for pair in offered if pair[1].grant != "refused"), offered[0])
    decisions = [forward]
    for name in PASSES[1:]:
        choice: str = getattr(recipe.compute, name)
        same = choice == recipe.compute.forward  # one choice for all passes is made once
        decisions.append(offers(request, f"compute.{name}", "matmul", forward.granted if same else choice, forward.granted)[0])
    return [*decisions, conv]


def decide_conv(request: Request, matmul: Decision) -> Decision:
    """Decide the format of convolution, given that of matrix products.

    Autocast has one 16-bit format, so convolution runs in that of matrix products. Formats that switches select may differ, but what the plan says is granted
    holds for both: convolution never takes a narrower one.
    """
    name = matmul.granted
    if is_low_bit(name):
        conv = offers(request, "compute.forward", "conv", CONV_FORMAT_OF_LOW_BIT, None)[0]
        return msgspec.structs.replace(conv, reason=f"a low-bit recipe converts linear layers; {conv.reason}")
    choice = [name]
    if kept_in_fp32(name):
        resolved = [resolve(request.matrix, request.device.arch, item) for item in request.effective.compute.forward.split("|")]
        choice = [item for item in resolved if item == name or (kept_in_fp32(item) and fraction_bits(item) >= fraction_bits(name))]
    conv = offers(request, "compute.forward", "conv", "|".join(choice), None)[0]
    return conv if conv.granted == name else msgspec.structs.replace(conv, reason=f"{conv.reason}; matrix products run in {name}")


def offers(request: Request, role: str, op: str, choice: str, forward: str | None) -> list[Decision]:
    """Return the formats of an ordered choice that are granted, then those granted with a warning; the last one, refused, where there is neither.

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
        if verdict.level == "converted" and request.on_unsupported == "emulate" and request.device.kind == "emulated":
            outcome = "warned"
            reason += "; the emulator converts it as the device does"
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
    return [option for wanted in ("granted", "warned") for option in options if option.grant == wanted] or options[-1:]


def decide_stored(request: Request) -> list[Decision]:
    """Decide the roles that are a matter of storage and of the session, not of the device."""
    recipe = request.effective
    reasons = {
        "params": ("storage of the parameters", "granted"),
        "master": (KEPT[recipe.master].format(params=recipe.params), "granted"),
        "grads": (f"sum of the gradients over micro-batches{added(recipe)}", "granted"),
        "optimizer.exp_avg": ("first moment", "granted"),
        "optimizer.exp_avg_sq": ("second moment", "granted"),
        "buffers": ("floating-point buffers" if recipe.params == "fp32" else "floating-point buffers; only parameters are cast", "granted"),
        "sensitive": ("layer and group norms, softmax, losses: the backend's own list", "granted"),
        "scaling.mode": ("scaling of low-bit tensors", "granted"),
    }
    if recipe.scaling.mode == "none" and is_low_bit(recipe.compute.forward):
        reasons["scaling.mode"] = (f"no scaling: values outside the range of {recipe.compute.forward} are lost; the recipe asks for it", "warned")
    if (eps := FORMATS[recipe.params].eps) > FORMATS["fp32"].eps and recipe.master == "none":
        reasons["params"] = (f"no master copy: an update below {eps / 4:g} of a weight is lost; bf16-kahan and bf16-sr keep it", "warned")
    if recipe.sensitive == "fp32":
        reasons["sensitive"] = (
            f"layer and group norms, softmax, losses: the same list is pinned to fp32 on every backend{LOGITS_MEMORY if wanted_in_16_bits(recipe) else ''}",
            "granted",
        )
    flat = recipe.flat()
    return [
        Decision(
            role=role, asked=request.asked(role), granted=str(flat[role]), level="storage", reason=reason, grant="warned" if outcome == "warned" else "granted"
        )
        for role, (reason, outcome) in reasons.items()
    ]


KEPT: Mapping[MasterKind, str] = {
    "none": "what keeps the bits an update loses",
    "fp32": "the optimizer updates an fp32 copy, and the parameter is its rounding to {params}",
    "kahan": "a term in {params} keeps what rounding the updated parameter loses, and is added before the next update",
    "stochastic": "the updated parameter is rounded up or down by chance, right on average; nothing is kept, and the draws are seeded",
}
"""What the values of ``master`` mean, as reasons; ``{params}`` is the format of the parameters."""


def added(recipe: Recipe) -> str:
    """Return how gradients of 16-bit parameters are summed, for the reason."""
    if recipe.params == "fp32":
        return ""
    if recipe.grads == recipe.params:
        return f"; a sum of {recipe.grads} loses what is below half a spacing of it"
    return f"; each arrives in {recipe.params} and is added in {recipe.grads}"


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
                outcome = "warned" if outcome == "granted" else outcome
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
