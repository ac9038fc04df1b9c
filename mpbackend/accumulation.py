"""The decisions about the sums inside matrix products: the format they must effectively have against what the unit keeps."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from mpbackend.capability import SwitchDefault
from mpbackend.decisions import Decision, Request, judge_format
from mpbackend.formats import FORMATS
from mpbackend.granting import Verdict, describe_accumulator, grant, setting_for
from mpbackend.matrix import effective_fraction_bits
from mpbackend.recipe import FAST


def decide_accumulate(request: Request, compute: Sequence[Decision]) -> list[Decision]:
    """Decide the accumulator of each matrix product: the format the sums must effectively have against what the unit keeps."""
    decisions = []
    for decision in compute:
        if decision.op != "matmul":
            continue
        name = decision.role.split(".")[1]
        wanted = getattr(request.effective.accumulate, name)
        verdict, _ = judge_format(request, "matmul", decision.pair[0], decision.pair[1], wanted)
        judged = judge_accumulator(request, f"accumulate.{name}", wanted, verdict)
        decisions.append(limit_to_forward(request, decision.pair[0], wanted, judged))
    return decisions


def limit_to_forward(request: Request, name: str, wanted: str, decision: Decision) -> Decision:
    """Return a decision about a sum, refused where one global setting would have to give it and the sum of the forward pass different formats."""
    arch = request.device.arch
    forward = request.effective.accumulate.forward
    for switch in request.matrix.switches(arch) if arch in request.matrix.archs else ():
        applies = (switch.op, switch.format) == ("matmul", name) and name != "fp32"
        if applies and decision.grant != "refused" and set_sum(switch, wanted) != set_sum(switch, forward):
            reason = f"one setting of {switch.name} would have to sum in {wanted} and, for the forward pass, in {forward}"
            return msgspec.structs.replace(decision, level="absent", grant="refused", reason=reason, source=request.matrix.citation(switch, arch))
    return decision


def set_sum(switch: SwitchDefault, wanted: str) -> str | None:
    """Return the setting of an accumulation switch for a wanted format; that of fp32 where no setting computes it."""
    return setting_for(switch, wanted) or setting_for(switch, "fp32")


def judge_accumulator(request: Request, role: str, wanted: str, verdict: Verdict) -> Decision:
    """Compare a wanted accumulator with the deciding row."""
    unknown = grant("unknown", request.on_unsupported, strict=request.strict)
    base = Decision(
        role=role,
        op="matmul",
        asked=request.asked(role),
        granted=wanted,
        level=verdict.level,
        grant=unknown if verdict.level == "unknown" else "granted",
        reason="",
        source=verdict.source,
    )
    row = verdict.row
    if row is None or row.accumulate in ("unknown", "none") or verdict.level in ("absent", "storage"):
        return msgspec.structs.replace(base, granted="unknown", level="unknown", grant=unknown, reason="no source states the accumulator")
    if verdict.accumulators:
        reason = f"the unit sums in {' or '.join(verdict.accumulators)} and the operator does not say which"
        return msgspec.structs.replace(base, granted="unknown", level="unknown", grant=unknown, reason=reason)
    words = describe_accumulator(row) + ("; the level of the product is unknown" if verdict.level == "unknown" else "")
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
