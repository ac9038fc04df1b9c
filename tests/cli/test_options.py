from __future__ import annotations

import io
import json
import os
import stat
import sys
from pathlib import Path

import msgspec
import pytest

from mpbackend.cli.options import FILE_WIDTH, OneLine, emit, json_text, say, split_names, terminal_width, warn_unavailable, write
from mpbackend.device import Device
from mpbackend.errors import DocumentError
from mpbackend.plugins import Plugins, Unavailable
from mpbackend.report.view import WIDEST, Column, Report, Table, level_text

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


def names(folder: Path) -> list[str]:
    """Return what a folder holds, sorted."""
    return sorted(os.listdir(folder))


def test_a_link_stays_and_its_target_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    target = tmp_path / "real" / "report.md"
    target.write_text("before", encoding="utf-8")
    link = tmp_path / "link.md"
    link.symlink_to(target)
    write("after", link)
    assert link.is_symlink()
    assert (target.read_text(encoding="utf-8"), names(tmp_path / "real"), names(tmp_path)) == ("after", ["report.md"], ["link.md", "real"])


def test_a_link_to_nothing_is_followed(tmp_path: Path) -> None:
    link = tmp_path / "link.md"
    link.symlink_to(tmp_path / "report.md")
    write("text", link)
    assert link.is_symlink()
    assert (tmp_path / "report.md").read_text(encoding="utf-8") == "text"


def test_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    link = tmp_path / "link.md"
    link.symlink_to(link)
    with pytest.raises(DocumentError, match="cannot write"):
        write("text", link)
    assert link.is_symlink()


@pytest.mark.parametrize("through_a_link", [False, True])
def test_a_pipe_is_written_through_and_stays(tmp_path: Path, *, through_a_link: bool) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    out = pipe
    if through_a_link:
        out = tmp_path / "link"
        out.symlink_to(pipe)
    try:
        write("text\n", out)
        assert os.read(reader, 100) == b"text\n"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.lstat().st_mode)
    assert set(names(tmp_path)) == {"pipe", out.name}


def test_what_is_no_file_is_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = tmp_path / "node"
    os.mkfifo(node)
    opened: list[Path] = []

    def record(self: Path, *_arguments: object, **_options: object) -> io.StringIO:
        opened.append(self)
        return io.StringIO()

    monkeypatch.setattr(Path, "open", record)
    monkeypatch.setattr(Path, "replace", lambda *_: pytest.fail("replaced"))
    write("text", node)
    assert opened == [node]


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="it is a folder"):
        write("text", tmp_path)
    with pytest.raises(DocumentError, match="it is a folder"):
        write("text", Path())


def test_a_replaced_file_keeps_its_mode(tmp_path: Path) -> None:
    target = tmp_path / "report.md"
    target.write_text("before", encoding="utf-8")
    target.chmod(0o640)
    write("after", target)
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


def test_a_name_of_the_longest_length_is_written_and_a_longer_one_refused(tmp_path: Path) -> None:
    longest = tmp_path / ("n" * 255)
    write("text", longest)
    assert longest.read_text(encoding="utf-8") == "text"
    with pytest.raises(DocumentError, match="File name too long"):
        write("text", tmp_path / ("n" * 300))
    assert names(tmp_path) == [longest.name]


def test_a_name_that_no_file_can_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="null"):
        write("text", tmp_path / "a\0b")


def test_a_folder_that_may_not_be_searched_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(self: Path, *_arguments: object, **_options: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    for name in ("stat", "unlink", "open", "replace", "write_text"):
        monkeypatch.setattr(Path, name, deny)
    with pytest.raises(DocumentError, match="Permission denied"):
        write("text", tmp_path / "report.md")


def test_a_failure_that_also_bars_the_cleaning_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(self: Path, *_arguments: object, **_options: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    for name in ("unlink", "replace"):
        monkeypatch.setattr(Path, name, deny)
    with pytest.raises(DocumentError, match="Permission denied"):
        write("text", tmp_path / "report.md")


@pytest.mark.parametrize(
    ("columns", "width"), [("1", 40), ("80", 80), ("99999999999", WIDEST), ("9" * 5000, FILE_WIDTH), ("-5", FILE_WIDTH), ("²", FILE_WIDTH)]
)
def test_the_width_of_a_terminal_is_kept_within_bounds(monkeypatch: pytest.MonkeyPatch, columns: str, width: int) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert terminal_width() == width


def test_a_report_is_printed_in_a_terminal_of_any_width(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "99999999999")
    emit(REPORT, "text", None)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= WIDEST


def test_lines_are_printable(capsys: pytest.CaptureFixture[str]) -> None:
    say("a\x1b[31m\n b\u202e\x9b")
    warn_unavailable(Plugins(unavailable=[Unavailable("n\x1b", "d", "c\x1b[2J\n\u2066")]))
    out, err = capsys.readouterr()
    assert out == "a\\x1b[31m b\\u202e\\x9b\n"
    assert err == "warning: n\\x1b is unavailable: c\\x1b[2J \\u2066; `mpbackend doctor` says more\n"


def test_json_has_no_character_that_acts() -> None:
    text = json_text({"a": "\x1b\x9b\u202e\u2028"})
    assert text == '{\n  "a": "\\u001b\\u009b\\u202e\\u2028"\n}\n'
    assert json.loads(text) == {"a": "\x1b\x9b\u202e\u2028"}


def test_output_that_is_closed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(OneLine, match="standard output is closed") as caught:
        emit(REPORT, "text", None)
    assert caught.value.exit_code == 1


def test_a_file_is_written_when_output_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    emit(REPORT, "text", None, tmp_path / "report.txt")
    assert (tmp_path / "report.txt").read_text(encoding="utf-8").startswith("R\n")


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
