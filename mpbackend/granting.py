"""Which row of a matrix decides about a combination, and what its level grants.

Three layers speak about one combination: what the framework runs unasked, what a named library operator does, and what the hardware can. An outer layer
that restricts (converted, emulated, absent, unknown) decides, because that is what a plain ``matmul`` gets; an outer layer that merely exposes leaves the
decision to the instruction, which knows the accumulator.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from mpbackend.capability import LEVELS, Layer, Level, Row, SwitchDefault
from mpbackend.formats import DEVICE_RESOLVED, FORMATS
from mpbackend.matrix import Matrix, effective_fraction_bits

OnUnsupported = Literal["error", "nearest", "emulate"]
ON_UNSUPPORTED: tuple[OnUnsupported, ...] = ("error", "nearest", "emulate")

Grant = Literal["granted", "warned", "refused"]

DECIDING_LAYERS: tuple[Layer, ...] = ("framework", "library", "instruction")
"""Layers that a training script reaches. Toolkits (templates, kernel languages) need a kernel of one's own, so they grant nothing."""

EXPOSING: frozenset[Level] = frozenset({"native", "library"})

SCALING_ROWS: dict[tuple[str, str], tuple[str, ...]] = {
    ("none", "none"): ("none",),
    ("tensor", "tensor"): ("tensor", "tensor_channel_token", "none"),
    ("row", "row"): ("row", "token_channel", "tensor_channel_token", "none"),
    ("1x128", "128x128"): ("block_1x128_128x128", "none"),
    ("1x128", "1x128"): ("block_1x128", "none"),
    ("128x128", "128x128"): ("block_128x128", "none"),
    ("1x32", "1x32"): ("mx_1x32",),
    ("1x16", "1x16"): ("nv_1x16",),
}
"""Granularity of (inputs, weights) to the scale layouts that serve it; what no source speaks about has none and is unknown.

Scales outside the unit leave the unit's row ``none``; microscaling is inside it.
"""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What the matrix says about one combination.

    Attributes:
        level: the deciding level.
        row: the deciding row, or None when there is none.
        reason: one clause for people.
        source: citation of the row.
        accumulators: accumulators that the operator may use when it does not say which of the unit's; empty when the row's own is meant.
    """

    level: Level
    row: Row | None
    reason: str
    source: str
    accumulators: tuple[str, ...] = ()


def grant(level: Level, on_unsupported: OnUnsupported, *, strict: bool) -> Grant:
    """Apply the table of the design: what a level grants under a policy.

    Args:
        level: level of the deciding row.
        on_unsupported: the user's policy.
        strict: refuse what is unknown instead of warning.
    """
    if level in EXPOSING:
        return "granted"
    if level == "unknown":
        return "refused" if strict else "warned"
    if level == "emulated" and on_unsupported == "emulate":
        return "granted"
    return "refused"


def best(rows: list[Row], accumulate: str) -> Row:
    """Return the row with the best level; among equals one with the wanted accumulator, then the one that knows most about it."""

    def order(row: Row) -> tuple[int, bool, bool, int]:
        bits = effective_fraction_bits(row.accumulator)
        return (LEVELS.index(row.level), row.accumulate != accumulate, row.accumulate == "unknown", -(bits if bits is not None else -1))

    return min(rows, key=order)


def judge(matrix: Matrix, arch: str, op: str, pair: tuple[str, str], granularity: tuple[str, str], accumulate: str) -> Verdict:
    """Find the row that decides about a combination.

    Args:
        matrix: the loaded matrices.
        arch: architecture key.
        op: ``matmul`` or ``conv``.
        pair: formats of the first and second operand.
        granularity: granularity of the scales of inputs and weights.
        accumulate: wanted format of the sum.
    """
    layers = matrix.paths
    layouts = SCALING_ROWS.get(granularity)
    if layouts is None:
        reason = f"no scale layout is known for inputs scaled by {granularity[0]} and weights by {granularity[1]}"
        return Verdict(level="unknown", row=None, reason=reason, source="")
    rows = [row for row in matrix.rows(arch, op=op, a=pair[0], b=pair[1]) if row.scaling in layouts]
    deciding: Row | None = None
    outer: list[Row] = []
    for layer in DECIDING_LAYERS:
        here = [row for row in rows if layers[row.path].layer == layer]
        if not here:
            continue
        first_layout = min(layouts.index(row.scaling) for row in here)
        candidate = best([row for row in here if layouts.index(row.scaling) == first_layout] if layer != "instruction" else here, accumulate)
        if deciding is None or layer == "instruction":
            deciding = prefer(deciding, candidate)
        if candidate.level not in EXPOSING:
            break
        outer += here if layer != "instruction" else []
    if deciding is None:
        name = pair[0] if pair[0] == pair[1] else f"{pair[0]} x {pair[1]}"
        return Verdict(level="unknown", row=None, reason=f"no row of {arch} speaks about {op} in {name}", source="")
    return Verdict(
        level=deciding.level,
        row=deciding,
        reason=explain(deciding),
        source=matrix.citation(deciding, arch),
        accumulators=unsaid_accumulators(outer, [row for row in rows if row not in outer and row.level in EXPOSING]),
    )


def limit_to_settings(matrix: Matrix, arch: str, op: str, pair: tuple[str, str], verdict: Verdict) -> Verdict:
    """Return the verdict about operands in fp32 storage, ``absent`` where the switches of the operation have no setting that computes them.

    A global switch decides what such operands are computed in, so a format that no setting is known to compute would be granted and not run.
    """
    if verdict.level not in (*EXPOSING, "unknown") or not all(kept_in_fp32(name) for name in pair):
        return verdict
    switches = [switch for switch in matrix.switches(arch) if (switch.op, switch.format) == (op, "fp32")] if arch in matrix.archs else []
    lacking = next((switch for switch in switches if len({*pair}) > 1 or setting_for(switch, pair[0]) is None), None)
    if lacking is None:
        return verdict
    if len({*pair}) > 1:
        reason = f"one setting of {lacking.name} would have to compute {pair[0]} and {pair[1]}"
    else:
        reason = f"no setting of {lacking.name} is known to compute {pair[0]}"
    return msgspec.structs.replace(verdict, level="absent", reason=reason, source=matrix.citation(lacking, arch))


def kept_in_fp32(name: str) -> bool:
    """Tell whether operands of a compute format are tensors of fp32: fp32 itself and the reduced formats, those that the device decides included."""
    return all(choice in FORMATS and FORMATS[choice].storage == "fp32" for choice in DEVICE_RESOLVED.get(name, (name,)))


def fraction_bits(name: str) -> int:
    """Return the fraction bits of a format; the most that it may have where the device decides."""
    return max(FORMATS[choice].mantissa_bits for choice in DEVICE_RESOLVED.get(name, (name,)))


def setting_for(switch: SwitchDefault, name: str) -> str | None:
    """Return the setting of a switch that computes a format, None when no setting is known to."""
    return next((setting for setting, computes in switch.computes.items() if computes == name), None)


def unsaid_accumulators(outer: list[Row], inner: list[Row]) -> tuple[str, ...]:
    """Return the unit's accumulators where it has several and every operator in front of it leaves open which one it uses."""
    offered = sorted({row.accumulate for row in inner})
    silent = bool(outer) and all(row.accumulate == "unknown" for row in outer)
    return tuple(offered) if silent and len(offered) > 1 else ()


def prefer(outer: Row | None, inner: Row) -> Row:
    """Return the inner row where both expose the combination or there is no outer one; a restricting inner row yields to an exposing outer one."""
    if outer is None or inner.level in EXPOSING:
        return inner
    return outer


def explain(row: Row) -> str:
    """Return the row as one clause: scale layout, level, path, what is computed instead, conflicts."""
    pair = row.a if row.a == row.b else f"{row.a} x {row.b}"
    scales = "" if row.scaling == "none" else f" with {row.scaling} scales"
    path = "" if row.path == "none" else f" ({row.path})"
    text = f"{row.op} in {pair}{scales} is {row.level}{path}"
    if row.computes:
        text += f", computed in {row.computes}"
    if row.conflict:
        text += f"; sources disagree: {' / '.join(conflict.claim.rstrip('.') for conflict in row.conflict)}"
    return text


def describe_accumulator(row: Row) -> str:
    """Return the accumulator of a row in words; ``unknown`` where no source says."""
    if row.accumulate in ("unknown", "none"):
        return "accumulator unknown"
    accumulator = row.accumulator
    if accumulator is None or (bits := effective_fraction_bits(accumulator)) is None:
        return f"{row.accumulate} accumulator, inner width unknown"
    rounding = {"rz": "truncated", "rne": "rounded to nearest even"}.get(accumulator.rounding, "rounding unknown")
    return f"{row.accumulate} accumulator keeping {bits} fraction bits ({rounding}, {accumulator.products_per_step} products a step)"
