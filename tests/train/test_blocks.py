"""Updating in blocks: the bits of an update at once, whatever happens in the middle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import mpbackend
from mpbackend.observe.record import load_record
from mpbackend.train.blocks import blocks_of, step_in_blocks, takes_blocks
from mpbackend.train.session import Session
from tests.support.training import Prepare, make_batches, make_net


def run(session: Session, model: nn.Module, steps: int) -> None:
    for x, y in make_batches(steps):
        with session.autocast():
            loss = functional.mse_loss(model(x), y)
        session.backward(loss)
        assert session.step().stepped


def train(prepare: Prepare, make: Any, recipe: str, **options: Any) -> list[torch.Tensor]:
    model = make_net()
    groups = [{"params": list(model.first.parameters()), "lr": 1e-3}, {"params": [*model.norm.parameters(), *model.last.parameters()]}]
    run(prepare(model, make(groups), recipe, **options), model, 4)
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("recipe", ["fp32:loss_scale.mode=static,loss_scale.init=1024", "fp32:loss_scale.mode=dynamic,loss_scale.init=1024"])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_an_update_in_blocks_has_the_bits_of_one_at_once(
    prepare: Prepare, target: mpbackend.Target, monkeypatch: pytest.MonkeyPatch, optimizer: Any, recipe: str, clip: float | None
) -> None:
    found = []
    for elements in (0, 16, 130):
        monkeypatch.setattr(target.backend, "update_block", elements, raising=False)
        found.append(train(prepare, lambda groups: optimizer(groups, lr=1e-2), recipe, clip_norm=clip))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_blocks_are_full_and_leave_out_what_has_no_gradient() -> None:
    tensors = [nn.Parameter(torch.zeros(size)) for size in (3, 3, 9, 2, 2)]
    optimizer = torch.optim.SGD([{"params": tensors[:2]}, {"params": tensors[2:]}], lr=0.1)
    for tensor in (*tensors[:3], tensors[4]):
        tensor.grad = torch.ones_like(tensor)
    found = [[[tensor.numel() for tensor in part] for part in block] for block in blocks_of(optimizer, 6)]
    assert found == [[[3, 3], []], [[], [9]], [[], [2]]]


def test_step_hooks_of_the_user_are_called_once_a_step(prepare: Prepare, target: mpbackend.Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target.backend, "update_block", 16, raising=False)
    model = make_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = prepare(model, optimizer, "fp32")
    assert takes_blocks(optimizer)
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(len(optimizer.param_groups[0]["params"])))
    run(session, model, 2)
    assert calls == [6, 6]


def test_an_optimizer_that_is_none_of_torchs_steps_at_once() -> None:
    class Mine(torch.optim.SGD):
        """May look at all parameters together."""

    assert not takes_blocks(Mine([nn.Parameter(torch.zeros(1))], lr=0.1))


def test_an_optimizer_that_raises_between_blocks_keeps_its_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [nn.Parameter(torch.zeros(4)) for _ in range(3)]
    optimizer = torch.optim.SGD(tensors, lr=0.1)
    for tensor in tensors:
        tensor.grad = torch.ones_like(tensor)
    calls: list[int] = []

    def step() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise ZeroDivisionError

    monkeypatch.setattr(optimizer, "step", step)
    with pytest.raises(ZeroDivisionError):
        step_in_blocks(optimizer, 4, 0.5, free=True)
    assert [id(tensor) for tensor in optimizer.param_groups[0]["params"]] == [id(tensor) for tensor in tensors]


def test_an_observed_step_keeps_its_gradients_until_they_are_counted(
    prepare: Prepare, target: mpbackend.Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(target.backend, "update_block", 16, raising=False)
    model = make_net()
    session = prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), "fp32", record=tmp_path / "run")
    run(session, model, 1)
    session.close()
    size = sum(parameter.nbytes for parameter in model.parameters())
    assert load_record(tmp_path / "run").record.classes["gradients"].observed == {"fp32": size}
