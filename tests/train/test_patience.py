"""Skips without end become an error that says where the first non-finite value came from."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from mpbackend.errors import SessionError
from mpbackend.train.diagnosis import Diagnosis, kind_of
from mpbackend.train.session import Session
from tests.support.training import Prepare, make_batches

DYNAMIC = "fp32:loss_scale.mode=dynamic,loss_scale.init=1024,loss_scale.patience=4"


class Logarithm(nn.Module):
    """Takes the logarithm of something that may be negative."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(x)


class Attention(nn.Module):
    """Masks with minus infinity, which is no fault."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[0], x.shape[0], dtype=torch.bool).triu(1)
        scores = (x @ x.T).masked_fill(mask, -math.inf)
        return torch.softmax(scores, -1) @ x


class Root(nn.Module):
    """A root whose gradient at 0 is infinite."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt(x * 0) * 0


def build(broken: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), Attention(), broken, nn.Linear(8, 4))


def train(session: Session, model: nn.Module, steps: int) -> None:
    x, y = make_batches(1)[0]
    for _ in range(steps):
        with session.autocast():
            loss = functional.mse_loss(model(x), y)
        session.backward(loss)
        session.step()


@pytest.mark.parametrize(
    ("broken", "where"),
    [
        (Logarithm(), r"forward pass, 2 \(Logarithm\), log\.default: result of \(6, 8\) in fp32 holds nan"),
        (Root(), r"backward pass, behind 2 \(Root\), (div|sqrt|mul)\S*: result of \(6, 8\) in fp32 holds (nan|inf)"),
    ],
)
def test_case_56_the_first_non_finite_value_is_named(prepare: Prepare, broken: nn.Module, where: str) -> None:
    model = build(broken)
    session = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), DYNAMIC)
    with pytest.raises(SessionError, match=where) as caught:
        train(session, model, 400)
    assert "steps in a row were skipped" in str(caught.value)
    assert session.loss_scale.value >= 1.0


def test_case_56_a_helpless_run_ends_after_its_patience_and_keeps_its_weights(prepare: Prepare) -> None:
    model = build(Logarithm())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    session = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), DYNAMIC)
    with pytest.raises(SessionError, match="4 steps in a row were skipped, the last for forward_nonfinite, at loss scale 128"):
        train(session, model, 400)
    assert (session.steps, session.loss_scale.startup_skips) == (4, 4)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_case_56_a_tiny_loss_for_ever_does_not_let_the_scale_run_away(prepare: Prepare) -> None:
    model = nn.Linear(1, 1, bias=False)
    session = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp16:loss_scale.interval=1")
    for _ in range(40):
        with session.autocast():
            loss = (model.weight * 1e-30).sum()
        session.backward(loss)
        assert session.step().stepped
    assert session.loss_scale.value == 2.0**24


def test_the_search_for_a_first_scale_is_no_streak(prepare: Prepare) -> None:
    model = nn.Linear(1, 1, bias=False)
    session = prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), "fp32:loss_scale.mode=dynamic,loss_scale.init=16777216,loss_scale.patience=2")
    stepped = []
    for _ in range(12):
        session.backward((model.weight * 2.0**112).sum())  # fits from 2^15 on
        stepped.append(session.step().stepped)
    assert (stepped.index(True), session.loss_scale.startup_skips, session.loss_scale.skips) == (9, 9, 0)


def test_a_run_that_recovers_goes_on(prepare: Prepare) -> None:
    model = nn.Linear(1, 1, bias=False)
    session = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), DYNAMIC)
    for factor in (1.0, math.nan, math.nan, math.nan, 1.0, math.nan, math.nan, math.nan, 1.0):
        session.backward((model.weight * factor).sum())
        assert session.step().stepped == (factor == 1.0)
    assert session.loss_scale.skips == 6


def test_a_patience_of_one_names_the_step_without_watching_it(prepare: Prepare) -> None:
    model = nn.Linear(1, 1, bias=False)
    session = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), DYNAMIC.replace("patience=4", "patience=1"))
    session.backward((model.weight * math.nan).sum())
    with pytest.raises(SessionError, match="1 steps in a row"):
        session.step()


def test_a_batch_that_was_broken_before_is_told_from_a_broken_layer() -> None:
    model = nn.Linear(2, 2)
    diagnosis = Diagnosis(model)
    with diagnosis.watch("forward"):
        model(torch.tensor([[math.nan, 1.0]]))
    assert "its operand of (1, 2) held nan already" in diagnosis.finding
    with torch.no_grad():
        model.weight[0, 0] = math.inf
    second = Diagnosis(model)
    with second.watch("forward"):
        model(torch.ones(1, 2))
    assert second.finding.startswith("forward pass, the model (Linear)")
    assert "held inf already" in second.finding


def test_a_minus_infinity_that_is_no_mask_is_the_last_resort() -> None:
    model = nn.Sequential(Logarithm())
    diagnosis = Diagnosis(model)
    with diagnosis.watch("forward"):
        model(torch.zeros(2))
    assert diagnosis.finding.startswith("forward pass, 0 (Logarithm), log.default: result of (2,) in fp32 holds -inf")


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [(torch.tensor([1.0, math.nan, math.inf]), "nan"), (torch.tensor([math.inf]), "inf"), (torch.tensor([-math.inf]), "-inf"), (torch.ones(2), "")]
    + [(torch.ones(0), ""), (torch.ones(2, dtype=torch.int64), "")],
)
def test_the_worst_value_of_a_tensor(tensor: Any, kind: str) -> None:
    assert kind_of(tensor) == kind
