"""One test for each case of code that another device takes differently; the numbers are those of the collected cases."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mpbackend
from mpbackend.errors import BackendError
from mpbackend.observe.audit_document import AuditDocument, Finding
from mpbackend.observe.audit_modules import ModulePaths
from mpbackend.observe.audit_observer import Auditor
from mpbackend.observe.audit_run import audit_workload
from mpbackend.observe.audit_target import audit_target
from mpbackend.observe.audit_workload import Build
from mpbackend.observe.portability import bound_device, look_at_model, probe_autocast
from tests.support import audited

ROOT = Path(__file__).parents[2]
CASES = next((path for base in (ROOT, ROOT.parent) if (path := base / "shared" / "cases.md").is_file()), None)
SUPPORT = "tests.support.audited"


def live(build: Build, recipe: str = "bf16") -> AuditDocument:
    target = mpbackend.select("cpu")
    return audit_workload(build, target, target.plan(recipe, on_unsupported="emulate"), fp32=False)


@cache
def for_target(name: str, device: str, recipe: str = "bf16") -> AuditDocument:
    return audit_target(f"{SUPPORT}:{name}", device, recipe)


def found(audit: AuditDocument, rule: str) -> list[Finding]:
    return [finding for finding in audit.findings if finding.rule == rule]


def new_auditor() -> Auditor:
    return Auditor(ModulePaths(nn.Identity()))


@pytest.mark.parametrize("device", ["h100", "ascend-910b3"])
def test_case_10_binary_cross_entropy_is_listed_as_banned(device: str) -> None:
    [finding] = found(for_target("faulty", device), "banned-op")
    assert finding.where == "aten::binary_cross_entropy"
    assert device in finding.message
    assert "with_logits" in finding.remedy


def test_case_10_the_cpu_runs_it() -> None:
    def build(device: torch.device) -> audited.Pair:
        model = nn.Sequential(nn.Linear(8, 1), nn.Sigmoid()).to(device)
        return model, lambda: nn.functional.binary_cross_entropy(model(torch.ones(4, 8, device=device)).float(), torch.ones(4, 1, device=device))

    assert live(build).findings == ()


@pytest.mark.parametrize("device", ["h100", "ascend-910b3"])
def test_case_17_a_scattered_sum_of_two_formats_is_listed(device: str) -> None:
    audit = for_target("faulty", device)
    [finding] = [finding for finding in found(audit, "mixed-formats") if "scatter_add_" in finding.where]
    assert "fp32 and bf16" in finding.message
    assert not found(audit, "step-failed")


@pytest.mark.parametrize("case", ["20", "21"])
def test_case_20_21_unscaling_bf16_gradients_is_listed(case: str) -> None:
    audit = live(audited.own_scaler) if case == "20" else for_target("own_scaler", "h100", "bf16-params")
    [finding] = found(audit, "unscale-bf16")
    assert "accelerators have no kernel" in finding.message


def test_case_15_custom_fwd_of_another_device_is_named() -> None:
    [finding] = found(live(audited.bound), "custom-fwd-device")
    assert finding.where == "Elsewhere"
    assert "'cuda'" in finding.message and "'cpu'" in finding.message
    assert bound_device(audited.Elsewhere.forward) == "cuda"
    assert bound_device(audited.HandNorm.forward) is None


def test_case_18_a_masked_assignment_names_autocast_as_the_cause() -> None:
    audit = live(audited.masked)
    [finding] = found(audit, "mixed-formats")
    assert "index_put" in finding.where
    assert "the bf16 one comes from autocast" in finding.message
    assert found(audit, "step-failed")
    assert not found(live(audited.masked, "fp32"), "mixed-formats")


def test_case_18_the_audit_of_a_target_goes_on_behind_it() -> None:
    audit = for_target("faulty", "h100")
    assert [finding for finding in found(audit, "mixed-formats") if "index_put" in finding.where]
    assert audit.ops[0].phase == "backward" or any(row.phase == "optimizer" for row in audit.ops)


def test_case_29_a_compiled_model_with_an_autocast_of_its_own() -> None:
    auditor = new_auditor()
    look_at_model(auditor, nn.Sequential(audited.Inner()), torch.device("cpu"), None)
    assert not auditor.findings
    compiled: Any = torch.compile(nn.Sequential(audited.Inner()), backend="eager")
    look_at_model(auditor, compiled, torch.device("cpu"), None)
    [finding] = auditor.findings
    assert (finding.rule, finding.where) == ("compiled-autocast", "Inner")


def test_case_32_a_norm_by_hand_in_fp16_is_named_with_its_first_infinity() -> None:
    audit = live(audited.hand_norm, "fp16:loss_scale.mode=none")
    [square] = found(audit, "square-in-fp16")
    assert square.where == "*, aten::mul" and "255.9" in square.message
    [first] = found(audit, "nonfinite")
    assert "HandNorm" in first.message and "mul" in first.message and "inf" in first.message
    assert not found(live(audited.hand_norm, "bf16"), "square-in-fp16")


@pytest.mark.slow
def test_case_32_without_hardware() -> None:
    [square] = found(for_target("hand_norm", "ascend-910b3", "fp16"), "square-in-fp16")
    assert "mul" in square.where


def test_case_40_the_ledger_shows_where_mixed_precision_saves_nothing() -> None:
    def wide(device: torch.device) -> audited.Pair:
        model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024)).to(device)
        x = torch.ones(8, 1024, device=device)
        return model, lambda: model(x).float().sum()

    def narrow(device: torch.device) -> audited.Pair:
        model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)).to(device)
        x = torch.ones(4096, 32, device=device)
        return model, lambda: model(x).float().sum()

    target = mpbackend.select("cpu")
    held: dict[str, tuple[int, int]] = {}
    for build in (wide, narrow):
        audit = audit_workload(build, target, target.plan("bf16"))
        rows = [row for row in audit.memory if row.klass == "activations"]
        held[build.__name__] = (sum(row.measured for row in rows), sum(row.fp32 or 0 for row in rows))
    # The 16-bit copy of a weight is saved for backward beside the activations: 2 B an element, where fp32 saves nothing.
    assert held["wide"][0] > held["wide"][1]
    assert held["narrow"][0] < held["narrow"][1]


FALLBACKS = """
    import torch
    from torch import nn
    from mpbackend.errors import BackendError
    from mpbackend.observe.audit_fallback import leaves_to_host
    from mpbackend.observe.audit_modules import ModulePaths
    from mpbackend.observe.audit_observer import Auditor
    from mpbackend.observe.audit_summary import fallback_rows
    from mpbackend.observe.fake_device import define_device, fake_tensors

    key = define_device("acme").removeprefix("Autocast")
    held = torch.library.Library("_", "IMPL")
    held.fallback(lambda op, *args, **kwargs: op(*args, **kwargs), key)
    own = torch.library.Library("aten", "IMPL")
    own.impl("relu", lambda x: x, key)
    own.impl("exp.out", lambda x, *, out: out, key)
    with fake_tensors():
        leaves = leaves_to_host(torch.device("acme"))
        auditor = Auditor(ModulePaths(nn.Identity()), leaves_device=leaves)
        x = torch.ones(4, 8, device="acme")
        with auditor:
            torch.i0(x)
            torch.relu(x)
            torch.exp(x)
        with auditor, auditor.timing():
            for _ in range(500):
                torch.i0(x)
        for row in sorted(fallback_rows(auditor), key=lambda row: row.count):
            print(row.op, row.count, row.bytes, row.timed, row.seconds > 0)
        try:
            with Auditor(ModulePaths(nn.Identity()), leaves_device=leaves, strict=True):
                torch.i0(x)
        except BackendError as error:
            print(error)
    print(leaves_to_host(torch.device("cpu")))
"""


def test_case_54_calls_left_to_the_host_are_counted_and_strict_raises() -> None:
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(FALLBACKS)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    once, many, strict, host = ended.stdout.splitlines()
    moved = 2 * 4 * 8 * 4  # argument and result
    assert once == f"aten::i0 1 {moved} False True"
    assert many == f"aten::i0 500 {500 * moved} True True"
    assert strict.startswith("aten::i0 on the device: it has no kernel there")
    assert host == "None"


def test_case_58_a_forward_pass_in_another_thread() -> None:
    audit = live(audited.in_a_thread)
    [finding] = found(audit, "other-thread")
    assert "autocast is off there" in finding.message
    backward = [row.compute for row in audit.ops if row.phase == "backward" and row.flops]
    assert set(backward) == {"fp32"}
    assert [row.same for row in audit.requests if row.role == "compute.wgrad"] == [False]


def test_case_58_the_session_context_works_there() -> None:
    def build(device: torch.device) -> audited.Pair:
        return audited.in_a_thread(device)

    target = mpbackend.select("cpu")
    model, loss = build(torch.device("cpu"))
    seen: list[torch.dtype] = []
    handle = model.register_forward_hook(lambda _module, _args, out: seen.append(out.dtype))
    with target.prepare(model, torch.optim.SGD(model.parameters()), "bf16") as session:
        import threading

        def work() -> None:
            with session.autocast():
                model(torch.ones(4, 8))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        with session.autocast():
            loss()
    handle.remove()
    assert seen == [torch.bfloat16, torch.float32]


@pytest.mark.parametrize(("device", "lower", "faults"), [("meta", torch.bfloat16, 1), ("cpu", torch.bfloat16, 0), ("cpu", torch.float16, 0)])
def test_case_59_a_device_without_autocast_kernels_is_probed(device: str, lower: torch.dtype, faults: int) -> None:
    auditor = new_auditor()
    probe_autocast(auditor, torch.device(device), lower)
    assert [finding.rule for finding in auditor.findings] == ["no-autocast-kernels"] * faults


@pytest.mark.parametrize(("build", "lost"), [(audited.image, 0), (audited.image_in_plain_order, 1)])
def test_case_66_channels_last_is_preserved_or_named(build: Callable[..., audited.Pair], lost: int) -> None:
    findings = found(live(build), "channels-last-lost")
    assert len(findings) == lost
    assert all(finding.where == "(model), aten::clone" for finding in findings)


def test_a_strict_audit_of_the_host_has_nothing_to_refuse() -> None:
    target = mpbackend.select("cpu")
    assert audit_workload(audited.tiny, target, target.plan("bf16"), fp32=False, strict=True).fallbacks == ()


def test_a_process_that_fails_says_why() -> None:
    with pytest.raises(BackendError, match="no_such_function"):
        audit_target(f"{SUPPORT}:no_such_function", "h100")


@pytest.mark.skipif(CASES is None, reason="the list of cases is not on this machine")
def test_every_case_of_portability_has_a_test() -> None:
    assert CASES is not None
    section = CASES.read_text(encoding="utf-8").partition("## Portability")[2].partition("\n## ")[0]
    listed = {case for row in re.findall(r"^\|([^|]*\d[^|]*)\|", section, re.MULTILINE) for case in re.findall(r"\d+", row)}
    tested = {case for name in globals() if name.startswith("test_case_") for case in re.findall(r"\d+", name)}
    assert listed
    assert listed - tested == set()
