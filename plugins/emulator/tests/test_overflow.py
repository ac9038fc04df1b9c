"""A device that saturates: inf and NaN never appear, and the register tells."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mpbackend
from mpbackend_emulator.dispatch import EmulatedProducts
from mpbackend_emulator.products import Products
from mpbackend_emulator.saturation import StatusRegister

Make = Callable[[str], Products]
TOP = 65504.0


@pytest.fixture
def products(products_of: Make) -> Products:
    return products_of("ascend-910a")


def half(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float16)


@pytest.mark.parametrize(
    ("compute", "result"),
    [
        (lambda: half(300.0)[None] @ half(300.0)[:, None], TOP),
        (lambda: half(-60000.0) * 2, -TOP),
        (lambda: half(60000.0).add_(60000.0), TOP),
        (lambda: torch.tensor([1e6]).half(), TOP),
        (lambda: torch.zeros(1, dtype=torch.float16).copy_(torch.tensor([1e6])), TOP),
        (lambda: half(0.0) / 0, 0.0),
        (lambda: torch.conv1d(half(300.0)[None, None], half(300.0)[None, None]), TOP),
        (lambda: torch.exp(torch.tensor([1000.0])), torch.finfo(torch.float32).max),
    ],
)
def test_an_overflow_becomes_the_largest_value_and_sets_the_register(products: Products, compute: Any, result: float) -> None:
    register = StatusRegister(products)
    register.clear()
    with EmulatedProducts(products):
        found = compute()
    assert found.item() == result
    assert register.found().item() is True
    register.clear()
    assert register.found().item() is False


def test_fp32_operands_are_converted_to_fp16(products: Products) -> None:
    """70000 is beyond fp16, and 1 + 2^-12 is 1 there; the sum itself is fp32."""
    with EmulatedProducts(products):
        assert (torch.tensor([[1.0 + 2.0**-12]]) @ torch.ones(1, 1)).item() == 1.0
        assert not products.overflowed
        assert (torch.tensor([[60000.0, 60000.0]]) @ torch.ones(2, 1)).item() == 120000.0
        assert not products.overflowed
        assert (torch.tensor([[70000.0]]) @ torch.ones(1, 1)).item() == TOP
        assert products.overflowed


def test_an_inf_that_a_mask_places_is_no_overflow(products: Products) -> None:
    mask = torch.tensor([True, False])
    with EmulatedProducts(products):
        masked = half(1.0, 2.0).masked_fill(mask, -math.inf)
        masked.reshape(2, 1).clone()
        torch.full((2,), math.inf)
        torch.where(mask, masked, -math.inf)
    assert masked[0] == -math.inf
    assert not products.overflowed


def test_a_device_with_inf_keeps_it_and_has_no_register(products_of: Make) -> None:
    products = products_of("ascend-910b3")
    with EmulatedProducts(products):
        assert (half(300.0)[None] @ half(300.0)[:, None]).item() == math.inf
    assert not products.overflowed
    target = mpbackend.select("emu:ascend-910b3")
    assert target.backend.overflow(target.info) is None


def test_fp32_of_a_910a_trains_in_fp16_when_that_is_asked_for() -> None:
    """A weight of 1e-8 is 0 in fp16, so that its output and its input's gradient are 0."""
    target = mpbackend.select("emu:ascend-910a")
    first = nn.Linear(1, 1, bias=False)
    model = nn.Sequential(first, nn.Linear(1, 1, bias=False))
    for weight in model.parameters():
        nn.init.constant_(weight, 1e-8)
    with target.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), "fp32", on_unsupported="emulate") as session:
        assert any("computed in fp16" in text for text in session.plan.warnings)
        with session.autocast():
            out = model(torch.ones(1, 1))
        session.backward(out.sum())
        assert out.dtype is torch.float32
        assert out.item() == 0.0
        assert first.weight.grad is not None
        assert first.weight.grad.item() == 0.0
        session.step()


def test_dynamic_scaling_backs_off_by_the_register() -> None:
    """The gradient of the product overflows fp16 at the first scales. Nothing is inf or NaN, and yet the steps are skipped until the scale fits."""
    target = mpbackend.select("emu:ascend-910a")
    model = nn.Linear(4, 1, bias=False)
    nn.init.constant_(model.weight, 0.5)
    scales, results = [], []
    with target.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4), "fp16:loss_scale.init=65536") as session:
        for _ in range(6):
            with session.autocast():
                loss = model(torch.full((1, 4), 8.0)).float().sum()
            session.backward(loss)
            result = session.step()
            scales.append(result.loss_scale)
            results.append(result.stepped)
    # 8 * 65536 = 2^19 does not fit; 8 * 2^12 = 2^15 is the first that does.
    assert scales[:5] == [65536.0, 32768.0, 16384.0, 8192.0, 4096.0]
    assert results == [False, False, False, False, True, True]
    assert torch.isfinite(model.weight).all()
    assert torch.allclose(model.weight, torch.full((1, 4), 0.5 - 2 * 8e-4), rtol=0, atol=2**-24), "two steps of 1e-4 * 8, each with one fp32 rounding"
