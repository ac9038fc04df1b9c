"""Sessions on several ranks: the same arithmetic as torch by hand, one verdict for all, and the storage roles of a recipe under each wrapper."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import mpbackend
from mpbackend.errors import SessionError
from mpbackend.observe.record import load_record
from mpbackend.train.sharded import is_sharded
from mpbackend.train.wrapping import fsdp_policy
from tests.support.ranks import run_ranks
from tests.support.training import Batch, make_batches

Row = tuple[bool, str, float]


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def wrapped(kind: str, recipe: str, target: mpbackend.Target) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(net())
    model = net()
    policy = fsdp_policy(target.plan(recipe, on_unsupported="emulate"))
    for layer in (model[0], model[2]):
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


def weights(model: nn.Module) -> list[Tensor]:
    values = [value.full_tensor() if is_sharded(value) else value for value in model.state_dict().values()]
    return [value.detach().clone() for value in values]


def all_equal(results: list[list[Tensor]]) -> bool:
    return all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def train(model: nn.Module, session: Any, batches: list[Batch], denominator: float | None = None) -> list[Row]:
    rows = []
    for x, y in batches:
        with session.autocast():
            loss = mse_loss(model(x).float(), y, reduction="mean" if denominator is None else "sum")
        session.backward(loss)
        result = session.step(denominator=denominator)
        rows.append((bool(result.stepped), str(result.reason), float(session.loss_scale.value)))
    return rows


def by_session(
    rank: int, kind: str, recipe: str, options: dict[str, Any], count: int, poison: tuple[int, int, float] | None = None, fused: bool = False
) -> tuple[list[Row], list[Tensor]]:
    """Train on batches of this rank's own; ``poison`` is a rank, a batch, and what that batch is multiplied by."""
    target = mpbackend.select("cpu")
    model = wrapped(kind, recipe, target)
    batches = make_batches(count, seed=10 + rank)
    if poison is not None and poison[0] == rank:
        x, y = batches[poison[1]]
        batches[poison[1]] = x, y * poison[2]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    with target.prepare(model, optimizer, recipe, on_unsupported="emulate", **options) as session:
        rows = train(model, session, batches)
        session.flush()
        return rows, weights(model)


def by_hand(rank: int, micro_batches: int, count: int, clip: float) -> list[Tensor]:
    model = DistributedDataParallel(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number, (x, y) in enumerate(make_batches(count, seed=10 + rank), 1):
        model.require_backward_grad_sync = number % micro_batches == 0 or number == count
        mse_loss(model(x), y).backward()
        if model.require_backward_grad_sync:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize("count", [8, 6])
def test_a_session_is_bit_equal_to_ddp_by_hand_also_when_the_last_group_is_partial(count: int) -> None:
    mine = [found for _, found in run_ranks(2, by_session, "ddp", "fp32", {"micro_batches": 4, "clip_norm": 0.05}, count)]
    theirs = run_ranks(2, by_hand, 4, count, 0.05)
    assert all_equal([*mine, *theirs])


def reductions(rank: int) -> int:
    """Count the sums over ranks that a step of four micro-batches costs."""
    target = mpbackend.select("cpu")
    recipe = "fp32:reduce.divide=after"  # by the session's hook, which the count sees
    model = wrapped("ddp", recipe, target)
    with target.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), recipe, micro_batches=4, clip_norm=1.0) as session:
        train(model, session, make_batches(4))
        original, calls = dist.all_reduce, []

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls.append(args)
            return original(*args, **kwargs)

        dist.all_reduce = counted
        train(model, session, make_batches(4))
    return len(calls)


def test_a_step_of_four_micro_batches_is_one_all_reduce() -> None:
    assert run_ranks(2, reductions) == [1, 1]


@pytest.mark.parametrize(("kind", "fused"), [("ddp", False), ("ddp", True), ("fsdp", False)])
@pytest.mark.parametrize(("factor", "reason"), [(math.inf, "forward_nonfinite"), (3000.0, "gradient_overflow")])
def test_an_overflow_on_one_of_four_ranks_skips_the_step_on_all(kind: str, fused: bool, factor: float, reason: str) -> None:
    recipe = "fp16:loss_scale.init=65536"
    results = run_ranks(4, by_session, kind, recipe, {}, 3, (2, 1, factor), fused)
    for rows, _ in results:
        assert [row[0] for row in rows] == [True, False, True]
        assert rows[1][1] == reason
        assert rows == results[0][0]
    assert all_equal([found for _, found in results])


class Register:
    """An overflow register that found something on one rank, on one step."""

    def __init__(self, when: bool) -> None:
        self.steps = 0
        self.when = when

    def clear(self) -> None:
        self.steps += 1

    def found(self) -> Tensor:
        return torch.tensor(self.when and self.steps == 2)


def by_register(rank: int) -> tuple[list[Row], list[Tensor]]:
    target = mpbackend.select("cpu")
    register = Register(rank == 1)
    target.backend.overflow = lambda device: register  # type: ignore[method-assign] # the CPU has none
    model = wrapped("ddp", "fp16", target)
    with target.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp16:loss_scale.init=1024", on_unsupported="emulate") as session:
        return train(model, session, make_batches(3, seed=rank)), weights(model)


def test_a_status_register_of_one_rank_skips_the_step_on_all() -> None:
    results = run_ranks(2, by_register)
    assert [[row[0] for row in rows] for rows, _ in results] == [[True, False, True]] * 2
    assert all_equal([found for _, found in results])


def by_count(rank: int, kind: str, rows_of_rank: list[int]) -> list[Tensor]:
    """Divide the sum over ranks of unequal batches by the count over ranks."""
    target = mpbackend.select("cpu")
    model = wrapped(kind, "fp32", target)
    x, y = make_batches(1)[0]
    start = sum(rows_of_rank[:rank])
    own = slice(start, start + rows_of_rank[rank])
    with target.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32") as session:
        train(model, session, [(x[own], y[own])], denominator=float(rows_of_rank[rank]))
    return weights(model)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_denominator_divides_the_sum_over_ranks_by_the_count_over_ranks(kind: str) -> None:
    model = net()
    x, y = make_batches(1)[0]
    (mse_loss(model(x), y, reduction="sum") / 6).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for found in run_ranks(2, by_count, kind, [5, 1]):
        for mine, whole in zip(found, weights(model), strict=True):
            # a sum of 6 rows in another order and two more roundings, each 2^-24 of gradients below 1, times the learning rate
            torch.testing.assert_close(mine, whole, rtol=0, atol=8 * 2.0**-24)


@pytest.mark.parametrize(("kind", "recipe"), [("ddp", "bf16-master"), ("ddp", "bf16-kahan"), ("ddp", "bf16-sr"), ("fsdp", "bf16-master")])
def test_low_precision_weights_stay_equal_on_all_ranks_and_move(kind: str, recipe: str) -> None:
    results = run_ranks(2, by_session, kind, recipe, {"micro_batches": 2}, 8)
    assert all_equal([found for _, found in results])
    start = [value.to(found.dtype) for value, found in zip(weights(net()), results[0][1], strict=True)]
    assert not any(torch.equal(a, b) for a, b in zip(start, results[0][1], strict=True))
    assert {value.dtype for value in results[0][1]} == {torch.float32 if kind == "fsdp" else torch.bfloat16}


def record(rank: int, kind: str, folder: str) -> list[Row]:
    return by_session(rank, kind, "bf16", {"record": folder}, 3)[0]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_record_is_written_once_for_all_ranks(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "record"
    run_ranks(2, record, kind, str(folder))
    assert [row.step for row in load_record(folder).steps] == [1, 2, 3]


def differ(rank: int, what: str) -> str:
    target = mpbackend.select("cpu")
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"clip_norm": 1.0 + rank} if what == "settings" else {}
    if what == "model" and rank == 1:
        model.module[0].half()
    try:
        target.prepare(model, optimizer, "fp32", **options)
    except SessionError as error:
        dist.barrier()
        return str(error)
    return ""


def test_what_is_wrong_on_one_rank_ends_prepare_on_all() -> None:
    assert all("rank 0: clip_norm=1; rank 1: clip_norm=2" in text for text in run_ranks(2, differ, "settings"))
    first, second = run_ranks(2, differ, "model")
    assert "0.weight is torch.float16" in second
    assert first.startswith("prepare(): it failed on rank 1: prepare(): parameter")
