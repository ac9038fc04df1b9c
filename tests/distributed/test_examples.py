"""The example with DDP and its twin in plain torch: both run on two ranks, resume, and differ in a few lines."""

from __future__ import annotations

import ast
import difflib
import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.processor import has_bf16
from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[2]
MOST_LINES = 6


def lines_of(source: str) -> list[str]:
    """Return what is left of a script without imports, documentation, comments and blank lines, each line stripped."""
    tree = ast.parse(source)
    documented = [node for node in ast.walk(tree) if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node)]
    dropped: list[ast.stmt] = [node.body[0] for node in documented]
    dropped += [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    left_out = {line for node in dropped for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    lines = [line.split("  # ")[0].strip() for number, line in enumerate(source.splitlines(), 1) if number not in left_out]
    return [line for line in lines if line and not line.startswith("#")]


def difference(first: str, second: str) -> int:
    """Return the lines in which two scripts differ: the longer side of every changed passage."""
    codes = difflib.SequenceMatcher(None, lines_of(first), lines_of(second), autojunk=False).get_opcodes()
    return sum(max(a2 - a1, b2 - b1) for kind, a1, a2, b1, b2 in codes if kind != "equal")


def test_the_scripts_differ_in_a_few_lines() -> None:
    scripts = [(ROOT / "examples" / name).read_text(encoding="utf-8") for name in ("ddp.py", "ddp_raw.py")]
    assert 0 < difference(*scripts) <= MOST_LINES


@pytest.mark.parametrize(
    ("second", "count"),
    [
        ('"""Other."""\nimport os\n\na = 1  # a reason\nb = 2\n', 0),
        ('"""Doc."""\nimport sys\n# planted\na = 1\nc = 3\n', 1),
        ('"""Doc."""\na = 1\nc = 3\nd = 4\nb = 2\n', 2),
        ('"""Doc."""\nb = 2\n', 1),
    ],
)
def test_a_difference_is_counted_by_the_longer_side(second: str, count: int) -> None:
    assert difference('"""Doc."""\nimport sys\n\na = 1\nb = 2\n', second) == count


def train(rank: int, name: str, folder: str, stops: list[int]) -> None:
    """Train to each of ``stops`` in turn, every time from the checkpoint, as separate starts of the script do."""
    module: Any = importlib.import_module(f"examples.{name}")
    Path(folder).mkdir(exist_ok=True)
    for steps in stops:
        module.train(Path(folder), steps, stops[-1])


def rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for path in sorted(folder.glob("start-*/log.jsonl")) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.skipif(not has_bf16(), reason="the scripts ask for bf16, which this processor has no instruction for")
@pytest.mark.parametrize("name", ["ddp", "ddp_raw"])
def test_a_resumed_run_logs_what_an_uninterrupted_one_does(name: str, tmp_path: Path) -> None:
    for folder, stops in (("whole", [10]), ("resumed", [5, 10])):
        run_ranks(2, train, name, str(tmp_path / folder), stops)
    whole, resumed = rows(tmp_path / "whole"), rows(tmp_path / "resumed")
    assert [row["step"] for row in whole] == list(range(1, 11))
    assert len(list((tmp_path / "resumed").glob("start-*"))) == 2
    assert whole == resumed


@pytest.mark.skipif(not has_bf16(), reason="the scripts ask for bf16, which this processor has no instruction for")
def test_both_scripts_train_alike(tmp_path: Path) -> None:
    for name in ("ddp", "ddp_raw"):
        run_ranks(2, train, name, str(tmp_path / name), [10])
    mine, raw = rows(tmp_path / "ddp"), rows(tmp_path / "ddp_raw")
    assert [row["lr"] for row in mine] == [row["lr"] for row in raw]
    # bf16 rounds each operand to 2^-8; the session keeps softmax and norms in fp32, torch's own list on a CPU does not
    assert all(math.isclose(a["loss"], b["loss"], rel_tol=2.0**-8) for a, b in zip(mine, raw, strict=True))
    assert mine[-1]["loss"] < mine[0]["loss"]


@pytest.mark.slow
@pytest.mark.skipif(not has_bf16(), reason="the scripts ask for bf16, which this processor has no instruction for")
@pytest.mark.parametrize("launcher", [["-m", "torch.distributed.run", "--nproc-per-node", "2"], []], ids=["two ranks", "one process"])
@pytest.mark.parametrize("script", ["ddp.py", "ddp_raw.py"])
def test_the_scripts_run_from_the_command_line(launcher: list[str], script: str, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error::UserWarning", *launcher, str(ROOT / "examples" / script), str(tmp_path / "run"), "--steps", "5"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert ended.returncode == 0, ended.stderr
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3, 4, 5]
