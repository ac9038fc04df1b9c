"""Running what pages show: Python examples and console sessions, with the output that each is shown with.

The blocks of a page run in order in one empty folder. The Python blocks share a namespace; what one prints stands in a ``text`` block right below it. In a
``console`` block a line that starts with ``$`` is a command, and the lines below it are its output. A comment above a block changes that:

``<!-- not run: reason -->`` leaves the block alone. ``<!-- varies: reason -->`` runs it and lets the numbers of its output and the word ``(emulated)`` differ,
``<!-- not compared: reason -->`` all of its output. ``<!-- file: name -->`` writes a block of any language to a file instead of running it.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

COLUMNS = 120
"""Width of the output that pages show."""

BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>not run|not compared|varies|file): (?P<about>[^\n]+?) -->\n)?"
    r"^```(?P<language>\w+)\n(?P<body>.*?)^```$(?:\n\n^```text\n(?P<output>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)
COMMAND = re.compile(r"^\$ (.+)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")
GAPS = re.compile(r" {2,}")
EMULATED = re.compile(r" \(emulated\)")
"""What a table adds to a format that the processor at hand has no instruction for: pages must not depend on it."""

TIME_LIMIT_S = 120
HIDDEN_VARIABLES = ("MPBACKEND", "LOCAL_RANK")


def run_page(text: str, folder: Path) -> str:
    """Run every block of a page.

    Args:
        text: the page.
        folder: an empty folder to run in.

    Returns:
        The page with the output that its blocks have now; equal to ``text`` when it is up to date.

    Raises:
        RuntimeError: a command fails without an ``error:`` line, or a Python block prints what the page does not show.
    """
    namespace: dict[str, Any] = {"__name__": "page"}

    def replace(block: re.Match[str]) -> str:
        if block["mark"] == "file":
            (folder / block["about"]).write_text(block["body"], encoding="utf-8")
        if block["mark"] in ("file", "not run") or block["language"] not in ("python", "console"):
            return block[0]
        if block["language"] == "console":
            body = COMMAND.sub(lambda found: f"$ {found[1]}\n" + newer(found[2], run_command(found[1], folder), block["mark"]), block["body"])
            return block[0].replace(block["body"], body, 1)
        output = run_python(block["body"], namespace)
        if block["output"] is None:
            if output:
                raise RuntimeError(f"a Python block prints what the page does not show:\n{output}")
            return block[0]
        start = block.start("output") - block.start()
        return block[0][:start] + newer(block["output"], output, block["mark"]) + "```"

    with quiet(), modules_of(folder), contextlib.chdir(folder):
        return BLOCK.sub(replace, text)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Turn warnings into errors, hide the variables that choose a device, and compute on one thread, whose sums do not depend on the machine's cores."""
    threads = torch.get_num_threads()
    hidden = {name: os.environ.pop(name) for name in HIDDEN_VARIABLES if name in os.environ}
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield
    finally:
        torch.set_num_threads(threads)
        os.environ.update(hidden)


@contextlib.contextmanager
def modules_of(folder: Path) -> Iterator[None]:
    """Forget the modules that a page imports from its folder, and what it adds to the path; write no bytecode, which the next page could be given."""
    path, silent = sys.path.copy(), sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        sys.dont_write_bytecode = silent
        for added in set(sys.path) - set(path):
            sys.path_importer_cache.pop(added, None)  # the finder of "." keeps to the folder that was current when it was made
        sys.path[:] = path
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if file is not None and (folder / file).is_relative_to(folder):
                del sys.modules[name]


def newer(shown: str, found: str, mark: str | None) -> str:
    """Return the output that a page should show: the old one where the mark lets the new one differ as it does. An empty old one is replaced."""
    permitted = (mark == "varies" and masked(shown) == masked(found)) or (mark == "not compared" and shown)
    return shown if permitted else found


def masked(output: str) -> str:
    """Return an output with its numbers and the gaps of its columns alike."""
    return GAPS.sub("  ", NUMBER.sub("0", EMULATED.sub("", output)))


def run_python(source: str, namespace: dict[str, Any]) -> str:
    """Run a block in a namespace and return what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, "<page>", "exec", dont_inherit=True), namespace)
    return printed.getvalue()


def environment() -> Mapping[str, str]:
    """Return the environment of a command: this interpreter's programs first, a fixed width, no color, one thread."""
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    fixed = {"PATH": programs, "COLUMNS": str(COLUMNS), "NO_COLOR": "1", "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8", "PYTHONWARNINGS": "error"}
    return {name: value for name, value in os.environ.items() if name not in HIDDEN_VARIABLES} | fixed


def run_command(command: str, folder: Path) -> str:
    """Run a shell command in a folder and return what it prints to both streams.

    Raises:
        RuntimeError: it fails with anything but an ``error:`` line and status 2.
    """
    done = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        timeout=TIME_LIMIT_S,
        check=False,
    )
    refused = done.returncode == 2 and done.stdout.startswith("error: ")
    if done.returncode != 0 and not refused:
        raise RuntimeError(f"`{command}` ended with status {done.returncode}:\n{done.stdout}")
    return done.stdout
