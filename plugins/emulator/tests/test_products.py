"""Products have the bits of the device's arithmetic, by values that tell arithmetics apart."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.attention

from mpbackend.errors import BackendError
from mpbackend.matrix import Matrix
from mpbackend.numerics import oracle
from mpbackend_emulator.dispatch import HANDLERS, WRITING, EmulatedProducts
from mpbackend_emulator.products import Products
from mpbackend_emulator.unit import Unit

Make = Callable[[str], Products]
SEED = 11


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = SEED) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def by_oracle(products: Products, name: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return ``a @ b`` element by element from the exact definition, unrounded."""
    arithmetic = products.unit.plain("matmul", name)
    return torch.tensor([[oracle.dot(row, column, arithmetic) for column in b.double().t().tolist()] for row in a.double().tolist()])


@pytest.mark.parametrize(("key", "dtype", "name"), [("h100", torch.bfloat16, "bf16"), ("v100", torch.float16, "fp16"), ("a100", torch.bfloat16, "bf16")])
def test_every_operator_has_the_bits_of_the_unit(products_of: Make, key: str, dtype: torch.dtype, name: str) -> None:
    products = products_of(key)
    a, b, bias = normal(3, 40, dtype=dtype), normal(40, 5, dtype=dtype, seed=12), normal(5, dtype=dtype, seed=13)
    exact = by_oracle(products, name, a, b)
    with EmulatedProducts(products):
        assert torch.equal(a @ b, exact.to(dtype)), f"seed {SEED}"
        assert torch.equal(torch.addmm(bias, a, b), (exact + bias.float()).to(dtype))
        assert torch.equal(torch.addmm(bias, a, b, beta=0.5, alpha=2), (exact * 2 + bias.float() * 0.5).to(dtype))
        assert torch.equal(torch.nn.functional.linear(a, b.t(), bias), (exact + bias.float()).to(dtype))
        assert torch.equal(torch.bmm(a[None], b[None])[0], exact.to(dtype))
        assert torch.equal(torch.baddbmm(bias.expand(1, 3, 5), a[None], b[None])[0], (exact + bias.float()).to(dtype))
        assert torch.equal(torch.einsum("ik,kj->ij", a, b), exact.to(dtype))


def test_operators_that_write_give_the_same(products_of: Make) -> None:
    products = products_of("h100")
    a, b, c = normal(3, 40, dtype=torch.bfloat16), normal(40, 5, dtype=torch.bfloat16, seed=12), normal(3, 5, dtype=torch.bfloat16, seed=13)
    with EmulatedProducts(products):
        wanted = torch.addmm(c, a, b), a @ b
        in_place, out = c.clone(), torch.empty(0, dtype=torch.bfloat16)
        assert in_place.addmm_(a, b) is in_place
        torch.mm(a, b, out=out)
        batch = c.clone()[None].baddbmm_(a[None], b[None])[0]
    assert torch.equal(in_place, wanted[0])
    assert torch.equal(batch, wanted[0])
    assert torch.equal(out, wanted[1])


def test_bits_differ_between_devices_and_from_the_host(products_of: Make) -> None:
    """A step of the h100's unit keeps 2^-25 of its largest term; the v100's steps of 4 products round earlier."""
    a, b = normal(16, 512, dtype=torch.float16), normal(512, 16, dtype=torch.float16, seed=12)
    with EmulatedProducts(products_of("h100")):
        hopper = a.float().half() @ b
    with EmulatedProducts(products_of("v100")):
        volta = a @ b
    with EmulatedProducts(products_of("ascend-910b3")):
        nominal = a @ b
    assert not torch.equal(hopper, volta), f"seed {SEED}"
    assert torch.equal(nominal, (a.float() @ b.float()).half())


def test_with_beta_0_what_was_there_is_not_read(products_of: Make) -> None:
    with EmulatedProducts(products_of("h100")):
        found = torch.addmm(torch.full((2, 2), math.nan), torch.eye(2), torch.eye(2), beta=0)
    assert torch.equal(found, torch.eye(2))


def test_backward_passes_have_the_bits_too(products_of: Make) -> None:
    products = products_of("h100")
    x, weight = normal(6, 40, dtype=torch.bfloat16), normal(7, 40, dtype=torch.bfloat16, seed=12)
    gradient = normal(6, 7, dtype=torch.bfloat16, seed=13)
    x.requires_grad_()
    weight.requires_grad_()
    with EmulatedProducts(products):
        out = torch.nn.functional.linear(x, weight)
        out.backward(gradient)
    assert x.grad is not None
    assert weight.grad is not None
    assert torch.equal(x.grad, by_oracle(products, "bf16", gradient, weight.detach()).bfloat16()), f"seed {SEED}"
    assert torch.equal(weight.grad, by_oracle(products, "bf16", gradient.t(), x.detach()).bfloat16())


def test_fp32_follows_the_switch(products_of: Make, matrix: Matrix) -> None:
    """1 + 2^-12 is 1 in tf32, which keeps 10 fraction bits."""
    products = products_of("h100")
    fine = torch.tensor([[1.0 + 2.0**-12]])
    (switch,) = [switch for switch in matrix.switches("sm_90") if switch.name == "matmul.fp32_precision"]
    with EmulatedProducts(products):
        assert (fine @ torch.ones(1, 1)).item() == 1.0 + 2.0**-12
        products.unit._settings.set(switch, "tf32")
        assert (fine @ torch.ones(1, 1)).item() == 1.0


def test_convolution_of_an_a2_is_hf32_unless_the_switch_is_off(products_of: Make, matrix: Matrix) -> None:
    """1 + 2^-12 rounds to 1 in hf32 with 11 fraction bits, as torch_npu convolves by default; products of matrices stay fp32."""
    products = products_of("ascend-910b3")
    fine = torch.full((1, 1, 1, 1), 1.0 + 2.0**-12)
    (switch,) = [switch for switch in matrix.switches("ascend-a2") if switch.name == "conv.allow_hf32"]
    with EmulatedProducts(products):
        assert torch.conv2d(fine, torch.ones(1, 1, 1, 1)).item() == 1.0
        assert (fine[0, 0] @ torch.ones(1, 1)).item() == 1.0 + 2.0**-12
        products.unit._settings.set(switch, "False")
        assert torch.conv2d(fine, torch.ones(1, 1, 1, 1)).item() == 1.0 + 2.0**-12


def test_fp16_sums_in_fp16_where_the_switch_says_so(products_of: Make, matrix: Matrix) -> None:
    """2048 + 1 is 2049 in fp32 and 2048 in fp16; 2 more make 2051 and 2050, and twice 2051 is rounded to fp16 in the end."""
    products = products_of("h100")
    a = torch.zeros(1, 64, dtype=torch.float16)
    a[0, 0], a[0, 16], a[0, 32] = 2048.0, 1.0, 1.0  # in three steps, so that the register is rounded between them
    (switch,) = [switch for switch in matrix.switches("sm_90") if switch.name == "matmul.fp16_accumulation"]
    with EmulatedProducts(products):
        assert (a @ torch.ones(64, 1, dtype=torch.float16)).item() == 2050.0
        products.unit._settings.set(switch, "true")
        assert (a @ torch.ones(64, 1, dtype=torch.float16)).item() == 2048.0


def test_a_product_that_the_device_has_not_is_an_error_with_its_row(products_of: Make) -> None:
    with EmulatedProducts(products_of("ascend-910a")), pytest.raises(BackendError, match=r"bf16 x bf16 on ascend-910a: absent \(.*aclnnMatmul"):
        torch.ones(2, 2, dtype=torch.bfloat16) @ torch.ones(2, 2, dtype=torch.bfloat16)
    with EmulatedProducts(products_of("ascend-910b3")), pytest.raises(BackendError, match="fp64 x fp64 on ascend-910b3: no source says"):
        torch.ones(2, 2, dtype=torch.float64) @ torch.ones(2, 2, dtype=torch.float64)


def test_torch_refuses_what_it_refuses(products_of: Make) -> None:
    with EmulatedProducts(products_of("h100")):
        with pytest.raises(RuntimeError, match="same dtype"):
            torch.ones(2, 2) @ torch.ones(2, 2, dtype=torch.bfloat16)
        with pytest.raises(RuntimeError):
            torch.ones(2, 2) @ torch.ones(3, 2)
        assert torch.equal(torch.ones(2, 2, dtype=torch.int64) @ torch.ones(2, 2, dtype=torch.int64), torch.full((2, 2), 2))
        assert (torch.ones(2, 2, device="meta") @ torch.ones(2, 2, device="meta")).is_meta


@pytest.mark.parametrize(("m", "k", "n"), [(0, 4, 3), (3, 0, 2), (2, 4, 0)])
def test_empty_products(products_of: Make, m: int, k: int, n: int) -> None:
    for key in ("h100", "ascend-910b3"):
        with EmulatedProducts(products_of(key)):
            found = torch.ones(m, k, dtype=torch.bfloat16) @ torch.ones(k, n, dtype=torch.bfloat16)
            batch = torch.ones(0, m, k) @ torch.ones(0, k, n)
        assert found.shape == (m, n)
        assert not found.any()
        assert batch.shape == (0, m, n)


def test_composite_operators_are_taken_apart_in_inference_mode(products_of: Make) -> None:
    """1 + 2^-12 is 1 on a device that converts fp32 to fp16."""
    fine, one = torch.full((1, 1, 1), 1.0 + 2.0**-12), torch.ones(1, 1, 1)
    with EmulatedProducts(products_of("ascend-910a")), torch.inference_mode():
        assert torch.nn.functional.linear(fine, one[0]).item() == 1.0
        assert torch.matmul(fine, one[0]).item() == 1.0
        assert torch.nn.functional.conv1d(fine, one).item() == 1.0


def test_contexts_nest_and_emulate_once(products_of: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    products = products_of("ascend-910b3")
    calls: list[Any] = []
    plain = Products.sums

    def counted(self: Products, *args: Any) -> torch.Tensor:
        calls.append(args)
        return plain(self, *args)

    monkeypatch.setattr(Products, "sums", counted)
    with EmulatedProducts(products), EmulatedProducts(products):
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert len(calls) == 1


def test_fused_attention_is_the_hosts_in_fp32_rounded_once(products_of: Make) -> None:
    query, key, value = (normal(1, 2, 8, 16, dtype=torch.bfloat16, seed=seed).requires_grad_() for seed in (1, 2, 3))
    wide = [part.detach().float() for part in (query, key, value)]
    with EmulatedProducts(products_of("h100")):
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out.sum().backward()
    wanted = torch.nn.functional.scaled_dot_product_attention(wide[0], wide[1], wide[2], is_causal=True)
    assert torch.equal(out, wanted.bfloat16()), "seeds 1, 2, 3"
    assert query.grad is not None
    assert query.grad.dtype is torch.bfloat16


def test_attention_without_a_fused_kernel_is_made_of_emulated_products(products_of: Make) -> None:
    """Its two products, on a device that converts fp32 to fp16: 1 + 2^-12 is 1."""
    fine = torch.full((1, 1, 1, 8), 1.0 + 2.0**-12)
    with EmulatedProducts(products_of("ascend-910a")), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert torch.equal(torch.nn.functional.scaled_dot_product_attention(fine, fine, fine), torch.ones(1, 1, 1, 8))


def test_the_number_of_threads_changes_no_bit(products_of: Make) -> None:
    a, b = normal(70, 300, dtype=torch.bfloat16), normal(300, 90, dtype=torch.bfloat16, seed=12)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            with EmulatedProducts(products_of("h100")):
                found.append(torch.addmm(torch.zeros(90, dtype=torch.float32), a.float(), b.float()))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1]), f"seed {SEED}"
    assert torch.equal(found[0], found[2])


def test_sizes_that_a_row_refuses(matrix: Matrix) -> None:
    unit = Unit(matrix, "h100", "sm_90")
    row = unit.alignment("fp8_e4m3", "fp8_e4m3", ("tensor", "none"))
    assert row is not None
    unit.check_sizes(row, 16, 32, 48)
    with pytest.raises(BackendError, match=r"fp8_e4m3 x fp8_e4m3, tensor scales, on h100: K = 24 is not a multiple of 16, which cublaslt needs"):
        unit.check_sizes(row, 16, 16, 24)
    assert unit.alignment("bf16", "bf16", ("none",)) is None


def test_handlers_name_operators_that_torch_has() -> None:
    assert all(base in HANDLERS for base in WRITING.values())
    assert all(isinstance(op, torch._ops.OpOverload) for op in (*HANDLERS, *WRITING))
