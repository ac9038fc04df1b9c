"""The recipes of the real Transformer Engine. Its recipe classes are plain Python and need neither its libraries nor a GPU.

Run by ``make test-te``, which puts release 2.20.2 on the path; skipped where it is not. Its own flag for builds keeps it from loading libraries, in a process
of its own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest

if importlib.util.find_spec("transformer_engine") is None:
    pytest.skip("Transformer Engine is not installed; `make test-te` installs it", allow_module_level=True)

PROGRAM = """
import dataclasses, importlib, json, sys, warnings
warnings.simplefilter("ignore")
recipes = importlib.import_module("transformer_engine.common.recipe")
from importlib.metadata import version
from mpbackend.errors import MpbackendError
from mpbackend.lowbit import low_bit
from mpbackend.recipe import parse_recipe
from mpbackend_cuda.te_recipes import build, lower

def shown(value):
    if dataclasses.is_dataclass(value):
        return {field.name: shown(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value if isinstance(value, (bool, int, float, str, type(None))) else getattr(value, "name", str(value))

found = {"version": version("transformer-engine")}
for text in json.load(sys.stdin):
    try:
        recipe = lower(low_bit(parse_recipe(text)), recipes).recipe
        read = {name: shown(getattr(recipe, name)) for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad",
            "fp4_quant_fwd_inp", "fp4_quant_fwd_weight", "fp4_quant_bwd_grad") if hasattr(recipe, name)}
        found[text] = {"class": type(recipe).__name__, **shown(recipe), **read}
    except MpbackendError as error:
        found[text] = str(error)
found["dropped"] = recipes.DelayedScaling(interval=1, backward_override=None) == recipes.DelayedScaling(backward_override=None)
found["reaches nothing"] = not recipes.Float8CurrentScaling(use_power_2_scales=True).fp8_quant_fwd_inp.power_2_scale
try:
    build(recipes.DelayedScaling, {"interval": 1})
except MpbackendError as error:
    found["unknown"] = str(error)
try:
    build(recipes.DelayedScaling, {"amax_compute_algo": "median"})
except MpbackendError as error:
    found["invalid"] = str(error)
assert "transformer_engine.pytorch" not in sys.modules
print(json.dumps(found))
"""

NOT_OURS = {"NVTE_BACKWARD_OVERRIDE": "dequantized", "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": "1", "NVTE_NVFP4_4OVER6": "all"}
"""Variables that change what the recipe classes start with."""

TEXTS = ("fp8", "fp8:scaling.format=e8m0", "fp8:accumulate=fp32", "fp8-delayed:scaling.history=16", "fp8-block", "mxfp8", "nvfp4", "fp8:scaling.margin=1")

PLAIN = {"power_2_scale": False, "amax_epsilon": 0.0, "random_hadamard_transform": False, "stochastic_rounding": False, "fp4_2d_quantization": False}
SPLIT, FAST = {"use_split_accumulator": True}, {"use_split_accumulator": False}


@pytest.fixture(scope="module", params=[{}, NOT_OURS], ids=["as it is", "with its variables set"])
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    environment = {**os.environ, "NVTE_PROJECT_BUILDING": "1", **request.param}
    done = subprocess.run([sys.executable, "-c", PROGRAM], input=json.dumps(TEXTS), capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


EXPECTED: dict[str, dict[str, Any]] = {
    "fp8": {
        "class": "Float8CurrentScaling",
        "fp8_format": "HYBRID",
        "use_power_2_scales": False,
        "fp8_gemm_fprop": FAST,
        "fp8_gemm_dgrad": SPLIT,
        "fp8_gemm_wgrad": SPLIT,
        "fp8_quant_fwd_inp": PLAIN,
        "fp8_quant_fwd_weight": PLAIN,
        "fp8_quant_bwd_grad": PLAIN,
        "backward_override": None,
        "fp8_dpa": False,
        "fp8_mha": False,
    },
    "fp8:scaling.format=e8m0": {"use_power_2_scales": True, "fp8_quant_fwd_inp": {**PLAIN, "power_2_scale": True}},
    "fp8:accumulate=fp32": {"fp8_gemm_fprop": SPLIT},
    "fp8-delayed:scaling.history=16": {
        "class": "DelayedScaling",
        "margin": 0,
        "fp8_format": "HYBRID",
        "amax_history_len": 16,
        "amax_compute_algo": "max",
        "reduce_amax": True,
        "scaling_factor_compute_algo": None,
    },
    "fp8-block": {
        "class": "Float8BlockScaling",
        "use_f32_scales": True,
        "fp8_format": "E4M3",
        "x_block_scaling_dim": 1,
        "w_block_scaling_dim": 2,
        "grad_block_scaling_dim": 1,
        "fp8_gemm_fprop": SPLIT,
        "fp8_quant_fwd_inp": PLAIN,
        "backward_override": None,
    },
    "mxfp8": {"class": "MXFP8BlockScaling", "fp8_format": "E4M3", "margin": 0, "enable_2d_quantization": False, "backward_override": None},
    "nvfp4": {
        "class": "NVFP4BlockScaling",
        "fp4_format": "E2M1",
        "fp8_format": "E4M3",
        "fp4_quant_fwd_inp": PLAIN,
        "fp4_quant_fwd_weight": PLAIN,
        "fp4_quant_bwd_grad": PLAIN,
        "nvfp4_4over6": "none",
        "row_scaled_activation": False,
    },
}


@pytest.mark.parametrize("text", EXPECTED)
def test_each_recipe_becomes_the_intended_object(text: str, found: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    recipe = found[text]
    with capsys.disabled():
        print(f"\nTransformer Engine {found['version']}, {text}: {json.dumps(recipe)}")
    assert {name: recipe[name] for name in EXPECTED[text]} == EXPECTED[text]


def test_what_it_drops_is_refused(found: dict[str, Any]) -> None:
    assert found["dropped"], "its classes still ignore unknown arguments"
    assert found["unknown"].startswith("unknown field of DelayedScaling 'interval'")
    assert found["invalid"].startswith("recipe DelayedScaling: ")
    assert found["fp8:scaling.margin=1"].startswith("scaling.margin=1: Float8CurrentScaling keeps no margin")


def test_its_field_for_powers_of_two_still_reaches_nothing(found: dict[str, Any], request: pytest.FixtureRequest) -> None:
    if "variables" not in request.node.name:
        assert found["reaches nothing"], "it does now: te_recipes.set_power_of_two can go"
