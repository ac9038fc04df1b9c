"""A real NPU, and what was seen on it. Run by ``make test-npu``; skipped where there is none.

The simulated lane runs the same file so that its lines have run (``--simulated``, kind ``simulated``): what only silicon can answer is left out there.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mpbackend
from mpbackend.device import Device
from mpbackend_ascend.backend import AscendBackend

Evidence = dict[str, Any]

ON_SIMULATOR = "MPBACKEND_DEVICE_TESTS_ON_SIMULATOR"
"""Set to 1 by the simulated lane."""


def find_device() -> tuple[Device | None, str]:
    """Return the first usable NPU, or None and why there is none."""
    devices = list(AscendBackend().discover())
    allowed = {"hardware", "simulated"} if os.environ.get(ON_SIMULATOR) == "1" else {"hardware"}
    for device in devices:
        if device.usable and device.kind in allowed:
            return device, ""
    causes = "; ".join(device.cause or f"{device.name} is {device.kind}" for device in devices)
    return None, f"no NPU here: {causes or 'neither an NPU nor torch_npu was found'}"


@pytest.fixture(scope="session")
def target() -> mpbackend.Target:
    """Return the first usable NPU."""
    device, reason = find_device()
    if device is None:
        pytest.skip(reason)
    return mpbackend.select(device.address)


@pytest.fixture(scope="session")
def hardware(target: mpbackend.Target) -> bool:
    """Whether the device is silicon, so that values and times mean something."""
    return target.info.kind == "hardware"


@pytest.fixture(scope="session")
def evidence(target: mpbackend.Target) -> Iterator[Evidence]:
    """Collect what the tests see, and write it to ``$OUT``, or ``./evidence``, when they are done."""
    info = target.info
    found: Evidence = {
        "kind": "measured" if info.kind == "hardware" else info.kind,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "device": {"key": info.key, "arch": info.arch, "name": info.name, "kind": info.kind},
        "environment": dict(target.backend.environment(info)),
    }
    yield found
    folder = Path(os.environ.get("OUT", "evidence"))
    folder.mkdir(parents=True, exist_ok=True)
    name = f"npu-{info.key}.json" if info.kind == "hardware" else f"npu-{info.key}-{info.kind}.json"
    (folder / name).write_text(json.dumps(found, indent=2, sort_keys=True) + "\n", encoding="utf-8")
