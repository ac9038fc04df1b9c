from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from mpbackend.cli.compare import repeated
from mpbackend.observe.record_writer import RecordWriter
from tests.comparison.building import falling, recorded


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., str]:
    """Write a record and return its folder."""

    def write(name: str, shift: float = 0.0, **changes: Any) -> str:
        made = recorded([loss + shift for loss in falling()], **changes)
        writer = RecordWriter(tmp_path / name)
        writer.append(made.steps)
        writer.write(made.record)
        writer.close()
        return str(tmp_path / name)

    return write


def test_two_folders_have_a_verdict_and_exit_code_0(invoke: Callable[..., Result], folder: Callable[..., str]) -> None:
    result = invoke("compare", folder("a"), folder("b", 0.01, recipe="bf16"))
    assert (result.exit_code, result.stdout.splitlines()[0]) == (0, "? inconclusive: bf16 on h100 against fp32 on h100")
    assert invoke("compare", folder("c"), folder("d", seed=2)).exit_code == 0


def test_sides_take_every_folder_up_to_the_next_option(invoke: Callable[..., Result], folder: Callable[..., str]) -> None:
    one = [folder(f"a{seed}", 0.01 * seed, seed=seed) for seed in (1, 2, 3)]
    other = [folder(f"b{seed}", 0.01 * seed + 1e-5 * seed, seed=seed) for seed in (1, 2, 3)]
    result = invoke("compare", "--baseline", *one, "--candidate", *other, "--format", "json", "--margin", "0.5%")
    document = json.loads(result.stdout)
    assert (document["verdict"], document["design"], document["quality"]["margin_text"]) == ("equivalent", "paired", "0.5%")
    assert [run["name"] for run in document["baseline"]] == one


def test_a_verdict_may_fail(invoke: Callable[..., Result], folder: Callable[..., str]) -> None:
    pair = (folder("a"), folder("b", seed=2))
    assert invoke("compare", *pair, "--fail-on", "different,not comparable").exit_code == 1
    assert invoke("compare", *pair, "--fail-on", "different", "--fail-on", "inconclusive").exit_code == 0


def test_the_report_is_written(invoke: Callable[..., Result], folder: Callable[..., str], tmp_path: Path) -> None:
    out = tmp_path / "report.md"
    result = invoke("compare", folder("a"), folder("b"), "--format", "md", "--out", str(out))
    assert (result.exit_code, result.stdout) == (0, "")
    assert out.read_text(encoding="utf-8").startswith("# = equivalent: ")


def test_what_is_asked_wrongly_is_one_line(refused: Callable[..., str], folder: Callable[..., str], tmp_path: Path) -> None:
    one = folder("a")
    assert "a record is a folder with record.json" in refused("compare", one, str(tmp_path / "none"))
    assert "1 folder; write `mpbackend compare A B`" in refused("compare", one)
    assert "no --candidate" in refused("compare", "--baseline", one)
    assert "no folder" in refused("compare")
    assert "beside --baseline" in refused("compare", one, one, "--baseline", one)
    assert "unknown verdict 'worse'" in refused("compare", one, one, "--fail-on", "worse")
    assert "margin '1/1000'" in refused("compare", one, one, "--margin", "1/1000")
    assert "metric 'bleu'" in refused("compare", one, one, "--metric", "bleu")


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("--baseline a b --candidate c", "--baseline a --baseline b --candidate c"),
        ("--baseline a --margin 1 --candidate c d --out x", "--baseline a --margin 1 --candidate c --candidate d --out x"),
        ("a b --margin 1", "a b --margin 1"),
        ("--candidate=c d", "--candidate=c d"),
        ("--baseline", "--baseline"),
    ],
)
def test_options_are_repeated_before_each_folder(given: str, found: str) -> None:
    assert repeated(given.split()) == found.split()
