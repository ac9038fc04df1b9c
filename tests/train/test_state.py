from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from mpbackend.errors import DocumentError, SessionError
from mpbackend.train.session import Session
from tests.support.training import Batch, Prepare, make_batches


def build(prepare: Prepare, recipe: str) -> tuple[nn.Module, Session]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    return model, prepare(model, optimizer, recipe, scheduler=scheduler, clip_norm=0.5)


def train(model: nn.Module, session: Session, batches: list[Batch]) -> None:
    for x, y in batches:
        with session.autocast():
            loss = functional.mse_loss(model(x), y)
        session.backward(loss)
        session.step()


def tensors(model: nn.Module) -> list[torch.Tensor]:
    return [value.clone() for value in model.state_dict().values()]


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "fp16:loss_scale.init=1024,loss_scale.interval=3"])
def test_a_resumed_run_is_bit_identical(prepare: Prepare, tmp_path: Path, recipe: str) -> None:
    batches = make_batches(10)
    model, session = build(prepare, recipe)
    train(model, session, batches[:5])
    session.save(tmp_path / "ckpt", extra={"epoch": 3})
    train(model, session, batches[5:])
    wanted, scale = tensors(model), session.loss_scale.state_dict()
    torch.manual_seed(99)
    model, session = build(prepare, recipe)
    train(model, session, make_batches(2, seed=7))
    assert session.load(tmp_path / "ckpt") == {"epoch": 3}
    assert session.steps == 5
    train(model, session, batches[5:])
    assert all(torch.equal(a, b) for a, b in zip(wanted, tensors(model), strict=True))
    assert session.loss_scale.state_dict() == scale


def test_saving_again_replaces_the_checkpoint_and_leaves_nothing_else(prepare: Prepare, tmp_path: Path) -> None:
    model, session = build(prepare, "fp32")
    session.save(tmp_path / "ckpt")
    train(model, session, make_batches(1))
    session.save(tmp_path / "ckpt")
    assert [item.name for item in tmp_path.iterdir()] == ["ckpt"]
    session.steps = 0
    session.load(tmp_path / "ckpt")
    assert session.steps == 1


def test_another_recipe_is_refused(prepare: Prepare, tmp_path: Path) -> None:
    build(prepare, "fp32")[1].save(tmp_path / "ckpt")
    with pytest.raises(DocumentError, match=r"recipe 'fp32'.*'fp16'"):
        build(prepare, "fp16")[1].load(tmp_path / "ckpt")


def test_another_model_is_refused(prepare: Prepare, tmp_path: Path) -> None:
    build(prepare, "fp32")[1].save(tmp_path / "ckpt")
    model = nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    session = prepare(model, optimizer, "fp32", scheduler=torch.optim.lr_scheduler.ConstantLR(optimizer))
    with pytest.raises(DocumentError, match="state_dict"):
        session.load(tmp_path / "ckpt")


def test_what_cannot_be_read_back_safely_is_refused_and_nothing_is_written(prepare: Prepare, tmp_path: Path) -> None:
    session = build(prepare, "fp32")[1]
    with pytest.raises(SessionError, match="cannot be read back safely"):
        session.save(tmp_path / "ckpt", extra={"object": Path("x")})
    assert list(tmp_path.iterdir()) == []


def test_open_micro_batches_cannot_be_saved(prepare: Prepare, tmp_path: Path) -> None:
    model = nn.Linear(8, 4)
    session = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", micro_batches=2)
    train(model, session, make_batches(1))
    with pytest.raises(SessionError, match="1 of 2 micro-batches"):
        session.save(tmp_path / "ckpt")


@pytest.mark.parametrize("content", [b"", b"{}", b'{"schema": 2}', b"\xff"])
def test_a_damaged_checkpoint_is_one_error(prepare: Prepare, tmp_path: Path, content: bytes) -> None:
    session = build(prepare, "fp32")[1]
    with pytest.raises(DocumentError):
        session.load(tmp_path / "missing")
    session.save(tmp_path / "ckpt")
    (tmp_path / "ckpt" / "checkpoint.json").write_bytes(content)
    with pytest.raises(DocumentError):
        session.load(tmp_path / "ckpt")
    session.save(tmp_path / "other")
    (tmp_path / "other" / "state.pt").write_bytes(content)
    with pytest.raises(DocumentError):
        session.load(tmp_path / "other")
