"""A machine with GPUs that is none: a fake ``nvidia-smi``, a torch that says it was built with CUDA, a ``torch.cuda`` that answers, and an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from mpbackend_cuda import discovery, smi, torch_build, transformer_engine
from mpbackend_cuda.torch_build import TorchBuild
from plugins.cuda.tests.support.engine import Engine

CUDA_BUILD = TorchBuild("2.13.0+cu130", "13.0", "")
DRIVER = "580.65.06"

Machine = Callable[..., None]
"""``machine(gpus, listing="", status=0)``: lines that ``nvidia-smi`` answers, its list of instances, and its exit status."""


def gpu(
    index: int = 0, name: str = "NVIDIA H100 80GB HBM3", capability: str = "9.0", memory: str = "81559", driver: str = DRIVER, mig: str = "Disabled"
) -> str:
    """Return a line of ``nvidia-smi``."""
    return f"{index}, {name}, GPU-{index}aaaaaaa-0000-0000-0000-000000000000, {capability}, {memory}, {driver}, {mig}"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide a GPU that this machine may have, and the variables that choose among GPUs."""
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", torch_build.AUTOLOAD, torch_build.TRANSFER):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(discovery, "DRIVER", tmp_path / "no driver")


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], None]:
    """Put a shell script in the place of ``nvidia-smi``."""

    def write(text: str) -> None:
        path = tmp_path / "bin" / smi.COMMAND
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        path.chmod(0o755)

    return write


@pytest.fixture
def machine(script: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Make a machine with GPUs and a CUDA build of torch that is not imported yet."""

    def make(*gpus: str, listing: str = "", status: int = 0) -> None:
        answer = "\n".join(gpus)
        script(f"if [ \"$1\" = -L ]; then\n/bin/cat <<'END'\n{listing}\nEND\nelse\n/bin/cat <<'END'\n{answer}\nEND\nfi\nexit {status}")
        monkeypatch.setattr(torch_build, "read_build", lambda: CUDA_BUILD)

    return make


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Put an engine in the place of Transformer Engine, and a ``torch.cuda`` with one H100 beside it."""
    made = Engine()
    monkeypatch.setattr(transformer_engine, "load", lambda: transformer_engine.Engine(made.pytorch, made.recipes, ""))
    monkeypatch.setattr(transformer_engine, "installed", lambda: "")
    for name, answer in (
        ("is_available", True),
        ("device_count", 1),
        ("current_device", 0),
        ("get_device_capability", (9, 0)),
        ("get_device_name", "NVIDIA H100 80GB HBM3"),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    before = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", True)  # what entering autocast does; the context itself turns itself off without a GPU
    yield made
    torch.set_autocast_enabled("cuda", before)


@pytest.fixture
def unimported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let discovery believe that torch is not imported yet."""
    monkeypatch.setattr(torch_build, "torch_imported", lambda: False)
