"""Running the checks under pytest, a test for each check and device. pytest is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from mpbackend.conformance.registry import CHECKS
from mpbackend.conformance.runner import ask_expected_failures, run_check
from mpbackend.conformance.subject import Subject
from mpbackend.errors import UnknownNameError
from mpbackend.plugins import load_plugins
from mpbackend.selection import select_device

if TYPE_CHECKING:
    import pytest


def parametrize_with_checks(specs: Iterable[str], *, quick: bool = True, expected: Mapping[str, Mapping[str, str]] | None = None) -> pytest.MarkDecorator:
    """Return a pytest decorator that runs a test once for each check and device; needs pytest.

    Args:
        specs: devices as ``mpbackend.select`` takes them: ``cpu``, ``emu:h100``.
        quick: as in ``run_checks``.
        expected: device spec to checks that fail, to the reason, besides those that the backend announces; strict as in ``run_checks``.

    Example:
        @parametrize_with_checks(["cpu"])
        def test_conformance(check):
            check()
    """
    import pytest

    cases = [pytest.param(case, id=f"{spec}-{name}") for spec, name, case in deferred(tuple(specs), quick, expected or {})]
    return pytest.mark.parametrize("check", cases)


def deferred(specs: Sequence[str], quick: bool, expected: Mapping[str, Mapping[str, str]]) -> Iterator[tuple[str, str, Callable[[], None]]]:
    """Yield device spec, name and a callable that fails with ``AssertionError`` for every check of every device; devices are selected when it is called."""
    subjects: dict[str, Subject] = {}
    for spec in specs:
        for name in expected.get(spec, {}):
            if name not in CHECKS:
                raise UnknownNameError("conformance check", name, CHECKS)
        for name in CHECKS:
            yield spec, name, make_case(subjects, spec, name, quick, expected.get(spec, {}).get(name, ""))


def make_case(subjects: dict[str, Subject], spec: str, name: str, quick: bool, expected: str) -> Callable[[], None]:
    """Return the callable of one check; see ``deferred``."""

    def case() -> None:
        if spec not in subjects:
            plugins = load_plugins()
            chosen = select_device(spec, plugins, {})
            subjects[spec] = Subject(chosen.backend, chosen.device, plugins, quick)
        subject = subjects[spec]
        result = run_check(name, subject, expected or ask_expected_failures(subject.backend, subject.device).get(name, ""))
        if result.outcome == "failed":
            raise AssertionError(f"{spec}: {name}: {result.detail}")
        if result.outcome == "skipped":
            import pytest

            pytest.skip(result.detail)

    return case
