"""A plan on a real GPU does what it says: by value, where a value can tell."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import mpbackend
from mpbackend.device import Device
from mpbackend.observe.record import load_record
from mpbackend.train.fence import Fence
from mpbackend.train.policy import PinnedPolicy
from mpbackend_cuda import transformer_engine
from mpbackend_cuda.discovery import capability
from mpbackend_cuda.implementations import refusal
from plugins.cuda.tests.device.conftest import Evidence

if not torch.cuda.is_available():
    pytest.skip("torch finds no GPU here", allow_module_level=True)

STEPS = 60
SIDE = 1024
FINE = 1.0 + 2.0**-12
"""Exact in fp32, and 1 in tf32, which keeps 10 fraction bits."""


def test_discovery_counts_the_gpus_as_torch_does(target: mpbackend.Target, evidence: Evidence) -> None:
    devices = list(target.backend.discover())
    assert len(devices) == torch.cuda.device_count()
    for device in devices:
        assert capability(device) == torch.cuda.get_device_capability(device.index)
        assert device.name == torch.cuda.get_device_name(device.index)
    evidence["devices"] = [device.key for device in devices]


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "fp16"])
def test_the_demo_model_trains(recipe: str, target: mpbackend.Target, evidence: Evidence, tmp_path: Path) -> None:
    if recipe == "bf16" and capability(target.info) < (8, 0):
        pytest.skip("bf16 is emulated on this GPU")
    example = importlib.import_module("mpbackend.examples.gpt")
    plan = target.plan(recipe)
    losses = [loss for loss in example.train(target, plan, str(tmp_path / recipe), STEPS, 1) if loss is not None]
    recorded = load_record(tmp_path / recipe)
    record = recorded.record
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0]
    assert record.run.kind == "hardware"
    assert record.totals.nonfinite == record.totals.skipped
    for name, reading in record.switches.items():
        assert reading.read_back == (reading.set or reading.before), name
    assert {name: record.switches[name].set for name in plan.switches} == plan.switches
    wide = {"bf16": "bf16", "fp16": "fp16"}.get(recipe, "fp32")
    assert max(record.compute.shares, key=lambda name: record.compute.shares[name]).startswith(wide)
    times = sorted(row.ms for row in recorded.steps[10:] if row.ms is not None)
    evidence.setdefault("training", {})[recipe] = {
        "losses": losses,
        "median_ms": times[len(times) // 2] if times else None,
        "shares": record.compute.shares,
        "skipped": record.totals.skipped,
        "peak_bytes": record.memory["peak"],
        "switches": {name: reading.read_back for name, reading in record.switches.items()},
    }


def fine_products(device: torch.device) -> dict[str, float]:
    """Return one element of a product and of a convolution whose exact value is ``SIDE * FINE``; tf32 operands give ``SIDE``."""
    fine, ones = torch.full((SIDE, SIDE), FINE, device=device), torch.ones(SIDE, SIDE, device=device)
    image = torch.full((8, SIDE, 16, 16), FINE, device=device)
    kernel = torch.ones(64, SIDE, 1, 1, device=device)
    return {"matmul": (fine @ ones)[0, 0].item(), "conv": functional.conv2d(image, kernel)[0, 0, 0, 0].item()}


def test_fp32_is_fp32_in_both_families_of_operators(target: mpbackend.Target, evidence: Evidence) -> None:
    seen = {}
    for recipe in ("fp32", "fp32-fast"):
        plan = target.plan(recipe)
        with Fence(target.backend.switches(target.info), plan.switches, backend="cuda") as fence:
            seen[recipe] = fine_products(target.device)
        assert all(row["read_back"] == row["set"] for row in fence.report().values() if row["set"])
    evidence["fine products"] = {"exact": SIDE * FINE, "in tf32": float(SIDE), **seen}
    # every partial sum is a multiple of 2^-12 below 2^11: exact in fp32 in any order
    assert seen["fp32"] == {"matmul": SIDE * FINE, "conv": SIDE * FINE}
    if target.plan("fp32-fast").decision("compute.forward", "matmul").granted == "tf32":
        assert seen["fp32-fast"]["matmul"] == SIDE


def test_cross_entropy_of_bf16_logits_is_that_of_fp32(target: mpbackend.Target, evidence: Evidence) -> None:
    generator = torch.Generator().manual_seed(1)
    dtype = torch.bfloat16 if capability(target.info) >= (8, 0) else torch.float16
    logits = (4 * torch.randn(64, 4096, generator=generator)).to(target.device, dtype)
    wanted = torch.randint(4096, (64,), generator=generator).to(target.device)
    exact = functional.cross_entropy(logits.float(), wanted).item()
    with torch.autocast("cuda", dtype=dtype):
        native = functional.cross_entropy(logits, wanted).item()
        with PinnedPolicy(target.backend.autocast_key, target.backend.op_policy(target.info)) as pin:
            pinned = functional.cross_entropy(logits, wanted).item()
            formats = {"softmax": torch.softmax(logits, -1).dtype, "layer_norm": functional.layer_norm(logits, (4096,)).dtype, "sum": logits.sum().dtype}
    assert pinned == exact
    assert set(formats.values()) == {torch.float32}
    evidence["cross_entropy"] = {"exact": exact, "native": native, "pinned": pinned, "pinned operators": list(pin.pinned)}


def test_an_overflow_skips_the_step_and_halves_the_scale(target: mpbackend.Target, evidence: Evidence) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1)).to(target.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    results = []
    with target.prepare(model, optimizer, "fp16:loss_scale.init=16777216") as session:
        for _ in range(2):
            with session.autocast():
                loss = 1000 * model(torch.ones(32, 64, device=target.device)).sum()
            session.backward(loss)
            results.append(session.step())
            unchanged = all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
            assert unchanged
    assert [(result.stepped, result.reason, result.loss_scale) for result in results] == [
        (False, "gradient_overflow", 2.0**24),
        (False, "gradient_overflow", 2.0**23),
    ]
    evidence["overflow"] = [result.reason for result in results]


def test_memory_and_time_are_those_of_the_gpu(target: mpbackend.Target, evidence: Evidence) -> None:
    meter, clock = target.backend.memory(target.info), target.backend.clock(target.info)
    meter.reset_peak()
    before = meter.read()
    start = clock.mark()
    block = torch.zeros(1 << 20, device=target.device)
    end = clock.mark()
    held = meter.read()
    del block
    after = meter.read()
    assert before.allocated is not None
    assert held.allocated is not None
    assert held.allocated - before.allocated == 4 << 20
    assert after.allocated == before.allocated
    assert after.peak is not None
    assert after.peak >= held.allocated
    evidence["fill 4 MiB, ms"] = clock.elapsed_ms(start, end)
    assert evidence["fill 4 MiB, ms"] >= 0


def engine_reason(device: Device) -> str:
    """Return why fp8 does not run here; empty when it does."""
    return refusal("tensor", capability(device), device.versions.get("cuda", "")) or transformer_engine.load().reason


@pytest.mark.parametrize("recipe", ["fp8", "fp8-delayed"])
def test_the_demo_model_trains_in_fp8(recipe: str, target: mpbackend.Target, evidence: Evidence, tmp_path: Path) -> None:
    if reason := engine_reason(target.info):
        evidence.setdefault("training", {})[recipe] = {"skipped": reason}
        pytest.skip(reason)
    torch.cuda.set_device(target.device)
    example = importlib.import_module("mpbackend.examples.gpt")
    plan = target.plan(recipe)
    losses = [loss for loss in example.train(target, plan, str(tmp_path / recipe), STEPS, 1) if loss is not None]
    record: Any = load_record(tmp_path / recipe).record
    assert losses[-1] < losses[0]
    assert {row["action"] for row in record.conversion} == {"converted"}
    evidence.setdefault("training", {})[recipe] = {"losses": losses, "conversion": list(record.conversion)}


def test_tokens_that_do_not_fit_are_padded_without_changing_the_result(target: mpbackend.Target, evidence: Evidence) -> None:
    """By value: rows of zeros change no amax, so the first rows are those of the same rows in a full block."""
    if reason := engine_reason(target.info):
        pytest.skip(reason)
    torch.cuda.set_device(target.device)
    model: Any = torch.nn.Sequential(torch.nn.Linear(64, 64)).to(target.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = torch.randn(16, 64, device=target.device)
    rows[11:] = 0
    with target.prepare(model, optimizer, "fp8") as session:
        with session.autocast():
            whole, part = model(rows), model(rows[:11])
        session.backward(part.float().sum())
        session.step()
    assert torch.equal(whole[:11], part)
    evidence["padding"] = "bit-equal"
