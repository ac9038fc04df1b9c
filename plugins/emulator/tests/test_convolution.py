"""Convolutions as products, against torch's own in fp64, where both are exact to rounding."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from mpbackend.matrix import load_matrix
from mpbackend_emulator.dispatch import EmulatedProducts
from mpbackend_emulator.products import Products
from mpbackend_emulator.unit import Unit

SEED = 3

CASES = [
    {"rank": rank, "stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "transposed": transposed}
    for rank, (stride, padding, dilation), groups, transposed in product((1, 2, 3), ((1, 0, 1), (2, 1, 1), (3, 2, 2), (1, 3, 2)), (1, 2), (False, True))
]


@pytest.fixture(scope="module")
def products() -> Products:
    return Products(Unit(load_matrix(), "h100", "sm_90"))


def run(case: dict[str, Any], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return output and gradients of one convolution with operands that are small integers, so that fp32 sums are exact in any order."""
    generator = torch.Generator().manual_seed(SEED)
    rank, groups = case["rank"], case["groups"]
    sizes = (9, 8, 7)[:rank]
    shape = (4, 6 // groups) if not case["transposed"] else (6, 4 // groups)
    x = torch.randint(-4, 5, (2, 6, *sizes), generator=generator).to(dtype).requires_grad_()
    weight = torch.randint(-4, 5, (*shape, *(3, 2, 3)[:rank]), generator=generator).to(dtype).requires_grad_()
    bias = torch.randint(-4, 5, (4,), generator=generator).to(dtype).requires_grad_()
    kind = f"conv_transpose{rank}d" if case["transposed"] else f"conv{rank}d"
    more = {"output_padding": case["stride"] - 1} if case["transposed"] else {}
    function = getattr(torch.nn.functional, kind)
    out = function(x, weight, bias, stride=case["stride"], padding=case["padding"], dilation=case["dilation"], groups=groups, **more)
    gradient = torch.randint(-4, 5, out.shape, generator=generator).to(dtype)
    return (out, *torch.autograd.grad(out, (x, weight, bias), gradient))


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_results_and_gradients_equal_those_of_torch(products: Products, case: dict[str, Any]) -> None:
    with EmulatedProducts(products):
        found = run(case, torch.float32)
    wanted = run(case, torch.float64)
    for name, mine, theirs in zip(("output", "input", "weight", "bias"), found, wanted, strict=True):
        assert mine.dtype is torch.float32
        assert torch.equal(mine.double(), theirs), f"seed {SEED}: {name}"


def test_a_plain_convolution_is_a_product_of_its_windows(products: Products) -> None:
    """One output position is a dot product along K in the unit's own steps: its bits are those of ``mm``."""
    generator = torch.Generator().manual_seed(SEED)
    x = torch.randn(1, 5, 4, 4, generator=generator).bfloat16()
    weight = torch.randn(3, 5, 4, 4, generator=generator).bfloat16()
    with EmulatedProducts(products):
        found = torch.nn.functional.conv2d(x, weight)
    assert torch.equal(found.reshape(1, 3), products.mm(x.reshape(1, -1), weight.reshape(3, -1).t())), f"seed {SEED}"


@pytest.mark.parametrize("mask", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_what_is_asked_for_is_computed(products: Products, mask: tuple[bool, bool, bool]) -> None:
    x = torch.ones(1, 2, 3)
    weight = torch.ones(2, 2, 2)
    with EmulatedProducts(products):
        found = torch.ops.aten.convolution_backward(torch.ones(1, 2, 2), x, weight, [2], [1], [0], [1], False, [0], 1, list(mask))
    assert tuple(part is not None for part in found) == mask
