from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import mpbackend
from mpbackend.errors import PlanError, SessionError
from mpbackend.train.session import Session
from tests.support.training import Batch, Net, Prepare, make_batches, make_net


def run(session: Session, model: Net, batches: list[Batch]) -> list[mpbackend.StepResult]:
    results = []
    for x, y in batches:
        with session.autocast():
            loss = functional.mse_loss(model(x), y)
        session.backward(loss)
        results.append(session.step())
    return results


def raw(model: Net, optimizer: torch.optim.Optimizer, batches: list[Batch], dtype: torch.dtype | None, clip: float | None = None) -> None:
    for x, y in batches:
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = functional.mse_loss(model(x), y)
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()


def adamw(model: torch.nn.Module, lr: float = 1e-2) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=lr)


def equal(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True))


@pytest.mark.parametrize(("recipe", "dtype"), [("fp32", None), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_a_session_is_bit_equal_to_torch_by_hand(prepare: Prepare, recipe: str, dtype: torch.dtype | None, clip: float | None) -> None:
    mine, theirs = make_net(), make_net()
    raw(theirs, adamw(theirs), make_batches(8), dtype, clip)
    results = run(prepare(mine, adamw(mine), recipe, clip_norm=clip), mine, make_batches(8))
    assert all(result.stepped and result.reason == "" for result in results)
    assert equal(mine, theirs)


@pytest.mark.parametrize("scale", [256.0, 65536.0])
def test_a_power_of_two_scale_changes_no_bit_of_a_clipped_fp32_run(prepare: Prepare, scale: float) -> None:
    mine, theirs = make_net(), make_net()
    raw(theirs, adamw(theirs), make_batches(6), None, 0.05)
    run(prepare(mine, adamw(mine), f"fp32:loss_scale.mode=static,loss_scale.init={scale}", clip_norm=0.05), mine, make_batches(6))
    assert equal(mine, theirs)


def test_fp16_trains_with_dynamic_scaling_close_to_fp32(prepare: Prepare) -> None:
    half, full = make_net(), make_net()
    run(prepare(full, adamw(full), "fp32"), full, make_batches(30))
    results = run(prepare(half, adamw(half), "fp16:loss_scale.init=1024,loss_scale.interval=10"), half, make_batches(30))
    assert all(result.stepped for result in results)
    assert [result.loss_scale for result in results] == [1024.0] * 10 + [2048.0] * 10 + [4096.0] * 10
    x, y = make_batches(1, seed=9)[0]
    losses = [functional.mse_loss(model.eval()(x), y).item() for model in (half, full)]
    # 30 AdamW steps of lr 1e-2 move a weight by at most 0.3; fp16 rounds each operand to 2^-11, so the losses differ by far less than one of them
    assert abs(losses[0] - losses[1]) < 0.1 * losses[1]


def test_case_07_an_overflow_skips_one_step_halves_the_scale_and_leaves_weights_and_buffers(prepare: Prepare) -> None:
    model = make_net()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    session = prepare(model, optimizer, "fp16:loss_scale.init=1024", scheduler=scheduler)
    batches = make_batches(6)
    run(session, model, batches[:3])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x, y = batches[3]
    x = x.clone()
    x[0, 0] = math.inf
    lr = optimizer.param_groups[0]["lr"]
    (skipped,) = run(session, model, [(x, y)])
    assert (skipped.stepped, skipped.loss_scale, skipped.nonfinite) == (False, 1024.0, True)
    assert skipped.reason == "forward_nonfinite"
    assert session.loss_scale.value == 512.0
    assert optimizer.param_groups[0]["lr"] == lr
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items()), "weights or buffers changed"
    assert all(parameter.grad is None for parameter in model.parameters())
    after = run(session, model, batches[4:])
    assert [result.stepped for result in after] == [True, True]
    assert session.loss_scale.value == 512.0


def test_case_70_buffers_are_restored_even_when_the_very_first_step_overflows(prepare: Prepare) -> None:
    model = make_net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    session = prepare(model, adamw(model), "fp16")
    x, y = make_batches(1)[0]
    (skipped,) = run(session, model, [(x * math.inf, y)])
    assert not skipped.stepped
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_an_overflow_of_the_gradients_alone_is_told_from_one_of_the_loss(prepare: Prepare) -> None:
    model = make_net()
    session = prepare(model, adamw(model), "fp16:loss_scale.init=16777216")
    x, y = make_batches(1)[0]
    with session.autocast():
        loss = functional.mse_loss(model(x), y * 1000)
    session.backward(loss)
    result = session.step()
    assert (result.stepped, result.reason) == (False, "gradient_overflow")


def test_a_norm_that_overflows_while_every_gradient_is_finite_is_named(prepare: Prepare) -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    session = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32:loss_scale.mode=dynamic,loss_scale.init=1,loss_scale.min=1")
    session.backward((model.weight * torch.tensor([[1e25, 1e25]])).sum())
    assert session.step().reason == "norm_overflow"


@pytest.mark.parametrize("average", [False, True])
def test_micro_batches_sum_or_average(prepare: Prepare, average: bool) -> None:
    mine, theirs = torch.nn.Linear(8, 4), torch.nn.Linear(8, 4)
    theirs.load_state_dict(mine.state_dict())
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    batches = make_batches(8)
    for group in (batches[:4], batches[4:]):
        for x, y in group:
            functional.mse_loss(theirs(x), y).backward()
        if average:
            for parameter in theirs.parameters():
                assert parameter.grad is not None
                parameter.grad /= 4
        optimizer.step()
        optimizer.zero_grad()
    session = prepare(mine, torch.optim.SGD(mine.parameters(), lr=0.1), "fp32", micro_batches=4, average=average)
    results = [step_once(session, mine, batch) for batch in batches]
    assert [result.reason for result in results] == ["accumulating 1/4", "accumulating 2/4", "accumulating 3/4", ""] * 2
    assert equal(mine, theirs)


def step_once(session: Session, model: torch.nn.Module, batch: Batch) -> mpbackend.StepResult:
    with session.autocast():
        loss = functional.mse_loss(model(batch[0]), batch[1])
    session.backward(loss)
    return session.step()


def test_a_partial_group_is_closed_by_flush_and_averaged_by_what_was_seen(prepare: Prepare) -> None:
    mine, theirs = torch.nn.Linear(8, 4), torch.nn.Linear(8, 4)
    theirs.load_state_dict(mine.state_dict())
    batches = make_batches(2)
    for x, y in batches:
        (functional.mse_loss(theirs(x), y) / 2).backward()
    torch.optim.SGD(theirs.parameters(), lr=0.1).step()
    session = prepare(mine, torch.optim.SGD(mine.parameters(), lr=0.1), "fp32", micro_batches=4, average=True)
    assert session.flush() is None
    for batch in batches:
        step_once(session, mine, batch)
    result = session.flush()
    assert result is not None
    assert result.stepped
    assert equal(mine, theirs)


def test_a_denominator_divides_the_sum(prepare: Prepare) -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    start = model.weight.detach().clone()
    session = prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), "fp32")
    session.backward((model.weight * 8.0).sum())
    session.step(denominator=4)
    assert torch.equal(start - 2.0, model.weight.detach())


@pytest.mark.parametrize("denominator", [0, -2, math.inf, math.nan])
def test_a_denominator_must_be_finite_and_positive(prepare: Prepare, denominator: float) -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    session = prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), "fp32")
    session.backward(model.weight.sum())
    with pytest.raises(SessionError, match="denominator"):
        session.step(denominator=denominator)


def test_several_optimizers_step_together_and_share_one_norm(prepare: Prepare) -> None:
    model = make_net()
    optimizers = [torch.optim.SGD(model.first.parameters(), lr=0.1), adamw(model.last)]
    session = prepare(model, optimizers, "fp32", clip_norm=1e9)
    before = [model.first.weight.clone(), model.last.weight.clone(), model.norm.weight.clone()]
    (result,) = run(session, model, make_batches(1))
    after = [model.first.weight, model.last.weight, model.norm.weight]
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [False, False, True]
    assert isinstance(result.grad_norm, Tensor)


def test_unscaling_by_hand_happens_once(prepare: Prepare) -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    start = model.weight.detach().clone()
    session = prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), "fp32:loss_scale.mode=static,loss_scale.init=1024")
    session.backward((model.weight * 3.0).sum())
    (parameter,) = session.unscale()
    assert float(parameter.grad if parameter.grad is not None else 0) == 3.0
    session.unscale()
    with pytest.raises(SessionError, match="already unscaled"):
        session.backward((model.weight * 3.0).sum())
    session.step()
    assert torch.equal(start - 3.0, model.weight.detach())


def misuse_inside_autocast(session: Session, model: torch.nn.Module) -> None:
    with session.autocast():
        session.backward(model(torch.ones(1, 8)).sum())
        session.step()


def misuse_without_backward(session: Session, model: torch.nn.Module) -> None:
    session.step()


def misuse_after_close(session: Session, model: torch.nn.Module) -> None:
    session.close()
    with session.autocast():
        model(torch.ones(1, 8))


@pytest.mark.parametrize(
    ("misuse", "message"),
    [(misuse_inside_autocast, "inside session.autocast"), (misuse_without_backward, "no backward"), (misuse_after_close, "closed")],
)
def test_a_wrong_order_is_an_error(prepare: Prepare, misuse: Any, message: str) -> None:
    model = torch.nn.Linear(8, 4)
    session = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32")
    with pytest.raises(SessionError, match=message):
        misuse(session, model)


def test_parameters_in_another_format_are_refused_and_named(prepare: Prepare) -> None:
    model = make_net()
    model.first.half()
    with pytest.raises(SessionError, match=r"first\.weight is torch\.float16"):
        prepare(model, adamw(model), "fp16")


def test_a_recipe_that_only_plans_is_refused_with_what_trains(prepare: Prepare) -> None:
    model = make_net()
    with pytest.raises(PlanError, match="master=kahan: fp32 parameters lose nothing that it would keep; write master=none"):
        prepare(model, adamw(model), "bf16:master=kahan")


def test_a_step_without_gradients_is_named(prepare: Prepare) -> None:
    model = torch.nn.Linear(8, 4)
    other = torch.nn.Linear(8, 4)
    session = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32")
    session.backward(other(torch.ones(1, 8)).sum())
    result = session.step()
    assert (result.stepped, result.reason) == (False, "no gradients: 0 of 2 parameters have gradients")


@pytest.mark.parametrize("clip", [0.0, -1.0, math.inf, math.nan])
def test_a_clipping_norm_must_be_finite_and_positive(prepare: Prepare, clip: float) -> None:
    model = torch.nn.Linear(8, 4)
    with pytest.raises(SessionError, match="clip_norm"):
        prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", clip_norm=clip)


def test_autocast_may_be_nested_and_leaves_nothing_open(prepare: Prepare) -> None:
    model = torch.nn.Linear(8, 4)
    session = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16")
    with session.autocast():
        with session.autocast():
            assert model(torch.ones(1, 8)).dtype == torch.bfloat16
        assert model(torch.ones(1, 8)).dtype == torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")
    assert model(torch.ones(1, 8)).dtype == torch.float32


def test_a_16_bit_recipe_without_autocast_is_refused(prepare: Prepare) -> None:
    model = torch.nn.Linear(8, 4)
    session = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16")
    with pytest.raises(SessionError, match="not entered for this micro-batch"):
        session.backward(model(torch.ones(1, 8)).sum())


def test_nothing_runs_after_close(prepare: Prepare) -> None:
    model = torch.nn.Linear(8, 4)
    session = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32")
    session.backward(model(torch.ones(1, 8)).sum())
    session.close()
    with pytest.raises(SessionError, match="closed"):
        session.step()
    with pytest.raises(SessionError, match="closed"):
        session.backward(model(torch.ones(1, 8)).sum())


@pytest.mark.parametrize("options", [{"micro_batches": 4}, {"on_unsupported": "nearest"}])
def test_what_a_plan_already_says_cannot_be_said_otherwise(target: mpbackend.Target, options: dict[str, Any]) -> None:
    model = torch.nn.Linear(8, 4)
    with pytest.raises(SessionError, match="other values beside it"):
        target.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=target.plan("fp32"), **options)
    with target.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=target.plan("fp32", micro_batches=4), micro_batches=4):
        pass


@pytest.mark.parametrize("count", [0, 2])
def test_exactly_one_of_recipe_and_plan_is_given(target: mpbackend.Target, count: int) -> None:
    model = torch.nn.Linear(8, 4)
    given: dict[str, Any] = {"recipe": "fp32", "plan": target.plan("fp32")} if count else {}
    with pytest.raises(SessionError, match="exactly one"):
        target.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), **given)


def test_a_scheduler_that_needs_a_metric_is_refused(prepare: Prepare) -> None:
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(SessionError, match="ReduceLROnPlateau"):
        prepare(model, optimizer, "fp32", scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))


def test_leaving_with_open_micro_batches_warns(target: mpbackend.Target) -> None:
    model = torch.nn.Linear(8, 4)
    with (
        pytest.warns(UserWarning, match="1 of 2 micro-batches is open"),
        target.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", micro_batches=2) as session,
    ):
        step_once(session, model, make_batches(1)[0])
