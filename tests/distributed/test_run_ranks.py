"""The helper itself: results in order, exceptions in sight, nothing left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import warnings

import pytest
import torch
import torch.distributed as dist

from tests.support import ranks
from tests.support.ranks import run_ranks


def sum_of_ranks(rank: int, factor: float) -> tuple[int, float, int]:
    value = torch.tensor([rank * factor])
    dist.all_reduce(value)
    return rank, value.item(), torch.get_num_threads()


def fail_on_one(rank: int) -> None:
    if rank == 1:
        raise KeyError("planted")
    dist.barrier()


def die_on_one(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def warn_on_one(rank: int) -> None:
    if rank == 0:
        warnings.warn("planted warning", stacklevel=1)


def hang_on_one(rank: int) -> None:
    if rank == 0:
        signal.pause()


def test_results_come_in_the_order_of_ranks() -> None:
    assert run_ranks(2, sum_of_ranks, 3.0) == [(0, 3.0, 1), (1, 3.0, 1)]


@pytest.mark.parametrize(
    ("function", "words"), [(fail_on_one, "KeyError: 'planted'"), (die_on_one, "ended without an answer"), (warn_on_one, "UserWarning: planted warning")]
)
def test_what_went_wrong_on_a_rank_is_seen(function: object, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        run_ranks(2, function)  # type: ignore[arg-type] # the parameter of the test is any of several functions
    assert multiprocessing.active_children() == []


def test_a_rank_that_hangs_is_killed_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "LIMIT_S", 0.5)
    with pytest.raises(AssertionError, match="no answer after"):
        run_ranks(2, hang_on_one)
    assert multiprocessing.active_children() == []
