"""Memory and clock through torch_npu's own allocator and events."""

from __future__ import annotations

import torch

import mpbackend
from mpbackend.device import Device
from mpbackend_ascend.backend import AscendBackend


def test_peak_follows_the_allocator(target: mpbackend.Target, device: Device) -> None:
    meter = AscendBackend().memory(device)
    meter.reset_peak()
    before = meter.read()
    assert before.allocated is not None
    tensor = torch.empty(1 << 20, device=target.device)
    during = meter.read()
    del tensor
    after = meter.read()
    assert during.allocated is not None
    assert during.allocated - before.allocated >= 4 << 20
    assert after.allocated == before.allocated
    assert (after.peak or 0) >= during.allocated
    assert "allocator" in during.basis


def test_marks_are_events(device: Device) -> None:
    clock = AscendBackend().clock(device)
    start, end = clock.mark(), clock.mark()
    assert clock.elapsed_ms(start, end) >= 0.0


def test_collectives(device: Device, arch: str) -> None:
    found = AscendBackend().collectives(device)
    assert found.name == "hccl"
    assert {"fp32", "fp16"} <= set(found.reduces)
    assert ("bf16" in found.reduces) == (arch in ("ascend-a2", "ascend-a3", "ascend-950"))
    assert not {"fp8_e4m3", "fp8_e5m2", "hif8"} & set(found.reduces)
