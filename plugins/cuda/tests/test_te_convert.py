"""Which layers are converted, and that every one is accounted for."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from mpbackend.errors import BackendError
from mpbackend.lowbit import low_bit
from mpbackend.recipe import parse_recipe
from mpbackend_cuda.execution import EngineExecution
from mpbackend_cuda.te_convert import convert_model, restore_plain
from mpbackend_cuda.te_layers import LowBitLinear
from mpbackend_cuda.te_recipes import lower
from plugins.cuda.tests.support.engine import Engine


def convert(model: nn.Module, engine: Engine, recipe: str = "fp8", keep: tuple[str, ...] = (), micro_batches: int = 1) -> list[dict[str, str]]:
    low = low_bit(parse_recipe(recipe), keep)
    lowered = lower(low, engine.recipes)
    execution = EngineExecution(engine.pytorch.autocast, lowered.recipe, delayed=low.mode == "delayed")
    return convert_model(model, low, lowered, engine.pytorch.Linear, execution, micro_batches)


class Model(nn.Module):
    """A misfit first, then layers that fit, at several depths."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = nn.Linear(32, 10)
        self.first = nn.Linear(32, 64)
        self.inner = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 24), nn.Linear(24, 64), nn.GELU())
        self.attention = nn.MultiheadAttention(32, 2)
        self.last = nn.Linear(64, 32, bias=False)


def test_a_misfit_does_not_stop_its_siblings(engine: Engine) -> None:
    model = Model()
    rows = convert(model, engine)
    actions = {row["layer"]: row["action"] for row in rows}
    assert actions == {
        "odd": "skipped",
        "first": "converted",
        "inner.0": "converted",
        "inner.1": "skipped",
        "inner.2": "skipped",
        "attention.out_proj": "skipped",
        "last": "converted",
    }
    reasons = {row["layer"]: row["reason"] for row in rows}
    assert re.search("out_features 10.* 16", reasons["odd"]), "a product of the backward pass would fail"
    assert re.search("in_features 24.* 16", reasons["inner.2"])
    assert "NonDynamicallyQuantizableLinear" in reasons["attention.out_proj"], "its parent uses the weight without calling it"
    assert reasons["first"].startswith("Transformer Engine Float8CurrentScaling, tokens padded to a multiple of 16")
    assert sum(float(row["flop_share"]) for row in rows) == pytest.approx(1, abs=len(rows) * 5e-7), "six digits a row"
    assert [type(module).__name__ for module in (model.odd, model.first, model.inner[0], model.inner[1], model.last)] == [
        "Linear",
        "LowBitLinear",
        "LowBitLinear",
        "Linear",
        "LowBitLinear",
    ]


def test_microscaling_needs_wider_multiples(engine: Engine) -> None:
    model = nn.Sequential(nn.Linear(32, 48), nn.Linear(64, 32))
    assert [row["action"] for row in convert(model, engine, "mxfp8")] == ["skipped", "converted"]


def test_kept_layers(engine: Engine) -> None:
    model = Model()
    rows = convert(model, engine, keep=("inner.*", "first"))
    assert {row["layer"] for row in rows if row["action"] == "converted"} == {"last"}


def test_where_nothing_fits_it_is_an_error(engine: Engine) -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(BackendError, match="no layer can be converted"):
        convert(model, engine)
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize(("recipe", "micro_batches", "keeps"), [("fp8", 1, False), ("fp8", 4, True), ("fp8-delayed", 4, False)])
def test_weights_are_kept_over_micro_batches_of_recipes_without_state(recipe: str, micro_batches: int, keeps: bool, engine: Engine) -> None:
    """A window moves between micro-batches, and the scale of a kept weight would not."""
    model: Any = nn.Sequential(nn.Linear(16, 16))
    convert(model, engine, recipe, micro_batches=micro_batches)
    assert model[0].keeps_weight is keeps


def test_going_back_to_plain_layers(engine: Engine) -> None:
    model: Any = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16, bias=False), nn.Linear(16, 3))
    shared = nn.Sequential(model, model[0])
    before = {name: id(parameter) for name, parameter in shared.named_parameters()}
    inp = torch.randn(4, 16)
    expected = model(inp)
    convert(shared, engine)
    assert shared[1] is model[0]
    model.eval()
    assert restore_plain(shared) == 2
    assert shared[1] is model[0]
    assert not any(isinstance(module, LowBitLinear) for module in shared.modules())
    assert before == {name: id(parameter) for name, parameter in shared.named_parameters()}
    assert [module.training for module in model] == [False] * 3
    assert (model[0].in_features, model[0].out_features, model[1].bias) == (16, 32, None)
    assert torch.equal(model(inp), expected)
    assert restore_plain(shared) == 0


def test_a_model_trains_as_it_would_unconverted(engine: Engine) -> None:
    """The stand-in computes in fp32, so the losses are equal: the optimizer holds the parameters that the layers use."""
    losses = []
    for converted in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16), nn.Linear(16, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        context: Any = None
        if converted:
            convert(model, engine)
            context = model[0].execution
        inputs, wanted = torch.randn(16, 16), torch.randn(16, 3)
        for _ in range(5):
            if context is None:
                loss = nn.functional.mse_loss(model(inputs), wanted)
            else:
                with context.context():
                    loss = nn.functional.mse_loss(model(inputs), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[:5] == losses[5:]
    assert losses[4] < losses[0]
