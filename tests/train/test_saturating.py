"""A device that saturates, modeled on the host: an overflow becomes a number, and only a status register tells of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import mpbackend
from mpbackend.train.session import Session
from tests.support.training import Prepare

LARGEST = 65504.0
DYNAMIC = "fp32:loss_scale.mode=dynamic,loss_scale.init=65536"


class Register:
    """The status register: remembers an overflow until it is cleared."""

    def __init__(self) -> None:
        self.set = False

    def clear(self) -> None:
        """Forget."""
        self.set = False

    def found(self) -> torch.Tensor:
        """Tell."""
        return torch.tensor(self.set)


class Saturating(torch.autograd.Function):
    """Multiplies with ``slope``; its gradient is fp16 on a device that makes 65504 of infinity and 0 of NaN."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, slope: float, register: Register) -> torch.Tensor:
        """Multiply."""
        ctx.slope, ctx.register = slope, register
        return x * slope

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Saturate, and set the register when that changed something."""
        exact = (grads[0] * ctx.slope).half()
        ctx.register.set |= not bool(exact.isfinite().all())
        return torch.nan_to_num(exact, nan=0.0, posinf=LARGEST, neginf=-LARGEST).float(), None, None


@pytest.fixture
def register(target: mpbackend.Target, monkeypatch: pytest.MonkeyPatch) -> Register:
    """The register of the target, which has one for this test."""
    held = Register()
    monkeypatch.setattr(target.backend, "overflow", lambda device: held)
    return held


def zero(**options: Any) -> tuple[nn.Linear, torch.optim.SGD]:
    """A model of one weight, 0, and its optimizer."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model, torch.optim.SGD(model.parameters(), lr=1.0, **options)


def pull(session: Session, model: nn.Linear, slope: float, register: Register) -> mpbackend.StepResult:
    """One micro-batch with the gradient ``slope``."""
    with session.autocast():
        loss = Saturating.apply(model.weight, slope, register).sum()  # type: ignore[no-untyped-call] # torch leaves it unannotated
    session.backward(loss)
    return session.step()


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_case_53_the_scale_comes_down_until_the_gradient_is_true(prepare: Prepare, register: Register, options: dict[str, Any]) -> None:
    model, optimizer = zero(**options)
    session = prepare(model, optimizer, DYNAMIC)
    results = [pull(session, model, 50.0, register) for _ in range(7)]  # 50 * 2^10 is the first that fp16 holds
    assert [(result.stepped, result.reason) for result in results] == [(False, "gradient_overflow")] * 6 + [(True, "")]
    assert (session.loss_scale.value, model.weight.item()) == (1024.0, -50.0)


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}])
def test_an_overflow_of_an_earlier_micro_batch_is_not_forgotten(prepare: Prepare, register: Register, options: dict[str, Any]) -> None:
    model, optimizer = zero(**options)
    session = prepare(model, optimizer, DYNAMIC, micro_batches=2)
    pull(session, model, 50.0, register)
    assert not pull(session, model, 2.0**-16, register).stepped
    assert model.weight.item() == 0.0


@pytest.mark.parametrize("by_hand", [False, True])
def test_what_the_user_clips_after_an_overflow_does_not_hide_it(prepare: Prepare, register: Register, by_hand: bool) -> None:
    model, optimizer = zero()
    session = prepare(model, optimizer, DYNAMIC, **({} if by_hand else {"clip_value": 0.5}))
    session.backward(Saturating.apply(model.weight, 50.0, register).sum())  # type: ignore[no-untyped-call] # as above
    if by_hand:
        torch.nn.utils.clip_grad_value_(session.unscale(), 0.5)
    assert not session.step().stepped
