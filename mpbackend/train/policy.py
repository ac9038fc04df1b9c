"""Pinning: the sensitive operators (norms, softmax, losses, powers) run in fp32 under autocast on every backend.

Backends disagree about which operators autocast keeps in fp32, so the same recipe would round a softmax on one device and not on another. The list comes
from the installed torch, whose header states it once for every backend to use. An operator that a backend's own autocast does not run in fp32 gets a kernel
on that backend's autocast key; all others are untouched, and outside an autocast region nothing changes at all.
"""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch

from mpbackend.backend import PolicyKind
from mpbackend.errors import BackendError, UnknownNameError

Remedy = Literal["cast", "set_dtype"]
"""How an operator is brought to fp32: ``cast`` its operands, or ``set_dtype``: fill in its ``dtype`` argument unless the caller gave one."""

HEADER = Path("include", "ATen", "autocast_mode.h")
SECTIONS: Mapping[str, Remedy] = {
    "AT_FORALL_FP32": "cast",
    "AT_FORALL_FP32_SET_OPT_DTYPE": "set_dtype",
    "AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE": "cast",
}
"""Lists of the header that mean fp32. The last holds ``norm`` overloads, whose result in fp32 is the same as that of a cast operand."""

EXTRA: Mapping[str, Remedy] = {"cross_entropy_loss": "cast"}
"""Not in the header: it computes its log-softmax in the format of the logits, measured at 6 times the error of fp32 logits for a vocabulary of 50257."""

SIXTEEN_BIT = frozenset({torch.bfloat16, torch.float16})

_ENTRY = re.compile(r"_\(\s*(?:ADD_NS\(\w+\)\s*,\s*\"(?P<quoted>[\w.]+)\"|(?P<name>\w+)\s*(?:,\s*(?P<overload>\w+)\s*)?\))")


def sensitive_ops(header: Path | None = None) -> dict[str, Remedy]:
    """Return the operators that ``sensitive="fp32"`` pins, from the header of the installed torch.

    Args:
        header: path of ``autocast_mode.h``; that of the installed torch when omitted.

    Returns:
        Operator, as ``name`` or ``name.overload`` without the ``aten::`` prefix, to how it is brought to fp32.

    Raises:
        BackendError: the header is missing or holds no such list.
    """
    path = Path(torch.__file__).parent / HEADER if header is None else header
    remedy = "install torch with its headers, or use a recipe with sensitive=native"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise BackendError("the fp32 list of the installed torch", found=f"{path.name} cannot be read: {error.strerror}", remedy=remedy) from error
    found: dict[str, Remedy] = {}
    for section, how in SECTIONS.items():
        body = re.search(rf"#define {section}\(_\)((?:.*\\\n)*.*)", text)
        entries = [
            match["quoted"] or ".".join(filter(None, (match["name"], match["overload"])))
            for match in _ENTRY.finditer(body[1].replace("\\\n", " ") if body else "")
        ]
        if not entries:
            raise BackendError("the fp32 list of the installed torch", found=f"{path.name} of torch {torch.__version__} has no list {section}", remedy=remedy)
        found.update(dict.fromkeys(entries, how))
    found.update(EXTRA)
    return found


def find_op(name: str) -> Any:
    """Return the overload of an operator named as in ``sensitive_ops``.

    Raises:
        BackendError: the installed torch does not have it.
    """
    base, _, overload = name.partition(".")
    try:
        return getattr(getattr(torch.ops.aten, base), overload or "default")
    except AttributeError as error:
        raise BackendError(f"operator aten::{name}", found=f"torch {torch.__version__} lists it but does not have it", remedy="reinstall torch") from error


def upcast(value: Any) -> Any:
    """Return a 16-bit floating tensor, or the tensors of a list, in fp32; anything else as it is."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in SIXTEEN_BIT else value
    if isinstance(value, (list, tuple)) and any(isinstance(item, torch.Tensor) for item in value):
        return [upcast(item) for item in value]
    return value


def cast_kernel(op: Any, excluded: Any) -> Callable[..., Any]:
    """Return a kernel that calls ``op`` on operands in fp32, with the autocast key excluded.

    Args:
        op: the operator.
        excluded: the dispatch key set of the autocast key.
    """

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return op(*[upcast(arg) for arg in args], **{name: upcast(arg) for name, arg in kwargs.items()})

    return kernel


def set_dtype_kernel(op: Any, excluded: Any) -> Callable[..., Any]:
    """Return a kernel that calls ``op`` with ``dtype=float32`` where the first operand is a 16-bit float and the caller gave no dtype.

    Args:
        op: an operator with an optional ``dtype`` argument.
        excluded: the dispatch key set of the autocast key.
    """
    position = [argument.name for argument in op._schema.arguments].index("dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        explicit = args[position] if len(args) > position else kwargs.get("dtype")
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            if explicit is None and args[0].dtype in SIXTEEN_BIT:
                return op(*args[:position], **{**kwargs, "dtype": torch.float32})
            return op(*args, **kwargs)

    return kernel


KERNELS: Mapping[Remedy, Callable[[Any, Any], Callable[..., Any]]] = {"cast": cast_kernel, "set_dtype": set_dtype_kernel}


def register(autocast_key: str, name: str, how: Remedy) -> Any:
    """Register the kernel of one operator and return the torch library that holds it; ``_destroy()`` of that removes it again.

    Where the backend has a kernel of another policy, this one takes precedence while it stands; torch warns of that once, which is meant here.

    Args:
        autocast_key: name of the backend's autocast key.
        name: operator, as in ``sensitive_ops``.
        how: how it is brought to fp32.
    """
    op = find_op(name)
    kernel = KERNELS[how](op, torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, autocast_key)))
    library: Any = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", autocast_key):
            warnings.filterwarnings("ignore", message=r"(?s).*Overriding a previously registered kernel", category=UserWarning)
        library.impl(name, kernel, autocast_key)
    return library


@dataclass
class PinRegistry:
    """The kernels that stand, by autocast key and operator, with the number of pins that want each.

    Kernels are process-wide by nature: torch has one dispatcher. So their bookkeeping is process-wide too, in ``PINS``.

    Attributes:
        counts: live pins of each operator.
        libraries: what removes each kernel.
        natives: live sessions that want the native policy, by autocast key.
    """

    counts: dict[tuple[str, str], int] = field(default_factory=dict)
    libraries: dict[tuple[str, str], Any] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)
    natives: dict[str, int] = field(default_factory=dict)

    def pins(self, autocast_key: str) -> bool:
        """Whether any operator is pinned on an autocast key."""
        return any(key == autocast_key for key, _ in self.counts)

    def acquire(self, autocast_key: str, name: str, how: Remedy) -> None:
        """Count one more pin of an operator; register its kernel for the first. ``BackendError`` while a session wants the native policy."""
        if self.natives.get(autocast_key):
            raise BackendError("sensitive=fp32", found="a live session runs with sensitive=native, and the policy is one for the process", remedy=CLOSE_FIRST)
        with self.lock:
            pin = (autocast_key, name)
            if pin not in self.counts:
                self.libraries[pin] = register(autocast_key, name, how)
            self.counts[pin] = self.counts.get(pin, 0) + 1

    def release(self, autocast_key: str, name: str) -> None:
        """Count one pin less; remove the kernel with the last, which brings the native policy back."""
        with self.lock:
            pin = (autocast_key, name)
            self.counts[pin] -= 1
            if self.counts[pin] == 0:
                del self.counts[pin]
                self.libraries.pop(pin)._destroy()


CLOSE_FIRST = "close that session first, or run this one in its own process"
PINS = PinRegistry()
"""The registry of this process."""


class PinnedPolicy:
    """Runs the sensitive operators in fp32 under a backend's autocast while it is entered. Nests, and may be entered again.

    Args:
        autocast_key: name of the backend's autocast dispatch key.
        op_policy: what the backend's own autocast does with each operator, as ``Backend.op_policy`` returns it; those it runs in fp32 are left to it.
        registry: the bookkeeping; that of this process when omitted.

    Raises:
        UnknownNameError: torch has no such autocast key.
        BackendError: the fp32 list of the installed torch cannot be read.
    """

    def __init__(self, autocast_key: str, op_policy: Mapping[str, PolicyKind], registry: PinRegistry = PINS) -> None:
        known = [key for key in dir(torch._C.DispatchKey) if key.startswith("Autocast")]
        if autocast_key not in known:
            raise UnknownNameError("autocast key", autocast_key, known)
        self.autocast_key = autocast_key
        self._ops = {name: how for name, how in sensitive_ops().items() if op_policy.get(name) != "fp32"}
        self._registry = registry
        self._entered: list[ExitStack] = []

    @property
    def pinned(self) -> tuple[str, ...]:
        """The operators that are given a kernel, sorted; the backend runs the rest of the list in fp32 by itself."""
        return tuple(sorted(self._ops))

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for name, how in self._ops.items():
                self._registry.acquire(self.autocast_key, name, how)
                stack.callback(self._registry.release, self.autocast_key, name)
            self._entered.append(stack.pop_all())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._entered.pop().close()


class NativePolicy:
    """Keeps the backend's own policy while it is entered: no other session may pin operators meanwhile.

    Args:
        autocast_key: name of the backend's autocast dispatch key.
        registry: the bookkeeping; that of this process when omitted.

    Raises:
        BackendError: a live session pins operators on the key.
    """

    def __init__(self, autocast_key: str, registry: PinRegistry = PINS) -> None:
        self.autocast_key = autocast_key
        self._registry = registry

    def __enter__(self) -> Self:
        with self._registry.lock:
            if self._registry.pins(self.autocast_key):
                found = "a live session runs with sensitive=fp32, and the policy is one for the process"
                raise BackendError("sensitive=native", found=found, remedy=CLOSE_FIRST)
            self._registry.natives[self.autocast_key] = self._registry.natives.get(self.autocast_key, 0) + 1
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._registry.lock:
            self._registry.natives[self.autocast_key] -= 1
