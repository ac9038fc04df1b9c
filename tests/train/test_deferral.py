"""Fused optimizers that judge a step by themselves: the same answers as the others, and no read of the device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import mpbackend
from mpbackend.errors import SessionError
from mpbackend.observe.record import load_record
from mpbackend.train.device_scale import DeviceScale
from mpbackend.train.session import Session
from tests.support.training import Batch, Net, Prepare, make_batches, make_net

DYNAMIC = "fp32:loss_scale.mode=dynamic,loss_scale.init=1024"
KINDS: dict[str, dict[str, Any]] = {"fused": {"fused": True}, "foreach": {"foreach": True}, "plain": {"foreach": False}}


def run(session: Session, model: nn.Module, batches: list[Batch]) -> list[mpbackend.StepResult]:
    results = []
    for x, y in batches:
        with session.autocast():
            loss = functional.mse_loss(model(x), y)
        session.backward(loss)
        results.append(session.step())
    return results


def spoiled(batch: Batch) -> Batch:
    x = batch[0].clone()
    x[0, 0] = math.inf
    return x, batch[1]


class Reads(TorchDispatchMode):
    """Counts reads of tensors by the host."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch leaves it unannotated
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name in ("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal")
        return func(*args, **(kwargs or {}))


@contextmanager
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reads]:
    """Count scalar reads, those of ``tolist`` too, which no dispatch mode sees."""
    reads = Reads()
    native = torch.Tensor.tolist

    def tolist(tensor: torch.Tensor) -> Any:
        reads.count += 1
        return native(tensor)

    with monkeypatch.context() as patch, reads:
        patch.setattr(torch.Tensor, "tolist", tolist)
        yield reads


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("kind", list(KINDS))
def test_case_45_an_overflow_gives_the_same_answer_whatever_the_optimizer(prepare: Prepare, kind: str, clip: float | None) -> None:
    model = make_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **KINDS[kind])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    session = prepare(model, optimizer, DYNAMIC, clip_norm=clip, scheduler=scheduler)
    assert isinstance(session.loss_scale, DeviceScale) == (kind == "fused")
    batches = make_batches(4)
    run(session, model, batches[:2])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    (result,) = run(session, model, [spoiled(batches[2])])
    assert (result.stepped, result.reason, result.nonfinite, result.loss_scale) == (False, "forward_nonfinite", True, 1024.0)
    assert session.loss_scale.value == 512.0
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items()), "weights or buffers changed"
    (after,) = run(session, model, batches[3:])
    assert (after.stepped, after.loss_scale, session.loss_scale.skips) == (True, 512.0, 1)
    session.close()
    assert optimizer.param_groups[0]["lr"] == 1e-2 * 0.5**3


@pytest.mark.parametrize("clip", [None, 1e9])
@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_a_folded_power_of_two_changes_no_bit_while_clipping_is_inactive(prepare: Prepare, optimizer: Any, clip: float | None) -> None:
    mine, theirs = make_net(), make_net()
    other = optimizer(theirs.parameters(), lr=1e-2, fused=True)
    for x, y in make_batches(6):
        functional.mse_loss(theirs(x), y).backward()
        other.step()
        other.zero_grad()
    session = prepare(mine, optimizer(mine.parameters(), lr=1e-2, fused=True), DYNAMIC, clip_norm=clip)
    assert all(run(session, mine, make_batches(6)))
    assert all(torch.equal(a, b) for a, b in zip(mine.state_dict().values(), theirs.state_dict().values(), strict=True))


def test_folded_clipping_stays_within_the_roundings_that_it_adds(prepare: Prepare) -> None:
    models = [make_net() for _ in range(2)]
    grads: list[list[torch.Tensor]] = []
    for model, fused in zip(models, (True, False), strict=True):
        session = prepare(model, torch.optim.SGD(model.parameters(), lr=1.0, fused=fused, foreach=not fused), DYNAMIC, clip_norm=0.05)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        run(session, model, make_batches(1))
        grads.append([(a - b.detach()) for a, b in zip(before, model.parameters(), strict=True)])
    # the coefficient is inverted (1 rounding) and divided by (1) instead of multiplied with (1); the update is then added to weights below 1 (half an ulp each)
    for one, two in zip(*grads, strict=True):
        assert torch.all((one - two).abs() <= 3 * 2**-24 * two.abs() + 2 * 2**-24)


def test_a_fused_or_unscaled_session_reads_nothing_and_any_other_once_a_step(prepare: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {}
    for name, recipe, kind in (("fused", DYNAMIC, "fused"), ("foreach", DYNAMIC, "foreach"), ("plain", DYNAMIC, "plain"), ("unscaled", "fp32", "plain")):
        model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
        session = prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3, **KINDS[kind]), recipe, clip_norm=1.0)
        with counting(monkeypatch) as reads:
            run(session, model, make_batches(100))
        counts[name] = reads.count
    assert counts == {"fused": 0, "foreach": 100, "plain": 100, "unscaled": 0}


def test_a_momentum_without_values_is_not_left_behind_by_a_skipped_first_step(prepare: Prepare) -> None:
    models = {}
    for kind in ("fused", "foreach"):
        model = make_net()
        session = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **KINDS[kind]), DYNAMIC)
        batches = make_batches(3)
        results = run(session, model, [spoiled(batches[0]), *batches[1:]])
        assert [result.stepped for result in results] == [False, True, True]
        models[kind] = model
    for one, two in zip(models["fused"].parameters(), models["foreach"].parameters(), strict=True):
        # a fused multiply-add saves a rounding: two steps of lr 0.1 on weights below 1 differ by at most four half ulps
        assert torch.allclose(one, two, rtol=0, atol=4 * 2**-24)


def test_a_step_hook_of_the_user_fires_for_taken_steps_only(prepare: Prepare) -> None:
    model = make_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    session = prepare(model, optimizer, DYNAMIC)
    fired: list[int] = []
    optimizer.register_step_post_hook(lambda *_: fired.append(session.steps))
    batches = make_batches(3)
    run(session, model, [batches[0], spoiled(batches[1]), batches[2]])
    assert fired == [0, 2]


def test_the_record_of_a_deferred_run_holds_its_verdicts(prepare: Prepare, tmp_path: Path) -> None:
    model = make_net()
    session = prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), DYNAMIC, record=tmp_path / "run")
    batches = make_batches(4)
    run(session, model, [*batches[:2], spoiled(batches[2]), batches[3]])
    session.close()
    rows = load_record(tmp_path / "run").steps
    assert [(row.stepped, row.scale, row.reason) for row in rows] == [
        (True, 1024.0, ""),
        (True, 1024.0, ""),
        (False, 1024.0, "forward_nonfinite"),
        (True, 512.0, ""),
    ]


def test_a_result_is_shown_without_reading_the_device(prepare: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(8, 4)
    session = prepare(model, torch.optim.AdamW(model.parameters(), fused=True), DYNAMIC)
    with counting(monkeypatch) as reads:
        (result,) = run(session, model, make_batches(1))
        assert "ask for .stepped" in repr(result)
        assert reads.count == 0
        assert bool(result)
        assert (result.stepped, result.loss_scale, reads.count) == (True, 1024.0, 1)
    assert "stepped=True" in repr(result)


def test_a_parameter_in_two_optimizers_is_unscaled_once(prepare: Prepare) -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0, fused=True) for _ in range(2)]
    session = prepare(model, optimizers, DYNAMIC)
    session.backward((model.weight * 0.25).sum())
    assert session.step().stepped
    assert model.weight.item() == 0.5


def test_hopeless_skips_are_an_error_under_fused_optimizers_too(prepare: Prepare) -> None:
    model = Net()
    session = prepare(model, torch.optim.AdamW(model.parameters(), fused=True), f"{DYNAMIC},loss_scale.patience=3")
    batch = spoiled(make_batches(1)[0])
    with pytest.raises(SessionError, match=r"first \(Linear\), addmm|steps in a row were skipped"):
        run(session, model, [batch] * 300)
    assert session.steps <= 128 + 3
