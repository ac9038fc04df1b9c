"""Every check by name, as data: what a backend has to do, whoever wrote it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from mpbackend.conformance import accumulators, attention, contract, convolutions, matmuls, sensitive
from mpbackend.conformance.answer import Answer
from mpbackend.conformance.subject import Subject

CheckFunction = Callable[[Subject], Answer]


class Check(NamedTuple):
    """One check.

    Attributes:
        theme: what it is about.
        function: does it.
    """

    theme: str
    function: CheckFunction

    @property
    def meaning(self) -> str:
        """The property that is checked, in a sentence: the first line of the function's documentation."""
        return (self.function.__doc__ or "").strip().splitlines()[0]


THEMES: Mapping[str, tuple[CheckFunction, ...]] = {
    "contract": (
        contract.check_members,
        contract.check_devices,
        contract.check_device_tells_its_kind,
        contract.check_unknown_address_is_refused,
        contract.check_implementations,
        contract.check_environment,
        contract.check_collective_formats,
    ),
    "products": (
        matmuls.check_matmul,
        matmuls.check_batched_matmul,
        matmuls.check_transposed_matmul,
        matmuls.check_linear,
        matmuls.check_matmul_gradients,
        convolutions.check_convolution,
        convolutions.check_convolution_gradients,
        attention.check_attention,
        attention.check_attention_gradients,
    ),
    "sensitive operators": (sensitive.check_layer_norm, sensitive.check_softmax, sensitive.check_cross_entropy),
    "sums": (accumulators.check_accumulate_short, accumulators.check_accumulate_long),
}
"""The checks by theme, in the order in which they run."""

CHECKS: Mapping[str, Check] = MappingProxyType(
    {function.__name__.removeprefix("check_"): Check(theme, function) for theme, functions in THEMES.items() for function in functions}
)
"""The checks by name: that of the function without ``check_``."""
