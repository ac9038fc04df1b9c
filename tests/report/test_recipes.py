from __future__ import annotations

import math

import pytest

from mpbackend.capability import Peak
from mpbackend.device import device_from_matrix
from mpbackend.errors import DocumentError, MpbackendError, PlanError
from mpbackend.footprint import footprint
from mpbackend.formats import FORMATS
from mpbackend.matrix import Matrix
from mpbackend.planning import plan_recipe
from mpbackend.recipe import DESCRIPTIONS, PRESETS, Recipe
from mpbackend.report.recipes import (
    Cell,
    cells_report,
    describe_presets,
    describe_roles,
    peak_ratio,
    power_text,
    presets_report,
    ratio_text,
    recipe_cell,
    roles_report,
)
from mpbackend.report.terminal import render
from mpbackend.roles import RANGES


def peak(format: str, rate: float, **fields: str) -> Peak:  # noqa: A002 - the field's name
    plain = {"device": "d", "accumulate": "fp32", "basis": "vendor", "source": ("s",), "evidence": "documented"}
    return Peak(format=format, tera_per_s=rate, **{**plain, **fields})  # type: ignore[arg-type] # a test's shorthand


def cell(matrix: Matrix, recipe: str, device: str) -> Cell:
    preset = PRESETS[recipe]
    try:
        return recipe_cell(matrix, preset, device, plan_recipe(preset, device_from_matrix(matrix, device), matrix))
    except PlanError as refusal:
        return recipe_cell(matrix, preset, device, refusal)


def test_every_preset_has_its_line_and_a_plugins_says_where_it_is_from() -> None:
    presets = {**PRESETS, "wide": Recipe(preset="wide", params="bf16")}
    found = describe_presets(presets, {"preset wide": "acme 1.0"})
    assert {name: found[name] for name in DESCRIPTIONS} == DESCRIPTIONS
    assert found["wide"] == "from acme 1.0: wide:params=bf16"
    assert all(line in render(presets_report(found), 100) for line in DESCRIPTIONS.values())


def test_every_role_is_listed_with_what_it_allows() -> None:
    roles = {role.path: role for role in describe_roles()}
    assert list(roles) == list(Recipe(preset="fp32").flat())
    assert roles["params"].allowed == "a format"
    assert roles["compute.dgrad"].allowed == "a format or an ordered choice a|b"
    assert roles["accumulate.forward"].allowed == "a format or fast"
    assert roles["buffers"].allowed == "keep or a format"
    assert roles["master"].allowed == "none, fp32, kahan, stochastic"
    assert roles["loss_scale.init"].default == "65536.0"
    text = render(roles_report(list(roles.values())), 80)
    assert all(name in text for name in (*roles, *FORMATS))


def test_what_a_literal_role_is_said_to_allow_is_what_a_recipe_takes() -> None:
    for role in describe_roles():
        if ", " in role.allowed:
            for value in role.allowed.split(", "):
                assert str(PRESETS["fp32"].evolve(**{role.path: value}).flat()[role.path]) == value
            with pytest.raises(MpbackendError):
                PRESETS["fp32"].evolve(**{role.path: "nothing of the kind"})


@pytest.mark.parametrize(
    ("path", "good", "bad"),
    [
        ("loss_scale.init", 4096.0, 3.0),
        ("loss_scale.init", 2.0**24, 2.0**25),
        ("loss_scale.growth", 4.0, 1.0),
        ("loss_scale.backoff", 0.25, 1.0),
        ("loss_scale.min", 0.5, 0.3),
        ("loss_scale.max", 2.0**20, 3.0),
        ("loss_scale.interval", 1, 0),
        ("loss_scale.hysteresis", 1, 0),
        ("scaling.history", 1, 0),
        ("scaling.margin", 15, 16),
    ],
)
def test_the_bounds_that_are_shown_are_the_ones_that_hold(path: str, good: float, bad: float) -> None:
    assert path in RANGES
    PRESETS["fp32"].evolve(**{path: good})
    with pytest.raises(DocumentError):
        PRESETS["fp32"].evolve(**{path: bad})


def test_peaks_are_compared_within_a_variant() -> None:
    peaks = [
        peak("bf16", 200.0, variant="a"),
        peak("bf16", 240.0, variant="a", accumulate="fp16"),
        peak("fp32", 50.0, variant="a"),
        peak("fp32", 60.0, variant="a", unit="vector"),
        peak("bf16", 300.0, variant="b"),
        peak("fp32", 50.0, variant="b"),
        peak("bf16", 999.0, variant="c"),
    ]
    assert peak_ratio(peaks, "bf16") == (4.0, 6.0)
    assert peak_ratio(peaks, "fp32") == (1.0, 1.0)
    assert peak_ratio(peaks, "int8") is None
    assert peak_ratio(peaks[-1:], "bf16") is None
    assert (ratio_text((4.0, 6.0)), ratio_text((4.0, 4.001)), ratio_text(None)) == ("4x to 6x", "4x", "unknown")


def test_cells(matrix: Matrix) -> None:
    plain = cell(matrix, "bf16-master", "acme-1")
    assert (plain.level, plain.granted, plain.scaling, plain.evidence) == ("native", ("bf16",), "none", "none")
    assert plain.peak_ratio == (15.0, 15.0)
    assert plain.largest == (float(FORMATS["bf16"].max),)
    assert plain.smallest_normal == (2.0**-126,)
    assert plain.bytes_per_parameter == 2 + 4 + 4 + 4 + 4
    assert cell(matrix, "bf16", "acme-2").peak_ratio is None


def test_a_refused_recipe_says_why(matrix: Matrix) -> None:
    refused = cell(matrix, "fp32", "acme-1")
    assert refused.granted == ()
    assert (refused.level, refused.peak_ratio) == ("converted", None)
    text = render(cells_report([refused]), 80)
    assert "⇄ converted" in text
    assert "refused" in text
    assert "fp32 on acme-1: compute.forward: conv in fp32 is converted" in text


def test_bytes_are_those_of_the_footprint(matrix: Matrix) -> None:
    for name, recipe in PRESETS.items():
        exact = footprint(recipe, 1000, "adamw")
        assert cell(matrix, name, "acme-2").bytes_per_parameter * 1000 == sum(exact.bytes_of(role) for role in ("params", "master", "grads", "optimizer"))


def test_powers() -> None:
    assert power_text(2.0**-14) == "2^-14"
    assert power_text(math.pi) == "3.14"
