from __future__ import annotations

from collections.abc import Callable

import click.testing
import pytest

from mpbackend.cli.main import main
from mpbackend.matrix import load_matrix

Invoke = Callable[..., click.testing.Result]


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Run the command line in this process, 120 columns wide."""
    monkeypatch.setenv("COLUMNS", "120")

    def run(*arguments: str) -> click.testing.Result:
        return click.testing.CliRunner().invoke(main, arguments, catch_exceptions=False)

    return run


@pytest.fixture
def refused(invoke: Invoke) -> Callable[..., str]:
    """Run a command that must fail with one line and exit code 2, and return the line."""

    def run(*arguments: str) -> str:
        result = invoke(*arguments)
        lines = [line for line in result.stderr.splitlines() if not line.startswith("warning: ")]
        assert (result.exit_code, result.stdout, len(lines)) == (2, "", 1), result.output
        assert lines[0].startswith("error: ")
        return lines[0]

    return run


@pytest.fixture(scope="session")
def granting_device() -> str:
    """Return a device that runs bf16 natively and that no plugin here answers for."""
    return device_with("bf16", "native")


@pytest.fixture(scope="session")
def absent_device() -> str:
    """Return a device that has no hif8."""
    return device_with("hif8", "absent")


def device_with(name: str, level: str) -> str:
    """Return the first accelerator whose matrix products in a format have a level by every path."""
    matrix = load_matrix()
    for model in matrix.devices.values():
        levels = {row.level for row in matrix.rows(model.arch, op="matmul", a=name, b=name)}
        if levels == {level} and matrix.peaks(model.key):
            return model.key
    raise LookupError(f"no device has {name} as {level}")
