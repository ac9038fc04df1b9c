"""The example of a third party's plugin, installed as its users would, from a copy into a folder of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[1] / "docs" / "examples" / "third_party_plugin"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the plugin is installed in."""
    top = tmp_path_factory.mktemp("acme")
    shutil.copytree(EXAMPLE, top / "source", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build"))
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--target", str(top / "site")]
    done = subprocess.run([sys.executable, "-m", "pip", "install", *options, str(top / "source")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return top / "site"


def run(site: Path, *arguments: str, status: int = 0) -> str:
    """Run the interpreter with the plugin on its path; return what it prints to both streams."""
    environment = {**os.environ, "PYTHONPATH": str(site), "COLUMNS": "200", "NO_COLOR": "1", "PYTHONWARNINGS": "error"}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def command(site: Path, *arguments: str, status: int = 0) -> str:
    """Run ``mpbackend`` with the plugin on its path."""
    return run(site, "-m", "mpbackend.cli.main", *arguments, status=status)


def test_version_lists_the_distribution(site: Path) -> None:
    assert "mpbackend-acme 1.0.0" in command(site, "--version")


def test_device_is_listed_as_emulated(site: Path) -> None:
    (line,) = [line for line in command(site, "devices").splitlines() if "acme-x1" in line]
    assert "emulated" in line


def test_plan_runs_and_cites_the_data_sheet(site: Path) -> None:
    output = command(site, "plan", "bf16", "--device", "acme-x1")
    assert "Acme X1 data sheet" in output
    assert "no installed plugin runs this" not in output


def test_preset_is_planned(site: Path) -> None:
    assert "divide after" in command(site, "plan", "acme-bf16", "--device", "acme-x1")
    assert "acme-bf16" in command(site, "recipes")


def test_refusal_is_one_line_with_its_source(site: Path) -> None:
    (line,) = command(site, "plan", "fp16", "--device", "acme-x1", status=2).splitlines()
    assert line.startswith("error: fp16 is refused on acme-x1")
    assert "Acme X1 data sheet" in line


def test_commands_of_the_readme_run(site: Path) -> None:
    commands = re.findall(r"^mpbackend (.+)$", (EXAMPLE / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(commands) == 5
    for arguments in commands:
        command(site, *arguments.split())


TRAINING = """
import torch
import mpbackend

torch.manual_seed(1)
target = mpbackend.select("acme:acme-x1")
model = torch.nn.Linear(8, 1).to(target.device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(64, 8), torch.randn(64, 1)
losses = []
with target.prepare(model, optimizer, recipe="acme-bf16") as session:
    for _ in range(5):
        with session.autocast():
            output = model(x)
            loss = torch.nn.functional.mse_loss(output, y)
        assert output.dtype is torch.bfloat16
        session.backward(loss)
        assert session.step().stepped
        losses.append(loss.item())
assert losses[-1] < losses[0], losses
"""


def test_training_runs(site: Path) -> None:
    run(site, "-c", TRAINING)


def test_auto_passes_over_the_emulated_device(site: Path) -> None:
    assert run(site, "-c", "import mpbackend; print(mpbackend.select('auto').info.backend)").strip() == "cpu"
