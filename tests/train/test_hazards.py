"""Hazards that are warned of, each shown to be one."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from mpbackend.train.hazards import warn_of_hazards
from tests.support.training import Prepare, make_batches, make_net


class Inner(nn.Module):
    """A layer that turns autocast off for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            out: torch.Tensor = self.layer(x.float())
        return out


class Repeated(nn.Module):
    """A batch norm that is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.layer = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(lambda given: self.layer(self.norm(given)), x, use_reentrant=False)
        return out


def gradient(model: Inner, called: Any) -> torch.Tensor:
    torch.manual_seed(1)
    x = torch.randn(32, 64)
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = called(x).float().square().sum()
    loss.backward()
    assert model.layer.weight.grad is not None
    return model.layer.weight.grad.clone()


def test_a_compiled_model_differentiates_an_inner_autocast_in_the_outer_format_and_is_warned_of(prepare: Prepare) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Inner()
    called = torch.compile(model, backend="aot_eager")
    eager, compiled = gradient(model, model), gradient(model, called)
    assert (eager - compiled).norm() / eager.norm() > 2**-10, "the hazard is gone: fp32 would agree to 2^-20; drop the warning"
    model.zero_grad()
    with pytest.warns(UserWarning, match="Inner opens an autocast of its own in a compiled model"):
        prepare(called, torch.optim.SGD(model.parameters(), lr=0.1), "bf16")


def test_a_norm_that_is_recomputed_counts_twice_and_is_warned_of(prepare: Prepare) -> None:
    model = Repeated()
    model(torch.randn(4, 8, requires_grad=True)).sum().backward()
    assert model.norm.num_batches_tracked is not None
    assert model.norm.num_batches_tracked.item() == 2, "the hazard is gone; drop the warning"
    model.zero_grad()
    session = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16")
    with session.autocast():
        loss = model(torch.randn(4, 8)).float().sum()
    with pytest.warns(UserWarning, match="activation checkpointing repeats the forward pass of norm"):
        session.backward(loss)
    assert session.step().stepped


def test_nothing_is_said_about_what_is_sound() -> None:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert warn_of_hazards(Inner()) == []
        model = make_net()
        assert len(warn_of_hazards(model)) == 1
        for x, y in make_batches(3):
            functional.mse_loss(model(x), y).backward()
        assert not model.norm._forward_pre_hooks
        warn_of_hazards(torch.compile(nn.TransformerEncoderLayer(8, 2, 16), backend="eager"))  # type: ignore[arg-type] # as above
