"""fp16 products: right to a derived bound, everywhere in training, and only where the plan says ``emulated``."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own documentation calls it F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mpbackend.capability import Level
from mpbackend.decisions import Decision
from mpbackend.device import Device
from mpbackend.planning import Plan
from mpbackend.recipe import parse_recipe
from mpbackend_cpu.backend import CpuBackend
from mpbackend_cpu.execution import PRODUCTS, HalfProducts, narrow

PRODUCT_NAME = re.compile(r"aten::_?(\w*mm|mm_?|\w*mv_?|v?dot|linear|\w*conv\w*|\w*attention\w*|addmm_activation)$")
"""Names of operators that multiply matrices; written apart from the table that is tested."""

UNIT = 2.0**-24
"""Unit roundoff of fp32, in which sums are made."""


class Seen(TorchDispatchMode):
    """Lists the operators that reach torch, with the dtypes of their tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's dispatch mode is not annotated
        self.calls: list[tuple[str, list[torch.dtype]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        self.calls.append((func._schema.name, [value.dtype for value in (*args, *named.values()) if isinstance(value, torch.Tensor)]))
        return func(*args, **named)

    def half_products(self) -> set[str]:
        return {name for name, dtypes in self.calls if PRODUCT_NAME.match(name) and torch.float16 in dtypes}


def rounds() -> HalfProducts:
    return HalfProducts()  # type: ignore[no-untyped-call] # torch's dispatch mode is not annotated


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


def half_ulp(value: torch.Tensor) -> torch.Tensor:
    """Half the distance between fp16 values around ``value``: 2^-11 of its power of two, at least half of the smallest subnormal 2^-24."""
    return 2.0**-11 * torch.exp2(torch.floor(torch.log2(value.abs().clamp_min(2.0**-14))))


CALLS: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...], int]] = {
    "mm": (torch.mm, (normal(5, 37), normal(37, 7, seed=1)), 37),
    "mm transposed": (lambda a, b: torch.mm(a.t(), b.t()), (normal(37, 5), normal(7, 37, seed=1)), 37),
    "bmm": (torch.bmm, (normal(3, 5, 37), normal(3, 37, 7, seed=1)), 37),
    "mv": (torch.mv, (normal(5, 37), normal(37, seed=1)), 37),
    "dot": (torch.dot, (normal(37), normal(37, seed=1)), 37),
    "vdot": (torch.vdot, (normal(37), normal(37, seed=1)), 37),
    "addmm": (lambda a, b, c: torch.addmm(c, a, b), (normal(5, 37), normal(37, 7, seed=1), normal(5, 7, seed=2)), 37),
    "addmm scaled": (lambda a, b, c: torch.addmm(c, a, b, beta=2, alpha=0.5), (normal(5, 37), normal(37, 7, seed=1), normal(5, 7, seed=2)), 37),
    "addmv": (lambda a, b, c: torch.addmv(c, a, b), (normal(5, 37), normal(37, seed=1), normal(5, seed=2)), 37),
    "baddbmm": (lambda a, b, c: torch.baddbmm(c, a, b), (normal(3, 5, 37), normal(3, 37, 7, seed=1), normal(3, 5, 7, seed=2)), 37),
    "addbmm": (lambda a, b, c: torch.addbmm(c, a, b), (normal(3, 5, 37), normal(3, 37, 7, seed=1), normal(5, 7, seed=2)), 111),
    "matmul": (torch.matmul, (normal(2, 3, 5, 37), normal(37, 7, seed=1)), 37),
    "linear": (F.linear, (normal(4, 5, 37), normal(7, 37, seed=1), normal(7, seed=2)), 37),
    "conv1d": (F.conv1d, (normal(2, 3, 9), normal(4, 3, 5, seed=1), normal(4, seed=2)), 15),
    "conv2d": (lambda a, b: F.conv2d(a, b, stride=2, padding=1), (normal(2, 3, 8, 8), normal(4, 3, 3, 3, seed=1)), 27),
    "conv_transpose2d": (F.conv_transpose2d, (normal(2, 3, 4, 4), normal(3, 4, 3, 3, seed=1)), 27),
    "conv_tbc": (torch.conv_tbc, (normal(9, 2, 3), normal(5, 3, 4, seed=1), normal(4, seed=2)), 15),
    "einsum": (lambda a, b: torch.einsum("bik,bkj->ij", a, b), (normal(3, 5, 37), normal(3, 37, 7, seed=1)), 111),
}

ROUND_PARTIAL_SUMS = {"addbmm", "conv_transpose2d", "conv_tbc"}
"""Calls whose fp16 kernel in torch 2.13 rounds to fp16 after each matrix product of several; the others obey the bound too."""


@pytest.mark.parametrize("name", CALLS)
def test_results_are_right_to_one_rounding_and_the_order_of_the_sum(name: str) -> None:
    call, operands, length = CALLS[name]
    seen = Seen()
    with seen, rounds():
        result = call(*operands)
    assert not seen.half_products()
    native = call(*operands)
    exact = call(*(operand.double() for operand in operands))
    # A sum of K products in fp32 is within gamma * sum |a||b| of the exact one, gamma = n u / (1 - n u) with n = K + 3 for a scaled third operand (Higham,
    # Accuracy and Stability of Numerical Algorithms, 2nd ed., section 3.1). Rounding the result adds half an ulp of fp16.
    gamma = (length + 3) * UNIT / (1 - (length + 3) * UNIT)
    size = call(*(operand.double().abs() for operand in operands))
    assert result.dtype is native.dtype is torch.float16
    assert ((result.double() - exact).abs() <= 2 * gamma * size + half_ulp(exact)).all()
    if name not in ROUND_PARTIAL_SUMS:
        assert ((result.double() - native.double()).abs() <= 4 * gamma * size + 2 * half_ulp(exact)).all()


@pytest.mark.parametrize("name", CALLS)
def test_exact_sums_give_the_bits_of_torch(name: str) -> None:
    call, operands, _ = CALLS[name]
    whole = [operand.mul(4).round() for operand in operands]
    with rounds():
        result = call(*whole)
    assert torch.equal(result, call(*whole)), "integers below 2^24 are summed without an error in any order"


def test_rounding_overflow_and_range() -> None:
    ones = torch.ones(2, 1, dtype=torch.float16)

    def total(*values: float) -> float:
        with rounds():
            return float(torch.mm(torch.tensor([values], dtype=torch.float16), torch.ones(len(values), 1, dtype=torch.float16)))

    assert total(2048, 1) == 2048, "a tie goes to the even neighbour"
    assert total(2050, 1) == 2052
    assert total(60000, 60000, -60000) == 60000, "the sum is wider than fp16"
    assert total(60000, 60000) == float("inf")
    assert total(-60000, -60000) == float("-inf")
    assert total(65504, 15) == 65504
    assert total(65504, 16) == float("inf"), "the tie above the largest value rounds to inf"
    assert total(2.0**-24, 2.0**-24) == 2.0**-23, "subnormals are kept"
    assert torch.isnan(torch.tensor(total(float("inf"), float("-inf"))))
    with rounds():
        small = torch.mm(ones * 2.0**-13, ones.t() * 2.0**-12)
    assert (small == 0).all(), "2^-25 is a tie between 0 and the smallest subnormal"


@pytest.mark.parametrize("options", [{"is_causal": True}, {}, {"attn_mask": torch.linspace(-2, 0, 256).half().view(16, 16)}, {"scale": 0.5}])
def test_attention_is_that_of_fp32_rounded_once(options: dict[str, Any]) -> None:
    q, k, v = (normal(2, 3, 16, 8, seed=seed) for seed in range(3))
    seen = Seen()
    with seen, rounds():
        result = F.scaled_dot_product_attention(q, k, v, **options)
    wide: dict[str, Any] = {name: value.float() if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    expected = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), **wide)
    assert not seen.half_products()
    assert torch.equal(result, expected.half())


def test_attention_rounds_what_has_the_format_of_its_operands() -> None:
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    q, k, v, gradient = (normal(2, 3, 16, 8, seed=seed) for seed in range(4))
    with rounds():
        result, logsumexp = forward(q, k, v)
        gradients = backward(gradient, q, k, v, result, logsumexp, 0.0, False)
    assert (result.dtype, logsumexp.dtype) == (torch.float16, torch.float32)
    assert torch.equal(logsumexp, forward(q.float(), k.float(), v.float())[1])
    wide = backward(*(tensor.float() for tensor in (gradient, q, k, v, result, logsumexp)), 0.0, False)
    for rounded, expected in zip(gradients, wide, strict=True):
        assert rounded.dtype is torch.float16
        assert torch.equal(rounded, expected.half())


class Everything(nn.Module):
    """Layers that multiply matrices in every way that modules of torch do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.deconv = nn.ConvTranspose1d(8, 8, 3, padding=1)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.deconv(self.conv(x.mT)).mT
        x = x + F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True)[:, 0]
        x = self.norm(x + self.attention(x, x, x)[0])
        x, _ = self.lstm(self.encoder(x))
        x = torch.einsum("btd,bsd->bts", x, x) @ x
        return F.cross_entropy(self.head(x).flatten(0, 1), torch.arange(12) % 4)


def gradients(context: Callable[[], Any], dtype: torch.dtype | None, seen: Seen | None = None) -> tuple[float, torch.Tensor]:
    torch.manual_seed(0)
    model = Everything()
    x = torch.randn(2, 6, 8)
    with seen or nullcontext():
        with context(), torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = model(x)
        with context():
            (loss * 1024).backward()
    return loss.item(), torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]) / 1024


def test_no_fp16_product_of_a_training_step_reaches_torch() -> None:
    native, rounded = Seen(), Seen()
    native_loss, native_gradient = gradients(nullcontext, torch.float16, native)
    loss, gradient = gradients(rounds, torch.float16, rounded)
    _, wide_gradient = gradients(nullcontext, None)
    assert len(native.half_products()) >= 5, "or this test looks for the wrong names"
    assert rounded.half_products() == set()
    assert gradient.numel() == wide_gradient.numel(), "every parameter has a gradient"
    # Not a bound on either: both are fp16 runs of the same step, and the emulated one must not be further from fp32 than twice torch's own.
    assert (gradient - wide_gradient).norm() <= 2 * (native_gradient - wide_gradient).norm()
    assert loss == pytest.approx(native_loss, rel=2.0**-8)


def test_the_table_names_products_only() -> None:
    for op in PRODUCTS:
        assert PRODUCT_NAME.match(op._schema.name), op
        assert op._overloadname == "default"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_other_formats_are_left_to_torch(dtype: torch.dtype) -> None:
    a, b = normal(40, 40).to(dtype), normal(40, 40, seed=1).to(dtype)
    with rounds():
        result = torch.mm(a, b)
    assert result.dtype is dtype
    assert torch.equal(result, torch.mm(a, b))


def test_mixed_operands_are_refused_as_torch_refuses_them() -> None:
    with rounds(), pytest.raises(RuntimeError, match="dtype"):
        torch.mm(normal(2, 2), normal(2, 2).float())
    with rounds(), pytest.raises(RuntimeError, match="dtype"):
        torch.addmm(normal(2, 2).float(), normal(2, 2), normal(2, 2))


def test_in_place_products_keep_their_tensor() -> None:
    a, b, start = normal(5, 37), normal(37, 7, seed=1), normal(5, 7, seed=2)
    target = start.clone()
    seen = Seen()
    with seen, rounds():
        returned = target.addmm_(a, b, beta=0.5)
        expected = torch.addmm(start, a, b, beta=0.5)
    assert returned.data_ptr() == target.data_ptr()
    assert torch.equal(target, expected)
    assert not seen.half_products()


def test_contexts_nest_repeat_and_survive_errors() -> None:
    a, b = normal(5, 37), normal(37, 7, seed=1)
    mode = rounds()
    with mode:
        once = torch.mm(a, b)
    with mode, mode, rounds():
        assert torch.equal(torch.mm(a, b), once)
    with pytest.raises(ZeroDivisionError), mode:
        raise ZeroDivisionError
    seen = Seen()
    with seen:
        torch.mm(a, b)
    assert seen.half_products() == {"aten::mm"}, "nothing stays behind"


def test_missing_gradients_stay_missing() -> None:
    assert narrow(None) is None
    weight = normal(4, 3, 3, 3).requires_grad_()
    with rounds():
        F.conv2d(normal(1, 3, 5, 5), weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype is torch.float16


def make_plan(recipe: str, name: str, level: Level) -> Plan:
    device = Device(key="x86-64", arch="x86-64", name="x86-64")
    decision = Decision(role="compute.forward", op="matmul", asked=name, granted=name, level=level, reason="", pair=(name, name))
    return Plan(recipe=recipe, recipe_hash="", granted=recipe, effective=parse_recipe(recipe), device=device, decisions=(decision,))


@pytest.mark.parametrize(
    ("recipe", "name", "level", "rounded"),
    [
        ("fp16", "fp16", "emulated", True),
        ("fp16", "fp16", "unknown", True),
        ("fp16", "fp16", "native", False),
        ("bf16", "bf16", "emulated", False),
        ("fp32", "fp32", "native", False),
    ],
)
def test_the_plan_decides(recipe: str, name: str, level: Level, rounded: bool) -> None:
    plan = make_plan(recipe, name, level)
    context = CpuBackend().execute(plan)
    assert isinstance(context, HalfProducts if rounded else nullcontext)
    for _ in range(2):
        seen = Seen()
        with seen, context:
            torch.mm(normal(2, 2), normal(2, 2))
        assert seen.half_products() == (set() if rounded else {"aten::mm"})
