"""Recipes for people: the presets, the roles with what they allow, and presets on devices."""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from mpbackend.capability import Level, Peak
from mpbackend.decisions import Decision
from mpbackend.errors import PlanError
from mpbackend.footprint import footprint
from mpbackend.formats import FORMATS
from mpbackend.matrix import Matrix
from mpbackend.planning import Plan
from mpbackend.recipe import CHOICE_PATHS, DESCRIPTIONS, FAST, FORMAT_PATHS, Recipe, canonical_text
from mpbackend.report.devices import dense_peaks
from mpbackend.report.view import Column, Listing, Report, Table, level_text
from mpbackend.roles import RANGES, Part

PARAMETERS = 10**9
"""Parameters over which bytes per parameter are averaged, so that what is counted once does not show."""

OPTIMIZER = "adamw"
ROUND = 1e6
"""Largest values from here on are rounded to three digits."""

COUNTED = ("params", "master", "grads", "optimizer")


class Role(msgspec.Struct, frozen=True, kw_only=True):
    """A role: its dotted path, the value it has in the preset ``fp32``, and what it allows."""

    path: str
    default: str
    allowed: str


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """A preset on a device.

    Attributes:
        recipe: name of the preset.
        device: device key.
        level: level of the deciding decision.
        granted: operand formats of the three products that will run, equal ones once; empty when refused.
        refused: why it is refused; empty when it is not.
        largest: largest finite value of each granted format.
        smallest_normal: smallest normal value of each granted format.
        scaling: loss scaling, and mode and granularity of tensor scaling; ``none`` without either.
        peak_ratio: dense matrix peak over that of fp32, lowest and highest of the device's variants; None when either is unknown.
        bytes_per_parameter: parameters, master, gradients and moments of AdamW.
        evidence: id of the run that measured it; ``none`` without one.
        warnings: why a role is granted with a warning.
    """

    recipe: str
    device: str
    level: Level
    granted: tuple[str, ...]
    refused: str = ""
    largest: tuple[float, ...] = ()
    smallest_normal: tuple[float, ...] = ()
    scaling: str
    peak_ratio: tuple[float, float] | None
    bytes_per_parameter: float
    evidence: str = "none"
    warnings: tuple[str, ...] = ()


def describe_presets(presets: Mapping[str, Recipe], owners: Mapping[str, str]) -> dict[str, str]:
    """Return presets with one line each; a plugin's preset says which distribution it is from and what it changes."""
    return {
        name: DESCRIPTIONS.get(name) or f"from {owners.get(f'preset {name}', 'a plugin')}: {canonical_text(recipe, {name: Recipe(preset=name)})}"
        for name, recipe in presets.items()
    }


def presets_report(descriptions: Mapping[str, str]) -> Report:
    """Return the presets as a table."""
    table = Table("", (Column("preset", keep=True), Column("what it is")), list(descriptions.items()))
    usage = Listing("", ("change a role with preset:path=value,path=value; `mpbackend recipes --roles` lists the paths",))
    return Report("Recipes", [table, usage])


def describe_roles() -> list[Role]:
    """Return every role with its default and what it allows, in the order of the recipe."""
    types = leaf_types(Recipe)
    return [Role(path=path, default=str(value), allowed=allowed_text(path, types[path])) for path, value in Recipe(preset="fp32").flat().items()]


def leaf_types(part: type[Part], prefix: str = "") -> dict[str, Any]:
    """Return the type of every leaf of a record by its dotted path."""
    leaves: dict[str, Any] = {}
    for name, kind in typing.get_type_hints(part).items():
        if isinstance(kind, type) and issubclass(kind, Part):
            leaves |= leaf_types(kind, f"{prefix}{name}.")
        else:
            leaves[prefix + name] = kind
    return leaves


def allowed_text(path: str, kind: Any) -> str:
    """Return what a role allows, in words."""
    if path in RANGES:
        return RANGES[path][0]
    if typing.get_origin(kind) is Literal:
        return ", ".join(typing.get_args(kind))
    if path in FORMAT_PATHS:
        extra = " or an ordered choice a|b" if path in CHOICE_PATHS else f" or {FAST}" if path.startswith("accumulate.") else ""
        return ("keep or " if path == "buffers" else "") + "a format" + extra
    return getattr(kind, "__name__", str(kind))


def roles_report(roles: Sequence[Role]) -> Report:
    """Return the roles as a table."""
    table = Table("", (Column("role", keep=True), Column("default"), Column("allowed")), [(role.path, role.default, role.allowed) for role in roles])
    formats = Listing("Formats", (", ".join(FORMATS),))
    return Report("Roles of a recipe", [table, formats])


def recipe_cell(matrix: Matrix, recipe: Recipe, device: str, outcome: Plan | PlanError) -> Cell:
    """Return a preset on a device.

    Args:
        matrix: the loaded matrices.
        recipe: the preset.
        device: device key.
        outcome: its plan there, or the refusal.
    """
    sizes = footprint(recipe, PARAMETERS, OPTIMIZER)
    counted = sum(sizes.bytes_of(role) for role in COUNTED) / PARAMETERS
    if isinstance(outcome, PlanError):
        first = next(decision for decision in outcome.decisions if isinstance(decision, Decision))
        refused = f"{first.role}: {first.reason}"
        return Cell(
            recipe=recipe.preset,
            device=device,
            level=first.level,
            granted=(),
            refused=refused,
            scaling=scaling_text(recipe),
            peak_ratio=None,
            bytes_per_parameter=counted,
        )
    products = [decision for decision in outcome.decisions if decision.role.startswith("compute.") and decision.op == "matmul"]
    granted = tuple(dict.fromkeys(decision.granted for decision in products))
    known = [FORMATS[name] for name in granted if name in FORMATS]
    return Cell(
        recipe=recipe.preset,
        device=device,
        level=products[0].level,
        granted=granted,
        largest=tuple(float(entry.max) for entry in known),
        smallest_normal=tuple(float(entry.smallest_normal) for entry in known),
        scaling=scaling_text(outcome.effective),
        peak_ratio=peak_ratio(dense_peaks(matrix, device), products[0].granted),
        bytes_per_parameter=counted,
        warnings=tuple(outcome.warnings),
    )


def scaling_text(recipe: Recipe) -> str:
    """Return loss scaling and tensor scaling in words."""
    parts = [] if recipe.loss_scale.mode == "none" else [f"{recipe.loss_scale.mode} loss"]
    if recipe.scaling.mode != "none":
        granularity = dict.fromkeys((recipe.scaling.inputs, recipe.scaling.weights))
        parts.append(f"{recipe.scaling.mode} per {', '.join(granularity)}")
    return "; ".join(parts) or "none"


def peak_ratio(peaks: Sequence[Peak], name: str) -> tuple[float, float] | None:
    """Return the peak of a format over that of fp32, lowest and highest over the variants that state both.

    The matrix unit's figure counts where there is one, else the vector unit's; of several figures those that accumulate in fp32, then the largest.
    """
    variants = dict.fromkeys(peak.variant for peak in peaks)
    ratios = []
    for variant in variants:
        of_variant = [peak for peak in peaks if peak.variant == variant]
        mine, base = best_peak(of_variant, name), best_peak(of_variant, "fp32")
        if mine is not None and base is not None:
            ratios.append(mine / base)
    return (min(ratios), max(ratios)) if ratios else None


def best_peak(peaks: Sequence[Peak], name: str) -> float | None:
    """Return the rate of a format among the peaks of one variant, None when no peak states it."""
    mine = [peak for peak in peaks if peak.format == name]
    best = max(mine, key=lambda peak: (peak.unit == "matrix", peak.accumulate == "fp32", peak.tera_per_s), default=None)
    return best.tera_per_s if best is not None else None


def cells_report(cells: Sequence[Cell]) -> Report:
    """Return presets on devices as one table a device, refusals below."""
    columns = (
        Column("recipe", keep=True),
        Column("level", keep=True),
        Column("granted"),
        Column("largest", right=True),
        Column("smallest normal", right=True),
        Column("scaling"),
        Column("peak", right=True),
        Column("bytes", right=True),
        Column("evidence", wide=True),
    )
    tables: dict[str, list[Sequence[str]]] = {}
    for cell in cells:
        tables.setdefault(cell.device, []).append(cell_texts(cell))
    refusals = [f"{cell.recipe} on {cell.device}: {cell.refused}" for cell in cells if cell.refused]
    legend = (
        "peak: dense matrix peak over the device's own fp32 peak; unknown where a source states only one of them",
        "bytes: per parameter, for parameters, master, gradients and AdamW moments; `mpbackend memory` counts low-bit copies too",
        "evidence: the run that measured it on the device" + (", none so far" if all(cell.evidence == "none" for cell in cells) else ""),
    )
    warned = [f"{cell.recipe} on {cell.device}: {'; '.join(cell.warnings)}" for cell in cells if cell.warnings]
    blocks = [Table(device, columns, rows) for device, rows in tables.items()]
    return Report("Recipes on devices", [*blocks, Listing("Refused", refusals), Listing("Warned", warned), Listing("Legend", legend)])


def cell_texts(cell: Cell) -> list[str]:
    """Return the cells of one preset on one device."""
    return [
        cell.recipe,
        level_text(cell.level),
        (" / ".join(cell.granted) or "refused") + (" (warned)" if cell.warnings else ""),
        " / ".join(f"{value:.6g}" if value < ROUND else f"{value:.3g}" for value in cell.largest),
        " / ".join(power_text(value) for value in cell.smallest_normal),
        cell.scaling,
        ratio_text(cell.peak_ratio),
        f"{cell.bytes_per_parameter:g}",
        cell.evidence,
    ]


def power_text(value: float) -> str:
    """Return a power of two as ``2^-14``."""
    fraction, exponent = math.frexp(value)
    return f"2^{exponent - 1}" if fraction == 0.5 else f"{value:.3g}"


def ratio_text(ratio: tuple[float, float] | None) -> str:
    """Return a ratio, a range where variants differ by more than rounding, ``unknown`` without one."""
    if ratio is None:
        return "unknown"
    low, high = (f"{value:.3g}x" for value in ratio)
    return low if low == high else f"{low} to {high}"
