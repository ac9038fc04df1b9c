"""Sources that the architecture checks read: text of modules, by dotted name."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def read_sources(top: Path, package: str) -> dict[str, str]:
    """Return dotted name to text of every module of the package in folder ``top``; a package stands as ``name.__init__``."""
    return {".".join((package, *path.relative_to(top).with_suffix("").parts)): path.read_text(encoding="utf-8") for path in sorted(top.rglob("*.py"))}


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def core() -> Mapping[str, str]:
    return read_sources(ROOT / "mpbackend", "mpbackend")


@pytest.fixture(scope="session")
def plugin_projects() -> Mapping[str, dict[str, Any]]:
    """Decoded pyproject.toml of every plugin of this repository, by folder name."""
    return {path.parent.name: tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted(ROOT.glob("plugins/*/pyproject.toml"))}


@pytest.fixture(scope="session")
def plugin_sources() -> Mapping[str, str]:
    """Modules of every plugin of this repository."""
    sources: dict[str, str] = {}
    for top in sorted(path.parent for path in ROOT.glob("plugins/*/src/*/__init__.py")):
        sources |= read_sources(top, top.name)
    return sources


@pytest.fixture(scope="session")
def run_python() -> Callable[[str], str]:
    """Run a program in a fresh interpreter and return what it prints."""

    def run(program: str) -> str:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COV"))}
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run
