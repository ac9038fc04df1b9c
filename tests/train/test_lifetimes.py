"""What happens around a session's life: optimizers and groups that change, exceptions that are caught, sessions that end or were never made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import mpbackend
from mpbackend.errors import SessionError
from mpbackend.train.session import Session
from tests.support.training import Prepare

DYNAMIC = "fp32:loss_scale.mode=dynamic,loss_scale.init=1024"


def one(value: float = 1.0, kind: Any = torch.optim.SGD, **options: Any) -> tuple[nn.Linear, torch.optim.Optimizer]:
    """A model of one weight and its optimizer."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return model, kind(model.parameters(), **{"lr": 1.0, **options})


def pull(session: Session, *slopes: tuple[torch.Tensor, float]) -> mpbackend.StepResult:
    with session.autocast():
        loss = torch.stack([(weight * slope).sum() for weight, slope in slopes]).sum()
    session.backward(loss)
    return session.step()


@pytest.mark.parametrize("recipe", ["fp32", DYNAMIC, "bf16-master"])
def test_a_group_that_is_replaced_by_another_of_the_same_size_is_trained_and_cleared(prepare: Prepare, recipe: str) -> None:
    model = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(3)])
    weights = list(model.parameters())
    for weight in weights:
        nn.init.ones_(weight)
    optimizer = torch.optim.SGD([{"params": weights[:1]}, {"params": weights[1:2]}], lr=1.0)
    session = prepare(model, optimizer, recipe)
    assert pull(session, (weights[0], 0.5), (weights[1], 0.5))
    del optimizer.param_groups[1]
    optimizer.add_param_group({"params": weights[2:]})
    for _ in range(2):
        assert pull(session, (weights[0], 0.0), (weights[2], 0.25))
        assert weights[2].grad is None
    assert [weight.item() for weight in weights] == [0.5, 0.5, 0.5]


def test_a_limit_that_is_set_later_holds_from_the_next_step(prepare: Prepare) -> None:
    model, optimizer = one()
    session = prepare(model, optimizer, DYNAMIC)
    pull(session, (model.weight, 0.5))
    optimizer.param_groups[0]["clip_value"] = 0.25
    pull(session, (model.weight, 4.0))
    assert model.weight.item() == 0.25


@pytest.mark.parametrize("kind", ["fused", "foreach"])
def test_step_hooks_of_the_user_see_unscaled_gradients(prepare: Prepare, kind: str) -> None:
    model, optimizer = one(**{kind: True})
    session = prepare(model, optimizer, DYNAMIC, clip_norm=1e9)
    seen: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(float(model.weight.grad or 0)))
    pull(session, (model.weight, 3.0))
    assert seen == [3.0]
    assert model.weight.item() == -2.0


@pytest.mark.parametrize("average", [False, True])
def test_a_denominator_replaces_the_average_after_unscaling_by_hand_too(prepare: Prepare, average: bool) -> None:
    model, optimizer = one()
    session = prepare(model, optimizer, DYNAMIC, micro_batches=2, average=average)
    pull(session, (model.weight, 4.0))
    session.backward((model.weight * 4.0).sum())
    session.unscale()
    result = session.step(denominator=32)
    assert (result.grad_norm, model.weight.item()) == (0.25, 0.75)


@pytest.mark.parametrize("kind", ["fused", "foreach"])
def test_a_scheduler_that_raises_leaves_a_session_that_goes_on(prepare: Prepare, kind: str) -> None:
    model, optimizer = one(**{kind: True})
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=2)
    session = prepare(model, optimizer, DYNAMIC, scheduler=scheduler)
    pull(session, (model.weight, 0.0))
    with pytest.raises(ValueError, match="total steps"):
        for _ in range(3):
            pull(session, (model.weight, 0.0))
    steps = session.steps
    optimizer.param_groups[0]["lr"] = 1.0
    session._schedule.schedulers = ()
    result = pull(session, (model.weight, 0.5))
    assert (result.stepped, float(result.grad_norm or 0), session.steps) == (True, 0.5, steps + 1)


def test_a_session_ends_in_order_although_its_scheduler_raises(target: mpbackend.Target) -> None:
    model, optimizer = one(fused=True)
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=1)
    with pytest.raises(ValueError, match="total steps"), target.prepare(model, optimizer, DYNAMIC, scheduler=scheduler) as session:
        for _ in range(2):  # the verdict on the second comes at the end
            pull(session, (model.weight, 0.0))
    optimizer.step()  # no longer the session's
    with pytest.raises(SessionError, match="closed"):
        session.step()


def made(optimizer: torch.optim.Optimizer, kind: str) -> Any:
    """Return a scheduler that is made of others."""
    parts = [lr_scheduler.ConstantLR(optimizer, factor=0.5, total_iters=1), lr_scheduler.ExponentialLR(optimizer, gamma=0.5)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[1]) if kind == "sequential" else lr_scheduler.ChainedScheduler(parts)


@pytest.mark.parametrize("kind", ["sequential", "chained"])
def test_schedulers_that_are_made_of_others_step_and_are_watched(prepare: Prepare, kind: str) -> None:
    rates = []
    for by_session in (True, False):
        model, optimizer = one()
        scheduler = made(optimizer, kind)
        seen = []
        session = prepare(model, optimizer, "fp32", scheduler=scheduler) if by_session else None
        for _ in range(4):
            seen.append(optimizer.param_groups[0]["lr"])
            if session is not None:
                pull(session, (model.weight, 0.0))
            else:
                optimizer.step()
                scheduler.step()
        rates.append(seen)
        if session is not None:
            scheduler.step()
            with pytest.raises(SessionError, match="stepped outside"):
                pull(session, (model.weight, 0.0))
    assert rates[0] == rates[1]


@pytest.mark.parametrize("way", ["frozen", "added"])
def test_a_parameter_that_joins_later_gets_a_momentum_of_its_own(prepare: Prepare, way: str) -> None:
    found = []
    for kind in ("fused", "foreach"):
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(2)])
        first, second = model.parameters()
        groups = [{"params": [first]}, *([{"params": [second]}] if way == "frozen" else [])]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, **{kind: True})
        second.requires_grad_(way == "added")
        session = prepare(model, optimizer, DYNAMIC)
        for _ in range(2):
            pull(session, (first, 1.0))
        second.requires_grad_(True)
        if way == "added":
            optimizer.add_param_group({"params": [second]})
        assert not pull(session, (first, 1.0), (second, float("inf")))
        assert pull(session, (first, 1.0), (second, 1.0))
        found.append(second.detach().clone())
    assert torch.allclose(found[0], found[1], rtol=0, atol=2**-24)  # half an ulp of weights below 1


@pytest.mark.parametrize(("recipe", "cast"), [("fp32", torch.bfloat16), ("bf16", torch.bfloat16), ("fp16:loss_scale.init=1024", torch.float16)])
def test_a_model_that_is_cast_in_a_live_session_is_refused(prepare: Prepare, recipe: str, cast: torch.dtype) -> None:
    model = nn.Linear(8, 4)
    session = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), recipe)
    model.to(cast)
    with session.autocast():
        loss = model(torch.ones(2, 8, dtype=cast)).float().mean()
    session.backward(loss)
    with pytest.raises(SessionError, match=r"was cast from torch\.float32 to"):
        session.step()


def test_a_gradient_hook_under_a_loss_scale_is_warned_of(prepare: Prepare) -> None:
    model, optimizer = one()
    model.weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    with pytest.warns(UserWarning, match="sees gradients multiplied with the loss scale"):
        prepare(model, optimizer, DYNAMIC)
    prepare(*one(), "fp32")


def test_a_sparse_gradient_is_refused_when_it_comes(prepare: Prepare) -> None:
    table = nn.Parameter(torch.ones(4, 2))
    model = nn.ParameterList([table])
    session = prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), "fp32", clip_norm=1.0)
    session.backward(nn.functional.embedding(torch.tensor([1, 2]), table, sparse=True).sum())
    with pytest.raises(SessionError, match="a sparse gradient"):
        session.step()


def test_after_flush_the_next_forward_pass_must_be_under_autocast(prepare: Prepare) -> None:
    model, optimizer = one()
    session = prepare(model, optimizer, "bf16", micro_batches=2)
    with session.autocast():
        loss = (model.weight * 1.0).sum()
        with pytest.raises(SessionError, match=r"flush\(\): called inside session\.autocast"):
            session.flush()
    session.backward(loss)
    assert session.flush()
    with pytest.raises(SessionError, match="not entered for this micro-batch"):
        session.backward((model.weight * 1.0).sum())


def test_an_optimizer_that_raises_after_another_has_stepped_says_so(prepare: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    models = nn.ModuleList([one()[0], one()[0]])
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    session = prepare(models, optimizers, "fp32")
    monkeypatch.setattr(optimizers[1], "step", lambda: 1 / 0)
    first, second = models.parameters()
    with pytest.raises(ZeroDivisionError) as caught:
        pull(session, (first, 1.0), (second, 1.0))
    assert caught.value.__notes__ == ["mpbackend: 1 of 2 optimizers had made this step already; load a checkpoint to go on"]


def test_loading_and_evaluating_only_is_no_fault(target: mpbackend.Target, tmp_path: Path) -> None:
    model, optimizer = one()
    with target.prepare(model, optimizer, "fp32") as session:
        pull(session, (model.weight, 1.0))
        session.save(tmp_path / "ckpt")
    with target.prepare(model, optimizer, "fp32") as session:
        session.load(tmp_path / "ckpt")


@pytest.mark.parametrize("options", [{"stateful": {"a": 3}}, {"clip_norm": -1.0}])
def test_a_prepare_that_fails_leaves_no_record_behind(target: mpbackend.Target, tmp_path: Path, options: dict[str, Any]) -> None:
    model, optimizer = one()
    with pytest.raises(SessionError):
        target.prepare(model, optimizer, "fp32", record=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()
    target.prepare(model, optimizer, "fp32", record=tmp_path / "run").close()


def test_a_session_that_cannot_be_made_takes_its_record_back(target: mpbackend.Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = one()
    with monkeypatch.context() as patch:
        patch.setattr("mpbackend.target.Session", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            target.prepare(model, optimizer, "fp32", record=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_rows_can_be_drained_after_the_end(target: mpbackend.Target, tmp_path: Path) -> None:
    model, optimizer = one()
    with target.prepare(model, optimizer, "fp32", record=tmp_path / "run") as session:
        pull(session, (model.weight, 1.0))
    assert [row.step for row in session.drain()] == [1]
    assert "parameters" in session.account()
