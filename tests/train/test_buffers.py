from __future__ import annotations

import pytest
import torch
from torch import nn

from mpbackend.train.buffers import BufferGuard


class Stateful(nn.Module):
    """A BatchNorm, a counter of its own, a buffer that only later steps change, and one that nothing changes."""

    counter: torch.Tensor
    late: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("counter", torch.zeros((), dtype=torch.long))
        self.register_buffer("late", torch.zeros(3))
        self.register_buffer("fixed", torch.ones(1000))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.counter += 1
        if int(self.counter) > 2:
            self.late += 1
        own = nn.functional.batch_norm(x, self.get_buffer("mean"), self.get_buffer("var"), training=True)
        out: torch.Tensor = self.norm(own)
        return out


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def test_every_kind_of_buffer_is_restored_in_every_window() -> None:
    model = Stateful()
    guard = BufferGuard(model)
    for step in range(6):
        guard.open_window()
        before = snapshot(model)
        model(torch.randn(8, 4) + step)
        if step in (0, 2, 5):
            restored = guard.restore()
            late_is_new = step == 2  # its first change comes in this window, after windows in which nothing moved it
            after = snapshot(model)
            for name, value in before.items():
                assert torch.equal(after[name], value) or (late_is_new and name == "late"), (step, name)
            assert ("fixed" in restored) == (step == 0)
        else:
            guard.close_window()


def test_the_budget_keeps_normalization_first_and_names_what_it_leaves_out() -> None:
    guard = BufferGuard(Stateful(), budget=100)
    assert guard.left_out == ["fixed"]
    guard = BufferGuard(Stateful(), budget=40)
    assert set(guard.left_out) == {"counter", "late", "fixed", "mean", "var"}


def test_a_verdict_on_the_device_restores_and_learns_without_being_read() -> None:
    model = Stateful()
    guard = BufferGuard(model)
    for step in range(7):
        guard.open_window()
        watched = set(guard._watched)
        before = snapshot(model)
        model(torch.randn(8, 4) + step)
        moved = snapshot(model)
        skipped = step in (0, 3, 6)
        guard.restore_where(torch.tensor(skipped))
        after = snapshot(model)
        for name in before:
            late_is_new = step == 3 and name == "late" and name not in watched
            assert torch.equal(after[name], before[name] if skipped and not late_is_new else moved[name]), (step, name)
        assert ("fixed" in watched) == (step < 2), "nothing is learned from the skipped first step, and that it stands still from the second"


def test_what_the_budget_leaves_out_is_named_after_a_deferred_step_too() -> None:
    model = Stateful()
    guard = BufferGuard(model, budget=40)
    guard.open_window()
    model(torch.randn(8, 4))
    guard.restore_where(torch.tensor(False))
    with pytest.warns(UserWarning, match="over the 40 B budget"):
        guard.open_window()
