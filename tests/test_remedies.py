"""What a refusal suggests is granted: every recipe that a remedy names is planned."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from mpbackend.device import device_from_matrix
from mpbackend.errors import PlanError
from mpbackend.granting import ON_UNSUPPORTED, OnUnsupported
from mpbackend.matrix import Matrix, load_matrix
from mpbackend.planning import Plan, plan_recipe
from mpbackend.recipe import PRESETS, Recipe, gemm, parse_recipe

SHIPPED = load_matrix()
ACME = load_matrix([Path(__file__).parent / "fixtures" / "acme.toml"])
DEVICES = sorted({model.arch: model.key for model in SHIPPED.devices.values()}.values())
CHANGED = ("bf16:accumulate=bf16", "fp16:accumulate=fp64", "fp16:reduce.format=fp8_e4m3", "bf16:compute=tf32", "fp8:accumulate.forward=fp16")
NEAREST = "taken by `--on-unsupported nearest`"


def on(recipe: Recipe, key: str, matrix: Matrix = SHIPPED, *, on_unsupported: OnUnsupported = "error", strict: bool = False) -> Plan:
    """Plan a recipe onto a device that a matrix declares."""
    return plan_recipe(recipe, device_from_matrix(matrix, key), matrix, on_unsupported=on_unsupported, strict=strict)


def remedy(recipe: str, key: str, matrix: Matrix = SHIPPED, *, on_unsupported: OnUnsupported = "error", strict: bool = False) -> str:
    """Return the remedy of a refusal, after doing what it says: the plan must then be granted. Empty where nothing is refused."""
    try:
        on(parse_recipe(recipe), key, matrix, on_unsupported=on_unsupported, strict=strict)
    except PlanError as error:
        follow(error.remedy, recipe, key, matrix, on_unsupported=on_unsupported, strict=strict)
        return error.remedy
    return ""


def follow(text: str, recipe: str, key: str, matrix: Matrix, *, on_unsupported: OnUnsupported, strict: bool) -> None:
    """Do what a remedy says."""
    if NEAREST in text:
        assert on(parse_recipe(recipe), key, matrix, on_unsupported="nearest", strict=strict).effective.compute.forward in text
    elif "is granted there" in text:
        (changed,) = re.findall(r"`(.+?)`", text)
        on(parse_recipe(changed), key, matrix, on_unsupported=on_unsupported, strict=strict)
    elif text.startswith("granted there: "):
        for name in text.removeprefix("granted there: ").split(", "):
            on(parse_recipe(name), key, matrix, on_unsupported=on_unsupported, strict=strict)
    elif text.startswith("without strict"):
        assert on(parse_recipe(recipe), key, matrix, on_unsupported=on_unsupported).warnings
    else:
        assert text == f"`mpbackend matrix --device {key}` shows what it has"


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("policy", ON_UNSUPPORTED)
def test_whatever_is_suggested_is_granted(policy: OnUnsupported, *, strict: bool) -> None:
    places = [*((key, SHIPPED) for key in DEVICES), ("acme-x0", ACME), ("acme-x1", ACME)]
    texts = [remedy(recipe, key, matrix, on_unsupported=policy, strict=strict) for (key, matrix), recipe in itertools.product(places, (*PRESETS, *CHANGED))]
    assert sum(map(bool, texts)) > 20


def test_a_rung_whose_sum_is_refused_is_not_suggested() -> None:
    text = remedy("bf16", "acme-x0", ACME)
    assert text == "`bf16:accumulate=fp16,compute=fp16,loss_scale.mode=static` is granted there"


def test_an_accumulator_that_no_source_states_is_not_written_into_a_recipe() -> None:
    for key, recipe in itertools.product(DEVICES, PRESETS):
        assert "=unknown" not in remedy(recipe, key, strict=True)


def test_what_only_strict_refuses_is_granted_without_it() -> None:
    assert remedy("bf16:reduce.format=bf16", "acme-x1", ACME, strict=True) == "`bf16` is granted there"
    assert remedy("fp32:compute=fp64", "acme-x1", ACME, strict=True).startswith(("granted there: ", "nearest: "))


def test_an_accumulator_that_the_unit_lacks_is_named_in_a_whole_recipe() -> None:
    assert remedy("fp16", "acme-x0", ACME) == "`fp16:accumulate=fp16,loss_scale.mode=static` is granted there"
    assert remedy("fp16:accumulate=fp16", "acme-x0", ACME) == "`fp16:accumulate=fp16,loss_scale.mode=static` is granted there"


def test_a_preset_of_a_plugin_is_suggested_by_its_own_name() -> None:
    mine = Recipe(preset="mine", compute=gemm("fp16"))
    presets = {**PRESETS, "mine": mine}
    with pytest.raises(PlanError) as caught:
        plan_recipe(mine, device_from_matrix(ACME, "acme-x0"), ACME, presets=presets)
    assert caught.value.remedy == "`mine:accumulate=fp16` is granted there"
    assert str(caught.value).startswith("mine is refused on acme-x0: accumulate.forward")
