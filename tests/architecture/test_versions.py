"""One version for every distribution of this repository."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest


def core_version(source: str) -> str:
    """Return ``__version__`` as a package's text assigns it; empty when it does not."""
    for node in ast.parse(source).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__version__")], value=ast.Constant(value=str(version))):
                return version
    return ""


def version_faults(version: str, projects: Mapping[str, dict[str, Any]]) -> list[str]:
    """Return a line for each plugin whose own version, or whose pin of the core, is not ``version``."""
    faults: list[str] = []
    for folder, document in projects.items():
        project = document["project"]
        if project["version"] != version:
            faults.append(f"{folder}: version {project['version']}")
        if f"mpbackend=={version}" not in project["dependencies"]:
            faults.append(f"{folder}: does not pin mpbackend=={version}")
    return faults


def test_one_version(core: Mapping[str, str], plugin_projects: Mapping[str, dict[str, Any]]) -> None:
    version = core_version(core["mpbackend.__init__"])
    assert version
    assert plugin_projects
    assert version_faults(version, plugin_projects) == []


def test_changelog_names_the_version(core: Mapping[str, str], root: Path) -> None:
    headings = [line for line in (root / "CHANGELOG.md").read_text(encoding="utf-8").splitlines() if line.startswith("## ")]
    assert headings[0].split()[1] == core_version(core["mpbackend.__init__"])


@pytest.mark.parametrize(
    ("version", "pin", "fault"),
    [
        ("0.2.0", "mpbackend==0.1.0", "cpu: version 0.2.0"),
        ("0.1.0", "mpbackend==0.2.0", "cpu: does not pin mpbackend==0.1.0"),
        ("0.1.0", "mpbackend>=0.1.0", "cpu: does not pin mpbackend==0.1.0"),
    ],
)
def test_planted_version_is_found(version: str, pin: str, fault: str) -> None:
    assert version_faults("0.1.0", {"cpu": {"project": {"version": version, "dependencies": ["torch>=2", pin]}}}) == [fault]
