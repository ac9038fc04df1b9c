"""The check of a layer's products passes what computes the recipe and fails what computes another."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from mpbackend.conformance.products import check_products
from mpbackend.lowbit import low_bit
from mpbackend.recipe import parse_recipe
from mpbackend.train.conversion import Make
from mpbackend.train.reference import LowBitLinear

RECIPES = ("fp8", "fp8-delayed", "fp8:scaling.inputs=row,scaling.weights=row", "fp8-block", "mxfp8", "nvfp4", "hif8")


def plain(text: str) -> Make:
    rules = low_bit(parse_recipe(text))
    return lambda name, linear: LowBitLinear.from_linear(linear, rules)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_plain_layer_passes(recipe: str) -> None:
    result = check_products("plain", plain(recipe), recipe)
    assert (result.outcome, result.detail, result.lowering, result.check) == ("passed", "", "plain", "products")


@pytest.mark.parametrize("recipe", RECIPES)
def test_bf16_under_the_name_of_a_low_bit_format_fails(recipe: str) -> None:
    result = check_products("alias", lambda name, linear: linear, recipe)
    assert result.outcome == "failed"
    assert "step 1: forward differs by" in result.detail


@pytest.mark.parametrize(
    ("computed", "product"),
    [
        ("fp8:compute.forward=fp8_e5m2", "forward"),
        ("fp8:compute.dgrad=fp8_e4m3", "dgrad"),
        ("fp8:compute.wgrad=fp8_e4m3", "wgrad"),
        ("fp8:compute.dgrad=bf16", "dgrad"),
        ("fp8:scaling.format=e8m0", "forward"),
        ("fp8:scaling.inputs=row,scaling.weights=row", "forward"),
        ("fp8-delayed", "forward"),
    ],
)
def test_another_recipe_fails_in_the_product_that_differs(computed: str, product: str) -> None:
    result = check_products("other", plain(computed), "fp8")
    assert result.outcome == "failed"
    assert f"{product} differs by" in result.detail


class Detached(nn.Linear):
    """A layer that loses its gradients."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name in torch.nn.Linear
        return super().forward(input).detach().requires_grad_()


def test_a_layer_without_gradients_fails() -> None:
    result = check_products("detached", lambda name, linear: Detached(linear.in_features, linear.out_features), "fp8")
    assert result.outcome == "failed"


def test_a_refused_layer_is_skipped() -> None:
    result = check_products("none", lambda name, linear: "no kernel", "fp8")
    assert (result.outcome, result.detail) == ("skipped", "no kernel")
