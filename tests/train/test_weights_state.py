"""Resuming: a run that is saved and continued in new objects goes on bit for bit."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

from mpbackend.errors import DocumentError
from mpbackend.train.weights import WorkingWeights
from tests.support.weights import RECIPES, train, working


def net() -> nn.Sequential:
    """Return a small seeded model."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """Return an optimizer with two moments."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def saved(content: dict[str, Any]) -> dict[str, Any]:
    """Return content as it comes back from a file, read safely."""
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def everything(model: nn.Module, optimizer: torch.optim.Optimizer, weights: WorkingWeights) -> dict[str, Any]:
    """Return what a checkpoint holds."""
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "weights": weights.state_dict()}


def leaves(value: Any) -> list[Any]:
    """Return tensors and numbers of a nesting, in order, tensors with their format and bits."""
    if isinstance(value, dict):
        return [leaf for key in sorted(value, key=str) for leaf in leaves(value[key])]
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in leaves(item)]
    return [(value.dtype, value.tolist())] if isinstance(value, torch.Tensor) else [value]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_resumed_run_is_bit_identical(recipe: str) -> None:
    model = net()
    optimizer = adamw(model)
    with working(model, optimizer, recipe, seed=7) as weights:
        dtype = model.get_parameter("0.weight").dtype
        train(model, optimizer, weights, 4, dtype=dtype)
        checkpoint = saved(everything(model, optimizer, weights))
        train(model, optimizer, weights, 4, start=4, dtype=dtype)
        expected = copy.deepcopy(leaves(everything(model, optimizer, weights)))
    other = net()
    with torch.no_grad():
        other.get_parameter("0.weight").add_(1.0)
    resumed = adamw(other)
    with working(other, resumed, recipe, seed=0) as weights:
        other.load_state_dict(checkpoint["model"])
        resumed.load_state_dict(checkpoint["optimizer"])
        weights.load_state_dict(checkpoint["weights"])
        assert leaves(everything(other, resumed, weights)) == leaves(checkpoint), "the state comes back in its formats"
        train(other, resumed, weights, 4, start=4, dtype=dtype)
        assert leaves(everything(other, resumed, weights)) == expected


def test_masters_lead_whatever_order_a_checkpoint_is_loaded_in() -> None:
    model = net()
    optimizer = adamw(model)
    with working(model, optimizer, "bf16-master") as weights:
        train(model, optimizer, weights, 2, dtype=torch.bfloat16)
        checkpoint = saved(everything(model, optimizer, weights))
    other = net()
    with working(other, adamw(other), "bf16-master") as weights:
        weights.load_state_dict(checkpoint["weights"])
        assert all(torch.equal(value, checkpoint["model"][name]) for name, value in other.state_dict().items())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda state: state["masters"].pop("0.bias"), r"masters of the working weights: 0\.bias is on one side only"),
        (lambda state: state.pop("masters"), "masters of the working weights: .* is on one side only"),
        (lambda state: state["masters"].update({"2.bias": torch.zeros(3)}), r"2\.bias has another shape"),
        (lambda state: state["compensation"].update({"x": torch.zeros(3)}), "compensation of the working weights: x is on one side only"),
    ],
)
def test_a_state_of_another_model_is_refused_and_changes_nothing(spoil: Any, message: str) -> None:
    model = net()
    optimizer = adamw(model)
    with working(model, optimizer, "bf16-master") as weights:
        state = copy.deepcopy(weights.state_dict())
        before = leaves(everything(model, optimizer, weights))
        for value in state["masters"].values():
            value.zero_()
        spoil(state)
        with pytest.raises(DocumentError, match=message):
            weights.load_state_dict(state)
        assert leaves(everything(model, optimizer, weights)) == before


@pytest.mark.parametrize(("recipe", "dtype"), [("bf16-master", torch.float32), ("bf16-kahan", torch.bfloat16)])
def test_a_model_that_was_loaded_leaves_as_loaded_without_a_step(recipe: str, dtype: torch.dtype) -> None:
    model = net()
    with working(model, adamw(model), recipe) as weights:
        state = copy.deepcopy(weights.state_dict())
        for value in state["masters"].values():
            value.fill_(0.25)
        model.load_state_dict({name: torch.full_like(value, 0.25) for name, value in model.state_dict().items()})
        weights.load_state_dict(state)
    assert all(parameter.dtype == dtype and torch.equal(parameter, torch.full_like(parameter, 0.25)) for parameter in model.parameters())
