"""One fault for each check: what is done to the processor's backend, and the words that the check must find."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec
from torch import Tensor

from mpbackend.backend import Backend, Collectives
from tests.conformance.broken import (
    Clock,
    Meter,
    Stuck,
    always,
    changing_notes,
    claiming_fp32,
    drift_switches,
    drifting,
    flushed,
    held_word,
    in_bf16,
    larger,
    left_out,
    narrow_sums,
    numbered,
    other_thread,
    pretending,
    ripple,
    rows,
    scaling_parameters,
    short_operands,
    shorter,
    switches,
    transposed_only,
    truncated_cast,
    truncating_product,
    visible,
    without_reason,
)
from tests.conformance.wrong import MISSING, Tamper, Wrong

Members = Callable[[Backend], Mapping[str, Any]]


class Fault(NamedTuple):
    """A fault.

    Attributes:
        words: part of what the check says about it.
        members: members to replace, made from the right backend.
        tamper: what operators give instead, made anew for each backend.
        device: fields of the device to change.
    """

    words: str
    members: Members | None = None
    tamper: Callable[[], Tamper] | None = None
    device: Mapping[str, Any] | None = None

    def backend(self, right: Backend) -> Wrong:
        """Return the wrong backend."""
        return Wrong(right, self.members(right) if self.members is not None else None, self.tamper() if self.tamper is not None else None)


FAULTS: Mapping[str, Fault] = {
    "members": Fault("it lacks clock", lambda right: {"clock": MISSING}),
    "devices": Fault("finds elsewhere", lambda right: {"address": lambda text: msgspec.structs.replace(right.address(text), key="elsewhere")}),
    "device_tells_its_kind": Fault("its kind says hardware", device={"key": "h100", "arch": "sm_90", "name": "H100"}),
    "unknown_address_is_refused": Fault("finds x86", lambda right: {"address": lambda text: right.address("0")}),
    "implementations": Fault("no reason is given", lambda right: {"implements": rows(right, reason="")}),
    "environment": Fault("it says nothing", lambda right: {"environment": left_out(right, "torch")}),
    "collective_formats": Fault("'float' is no format", lambda right: {"collectives": lambda device: Collectives(name="gloo", reduces=("fp32", "float"))}),
    "reasons_are_sentences": Fault("more than one line", lambda right: {"implements": rows(right, reason="not\nhere")}),
    "refusals_name_the_device": Fault("without a reason", lambda right: {"implements": without_reason(right)}),
    "notes": Fault("others when they are asked for again", lambda right: {"notes": changing_notes(right)}),
    "unknown_product_is_refused": Fault("there is a product of fp7_e3m3", lambda right: {"product": truncating_product}),
    "cast_rounding": Fault("bf16: ", tamper=truncated_cast),
    "casts_back": Fault("becomes 0", tamper=always("_to_copy", flushed(2.0**-14))),
    "low_bit_casts": Fault("fp8_e4m3: ", tamper=always("_to_copy", flushed(2.0**-6))),
    "matmul": Fault("times its derived bound", tamper=always("mm", larger)),
    "batched_matmul": Fault("times its derived bound", tamper=always("bmm", larger)),
    "transposed_matmul": Fault("times its derived bound", tamper=transposed_only),
    "linear": Fault("times its derived bound", tamper=always("addmm", larger)),
    "matmul_gradients": Fault("times its derived bound", tamper=always("mm", ripple(6))),
    "convolution": Fault("times its derived bound", tamper=always("convolution", larger)),
    "convolution_gradients": Fault("dgrad", tamper=always("convolution_backward", larger)),
    "attention": Fault("times its derived bound", tamper=always("_scaled_dot_product_flash_attention_for_cpu", ripple(3))),
    "attention_gradients": Fault("times its derived bound", tamper=always("_scaled_dot_product_flash_attention_for_cpu_backward", ripple(2))),
    "layer_norm": Fault("times its derived bound", tamper=always("native_layer_norm", in_bf16)),
    "softmax": Fault("times its derived bound", tamper=always("_softmax", in_bf16)),
    "cross_entropy": Fault("times its derived bound", tamper=always("_log_softmax", in_bf16)),
    "accumulate_short": Fault("bounds of the claimed 24 bits", tamper=narrow_sums),
    "accumulate_long": Fault("bounds of the claimed 24 bits", tamper=narrow_sums),
    "probed_product_is_what_runs": Fault("have other bits", lambda right: {"product": truncating_product}),
    "probe_contradicts_no_claim": Fault("the row claims", lambda right: {"product": truncating_product}),
    "policy_names": Fault("has no operator", lambda right: {"op_policy": lambda device: {**right.op_policy(device), "no_such_operator": "lower"}}),
    "policy_is_dispatched": Fault("only in the dispatcher", lambda right: {"op_policy": lambda device: dict(list(right.op_policy(device).items())[1:])}),
    "products_are_lowered": Fault("bmm returns torch.float32", tamper=always("bmm", Tensor.float)),
    "sensitive_operators": Fault("works in", lambda right: {"op_policy": claiming_fp32(right)}),
    "fp32_turns_autocast_off": Fault("returns torch.bfloat16", tamper=always("addmm", Tensor.bfloat16)),
    "autocast_in_threads": Fault("in another thread returns torch.float32", tamper=other_thread),
    "switches_read_back": Fault(
        "which is none of", lambda right: {"switches": switches(right, lambda switch: msgspec.structs.replace(switch, get=lambda: "?"))}
    ),
    "switch_refuses_nonsense": Fault("takes 'no-such-setting'", lambda right: {"switches": switches(right, held_word)}),
    "plans_set_known_switches": Fault(
        "which the backend does not have", lambda right: {"switches": switches(right, lambda switch: None if "matmul" in switch.name else switch)}
    ),
    "session_restores_switches": Fault("drift reads", lambda right: {"switches": drift_switches(right)}),
    "fp32_products_keep_their_bits": Fault("matmul keeps 10 fraction bits", tamper=short_operands),
    "switches_do_what_the_matrix_says": Fault("keeps 10 fraction bits", tamper=short_operands),
    "overflow_shows": Fault("no register tells", tamper=always("mm", visible)),
    "nan_shows": Fault("no register tells", tamper=always("sub", visible)),
    "overflow_is_forgotten": Fault("leaves the register set", lambda right: {"overflow": lambda device: Stuck()}),
    "overflow_skips_the_step": Fault("skips no step", tamper=always("", visible)),
    "skip_restores_buffers": Fault("is taken", tamper=always("", visible)),
    "scale_changes_no_bit": Fault("differs", tamper=always("mm", flushed(2.0**-7))),
    "small_gradients_survive": Fault("times its derived bound", tamper=always("mm", flushed(2.0**-8))),
    "low_bit_products": Fault("forward differs by", lambda right: {"convert": pretending}),
    "low_bit_keeps_nonfinite": Fault("gives finite numbers", tamper=always("", visible)),
    "conversion_tells_every_layer": Fault("no row tells about odd", lambda right: {"convert": shorter(right)}),
    "plain_recipes_convert_nothing": Fault("it changes", lambda right: {"convert": scaling_parameters(right)}),
    "copies": Fault("comes back with other bits", tamper=always("clone", larger)),
    "resume": Fault("differs after resuming", tamper=drifting),
    "reduces_claimed_formats": Fault("fp8_e4m3: ", lambda right: {"collectives": lambda device: Collectives(name="gloo", reduces=("fp32", "fp8_e4m3"))}),
    "products_repeat": Fault("other bits when it is computed again", tamper=drifting),
    "training_repeats": Fault("differs", tamper=drifting),
    "memory_is_counted": Fault("raises the reading by", lambda right: {"memory": lambda device: Meter(right.memory(device))}),
    "clock": Fault("which the host saw take", lambda right: {"clock": lambda device: Clock(right.clock(device))}),
    "record_tells_what_ran": Fault("of the environment out", lambda right: {"environment": numbered(right)}),
}
"""A fault for each check that runs in this process; those in fresh processes have plugins with faults."""
