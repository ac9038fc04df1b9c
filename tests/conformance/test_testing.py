"""The checks under pytest: a test for each, strict about expected failures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mpbackend.conformance.registry import CHECKS
from mpbackend.conformance.testing import parametrize_with_checks
from mpbackend.errors import UnknownNameError


def cases(*specs: str, **expected: str) -> dict[str, Callable[[], None]]:
    """Return the callables of the tests that the decorator makes, by their ids."""
    mark = parametrize_with_checks(specs, expected={"cpu": expected})
    assert mark.name == "parametrize"
    argument, parameters = mark.args
    assert argument == "check"
    found: dict[str, Any] = {parameter.id: parameter.values[0] for parameter in parameters}
    return found


def test_there_is_a_test_for_each_check_and_device() -> None:
    assert list(cases("cpu", "emu:h100")) == [f"{spec}-{name}" for spec in ("cpu", "emu:h100") for name in CHECKS]


@pytest.mark.parametrize("name", ["members", "environment", "collective_formats", "switches_read_back"])
def test_a_check_that_passes_is_quiet(name: str) -> None:
    cases("cpu")[f"cpu-{name}"]()


def test_a_check_that_has_nothing_to_check_is_skipped() -> None:
    with pytest.raises(pytest.skip.Exception, match="there is no register"):
        cases("cpu")["cpu-overflow_is_forgotten"]()


def test_an_expected_failure_that_passes_fails() -> None:
    with pytest.raises(AssertionError, match="cpu: members: it passes, but was expected to fail: not written yet"):
        cases("cpu", members="not written yet")["cpu-members"]()


def test_a_name_that_is_no_check_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="matmull"):
        cases("cpu", matmull="why")


def test_a_device_is_selected_when_its_test_runs() -> None:
    found = cases("nowhere")
    with pytest.raises(UnknownNameError, match="unknown backend 'nowhere'"):
        found["nowhere-members"]()
