from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch

from mpbackend.device import Device
from mpbackend.train.outcomes import INPUTS, Grounds, Outcome, autocast_state, fake_tensors, find_grounds, run_operators
from mpbackend.train.policy import PinnedPolicy, find_op
from mpbackend.train.samples import sample

HERE = Grounds(torch.device("cpu"), "run")
ABSENT = Device(key="x", arch="x", name="X", backend="x", type="xpu", usable=False, cause="no driver")
"""A device type that torch knows and that needs no device for fake tensors; nobody here has the device."""

Outcomes = dict[str, dict[str, Outcome]]


def run(*names: str, grounds: Grounds = HERE) -> Outcomes:
    return run_operators({name: find_op(name) for name in names}, grounds, sample)


@pytest.fixture(scope="module")
def fake() -> Grounds:
    grounds = find_grounds(ABSENT, "AutocastXPU")
    assert grounds == Grounds(torch.device("xpu"), "fake", "no driver")
    return grounds


def test_operators_run_under_autocast_on_every_format() -> None:
    found = run("mm", "softmax.int", "mse_loss", "linalg_matrix_rank")
    assert {inputs: outcome.out for inputs, outcome in found["mm"].items()} == {"bf16": ("bf16",), "fp16": ("fp16",), "fp32": ("bf16",)}
    assert {inputs: outcome.out for inputs, outcome in found["softmax.int"].items()} == {name: (name,) for name in INPUTS}
    assert {outcome.out for outcome in found["mse_loss"].values()} == {("fp32",)}
    assert found["linalg_matrix_rank"]["fp32"].out == ("int64",)
    assert all(not outcome.refused for outcomes in found.values() for outcome in outcomes.values())


def test_the_steps_inside_are_seen_and_casts_are_none() -> None:
    found = run("rms_norm", "mse_loss")
    assert found["rms_norm"]["bf16"] == Outcome(("bf16",), ("fp32",))
    assert found["mse_loss"]["bf16"] == Outcome(("fp32",), ("fp32",))


def test_a_pin_is_seen() -> None:
    with PinnedPolicy("AutocastCPU", {}):
        assert set(run("softmax.int")["softmax.int"].values()) == {Outcome(("fp32",), ("fp32",))}


def test_fake_tensors_go_through_the_autocast_kernels_of_a_device_that_is_not_there(fake: Grounds) -> None:
    found = run("mm", "softmax.int", "cross_entropy_loss", "binary_cross_entropy", grounds=fake)
    assert found["mm"]["fp32"].out == ("bf16",)
    assert {outcome.out for outcome in found["softmax.int"].values()} == {("fp32",)}
    assert found["cross_entropy_loss"]["bf16"] == Outcome(("fp32",), ("bf16", "fp32")), "its log_softmax is in the format of the logits"
    assert "unsafe to autocast" in found["binary_cross_entropy"]["fp16"].refused


def test_fake_tensors_under_a_pin(fake: Grounds) -> None:
    with PinnedPolicy("AutocastXPU", {}):
        assert set(run("cross_entropy_loss", grounds=fake)["cross_entropy_loss"].values()) == {Outcome(("fp32",), ("fp32",))}


def test_refusals_are_kept_on_one_line_and_nothing_is_printed(fake: Grounds, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        here = run("pdist", "nuclear_norm", "qr", "cholesky")
        there = run("geqrf", "inverse", grounds=fake)
    assert here["pdist"]["bf16"].refused == "NotImplementedError: \"pdist\" not implemented for 'BFloat16'"
    assert here["nuclear_norm"]["bf16"].refused.startswith("RuntimeError: "), "which comes with a warning"
    assert here["pdist"]["fp32"] == Outcome(("fp32",), ("fp32",))
    assert there["geqrf"]["bf16"].refused
    assert "Low precision" in there["inverse"]["bf16"].refused
    assert all("\n" not in outcome.refused for found in (here, there) for outcomes in found.values() for outcome in outcomes.values())
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []


def test_operands_that_cannot_be_made_are_a_refusal() -> None:
    def fail(op: Any, device: torch.device, dtype: torch.dtype) -> Any:
        raise ValueError("no memory")

    assert set(run_operators({"mm": find_op("mm")}, HERE, fail)["mm"].values()) == {Outcome(refused="ValueError: no memory")}


@pytest.mark.parametrize(
    ("device", "key", "method", "reason"),
    [
        (Device(key="x", arch="x", name="X", type="cpu"), "AutocastCPU", "run", ""),
        (Device(key="x", arch="x", name="X", type="cpu", kind="simulated"), "AutocastCPU", "run", "simulated device"),
        (Device(key="x", arch="x", name="X", backend="acme", usable=False), "AutocastCPU", "not run", "torch knows no device type 'acme' here"),
        (ABSENT, "AutocastCPU", "not run", "no driver; fake tensors of xpu lack AutocastCPU"),
    ],
)
def test_grounds(device: Device, key: str, method: str, reason: str) -> None:
    grounds = find_grounds(device, key)
    assert (grounds.method, grounds.reason) == (method, reason)
    assert (grounds.device is None) == (method == "not run")


def test_a_device_without_fake_tensors_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no such\ndevice")

    monkeypatch.setattr(torch, "empty", refuse)
    assert find_grounds(ABSENT, "AutocastXPU") == Grounds(None, "not run", "no driver; no fake tensor either: RuntimeError: no such")


def test_nothing_is_run_without_grounds() -> None:
    assert run("mm", grounds=Grounds(None, "not run", "why")) == {}


def test_the_state_of_autocast_is_restored() -> None:
    with torch.autocast("cpu", dtype=torch.float16):
        with pytest.raises(ZeroDivisionError), autocast_state("cpu", torch.bfloat16):
            assert torch.get_autocast_dtype("cpu") is torch.bfloat16
            raise ZeroDivisionError
        assert torch.get_autocast_dtype("cpu") is torch.float16
        assert torch.is_autocast_enabled("cpu")
    run("mm", "mkldnn_rnn_layer")
    assert not torch.is_autocast_enabled("cpu")


def test_the_level_of_the_log_is_restored() -> None:
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.level
    with pytest.raises(ZeroDivisionError), fake_tensors():
        raise ZeroDivisionError
    assert log.level == before
