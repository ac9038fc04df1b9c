"""How often the host reads a tensor of the device in a healthy step: a read waits for everything that is queued."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import mpbackend

DYNAMIC = "fp16:loss_scale.init=1024"


class Reads(TorchDispatchMode):
    """Counts what brings a tensor of the device to the host: scalar reads, and copies of any kind."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch leaves it unannotated
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        source = args[1] if name in ("copy_", "_copy_from", "_copy_from_and_resize") and len(args) > 1 else (args[0] if args else None)
        out = func(*args, **(kwargs or {}))
        if isinstance(source, torch.Tensor) and source.device.type != "cpu":
            to_host = isinstance(out, torch.Tensor) and out.device.type == "cpu"
            if name in ("_local_scalar_dense", "item", "is_nonzero", "equal") or to_host:
                self.names.append(name)
        return out


def count(target: mpbackend.Target, recipe: str, kind: dict[str, bool], steps: int = 100) -> int:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)).to(target.device)
    x, wanted = torch.randn(6, 8).to(target.device), torch.randn(6, 4).to(target.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, **kind)
    with target.prepare(model, optimizer, recipe, clip_norm=1.0) as session, Reads() as reads:
        for _ in range(steps):
            with session.autocast():
                loss = nn.functional.mse_loss(model(x), wanted)
            session.backward(loss)
            session.step()
        found = len(reads.names)
    assert session.steps == steps
    return found


@pytest.mark.parametrize(("recipe", "kind", "reads"), [(DYNAMIC, {"foreach": True}, 100), (DYNAMIC, {"foreach": False}, 100)])
def test_a_scaled_step_reads_one_verdict(target: mpbackend.Target, recipe: str, kind: dict[str, bool], reads: int) -> None:
    assert count(target, recipe, kind) == reads


def test_an_unscaled_step_reads_nothing(target: mpbackend.Target, arch: str) -> None:
    if arch in ("ascend-910a", "ascend-310p"):
        pytest.skip("fp32 is converted there and fp16 alone trains")
    assert count(target, "fp32", {"foreach": True}) == 0


def test_a_fused_step_reads_nothing(target: mpbackend.Target) -> None:
    assert count(target, DYNAMIC, {"fused": True}) == 0
