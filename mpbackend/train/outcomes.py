"""What operators return under a backend's autocast, seen by running each on small operands."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mpbackend.device import Device
from mpbackend.observe.memory import dtype_name, nested_tensors
from mpbackend.plugins import describe

Sampler = Callable[[Any, torch.device, torch.dtype], tuple[list[Any], dict[str, Any]]]
"""Operator, device and dtype of the operands to positional and named arguments."""

Method = Literal["run", "fake", "not run"]
"""``run`` on the device; ``fake``: through torch's real dispatcher on tensors without memory, whose kernels only tell shapes and formats; ``not run``."""

INPUTS: Mapping[str, tuple[torch.dtype, torch.dtype]] = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
    "fp32": (torch.float32, torch.bfloat16),
}
"""Format of the floating-point operands, to their dtype and that of autocast."""

CASTS = frozenset(["_to_copy", "_conj", "device"])
"""Operators that are no step of a computation: casts, and what modes are asked besides."""


class Outcome(NamedTuple):
    """One operator on operands of one format.

    Attributes:
        out: formats of its results, each once; integers only where there is nothing else.
        inside: floating-point formats of the results of every operator below autocast, casts left out, sorted.
        refused: why it did not run; empty when it did.
    """

    out: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()
    refused: str = ""


class Grounds(NamedTuple):
    """Where operators of a backend can be run here: the torch device, how, and what the reader must know about it."""

    device: torch.device | None
    method: Method
    reason: str = ""


class _Steps(TorchDispatchMode):
    """Collects the formats of every operator below autocast."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch leaves it unannotated
        self.formats: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.name.partition("::")[2] not in CASTS:
            self.formats.update(tensor.dtype for tensor in nested_tensors(out) if is_real(tensor.dtype))
        return out


class _Call(torch.autograd.Function):
    """Makes a call below a binding of torch, which turns what C++ warns of into Python's warnings; ``torch.ops`` alone writes it to stderr.

    The call must not raise: torch loses an exception that comes with a warning.
    """

    @staticmethod
    def forward(ctx: Any, call: Callable[[], None]) -> None:
        call()


def is_real(dtype: torch.dtype) -> bool:
    """Tell whether a dtype is floating-point or complex."""
    return dtype.is_floating_point or dtype.is_complex


def find_grounds(device: Device, autocast_key: str) -> Grounds:
    """Return where the operators of a backend can be run here, without making a context on a device that is not usable.

    Args:
        device: the backend's device, usable or not.
        autocast_key: name of its autocast key.
    """
    try:
        place = torch.device(device.type or device.backend)
    except RuntimeError:
        return Grounds(None, "not run", f"torch knows no device type {device.type or device.backend!r} here")
    if device.usable:
        return Grounds(place, "run", "" if device.kind == "hardware" else f"{device.kind} device")
    try:
        with fake_tensors():
            keys = torch._C._dispatch_keys(torch.empty(1, device=place))
    except Exception as error:  # noqa: BLE001 - a private part of torch, which may refuse a device in any way
        return Grounds(None, "not run", f"{device.cause or 'not usable'}; no fake tensor either: {describe(error)}")
    if not keys.has(getattr(torch._C.DispatchKey, autocast_key)):
        return Grounds(None, "not run", f"{device.cause or 'not usable'}; fake tensors of {place.type} lack {autocast_key}")
    return Grounds(place, "fake", device.cause or "not usable")


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Make tensors without memory inside. Without gradients: autograd on a device that is not there ends the process (torch 2.13 without that device)."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # a second to import

    log = logging.getLogger(FakeTensorMode.__module__)  # tells of every operator that raises, which is an outcome here
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with FakeTensorMode(allow_fallback_kernels=False), torch.no_grad():
            yield
    finally:
        log.setLevel(level)


@contextmanager
def autocast_state(device_type: str, dtype: torch.dtype) -> Iterator[None]:
    """Turn autocast on by its state alone: ``torch.autocast`` turns itself off where the device is missing."""
    before = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    torch.set_autocast_enabled(device_type, True)
    torch.set_autocast_dtype(device_type, dtype)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled(device_type, before[0])
        torch.set_autocast_dtype(device_type, before[1])


def run_operators(ops: Mapping[str, Any], grounds: Grounds, sample: Sampler) -> dict[str, dict[str, Outcome]]:
    """Run operators under autocast on operands of every format of ``INPUTS``.

    Args:
        ops: overloads of ``torch.ops`` by name.
        grounds: where.
        sample: makes the arguments of an operator, as ``mpbackend.train.samples.sample`` does.

    Returns:
        Operator, to format of its operands, to what came of it; empty where nothing can be run.
    """
    found: dict[str, dict[str, Outcome]] = {name: {} for name in ops}
    if grounds.device is None:
        return {}
    with ExitStack() as stack:
        stack.enter_context(fake_tensors() if grounds.method == "fake" else torch.no_grad())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # of deprecated operators, which stand on the lists all the same
        for inputs, (dtype, lower) in INPUTS.items():
            for name, op in ops.items():
                found[name][inputs] = run_operator(op, grounds.device, dtype, lower, sample)
    return found


def run_operator(op: Any, device: torch.device, dtype: torch.dtype, lower: torch.dtype, sample: Sampler) -> Outcome:
    """Run one operator under autocast; see ``run_operators``.

    Args:
        op: the operator.
        device: where.
        dtype: format of its floating-point operands.
        lower: format of autocast.
        sample: makes its arguments.
    """
    steps = _Steps()
    results: list[torch.dtype] = []
    errors: list[str] = []

    def call() -> None:
        try:
            results.extend(tensor.dtype for tensor in nested_tensors(op(*positional, **named)))
        except Exception as error:  # noqa: BLE001 - an operator may refuse its operands, and a device the operator, in any way
            errors.append(describe(error))

    try:
        positional, named = sample(op, device, dtype)
    except Exception as error:  # noqa: BLE001 - a device may refuse to make operands in any way
        return Outcome(refused=describe(error))
    with autocast_state(device.type, lower), steps:
        _Call.apply(call)  # type: ignore[no-untyped-call] # torch leaves it unannotated
    if errors:
        return Outcome(refused=errors[0])
    out = [dtype for dtype in results if is_real(dtype)] or results
    return Outcome(tuple(dict.fromkeys(map(dtype_name, out))), tuple(sorted(map(dtype_name, steps.formats))))
