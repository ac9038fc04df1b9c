"""Sharded gradients: one norm over all parts, the plan's policy on every module, and groups that end early."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from mpbackend.errors import SessionError
from mpbackend.train import clipping, wrapping
from mpbackend.train.distributed import Ranks, find_ranks
from mpbackend.train.sharded import is_sharded, local, sharded_norm
from mpbackend.train.wrapping import buffers_beside, fsdp_policy, library_division
from tests.support.planned import planned
from tests.support.ranks import run_ranks


class Counter:
    """Counts all-reduces."""

    def __init__(self) -> None:
        self.calls = 0
        original = dist.all_reduce

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return original(*args, **kwargs)

        dist.all_reduce = counted


def full_gradients() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator) for shape in ((5, 3), (7,), (1, 2), (4, 4))]  # on 4 ranks: uneven parts, and empty ones


def norm_of_one_dimension(rank: int) -> tuple[float, float, int, list[int]]:
    mesh = init_device_mesh("cpu", (4,))
    full = full_gradients()
    parts: list[Tensor] = [distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in full[:3]]
    parts += [distribute_tensor(full[3], mesh, [Replicate()]), torch.full((2,), 3.0)]
    counter = Counter()
    norm = sharded_norm(parts)
    assert type(norm) is Tensor
    return norm.item(), clipping.total_norm([*full, torch.full((2,), 3.0)]).item(), counter.calls, [part.numel() for part in local(parts)]


def test_the_norm_of_uneven_and_empty_parts_is_that_of_the_full_tensors() -> None:
    results = run_ranks(4, norm_of_one_dimension)
    assert len({norm for norm, *_ in results}) == 1
    for norm, full, calls, _ in results:
        # both round a sum of 50 squares in fp32, in another order: at most 50 roundings of 2^-24 each, halved by the square root
        assert math.isclose(norm, full, rel_tol=50 * 2.0**-24)
        assert calls == 1
    assert [sizes[:3] for _, _, _, sizes in results] == [[6, 2, 2], [6, 2, 0], [3, 2, 0], [0, 1, 0]]


def norm_of_two_dimensions(rank: int) -> tuple[float, float, int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    full = full_gradients()
    layouts: tuple[list[Placement], ...] = ([Replicate(), Shard(0)], [Shard(0), Shard(0)], [Shard(0), Replicate()], [Replicate(), Shard(1)])
    parts = [distribute_tensor(tensor, mesh, layout) for tensor, layout in zip(full, layouts, strict=True)]
    counter = Counter()
    return sharded_norm(parts).item(), clipping.total_norm(full).item(), counter.calls


def test_replicas_are_counted_once_and_each_group_is_asked_once() -> None:
    for norm, full, calls in run_ranks(4, norm_of_two_dimensions):
        assert math.isclose(norm, full, rel_tol=50 * 2.0**-24)  # see above
        assert calls == 2


def norm_of_partial(rank: int) -> str:
    mesh = init_device_mesh("cpu", (2,))
    try:
        sharded_norm([DTensor.from_local(torch.ones(2), mesh, [Partial()])])
    except SessionError as error:
        return str(error)
    return ""


def test_parts_that_have_yet_to_be_added_are_refused() -> None:
    assert all("redistribute it before step()" in text for text in run_ranks(2, norm_of_partial))


def norm_with_an_overflow(rank: int, value: float) -> float:
    mesh = init_device_mesh("cpu", (4,))
    part = torch.full((2,), value if rank == 2 else 1.0)
    return sharded_norm([DTensor.from_local(part, mesh, [Shard(0)])]).item()


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_an_overflow_on_one_of_four_ranks_is_in_the_norm_of_all(value: float) -> None:
    assert not any(math.isfinite(norm) for norm in run_ranks(4, norm_with_an_overflow, value))


def test_whole_tensors_are_their_own_parts() -> None:
    tensors = full_gradients()
    assert not any(map(is_sharded, tensors))
    assert all(a is b for a, b in zip(tensors, local(tensors), strict=True))
    assert math.isclose(sharded_norm(tensors).item(), clipping.total_norm(tensors).item(), rel_tol=50 * 2.0**-24)  # see above


@pytest.mark.parametrize(
    ("recipe", "gathered", "reduced"),
    [
        ("fp32", None, torch.float32),
        ("bf16", None, torch.float32),
        ("bf16:reduce.format=bf16", None, torch.bfloat16),
        ("bf16-master", torch.bfloat16, torch.float32),
        ("fp16-master", torch.float16, torch.float32),
        ("bf16-params", None, torch.float32),
    ],
)
def test_a_plan_becomes_a_policy(recipe: str, gathered: torch.dtype | None, reduced: torch.dtype) -> None:
    plan, _ = planned(recipe)
    assert fsdp_policy(plan) == MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=reduced)


def test_buffers_beside_parameters_of_lower_precision_are_listed() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.register_buffer("low", torch.zeros(1, dtype=torch.bfloat16))
    assert buffers_beside(model, planned("bf16")[0]) == []
    rows = buffers_beside(model, planned("bf16-master")[0])
    assert [row["layer"] for row in rows] == ["1.running_mean", "1.running_var"]
    assert rows[0] == {"layer": "1.running_mean", "action": "kept", "reason": "a buffer in fp32 beside parameters in bf16"}


@pytest.mark.parametrize(
    ("dtype", "size", "division"), [(torch.float32, 8, (1, 8)), (torch.float16, 2, (2, 1)), (torch.float16, 8, (4, 2)), (torch.float16, 4, (2, 2))]
)
def test_the_librarys_division_is_known(dtype: torch.dtype, size: int, division: tuple[int, int]) -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    class Group:
        def size(self) -> int:
            return size

    before, after, *_ = _fsdp_collectives._get_gradient_divide_factors(Group(), None, dtype)  # type: ignore[arg-type] # only its size is asked for
    assert library_division(dtype, size) == division
    assert (before or 1, after or size) == division


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))


def shard(model: nn.Sequential, policy: MixedPrecisionPolicy, **options: Any) -> nn.Sequential:
    for layer in model:
        fully_shard(layer, mp_policy=policy, **options)
    fully_shard(model, mp_policy=policy, **options)
    return model


def ranks_of(model: nn.Module, recipe: str, micro_batches: int = 1) -> Ranks:
    plan, backend = planned(recipe, micro_batches)
    ranks = find_ranks(model, [torch.optim.SGD(model.parameters(), lr=0.1)], plan, backend)
    assert ranks is not None
    return ranks


def misfit(rank: int, recipe: str, policy: MixedPrecisionPolicy) -> str:
    model = net()
    fully_shard(model[1], mp_policy=policy)
    fully_shard(model, mp_policy=fsdp_policy(planned(recipe)[0]))
    try:
        ranks = ranks_of(model, recipe)
    except SessionError as error:
        return str(error)
    return f"{ranks.sharded}, {ranks.communication}, {ranks.factor():g}"


def test_a_module_with_another_policy_than_the_plan_is_named() -> None:
    texts = run_ranks(2, misfit, "bf16-master", MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    found = "1 was sharded with param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, the plan has param_dtype=torch.bfloat16, reduce_dtype=torch.float32"
    assert texts == [f"prepare(): {found}; fully_shard(module, mp_policy=target.fsdp_policy(plan))"] * 2


def test_policies_that_say_the_same_in_other_words_fit() -> None:
    assert run_ranks(2, misfit, "bf16", MixedPrecisionPolicy(param_dtype=torch.float32)) == ["True, fp32: FSDP2, 2"] * 2


def shard_low(rank: int) -> str:
    model = shard(net().to(torch.bfloat16), fsdp_policy(planned("bf16-master")[0]))
    try:
        ranks_of(model, "bf16-master")
    except SessionError as error:
        return str(error)
    return ""


def test_sharded_masters_must_be_fp32() -> None:
    found = "the model was sharded in torch.bfloat16, and its parts are the masters that the recipe keeps in fp32"
    assert run_ranks(2, shard_low) == [f"prepare(): {found}; apply fully_shard to the fp32 model"] * 2


def accumulate(rank: int, recipe: str, shape: tuple[int, ...], windows: list[list[bool]]) -> list[list[Tensor]]:
    """Return what each rank holds of the gradients after windows of micro-batches; an item says whether the micro-batch is known as the last."""
    policy = fsdp_policy(planned(recipe)[0])
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    model = shard(net(), policy, mesh=mesh)
    ranks = ranks_of(model, recipe, 2)
    generator = torch.Generator().manual_seed(rank)
    batches = [torch.randn(4, 3, generator=generator) for _ in range(2)]
    found = []
    for window in windows:
        for last, x in zip(window, batches, strict=False):
            with ranks.no_sync(last) or nullcontext():
                loss = model(x).float().square().sum()
            loss.backward()
            ranks.went_backward()
            if not last:
                assert all(parameter.grad is None for parameter in model.parameters()), "reduced before its time"
        ranks.settle(list(model.parameters()))
        ranks.settle(list(model.parameters()))
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        assert all(gradient.dtype == torch.float32 for gradient in local(gradients))
        found.append([part.clone() for part in local(gradients)])
        model.zero_grad()
    return found


@pytest.mark.parametrize(("recipe", "shape"), [("bf16", (2,)), ("bf16-master", (2,)), ("fp32", (2, 2))])
def test_fsdp2_reduces_the_last_micro_batch_only_and_a_group_that_ends_early(recipe: str, shape: tuple[int, ...]) -> None:
    for known, early, again in run_ranks(math.prod(shape), accumulate, recipe, shape, [[False, True], [False, False], [False, True]]):
        assert len(known) == 4
        assert all(torch.equal(a, b) for a, b in zip(known, early, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(known, again, strict=True))


def give_up_a_window(rank: int, recipe: str, given_up: bool) -> list[Tensor]:
    model = shard(net(), fsdp_policy(planned(recipe)[0]))
    ranks = ranks_of(model, recipe, 2)
    for last, x in ([(False, torch.full((4, 3), 1e4))] if given_up else []) + [(False, torch.ones(4, 3)), (True, torch.ones(4, 3) * rank)]:
        with ranks.no_sync(last) or nullcontext():
            loss = model(x).float().square().sum()
        loss.backward()
        ranks.went_backward()
        if x[0, 0] == 1e4:
            ranks.drop()
    return [part.clone() for part in local([parameter.grad for parameter in model.parameters() if parameter.grad is not None])]


@pytest.mark.parametrize("recipe", ["fp32", "bf16-master"])
def test_a_window_that_is_given_up_leaves_nothing_in_fsdp2(recipe: str) -> None:
    clean, after = (run_ranks(2, give_up_a_window, recipe, given_up) for given_up in (False, True))
    assert all(len(a) == 4 and all(torch.equal(x, y) for x, y in zip(a, b, strict=True)) for a, b in zip(clean, after, strict=True))


def lack_the_inside(rank: int) -> str:
    class Hollow:
        def _get_fsdp_state(self) -> object:
            return object()

        def set_requires_gradient_sync(self, last: bool) -> None:
            assert last

    roots: list[FSDPModule] = [Hollow()]  # type: ignore[list-item] # a torch whose FSDP2 has another inside
    try:
        wrapping.reduce_held(roots)
    except SessionError as error:
        return str(error)
    return ""


def test_a_torch_whose_fsdp2_cannot_be_made_to_reduce_is_told_from_one_that_can() -> None:
    assert "let the number of batches be a multiple of micro_batches" in lack_the_inside(0)


def one_rank(rank: int) -> tuple[bool, float, float]:
    model = shard(net(), fsdp_policy(planned("fp32")[0]))
    ranks = ranks_of(model, "fp32")
    model(torch.ones(1, 3)).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return ranks.sharded, ranks.total(3), sharded_norm(gradients).item()


def test_one_rank_with_sharded_parameters_is_still_sharded() -> None:
    model = net()
    model(torch.ones(1, 3)).sum().backward()
    ((sharded, total, norm),) = run_ranks(1, one_rank)
    assert (sharded, total) == (True, 3.0)
    full = clipping.total_norm([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert math.isclose(norm, full.item(), rel_tol=50 * 2.0**-24)  # see above


def old_wrapper(rank: int) -> str:
    from torch.distributed.fsdp import FullyShardedDataParallel

    class Disguised(FullyShardedDataParallel):
        def __init__(self) -> None:
            nn.Module.__init__(self)

    try:
        wrapping.Wrapping(nn.Sequential(Disguised()))
    except SessionError as error:
        return str(error)
    return ""


def test_the_wrapper_that_flattens_parameters_is_refused() -> None:
    assert "wrap with fully_shard (FSDP2)" in old_wrapper(0)
