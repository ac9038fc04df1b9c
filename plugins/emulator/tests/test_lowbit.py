"""Products of scaled operands, and layers made of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import mpbackend
from mpbackend.errors import BackendError
from mpbackend.lowbit import Operand, low_bit
from mpbackend.matrix import Matrix
from mpbackend.numerics import oracle
from mpbackend.recipe import parse_recipe
from mpbackend.roles import Granularity
from mpbackend.train.quantize import Quantized, quantize
from mpbackend_emulator.lowbit import EmulatedLinear
from mpbackend_emulator.scaled import levels, multiply
from mpbackend_emulator.unit import ASSUMED_INTERVAL, Unit

Select = Callable[[str], mpbackend.Target]
SEED = 17


def quantized(rows: int, columns: int, granularity: Granularity, *, recipe: str = "fp8", name: str = "fp8_e4m3", seed: int = SEED) -> Quantized:
    tensor = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return quantize(tensor, Operand(format=name, granularity=granularity), low_bit(parse_recipe(recipe)))


def test_sums_are_the_units_and_tensor_scales_multiply_them(matrix: Matrix) -> None:
    unit = Unit(matrix, "h100", "sm_90")
    a, b = quantized(16, 64, "tensor"), quantized(16, 64, "tensor", seed=18)
    arithmetic = unit.scaled("fp8_e4m3", "fp8_e4m3", "tensor", split=False)
    exact = torch.tensor([[oracle.dot(row, column, arithmetic) for column in b.stored.double().tolist()] for row in a.stored.double().tolist()])
    assert torch.equal(multiply(a, b, unit, split=False), exact * (a.inverse * b.inverse).item()), f"seed {SEED}"


def test_a_register_of_13_bits_loses_what_promotion_keeps(matrix: Matrix) -> None:
    """The register of an h100 keeps 13 fraction bits: after 2^14 a step of 32 * 2^-6 is lost. Promotion begins anew after 128 products."""
    unit = Unit(matrix, "h100", "sm_90")
    low = low_bit(parse_recipe("fp8:scaling.inputs=tensor"))
    values = torch.full((16, 1024), 2.0**-6)
    values[:, 0] = 128.0
    ones = torch.ones(16, 1024)
    ones[:, 0] = 128.0
    a, b = (quantize(tensor, Operand(format="fp8_e4m3", granularity="tensor", amax_to=128.0), low) for tensor in (values, ones))
    total = (values[0] * ones[0]).sum().item()
    fast = multiply(a, b, unit, split=False)[0, 0].item()
    split = multiply(a, b, unit, split=True)[0, 0].item()
    assert fast == 128.0 * 128.0
    assert abs(split - total) < abs(fast - total)
    assert unit.scaled("fp8_e4m3", "fp8_e4m3", "tensor", split=True).promotion_interval == ASSUMED_INTERVAL


def test_row_scales_multiply_rows_and_columns(matrix: Matrix) -> None:
    unit = Unit(matrix, "h100", "sm_90")
    a, b = quantized(16, 32, "row"), quantized(32, 32, "row", seed=18)
    plain = multiply(replace(a, inverse=torch.ones(16, 1)), replace(b, inverse=torch.ones(32, 1)), unit, split=False)
    assert torch.equal(multiply(a, b, unit, split=False), plain * (a.inverse * b.inverse.t()))


@pytest.mark.parametrize("pair", [("1x128", "128x128"), ("1x128", "1x128")])
def test_blocks_are_summed_apart(matrix: Matrix, pair: tuple[Granularity, Granularity]) -> None:
    """Each block of 128 holds one product, so that every sum of a block is exact and the total is a sum of two fp32 numbers."""
    unit = Unit(matrix, "h100", "sm_90")
    a, b = quantized(16, 256, pair[0], recipe="fp8-block"), quantized(128, 256, pair[1], recipe="fp8-block", seed=18)
    keep = torch.zeros(256)
    keep[[3, 200]] = 1.0
    stored = (a.stored.float() * keep).to(a.stored.dtype)
    found = multiply(replace(a, stored=stored), b, unit, split=False)
    x, y = a.stored.float(), b.stored.float()
    y_scales = b.inverse.repeat_interleave(128, 0)[:128] if pair[1] == "128x128" else b.inverse
    parts = [(x[:, k, None] * y[None, :, k]) * (a.inverse[:, k // 128, None] * y_scales[None, :, k // 128]) for k in (3, 200)]
    assert torch.equal(found, parts[0] + parts[1]), f"seed {SEED}"


@pytest.mark.parametrize("key", ["ascend-950", "b200"])
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_microscaling_is_inside_the_unit(matrix: Matrix, key: str, name: str) -> None:
    """One product a block: exact whatever the unit does, since block scales are powers of two."""
    unit = Unit(matrix, key, matrix.device(key).arch)
    a, b = quantized(32, 64, "1x32", recipe="mxfp8", name=name), quantized(32, 64, "1x32", recipe="mxfp8", seed=18)
    keep = torch.zeros(64)
    keep[5] = 1.0
    found = multiply(replace(a, stored=(a.stored.float() * keep).to(a.stored.dtype)), b, unit, split=True)
    assert torch.equal(found, a.dequantized()[:, 5, None] * b.dequantized()[None, :, 5]), f"seed {SEED}"


def test_two_levels_of_scales_are_told_apart(matrix: Matrix) -> None:
    """One product a block of 16. Each operand's value has one rounding as its inverse and two more here, the product one: 7 of 2^-24, so 2^-21 is a bound."""
    unit = Unit(matrix, "b200", "sm_100")
    a, b = (quantized(32, 64, "1x16", recipe="nvfp4", name="fp4_e2m1", seed=seed) for seed in (SEED, 18))
    keep = torch.zeros(64, dtype=torch.uint8)
    keep[5] = 1
    found = multiply(replace(a, stored=a.stored * keep), b, unit, split=True)
    wanted = a.dequantized()[:, 5, None].double() * b.dequantized()[None, :, 5].double()
    assert wanted.any()
    assert ((found - wanted).abs() <= 2.0**-21 * wanted.abs()).all(), f"seed {SEED}"
    blocks, of_tensor = levels(a)
    assert torch.equal(blocks, blocks.to(torch.float8_e4m3fn).float())
    assert blocks.max() == 448.0
    assert not torch.equal(of_tensor, torch.ones(()))


def test_a_tensor_of_zeros_has_scales_of_two_levels(matrix: Matrix) -> None:
    zeros = quantize(torch.zeros(32, 32), Operand(format="fp4_e2m1", granularity="1x16"), low_bit(parse_recipe("nvfp4")))
    assert not multiply(zeros, zeros, Unit(matrix, "b200", "sm_100"), split=True).any()


def test_a_block_that_is_not_finite_shows(matrix: Matrix) -> None:
    tensor = torch.ones(32, 32)
    tensor[3, 20] = torch.inf
    cases: tuple[tuple[str, str, Granularity], ...] = (("nvfp4", "fp4_e2m1", "1x16"), ("mxfp8", "fp8_e4m3", "1x32"))
    for recipe, name, granularity in cases:
        spoiled, whole = (quantize(x, Operand(format=name, granularity=granularity), low_bit(parse_recipe(recipe))) for x in (tensor, torch.ones(32, 32)))
        found = multiply(spoiled, whole, Unit(matrix, "b200", "sm_100"), split=True)
        assert found[3].isnan().all()
        assert found[[0, 1, 2, 4]].isfinite().all(), recipe


@pytest.mark.parametrize(("name", "recipe", "granularity"), [("hif8", "hif8", "tensor"), ("fp4_e2m1", "mxfp8", "1x32")])
def test_formats_without_a_dtype_are_multiplied_by_value(matrix: Matrix, name: str, recipe: str, granularity: Granularity) -> None:
    unit = Unit(matrix, "ascend-950", "ascend-950")
    a, b = (quantized(32, 64, granularity, recipe=recipe, name=name, seed=seed) for seed in (SEED, 18))
    found = multiply(a, b, unit, split=False)
    if granularity == "1x32":
        assert torch.equal(found, a.dequantized() @ b.dequantized().t())
    else:
        inverse = (a.inverse * b.inverse).item()
        elements = [replace(part, inverse=torch.ones(1, 1)).dequantized() for part in (a, b)]
        assert torch.equal(found, elements[0] @ elements[1].t() * inverse)


@pytest.mark.parametrize(("m", "n", "k", "size"), [(16, 16, 24, "K = 24"), (8, 16, 16, "M = 8"), (16, 24, 16, "N = 24")])
def test_sizes_that_the_library_refuses_are_refused(matrix: Matrix, m: int, n: int, k: int, size: str) -> None:
    unit = Unit(matrix, "h100", "sm_90")
    with pytest.raises(BackendError, match=rf"{size} is not a multiple of 16, which cublaslt needs"):
        multiply(quantized(m, k, "tensor"), quantized(n, k, "tensor"), unit, split=False)
    multiply(quantized(m, k, "tensor"), quantized(n, k, "tensor"), Unit(matrix, "ascend-950", "ascend-950"), split=False)


def test_scales_that_no_row_has_are_refused(matrix: Matrix) -> None:
    with pytest.raises(BackendError, match="no row of sm_90 has scales per row and 1x128"):
        multiply(quantized(16, 128, "row"), quantized(16, 128, "1x128"), Unit(matrix, "h100", "sm_90"), split=False)


def test_layers_hold_the_parameters_and_copies_run(target_of: Select) -> None:
    target = target_of("h100")
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 7))
    parameters = list(model.parameters())
    with target.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp8") as session:
        assert [row["action"] for row in session.conversion] == ["converted", "skipped"]
        assert isinstance(model[0], EmulatedLinear)
        assert [id(parameter) for parameter in model.parameters()] == [id(parameter) for parameter in parameters]
        twin = copy.deepcopy(model[0])
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(SEED))
        with session.autocast():
            assert torch.equal(twin(x), model[0](x))


def test_tokens_that_misfit_fail_in_the_backward_pass_as_on_the_device(target_of: Select) -> None:
    """The weight's gradient sums over tokens: 24 of them are no multiple of 16."""
    model = nn.Sequential(nn.Linear(32, 32))
    with target_of("h100").prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp8") as session:
        with pytest.raises(BackendError, match="M = 24 is not a multiple of 16"), session.autocast():
            model(torch.ones(24, 32))
        session.flush()


def test_gradients_that_sum_differently_are_refused(target_of: Select) -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    with pytest.raises(BackendError, match=r"accumulate\.dgrad is fast and accumulate\.wgrad is split"):
        target_of("h100").prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp8:accumulate.dgrad=fast")


def test_a_low_bit_model_is_not_trained_in_another_format(target_of: Select, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with target_of("h100").prepare(model, optimizer, "fp8"):
        pass
    with pytest.raises(BackendError, match="made for an earlier low-bit recipe"):
        target_of("h100").prepare(model, optimizer, "bf16")


def test_forward_products_take_the_register_and_gradients_are_promoted(target_of: Select, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``fp8`` asks for: accumulate.forward=fast, fp32 for both gradients; a forward pass that is computed again is a forward pass."""
    seen: list[tuple[str, bool]] = []

    def watched(a: Quantized, b: Quantized, unit: Unit, *, split: bool) -> torch.Tensor:
        seen.append((a.format, split))
        return multiply(a, b, unit, split=split)

    monkeypatch.setattr("mpbackend_emulator.lowbit.multiply", watched)
    model = nn.Sequential(nn.Linear(32, 32))
    x = torch.ones(16, 32, requires_grad=True)
    with target_of("h100").prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp8") as session:
        with session.autocast():
            loss = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).float().sum()
        session.backward(loss)
        session.step()
    assert seen == [("fp8_e4m3", False), ("fp8_e4m3", False), ("fp8_e5m2", True), ("fp8_e5m2", True)]


def test_layers_that_the_library_refuses_are_left_out(target_of: Select) -> None:
    """nvfp4 has scales of 16, and cuBLASLt wants multiples of 32."""
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 16))
    with target_of("b200").prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "nvfp4") as session:
        assert [row["action"] for row in session.conversion] == ["converted", "skipped"]
        assert "not a multiple of 32" in session.conversion[1]["reason"]
