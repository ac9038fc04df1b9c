"""Converted layers on the real Python layer of Transformer Engine; see ``support/installed_engine.py``. No product runs."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("transformer_engine") is None:
    pytest.skip("Transformer Engine is not installed; `make test-te` installs it", allow_module_level=True)

PROGRAM = Path(__file__).parent / "support" / "installed_engine.py"


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    done = subprocess.run([sys.executable, str(PROGRAM)], capture_output=True, text=True, env=dict(os.environ), check=False)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize(("text", "more_keys"), [("fp8", []), ("fp8-delayed", ["0._extra_state", "1._extra_state"])])
def test_a_model_of_its_layers(text: str, more_keys: list[str], found: dict[str, Any]) -> None:
    assert found[text] == {
        "actions": ["converted", "converted", "skipped"],
        "is a layer of Transformer Engine": True,
        "same parameters": True,
        "loads plain weights": True,
        "more keys": more_keys,
        "same outside": True,
        "region": [False, False, True, False],
        "restored": 2,
    }


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_its_delayed_scaling_gives_the_scales_of_the_plain_lowering(algorithm: str, found: dict[str, Any]) -> None:
    """Bit for bit: both divide in fp32, and the margin is a power of two. An outlier leaves the window, and an amax of 0 leaves the scale."""
    assert found[algorithm] == [True] * 10
