"""Orders of calls that are silent faults elsewhere: gradients touched, cleared, mixed or left over, and closures."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import mpbackend
from mpbackend.errors import SessionError
from mpbackend.observe.record import load_record
from mpbackend.train.session import Session
from tests.support.training import Prepare, make_batches, make_net

SCALED = "fp32:loss_scale.mode=static,loss_scale.init=65536"
DYNAMIC = "fp32:loss_scale.mode=dynamic,loss_scale.init=65536"


def one(value: float = 1.0, **options: Any) -> tuple[nn.Linear, torch.optim.SGD]:
    """A model of one weight and its optimizer."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return model, torch.optim.SGD(model.parameters(), lr=1.0, **options)


def pull(session: Session, model: nn.Linear, slope: float = 1.0) -> None:
    with session.autocast():
        loss = (model.weight * slope).sum()
    session.backward(loss)


def test_case_02_clipping_scaled_gradients_by_hand_is_refused(prepare: Prepare) -> None:
    model, optimizer = one()
    session = prepare(model, optimizer, SCALED)
    pull(session, model, 0.1)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(SessionError, match=r"step\(\): the gradient of parameter weight was changed while it was multiplied with the loss scale"):
        session.step()


@pytest.mark.parametrize("recipe", [SCALED, DYNAMIC])
def test_case_02_clipping_sees_unscaled_norms(prepare: Prepare, recipe: str) -> None:
    model, optimizer = one()
    session = prepare(model, optimizer, recipe, clip_norm=10.0)
    pull(session, model, 0.141)
    result = session.step()
    assert float(result.grad_norm or 0) == pytest.approx(0.141, rel=2**-23)
    assert model.weight.item() == pytest.approx(1.0 - 0.141, abs=2**-24)


def test_a_scaled_gradient_replaced_by_hand_is_refused(prepare: Prepare) -> None:
    model, optimizer = one()
    session = prepare(model, optimizer, SCALED)
    pull(session, model)
    model.weight.grad = torch.ones(1, 1)
    with pytest.raises(SessionError, match="was changed while it was multiplied"):
        session.step()


def test_an_unscaled_gradient_may_be_changed_by_hand(prepare: Prepare) -> None:
    model, optimizer = one()
    session = prepare(model, optimizer, "fp32")
    pull(session, model, 4.0)
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
    session.step()
    assert model.weight.item() == 0.5


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("moment", ["between micro-batches", "before step"])
def test_clearing_gradients_in_the_middle_of_a_step_is_refused(prepare: Prepare, moment: str, to_none: bool) -> None:
    model, optimizer = one()
    session = prepare(model, optimizer, SCALED, micro_batches=2)
    pull(session, model)
    if moment == "before step":
        session.step()
        pull(session, model)
    else:
        session.step()
    optimizer.zero_grad(set_to_none=to_none)
    with pytest.raises(SessionError, match=r"was (cleared|changed)"):
        session.step() if moment == "before step" else pull(session, model)
    for _ in range(2):  # the step was dropped, and the next one is whole
        pull(session, model, 0.5)
        result = session.step()
    assert (result.stepped, model.weight.item()) == (True, 0.0)


def test_a_gradient_left_by_somebody_else_is_refused_before_it_is_used(prepare: Prepare) -> None:
    model, optimizer = one()
    session = prepare(model, optimizer, "fp32")
    (model.weight * 3.0).sum().backward()
    with pytest.raises(SessionError, match=r"parameter weight had a gradient before the first backward\(\) of this step"):
        pull(session, model)
    optimizer.zero_grad()
    pull(session, model)
    session.step()
    assert model.weight.item() == 0.0


def test_two_models_that_train_against_each_other_keep_their_gradients_apart(prepare: Prepare) -> None:
    generator, optimizer_g = one(2.0)
    critic, optimizer_c = one(3.0)
    session_g, session_c = prepare(generator, optimizer_g, SCALED), prepare(critic, optimizer_c, DYNAMIC)
    session_g.backward((generator.weight * critic.weight).sum())
    session_g.step()
    with pytest.raises(SessionError, match="another session or a plain backward"):
        session_c.backward((critic.weight * generator.weight.detach()).sum())
    optimizer_c.zero_grad()
    critic.requires_grad_(False)
    session_g.backward((generator.weight * critic.weight).sum())
    session_g.step()
    critic.requires_grad_(True)
    session_c.backward((critic.weight * generator.weight.detach()).sum())
    session_c.step()
    assert (generator.weight.item(), critic.weight.item()) == (2.0 - 3.0 - 3.0, 3.0 + 4.0)


def test_two_models_and_optimizers_in_one_session_share_one_verdict(prepare: Prepare) -> None:
    models = nn.ModuleList([one()[0], one()[0]])
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    session = prepare(models, optimizers, DYNAMIC)
    weights = list(models.parameters())
    session.backward(weights[0].sum() + (weights[1] * math.inf).sum() * 0 + (weights[1] * 1e38).sum())
    result = session.step()
    assert (result.stepped, session.loss_scale.value) == (False, 32768.0)
    assert [weight.item() for weight in weights] == [1.0, 1.0]


def test_the_optimizer_that_got_no_gradient_is_named(prepare: Prepare) -> None:
    models = nn.ModuleList([one()[0], one()[0]])
    session = prepare(models, [torch.optim.SGD(model.parameters(), lr=1.0) for model in models], "fp32")
    first, second = models.parameters()
    session.backward(first.sum())
    result = session.step()
    assert (result.stepped, result.idle) == (True, ("optimizer 1 (SGD): 0 of 1 parameters have gradients",))
    session.backward(first.sum() + second.sum())
    assert session.step().idle == ()


def test_case_04_an_optimizer_that_never_gets_a_gradient_is_an_error_in_the_end(target: mpbackend.Target) -> None:
    models = nn.ModuleList([one()[0], one()[0]])
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    with pytest.raises(SessionError, match=r"no parameter of optimizer 1 \(SGD\) ever got a gradient"), target.prepare(models, optimizers, "fp32") as session:
        session.backward(next(models.parameters()).sum())
        assert session.step().idle


def test_a_closure_given_to_step_is_refused(prepare: Prepare) -> None:
    model, optimizer = one()
    session = prepare(model, optimizer, "fp32")
    pull(session, model)
    with pytest.raises(SessionError, match=r"step\(closure\): a closure"):
        session.step(lambda: 1.0)
    assert session.step().stepped


def test_backward_inside_autocast_runs_outside_it_and_is_counted(prepare: Prepare, tmp_path: Any) -> None:
    seen: list[bool] = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1.0

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            seen.append(torch.is_autocast_enabled("cpu"))
            return grads[0]

    model = nn.Linear(8, 4)
    session = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16", record=tmp_path / "run")
    with session.autocast():
        session.backward(Probe.apply(model(torch.ones(1, 8))).float().sum())  # type: ignore[no-untyped-call] # torch leaves it unannotated
        assert torch.is_autocast_enabled("cpu")
    session.step()
    session.close()
    assert seen == [False]
    assert load_record(tmp_path / "run").record.counters == {"backward_inside_autocast": 1}


def test_a_backward_that_fails_leaves_no_gradient_behind(prepare: Prepare) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1.0

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise MemoryError("out of memory")

    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    session = prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), "fp32", micro_batches=2)
    x = torch.ones(1, 1)
    session.backward(model(x).sum())
    session.step()
    with pytest.raises(MemoryError) as caught:
        session.backward(model[1](Fails.apply(model[0](x))).sum())  # type: ignore[no-untyped-call] # as above
    assert "the gradients of this step were dropped" in caught.value.__notes__[0]
    assert all(parameter.grad is None for parameter in model.parameters())
    session.backward(model(x).sum())
    assert session.step().reason == "accumulating 1/2"


@pytest.mark.parametrize("recipe", ["fp32", SCALED])
def test_a_loss_without_a_graph_is_refused_and_keeps_the_earlier_micro_batches(prepare: Prepare, recipe: str) -> None:
    model, optimizer = one()
    session = prepare(model, optimizer, recipe, micro_batches=2)
    pull(session, model, 2.0)
    session.step()
    with torch.no_grad():
        loss = model.weight.sum()
    with pytest.raises(SessionError, match="the loss has no graph"):
        session.backward(loss)
    pull(session, model, 3.0)
    assert session.step().stepped
    assert model.weight.item() == -4.0


def test_a_scheduler_that_is_stepped_twice_is_refused(prepare: Prepare) -> None:
    model, optimizer = one()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    session = prepare(model, optimizer, "fp32", scheduler=scheduler)
    pull(session, model)
    session.step()
    scheduler.step()
    pull(session, model)
    with pytest.raises(SessionError, match=r"StepLR\.step\(\): it was stepped outside the session"):
        session.step()


def test_a_gradient_penalty_is_free_of_the_loss_scale(prepare: Prepare) -> None:
    weights = []
    for recipe in ("fp32", DYNAMIC):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        session = prepare(model, torch.optim.SGD(model.parameters(), lr=0.5), recipe)
        x = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
        for _ in range(3):
            with session.autocast():
                out = model(x)
                (slope,) = session.grad(out, x)
                loss = out.mean() + (slope.norm(dim=1) - 1).square().mean()
            session.backward(loss)
            assert session.step().stepped
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_a_penalty_that_overflows_under_the_scale_is_no_fault_of_the_forward_pass(prepare: Prepare) -> None:
    model, optimizer = one(1e34)
    session = prepare(model, optimizer, DYNAMIC)
    x = torch.ones(1, 1, requires_grad=True)
    (slope,) = session.grad(model(x), x)
    session.backward((slope.sum() * 1e-34).square())
    result = session.step()
    assert (result.stepped, result.reason, session.loss_scale.streak) == (False, "gradient_overflow", 0)


def test_a_penalty_on_an_fp16_output_fits_its_own_gradient(prepare: Prepare) -> None:
    model, optimizer = one()
    session = prepare(model, optimizer, "fp16:loss_scale.init=16777216")
    x = torch.ones(1, 1, requires_grad=True)
    with session.autocast():
        (slope,) = session.grad(model(x), x)
    assert slope.item() == 1.0


def test_an_unused_input_of_a_penalty_gets_zeros_when_that_is_allowed(prepare: Prepare) -> None:
    model, optimizer = one()
    session = prepare(model, optimizer, DYNAMIC)
    x, other = torch.ones(1, 1, requires_grad=True), torch.ones(2, requires_grad=True)
    assert [gradient.tolist() for gradient in session.grad([model(x), model(x)], [x, other], allow_unused=True)] == [[[2.0]], [0.0, 0.0]]
    with pytest.raises(RuntimeError, match="not have been used"):
        session.grad(model(x), other)


def test_values_are_clipped_after_unscaling(prepare: Prepare) -> None:
    model, optimizer = one()
    session = prepare(model, optimizer, DYNAMIC, clip_value=0.5)
    pull(session, model, 3.0)
    result = session.step()
    assert (result.grad_norm, model.weight.item()) == (3.0, 0.5)


def test_an_infinity_is_not_clipped_into_a_number(prepare: Prepare) -> None:
    model, optimizer = one()
    session = prepare(model, optimizer, DYNAMIC, clip_value=0.5)
    pull(session, model, 1e38)
    assert not session.step().stepped


def test_a_group_with_a_limit_of_its_own_is_clipped_by_its_own_norm(prepare: Prepare) -> None:
    models = [one()[0] for _ in range(4)]
    groups: list[dict[str, Any]] = [
        {"params": [models[0].weight], "clip_norm": 1.0},
        {"params": [models[1].weight], "clip_value": 0.25},
        {"params": [models[2].weight, models[3].weight]},
    ]
    session = prepare(nn.ModuleList(models), torch.optim.SGD(groups, lr=1.0), DYNAMIC, clip_norm=10.0)
    session.backward(sum((model.weight * slope).sum() for model, slope in zip(models, (8.0, 8.0, 30.0, 40.0), strict=True)))  # type: ignore[arg-type] # a tensor, not the 0 that sum starts with
    result = session.step()
    assert float(result.grad_norm or 0) == pytest.approx(math.hypot(8, 8, 30, 40), rel=4 * 2**-24)
    moved = [1.0 - model.weight.item() for model in models]
    assert moved == pytest.approx([1.0, 0.25, 6.0, 8.0], rel=1e-5)  # 1e-6 in the denominator of the coefficient, and fp32


@pytest.mark.parametrize(("options", "group"), [({"clip_norm": 1.0, "clip_value": 1.0}, {}), ({}, {"clip_norm": -1.0}), ({"clip_value": math.nan}, {})])
def test_limits_that_make_no_sense_are_refused(target: mpbackend.Target, options: dict[str, Any], group: dict[str, Any]) -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(SessionError, match="clip_"):
        target.prepare(model, torch.optim.SGD([{"params": list(model.parameters()), **group}], lr=1.0), "fp32", **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_16_bit_loss_is_scaled_in_fp32(prepare: Prepare, dtype: torch.dtype) -> None:
    model, optimizer = one()
    session = prepare(model, optimizer, "fp32:loss_scale.mode=static,loss_scale.init=32768")
    session.backward((model.weight * 3.0).sum().to(dtype))  # 3 * 32768 is more than fp16 holds
    session.step()
    assert model.weight.item() == -2.0


def test_an_fp16_loss_whose_own_gradient_is_the_scale_and_overflows_is_refused(prepare: Prepare) -> None:
    model, optimizer = one()
    session = prepare(model, optimizer, SCALED)
    with pytest.raises(SessionError, match=r"the loss is torch\.float16, and its gradient is the loss scale 65536"):
        session.backward((model.weight * 3.0).sum().half())


def test_dynamic_scaling_finds_a_scale_for_an_fp16_loss(prepare: Prepare) -> None:
    model, optimizer = one()
    session = prepare(model, optimizer, DYNAMIC)
    stepped = []
    for _ in range(2):
        session.backward((model.weight * 3.0).sum().half())
        stepped.append(session.step().stepped)
    assert (stepped, session.loss_scale.value, session.loss_scale.startup_skips, session.loss_scale.skips) == ([False, True], 32768.0, 1, 0)


def test_case_05_the_scale_stands_still_between_micro_batches(prepare: Prepare) -> None:
    model, optimizer = one()
    session = prepare(model, optimizer, "fp32:loss_scale.mode=dynamic,loss_scale.init=2,loss_scale.interval=1", micro_batches=2)
    for _ in range(2):
        pull(session, model)
        session.step()
    assert model.weight.item() == 1.0 - 2.0
    assert session.loss_scale.value == 4.0


def test_evaluation_between_micro_batches_changes_nothing(prepare: Prepare) -> None:
    weights = []
    for evaluates in (False, True):
        model = make_net()
        session = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16", micro_batches=2)
        for x, y in make_batches(4):
            if evaluates:
                model.eval()
                with torch.no_grad(), session.autocast():
                    model(x)
                model.train()
            with session.autocast():
                loss = functional.mse_loss(model(x), y)
            session.backward(loss)
            session.step()
        weights.append([value.clone() for value in model.state_dict().values()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


@pytest.mark.parametrize("way", ["value", "group", "by hand"])
def test_scaled_16_bit_sums_are_not_unscaled_where_small_ones_would_vanish(target: mpbackend.Target, way: str) -> None:
    model = nn.Linear(8, 4)
    groups = [{"params": list(model.parameters()), **({"clip_norm": 1.0} if way == "group" else {})}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    recipe = "fp16-master:grads=fp16,loss_scale.init=1024"
    message = "gradients are summed in fp16 under a loss scale"
    if way != "by hand":
        with pytest.raises(SessionError, match=message):
            target.prepare(model, optimizer, recipe, on_unsupported="emulate", clip_value=1.0 if way == "value" else None)
        return
    with target.prepare(model, optimizer, recipe, on_unsupported="emulate") as session:
        with session.autocast():
            loss = model(torch.ones(1, 8)).float().mean()
        session.backward(loss)
        with pytest.raises(SessionError, match=message):
            session.unscale()
        assert session.step().stepped


def test_a_scaled_gradient_below_the_format_survives_in_fp32(prepare: Prepare) -> None:
    model, optimizer = one(0.0)
    session = prepare(model, optimizer, "fp16-master:grads=fp16,loss_scale.mode=static,loss_scale.init=32768")
    with session.autocast():
        loss = (model.weight.float() * 2.0**-30).sum()  # unscaled it is less than a quarter of what fp16 holds
    session.backward(loss)
    session.step()
    session.close()
    assert model.weight.item() == -(2.0**-30)


def test_groups_without_a_limit_of_their_own_share_one_norm(prepare: Prepare) -> None:
    models = [one()[0] for _ in range(3)]
    groups: list[dict[str, Any]] = [{"params": [model.weight]} for model in models]
    groups[0]["clip_norm"] = 1.0
    session = prepare(nn.ModuleList(models), torch.optim.SGD(groups, lr=1.0), DYNAMIC, clip_norm=10.0)
    session.backward((models[0].weight * 8.0 + models[1].weight * 30.0 + models[2].weight * 40.0).sum())
    session.step()
    moved = [1.0 - model.weight.item() for model in models]
    assert moved == pytest.approx([1.0, 6.0, 8.0], rel=1e-5)  # as above


def test_a_loss_that_is_changed_after_backward_is_recorded_as_it_was(prepare: Prepare) -> None:
    model, optimizer = one()
    session = prepare(model, optimizer, "fp32")
    loss = model.weight.sum() * 3.0
    session.backward(loss)
    session.step()
    loss.detach().zero_()
    assert [row.loss for row in session.drain()] == [3.0]


def test_an_infinity_that_was_clipped_by_hand_skips_the_step(prepare: Prepare) -> None:
    model, optimizer = one()
    session = prepare(model, optimizer, DYNAMIC)
    pull(session, model, 1e38)
    torch.nn.utils.clip_grad_value_(session.unscale(), 0.5)
    assert model.weight.grad is not None
    assert model.weight.grad.item() == 0.5
    result = session.step()
    assert (result.stepped, session.loss_scale.value, model.weight.item()) == (False, 32768.0, 1.0)


@pytest.mark.parametrize("recipe", [DYNAMIC, "bf16-master"])
def test_a_group_that_is_added_after_a_step_is_unscaled_clipped_and_cleared(prepare: Prepare, recipe: str) -> None:
    models = [one()[0], one()[0]]
    first, late = (model.weight for model in models)
    optimizer = torch.optim.SGD([first], lr=1.0)
    session = prepare(nn.ModuleList(models), optimizer, recipe, clip_norm=5.0)
    for added in (False, True, True):
        if added and len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": [late], "lr": 1.0})
        with session.autocast():
            loss = (first * 3.0 + (late * 4.0 if added else 0.0)).sum()
        session.backward(loss)
        session.step()
    assert (first.item(), late.item()) == pytest.approx((1.0 - 9.0, 1.0 - 8.0), rel=1e-5)  # as above
    assert late.grad is None
