"""The vendor-parity suite on the simulated device: what it shows is calls, formats and control flow."""

from __future__ import annotations

from collections.abc import Callable

from mpbackend.conformance.testing import parametrize_with_checks


@parametrize_with_checks(["npu:0"])
def test_conformance(check: Callable[[], None]) -> None:
    check()
