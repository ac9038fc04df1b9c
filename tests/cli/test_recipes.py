from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from click.testing import Result

from mpbackend.recipe import DESCRIPTIONS, PRESETS, Recipe

Invoke = Callable[..., Result]


def test_presets(invoke: Invoke) -> None:
    assert all(line in invoke("recipes").stdout for line in DESCRIPTIONS.values())
    assert set(json.loads(invoke("recipes", "--format", "json").stdout)) >= set(PRESETS)


def test_roles(invoke: Invoke) -> None:
    roles = json.loads(invoke("recipes", "--roles", "--format", "json").stdout)
    assert [role["path"] for role in roles] == list(Recipe(preset="fp32").flat())
    assert "loss_scale.hysteresis" in invoke("recipes", "--roles").stdout


def test_the_table_has_every_recipe_on_every_device(invoke: Invoke, granting_device: str, absent_device: str) -> None:
    cells = json.loads(invoke("recipes", "--table", "--device", f"{granting_device},{absent_device}", "--format", "json").stdout)
    devices = dict.fromkeys((granting_device, absent_device))
    assert [(cell["device"], cell["recipe"]) for cell in cells][: len(PRESETS)] == [(granting_device, name) for name in PRESETS]
    assert len(cells) == len(devices) * len(PRESETS)
    assert all(cell["evidence"] == "none" for cell in cells)
    assert "| recipe | level | granted |" in invoke("recipes", "--table", "--device", granting_device, "--format", "md").stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--table"], "no device"),
        (["--device", "a"], "--device without --table"),
        (["--roles", "--table"], "two listings"),
        (["--table", "--device", "nothing-1"], "unknown device 'nothing-1'"),
    ],
)
def test_bad_input_is_one_line(refused: Callable[..., str], arguments: list[str], expected: str) -> None:
    assert expected in refused("recipes", *arguments)
