"""Switches of emulated devices: those of the matrices, kept in this process and behind the fence of a session."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import mpbackend
from mpbackend.errors import BackendError
from mpbackend.matrix import Matrix
from mpbackend.train.fence import Fence, FenceRegistry
from mpbackend_emulator.settings import Settings, emulated_switches

Select = Callable[[str], mpbackend.Target]


def test_every_setting_of_every_architecture_reads_back_and_is_restored(matrix: Matrix) -> None:
    for arch in matrix.archs:
        settings = Settings()
        switches = emulated_switches(matrix.switches(arch), settings)
        defaults = {record.name: record.default for record in matrix.switches(arch)}
        for switch in switches:
            assert switch.get() == defaults[switch.name]
            for value in switch.allowed:
                with Fence(switches, {switch.name: value}, registry=FenceRegistry()):
                    assert switch.get() == value
                assert switch.get() == defaults[switch.name]


def test_two_devices_share_a_switch_of_one_name(matrix: Matrix) -> None:
    settings = Settings()
    first, second = (next(s for s in emulated_switches(matrix.switches(arch), settings) if s.name == "matmul.fp32_precision") for arch in ("sm_90", "sm_80"))
    first.set("tf32")
    assert second.get() == "tf32"


def test_a_setting_that_a_switch_has_not_is_refused(matrix: Matrix) -> None:
    (switch, *_) = emulated_switches(matrix.switches("ascend-a2"), Settings())
    with pytest.raises(BackendError, match="not a setting of it on"):
        switch.set("tf32")


def test_a_session_sets_the_switches_and_puts_them_back(target_of: Select) -> None:
    """Outside a session the emulated A2 convolves in hf32; the recipe ``fp32`` turns that off while its session lives."""
    target = target_of("ascend-910b3")
    switch = next(switch for switch in target.backend.switches(target.info) if switch.name == "conv.allow_hf32")
    fine = torch.full((1, 1, 1), 1.0 + 2.0**-12)
    model = nn.Conv1d(1, 1, 1, bias=False)
    nn.init.ones_(model.weight)
    assert switch.get() == "True"
    with target.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32") as session:
        assert switch.get() == "False"
        with session.autocast(), torch.no_grad():
            assert model(fine).item() == 1.0 + 2.0**-12
        plan = session.plan
    assert switch.get() == "True"
    with target.backend.execute(plan), torch.no_grad():
        assert model(fine).item() == 1.0


def test_switches_of_the_host_are_reported_and_not_set(target_of: Select) -> None:
    target = target_of("h100")
    names = [switch.name for switch in target.backend.switches(target.info)]
    assert {"host.matmul.fp32_precision", "host.mkldnn.enabled", "deterministic", "matmul.fp32_precision"} <= set(names)
    assert len(names) == len(set(names))
    assert not any(name.startswith("host.") for name in target.plan("fp32").switches)
