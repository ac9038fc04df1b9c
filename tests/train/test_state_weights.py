"""Recipes with working weights: masters, compensations and the generator of stochastic rounding go into a checkpoint and come back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from mpbackend.errors import DocumentError
from mpbackend.train import checkpoint
from mpbackend.train.session import Session
from tests.support.training import Prepare, make_batches


def make(prepare: Prepare, recipe: str, seed: int) -> Session:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 4))
    return prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4), recipe, seed=seed)


def train(session: Session, steps: range) -> list[list[float]]:
    """Return the weights after each step."""
    after = []
    for x, y in make_batches(steps.stop)[steps.start :]:
        with session.autocast():
            loss = functional.mse_loss(session.model(x.to(next(session.model.parameters()).dtype)).float(), y)
        session.backward(loss)
        session.step()
        after.append(nn.utils.parameters_to_vector(session.model.parameters()).tolist())
    return after


@pytest.mark.parametrize("recipe", ["bf16-master", "fp16-master:loss_scale.init=1024,loss_scale.interval=3", "bf16-kahan", "bf16-sr"])
def test_a_resumed_run_is_bit_identical(prepare: Prepare, tmp_path: Path, recipe: str) -> None:
    first = make(prepare, recipe, 0)
    train(first, range(5))
    first.save(tmp_path / "ckpt")
    wanted = train(first, range(5, 10))
    second = make(prepare, recipe, 1)
    train(second, range(2))
    second.load(tmp_path / "ckpt")
    assert train(second, range(5, 10)) == wanted


@pytest.mark.parametrize("part", ["masters", None])
def test_a_state_without_masters_is_refused_and_changes_nothing(prepare: Prepare, tmp_path: Path, part: str | None) -> None:
    first = make(prepare, "bf16-master", 0)
    train(first, range(2))
    first.save(tmp_path / "ckpt")
    path = tmp_path / "ckpt" / checkpoint.read_info(tmp_path / "ckpt").shared_file()
    content = torch.load(path, weights_only=True)
    content["weights"] = None if part is None else {**content["weights"], part: {}}
    torch.save(content, path)
    second = make(prepare, "bf16-master", 1)
    train(second, range(1))
    before = [value.clone() for value in second.model.state_dict().values()]
    with pytest.raises(DocumentError, match="working weights"):
        second.load(tmp_path / "ckpt")
    assert all(torch.equal(a, b) for a, b in zip(before, second.model.state_dict().values(), strict=True))
    assert second.steps == 1
