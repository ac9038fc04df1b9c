"""A session on the simulated device: what trains, in which formats, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import mpbackend
from mpbackend.errors import PlanError

GRANTED = {
    "ascend-910a": ("fp16",),
    "ascend-310p": ("fp16",),
    "ascend-a2": ("fp32", "fp32-fast", "bf16", "fp16"),
    "ascend-a3": ("fp32", "fp32-fast", "bf16", "fp16"),
    "ascend-950": ("fp32", "fp32-fast", "bf16", "fp16"),
}
RECIPES = ("fp32", "fp32-fast", "bf16", "fp16")
DTYPES = {"fp32": torch.float32, "fp32-fast": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Net(nn.Module):
    """A convolution, a norm and two linear layers; remembers the format of what the first of these made."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.LayerNorm(256)
        self.hidden = nn.Linear(256, 32)
        self.out = nn.Linear(32, 1)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.hidden(self.norm(self.conv(x).flatten(1)))
        self.seen.append(hidden.dtype)
        out: torch.Tensor = self.out(torch.tanh(hidden))
        return out


def train(target: mpbackend.Target, recipe: str, record: Path, steps: int = 6) -> tuple[list[float], Net]:
    torch.manual_seed(3)
    model = Net().to(target.device)
    x = torch.randn(16, 1, 8, 8).to(target.device)
    wanted = x.flatten(1).sum(1, keepdim=True) / 8
    losses = []
    with target.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), recipe, clip_norm=1.0, record=record) as session:
        for _ in range(steps):
            with session.autocast():
                loss = nn.functional.mse_loss(model(x), wanted)
            session.backward(loss)
            assert session.step().stepped
            losses.append(loss.item())
    return losses, model


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_trains_or_is_refused_with_a_source(recipe: str, target: mpbackend.Target, arch: str, tmp_path: Path) -> None:
    if recipe not in GRANTED[arch]:
        with pytest.raises(PlanError, match=r"absent|computed in fp16") as refused:
            target.plan(recipe)
        assert "@" in str(refused.value), "cites repository and commit"
        return
    losses, model = train(target, recipe, tmp_path / "run")
    assert losses[-1] < 0.7 * losses[0]
    assert set(model.seen) == {DTYPES[recipe]}
    record = mpbackend.load_record(tmp_path / "run").record
    assert record.run.kind == "simulated"
    assert record.environment["torch_npu"].startswith("2.13.0")
    assert record.environment["simulator"]
    assert record.environment["TASK_QUEUE_ENABLE"] == "0"
    assert (record.memory["peak"] or 0) > 0


def test_case_14_bf16_is_decided_in_the_plan(target: mpbackend.Target, arch: str) -> None:
    plan = target.plan("bf16", on_unsupported="nearest")
    decision = plan.decision("compute.forward", "matmul")
    if "bf16" in GRANTED[arch]:
        assert (decision.granted, plan.granted) == ("bf16", "bf16")
        return
    assert decision.granted == "fp16"
    assert plan.effective.loss_scale.mode == "dynamic"
    assert "aclnnMatmul" in decision.source or "bf16 was refused" in decision.reason
    with torch.autocast("npu", dtype=torch.float16):
        assert torch.is_autocast_enabled("npu")
    with pytest.warns(UserWarning, match="autocast"), torch.autocast("npu", dtype=torch.bfloat16):
        assert not torch.is_autocast_enabled("npu"), "what would have happened: a warning, and fp32"


def test_fp16_skips_and_backs_off_like_anywhere(target: mpbackend.Target) -> None:
    """The first steps overflow with a scale of 2^24; how an overflow shows is the device's, what the session does is not."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1).to(target.device)
    x = torch.full((4, 8), 4.0).to(target.device)
    before = model.weight.detach().cpu().clone()
    with target.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3), "fp16:loss_scale.init=16777216") as session:
        results = []
        for _ in range(16):
            with session.autocast():
                loss = model(x).float().sum()
            session.backward(loss)
            results.append(session.step())
            if results[-1].stepped:
                break
    skipped = [result for result in results if not result.stepped]
    assert skipped, "2^24 is beyond fp16"
    assert {result.reason for result in skipped} == {"gradient_overflow"}
    assert results[-1].stepped
    assert results[-1].loss_scale == 2.0 ** (24 - len(skipped))
    assert results[-1].loss_scale * 16.0 <= 65504 < results[-1].loss_scale * 32.0, "the gradient of a weight is 16"
    moved = (before - model.weight.detach().cpu()) / 1e-3
    assert torch.allclose(moved, torch.full_like(moved, 16.0), rtol=1e-3)
