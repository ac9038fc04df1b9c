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


FP16 = "fp16:loss_scale.init=1024,loss_scale.interval=3"
LOST = "random state of {} is not restored on {}: dropout masks and stochastic rounding differ from here on"


def everything(session: Session) -> list[Any]:
    """Return what moves between vendors, tensors with their format and bits: weights, moments, scale, and the masters of working weights."""
    states = [session.model.state_dict(), *(optimizer.state_dict()["state"] for optimizer in session.optimizers), session.loss_scale.state_dict()]
    if session.weights is not None:
        state = session.weights.state_dict()
        states += [state["masters"], state["compensation"]]
    return leaves(states)


def leaves(value: Any) -> list[Any]:
    """Return tensors and numbers of a nesting, in order."""
    if isinstance(value, dict):
        return [leaf for key in sorted(value, key=str) for leaf in leaves(value[key])]
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in leaves(item)]
    return [(value.dtype, value.tolist())] if isinstance(value, torch.Tensor) else [value]


@pytest.mark.parametrize("recipe", [FP16, "bf16", "bf16-master", "bf16-kahan"])
def test_cpu_to_npu_to_cpu(target: mpbackend.Target, arch: str, tmp_path: Path, recipe: str) -> None:
    if arch in ("ascend-910a", "ascend-310p") and recipe != FP16:
        pytest.skip(f"{arch} has no bf16")
    cpu = mpbackend.select("cpu")
    model, session, x = prepared(cpu, recipe)
    with session:
        first = steps(session, model, x, 4)
        session.save(tmp_path / "one", extra={"epoch": 1})
        saved = everything(session)
        expected = steps(session, model, x, 4)

    model, session, x = prepared(target, recipe)
    with session:
        with pytest.warns(UserWarning, match=LOST.format("cpu", "npu")):
            assert session.load(tmp_path / "one") == {"epoch": 1}
        assert everything(session) == saved
        assert {str(value.device.type) for value in model.state_dict().values()} == {"npu"}
        second = steps(session, model, x, 4)
        session.save(tmp_path / "two")
        moved = everything(session)
    assert second == pytest.approx(expected, rel=0.02), "the same training, on other kernels"

    model, session, x = prepared(cpu, recipe)
    with session:
        with pytest.warns(UserWarning, match=LOST.format("npu", "cpu")):
            session.load(tmp_path / "two")
        assert session.steps == 8
        assert everything(session) == moved
        third = steps(session, model, x, 4)
    assert first[0] > second[0] > third[-1]


def test_the_devices_own_generator_goes_on(target: mpbackend.Target, tmp_path: Path) -> None:
    _, session, _ = prepared(target, FP16)
    with session:
        session.save(tmp_path / "one")
        wanted = torch.rand(8, device=target.device)
        session.load(tmp_path / "one")
        assert torch.equal(torch.rand(8, device=target.device), wanted)


def test_vendor_scaler_does_not_take_torchs_state(arch: str) -> None:
    """What the session's own state avoids: torch's scaler state has no key that torch_npu's wants."""
    torch_npu: Any = __import__("torch_npu")
    state = torch.amp.GradScaler("npu").state_dict()
    with pytest.raises(KeyError, match="dynamic"):
        torch_npu.npu.amp.GradScaler().load_state_dict(state)
