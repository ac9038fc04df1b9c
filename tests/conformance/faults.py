"""One fault for each check: what is done to the processor's backend, and the words that the check must find."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from mpbackend.backend import Backend, Collectives, Implementation, MemoryReading, Switch
from mpbackend.device import Device
from mpbackend.numerics.arithmetic import Arithmetic
from mpbackend.numerics.matmul import bmm, mm
from mpbackend.train.policy import sensitive_ops
from tests.conformance.wrong import MISSING, Tamper, Wrong, changing

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


def larger(out: Tensor) -> Tensor:
    """Return results that are 1/32 too large."""
    return out * (1 + 2.0**-5)


def ripple(bits: int) -> Callable[[Tensor], Tensor]:
    """Return what makes every other element of a result ``2**-bits`` too large."""

    def change(out: Tensor) -> Tensor:
        signs = torch.arange(out.numel()).reshape(out.shape) % 2
        return out * (1 + signs.to(out.dtype) * 2.0**-bits)

    return change


def always(names: str, change: Callable[[Tensor], Tensor]) -> Callable[[], Tamper]:
    """Return what makes a tamper that changes the results of operators."""
    return lambda: changing(names.split(), change)


def in_bf16(out: Tensor) -> Tensor:
    """Return results as if they had been computed in bf16."""
    return out.bfloat16().to(out.dtype)


NARROW = Arithmetic(a="fp32", b="fp32", products_per_step=32, fraction_bits=13, register_bits=13, register_rounding="rz", zero_exponent=-133)
"""A register of 13 bits under a claim of 24."""

PRODUCTS: Mapping[str, Any] = {"mm": mm, "bmm": bmm}


def narrow_sums() -> Tamper:
    """Return a tamper that sums products in 13 bits."""

    def tamper(name: str, args: tuple[Any, ...], out: Any) -> Any:
        if name not in PRODUCTS:
            return out
        with torch._C._DisableTorchDispatch():
            return PRODUCTS[name](args[0].float(), args[1].float(), NARROW).to(out.dtype)

    return tamper


def short_operands() -> Tamper:
    """Return a tamper that multiplies fp32 operands in 10 fraction bits."""

    def tamper(name: str, args: tuple[Any, ...], out: Any) -> Any:
        if name == "mm" and args[0].dtype is torch.float32:
            with torch._C._DisableTorchDispatch():
                left, right = ((value.contiguous().view(torch.int32) & -(1 << 13)).view(torch.float32) for value in args[:2])
                return left @ right
        return out

    return tamper


def transposed_only() -> Tamper:
    """Return a tamper that takes operands that are stored transposed for others."""

    def tamper(name: str, args: tuple[Any, ...], out: Any) -> Any:
        return larger(out) if name == "mm" and not args[0].is_contiguous() else out

    return tamper


def truncated_cast() -> Tamper:
    """Return a tamper whose casts to bf16 cut instead of rounding."""

    def tamper(name: str, args: tuple[Any, ...], out: Any) -> Any:
        if name == "_to_copy" and args[0].dtype is torch.float32 and out.dtype is torch.bfloat16:
            return (args[0].view(torch.int32) & -(1 << 16)).view(torch.float32).to(torch.bfloat16)
        return out

    return tamper


def flushed(limit: float) -> Callable[[Tensor], Tensor]:
    """Return what takes small results for zeros."""
    return lambda out: torch.where(out.abs() < limit, 0.0, out).to(out.dtype)


def other_thread() -> Tamper:
    """Return a tamper that works in fp32 in every thread but one."""

    def tamper(name: str, args: tuple[Any, ...], out: Any) -> Any:
        return out.float() if name == "addmm" and threading.current_thread() is not threading.main_thread() else out

    return tamper


def drifting() -> Tamper:
    """Return a tamper whose results depend on how many products were computed before."""
    calls = itertools.count()

    def tamper(name: str, args: tuple[Any, ...], out: Any) -> Any:
        return out * (1 + 2.0**-6 * (next(calls) % 7)) if name in ("mm", "addmm") else out

    return tamper


def visible(out: Tensor) -> Tensor:
    """Return results in which every inf and NaN became a number."""
    return torch.nan_to_num(out) if out.dtype in (torch.float32, torch.float16, torch.bfloat16) else out


class Stuck:
    """A register that always tells of an overflow."""

    def clear(self) -> None:
        """Do nothing."""

    def found(self) -> Tensor:
        """Return that there was one."""
        return torch.tensor(True)


def rows(right: Backend, **changes: Any) -> Callable[[Device], list[Implementation]]:
    """Return ``implements`` with fields of every row that cannot run changed."""
    return lambda device: [msgspec.structs.replace(row, **changes) if row.level is None else row for row in right.implements(device)]


def without_reason(right: Backend) -> Callable[[Device], list[Implementation]]:
    """Return ``implements`` that refuses bf16 without a reason."""
    return lambda device: [
        msgspec.structs.replace(row, level=None, reason="") if (row.a, row.scaling) == ("bf16", "none") else row for row in right.implements(device)
    ]


def switches(right: Backend, change: Callable[[Switch], Switch | None], extra: Callable[[], list[Switch]] = list) -> Callable[[Device], list[Switch]]:
    """Return ``switches`` with each switch changed, or left out for None, and more of them at the end."""
    return lambda device: [made for switch in right.switches(device) if (made := change(switch)) is not None] + extra()


def held_word(switch: Switch) -> Switch:
    """Return a switch that keeps whatever word it is given."""
    held = [switch.get()]
    return msgspec.structs.replace(switch, get=lambda: held[0], set=lambda value: held.__setitem__(0, value))


def drift_switches(right: Backend) -> Callable[[Device], list[Switch]]:
    """Return ``switches`` of which one counts how often the others are set."""
    count = [0]

    def counted(switch: Switch) -> Switch:
        def set_and_count(value: str) -> None:
            count[0] += 1
            switch.set(value)

        return msgspec.structs.replace(switch, set=set_and_count)

    drift = Switch(name="drift", get=lambda: str(count[0]), set=lambda value: None, allowed=tuple(map(str, range(1000))))
    return switches(right, counted, lambda: [drift])


class Meter:
    """A meter of memory in another unit."""

    def __init__(self, meter: Any) -> None:
        self._meter = meter

    def reset_peak(self) -> None:
        """Start a new peak."""
        self._meter.reset_peak()

    def read(self) -> MemoryReading:
        """Return MiB."""
        reading: MemoryReading = self._meter.read()
        return msgspec.structs.replace(reading, allocated=(reading.allocated or 0) >> 20, peak=(reading.peak or 0) >> 20)


class Clock:
    """A clock in another unit."""

    def __init__(self, clock: Any) -> None:
        self._clock = clock

    def mark(self) -> Any:
        """Return a mark."""
        return self._clock.mark()

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Return seconds."""
        seconds: float = self._clock.elapsed_ms(start, end) / 1e3
        return seconds


def numbered(right: Backend) -> Callable[[Device], dict[str, str]]:
    """Return ``environment`` with a name that is another one each time."""
    calls = itertools.count()
    return lambda device: {**right.environment(device), f"call {next(calls)}": "yes"}


def left_out(right: Backend, name: str) -> Callable[[Device], dict[str, str]]:
    """Return ``environment`` without one name."""
    return lambda device: {key: value for key, value in right.environment(device).items() if key != name}


def claiming_fp32(right: Backend) -> Callable[[Device], dict[str, str]]:
    """Return an ``op_policy`` that says fp32 of the operators that it leaves in 16 bits, so that nothing is pinned."""
    return lambda device: {**right.op_policy(device), **dict.fromkeys(sensitive_ops(), "fp32")}


def changing_notes(right: Backend) -> Callable[[Any], list[str]]:
    """Return ``notes`` that are others each time."""
    calls = itertools.count()
    return lambda plan: [f"call {next(calls)}"]


def shorter(right: Backend) -> Callable[[Any, Any], Any]:
    """Return ``convert`` that forgets to tell about the last layer."""
    return lambda model, plan: list(right.convert(model, plan))[:-1]


def scaling_parameters(right: Backend) -> Callable[[Any, Any], Any]:
    """Return ``convert`` that changes the parameters of a model that it says to leave alone."""

    def convert(model: torch.nn.Module, plan: Any) -> Any:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 2.0**-8)
        return right.convert(model, plan)

    return convert


def pretending(model: torch.nn.Module, plan: Any) -> list[dict[str, str]]:
    """Report every linear layer as converted, and convert none."""
    layers = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    return [{"layer": name, "action": "converted", "reason": "as asked"} for name in layers]


def truncating_product(device: Device, name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a product for probes whose operands are cut to 10 fraction bits."""
    return lambda a, b: (a.bfloat16().float() @ b.bfloat16().float()).double()


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
