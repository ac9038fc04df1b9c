"""Running checks: outcomes, strict expectations, and what a backend may do without stopping the others."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from mpbackend.conformance.answer import Answer, fault, fine, skip
from mpbackend.conformance.evidence import Result
from mpbackend.conformance.registry import CHECKS, THEMES, Check
from mpbackend.conformance.runner import commit_of, conclude, run_check, run_checks
from mpbackend.conformance.subject import Subject
from mpbackend.errors import BackendError, UnknownNameError
from tests.conformance.wrong import MISSING, Wrong, processor

CHECK = Check("theme", lambda subject: fine())


@pytest.mark.parametrize(
    ("answer", "expected", "outcome", "detail"),
    [
        (fine(), "", "passed", ""),
        (Answer(note="bf16: absent"), "", "passed", "bf16: absent"),
        (fault("off"), "", "failed", "off"),
        (skip("absent"), "", "skipped", "absent"),
        (fault("off"), "known", "expected", "known (off)"),
        (fine(), "known", "failed", "it passes, but was expected to fail: known"),
        (skip("absent"), "known", "failed", "there was nothing to check: absent, but was expected to fail: known"),
    ],
)
def test_outcomes(answer: Answer, expected: str, outcome: str, detail: str) -> None:
    result = conclude("name", CHECK, answer, expected)
    assert (result.outcome, result.detail, result.check, result.theme) == (outcome, detail, "name", "theme")


def test_details_stand_on_one_line() -> None:
    assert conclude("name", CHECK, fault("a\nb\x1b[31m"), "").detail == "a b\\x1b[31m"


def test_whatever_a_backend_raises_is_its_failure() -> None:
    right, device, plugins = processor()
    for error in (RuntimeError("broken"), SystemExit(3), AssertionError("no")):

        def raising(*arguments: Any, error: BaseException = error) -> Any:
            raise error

        result = run_check("collective_formats", Subject(Wrong(right, {"collectives": raising}), device, plugins))
        assert (result.outcome, type(error).__name__ in result.detail) == ("failed", True)


def test_checks_leave_generators_and_settings_as_they_were() -> None:
    right, device, plugins = processor()
    subject = Subject(right, device, plugins, quick=True)
    before = torch.random.get_rng_state(), {switch.name: switch.get() for switch in right.switches(device)}
    for name in ("conversion_tells_every_layer", "session_restores_switches", "switch_refuses_nonsense", "plans_set_known_switches"):
        assert run_check(name, subject).outcome == "passed"
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert {switch.name: switch.get() for switch in right.switches(device)} == before[1]


def test_chosen_checks_are_run_in_order_and_told() -> None:
    right, device, plugins = processor()
    told: list[Result] = []
    evidence = run_checks(right, device, plugins=plugins, checks=["members", "environment", "members"], progress=told.append)
    assert [result.check for result in evidence.results] == ["members", "environment"]
    assert tuple(told) == evidence.results
    assert (evidence.backend, evidence.device, evidence.quick) == ("cpu", device, False)
    assert evidence.distribution.startswith("mpbackend-cpu ")
    assert evidence.environment["torch"] == torch.__version__


def test_an_expected_failure_that_passes_fails() -> None:
    right, device, plugins = processor()
    evidence = run_checks(right, device, plugins=plugins, checks=["members"], expected={"members": "not written yet"})
    assert (evidence.results[0].outcome, evidence.passes) == ("failed", False)


def test_a_backend_announces_what_it_fails() -> None:
    right, device, plugins = processor()
    members = {"collectives": MISSING, "expected_failures": lambda device: {"members": "it sums nothing yet", "environment": "planted"}}
    evidence = run_checks(Wrong(right, members), device, plugins=plugins, checks=["members", "environment", "devices"])
    assert [result.outcome for result in evidence.results] == ["expected", "failed", "passed"]
    assert evidence.results[0].detail == "it sums nothing yet (it lacks collectives)"
    assert "it passes, but was expected to fail: planted" in evidence.results[1].detail


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"members": ""}, "'members' has no reason"),
        ({"members": 1}, "'members' has no reason"),
        (["members"], "expected_failures.. raised"),
        ({"x": "y"}, "check 'x'"),
    ],
)
def test_an_announcement_without_reasons_is_refused(answer: Any, words: str) -> None:
    right, device, plugins = processor()
    with pytest.raises((BackendError, UnknownNameError), match=words):
        run_checks(Wrong(right, {"expected_failures": lambda device: answer}), device, plugins=plugins, checks=["members"])


def test_a_name_that_is_no_check_is_refused() -> None:
    right, device, plugins = processor()
    for arguments in ({"checks": ["matmull"]}, {"expected": {"matmull": "why"}}):
        with pytest.raises(UnknownNameError, match=r"unknown conformance check 'matmull'.*nearest: matmul"):
            run_checks(right, device, plugins=plugins, **arguments)


def test_every_function_is_registered_once_under_its_own_name() -> None:
    functions = [function for theme in THEMES.values() for function in theme]
    assert len(CHECKS) == len(functions) == len(set(functions)) >= 40
    assert all(function.__name__.startswith("check_") for function in functions)
    assert all(check.meaning.endswith(".") for check in CHECKS.values())


def test_no_check_can_be_replaced() -> None:
    with pytest.raises(TypeError):
        CHECKS["matmul"] = CHECK  # type: ignore[index] # what is tested


def test_the_commit_is_that_of_the_checkout(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        options = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        return subprocess.run(["git", "-C", str(tmp_path), *options, *arguments], check=True, capture_output=True, text=True).stdout.strip()

    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("", encoding="utf-8")
    assert commit_of(package) == "", "no repository"
    git("init", "-q")
    assert commit_of(package) == "", "a folder that the repository does not track, as an installed package in one"
    git("add", ".")
    git("commit", "-q", "-m", "first")
    assert commit_of(package) == git("rev-parse", "HEAD")
    (package / "__init__.py").write_text("changed = 1", encoding="utf-8")
    assert commit_of(package) == git("rev-parse", "HEAD") + "+"
