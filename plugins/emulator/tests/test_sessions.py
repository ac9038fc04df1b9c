"""Emulated devices through the ordinary session: an unmodified model trains, and the record says what it was."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import mpbackend
from mpbackend.errors import PlanError, UnknownNameError
from mpbackend.observe.record import load_record
from mpbackend.plugins import load_plugins

Select = Callable[[str], mpbackend.Target]
SEED = 7


class Net(nn.Module):
    """A convolution and two linear layers whose sizes fit low-bit products."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.hidden = nn.Linear(512, 64)
        self.out = nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (N, 1, 8, 8) to (N, 16)."""
        hidden: torch.Tensor = self.out(torch.tanh(self.hidden(self.conv(x).flatten(1))))
        return hidden


def train(target: mpbackend.Target, recipe: str, steps: int = 8, *, record: Path | None = None) -> tuple[list[float], mpbackend.Session]:
    torch.manual_seed(SEED)
    model = Net().to(target.device)
    x = torch.randn(32, 1, 8, 8)
    labels = x.flatten(1)[:, :16].argmax(1)
    losses = []
    with target.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3), recipe, clip_norm=1.0, record=record) as session:
        for _ in range(steps):
            with session.autocast():
                loss = nn.functional.cross_entropy(model(x), labels)
            session.backward(loss)
            assert session.step().stepped
            losses.append(loss.item())
    return losses, session


@pytest.mark.parametrize(
    ("key", "recipe"),
    [
        ("h100", "fp32"),
        ("h100", "fp32-fast"),
        ("h100", "bf16"),
        ("h100", "fp16"),
        ("h100", "fp8"),
        ("h100", "bf16-master"),
        ("v100", "fp16"),
        ("ascend-910b3", "fp32"),
        ("ascend-910b3", "bf16"),
        ("ascend-910a", "fp16"),
        ("ascend-950", "fp8"),
        ("ascend-950", "hif8"),
        ("ascend-950", "mxfp8"),
        ("b200", "mxfp8"),
        ("b200", "nvfp4"),
    ],
)
def test_an_unmodified_model_learns(target_of: Select, key: str, recipe: str) -> None:
    losses, _ = train(target_of(key), recipe)
    assert losses[-1] < 0.8 * losses[0], f"seed {SEED}: {losses}"


def test_the_record_says_what_it_was(target_of: Select, tmp_path: Path) -> None:
    _, session = train(target_of("h100"), "bf16", 2, record=tmp_path / "run")
    record = load_record(tmp_path / "run").record
    assert (record.run.kind, record.device.key, record.device.kind) == ("emulated", "h100", "emulated")
    assert record.notes == session.plan.notes
    assert any("nothing here was measured on the device" in note for note in record.notes)
    assert any("left to the host" in note for note in record.notes)
    assert record.compute.shares == {"bf16": 1.0}
    assert record.switches["matmul.fp32_precision"].read_back == "ieee"
    assert record.switches["host.matmul.fp32_precision"].set == ""
    assert {"mpbackend-emulator", "engine", "host", "torch"} <= record.environment.keys()


def test_low_bit_products_are_observed_in_their_formats(target_of: Select, tmp_path: Path) -> None:
    _, session = train(target_of("h100"), "fp8", 1, record=tmp_path / "run")
    shares = load_record(tmp_path / "run").record.compute.shares
    assert set(shares) == {"bf16", "fp8_e4m3", "fp8_e5m2 × fp8_e4m3"}  # noqa: RUF001 - the multiplication sign of the record
    assert [row["action"] for row in session.conversion] == ["converted", "converted"]


def test_nominal_sums_are_called_that(target_of: Select) -> None:
    for key in ("ascend-910a", "ascend-910b3", "ascend-950"):
        notes = target_of(key).plan("fp16").notes
        assert any(note.startswith("assumed: nominal fp32: no source states") for note in notes), key
        assert any("the host's library in fp32" in note for note in notes), key


def test_the_same_seed_gives_the_same_losses_twice(target_of: Select) -> None:
    assert train(target_of("h100"), "bf16", 3)[0] == train(target_of("h100"), "bf16", 3)[0]


def test_two_vendors_part(target_of: Select) -> None:
    """The same recipe text is tf32 with 10 fraction bits on one and hf32 with 11 on the other."""
    assert train(target_of("h100"), "fp32-fast", 3)[0] != train(target_of("ascend-910b3"), "fp32-fast", 3)[0]


@pytest.mark.parametrize(("key", "recipe", "reason"), [("ascend-910a", "bf16", "absent"), ("v100", "bf16", "emulated"), ("ascend-910b3", "fp8", "absent")])
def test_what_the_device_lacks_is_refused_as_on_the_device(target_of: Select, key: str, recipe: str, reason: str) -> None:
    with pytest.raises(PlanError, match=f"is {reason}"):
        target_of(key).plan(recipe)


def test_every_device_of_the_matrices_has_an_address(target_of: Select) -> None:
    backend = target_of("h100").backend
    for key, model in load_plugins().matrix().devices.items():
        device = backend.address(key)
        assert (device.key, device.arch, device.kind, device.backend) == (key, model.arch, "emulated", "emu")
        assert any(row.level is not None for row in backend.implements(device)), key
    with pytest.raises(UnknownNameError, match="unknown device 'h1oo'"):
        mpbackend.select("emu:h1oo")
    with pytest.raises(UnknownNameError, match="ascend-910b1"):
        mpbackend.select("emu:ascend-910b")


def test_an_emulated_device_is_never_found_but_only_named() -> None:
    plugins = load_plugins()
    assert list(plugins.backends["emu"].discover()) == []
    assert all(device.kind == "hardware" for device in plugins.devices())


def test_planning_for_an_emulated_device_loads_no_torch() -> None:
    program = """
import sys
from mpbackend.plugins import load_plugins
from mpbackend.selection import plan
plugins = load_plugins()
backend = plugins.backends["emu"]
made = plan("fp8", backend.address("h100"), plugins=plugins)
assert made.runnable and made.notes, made
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
