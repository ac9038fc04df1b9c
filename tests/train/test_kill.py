"""Runs are killed with SIGKILL: no checkpoint may be lost or unreadable, no flushed step may be missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="a killed run is a fork of a process that has imported torch already")


def killed(*arguments: str, limit_s: float = 120.0) -> Any:
    """Return what ``tests.support.killing`` reports."""
    command = [sys.executable, "-W", "error", "-m", "tests.support.killing", *arguments]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=limit_s, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_no_kill_before_any_file_call_loses_a_checkpoint_or_a_flushed_step(tmp_path: Path) -> None:
    report = killed("every", str(tmp_path / "run"))
    assert report["faults"] == []
    assert report["killed"] > 50


@pytest.mark.parametrize(("fault", "found"), [("gone", "no save was completed"), ("early", "No such file")])
def test_a_planted_moment_without_a_checkpoint_is_found(tmp_path: Path, fault: str, found: str) -> None:
    report = killed("every", str(tmp_path / "run"), "--first", "50", "--fault", fault)
    assert found in report["faults"][0]


def test_fifty_kills_at_random_moments_lose_nothing(tmp_path: Path) -> None:
    report = killed("random", str(tmp_path / "run"), "--runs", "50", "--seed", "1")
    assert report["faults"] == []
    assert report["killed"] > 40


@pytest.mark.slow
def test_two_thousand_kills_at_random_moments_lose_nothing(tmp_path: Path) -> None:
    report = killed("random", str(tmp_path / "run"), "--runs", "2060", "--seed", "2", limit_s=1200.0)
    assert report["faults"] == []
    assert report["killed"] >= 2000  # of 2,060: one in eighty comes to its end first
