"""No tracked file names an absolute path of one machine."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

HOMES = ("home", "root", "Users", "work")
MACHINE_PATH = re.compile(r"(?:^|[^A-Za-z0-9_.~-])/(?:" + "|".join(HOMES) + r")/", re.MULTILINE)


def machine_paths(texts: Mapping[str, str]) -> list[str]:
    """Return ``file:line`` of every absolute path under a folder of one machine or user."""
    return [f"{name}:{text.count(chr(10), 0, match.end()) + 1}" for name, text in texts.items() for match in MACHINE_PATH.finditer(text)]


def tracked_texts(root: Path) -> dict[str, str]:
    """Return the text of every file that git tracks, or would track, in the working tree; all of them where the tree is no repository."""
    listing = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=root, capture_output=True, text=True, check=False)
    names = listing.stdout.split("\0")[:-1] if listing.returncode == 0 else [str(path.relative_to(root)) for path in root.glob("[!.]*/**/*.*")]
    texts: dict[str, str] = {}
    for name in names:
        content = (root / name).read_bytes() if (root / name).is_file() else b"\0"
        if b"\0" not in content:
            texts[name] = content.decode("utf-8", errors="replace")
    return texts


def test_no_path_of_one_machine(root: Path) -> None:
    texts = tracked_texts(root)
    assert "pyproject.toml" in texts
    assert machine_paths(texts) == []


@pytest.mark.parametrize("home", HOMES)
def test_planted_path_is_found(home: str) -> None:
    assert machine_paths({"a.py": f"x = 1\ny = '/{home}/x'\n", "b.md": f"/{home}/x"}) == ["a.py:2", "b.md:1"]


@pytest.mark.parametrize("text", ["https://example.org/home/x", "docs/root/x", "~/home/x", "/homes/x", "/tmp/x"])
def test_other_paths_are_left_alone(text: str) -> None:
    assert machine_paths({"a.md": text}) == []
