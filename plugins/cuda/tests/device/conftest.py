"""A real GPU, and what was seen on it. Run by ``make test-cuda``; skipped where torch finds none."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mpbackend

Evidence = dict[str, Any]


@pytest.fixture(autouse=True)
def clean() -> None:
    """Take the place of the fixture that hides the GPUs of this machine from the other tests."""


@pytest.fixture(scope="session")
def target() -> mpbackend.Target:
    """Return the first usable GPU."""
    return mpbackend.select("cuda")


@pytest.fixture(scope="session")
def evidence(target: mpbackend.Target) -> Iterator[Evidence]:
    """Collect what the tests see, and write it to ``$OUT``, or ``./evidence``, when they are done."""
    info = target.info
    found: Evidence = {
        "kind": "measured",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "device": {"key": info.key, "arch": info.arch, "name": info.name, "memory_bytes": info.memory_bytes},
        "environment": dict(target.backend.environment(info)),
    }
    yield found
    folder = Path(os.environ.get("OUT", "evidence"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"cuda-{info.key}.json").write_text(json.dumps(found, indent=2, sort_keys=True) + "\n", encoding="utf-8")
