"""How an overflow is seen: by the status register where the device saturates, by inf and NaN elsewhere; compared with the vendor's own scaler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import mpbackend
from mpbackend.device import Device
from mpbackend.train import clipping
from mpbackend.train.verdict import read_norm, register_of
from mpbackend_ascend.backend import AscendBackend
from mpbackend_ascend.overflow import StatusRegister

SCALES = [2.0**exponent for exponent in range(4, 26, 3)]


def scaled_backward(device: torch.device, scale: torch.Tensor | float) -> tuple[nn.Linear, torch.Tensor]:
    """A backward pass of one fp16 product whose weight gradient is 16 times the scale."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1, bias=False).to(device)
    with torch.autocast("npu", dtype=torch.float16):
        loss = model(torch.full((4, 8), 4.0).to(device)).float().sum()
    return model, loss * scale


def test_register_only_where_the_device_saturates(device: Device, saturating: bool) -> None:
    flag = AscendBackend().overflow(device)
    assert isinstance(flag, StatusRegister) if saturating else flag is None


def test_register_is_sticky_until_cleared(target: mpbackend.Target, saturating: bool) -> None:
    if not saturating:
        pytest.skip("inf and NaN appear on this device")
    flag = StatusRegister(target.device)
    flag.clear()
    assert not flag.found().item()
    big = torch.full((2, 2), 300.0, dtype=torch.float16).to(target.device)
    product = big @ big
    assert torch.isfinite(product).all(), "nothing to see in the values"
    assert product.max().item() == 65504.0
    found = flag.found()
    assert (found.dtype, found.shape, found.device.type) == (torch.bool, torch.Size([]), "npu")
    assert found.item()
    assert flag.found().item(), "reading does not clear"
    flag.clear()
    assert not flag.found().item()
    nan = (big.new_zeros(2) / big.new_zeros(2)).cpu()
    assert nan.tolist() == [0.0, 0.0]
    assert flag.found().item(), "NaN became 0"
    flag.clear()


@pytest.mark.parametrize("scale", SCALES)
def test_verdict_is_that_of_the_vendors_scaler(scale: float, target: mpbackend.Target, device: Device) -> None:
    """The same gradients, judged by torch_npu's GradScaler and by the session's own reading."""
    torch_npu: Any = __import__("torch_npu")
    scaler = torch_npu.npu.amp.GradScaler(init_scale=scale)
    model, _ = scaled_backward(target.device, 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with torch.autocast("npu", dtype=torch.float16):
        loss = model(torch.full((4, 8), 4.0).to(target.device)).float().sum()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    theirs = bool(scaler._has_overflow)

    flag = AscendBackend().overflow(device)
    model, scaled = scaled_backward(target.device, scale)
    if flag is not None:
        flag.clear()
    scaled.backward()
    norm = clipping.total_norm([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    mine = not torch.isfinite(torch.tensor(read_norm(norm, register_of(flag, None))))
    assert mine == theirs
    assert mine == (16.0 * scale > 65504), "fp16's largest value"


def test_case_53_true_gradient_of_50_is_not_taken_for_1(target: mpbackend.Target, saturating: bool) -> None:
    """Saturated at 65504, a gradient of 50 scaled by 65536 reads as 1.0; the register makes the session back off until it is 50."""
    model = nn.Linear(1, 1, bias=False).to(target.device)
    before = float(model.weight.item())
    x = torch.tensor([[50.0]]).to(target.device)
    with target.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), "fp16:loss_scale.init=65536") as session:
        for _ in range(12):
            with session.autocast():
                loss = model(x).float().sum()
            session.backward(loss)
            result = session.step()
            if result.stepped:
                break
    assert result.stepped
    assert result.loss_scale == 1024.0, "the largest power of two at which 50 fits"
    assert before - float(model.weight.item()) == pytest.approx(50.0, rel=1e-3)


SATURATED_A2 = """
import json, torch, mpbackend
target = mpbackend.select("npu:0")
flag = target.backend.overflow(target.info)
flag.clear()
big = torch.full((2, 2), 300.0, dtype=torch.float16).to(target.device)
product = big @ big
print("ANSWER", json.dumps([product.max().item(), flag.found().item(), target.backend.environment(target.info)["INF_NAN_MODE_FORCE_DISABLE"]]))
"""


def test_a2_saturates_when_the_environment_says_so(arch: str) -> None:
    if arch != "ascend-a2":
        pytest.skip("the variable acts on Atlas A2 and A3; run once")
    environment = os.environ | {"INF_NAN_MODE_FORCE_DISABLE": "1"}
    done = subprocess.run([sys.executable, "-c", SATURATED_A2], capture_output=True, text=True, env=environment, check=False, timeout=120)
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert lines, done.stderr[-2000:]
    assert json.loads(lines[0].removeprefix("ANSWER ")) == [65504.0, True, "1"]
