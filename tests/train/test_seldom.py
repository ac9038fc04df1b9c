"""Seldom paths of a session, each of which would be wrong without a word: steps without gradients, penalties in 16 bits, counts given twice, threads."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import mpbackend
from mpbackend.train.session import Session
from tests.support.training import Prepare

DYNAMIC = "fp32:loss_scale.mode=dynamic,loss_scale.init=1024"


def one(value: float = 1.0) -> tuple[nn.Linear, torch.optim.SGD]:
    """A model of one weight and its optimizer."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def pull(session: Session, model: nn.Linear, slope: float = 1.0) -> mpbackend.StepResult:
    session.backward((model.weight * slope).sum())
    return session.step()


def test_a_step_without_gradients_moves_neither_the_learning_rate_nor_the_scale(prepare: Prepare) -> None:
    model, optimizer = one()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    session = prepare(model, optimizer, f"{DYNAMIC},loss_scale.interval=1", scheduler=scheduler)
    assert pull(session, model).stepped
    other = nn.Parameter(torch.ones(1))
    session.backward(other.sum())
    assert not session.step().stepped
    assert (optimizer.param_groups[0]["lr"], session.loss_scale.value, session.loss_scale.streak) == (0.5, 2048.0, 0)


def test_after_a_step_with_a_penalty_a_broken_loss_is_called_broken(prepare: Prepare) -> None:
    model, optimizer = one()
    session = prepare(model, optimizer, DYNAMIC)
    x = torch.ones(1, 1, requires_grad=True)
    (slope,) = session.grad(model(x), x)
    session.backward(slope.square().sum())
    assert session.step().stepped
    assert pull(session, model, math.nan).reason == "forward_nonfinite"


def test_a_penalty_in_16_bits_is_unscaled_in_fp32(prepare: Prepare) -> None:
    session = prepare(*one(), DYNAMIC)
    x = torch.ones(1, dtype=torch.float16, requires_grad=True)
    (slope,) = session.grad((x * 2.0**-24).float() * 2.0**-8, x)  # 2^-32; under the scale 2^-22, which fp16 holds
    assert (slope.dtype, slope.item()) == (torch.float32, 2.0**-32)


def test_a_count_replaces_the_average(prepare: Prepare) -> None:
    model, optimizer = one()
    session = prepare(model, optimizer, "fp32", micro_batches=2, average=True)
    session.backward((model.weight * 3.0).sum())
    session.step(denominator=8)
    session.backward((model.weight * 5.0).sum())
    session.step(denominator=8)
    assert model.weight.item() == 0.0


def test_a_count_divides_what_was_unscaled_by_hand(prepare: Prepare) -> None:
    model, optimizer = one()
    session = prepare(model, optimizer, "fp32:loss_scale.mode=static,loss_scale.init=1024")
    session.backward((model.weight * 8.0).sum())
    session.unscale()
    session.step(denominator=8)
    assert model.weight.item() == 0.0


def test_the_norm_of_16_bit_sums_may_be_larger_than_their_format(prepare: Prepare) -> None:
    model = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(model.weight)
    session = prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), "fp16-master:grads=fp16,loss_scale.mode=static,loss_scale.init=1", clip_norm=1.0)
    with session.autocast():
        loss = (model.weight.float() * 40000.0).sum()
    session.backward(loss)
    result = session.step()
    assert float(result.grad_norm or 0) == 80000.0
    session.close()
    assert model.weight.tolist() == [pytest.approx([-0.5] * 4, rel=2**-20)]


def test_a_row_of_a_fused_run_holds_the_learning_rate_that_its_step_used(prepare: Prepare) -> None:
    model, _ = one()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    session = prepare(model, optimizer, DYNAMIC, scheduler=scheduler)
    for slope in (1.0, math.inf, 1.0, 1.0):
        pull(session, model, slope)
    assert [row.lr for row in session.drain()] == [1.0, 0.5, 0.5, 0.25]
    assert model.weight.item() == 1.0 - 1.0 - 0.5 - 0.25


def test_what_the_backend_executes_in_is_around_the_forward_and_the_backward_pass(
    prepare: Prepare, target: mpbackend.Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[bool] = []

    @contextmanager
    def execute(plan: mpbackend.Plan) -> Iterator[None]:
        entered.append(torch.is_autocast_enabled("cpu"))
        yield

    monkeypatch.setattr(target.backend, "execute", execute)
    model, optimizer = one()
    session = prepare(model, optimizer, "bf16")
    with session.autocast():
        loss = model(torch.ones(1, 1)).float().sum()
    assert entered == [False], "outside of autocast"
    session.backward(loss)
    assert entered == [False, False]


def test_threads_whose_forward_passes_overlap_keep_autocast_apart(prepare: Prepare) -> None:
    model, optimizer = one()
    session = prepare(model, optimizer, "bf16")
    entered, left = threading.Barrier(2, timeout=60), threading.Barrier(2, timeout=60)
    seen: list[torch.dtype] = []

    def work() -> None:
        with session.autocast():
            entered.wait()
            left.wait()
            seen.append(model(torch.ones(1, 1)).dtype)
        seen.append(model(torch.ones(1, 1)).dtype)

    thread = threading.Thread(target=work)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # what this thread must find again, and the other one must not
        with session.autocast():
            thread.start()
            entered.wait()
        seen.append(model(torch.ones(1, 1)).dtype)
        left.wait()
        thread.join()
    assert seen == [torch.bfloat16, torch.bfloat16, torch.float32]
