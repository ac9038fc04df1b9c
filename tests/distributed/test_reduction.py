"""DDP reduces in the planned format, divides where the plan says, and reduces once a step."""

from __future__ import annotations

import math
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mpbackend.train.distributed import Ranks, find_ranks
from mpbackend.train.reduction import buckets
from tests.support.planned import planned
from tests.support.ranks import run_ranks


class Counter:
    """Counts all-reduces of floating-point tensors, and the formats and elements that they carry."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        original = dist.all_reduce

        def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.calls.append((str(tensor.dtype).removeprefix("torch."), tensor.numel()))
            return original(tensor, *args, **kwargs)

        dist.all_reduce = counted


def linear(width: int = 4, out: int = 3, dtype: torch.dtype = torch.float32, **options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Linear(width, out).to(dtype), **options)


def ranks_of(model: nn.Module, recipe: str, micro_batches: int = 1) -> Ranks:
    plan, backend = planned(recipe, micro_batches)
    ranks = find_ranks(model, [torch.optim.SGD(model.parameters(), lr=0.1)], plan, backend)
    assert ranks is not None
    return ranks


def pass_through(ranks: Ranks, model: nn.Module, x: Tensor, *, last: bool) -> None:
    with ranks.no_sync(last) or nullcontext():
        loss = model(x).square().sum()
    loss.backward()
    ranks.went_backward()


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def data(rank: int, count: int, width: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(5, width, generator=generator) for _ in range(count)]


def reduce_weights(rank: int, recipe: str, values: list[float]) -> tuple[list[float], str, bool]:
    """Return what DDP makes of one gradient a rank."""
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    ranks = ranks_of(model, recipe)
    model(torch.tensor([[values[rank]]])).sum().backward()
    (gradient,) = gradients(model)
    ranks.close()
    return gradient.flatten().tolist(), ranks.communication, bool(model._comm_hooks)


@pytest.mark.parametrize(("divide", "gradient"), [("before", 40000.0), ("after", math.inf)])
def test_case_44_an_fp16_sum_over_two_ranks_is_divided_where_the_plan_says(divide: str, gradient: float) -> None:
    results = run_ranks(2, reduce_weights, f"fp32:reduce.format=fp16,reduce.divide={divide}", [40000.0, 40000.0])
    assert results == [([gradient], f"fp16, divide {divide}: a communication hook of the session", True)] * 2


def test_a_gradient_is_divided_before_it_is_rounded_to_the_wire() -> None:
    results = run_ranks(2, reduce_weights, "fp32:reduce.format=fp16", [99968.0, 0.0])
    assert [values for values, _, _ in results] == [[49984.0]] * 2


def test_a_planned_bf16_wire_rounds_to_bf16() -> None:
    results = run_ranks(2, reduce_weights, "fp32:reduce.format=bf16", [1.0 + 2**-9, 0.0])
    assert [values for values, _, _ in results] == [[0.5]] * 2


def test_where_ddp_does_what_the_plan_says_it_is_left_alone() -> None:
    results = run_ranks(2, reduce_weights, "fp32", [3.0, 1.0])
    assert results == [([2.0], "fp32, divide before: DDP by itself", False)] * 2


def test_dividing_after_a_sum_in_fp32_needs_a_hook() -> None:
    results = run_ranks(2, reduce_weights, "fp32:reduce.divide=after", [3.0, 1.0])
    assert results == [([2.0], "fp32, divide after: a communication hook of the session", True)] * 2


def hook_is_as_exact_as_ddp(rank: int) -> bool:
    """Compare the hook's arithmetic (planted by a plan that needs one, then made to say what DDP does) with DDP's own on three ranks."""
    native, hooked = linear(), linear()
    ranks_of(native, "fp32").close()
    ranks_of(hooked, "fp32:reduce.divide=after").close()
    ranks_of(hooked, "fp32").close()
    for model in (native, hooked):
        model(data(rank, 1)[0]).square().sum().backward()
    return all(torch.equal(a, b) for a, b in zip(gradients(native), gradients(hooked), strict=True)) and bool(hooked._comm_hooks)


def test_a_later_session_changes_the_hook_of_an_earlier_one_and_divides_as_ddp_does() -> None:
    assert run_ranks(3, hook_is_as_exact_as_ddp) == [True] * 3


def users_hook(state, bucket):  # type: ignore[no-untyped-def] # DDP compares annotations with its classes
    del state
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0])


def keep_users_hook(rank: int, built_in: bool) -> tuple[str, list[str], list[float]]:
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    if built_in:
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)  # type: ignore[attr-defined] # torch exports it without saying so
    else:
        model.register_comm_hook(None, users_hook)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ranks = ranks_of(model, "fp32:reduce.format=bf16")
    model(torch.tensor([[3.0]])).sum().backward()
    return ranks.communication, [str(item.message) for item in caught], gradients(model)[0].flatten().tolist()


@pytest.mark.parametrize(("built_in", "hook", "gradient"), [(False, "users_hook", 6.0), (True, "built into DDP", 3.0)])
def test_a_users_own_communication_hook_is_left_alone_with_a_warning(built_in: bool, hook: str, gradient: float) -> None:
    for communication, caught, values in run_ranks(2, keep_users_hook, built_in):
        assert communication == f"unknown: the user's communication hook ({hook})"
        assert caught == [f"DDP has a communication hook ({hook}), which is left alone: the plan's reduction (bf16, divide before) is not carried out"]
        assert values == [gradient]


def count_reductions(rank: int, windows: list[list[bool]], wire: str) -> tuple[list[tuple[str, int]], list[list[Tensor]]]:
    """Run windows of micro-batches; each item says whether the micro-batch is known as the last."""
    model = linear()
    ranks = ranks_of(model, f"fp32:reduce.format={wire},reduce.divide=after", 4)
    model(data(rank, 1)[0]).square().sum().backward()  # DDP exchanges the order of its buckets after its first backward pass
    model.zero_grad()
    counter, found = Counter(), []
    for window in windows:
        for last, x in zip(window, data(rank, 4), strict=False):
            pass_through(ranks, model, x, last=last)
        ranks.settle(list(model.parameters()))
        ranks.settle(list(model.parameters()))
        found.append(gradients(model))
        model.zero_grad()
    return counter.calls, found


FULL = [False, False, False, True]


def test_four_micro_batches_cost_one_all_reduce() -> None:
    for calls, _ in run_ranks(2, count_reductions, [FULL, FULL], "fp16"):
        assert calls == [("float16", 15)] * 2


def test_a_step_that_reduces_every_micro_batch_is_seen_by_the_same_count() -> None:
    for calls, _ in run_ranks(2, count_reductions, [[True] * 4], "fp16"):
        assert calls == [("float16", 15)] * 4


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_a_group_that_ends_early_is_bit_equal_to_one_that_was_known_to_end(wire: str) -> None:
    for calls, (known, early, again) in run_ranks(2, count_reductions, [[False, True], [False, False], [False, True]], wire):
        assert len(calls) == 3
        assert all(torch.equal(a, b) for a, b in zip(known, early, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(known, again, strict=True))


class Branches(nn.Module):
    """Two layers of which a rank uses one, and one that no rank uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

    def forward(self, x: Tensor, branch: int) -> Tensor:
        """Apply one layer."""
        out: Tensor = self.layers[branch](x)
        return out


def end_early_with_unused_parameters(rank: int, early: bool) -> list[Tensor | None]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    ranks = ranks_of(model, "fp32")
    with ranks.no_sync(not early) or nullcontext():
        loss = model(torch.ones(1, 2), rank).sum()
    loss.backward()
    ranks.went_backward()
    ranks.settle(list(model.parameters()))
    return [parameter.grad for parameter in model.parameters()]


def test_ending_early_knows_parameters_that_only_some_ranks_used() -> None:
    known, early = (run_ranks(2, end_early_with_unused_parameters, early) for early in (False, True))
    for a, b in zip(known, early, strict=True):
        assert [item is None for item in b] == [False] * 4 + [True] * 2
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None)
    assert known[0][0] is not None
    assert known[0][0].abs().sum() > 0


def evaluate_inside_a_window(rank: int) -> list[Tensor]:
    """Evaluate when the last micro-batch is due, then end the group early: the evaluation must not count as that micro-batch."""
    model = linear()
    ranks = ranks_of(model, "fp32", 2)
    pass_through(ranks, model, data(rank, 1)[0], last=False)
    with torch.no_grad(), ranks.no_sync(True) or nullcontext():
        model(data(rank, 1)[0])
    ranks.settle(list(model.parameters()))
    return gradients(model)


def test_an_evaluation_does_not_count_as_the_last_micro_batch() -> None:
    first, second = run_ranks(2, evaluate_inside_a_window)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def reduce_own_sums(rank: int) -> tuple[bool, str, list[tuple[str, int]], list[Tensor], list[Tensor]]:
    """Sum bf16 gradients of two micro-batches in fp32 as working weights do, and let the session reduce the sums."""
    model = linear(dtype=torch.bfloat16)
    ranks = ranks_of(model, "bf16-master", 2)
    counter = Counter()
    masters = [torch.zeros(parameter.shape, requires_grad=True) for parameter in model.parameters()]
    for last, x in zip((False, True), data(rank, 2), strict=True):
        pass_through(ranks, model, x.bfloat16(), last=last)
        for master, parameter in zip(masters, model.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float() + (0 if master.grad is None else master.grad)
            parameter.grad = None
    local = [master.grad.clone() for master in masters if master.grad is not None]
    ranks.settle(masters)
    ranks.settle(masters)
    return ranks.own_sums, ranks.communication, counter.calls, local, [master.grad for master in masters if master.grad is not None]


def test_working_weights_are_reduced_once_a_step_as_fp32_sums() -> None:
    results = run_ranks(2, reduce_own_sums)
    means = [(a + b) / 2 for a, b in zip(results[0][3], results[1][3], strict=True)]
    for own_sums, communication, calls, _, reduced in results:
        assert (own_sums, communication) == (True, "fp32, divide before: sums of all micro-batches, by the session")
        assert calls == [("float32", 15)]
        assert all(torch.equal(a, b) for a, b in zip(means, reduced, strict=True))


def test_buckets_hold_one_format_and_at_most_their_limit() -> None:
    tensors = [torch.zeros(4), torch.zeros(4), torch.zeros(100), torch.zeros(4, dtype=torch.float64), torch.zeros(0)]
    found = [[id(tensor) for tensor in bucket] for bucket in buckets(tensors, limit=32)]
    assert found == [[id(tensors[0]), id(tensors[1])], [id(tensors[2])], [id(tensors[3])], [id(tensors[4])]]
