"""The wheel of the core: everything that it needs at run time, and no torch."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("LICENSE", "README.md", "pyproject.toml", "mpbackend", "matrices", "examples")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.Path:
    """The wheel, built from a copy of its sources by way of the source distribution, as a release is."""
    top = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, top / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, top / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(top / "dist"), str(top)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (top / "dist").glob("*.whl")
    return zipfile.Path(path)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.Path) -> Message:
    (folder,) = (entry for entry in wheel.iterdir() if entry.name.endswith(".dist-info"))
    return Parser().parsestr((folder / "METADATA").read_text(encoding="utf-8"))


def names(folder: zipfile.Path, suffix: str) -> set[str]:
    """Return the names in a folder of the wheel that end so."""
    return {entry.name for entry in folder.iterdir() if entry.name.endswith(suffix)}


def test_core_requires_no_torch(metadata: Message) -> None:
    requirements = metadata.get_all("Requires-Dist", [])
    assert any(requirement.startswith("msgspec") for requirement in requirements)
    assert [requirement for requirement in requirements if "torch" in requirement] == []


def test_matrices_and_evidence(wheel: zipfile.Path) -> None:
    shipped = names(wheel / "mpbackend" / "matrices", ".toml")
    assert shipped == {path.name for path in (ROOT / "matrices").glob("*.toml")}
    assert "vocabulary.toml" in shipped
    evidence = names(wheel / "mpbackend" / "matrices" / "evidence", ".json")
    assert evidence == {path.name for path in (ROOT / "matrices" / "evidence").glob("*.json")}


def test_examples_and_templates(wheel: zipfile.Path) -> None:
    assert names(wheel / "mpbackend" / "examples", ".py") == {path.name for path in (ROOT / "examples").glob("*.py")}
    templates = ROOT / "mpbackend" / "report" / "templates"
    assert names(wheel / "mpbackend" / "report" / "templates", "") == {path.name for path in templates.iterdir() if path.is_file()}


def test_every_module_and_the_type_marker(wheel: zipfile.Path) -> None:
    sources = ROOT / "mpbackend"
    missing = [str(path.relative_to(sources)) for path in sources.rglob("*.py") if not wheel.joinpath("mpbackend", *path.relative_to(sources).parts).is_file()]
    assert missing == []
    assert (wheel / "mpbackend" / "py.typed").is_file()


def test_license(wheel: zipfile.Path, metadata: Message) -> None:
    assert metadata["License-Expression"] == "Apache-2.0"
    (folder,) = (entry for entry in wheel.iterdir() if entry.name.endswith(".dist-info"))
    text = (folder / "licenses" / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_nothing_else_is_installed(wheel: zipfile.Path) -> None:
    assert {entry.name for entry in wheel.iterdir() if not entry.name.endswith(".dist-info")} == {"mpbackend"}
