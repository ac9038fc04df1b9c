"""Casting in place: parameters only, tied ones stay tied, norms keep their format, and all of it can be undone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mpbackend.errors import SessionError
from mpbackend.recipe import parse_recipe
from mpbackend.train.casting import Casting
from mpbackend.train.weights import make_weights
from tests.support.processor import has_bf16
from tests.support.training import make_net
from tests.support.weights import RECIPES, train, working

BF16 = torch.bfloat16


class Rotary(nn.Module):
    """A table of angles as a buffer, and a weight."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("table", torch.arange(4096.0) * 0.6180339887)


def test_case_42_only_parameters_are_cast_and_a_rotary_table_keeps_its_phase() -> None:
    model = nn.Sequential(Rotary(), nn.Linear(8, 8))
    exact = model.get_buffer("0.table").clone()
    casting = Casting(model, BF16, None)
    assert all(parameter.dtype == BF16 for parameter in model.parameters())
    assert torch.equal(model.get_buffer("0.table"), exact)
    assert (exact.to(BF16).float() - exact).abs().max() > 1.79, "what casting it would have cost, in rad"
    assert {"layer": "0", "action": "kept", "reason": "table: a fp32 buffer beside bf16 parameters"} in casting.rows


def test_case_42_a_batch_norm_keeps_fp32_statistics_and_with_them_fp32_parameters() -> None:
    model = make_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with working(model, optimizer, "bf16-master") as weights:
        assert {name: value.dtype for name, value in model.norm.state_dict().items() if name != "num_batches_tracked"} == dict.fromkeys(
            ("weight", "bias", "running_mean", "running_var"), torch.float32
        )
        assert model.first.weight.dtype == model.last.bias.dtype == BF16
        before = model.norm.weight.detach().clone()
        train(model, optimizer, weights, 2, dtype=BF16)
        assert not torch.equal(before, model.norm.weight), "it is trained all the same"
        kept = [row for row in weights.rows() if row["layer"] == "norm"]
        assert kept == [{"layer": "norm", "action": "kept", "reason": "weight, bias: fp32 like the running statistics, which torch takes with them"}]
        model.eval()
        assert model(torch.zeros(2, 8, dtype=BF16)).isfinite().all()


def test_buffers_are_cast_where_the_recipe_says_so() -> None:
    model = make_net()
    with working(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16-master:buffers=bf16") as weights:
        assert model.norm.running_mean is not None
        assert model.norm.running_mean.dtype == model.norm.weight.dtype == BF16
        assert model.norm.num_batches_tracked is not None
        assert model.norm.num_batches_tracked.dtype == torch.int64
        assert {"layer": "norm", "action": "lowered", "reason": "running_mean: bf16 buffer, as the recipe says"} in weights.rows()
        weights.commit()
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32, torch.int64}, "a model that came in fp32 leaves in fp32"


def test_a_model_that_was_cast_whole_is_told_what_it_lost() -> None:
    casting = Casting(make_net().bfloat16(), BF16, None)
    (row, _) = [row for row in casting.rows if row["layer"] == "norm" and row["action"] == "found"]
    assert row["reason"] == "running_mean: a bf16 buffer beside bf16 parameters; it came so, its fp32 values are lost"


def test_tied_parameters_stay_tied_and_have_one_master() -> None:
    model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8, bias=False))
    model[1].weight = model.get_parameter("0.weight")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with working(model, optimizer, "bf16-master") as weights:
        assert model.get_parameter("1.weight") is model.get_parameter("0.weight")
        assert len(weights.sources()) == 1
        assert list(weights.state_dict()["masters"]) == ["0.weight"]
        weights.commit()
    assert model.get_parameter("1.weight") is model.get_parameter("0.weight")
    assert model.get_parameter("0.weight").dtype == torch.float32


def test_a_frozen_parameter_is_cast_and_comes_back_in_fp32() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    with working(model, optimizer, "bf16-master") as weights:
        assert model.get_parameter("0.weight").dtype == BF16
        train(model, optimizer, weights, 1, dtype=BF16)
    assert model.get_parameter("0.weight").dtype == model.get_parameter("1.weight").dtype == torch.float32


@pytest.mark.parametrize("recipe", RECIPES)
def test_whole_numbers_that_an_optimizer_holds_stay_whole(recipe: str) -> None:
    class Net(nn.Linear):
        """A layer with a table of indices as a parameter."""

        def __init__(self) -> None:
            super().__init__(8, 4)
            self.table = nn.Parameter(torch.tensor([1001, 2003]), requires_grad=False)

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-4)
    with working(model, optimizer, recipe) as weights:
        assert optimizer.param_groups[0]["params"][2] is model.table
        train(model, optimizer, weights, 1, dtype=model.weight.dtype)
        assert model.table.tolist() == [1001, 2003]
        assert model.table.dtype == torch.int64
    assert model.table.tolist() == [1001, 2003]


@pytest.mark.skipif(not has_bf16(), reason="oneDNN has no LSTM in bf16 for this processor")
def test_an_lstm_trains() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.LSTM(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Return the outputs."""
            out: torch.Tensor = self.inner(x)[0]
            return out

    model = Last()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with working(model, optimizer, "bf16-kahan") as weights:
        before = model.get_parameter("inner.weight_ih_l0").detach().clone()
        train(model, optimizer, weights, 1, dtype=BF16)
        assert not torch.equal(before, model.get_parameter("inner.weight_ih_l0"))


def test_a_failure_half_way_leaves_the_model_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    real, calls = Casting.cast, []

    def cast(self: Casting, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        calls.append(tensor)
        if len(calls) == 3:
            raise MemoryError
        real(self, tensor, dtype)

    monkeypatch.setattr(Casting, "cast", cast)
    with pytest.raises(MemoryError):
        make_weights(model, [torch.optim.SGD(model.parameters(), lr=0.1)], parse_recipe("bf16-kahan"), seed=0)
    assert all(torch.equal(value, before[name]) and value.dtype == before[name].dtype for name, value in model.state_dict().items())


def test_a_failure_after_casting_leaves_model_and_optimizer_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(optimizer, "register_load_state_dict_post_hook", fail)
    with pytest.raises(MemoryError):
        make_weights(model, [optimizer], parse_recipe("bf16-master"), seed=0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))
    assert not optimizer._optimizer_step_post_hooks


def test_what_a_wrapper_looks_after_is_refused() -> None:
    class Shard(torch.Tensor):
        """A tensor of some wrapper."""

    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.ones(2, 2).as_subclass(Shard))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(SessionError, match="bf16 parameters: parameter weight is a Shard"):
        make_weights(model, [optimizer], parse_recipe("bf16-kahan"), seed=0)
    assert model.bias.dtype == torch.float32
    model.bias = nn.Parameter(torch.ones(2).as_subclass(Shard))
    assert make_weights(model, [optimizer], parse_recipe("bf16-master"), seed=0) is None, "fp32 shards are the masters themselves"
