"""A plan on a real NPU does what it says: by value, where a value can tell. Takes under 5 minutes and sets nothing that it does not restore."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import mpbackend
from mpbackend.errors import PlanError
from mpbackend.train import clipping
from mpbackend.train.fence import Fence
from mpbackend.train.policy import PinnedPolicy
from mpbackend.train.step import StepResult
from mpbackend.train.verdict import read_norm, register_of
from mpbackend_ascend.op_policy import AUTOCAST_KEY, POLICY

Evidence = dict[str, Any]

STEPS = 40
SIDE = 1024
FINE = 1.0 + 2.0**-13
"""Exact in fp32; 1 in hf32, which keeps 10 or 11 fraction bits, and in fp16 and bf16."""

LOW_BIT = ("fp8", "fp8-delayed", "mxfp8", "hif8")
FEW = 3
"""Steps where the device is simulated."""


def npu() -> Any:
    return vars(torch)["npu"]


def granted(target: mpbackend.Target, recipe: str) -> mpbackend.Plan | None:
    """Return the plan of a recipe, or None where the device refuses it."""
    try:
        return target.plan(recipe)
    except PlanError:
        return None


def plan_or_skip(target: mpbackend.Target, recipe: str) -> mpbackend.Plan:
    try:
        return target.plan(recipe)
    except PlanError as refused:
        pytest.skip(f"refused here: {refused}")


def test_discovery_is_what_torch_npu_says(target: mpbackend.Target, evidence: Evidence) -> None:
    devices = list(target.backend.discover())
    assert len(devices) == npu().device_count()
    assert {device.name for device in devices} == {npu().get_device_name(0)}
    assert target.info.arch != "unknown", "an SoC name that the matrix lacks: please report it"
    evidence["devices"] = [[device.key, device.name] for device in devices]
    evidence["soc version"] = npu().utils.get_soc_version()
    evidence["bf16, as torch_npu says"] = npu().is_bf16_supported()


def test_switches_and_their_defaults(target: mpbackend.Target, evidence: Evidence) -> None:
    found = {switch.name: switch.get() for switch in target.backend.switches(target.info)}
    declared = {switch.name: switch.default for switch in target.plugins.matrix().switches(target.info.arch)}
    assert {name: found[name] for name in declared} == declared
    evidence["switches"] = found


def test_autocast_policy_is_that_of_the_wheel(target: mpbackend.Target, evidence: Evidence) -> None:
    registered = {name.removeprefix("aten::") for name in torch._C._dispatch_get_registrations_for_dispatch_key(AUTOCAST_KEY)}
    evidence["autocast, other than the table"] = {"more": sorted(registered - set(POLICY)), "fewer": sorted(set(POLICY) - registered)}
    if target.info.versions["torch_npu"].startswith("2.13."):
        assert registered == set(POLICY)


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "fp16"])
def test_the_demo_model_trains(recipe: str, target: mpbackend.Target, hardware: bool, evidence: Evidence, tmp_path: Path) -> None:
    plan = plan_or_skip(target, recipe)
    example = importlib.import_module("mpbackend.examples.gpt")
    losses = [loss for loss in example.train(target, plan, str(tmp_path / recipe), STEPS if hardware else FEW, 1) if loss is not None]
    recorded = mpbackend.load_record(tmp_path / recipe)
    record = recorded.record
    assert all(math.isfinite(loss) for loss in losses)
    assert record.run.kind == target.info.kind
    assert not hardware or losses[-1] < losses[0]
    for name, reading in record.switches.items():
        assert reading.read_back == (reading.set or reading.before), name
    times = sorted(row.ms for row in recorded.steps[10:] if row.ms is not None)
    evidence.setdefault("training", {})[recipe] = {
        "losses": losses,
        "median_ms": times[len(times) // 2] if times and hardware else None,
        "shares": record.compute.shares,
        "skipped": record.totals.skipped,
        "peak_bytes": record.memory["peak"],
    }


def fine_products(device: torch.device) -> dict[str, float]:
    """Return one element of a product and of a convolution whose exact value is ``SIDE * FINE``; operands in hf32 or fp16 give ``SIDE``."""
    fine, ones = torch.full((SIDE, SIDE), FINE, device=device), torch.ones(SIDE, SIDE, device=device)
    image = torch.full((2, SIDE, 8, 8), FINE, device=device)
    kernel = torch.ones(16, SIDE, 1, 1, device=device)
    return {"matmul": (fine @ ones)[0, 0].item(), "conv": functional.conv2d(image, kernel)[0, 0, 0, 0].item()}


def test_what_fp32_products_are_computed_in(target: mpbackend.Target, hardware: bool, evidence: Evidence) -> None:
    seen: dict[str, dict[str, float]] = {}
    for recipe in ("fp32", "fp32-fast"):
        plan = granted(target, recipe)
        with Fence(target.backend.switches(target.info), plan.switches if plan is not None else {}, backend="ascend"):
            seen[recipe if plan is not None else f"{recipe}, refused"] = fine_products(target.device)
    evidence["fine products"] = {"exact": SIDE * FINE, "in hf32 or fp16": float(SIDE), **seen}
    if not hardware:
        return
    # every partial sum is a multiple of 2^-13 below 2^11: exact in fp32 in any order
    if "fp32" in seen:
        assert seen["fp32"]["matmul"] == SIDE * FINE
    if (plan := granted(target, "fp32-fast")) is not None and plan.decision("compute.forward", "matmul").granted.startswith("hf32"):
        assert seen["fp32-fast"]["matmul"] == SIDE
    large = torch.full((32, 32), 70000.0, device=target.device) @ torch.eye(32, device=target.device)
    small = torch.full((32, 32), 1e-8, device=target.device) @ torch.eye(32, device=target.device)
    evidence["fp32 product of 70000 and of 1e-8 with 1"] = [str(large[0, 0].item()), str(small[0, 0].item())]


def test_cross_entropy_of_half_logits_is_that_of_fp32(target: mpbackend.Target, hardware: bool, evidence: Evidence) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = (4 * torch.randn(64, 4096, generator=generator)).to(target.device, torch.float16)
    wanted = torch.randint(4096, (64,), generator=generator).to(target.device)
    exact = functional.cross_entropy(logits.float(), wanted).item()
    with torch.autocast("npu", dtype=torch.float16):
        native = functional.cross_entropy(logits, wanted).item()
        with PinnedPolicy(AUTOCAST_KEY, target.backend.op_policy(target.info)):
            pinned = functional.cross_entropy(logits, wanted).item()
            formats = {"softmax": torch.softmax(logits, -1).dtype, "layer_norm": functional.layer_norm(logits, (4096,)).dtype, "sum": logits.sum().dtype}
    assert pinned == exact
    assert set(formats.values()) == {torch.float32}
    evidence["cross_entropy"] = {"exact": exact, "native": native, "pinned": pinned}


def backward(target: mpbackend.Target, scale: Any) -> tuple[nn.Linear, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(8, 1, bias=False).to(target.device)
    with torch.autocast("npu", dtype=torch.float16):
        loss = model(torch.full((4, 8), 4.0).to(target.device)).float().sum()
    return model, scale(loss)


@pytest.mark.parametrize("exponent", [8, 11, 14, 17])
def test_overflow_verdict_is_that_of_the_vendors_scaler(exponent: int, target: mpbackend.Target, evidence: Evidence) -> None:
    """The gradient is 16 times the scale: beyond fp16 from 2^12 on."""
    scaler = importlib.import_module("torch_npu").npu.amp.GradScaler(init_scale=2.0**exponent)
    model, scaled = backward(target, scaler.scale)
    scaled.backward()
    scaler.unscale_(torch.optim.SGD(model.parameters(), lr=0.0))
    theirs = bool(scaler._has_overflow)
    flag = target.backend.overflow(target.info)
    model, scaled = backward(target, lambda loss: loss * 2.0**exponent)
    if flag is not None:
        flag.clear()
    scaled.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    mine = not math.isfinite(read_norm(clipping.total_norm(gradients), register_of(flag, None)))
    evidence.setdefault("overflow", {})[f"2^{exponent}"] = {"verdict": mine, "vendor": theirs, "largest gradient": str(gradients[0].max().item())}
    assert mine == theirs == (16 * 2.0**exponent > 65504)


def test_an_overflow_skips_and_backs_off(target: mpbackend.Target, evidence: Evidence) -> None:
    model = nn.Linear(1, 1, bias=False).to(target.device)
    before = model.weight.item()
    x = torch.tensor([[50.0]]).to(target.device)
    results: list[StepResult] = []
    with target.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), "fp16:loss_scale.init=65536") as session:
        while not (results and results[-1].stepped) and len(results) < 12:
            with session.autocast():
                loss = model(x).float().sum()
            session.backward(loss)
            results.append(session.step())
    evidence["backing off from 65536 with a gradient of 50"] = [[result.stepped, result.loss_scale, result.reason] for result in results]
    assert results[-1].stepped
    assert before - model.weight.item() == pytest.approx(50.0, rel=1e-3)


def test_memory_and_time_are_those_of_the_npu(target: mpbackend.Target, hardware: bool, evidence: Evidence) -> None:
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
    assert held.allocated - before.allocated >= 4 << 20
    assert after.allocated == before.allocated
    assert (after.peak or 0) >= held.allocated
    elapsed = clock.elapsed_ms(start, end)
    assert elapsed >= 0
    evidence["fill 4 MiB, ms"] = elapsed if hardware else None


@pytest.mark.parametrize("recipe", LOW_BIT)
def test_low_bit_layers(recipe: str, target: mpbackend.Target, hardware: bool, evidence: Evidence) -> None:
    plan_or_skip(target, recipe)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128), nn.Linear(128, 10)).to(target.device)
    plain = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128), nn.Linear(128, 10)).to(target.device)
    plain.load_state_dict(model.state_dict())
    x, wanted = torch.randn(256, 128).to(target.device), torch.randn(256, 10).to(target.device)
    losses = []
    with target.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), recipe, clip_norm=1.0) as session:
        with session.autocast():
            error = (model(x) - plain(x)).float().norm() / plain(x).float().norm()
        for _ in range(STEPS if hardware else FEW):
            with session.autocast():
                loss = functional.mse_loss(model(x), wanted)
            session.backward(loss)
            session.step()
            losses.append(loss.item())
    assert [row["action"] for row in session.conversion] == ["converted", "converted", "skipped"]
    assert losses[-1] < losses[0]
    assert error.item() < 0.2, "two layers of 3 fraction bits"
    evidence.setdefault("low-bit", {})[recipe] = {"relative error of the output": error.item(), "losses": losses[::10]}
