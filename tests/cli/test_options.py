from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import msgspec
import pytest

from mpbackend.cli.options import emit, json_text, split_names, write
from mpbackend.device import Device
from mpbackend.errors import DocumentError
from mpbackend.report.view import Column, Report, Table, level_text

REPORT = Report("R", [Table("", (Column("level"),), [(level_text("absent"),)])])


def test_names_may_be_joined_or_repeated() -> None:
    assert split_names(["a,b", " c ", "a", ","]) == ("a", "b", "c")


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "report.md"
    target.write_text("before", encoding="utf-8")

    def fail(self: Path, _target: Path) -> Path:
        raise PermissionError(13, "not today")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(DocumentError, match=r"cannot write .*report\.md: not today"):
        write("after", target)
    assert target.read_text(encoding="utf-8") == "before"
    assert os.listdir(tmp_path) == ["report.md"]
    monkeypatch.undo()
    write("after\n", target)
    assert target.read_bytes() == b"after\n"
    assert os.listdir(tmp_path) == ["report.md"]


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="cannot write"):
        write("text", tmp_path / "missing" / "report.md")


def test_a_terminal_that_cannot_show_a_symbol_still_gets_the_word(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(buffer, encoding="ascii"))
    emit(REPORT, "text", None)
    sys.stdout.flush()
    assert b"? absent" in buffer.getvalue()


def test_formats(tmp_path: Path) -> None:
    for output in ("text", "md", "json"):
        emit(REPORT, output, {"a": [1]}, tmp_path / output)
    assert "✕ absent" in (tmp_path / "text").read_text(encoding="utf-8")
    assert "| ✕ absent |" in (tmp_path / "md").read_text(encoding="utf-8")
    assert json.loads((tmp_path / "json").read_text(encoding="utf-8")) == {"a": [1]}
    assert "\x1b" not in (tmp_path / "text").read_text(encoding="utf-8")


def test_json_is_indented_and_takes_records() -> None:
    device = Device(key="a", arch="b", name="c")
    assert json_text({"device": device}).startswith('{\n  "device": {\n')
    assert json.loads(json_text(device)) == msgspec.to_builtins(device) | {"versions": {}}
