"""Every check by name, as data: what a backend has to do, whoever wrote it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from mpbackend.conformance import (
    accumulators,
    attention,
    casts,
    contract,
    convolutions,
    determinism,
    fences,
    isolation,
    low_bit,
    matmuls,
    messages,
    meters,
    overflows,
    policies,
    probing,
    records,
    reductions,
    round_trip,
    scaling,
    sensitive,
)
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
        isolation.check_plugin_imports_are_light,
        isolation.check_discovery_imports_no_torch,
        isolation.check_discovery_makes_no_context,
    ),
    "messages": (
        messages.check_reasons_are_sentences,
        messages.check_refusals_name_the_device,
        messages.check_notes,
        messages.check_unknown_product_is_refused,
    ),
    "casts": (casts.check_cast_rounding, casts.check_casts_back, casts.check_low_bit_casts),
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
    "sums": (
        accumulators.check_accumulate_short,
        accumulators.check_accumulate_long,
        probing.check_probed_product_is_what_runs,
        probing.check_probe_contradicts_no_claim,
    ),
    "policy": (
        policies.check_policy_names,
        policies.check_policy_is_dispatched,
        policies.check_products_are_lowered,
        policies.check_sensitive_operators,
        policies.check_fp32_turns_autocast_off,
        policies.check_autocast_in_threads,
    ),
    "fence": (
        fences.check_switches_read_back,
        fences.check_switch_refuses_nonsense,
        fences.check_plans_set_known_switches,
        fences.check_session_restores_switches,
        fences.check_fp32_products_keep_their_bits,
        fences.check_switches_do_what_the_matrix_says,
    ),
    "overflow": (overflows.check_overflow_shows, overflows.check_nan_shows, overflows.check_overflow_is_forgotten),
    "loss scale": (
        scaling.check_overflow_skips_the_step,
        scaling.check_skip_restores_buffers,
        scaling.check_scale_changes_no_bit,
        scaling.check_small_gradients_survive,
    ),
    "low bit": (
        low_bit.check_low_bit_products,
        low_bit.check_low_bit_keeps_nonfinite,
        low_bit.check_conversion_tells_every_layer,
        low_bit.check_plain_recipes_convert_nothing,
    ),
    "state": (round_trip.check_copies, round_trip.check_resume),
    "reduction": (reductions.check_reduces_claimed_formats,),
    "determinism": (determinism.check_products_repeat, determinism.check_training_repeats),
    "meters": (meters.check_memory_is_counted, meters.check_clock),
    "record": (records.check_record_tells_what_ran,),
}
"""The checks by theme, in the order in which they run."""

CHECKS: Mapping[str, Check] = MappingProxyType(
    {function.__name__.removeprefix("check_"): Check(theme, function) for theme, functions in THEMES.items() for function in functions}
)
"""The checks by name: that of the function without ``check_``."""
