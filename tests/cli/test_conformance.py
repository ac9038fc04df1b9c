"""``mpbackend conformance``: one line for bad input, evidence that is whole, and an exit code that tells."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import click.testing
import pytest

from mpbackend.conformance.evidence import load_evidence, write_evidence
from mpbackend.conformance.registry import CHECKS
from tests.conformance.test_evidence import evidence

Invoke = Callable[..., click.testing.Result]
Refused = Callable[..., str]

LIGHT = ("--check", "members,environment", "--check", "collective_formats")
"""Checks that need no product."""


def test_chosen_checks_are_shown_and_write_no_file(invoke: Invoke, tmp_path: Path) -> None:
    result = invoke("conformance", "--backend", "cpu", "--quick", *LIGHT, "--out", str(tmp_path / "out"))
    assert result.exit_code == 0
    assert "conforms: 3 passed, 0 failed, 0 expected failure, 0 skipped" in " ".join(result.stdout.split())
    assert [name in result.stdout for name in ("members", "environment", "collective_formats", "matmul")] == [True, True, True, False]
    assert not (tmp_path / "out").exists()


def test_all_checks_write_evidence(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mpbackend.conformance.runner as runner

    few = {name: CHECKS[name] for name in ("members", "environment")}
    monkeypatch.setattr(runner, "CHECKS", few)
    result = invoke("conformance", "--backend", "cpu", "--quick", "--out", str(tmp_path / "out"), "--format", "json")
    (path,) = (tmp_path / "out").iterdir()
    assert result.exit_code == 0
    assert f"evidence: {path}" in result.stderr
    assert json.loads(result.stdout) == json.loads(path.read_text(encoding="utf-8"))
    found = load_evidence(path)
    assert (found.backend, found.quick, [item.check for item in found.results]) == ("cpu", True, list(few))


def test_a_failure_is_told_at_once_and_exits_with_1(invoke: Invoke) -> None:
    result = invoke("conformance", "--backend", "cpu", "--check", "members", "--expect", "members=not written yet")
    assert result.exit_code == 1
    assert "failed: members: it passes, but was expected to fail: not written yet" in result.stderr
    assert "does not conform" in result.stdout


def test_markdown(invoke: Invoke) -> None:
    result = invoke("conformance", "--backend", "cpu", "--check", "members", "--format", "md")
    assert result.stdout.startswith("# Conformance of cpu on ")


def test_the_list_shows_every_check_without_running_one(invoke: Invoke) -> None:
    listed = json.loads(invoke("conformance", "--list", "--format", "json").stdout)
    assert [row["check"] for row in listed] == list(CHECKS)
    assert all(row["property"].endswith(".") for row in listed)
    assert f"{len(CHECKS)} checks of a backend" in invoke("conformance", "--list").stdout


def test_two_files_are_compared(invoke: Invoke, tmp_path: Path) -> None:
    first = write_evidence(evidence(), tmp_path / "a")
    second = write_evidence(evidence(quick=True, results=evidence().results[:1]), tmp_path / "b")
    result = invoke("conformance", "--diff", str(first), str(second))
    assert result.exit_code == 0
    assert "Parity of acme-x1 and acme-x1" in result.stdout
    assert "only the quick sizes" in result.stdout
    document = json.loads(invoke("conformance", "--diff", str(first), str(second), "--format", "json").stdout)
    assert [(row["check"], row["verdict"]) for row in document["checks"]] == [("matmul", "same"), ("notes", "one side only")]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "not exactly one of --backend, --diff and --list"),
        (("--backend", "cpu", "--list"), "not exactly one of"),
        (("--backend", "nix"), "unknown backend 'nix'"),
        (("--backend", "cpu", "--device", "7"), "unknown device of backend cpu '7'"),
        (("--backend", "cpu:0", "--device", "0"), "two addresses"),
        (("--backend", "cpu", "--check", "matmull"), "nearest: matmul"),
        (("--backend", "cpu", "--expect", "matmul"), "no check and reason"),
        (("--backend", "cpu", "--expect", "matmull=why"), "nearest: matmul"),
        (("--backend", "cpu", "--expect", "notes=a", "--expect", "notes=b"), "notes is expected twice"),
        (("--diff", "nowhere.json", "nowhere.json"), "cannot read nowhere.json"),
    ],
)
def test_bad_input_is_one_line(refused: Refused, arguments: tuple[str, ...], words: str) -> None:
    assert words in refused("conformance", *arguments)


def test_a_stranger_s_file_is_one_line(refused: Refused, tmp_path: Path) -> None:
    path = tmp_path / "evidence.json"
    path.write_text('{"schema": 1, "kind": "conformance", "\\u001b[31m": 1}', encoding="utf-8")
    assert "no evidence of schema 1" in refused("conformance", "--diff", str(path), str(path))


def test_comparing_needs_no_torch(tmp_path: Path) -> None:
    import subprocess

    path = write_evidence(evidence(), tmp_path)
    program = f"""
import sys
from mpbackend.cli.main import main
try:
    main(["conformance", "--diff", {str(path)!r}, {str(path)!r}])
except SystemExit as ended:
    assert ended.code == 0
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
