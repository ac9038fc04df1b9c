"""What a low-bit recipe means, field by field."""

from __future__ import annotations

import msgspec
import pytest

from mpbackend.errors import DocumentError
from mpbackend.lowbit import LONGEST_SIDE, LowBit, Operand, Product, is_low_bit_recipe, low_bit, required_multiple
from mpbackend.recipe import PRESETS, parse_recipe

PRESET_NAMES = ("fp8", "fp8-delayed", "fp8-block", "mxfp8", "nvfp4", "hif8")


def meaning(text: str) -> LowBit:
    return low_bit(parse_recipe(text))


def test_the_low_bit_presets_are_those_that_mean_something() -> None:
    assert tuple(name for name, recipe in PRESETS.items() if is_low_bit_recipe(recipe)) == PRESET_NAMES
    assert not is_low_bit_recipe(parse_recipe("fp32-fast"))


@pytest.mark.parametrize(
    ("text", "forward", "dgrad", "wgrad"),
    [
        ("fp8", "fp8_e4m3 tensor, fp8_e4m3 tensor", "fp8_e5m2 tensor, fp8_e4m3 tensor", "fp8_e5m2 tensor, fp8_e4m3 tensor"),
        ("fp8-block", "fp8_e4m3 1x128, fp8_e4m3 128x128", "fp8_e4m3 1x128, fp8_e4m3 128x128", "fp8_e4m3 1x128, fp8_e4m3 1x128"),
        ("mxfp8", "fp8_e4m3 1x32, fp8_e4m3 1x32", "fp8_e4m3 1x32, fp8_e4m3 1x32", "fp8_e4m3 1x32, fp8_e4m3 1x32"),
        ("nvfp4", "fp4_e2m1 1x16, fp4_e2m1 1x16", "fp4_e2m1 1x16, fp4_e2m1 1x16", "fp4_e2m1 1x16, fp4_e2m1 1x16"),
        ("hif8", "hif8 tensor, hif8 tensor", "hif8 tensor, hif8 tensor", "hif8 tensor, hif8 tensor"),
        ("fp8:compute.wgrad=bf16", "fp8_e4m3 tensor, fp8_e4m3 tensor", "fp8_e5m2 tensor, fp8_e4m3 tensor", "bf16 none, fp8_e4m3 tensor"),
    ],
)
def test_operands(text: str, forward: str, dgrad: str, wgrad: str) -> None:
    def words(product: Product) -> str:
        return ", ".join(f"{operand.format} {operand.granularity}" for operand in (product.a, product.b))

    rules = meaning(text)
    assert (words(rules.forward), words(rules.dgrad), words(rules.wgrad)) == (forward, dgrad, wgrad)


def test_the_forward_pass_sums_in_the_register_and_the_gradients_in_fp32() -> None:
    rules = meaning("fp8")
    assert (rules.forward.accumulate, rules.dgrad.accumulate, rules.wgrad.accumulate) == ("fast", "split", "split")
    assert meaning("fp8:accumulate=fp32").forward.accumulate == "split"


def test_delayed_scaling_carries_its_window() -> None:
    rules = meaning("fp8-delayed:scaling.history=16,scaling.algorithm=most_recent,scaling.margin=2")
    assert (rules.mode, rules.window, rules.algorithm, rules.margin, rules.reduce_amax) == ("delayed", 16, "most_recent", 2, True)
    assert meaning("fp8").mode == "current"


@pytest.mark.parametrize(("text", "powers"), [("fp8", False), ("mxfp8", True), ("fp8:scaling.format=e8m0", True), ("nvfp4", False)])
def test_power_of_two_scales(text: str, powers: bool) -> None:
    assert meaning(text).power_of_two is powers


def test_what_an_amax_is_scaled_to() -> None:
    assert meaning("fp8").forward.a.top == 448
    assert meaning("fp8").dgrad.a.top == 57344
    assert meaning("nvfp4").forward.a.top == 6
    rules = meaning("hif8")
    assert [operand.top for operand in (rules.forward.a, rules.forward.b, rules.dgrad.a, rules.wgrad.a, rules.wgrad.b)] == [15, 15, 224, 224, 15]


def test_rounding() -> None:
    assert Operand(format="hif8", granularity="tensor").rounding == "rna"
    assert Operand(format="fp4_e2m1", granularity="1x16").rounding == "rne"


@pytest.mark.parametrize(("text", "multiple"), [("fp8", 16), ("fp8-block", 128), ("mxfp8", 32), ("nvfp4", 16), ("fp8:compute.dgrad=bf16", 16)])
def test_multiples(text: str, multiple: int) -> None:
    assert meaning(text).multiple == multiple


def test_a_product_needs_the_multiple_of_both_operands() -> None:
    for name, side in LONGEST_SIDE.items():
        plain, scaled = Operand(format="bf16", granularity="none"), Operand(format="fp8_e4m3", granularity=name)  # type: ignore[arg-type] # keys of the table
        assert required_multiple(Product(a=plain, b=scaled, accumulate="fast")) == side
        assert required_multiple(Product(a=scaled, b=plain, accumulate="fast")) == side


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("bf16", "compute.forward=bf16 is not low-bit"),
        ("fp32-fast", "is not low-bit"),
        ("fp8:scaling.mode=none", "scaling.mode=none; allowed: current, delayed"),
        ("fp8:scaling.inputs=none", "scaling.inputs=none; allowed: tensor"),
        ("fp8:scaling.weights=none", "scaling.weights=none; allowed: tensor"),
        ("fp8-delayed:scaling.inputs=row", "scaling.mode=delayed with scaling.inputs=row"),
        ("fp8:scaling.format=ue4m3", "scaling.format=ue4m3 with scaling.inputs=tensor"),
        ("fp8:scaling.format=bf16", "scaling.format=bf16; allowed: fp32, e8m0, ue4m3"),
    ],
)
def test_what_cannot_be_carried_out_is_refused(text: str, found: str) -> None:
    with pytest.raises(DocumentError, match=found):
        meaning(text)


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_it_survives_a_document(name: str) -> None:
    rules = low_bit(PRESETS[name], keep=("head",))
    assert msgspec.json.decode(msgspec.json.encode(rules), type=LowBit) == rules
    assert rules.keep == ("head",)
