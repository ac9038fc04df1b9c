from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import Result

from mpbackend import __version__
from mpbackend.cli import main as cli
from mpbackend.errors import DocumentError
from mpbackend.plugins import Plugins, Unavailable

LOADED = """
import sys
from mpbackend.cli.main import main
try:
    main({arguments!r})
except SystemExit as stop:
    assert not stop.code, stop.code
print("LOADED", *sorted({{name.partition(".")[0] for name in sys.modules}}))
print("COMMANDS", *sorted(name for name in sys.modules if name.startswith("mpbackend.cli.")))
"""


def loaded(*arguments: str) -> tuple[set[str], set[str]]:
    """Return the top-level modules and the command modules that a command leaves loaded in a fresh interpreter."""
    program = LOADED.format(arguments=list(arguments))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "80"})
    lines = {line.split()[0]: set(line.split()[1:]) for line in done.stdout.splitlines() if line.startswith(("LOADED", "COMMANDS"))}
    return lines["LOADED"], lines["COMMANDS"]


def test_every_command_is_a_module_of_its_own() -> None:
    for name in cli.COMMANDS:
        assert isinstance(importlib.import_module(f"mpbackend.cli.{name}").command, click.Command)


def test_help_lists_every_command(invoke: Callable[..., Result]) -> None:
    result = invoke("--help")
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.partition("Commands:\n")[2].splitlines()] == list(cli.COMMANDS)


def test_every_command_has_help(invoke: Callable[..., Result]) -> None:
    for name in cli.COMMANDS:
        result = invoke(name, "--help")
        assert result.exit_code == 0
        assert "Usage:" in result.stdout


def test_a_command_does_not_import_another() -> None:
    _, commands = loaded("devices")
    assert {name.rpartition(".")[2] for name in commands} & set(cli.COMMANDS) == {"devices"}


@pytest.mark.parametrize(
    ("arguments", "unwanted"),
    [
        (["--version"], {"torch", "jinja2", "rich"}),
        (["devices"], {"torch", "jinja2"}),
        (["devices", "--known", "--format", "json"], {"torch", "jinja2", "rich"}),
        (["doctor"], {"torch", "jinja2"}),
        (["matrix", "--op", "conv"], {"torch", "jinja2"}),
        (["matrix", "--op", "conv", "--format", "md"], {"torch", "jinja2", "rich"}),
        (["matrix", "--op", "conv", "--format", "html"], {"torch", "rich"}),
        (["plan", "bf16", "--device", "{device}"], {"torch", "jinja2"}),
        (["recipes"], {"torch", "jinja2"}),
        (["recipes", "--table", "--device", "{device}", "--format", "json"], {"torch", "jinja2", "rich"}),
        (["memory", "bf16", "--params", "1e6"], {"torch", "jinja2"}),
    ],
)
def test_what_a_command_imports(arguments: list[str], unwanted: set[str], granting_device: str) -> None:
    modules, _ = loaded(*(word.format(device=granting_device) for word in arguments))
    assert "click" in modules
    assert modules & unwanted == set()


def test_unknown_commands_are_answered_with_the_nearest(invoke: Callable[..., Result]) -> None:
    result = invoke("matrx")
    assert result.exit_code == 2
    assert "no command 'matrx'; nearest: matrix" in result.stderr


def test_usage_errors_have_exit_code_2(invoke: Callable[..., Result]) -> None:
    assert invoke("matrix", "--format", "pdf").exit_code == 2
    assert invoke("plan", "bf16").exit_code == 2


def test_an_error_is_one_line_without_a_traceback(invoke: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def broken() -> None:
        raise DocumentError("two\nlines", found="a\tproblem")

    monkeypatch.setattr(cli.main, "commands", {"broken": broken})
    result = invoke("broken")
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", "error: two lines: a problem\n")


def test_version(invoke: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    plugins = Plugins(distributions={"mpbackend-b": "2.0", "mpbackend-a": "1.0"}, unavailable=[Unavailable("c", "mpbackend-c 3.0", "ImportError: no c")])
    monkeypatch.setattr("mpbackend.plugins.load_plugins", lambda: plugins)
    result = invoke("--version")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        f"mpbackend {__version__}",
        "mpbackend-a 1.0",
        "mpbackend-b 2.0",
        "unavailable: c (mpbackend-c 3.0): ImportError: no c",
    ]


def test_a_closed_pipe_is_quiet() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-m", "mpbackend.cli.main", "matrix"], stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert [line for line in done.stderr.splitlines() if not line.startswith("warning: ")] == []
    assert done.returncode in (0, 1)


FULL = """
import errno, io, sys
from mpbackend.cli.main import main

class Full(io.RawIOBase):
    room = {room}
    def writable(self):
        return True
    def fileno(self):
        return {number}
    def write(self, data):
        taken = min(len(data), self.room)
        self.room -= taken
        if not taken:
            raise OSError(errno.{error}, "No space left on device")
        return taken

sys.stdout = io.TextIOWrapper(io.BufferedWriter(Full()), encoding="utf-8")
main({arguments!r})
"""
"""A standard output with room for so many bytes."""


@pytest.mark.parametrize("room", [0, 10, 4096])
@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["plan", "--help"], ["recipes"], ["matrix", "--format", "json"]])
def test_output_to_a_place_that_is_full_is_one_line(tmp_path: Path, arguments: list[str], room: int) -> None:
    with (tmp_path / "descriptor").open("wb") as file:
        program = FULL.format(room=room, number=file.fileno(), error="ENOSPC", arguments=arguments)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, pass_fds=[file.fileno()])
    if room == 4096 and arguments[0] != "matrix":
        assert (done.returncode, done.stderr) == (0, ""), "there is room for it"
        return
    assert (done.returncode, done.stderr) == (1, "error: cannot write to standard output: No space left on device\n")


@pytest.mark.parametrize("arguments", [["--help"], ["matrix", "--format", "json"]])
def test_a_reader_who_leaves_is_no_error(arguments: list[str]) -> None:
    program = FULL.format(room=10, number=1, error="EPIPE", arguments=arguments)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("arguments", [["recipes"], ["doctor", "--format", "json"]])
def test_output_that_is_closed_is_one_line(arguments: list[str]) -> None:
    program = f"import sys; sys.stdout = None; from mpbackend.cli.main import main; main({arguments!r})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: standard output is closed\n"


def test_an_error_of_the_system_elsewhere_is_not_taken_for_one_of_the_output(invoke: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def broken() -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cli.main, "commands", {"broken": broken})
    with pytest.raises(OSError, match="No space left on device"):
        invoke("broken")


def test_errors_show_no_control_characters(invoke: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def broken() -> None:
        error = DocumentError("text")
        error.args = ("a\x1b[2J\u202eb",)
        raise error

    monkeypatch.setattr(cli.main, "commands", {"broken": broken})
    assert invoke("broken").stderr == "error: a\\x1b[2J\\u202eb\n"


def test_version_shows_no_control_characters(invoke: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    plugins = Plugins(distributions={"a\x1b": "1\x9b"}, unavailable=[Unavailable("c\u202e", "d", "e\x07\nf")])
    monkeypatch.setattr("mpbackend.plugins.load_plugins", lambda: plugins)
    assert invoke("--version").stdout.splitlines()[1:] == ["a\\x1b 1\\x9b", "unavailable: c\\u202e (d): e\\x07 f"]


def test_an_empty_name_of_a_file_is_one_line(invoke: Callable[..., Result]) -> None:
    result = invoke("recipes", "--out", "")
    assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (2, "", 1)
    assert result.stderr.startswith("error: cannot write .: it is a folder")


def test_a_name_of_300_characters_is_one_line(invoke: Callable[..., Result], tmp_path: Path) -> None:
    result = invoke("recipes", "--out", str(tmp_path / ("n" * 300)))
    assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (2, "", 1)
    assert "File name too long" in result.stderr
