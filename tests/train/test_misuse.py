"""Orders and objects that would make a step silently wrong: each is refused, or does the right thing."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import mpbackend
from mpbackend.errors import BackendError, SessionError
from mpbackend.observe.record import load_record
from mpbackend.train.session import Session
from tests.support.training import Prepare, make_batches, make_net


def one(lr: float = 1.0) -> tuple[nn.Linear, torch.optim.SGD]:
    """A model of one weight, 1.0, and its optimizer."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    return model, torch.optim.SGD(model.parameters(), lr=lr)


def pull(session: Session, model: nn.Linear, slope: float = 1.0) -> mpbackend.StepResult:
    """One step with the gradient ``slope``."""
    with session.autocast():
        loss = (model.weight * slope).sum()
    session.backward(loss)
    return session.step()


def test_a_parameter_group_added_later_is_unscaled_clipped_and_cleared(prepare: Prepare) -> None:
    model, optimizer = one()
    late, _ = one()
    session = prepare(model, optimizer, "fp32:loss_scale.mode=dynamic,loss_scale.init=65536", clip_norm=5.0)
    optimizer.add_param_group({"params": late.parameters(), "lr": 1.0})
    for _ in range(2):
        session.backward((model.weight * 3.0 + late.weight * 4.0).sum())
        result = session.step()
    assert result.grad_norm == 5.0
    assert late.weight.item() == pytest.approx(1.0 - 8.0, rel=1e-5)
    assert late.weight.grad is None


def test_fp32_is_fp32_inside_an_outer_autocast(prepare: Prepare) -> None:
    model = nn.Linear(8, 4)
    session = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32")
    with torch.autocast("cpu", dtype=torch.bfloat16), session.autocast():
        assert model(torch.ones(1, 8)).dtype == torch.float32


def test_case_27_a_step_inside_someone_elses_autocast_is_refused(prepare: Prepare) -> None:
    model, optimizer = one()
    session = prepare(model, optimizer, "fp32")
    session.backward(model.weight.sum())
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(SessionError, match=r"inside torch\.autocast"):
        session.step()


def test_clipping_an_infinity_away_by_hand_does_not_hide_the_overflow(prepare: Prepare) -> None:
    model, optimizer = one()
    session = prepare(model, optimizer, "fp32:loss_scale.mode=dynamic,loss_scale.init=1024")
    session.backward((model.weight * math.inf).sum() * 0 + (model.weight * 1e38).sum())
    torch.nn.utils.clip_grad_value_(session.unscale(), 0.05)
    result = session.step()
    assert (result.stepped, session.loss_scale.value, model.weight.item()) == (False, 512.0, 1.0)


def test_unscaling_by_hand_averages_and_reports_the_norm_before_clipping(prepare: Prepare) -> None:
    model, optimizer = one()
    session = prepare(model, optimizer, "fp32:loss_scale.mode=dynamic,loss_scale.init=1024", micro_batches=2, average=True)
    pull(session, model, 3.0)
    session.backward((model.weight * 5.0).sum())
    (parameter,) = session.unscale()
    assert parameter.grad is not None
    assert parameter.grad.item() == 4.0
    torch.nn.utils.clip_grad_value_([parameter], 1.0)
    result = session.step()
    assert (result.grad_norm, model.weight.item()) == (4.0, 0.0)


@pytest.mark.parametrize("early", [0, 1])
def test_unscaling_off_the_boundary_is_refused_and_leaves_the_session_usable(prepare: Prepare, early: int) -> None:
    model, optimizer = one()
    session = prepare(model, optimizer, "fp32", micro_batches=2)
    if early:
        session.backward(model.weight.sum())
    with pytest.raises(SessionError, match="micro-batch 1 of 2"):
        session.unscale()
    if early:
        session.step()
    assert [pull(session, model).stepped for _ in range(2 - early)][-1]


def test_every_micro_batch_must_be_under_autocast(prepare: Prepare) -> None:
    model, optimizer = one()
    session = prepare(model, optimizer, "bf16", micro_batches=2)
    pull(session, model)
    with pytest.raises(SessionError, match="not entered for this micro-batch"):
        session.backward(model.weight.sum())


def test_an_evaluation_under_autocast_does_not_count_as_the_forward_pass(prepare: Prepare) -> None:
    model, optimizer = one()
    session = prepare(model, optimizer, "bf16")
    with torch.no_grad(), session.autocast():
        model(torch.ones(1, 1))
    with pytest.raises(SessionError, match="not entered for this micro-batch"):
        session.backward(model.weight.sum())


def test_an_evaluation_does_not_open_the_window_of_the_buffers(prepare: Prepare) -> None:
    model = make_net()
    session = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp16")
    x, y = make_batches(1)[0]
    with torch.no_grad(), session.autocast():
        model.eval()(x)
    model.norm.running_mean.fill_(7.0)  # type: ignore[union-attr] # a BatchNorm that tracks has it
    with session.autocast():
        loss = functional.mse_loss(model.train()(x * math.inf), y)
    session.backward(loss)
    assert not session.step().stepped
    assert torch.equal(model.norm.running_mean, torch.full((16,), 7.0))  # type: ignore[arg-type] # as above


@pytest.mark.parametrize("bad", [0, -1.0, math.nan, 1e-320])
def test_a_refused_denominator_changes_nothing(prepare: Prepare, bad: float) -> None:
    model, optimizer = one()
    session = prepare(model, optimizer, "fp32", average=True)
    session.backward((model.weight * 2.0).sum())
    with pytest.raises(SessionError, match="denominator"):
        session.step(denominator=bad)
    session.step()
    assert model.weight.item() == -1.0


def test_flush_counts_a_backward_whose_step_was_not_called(prepare: Prepare) -> None:
    model, optimizer = one()
    session = prepare(model, optimizer, "fp32", micro_batches=4, average=True)
    pull(session, model, 2.0)
    session.backward((model.weight * 4.0).sum())
    result = session.flush()
    assert result is not None
    assert model.weight.item() == -2.0


def test_after_an_optimizer_that_raises_no_gradient_is_used_twice(prepare: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = one()
    session = prepare(model, optimizer, "fp32:loss_scale.mode=static,loss_scale.init=1024")
    with monkeypatch.context() as patch:
        patch.setattr(optimizer, "step", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pull(session, model)
    assert model.weight.grad is None
    pull(session, model, 2.0)
    assert model.weight.item() == -1.0


@pytest.mark.parametrize("loss", [1.0, "loss", torch.ones(2), None])
def test_a_loss_that_is_no_scalar_is_refused_and_forgotten(prepare: Prepare, loss: Any) -> None:
    model, optimizer = one()
    session = prepare(model, optimizer, "fp32")
    with pytest.raises(SessionError, match="loss of one element"):
        session.backward(loss)
    assert pull(session, model).stepped
    assert [row.loss for row in session.drain()] == [1.0]


def test_two_losses_of_one_micro_batch_are_summed_in_the_record(prepare: Prepare) -> None:
    model, optimizer = one(lr=0.0)
    session = prepare(model, optimizer, "fp32")
    for value in (1.0, 2.0):
        session.backward(model.weight.sum() * value)
    session.step()
    assert [row.loss for row in session.drain()] == [3.0]


def test_the_learning_rate_in_a_row_is_the_one_that_was_used(prepare: Prepare) -> None:
    model, optimizer = one()
    optimizer.param_groups[0]["lr"] = torch.tensor(1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    session = prepare(model, optimizer, "fp32", scheduler=scheduler)
    for _ in range(3):
        pull(session, model)
    assert [row.lr for row in session.drain()] == [1.0, 0.5, 0.25]


@pytest.mark.parametrize("value", ["x", None, torch.ones(2)])
def test_a_metric_that_is_no_number_is_refused_at_once(prepare: Prepare, value: Any) -> None:
    session = prepare(*one(), "fp32")
    with pytest.raises(SessionError, match="not a number"):
        session.log(accuracy=value)


def test_loading_in_the_middle_is_refused(prepare: Prepare, tmp_path: Path) -> None:
    model, optimizer = one()
    session = prepare(model, optimizer, "fp32", micro_batches=2)
    session.save(tmp_path / "ckpt")
    pull(session, model)
    with pytest.raises(SessionError, match="1 of 2 micro-batches is open"):
        session.load(tmp_path / "ckpt")


def test_a_record_does_not_go_back_in_time_and_counts_segments(prepare: Prepare, tmp_path: Path) -> None:
    model, optimizer = one(lr=0.1)
    first = prepare(model, optimizer, "fp32", record=tmp_path / "first")
    pull(first, model)
    first.save(tmp_path / "ckpt")
    with pytest.raises(SessionError, match="1 steps are in the record"):
        first.load(tmp_path / "ckpt")
    first.close()
    second = prepare(model, optimizer, "fp32", record=tmp_path / "second")
    second.load(tmp_path / "ckpt")
    pull(second, model)
    second.close()
    read = load_record(tmp_path / "second")
    assert (read.record.run.segment, [row.step for row in read.steps]) == (1, [2])


@pytest.mark.parametrize("name", ["folder", "file", "link", "."])
def test_saving_never_removes_what_is_no_checkpoint(prepare: Prepare, tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("a script")
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    session = prepare(*one(), "fp32")
    with pytest.raises(SessionError, match="no checkpoint"):
        session.save(tmp_path / name if name != "." else ".")
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


def test_a_failing_prepare_leaves_nothing_behind(target: mpbackend.Target, tmp_path: Path) -> None:
    probe = torch.ones(2, 3, dtype=torch.bfloat16)

    def softmax() -> torch.dtype:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.softmax(probe, -1).dtype

    native = softmax()
    model = make_net()
    (tmp_path / "file").write_text("in the way")
    for record in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(mpbackend.DocumentError):
            target.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16", on_unsupported="emulate", record=record)
    assert softmax() == native
    with target.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16:sensitive=native", on_unsupported="emulate"):
        assert softmax() == native


def test_a_session_that_is_dropped_undoes_what_it_set(target: mpbackend.Target) -> None:
    model = make_net()
    session = target.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16", on_unsupported="emulate")
    del session
    with target.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16:sensitive=native", on_unsupported="emulate"):
        pass


def test_two_policies_at_once_are_refused(prepare: Prepare) -> None:
    first, second = make_net(), make_net()
    prepare(first, torch.optim.SGD(first.parameters(), lr=0.1), "bf16")
    with pytest.raises(BackendError, match="sensitive=native"):
        prepare(second, torch.optim.SGD(second.parameters(), lr=0.1), "bf16:sensitive=native")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fence": "sett"}, "allowed: set, report"),
        ({"micro_batches": 0}, "micro_batches = 0"),
        ({"seed": "x"}, "not a whole number"),
        ({"seed": True}, "not a whole number"),
        ({"record": ""}, "not a folder name"),
    ],
)
def test_a_misspelt_option_is_refused(target: mpbackend.Target, options: dict[str, Any], message: str) -> None:
    with pytest.raises(mpbackend.MpbackendError, match=message):
        target.prepare(*one(), "fp32", **options)


def sparse() -> tuple[nn.Module, Any]:
    model = nn.Embedding(4, 4, sparse=True)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def lazy() -> tuple[nn.Module, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that lazy modules are new
        model = nn.LazyLinear(4)
    return model, torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)


def closure() -> tuple[nn.Module, Any]:
    model = nn.Linear(1, 1)
    return model, torch.optim.LBFGS(model.parameters())


def elsewhere() -> tuple[nn.Module, Any]:
    return nn.Linear(1, 1), torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)


def twice() -> tuple[nn.Module, Any]:
    model, optimizer = one()
    return model, [optimizer, optimizer]


def stale() -> tuple[nn.Module, Any]:
    model, optimizer = one()
    model.weight.sum().backward()
    return model, optimizer


def wide() -> tuple[nn.Module, Any]:
    model = nn.Linear(1, 1).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (sparse, "sparse gradients"),
        (lazy, "not initialized"),
        (closure, "LBFGS, whose step needs a closure"),
        (elsewhere, "SGD updates no parameter of the model"),
        (twice, "one optimizer twice"),
        (stale, "gradients from before the session"),
        (wide, r"weight is torch\.float64"),
    ],
)
def test_what_would_go_wrong_is_refused_at_prepare(target: mpbackend.Target, build: Any, message: str) -> None:
    model, optimizer = build()
    with pytest.raises(SessionError, match=message):
        target.prepare(model, optimizer, "fp32")


def test_an_error_of_the_record_does_not_hide_the_users_own(target: mpbackend.Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = one()

    def fail() -> None:
        raise mpbackend.DocumentError("record", found="disk full")

    with pytest.raises(KeyError, match="mine") as caught, target.prepare(model, optimizer, "fp32", record=tmp_path / "run") as session:
        pull(session, model)
        monkeypatch.setattr(session, "write_record", fail)
        raise KeyError("mine")
    assert caught.value.__notes__ == ["record: disk full"]


def test_a_forward_pass_in_another_format_warns_where_it_is_observed(prepare: Prepare, tmp_path: Path) -> None:
    model = nn.Linear(8, 4)
    session = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16", record=tmp_path / "run")
    with session.autocast(), torch.autocast("cpu", enabled=False):
        loss = model(torch.ones(1, 8)).sum()
    session.backward(loss)
    with pytest.warns(UserWarning, match="the plan computes in bf16; step 1 was observed in fp32 100%"):
        session.step()


class Operators(TorchDispatchMode):
    """Notes each operator that runs, with the format of its first result."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch leaves it unannotated
        self.ran: list[tuple[str, torch.dtype | None]] = []

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.ran.append((func.overloadpacket.__name__, getattr(result, "dtype", None)))
        return result


def test_evaluation_of_a_transformer_layer_runs_in_the_planned_format(prepare: Prepare) -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0).eval()
    session = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16")
    with torch.no_grad(), session.autocast(), Operators() as operators:
        model(torch.ones(1, 3, 8))
    products = [dtype for name, dtype in operators.ran if name in ("mm", "addmm", "bmm")]
    assert len(products) >= 4, "the projections and the two linear layers"
    assert set(products) == {torch.bfloat16}
    session.close()
    assert torch.backends.mha.get_fastpath_enabled()


def test_an_optimizer_that_steps_by_itself_is_refused_while_the_session_lives(prepare: Prepare) -> None:
    model, optimizer = one()
    session = prepare(model, optimizer, "fp32:loss_scale.mode=static,loss_scale.init=1024")
    session.backward(model.weight.sum())
    with pytest.raises(SessionError, match=r"SGD\.step\(\): the optimizer belongs to a live session"):
        optimizer.step()
    assert session.step().stepped
    assert model.weight.item() == 0.0
    session.close()
    optimizer.step()


def test_a_switch_changed_under_a_live_session_warns(target: mpbackend.Target) -> None:
    model, optimizer = one()
    session = target.prepare(model, optimizer, "fp32")
    with pytest.warns(UserWarning, match=r"switches changed while the session was live: matmul\.fp32_precision"):
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # type: ignore[attr-defined] # torch makes the module at run time
        session.close()


def test_the_record_names_settings_level_and_the_weights_that_were_loaded(prepare: Prepare, tmp_path: Path) -> None:
    model, optimizer = one(lr=0.1)
    first = prepare(model, optimizer, "fp16", record=tmp_path / "first", clip_norm=2.0)
    pull(first, model)
    first.save(tmp_path / "ckpt")
    assert "fp16 (emulated)" in first.account()
    first.close()
    nn.init.zeros_(model.weight)
    second = prepare(model, optimizer, "fp16", record=tmp_path / "second")
    fresh = second._recording._weights if second._recording is not None else ""
    second.load(tmp_path / "ckpt")
    pull(second, model)
    second.close()
    records = [load_record(tmp_path / name).record for name in ("first", "second")]
    assert [record.compute.level for record in records] == ["emulated", "emulated"]
    assert records[0].settings | {"clip_norm": "2", "optimizers": "SGD", "micro_batches": "1"} == records[0].settings
    assert records[1].fingerprints["weights"] != fresh


def test_case_12_a_loss_on_another_device_is_refused(prepare: Prepare) -> None:
    session = prepare(*one(), "fp32")
    with pytest.raises(SessionError, match=r"the loss is on meta, the plan is for cpu:0"):
        session.backward(torch.ones((), device="meta", requires_grad=True))
