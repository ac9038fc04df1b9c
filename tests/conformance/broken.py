"""What wrong backends do: results of operators that are off, members that say something else, meters in other units."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor

from mpbackend.backend import Backend, Implementation, MemoryReading, Switch
from mpbackend.device import Device
from mpbackend.numerics.arithmetic import Arithmetic
from mpbackend.numerics.matmul import bmm, mm
from mpbackend.train.policy import sensitive_ops
from tests.conformance.wrong import Tamper, changing


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
