"""Checkpoints and the end of a session while a verdict is still on the device."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mpbackend.train.session import Session
from tests.support.training import Prepare

DYNAMIC = "fp32:loss_scale.mode=dynamic,loss_scale.init=1024"


def make(prepare: Prepare, **options: Any) -> tuple[nn.Linear, torch.optim.Optimizer, Session]:
    """A model of one weight, its fused optimizer with a rate that halves at each taken step, and their session."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    return model, optimizer, prepare(model, optimizer, DYNAMIC, scheduler=scheduler, **options)


def pull(session: Session, model: nn.Linear, slope: float = 1.0) -> None:
    session.backward((model.weight * slope).sum())
    session.step()


def test_a_checkpoint_holds_the_learning_rate_after_the_verdict(prepare: Prepare, tmp_path: Path) -> None:
    model, _, session = make(prepare)
    pull(session, model)
    pull(session, model, math.inf)
    pull(session, model)
    session.save(tmp_path / "ckpt")
    other, optimizer, resumed = make(prepare)
    resumed.load(tmp_path / "ckpt")
    assert optimizer.param_groups[0]["lr"] == 0.25
    pull(resumed, other)
    pull(session, model)
    assert other.weight.item() == model.weight.item()


def test_loading_forgets_the_verdict_of_the_step_before(prepare: Prepare, tmp_path: Path) -> None:
    model, optimizer, session = make(prepare)
    session.save(tmp_path / "ckpt")
    pull(session, model)
    session.load(tmp_path / "ckpt")
    pull(session, model)
    session.close()
    assert optimizer.param_groups[0]["lr"] == 0.5, "one step was taken since the checkpoint"
    assert model.weight.item() == 0.0


def test_the_last_verdict_reaches_the_scheduler_when_the_session_ends(prepare: Prepare) -> None:
    model, optimizer, session = make(prepare)
    pull(session, model)
    session.close()
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("slope", [0.25, math.inf])
def test_a_fused_optimizer_steps_by_itself_again_after_the_session(prepare: Prepare, slope: float) -> None:
    model, optimizer, session = make(prepare)
    pull(session, model, slope)
    session.close()
    before, lr = model.weight.item(), optimizer.param_groups[0]["lr"]
    (model.weight * 0.125).sum().backward()
    optimizer.step()
    assert model.weight.item() == before - lr * 0.125
