"""Running the checks without a test runner: outcomes, expected failures, and where the results come from."""

from __future__ import annotations

import datetime
import subprocess
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from mpbackend import __version__
from mpbackend.backend import Backend
from mpbackend.conformance.answer import Answer
from mpbackend.conformance.evidence import Evidence, Outcome, Result, plain
from mpbackend.conformance.registry import CHECKS, Check
from mpbackend.conformance.subject import Subject
from mpbackend.device import Device
from mpbackend.errors import BackendError, UnknownNameError, describe, printable
from mpbackend.inquiry import REMEDY
from mpbackend.plugins import Plugins, load_plugins

PACKAGE = Path(__file__).resolve().parents[1]
COMMAND_LIMIT = 10.0
"""Seconds for git to answer."""


def run_checks(
    backend: Backend,
    device: Device,
    *,
    plugins: Plugins | None = None,
    quick: bool = False,
    checks: Sequence[str] | None = None,
    expected: Mapping[str, str] | None = None,
    progress: Callable[[Result], object] | None = None,
) -> Evidence:
    """Run the checks on one device of a backend.

    Args:
        backend: the backend; it need not be installed.
        device: one of its devices.
        plugins: the loaded plugins, for matrices and presets; loaded when omitted.
        quick: leave out the sizes that take long.
        checks: names of the checks to run; all when omitted.
        expected: checks that fail, to the reason, besides those that the backend announces. One that passes nevertheless fails, so that the list stays true.
        progress: told each result at once.

    Raises:
        UnknownNameError: ``checks``, ``expected`` or the backend names no check.
        BackendError: what the backend announces cannot be had.
    """
    chosen = list(CHECKS) if checks is None else list(dict.fromkeys(checks))
    announced = {**ask_expected_failures(backend, device), **(expected or {})}
    for name in (*chosen, *announced):
        if name not in CHECKS:
            raise UnknownNameError("conformance check", name, CHECKS, remedy="`mpbackend conformance --list` shows them")
    subject = Subject(backend, device, load_plugins() if plugins is None else plugins, quick)
    results: list[Result] = []
    for name in chosen:
        results.append(run_check(name, subject, announced.get(name, "")))
        if progress is not None:
            progress(results[-1])
    return Evidence(
        backend=backend.name,
        distribution=subject.plugins.owners.get(f"backend {backend.name}", ""),
        device=device,
        environment=environment_of(backend, device),
        mpbackend=__version__,
        commit=commit_of(PACKAGE),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        quick=quick,
        results=tuple(results),
    )


def ask_expected_failures(backend: Backend, device: Device) -> dict[str, str]:
    """Return the checks that a backend says it fails, to the reason: what its optional ``expected_failures(device)`` returns.

    Raises:
        BackendError: the backend raised, or answered with something else than reasons by name.
    """
    ask = getattr(backend, "expected_failures", None)
    if ask is None:
        return {}
    asked = f"what backend {backend.name!r} expects to fail on {device.key}"
    try:
        found = dict(ask(device))
    except Exception as error:
        raise BackendError(asked, found=f"expected_failures() raised {describe(error)}", remedy=REMEDY) from error
    strange = [name for name, reason in found.items() if not isinstance(name, str) or not isinstance(reason, str) or not reason.strip()]
    if strange:
        raise BackendError(asked, found=f"{strange[0]!r} has no reason", remedy=REMEDY)
    return found


def run_check(name: str, subject: Subject, expected: str = "") -> Result:
    """Run one check; see ``run_checks``. Whatever a backend raises is its failure."""
    check = CHECKS[name]
    state = torch.random.get_rng_state()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a plan warns of stands in the plan
            answer = check.function(subject)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a backend may raise anything
        answer = Answer(fault=f"it raised {describe(error)}")
    finally:
        torch.random.set_rng_state(state)
    return conclude(name, check, answer, expected)


def conclude(name: str, check: Check, answer: Answer, expected: str) -> Result:
    """Return the result of a check from its answer.

    Args:
        name: name of the check.
        check: the check.
        answer: what it answered.
        expected: why it was expected to fail; empty when it was not.
    """
    outcome: Outcome = "passed"
    detail = answer.note
    if answer.fault:
        outcome, detail = ("expected", f"{expected} ({answer.fault})") if expected else ("failed", answer.fault)
    elif expected:
        found = f"there was nothing to check: {answer.skip}" if answer.skip else "it passes"
        outcome, detail = "failed", f"{found}, but was expected to fail: {expected}"
    elif answer.skip:
        outcome, detail = "skipped", answer.skip
    return Result(check=name, theme=check.theme, outcome=outcome, detail=printable(detail), figures=plain(answer.figures))


def environment_of(backend: Backend, device: Device) -> dict[str, str]:
    """Return what the backend says about versions and variables; nothing where that fails, which a check of its own tells."""
    try:
        return {str(name): str(value) for name, value in backend.environment(device).items()}
    except Exception:  # noqa: BLE001 - check_environment fails on it and says why
        return {}


def commit_of(folder: Path) -> str:
    """Return the commit of the checkout that a folder of sources belongs to, with ``+`` where tracked files differ from it; empty without one."""
    if not git(folder, "ls-files", "--error-unmatch", "__init__.py"):
        return ""
    commit = git(folder, "rev-parse", "HEAD")
    return f"{commit}+" if commit and git(folder, "status", "--porcelain", "--untracked-files=no", "--", ".") else commit


def git(folder: Path, *arguments: str) -> str:
    """Return what git prints in a folder; empty where there is no git or it fails."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=COMMAND_LIMIT, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
