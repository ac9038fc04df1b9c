"""A checkpoint moves from a CPU to an NPU and back: model, optimizer moments, loss scale and counters are the vendor-neutral ones of the session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mpbackend
from mpbackend.train.session import Session


def prepared(target: mpbackend.Target, recipe: str) -> tuple[nn.Sequential, Session, torch.Tensor]:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 1)).to(target.device)
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(6)).to(target.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, target.prepare(model, optimizer, recipe, clip_norm=1.0, on_unsupported="emulate"), x


def steps(session: Session, model: nn.Module, x: torch.Tensor, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        with session.autocast():
            loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        session.backward(loss)
        session.step()
        losses.append(loss.item())
    return losses


def test_cpu_to_npu_to_cpu(target: mpbackend.Target, arch: str, tmp_path: Path) -> None:
    recipe = "fp16:loss_scale.init=1024,loss_scale.interval=3" if arch in ("ascend-910a", "ascend-310p") else "bf16"
    cpu = mpbackend.select("cpu")
    model, session, x = prepared(cpu, recipe)
    with session:
        first = steps(session, model, x, 4)
        session.save(tmp_path / "one", extra={"epoch": 1})
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        scale = session.loss_scale.state_dict()
        expected = steps(session, model, x, 4)

    model, session, x = prepared(target, recipe)
    with session:
        assert session.load(tmp_path / "one") == {"epoch": 1}
        assert session.loss_scale.state_dict() == scale
        assert {str(value.device.type) for value in model.state_dict().values()} == {"npu"}
        assert all(torch.equal(value.cpu(), weights[name]) for name, value in model.state_dict().items())
        second = steps(session, model, x, 4)
        session.save(tmp_path / "two")
        moved = {name: value.cpu() for name, value in model.state_dict().items()}
    assert second == pytest.approx(expected, rel=0.02), "the same training, on other kernels"

    model, session, x = prepared(cpu, recipe)
    with session:
        session.load(tmp_path / "two")
        assert session.steps == 8
        assert all(torch.equal(value, moved[name]) for name, value in model.state_dict().items())
        third = steps(session, model, x, 4)
    assert first[0] > second[0] > third[-1]


def test_vendor_scaler_does_not_take_torchs_state(arch: str) -> None:
    """What the session's own state avoids: torch's scaler state has no key that torch_npu's wants."""
    torch_npu: Any = __import__("torch_npu")
    state = torch.amp.GradScaler("npu").state_dict()
    with pytest.raises(KeyError, match="dynamic"):
        torch_npu.npu.amp.GradScaler().load_state_dict(state)
