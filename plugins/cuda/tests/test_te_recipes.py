"""Low-bit recipes as recipes of Transformer Engine, on a stand-in with its habits."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from mpbackend.errors import BackendError, UnknownNameError
from mpbackend.lowbit import LowBit, low_bit
from mpbackend.recipe import PRESETS, parse_recipe
from mpbackend_cuda.te_recipes import QUANTIZED, SATURATES, SHARED_WINDOWS, build, lower, set_power_of_two
from plugins.cuda.tests.support.engine import (
    DelayedScaling,
    Engine,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MMParams,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

RECIPES = Engine().recipes


def low(text: str) -> LowBit:
    return low_bit(parse_recipe(text))


def test_current_scaling() -> None:
    lowered = lower(low("fp8"), RECIPES)
    recipe = lowered.recipe
    assert type(recipe) is Float8CurrentScaling
    assert (recipe.fp8_format, recipe.use_power_2_scales) == (Format.HYBRID, False)
    assert [recipe.fp8_gemm_fprop, recipe.fp8_gemm_dgrad, recipe.fp8_gemm_wgrad] == [MMParams(False), MMParams(True), MMParams(True)]
    assert (recipe.fp8_dpa, recipe.backward_override) == (False, None), "against what the class starts with"
    assert (lowered.scheme, lowered.multiple, lowered.notes) == ("tensor", 16, (SATURATES,))


def test_accumulation_is_asked_for_by_its_effect() -> None:
    recipe = lower(low("fp8:accumulate.forward=fp32,accumulate.wgrad=fast"), RECIPES).recipe
    assert [recipe.fp8_gemm_fprop, recipe.fp8_gemm_dgrad, recipe.fp8_gemm_wgrad] == [MMParams(True), MMParams(True), MMParams(False)]


def test_powers_of_two_reach_what_the_layers_read() -> None:
    recipe = lower(low("fp8:scaling.format=e8m0"), RECIPES).recipe
    assert recipe.use_power_2_scales
    assert all(getattr(recipe, name).power_2_scale for name in QUANTIZED)
    assert not Float8CurrentScaling().fp8_quant_fwd_inp.power_2_scale, "the class is as it was"
    current: Any = Float8CurrentScaling
    assert not current(use_power_2_scales=True).fp8_quant_fwd_inp.power_2_scale, "the field alone reaches nothing"


def test_delayed_scaling() -> None:
    lowered = lower(low("fp8-delayed:scaling.history=16,scaling.algorithm=most_recent,scaling.margin=2,compute=fp8_e4m3"), RECIPES)
    recipe = lowered.recipe
    assert type(recipe) is DelayedScaling
    assert lowered.notes == (SATURATES, SHARED_WINDOWS)
    assert (recipe.amax_history_len, recipe.amax_compute_algo, recipe.margin, recipe.reduce_amax, recipe.fp8_format) == (
        16,
        "most_recent",
        2,
        True,
        Format.E4M3,
    )


def test_block_scaling() -> None:
    lowered = lower(low("fp8-block"), RECIPES)
    recipe = lowered.recipe
    assert type(recipe) is Float8BlockScaling
    assert (recipe.use_f32_scales, recipe.x_block_scaling_dim, recipe.w_block_scaling_dim, recipe.grad_block_scaling_dim) == (True, 1, 2, 1)
    assert not any(getattr(recipe, name).power_2_scale for name in QUANTIZED), "fp32 scales, against what the class starts with"
    assert lowered.multiple == 128
    assert lowered.notes == (SATURATES, "Float8BlockScaling adds the forward product in fp32, which is more than asked")
    lines = lower(low("fp8-block:scaling.weights=1x128,scaling.format=e8m0"), RECIPES)
    assert (lines.recipe.w_block_scaling_dim, lines.recipe.use_f32_scales, lines.scheme) == (1, False, "block_1x128")


def test_microscaling() -> None:
    lowered = lower(low("mxfp8"), RECIPES)
    assert type(lowered.recipe) is MXFP8BlockScaling
    assert (lowered.recipe.fp8_format, lowered.multiple) == (Format.E4M3, 32)
    note = lower(low("mxfp8:accumulate.forward=fp32"), RECIPES).notes[-1]
    assert "no field for split accumulation of the forward product" in note
    assert "more than asked" in lower(low("mxfp8:accumulate=fast"), RECIPES).notes[-1]


def test_two_level_scaling_without_what_the_recipe_does_not_ask_for() -> None:
    recipe = lower(low("nvfp4"), RECIPES).recipe
    assert type(recipe) is NVFP4BlockScaling
    assert (recipe.disable_rht, recipe.disable_stochastic_rounding, recipe.disable_2d_quantization, recipe.fp4_format) == (True, True, True, Format.E2M1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fp8:scaling.inputs=row,scaling.weights=row", "scales per row and row: Transformer Engine has no such layout"),
        ("fp8:compute=fp8_e5m2", "fp8_e5m2 forward, fp8_e5m2 for gradients: Transformer Engine has no such format"),
        ("fp8:compute.wgrad=fp8_e4m3", "fp8_e4m3 and fp8_e5m2 for gradients: Transformer Engine has no such format"),
        ("fp8:compute.wgrad=bf16", "bf16 and fp8_e5m2 for gradients: Transformer Engine has no such format"),
        ("fp8:scaling.margin=1", "scaling.margin=1: Float8CurrentScaling keeps no margin"),
        ("mxfp8:scaling.format=fp32", "scaling.format=fp32: not a format of the scales of MXFP8BlockScaling"),
        ("fp8-delayed:scaling.format=e8m0", "scaling.format=e8m0: not a format of the scales of DelayedScaling"),
        ("fp8-delayed:accumulate.forward=fp32", "DelayedScaling has no field for it"),
        ("nvfp4:compute.wgrad=fp8_e4m3", "NVFP4BlockScaling takes fp4_e2m1 for every operand"),
        ("hif8", "hif8 forward, hif8 for gradients: Transformer Engine has no such format"),
    ],
)
def test_what_would_run_as_something_else_is_refused(text: str, message: str) -> None:
    with pytest.raises(BackendError, match=message):
        lower(low(text), RECIPES)


def test_delayed_scales_of_blocks_are_refused_however_they_come() -> None:
    delayed = msgspec.structs.replace(low("mxfp8"), mode="delayed")
    with pytest.raises(BackendError, match="MXFP8BlockScaling scales by the present amax only"):
        lower(delayed, RECIPES)


def test_an_unknown_field_is_refused_where_the_class_drops_it() -> None:
    dropped: Any = DelayedScaling
    assert dropped(interval=1) == DelayedScaling(), "what the class does with it"
    with pytest.raises(UnknownNameError, match="unknown field of DelayedScaling 'interval'"):
        build(DelayedScaling, {"interval": 1})


def test_a_release_without_a_needed_field_is_refused() -> None:
    Old = dataclasses.make_dataclass("DelayedScaling", [("margin", int, 0)])  # noqa: N806 - a class
    module = Engine().recipes
    vars(module)["DelayedScaling"] = Old
    with pytest.raises(UnknownNameError, match="unknown field of DelayedScaling 'fp8_format'"):
        lower(low("fp8-delayed"), module)


def test_a_value_that_the_class_refuses() -> None:
    with pytest.raises(BackendError, match="recipe Float8BlockScaling: Split accumulator required for fprop"):
        build(Float8BlockScaling, {"fp8_gemm_fprop": MMParams(False)})


def test_a_value_that_does_not_stay_is_an_error() -> None:
    class Stubborn(DelayedScaling):
        def __init__(self, **values: Any) -> None:
            super().__init__(**values)
            self.margin = 3

    with pytest.raises(BackendError, match="field margin = 1 of Stubborn: it reads back 3"):
        build(Stubborn, {"margin": 1})


def test_a_class_without_the_rounding_that_layers_read() -> None:
    with pytest.raises(BackendError, match="it has no fp8_quant_fwd_inp"):
        set_power_of_two(DelayedScaling(), True)

    @dataclasses.dataclass
    class Frozen:
        power_2_scale: bool = False

        def __post_init__(self) -> None:
            self.power_2_scale = False

    class Recipe:
        fp8_quant_fwd_inp = Frozen()

    with pytest.raises(BackendError, match=r"fp8_quant_fwd_inp\.power_2_scale = True: it reads back otherwise"):
        set_power_of_two(Recipe(), True)


def test_every_low_bit_preset_is_looked_at() -> None:
    lowered = {name for name, recipe in PRESETS.items() if recipe.scaling.mode != "none"}
    assert lowered == {"fp8", "fp8-delayed", "fp8-block", "mxfp8", "nvfp4", "hif8"}
