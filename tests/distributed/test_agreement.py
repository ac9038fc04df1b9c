"""Ranks find out together that they differ, that one has failed, and what they count."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mpbackend.backend import Backend, Collectives
from mpbackend.errors import SessionError
from mpbackend.train import agreement as agreement_module
from mpbackend.train.agreement import Agreement, differences, name_ranks, total_count
from mpbackend.train.distributed import Ranks, find_ranks
from tests.support.planned import planned
from tests.support.ranks import run_ranks


def find(model: nn.Module, recipe: str, micro_batches: int = 1, settings: dict[str, str] | None = None, backend: Backend | None = None) -> Ranks | None:
    plan, own = planned(recipe, micro_batches)
    return find_ranks(model, [torch.optim.SGD(model.parameters(), lr=0.1)], plan, backend or own, settings)


def ddp() -> DistributedDataParallel:
    return DistributedDataParallel(nn.Linear(2, 2))


def refusal(recipe: str, micro_batches: int = 1, settings: dict[str, str] | None = None, backend: Backend | None = None) -> str:
    try:
        find(ddp(), recipe, micro_batches, settings, backend)
    except SessionError as error:
        dist.barrier()  # every rank is still in step
        return str(error)
    return ""


def test_one_process_has_no_ranks() -> None:
    assert find(nn.Linear(2, 2), "fp32") is None


def alone(rank: int) -> bool:
    return find(ddp(), "fp32") is None


def test_one_rank_is_none() -> None:
    assert run_ranks(1, alone) == [True]


def differ_in_recipe(rank: int) -> str:
    return refusal("bf16" if rank == 2 else "fp32", settings={"clip_norm": "1"})


def test_ranks_with_different_recipes_are_refused_on_every_rank_with_both_texts() -> None:
    found = run_ranks(3, differ_in_recipe)
    text = "prepare(): ranks 0 and 1: recipe=fp32, granted=fp32; rank 2: recipe=bf16, granted=bf16; prepare every rank with the same plan and settings"
    assert found == [text] * 3


def differ_in_settings(rank: int) -> str:
    return refusal("fp32", settings={"clip_norm": "1" if rank else "none"})


def differ_in_micro_batches(rank: int) -> str:
    return refusal("fp32", micro_batches=2 - rank)


def test_ranks_with_different_settings_or_micro_batches_are_refused() -> None:
    assert "rank 0: clip_norm=none; rank 1: clip_norm=1" in run_ranks(2, differ_in_settings)[1]
    assert "rank 0: micro_batches=2; rank 1: micro_batches=1" in run_ranks(2, differ_in_micro_batches)[0]


def test_the_hash_of_the_plan_is_named_only_when_nothing_else_differs() -> None:
    assert differences([{"recipe": "a", "plan": "1"}, {"recipe": "b", "plan": "2"}]) == "rank 0: recipe=a; rank 1: recipe=b"
    assert differences([{"recipe": "a", "plan": "1"}, {"recipe": "a", "plan": "2"}]) == "rank 0: plan=1; rank 1: plan=2"
    assert differences([{"recipe": "a", "plan": "1"}] * 3) is None
    assert differences([{"clip": "1", "plan": "1"}, {"plan": "1"}]) == "rank 0: clip=1; rank 1: clip=none"


@pytest.mark.parametrize(
    ("ranks", "words"),
    [([3], "rank 3"), ([0, 2], "ranks 0 and 2"), ([0, 1, 2], "ranks 0, 1 and 2"), (list(range(20)), "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more")],
)
def test_ranks_are_named(ranks: list[int], words: str) -> None:
    assert name_ranks(ranks) == words


class Poor:
    """A backend whose collective library sums one format only, and has another name than the one in use."""

    def __init__(self, name: str, reduces: tuple[str, ...]) -> None:
        self._collectives = Collectives(name=name, reduces=reduces)

    def collectives(self, device: object) -> Collectives:
        """Return the planted library."""
        return self._collectives


def lack_a_format(rank: int) -> str:
    _, own = planned("fp32")
    backend = Poor("poorlib", ("int32", "fp32")) if rank == 1 else own
    return refusal("fp32:reduce.format=bf16", backend=backend)  # type: ignore[arg-type] # find_ranks asks for collectives only


def test_a_format_that_the_library_cannot_sum_is_refused_with_its_row_also_where_one_rank_lacks_it() -> None:
    other, own = run_ranks(2, lack_a_format)
    assert own.startswith("prepare() with reduce.format=bf16: poorlib on ")
    assert "sums int32, fp32; sum of bf16 between ranks is native (" in own
    assert own.endswith("; reduce.format=fp32")
    assert other.startswith("prepare(): it failed on rank 1: prepare() with reduce.format=bf16: poorlib on ")


def use_another_library(rank: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        find(ddp(), "fp32", backend=Poor("poorlib", ("fp32",)))  # type: ignore[arg-type] # find_ranks asks for collectives only
    return [str(item.message) for item in caught]


def test_a_process_group_of_another_library_than_the_plugin_speaks_for_warns() -> None:
    text = "the process group reduces cpu tensors through gloo; what is summed exactly is known of poorlib only"
    assert run_ranks(2, use_another_library) == [[text]] * 2


def leave_unwrapped(rank: int) -> tuple[list[str], str, float, float | None, bool | None, str | None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ranks = find(nn.Linear(2, 2), "fp32")
    assert ranks is not None
    texts = [str(item.message) for item in caught]
    if rank:  # ranks that train models of their own need not come to the same calls
        return texts, ranks.communication, ranks.factor(), None, None, None
    return texts, ranks.communication, ranks.factor(), ranks.total(5), bool(ranks.agree_found(torch.tensor(True))), ranks.first_of(("a", "b"), "b")


def test_a_model_without_a_wrapper_warns_and_each_rank_decides_alone() -> None:
    text = "2 ranks, and neither DDP nor fully_shard wraps the model: gradients are not reduced between them"
    first, second = run_ranks(2, leave_unwrapped)
    assert first == ([text], "none: the model is not wrapped", 1.0, 5.0, True, "b")
    assert second[:3] == first[:3]


def own_precision(rank: int) -> str:
    from torch.nn.parallel.distributed import _MixedPrecision

    model = ddp()
    model.mixed_precision = _MixedPrecision(param_dtype=torch.bfloat16)
    try:
        find(model, "fp32")
    except SessionError as error:
        return str(error)
    return ""


def test_ddps_own_mixed_precision_is_refused() -> None:
    assert all("a DDP with mixed precision of its own" in text for text in run_ranks(2, own_precision))


def count(rank: int, counts: list[float]) -> tuple[float, float] | str:
    ranks = find(ddp(), "fp32")
    assert ranks is not None
    try:
        return ranks.total(counts[rank]), ranks.factor()
    except SessionError as error:
        return str(error)


def test_a_denominator_is_summed_over_ranks_in_fp64_and_gradients_by_the_number_of_ranks() -> None:
    assert run_ranks(3, count, [2.0**53, 1.0, 1.0]) == [(2.0**53 + 2, 3.0)] * 3


@pytest.mark.parametrize(("counts", "words"), [([1.0, math.nan], "nan on rank 1"), ([-1.0, 4.0], "-1.0 on rank 0"), ([0.0, 0.0], "0 on every rank")])
def test_a_bad_denominator_is_refused_on_every_rank(counts: list[float], words: str) -> None:
    assert all(words in str(text) for text in run_ranks(2, count, counts))


def test_a_rank_may_count_nothing() -> None:
    assert total_count([0.0, 3.0]) == 3.0


def average_in_pairs(rank: int) -> tuple[float, float, float, str]:
    """Two data-parallel pairs, as under pipelines: every rank knows all groups, and gradients are averaged within its own."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False), process_group=groups[rank // 2])
    ranks = find(model, "fp32:reduce.format=fp16")
    assert ranks is not None
    model(torch.tensor([[float(rank)]])).sum().backward()
    gradient = model.module.weight.grad
    assert gradient is not None
    return ranks.total(rank + 1), ranks.factor(), gradient.item(), ranks.communication


def test_what_is_averaged_over_some_ranks_is_counted_over_those() -> None:
    pairs = [(total, factor, gradient) for total, factor, gradient, _ in run_ranks(4, average_in_pairs)]
    assert pairs == [(3.0, 2.0, 0.5)] * 2 + [(7.0, 2.0, 2.5)] * 2


def decide(rank: int) -> tuple[list[bool], list[bool], str, str | None, str | None]:
    ranks = find(ddp(), "fp32")
    assert ranks is not None
    found = torch.tensor([float(rank == 2), 0.0])  # in the format of the exchange: what a rank found itself must stay
    agreed = ranks.agree_found(found)
    assert agreed.dtype == torch.bool
    reason = ranks.first_of(("forward_nonfinite", "gradient_overflow", "norm_overflow"), "norm_overflow" if rank else "gradient_overflow")
    return agreed.tolist(), found.bool().tolist(), reason, ranks.agree_error("planted" if rank > 1 else None), ranks.agree_error(None)


def test_four_ranks_agree_on_what_one_of_them_found() -> None:
    expected = ([True, False], "gradient_overflow", "ranks 2 and 3: planted", None)
    results = run_ranks(4, decide)
    assert [(agreed, *rest) for agreed, _, *rest in results] == [expected] * 4
    assert [own for _, own, *_ in results] == [[False, False], [False, False], [True, False], [False, False]]


def fail_together(rank: int) -> str:
    agreement = Agreement()
    try:
        with agreement.together("prepare()"):
            if rank == 1:
                raise ValueError("planted\nsecond line")
    except (ValueError, SessionError) as error:
        agreement.barrier()
        return f"{type(error).__name__}: {error}"
    return ""


def test_an_error_on_one_rank_is_raised_on_all() -> None:
    assert run_ranks(2, fail_together) == [
        "SessionError: prepare(): it failed on rank 1: ValueError: planted; mend it there",
        "ValueError: planted\nsecond line",
    ]


def use_a_group_for_devices(rank: int) -> tuple[list[float], bool, list[str]]:
    """Pretend that the default group reaches no host memory: a group of its own serves, and is given up again."""
    original = agreement_module.libraries
    agreement_module.libraries = lambda group=None: {"device": "anylib"}
    agreement = Agreement()
    agreement_module.libraries = original
    own = agreement._own
    values, texts = agreement.numbers(rank), agreement.objects(str(rank))
    agreement.close()
    agreement.close()
    return values, own is not None, texts


def test_where_the_run_reaches_devices_only_the_host_gets_a_group_of_its_own() -> None:
    assert run_ranks(2, use_a_group_for_devices) == [([0.0, 1.0], True, ["0", "1"])] * 2
