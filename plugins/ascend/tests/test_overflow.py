"""The status register, and the agreement of ranks, over a fake."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mpbackend_ascend.overflow import StatusRegister, agree


class Guard:
    """Makes reading a tensor on the host an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu", "numpy"):
            monkeypatch.setattr(torch.Tensor, name, self.refuse)

    @staticmethod
    def refuse(*_: Any) -> Any:
        raise AssertionError("the host waits for the device")


def test_found_and_clear_do_not_wait(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    register = StatusRegister(torch.device("cpu"))
    with monkeypatch.context() as guarded:
        Guard(guarded)
        register.clear()
        calm = register.found()
        library.overflow = True
        found = register.found()
        again = register.found()
        register.clear()
        cleared = register.found()
    assert (found.dtype, found.shape) == (torch.bool, torch.Size([]))
    assert [bool(value) for value in (calm, found, again, cleared)] == [False, True, True, False]


def test_register_can_be_given(library: Any) -> None:
    library.overflow = True
    assert bool(StatusRegister(torch.device("cpu"), library).found())


@pytest.mark.parametrize(("mine", "others", "verdict"), [(False, [False, True], True), (True, [False], True), (False, [False], False)])
def test_ranks_agree_on_the_largest_verdict(mine: bool, others: list[bool], verdict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def all_reduce(tensor: torch.Tensor, op: Any) -> None:
        assert op == torch.distributed.ReduceOp.MAX
        assert tensor.dtype is torch.int32, "HCCL sums no bool"
        for other in others:
            tensor.copy_(torch.maximum(tensor, torch.tensor(int(other), dtype=torch.int32)))

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1 + len(others))
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    assert bool(agree(torch.tensor(mine))) is verdict


def test_one_process_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = torch.tensor(True)
    assert agree(verdict) is verdict
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    assert agree(verdict) is verdict
