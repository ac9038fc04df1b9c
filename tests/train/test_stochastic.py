"""Stochastic rounding: to a neighbor only, unbiased, reproducible, and no overflow by chance."""

from __future__ import annotations

import math

import pytest
import torch

from mpbackend.errors import DocumentError
from mpbackend.formats import FORMATS
from mpbackend.train import stochastic
from mpbackend.train.stochastic import StochasticRounding, chance_below, stochastic_round

BOTH = [("bf16", torch.bfloat16), ("fp16", torch.float16)]
Z = 6.0
"""Standard deviations: a right generator fails one test in 5e8."""


def every_code(dtype: torch.dtype) -> torch.Tensor:
    """Return all 65,536 codes of a 16-bit format."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def chances(name: str, count: int, value: int) -> torch.Tensor:
    """Return the same chance for every element."""
    return torch.full((count,), value, dtype=torch.int32)


@pytest.mark.parametrize(("name", "dtype"), BOTH)
def test_what_the_format_holds_never_moves(name: str, dtype: torch.dtype) -> None:
    codes = every_code(dtype)
    for chance in (0, 1, chance_below(FORMATS[name]) - 1):
        rounded = stochastic_round(codes.float(), FORMATS[name], chances(name, codes.numel(), chance))
        assert torch.equal(rounded.isnan(), codes.isnan())
        kept = ~codes.isnan()
        assert torch.equal(rounded[kept].view(torch.int16), codes[kept].view(torch.int16))


@pytest.mark.parametrize("value", [1.001, -1.001, 3.3e38, 1e-40, -3e-39])
def test_every_chance_of_bf16_counts_and_their_mean_is_the_number(value: float) -> None:
    exact = torch.full((1 << 16,), value)
    rounded = stochastic_round(exact, FORMATS["bf16"], torch.arange(1 << 16, dtype=torch.int32)).double()
    assert rounded.unique().numel() == 2
    assert rounded.mean().item() == exact[0].double().item()


def test_every_chance_of_a_normal_fp16_number_counts_and_their_mean_is_the_number() -> None:
    exact = torch.full((1 << 13,), -1.0001)
    rounded = stochastic_round(exact, FORMATS["fp16"], torch.arange(1 << 13, dtype=torch.int32)).double()
    assert rounded.mean().item() == exact[0].double().item()


@pytest.mark.parametrize(("whole", "share"), [(5, 0.25), (5, 2.0**-20), (5, 1 - 2.0**-20), (0, 2.0**-26), (0, 2.0**-23)])
def test_below_the_smallest_normal_number_the_mean_is_right_to_a_24th_bit(whole: int, share: float) -> None:
    tiny = FORMATS["fp16"].smallest_subnormal
    chance = torch.arange(1 << 23, dtype=torch.int32)
    units = -stochastic_round(torch.full((1 << 23,), -(whole + share) * tiny), FORMATS["fp16"], chance).double() / tiny
    assert abs(units.mean().item() - whole - share) <= 2.0**-24
    assert set(units.unique().tolist()) <= {float(whole), whole + 1.0}


@pytest.mark.parametrize(("name", "dtype"), BOTH)
def test_an_overflow_is_no_matter_of_chance(name: str, dtype: torch.dtype) -> None:
    top = FORMATS[name].max
    half = torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(top)) / 2
    values = torch.tensor([top + half * 0.9, -top - half * 0.9, top + half * 1.01, math.inf, -math.inf, math.nan])
    for chance in (0, chance_below(FORMATS[name]) - 1):
        rounded = stochastic_round(values, FORMATS[name], chances(name, 6, chance))
        assert rounded[:5].tolist() == [top, -top, math.inf, math.inf, -math.inf]
        assert math.isnan(rounded[5])


@pytest.mark.parametrize(("name", "dtype"), BOTH)
@pytest.mark.parametrize("share", [0.001, 0.3, 0.9])
def test_the_share_that_is_rounded_up_is_binomial(name: str, dtype: torch.dtype, share: float) -> None:
    count = 200_000
    value = 1 + share * torch.finfo(dtype).eps
    exact = (torch.tensor(value).item() - 1) / torch.finfo(dtype).eps
    up = (StochasticRounding(name, 3).round(torch.full((count,), value)) > 1).sum().item()
    assert abs(up - count * exact) <= Z * math.sqrt(count * exact * (1 - exact))


def test_the_draws_are_those_of_the_seed_and_not_of_the_global_generator() -> None:
    values = torch.linspace(0.1, 0.2, 1000)
    first = StochasticRounding("bf16", 5).round(values)
    torch.manual_seed(99)
    before = torch.get_rng_state()
    assert torch.equal(StochasticRounding("bf16", 5).round(values), first)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(StochasticRounding("bf16", 6).round(values), first)


def test_tensors_are_rounded_in_slices_and_together_like_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [torch.linspace(0.1, 0.2, 6).view(3, 2), torch.tensor(0.3001), torch.linspace(1, 2, 40).view(10, 4), torch.linspace(5, 6, 3)]
    alone = StochasticRounding("bf16", 5)
    expected = [alone.round(value) for value in values]
    real, sizes = StochasticRounding.round, []

    def note(self: StochasticRounding, value: torch.Tensor) -> torch.Tensor:
        sizes.append(value.numel())
        return real(self, value)

    monkeypatch.setattr(StochasticRounding, "round", note)
    for size, most in ((1, 4), (5, 4), (8, 8), (1 << 20, 50)):
        monkeypatch.setattr(stochastic, "SLICE", size)
        sizes.clear()
        results = [torch.zeros_like(value, dtype=torch.bfloat16) for value in values]
        StochasticRounding("bf16", 5).round_into(values, results)
        assert (max(sizes), sum(sizes)) == (most, 50)
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def test_a_state_continues_where_it_was_taken() -> None:
    values = torch.linspace(0.1, 0.2, 1000)
    rounding = StochasticRounding("bf16", 5)
    rounding.round(values)
    state = {key: value.clone() for key, value in rounding.state_dict().items()}
    expected = rounding.round(values)
    other = StochasticRounding("bf16", 0)
    other.load_state_dict(state)
    assert {key: value.tolist() for key, value in other.state_dict().items()} == {key: value.tolist() for key, value in state.items()}, "saved again unused"
    assert torch.equal(other.round(values), expected)
    with pytest.raises(DocumentError, match="not the bytes of a generator"):
        other.load_state_dict({"cpu": torch.zeros(3)})
