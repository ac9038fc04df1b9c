from __future__ import annotations

import math
from fractions import Fraction

import pytest

from mpbackend.errors import DocumentError, UnknownNameError
from mpbackend.footprint import LIMIT, LOW_BIT_COPIES, OPTIMIZERS, Footprint, footprint
from mpbackend.recipe import PRESETS, parse_recipe

MATRIX = (4096, 4096)


def of(recipe: str, parameters: int = 1000, optimizer: str = "adamw") -> Footprint:
    return footprint(parse_recipe(recipe), parameters, optimizer)


def test_a_square_matrix_in_fp32_and_bf16() -> None:
    assert of("fp32", 4096**2).bytes_of("params") == 67_108_864
    assert of("bf16-params", 4096**2).bytes_of("params") == 33_554_432


def test_moments_of_a_hundred_million_parameters() -> None:
    assert of("fp32", 10**8, "adam").bytes_of("optimizer") == 800_000_000
    assert of("bf16", 10**8, "adam").bytes_of("optimizer") == 800_000_000
    assert of("bf16-params", 10**8, "adam").bytes_of("optimizer") == 400_000_000


@pytest.mark.parametrize(
    ("recipe", "params", "master", "grads", "moments"),
    [
        ("fp32", 4, 0, 4, 8),
        ("fp16", 4, 0, 4, 8),
        ("bf16", 4, 0, 4, 8),
        ("bf16-master", 2, 4, 4, 8),
        ("fp16-master", 2, 4, 4, 8),
        ("bf16-params", 2, 0, 2, 4),
        ("bf16-kahan", 2, 2, 2, 8),
        ("bf16-sr", 2, 0, 2, 8),
        ("bf16:optimizer.exp_avg=bf16", 4, 0, 4, 6),
        ("fp32:params=fp64,grads=fp64", 8, 0, 8, 8),
    ],
)
def test_bytes_per_parameter(recipe: str, params: int, master: int, grads: int, moments: int) -> None:
    result = of(recipe)
    assert [result.bytes_of(role) / 1000 for role in ("params", "master", "grads", "optimizer")] == [params, master, grads, moments]
    assert result.total == 1000 * (params + master + grads + moments)
    assert result.checkpoint == 1000 * (params + master + moments)
    assert result.checkpoint_model == 1000 * params


def test_a_kept_fp32_copy_is_not_halved() -> None:
    assert of("bf16").bytes_of("params") == of("fp32").bytes_of("params")
    assert of("bf16").saving == 0
    assert of("bf16-master").saving == -2000
    assert of("bf16-master").saving_ratio == -0.125
    assert of("bf16-master").checkpoint > of("fp32").checkpoint


def test_saving_of_pure_bf16() -> None:
    result = of("bf16-params")
    assert (result.fp32_total, result.total, result.saving, result.saving_ratio) == (16_000, 8_000, 8_000, 0.5)


@pytest.mark.parametrize(
    ("recipe", "working"), [("bf16", 2000), ("fp16", 2000), ("fp32", 0), ("fp32-fast", 0), ("bf16-master", 0), ("bf16-params", 0), ("fp8", 0)]
)
def test_working_copies_are_told_apart_from_the_total(recipe: str, working: int) -> None:
    result = of(recipe)
    assert result.working == working
    assert any(note.startswith("Working copies") for note in result.notes) == (working > 0)


@pytest.mark.parametrize(
    ("optimizer", "moments"),
    [("sgd", 0), ("sgd-momentum", 4), ("adam", 8), ("adamw", 8), ("adam-amsgrad", 12), ("adagrad", 4), ("rmsprop", 4), ("lion", 4), ("muon", 4)],
)
def test_moments_of_every_optimizer(optimizer: str, moments: int) -> None:
    assert of("fp32", optimizer=optimizer).bytes_of("optimizer") == 1000 * moments


def test_every_optimizer_is_tested_and_has_a_source() -> None:
    assert all(moments.source for moments in OPTIMIZERS.values())
    assert len(OPTIMIZERS) == 9


@pytest.mark.parametrize("recipe", PRESETS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_lines_add_up_for_every_preset(recipe: str, optimizer: str) -> None:
    result = of(recipe, 12_345, optimizer)
    assert result.total == sum(line.bytes for line in result.lines)
    assert result.fp32_total == sum(line.fp32_bytes for line in result.lines) == of("fp32", 12_345, optimizer).total
    assert result.saving == result.fp32_total - result.total
    assert result.notes[0].startswith("Activations are not modeled")


def blocks(rows: int, columns: int, height: int, width: int) -> int:
    return len({(row // height, column // width) for row in range(rows) for column in range(columns)})


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("fp8", lambda r, c: r * c + 4),
        ("hif8", lambda r, c: r * c + 4),
        ("fp8-block", lambda r, c: r * c + 4 * blocks(r, c, 128, 128)),
        ("mxfp8", lambda r, c: 2 * r * c + blocks(r, c, 1, 32) + blocks(c, r, 1, 32)),
        ("nvfp4", lambda r, c: 2 * math.ceil(r * c / 2) + blocks(r, c, 1, 16) + blocks(c, r, 1, 16)),
        ("fp8:scaling.weights=row", lambda r, c: 2 * r * c + 4 * (r + c)),
        ("fp8:scaling.weights=none", lambda r, c: r * c),
    ],
)
@pytest.mark.parametrize("shape", [(256, 128), (130, 65), (1, 33)])
def test_low_bit_copies_of_a_matrix(recipe: str, expected: object, shape: tuple[int, int]) -> None:
    assert callable(expected)
    result = footprint(parse_recipe(recipe), math.prod(shape), "sgd", [shape])
    assert result.bytes_of(LOW_BIT_COPIES) == expected(*shape)
    assert result.checkpoint == result.bytes_of("params")


def test_vectors_have_no_low_bit_copies() -> None:
    with_bias = footprint(parse_recipe("fp8-block"), 4096**2 + 4096, "sgd", [MATRIX, (4096,)])
    assert with_bias.bytes_of(LOW_BIT_COPIES) == 4096**2 + 4 * 32 * 32


@pytest.mark.parametrize("recipe", ["fp8-block", "mxfp8", "nvfp4"])
def test_blocks_are_exact_without_shapes_when_dimensions_are_multiples(recipe: str) -> None:
    exact = footprint(parse_recipe(recipe), 4096**2, "adamw", [MATRIX])
    assert of(recipe, 4096**2).total == exact.total


def test_scales_that_need_shapes_are_named() -> None:
    assert any("not counted; give --shape" in note for note in of("fp8").notes)
    assert any("multiples of the block" in note for note in of("mxfp8").notes)
    assert not any("--shape" in note for note in footprint(parse_recipe("fp8"), 4096**2, "adamw", [MATRIX]).notes)


def test_parameters_that_are_low_bit_themselves_have_no_second_copy() -> None:
    result = of("fp8:params=fp8_e4m3,master=fp32")
    assert (result.bytes_of("params"), result.bytes_of(LOW_BIT_COPIES)) == (1000, 0)
    assert any("Scales of the tensors held in fp8_e4m3" in note for note in result.notes)


def test_device_resolved_and_ordered_formats() -> None:
    assert of("fp32:compute=hf32").total == of("fp32").total
    assert of("fp32:compute=hf32|fp32").total == of("fp32").total
    assert any("ordered choice; counted as tf32" in note for note in of("fp32-fast").notes)


def test_four_bit_elements_share_a_byte() -> None:
    assert of("fp32:params=fp4_e2m1", 3).bytes_of("params") == 2


def test_large_counts_stay_exact() -> None:
    result = of("bf16-master", LIMIT - 1)
    assert result.total == 18 * (LIMIT - 1)
    assert Fraction(result.saving, result.fp32_total) == Fraction(-1, 8)


@pytest.mark.parametrize("parameters", [0, -1, LIMIT + 1, True, 1.0, math.nan])
def test_impossible_counts_are_refused(parameters: int) -> None:
    with pytest.raises(DocumentError, match="out of range"):
        of("fp32", parameters)


def test_shapes_must_have_as_many_elements() -> None:
    with pytest.raises(DocumentError, match="the shapes have 6 elements"):
        footprint(parse_recipe("fp32"), 7, "adamw", [(2, 3)])


def test_an_unknown_optimizer_is_named_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="adamw"):
        of("fp32", optimizer="adamW2")
