"""Tests on a simulated NPU under the real torch_npu. `make test-ascend` runs them, once for each SoC; elsewhere `../test_lane.py` skips them.

What passes here is evidence for calls, formats, gates and control flow, never for the accuracy or speed of an NPU.
"""

from __future__ import annotations

import os

import pytest

import mpbackend
from mpbackend.device import Device

SOC = os.environ.get("CANN_STUB_SOC", "")

collect_ignore_glob = [] if SOC else ["test_*.py"]

ARCHS = {
    "Ascend910A": "ascend-910a",
    "Ascend310P3": "ascend-310p",
    "Ascend910B1": "ascend-a2",
    "Ascend910_9392": "ascend-a3",
    "Ascend950PR_9599": "ascend-950",
}


def pytest_report_header() -> list[str]:
    return [f"simulated device: {SOC or 'none'}"]


@pytest.fixture(scope="session")
def soc() -> str:
    return SOC


@pytest.fixture(scope="session")
def arch() -> str:
    return ARCHS[SOC]


@pytest.fixture(scope="session")
def saturating(arch: str) -> bool:
    return arch in ("ascend-910a", "ascend-310p")


@pytest.fixture(scope="session")
def target() -> mpbackend.Target:
    return mpbackend.select("npu:0")


@pytest.fixture(scope="session")
def device(target: mpbackend.Target) -> Device:
    return target.info
