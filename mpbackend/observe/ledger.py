"""The memory ledger and the rates: bytes by class and format, predicted, measured and under fp32; tokens a second and MFU. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from mpbackend.capability import Peak
from mpbackend.errors import DocumentError
from mpbackend.footprint import OPTIMIZERS, footprint
from mpbackend.matrix import Matrix
from mpbackend.observe.audit_document import AuditDocument, MemoryRow
from mpbackend.recipe import PRESETS, Recipe

CLASS_OF_ROLE: Mapping[str, str] = {"params": "parameters", "grads": "gradients", "master": "optimizer state"}
"""The class that a role is counted in; what an optimizer keeps is optimizer state."""

Bytes = Mapping[str, Mapping[str, int]]
"""Class to format to bytes."""


def predicted_classes(recipe: Recipe, parameters: int, optimizer: str) -> dict[str, dict[str, int]]:
    """Return the bytes of the classes that follow from the number of parameters: parameters, gradients, optimizer state.

    Args:
        recipe: the recipe.
        parameters: number of parameters.
        optimizer: key of ``mpbackend.footprint.OPTIMIZERS``.
    """
    found: dict[str, dict[str, int]] = {}
    for line in footprint(recipe, parameters, optimizer).lines:
        klass = CLASS_OF_ROLE.get(line.role, "optimizer state" if line.role.startswith("optimizer") else "parameters")
        if line.bytes:
            held = found.setdefault(klass, {})
            held[line.format] = held.get(line.format, 0) + line.bytes
    return found


def optimizer_key(name: str, *, momentum: bool = False, amsgrad: bool = False) -> str | None:
    """Return the key of ``OPTIMIZERS`` for a class name of torch; None for one that is not modeled.

    Args:
        name: class name, ``AdamW``.
        momentum: whether it keeps a momentum (SGD).
        amsgrad: whether it keeps a maximum as well (Adam).
    """
    key = name.lower()
    if key == "sgd" and momentum:
        key = "sgd-momentum"
    if key in ("adam", "adamw") and amsgrad:
        key = "adam-amsgrad"
    return key if key in OPTIMIZERS else None


def ledger(measured: Bytes, recipe: Recipe, parameters: int, optimizer: str | None, activations: Bytes | None = None) -> tuple[MemoryRow, ...]:
    """Return the ledger.

    Args:
        measured: what the step held.
        recipe: the granted recipe.
        parameters: number of parameters.
        optimizer: key of ``OPTIMIZERS``; None leaves predictions out.
        activations: ``predicted`` and ``fp32`` to the saved activations of each, by format, where they were counted.
    """
    activations = activations or {}
    predicted = {} if optimizer is None else predicted_classes(recipe, parameters, optimizer)
    fp32 = {} if optimizer is None else predicted_classes(PRESETS["fp32"], parameters, optimizer)
    if "predicted" in activations:
        predicted["activations"] = dict(activations["predicted"])
    if "fp32" in activations:
        fp32["activations"] = dict(activations["fp32"])
    rows = []
    for klass, held in measured.items():
        known = klass in predicted or (optimizer is not None and klass == "optimizer state")
        names = dict.fromkeys([*held, *predicted.get(klass, {}), *fp32.get(klass, {})])
        for name in names:
            size = held.get(name, 0)
            rows.append(
                MemoryRow(
                    klass=klass,
                    format=name,
                    predicted=predicted.get(klass, {}).get(name, 0) if known else None,
                    measured=size,
                    fp32=fp32.get(klass, {}).get(name, 0) if klass in fp32 else None,
                )
            )
    return tuple(rows)


class Mfu(NamedTuple):
    """Model FLOPs utilization, 0 to 1, and what it was taken from; None with the reason when a peak is unknown."""

    share: float | None
    basis: str


def find_peak(matrix: Matrix, device: str, name: str, accumulate: str, reported: str = "") -> Peak | None:
    """Return the dense peak of a device for a format and an accumulator; None when no record says, or several say different things.

    Args:
        matrix: the facts.
        device: key of the device.
        name: format of both operands.
        accumulate: format of the accumulator.
        reported: exact name that the runtime reports, for peaks of one variant; the only name of the device when omitted.
    """
    names = matrix.devices[device].names if device in matrix.devices else ()
    variants = ("", reported or (names[0] if len(names) == 1 else ""))
    stated = [
        peak
        for peak in matrix.peaks(device)
        if (peak.format, peak.accumulate, peak.sparsity, peak.scaling) == (name, accumulate, "dense", "none") and peak.variant in variants
    ]
    best = [peak for peak in stated if peak.unit == "matrix"] or stated
    return best[0] if len({peak.tera_per_s for peak in best}) == 1 else None


def mfu(flops: Mapping[str, int], accumulate: str, seconds: float, matrix: Matrix, device: str) -> Mfu:
    """Return the utilization: the time that the FLOPs of each format take at its peak, over the time that passed (arXiv 2204.02311, appendix B).

    Args:
        flops: matrix-product FLOPs of a step by format.
        accumulate: format of the accumulator.
        seconds: of a step.
        matrix: the facts.
        device: key of the device.

    Raises:
        DocumentError: it is above 1: the peak or the time is wrong.
    """
    if seconds <= 0 or not any(flops.values()):
        return Mfu(None, "no step was timed" if seconds <= 0 else "nothing was multiplied")
    ideal = 0.0
    used = []
    for name, count in flops.items():
        peak = find_peak(matrix, device, name, accumulate)
        if peak is None:
            return Mfu(None, f"no source states a dense peak of {device} for {name} with sums in {accumulate}")
        ideal += count / (peak.tera_per_s * 1e12)
        used.append(f"{name} with sums in {accumulate}: {peak.tera_per_s:g} Tops/s ({peak.basis})")
    share = ideal / seconds
    if share > 1:
        raise DocumentError(f"MFU of {device}", found=f"{share:.0%}, above 100 %", remedy="the peak or the time is wrong; check the device key")
    return Mfu(share, "; ".join(used))


def rate_per_s(tokens: int, seconds: float) -> float | None:
    """Return tokens a second; None when either is unknown."""
    return tokens / seconds if tokens > 0 and seconds > 0 else None


def speedup(seconds: float, base_seconds: float) -> float | None:
    """Return how many times faster a step is than its base; None when either time is unknown."""
    return base_seconds / seconds if seconds > 0 and base_seconds > 0 else None


def peak_ratio(matrix: Matrix, device: str, name: str, base: str, accumulate: str = "fp32") -> float | None:
    """Return the ratio of two peaks of a device, to stand beside a measured speed-up; None when one is unknown."""
    fast, slow = find_peak(matrix, device, name, accumulate), find_peak(matrix, device, base, accumulate)
    return None if fast is None or slow is None else fast.tera_per_s / slow.tera_per_s


def speed_text(first: AuditDocument, second: AuditDocument, matrix: Matrix) -> str:
    """Return how much faster the second audit's steps were, beside the ratio of the peaks of what each mostly computed in; empty where either was not timed.

    Args:
        first: the base.
        second: what is compared with it.
        matrix: the facts.
    """
    faster = speedup(second.seconds, first.seconds)
    if faster is None:
        return ""
    measured = f"{faster:.2f} times as fast, measured"
    names = [main_format(audit) for audit in (second, first)]
    if first.device != second.device or first.kind != "hardware" or second.kind != "hardware":
        return f"{measured}; peaks are compared on one device that is hardware only"
    ratio = peak_ratio(matrix, first.device, names[0], names[1])
    if ratio is None:
        return f"{measured}; no source states the peaks of {names[0]} and {names[1]} on {first.device}"
    return f"{measured}; the peak of {names[0]} is {ratio:.2f} times that of {names[1]} on {first.device}"


def main_format(audit: AuditDocument) -> str:
    """Return the format that most FLOPs of forward and backward were computed in; ``none`` when nothing was multiplied."""
    flops: dict[str, int] = {}
    for row in audit.ops:
        if row.flops and row.phase != "optimizer":
            flops[row.compute] = flops.get(row.compute, 0) + row.flops
    return max(flops, key=lambda name: flops[name], default="none")
