from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result

from mpbackend.cli import policy as module
from mpbackend.device import Device
from mpbackend.errors import BackendError
from mpbackend.plugins import Plugins, load_plugins
from mpbackend.train.policy import PINS, sensitive_ops

Invoke = Callable[..., Result]

OTHER_KEY = "AutocastXPU"
"""Autocast key of a device type that torch has kernels for and makes fake tensors of, and that nobody here has."""


def kernels(key: str) -> set[str]:
    """Return torch's operators with a kernel under an autocast key."""
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    return {name.removeprefix("aten::") for name in names if torch._C._dispatch_has_kernel_for_dispatch_key(name, key)}


class Other:
    """A backend whose device is absent, or that is broken in one way."""

    name = "other"
    autocast_key = OTHER_KEY
    device_types: Sequence[str] = ("xpu",)

    def __init__(self, **changes: Any) -> None:
        self.error: Exception | None = None
        self.discovery_error: Exception | None = None
        self.kind = "lower"
        self.asked: list[Device] = []
        for name, value in changes.items():
            setattr(self, name, value)

    def discover(self) -> Iterable[Device]:
        if self.discovery_error is not None:
            raise self.discovery_error
        return []

    def op_policy(self, device: Device) -> Mapping[str, str]:
        self.asked.append(device)
        if self.error is not None:
            raise self.error
        sensitive = sensitive_ops()
        return {op: "fp32" if op in sensitive else self.kind for op in kernels(OTHER_KEY)}


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Plugins]:
    """Install backends beside the CPU's."""
    plugins = load_plugins()
    plugins.backends = {"cpu": plugins.backends["cpu"]}
    monkeypatch.setattr(module, "load_plugins", lambda: plugins)

    def add(*backends: Any) -> Plugins:
        plugins.backends |= {backend.name: backend for backend in backends}
        return plugins

    return add


@pytest.fixture
def document(invoke: Invoke) -> Callable[..., dict[str, Any]]:
    """Run the command and return what it prints as JSON."""

    def run(*arguments: str) -> dict[str, Any]:
        result = invoke("policy", *arguments, "--format", "json")
        assert (result.exit_code, [line for line in result.stderr.splitlines() if not line.startswith("warning: ")]) == (0, [])
        found: dict[str, Any] = json.loads(result.stdout)
        return found

    return run


def test_the_cpu(install: Callable[..., Plugins], document: Callable[..., dict[str, Any]]) -> None:
    install()
    found = document("cpu")
    own = kernels("AutocastCPU")
    entry = found["summary"]["backends"]["cpu"]
    assert [op["op"] for op in found["ops"]] == sorted(own)
    assert found["summary"]["dispatcher"] == {"ops": len(own), "equal": True}
    assert (entry["ops"], entry["method"], sum(entry["policies"].values())) == (len(own), "run", len(own))
    assert "softmax.int" in found["summary"]["sensitive"]["backends"]["cpu"]["not_fp32"], "not listed, yet looked into"
    by_op = {op["op"]: op["backends"]["cpu"] for op in found["ops"]}
    assert by_op["mm"] == {
        "policy": "lower",
        "outcomes": {
            "bf16": {"out": ["bf16"], "inside": ["bf16"]},
            "fp16": {"out": ["fp16"], "inside": ["fp16"]},
            "fp32": {"out": ["bf16"], "inside": ["bf16"]},
        },
    }
    for name, side in by_op.items():
        for outcome in side["outcomes"].values():
            if side["policy"] == "fp32" and "out" in outcome:
                assert not {"bf16", "fp16"} & {*outcome["out"], *outcome["inside"]}, name


def test_a_difference_has_every_operator_of_either_set(install: Callable[..., Plugins], document: Callable[..., dict[str, Any]]) -> None:
    other = Other()
    install(other)
    found = document("--diff", "cpu", "other")
    union = kernels("AutocastCPU") | kernels(OTHER_KEY)
    summary = found["summary"]
    assert {op["op"] for op in found["ops"]} == union
    assert (summary["ops"], summary["dispatcher"]) == (len(union), {"ops": len(union), "equal": True})
    assert summary["same"] + summary["differ"] == len(union)
    assert found["differ"] == [op["op"] for op in found["ops"] if op["differs"]]
    assert (summary["backends"]["other"]["method"], summary["backends"]["other"]["reason"]) == ("fake", "no device was found")
    assert summary["sensitive"]["backends"]["other"]["not_fp32"] == ["cross_entropy_loss"]
    assert [device.usable for device in other.asked] == [False]
    assert other.asked[0].backend == "other"


def test_under_the_pinned_policy_no_sensitive_operator_differs(install: Callable[..., Plugins], document: Callable[..., dict[str, Any]]) -> None:
    install(Other())
    before = document("--diff", "cpu", "other")["summary"]
    after = document("--diff", "cpu", "other", "--pinned")["summary"]
    assert before["sensitive"]["differ"]
    assert after["sensitive"]["differ"] == []
    assert after["sensitive"]["backends"] == {name: {"ran": len(sensitive_ops()), "not_fp32": []} for name in ("cpu", "other")}
    assert after["backends"]["other"]["pinned"] == ["cross_entropy_loss"]
    assert after["backends"]["cpu"]["ops"] == before["backends"]["cpu"]["ops"]
    assert after["dispatcher"] == before["dispatcher"], "pins are no part of the lists"
    assert not PINS.counts


def test_the_installed_backends(document: Callable[..., dict[str, Any]]) -> None:
    names = list(load_plugins().backends)
    if len(names) < 2:
        pytest.skip("one backend is installed")
    summary = document("--diff", *names, "--pinned")["summary"]
    assert summary["errors"] == {}
    assert list(summary["backends"]) == names
    assert summary["dispatcher"]["equal"]
    assert summary["sensitive"]["differ"] == []
    assert all(seen["not_fp32"] == [] and seen["ran"] > 0 for seen in summary["sensitive"]["backends"].values())


def test_all_backends_when_none_is_named(install: Callable[..., Plugins], document: Callable[..., dict[str, Any]]) -> None:
    install(Other())
    assert list(document("--op", "mm")["summary"]["backends"]) == ["cpu", "other"]
    assert list(document("--diff", "--op", "mm")["summary"]["backends"]) == ["cpu", "other"]


def test_backends_that_share_an_autocast_key(install: Callable[..., Plugins], document: Callable[..., dict[str, Any]]) -> None:
    cpu = install().backends["cpu"]
    install(type("Twin", (), {"name": "twin", "autocast_key": "AutocastCPU", "device_types": (), "discover": cpu.discover, "op_policy": cpu.op_policy}))
    summary = document("--diff", "cpu", "twin", "--pinned", "--op", "softmax")["summary"]
    assert summary["differ"] == 0
    assert all(entry["dispatcher"]["equal"] for entry in summary["backends"].values())


def test_one_operator(install: Callable[..., Plugins], document: Callable[..., dict[str, Any]]) -> None:
    install(Other())
    assert [op["op"] for op in document("--op", "pow,mm")["ops"]] == ["mm", "pow.Scalar", "pow.Tensor_Scalar", "pow.Tensor_Tensor"]
    assert [op["op"] for op in document("--op", "pow.Scalar", "--op", "gelu")["ops"]] == ["gelu", "pow.Scalar"]
    unlisted = document("cpu", "--op", "gelu")["ops"][0]["backends"]["cpu"]
    assert (unlisted["policy"], unlisted["outcomes"]["bf16"]["out"]) == ("not listed", ["bf16"])


def test_text_and_markdown(install: Callable[..., Plugins], invoke: Invoke, tmp_path: Path) -> None:
    install(Other())
    text = invoke("policy", "--diff", "cpu", "other", "--op", "softmax").stdout
    assert "Autocast policy of cpu, other" in text
    assert "softmax.int  yes        not listed  bf16 fp16 fp32  fp32   fp32" in text
    out = tmp_path / "policy.md"
    result = invoke("policy", "cpu", "--op", "softmax,mm", "--format", "md", "--out", str(out))
    assert (result.exit_code, result.stdout) == (0, "")
    assert "| mm |  | lower | bf16 fp16 bf16 |" in out.read_text(encoding="utf-8")


def test_an_error_of_one_backend_is_one_line_and_the_others_are_shown(install: Callable[..., Plugins], invoke: Invoke) -> None:
    install(Other(), Other(name="broken", error=RuntimeError("no\nlist")))
    result = invoke("policy", "--diff", "cpu", "other", "broken", "--op", "mm", "--format", "json")
    assert (result.exit_code, result.stderr) == (0, "warning: policy of broken: RuntimeError: no\n")
    assert json.loads(result.stdout)["summary"]["errors"] == {"broken": "RuntimeError: no"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"error": BackendError("the list", found="gone", remedy="install it")}, "the list: gone; install it"),
        ({"autocast_key": "AutocastXPO"}, "unknown autocast key 'AutocastXPO': no autocast key has that name (nearest: AutocastXPU"),
        ({"kind": "lowest"}, "is 'lowest'; allowed: lower, fp32, promote, banned"),
    ],
)
def test_no_difference_is_made_of_one_policy(install: Callable[..., Plugins], refused: Callable[..., str], changes: dict[str, Any], expected: str) -> None:
    install(Other(**changes))
    assert expected in refused("policy", "other")
    line = refused("policy", "--diff", "cpu", "other")
    assert "fewer than two policies; other: " in line
    assert expected in line


def test_a_policy_needs_no_device(install: Callable[..., Plugins], document: Callable[..., dict[str, Any]]) -> None:
    other = Other(discovery_error=OSError("no bus"))
    install(other)
    entry = document("other", "--op", "mm")["summary"]["backends"]["other"]
    assert entry["ops"] == len(kernels(OTHER_KEY))
    assert entry["reason"] == "discover() raised OSError: no bus"


def test_a_device_type_that_torch_does_not_know_is_not_run(install: Callable[..., Plugins], document: Callable[..., dict[str, Any]]) -> None:
    install(Other(device_types=("acme",)))
    found = document("--diff", "cpu", "other", "--op", "mm")
    assert found["summary"]["backends"]["other"]["method"] == "not run"
    assert found["ops"][0]["backends"]["other"] == {"policy": "lower", "outcomes": {}}
    assert found["ops"][0]["results_differ"] is None


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["cpuu"], "unknown backend 'cpuu': no backend has that name (nearest: cpu"),
        (["cpu", "other"], "2 backends without --diff; write `mpbackend policy --diff BACKEND BACKEND`"),
        (["--diff", "cpu"], "--diff cpu: fewer than two backends; allowed: cpu, other"),
        (["--diff", "cpu", "cpu"], "one backend twice"),
        (["cpu", "--op", "softmaxx"], "unknown operator 'softmaxx'"),
        (["cpu", "--op", "acme::mm"], "unknown operator 'acme::mm'"),
    ],
)
def test_bad_input_is_one_line(install: Callable[..., Plugins], refused: Callable[..., str], arguments: list[str], expected: str) -> None:
    install(Other())
    assert expected in refused("policy", *arguments)


def test_without_a_backend(install: Callable[..., Plugins], refused: Callable[..., str]) -> None:
    install().backends.clear()
    assert "no backend is installed" in refused("policy")
