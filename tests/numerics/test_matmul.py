"""The entry to products: batches, biases, the host's sums, and the approximation."""

from __future__ import annotations

import msgspec
import pytest
import torch

from mpbackend.errors import BackendError
from mpbackend.numerics.arithmetic import Arithmetic
from mpbackend.numerics.matmul import addmm, bmm, linear, mm
from mpbackend.numerics.tolerance import product_bound

FP16 = Arithmetic(a="fp16", b="fp16", products_per_step=16, fraction_bits=25, register_rounding="rz", zero_exponent=-133)
FP8 = Arithmetic(
    a="fp8_e4m3", b="fp8_e4m3", products_per_step=32, fraction_bits=13, register_bits=13, register_rounding="rz", zero_exponent=-133, promotion_interval=128
)
HOST = Arithmetic(a="bf16", b="bf16", model="host", output="bf16")


def test_a_batch_is_its_matrices() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(3, 5, 40), torch.randn(3, 40, 7)
    for arithmetic in (FP16, FP8, HOST):
        assert torch.equal(bmm(a, b, arithmetic), torch.stack([mm(x, y, arithmetic) for x, y in zip(a, b, strict=True)]))
    assert bmm(a[:0], b[:0], FP16).shape == (0, 5, 7)


def test_a_bias_is_added_before_the_output_is_written() -> None:
    """1 + 2^-11 rounds to 1 in fp16, so a bias of 2^-11 more is lost if the output is written first."""
    narrow = msgspec.structs.replace(FP16, output="fp16")
    a, b, bias = torch.tensor([[1.0, 2**-11]]), torch.ones(2, 1), torch.tensor([2**-11])
    assert addmm(bias, a, b, narrow).item() == 1 + 2**-10
    assert mm(a, b, narrow).item() == 1.0


def test_a_linear_layer_is_a_product_with_the_transpose() -> None:
    torch.manual_seed(0)
    x, weights, bias = torch.randn(2, 3, 32), torch.randn(5, 32), torch.randn(5)
    plain = linear(x, weights, None, FP16)
    assert plain.shape == (2, 3, 5)
    assert torch.equal(plain.reshape(6, 5), mm(x.reshape(6, 32), weights.T, FP16))
    assert torch.equal(linear(x, weights, bias, FP16), plain + bias)


def test_the_hosts_sums_convert_operands_and_output() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(4, 64), torch.randn(64, 4)
    assert torch.equal(mm(a, b, HOST), (a.bfloat16().float() @ b.bfloat16().float()).bfloat16().float())


def test_saturating_outputs_have_neither_inf_nor_nan() -> None:
    saturating = msgspec.structs.replace(FP16, output="fp16", overflow="saturating")
    a, b = torch.tensor([[60000.0, 60000.0], [torch.inf, -torch.inf], [-torch.inf, 0.0]]), torch.tensor([[1.0], [1.0]])
    assert mm(a, b, saturating).flatten().tolist() == [65504.0, 0.0, -65504.0]
    assert mm(a, b, msgspec.structs.replace(saturating, overflow="inf_nan")).flatten().tolist()[0] == torch.inf


@pytest.mark.parametrize("arithmetic", [FP16, FP8, msgspec.structs.replace(FP8, promotion_interval=None)], ids=["fp16", "promoted", "13 bits"])
def test_the_approximation_stays_within_the_bounds_of_both(arithmetic: Arithmetic) -> None:
    """The unit lies within its bound of the exact product; the approximation within the host's, and its cuts within those of the unit's steps."""
    torch.manual_seed(0)
    dtype = {"fp16": torch.float16, "fp8_e4m3": torch.float8_e4m3fn}[arithmetic.a]
    a, b = torch.randn(16, 700).to(dtype).float(), torch.randn(700, 16).to(dtype).float()
    exact, fast = mm(a, b, arithmetic), mm(a, b, arithmetic, engine="chunk")
    bound, host = product_bound(arithmetic, 700), product_bound(Arithmetic(a="fp32", b="fp32", model="host"), 700)
    # A subnormal operand costs as much as the smallest normal one; no zeros here.
    scale = a.double().abs().clamp(min=2**-6) @ b.double().abs().clamp(min=2**-6)
    assert not torch.equal(exact, fast)
    assert ((exact - fast).double().abs() <= (2 * bound.relative + host.relative) * scale + 2 * bound.absolute + host.absolute).all()


def test_the_approximation_keeps_the_width_of_the_register() -> None:
    """1 + 2^-14 does not fit into 13 fraction bits once the register is cut, after 32 products."""
    ones = torch.zeros(1, 64)
    ones[0, 0], ones[0, 32] = 1.0, 2**-7
    other = torch.zeros(64, 1)
    other[0, 0], other[32, 0] = 1.0, 2**-7
    narrow = msgspec.structs.replace(FP8, promotion_interval=None)
    assert mm(ones, other, narrow, engine="chunk").item() == 1.0
    assert mm(ones, other, FP16, engine="chunk").item() == 1 + 2**-14


def test_the_approximation_refuses_fp64() -> None:
    with pytest.raises(BackendError, match="fp64"):
        mm(torch.ones(2, 2), torch.ones(2, 2), Arithmetic(a="fp64", b="fp64", register="fp64", output="fp64"), engine="chunk")


def test_fp64_is_a_chain_of_fused_multiply_adds() -> None:
    fp64 = Arithmetic(a="fp64", b="fp64", register="fp64", output="fp64")
    x = 1 + 2.0**-30
    a, b = torch.tensor([[1.0, x]], dtype=torch.float64), torch.tensor([[-(1 + 2.0**-29)], [x]], dtype=torch.float64)
    assert mm(a, b, fp64).item() == 2.0**-60
