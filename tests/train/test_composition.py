"""Sessions with compiled models, activation checkpointing and worker threads."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from mpbackend.train.session import Session
from tests.support.training import Batch, Net, Prepare, make_batches, make_net

RECIPES = ("fp32", "bf16", "fp16:loss_scale.init=1024", "bf16-master")


class Checkpointed(Net):
    """Recomputes its first half in the backward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(lambda given: torch.relu(self.first(given)), x, use_reentrant=False)
        out: torch.Tensor = self.last(hidden)
        return out


class Plain(Net):
    """The same without recomputing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(torch.relu(self.first(x)))
        return out


def seeded(kind: type[Net]) -> Net:
    torch.manual_seed(0)
    return kind()


def train(session: Session, model: Any, batches: list[Batch]) -> list[torch.dtype]:
    seen = []
    for x, y in batches:
        with session.autocast():
            out = model(x)
            loss = functional.mse_loss(out.float(), y)
        session.backward(loss)
        assert session.step().stepped
        seen.append(out.dtype)
    return seen


def states(model: nn.Module) -> list[torch.Tensor]:
    return [value.detach().clone() for value in model.state_dict().values()]


@pytest.mark.parametrize("recipe", RECIPES)
def test_activation_checkpointing_changes_no_bit(prepare: Prepare, recipe: str) -> None:
    found = []
    for kind in (Plain, Checkpointed):
        model = seeded(kind)
        session = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), recipe, clip_norm=0.5)
        train(session, model, make_batches(4))
        found.append(states(model))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_compiled_model_trains_as_the_model_does(prepare: Prepare, recipe: str) -> None:
    found, formats = [], []
    for compiled in (False, True):
        torch._dynamo.reset()
        model = seeded(Plain)
        called = torch.compile(model, backend="aot_eager") if compiled else model
        session = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), recipe, clip_norm=0.5)
        formats.append(train(session, called, make_batches(4)))
        found.append(states(model))
    assert formats[0] == formats[1]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("recipe", ["bf16", "bf16-master"])
def test_a_compiled_model_can_be_prepared_and_recorded(prepare: Prepare, recipe: str, tmp_path: Any) -> None:
    torch._dynamo.reset()
    model: Any = torch.compile(seeded(Plain), backend="aot_eager")
    session = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), recipe, record=tmp_path / "run")
    assert set(train(session, model, make_batches(3))) == {torch.bfloat16}


def test_a_forward_pass_in_a_worker_thread_runs_in_the_planned_format(prepare: Prepare) -> None:
    model = make_net()
    session = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16")
    seen: list[torch.dtype] = []

    def work(x: torch.Tensor) -> None:
        with session.autocast():
            seen.append(model.first(x).dtype)

    threads = [threading.Thread(target=work, args=(make_batches(1)[0][0],)) for _ in range(3)]
    with session.autocast():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seen.append(model.first(make_batches(1)[0][0]).dtype)
    assert seen == [torch.bfloat16] * 4
    assert not torch.is_autocast_enabled("cpu")
