"""A device that is not there: a name that torch takes for one, under which tensors without memory run through its real dispatcher, autograd and autocast.

torch lets a process define one device type in Python, once, and that changes which accelerator it believes in; so this belongs in a process of its own.
``mpbackend.observe.audit_target`` starts it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import backend_registration

from mpbackend.backend import PolicyKind
from mpbackend.errors import BackendError
from mpbackend.train.policy import cast_kernel, find_op, sensitive_ops, set_dtype_kernel
from mpbackend.train.stochastic import StochasticRounding

SETUP_SUFFIX = "_for_python_backend"
"""End of the name of torch's function that sets up a device type in Python (torch 2.13, experimental)."""

Kernel = Callable[..., Any]


class DeviceModule:
    """What torch asks the module of a device type; one device, always there."""

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        """Return the formats of autocast."""
        return [torch.float16, torch.bfloat16]

    @staticmethod
    def is_initialized() -> bool:
        """Tell whether it may be used."""
        return True

    @staticmethod
    def is_available() -> bool:
        """Tell whether there is one."""
        return True

    @staticmethod
    def current_device() -> int:
        """Return the index of the only one."""
        return 0

    @staticmethod
    def device_count() -> int:
        """Return how many there are."""
        return 1

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        """Take a seed, which nothing here depends on."""


def define_device(name: str) -> str:
    """Define the device type of this process and return the name of its autocast key.

    Args:
        name: what ``torch.device`` is to take, an identifier.

    Raises:
        BackendError: this torch cannot, or a package has defined the one that it allows already.
    """
    setup = next((getattr(backend_registration, found) for found in dir(backend_registration) if found.endswith(SETUP_SUFFIX)), None)
    if setup is None:
        raise BackendError("audit without hardware", found=f"torch {torch.__version__} cannot define a device in Python", remedy="use torch 2.13")
    try:
        setup(rename=name, backend_module=DeviceModule())
    except RuntimeError as error:
        remedy = "audit in a process that has not loaded a package of another device"
        raise BackendError("audit without hardware", found=str(error), remedy=remedy) from error
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        keys = torch._C._dispatch_keys(torch.empty(1, device=name))
    known = torch._C.DispatchKey
    return next(key for key in dir(known) if key.startswith("Autocast") and keys.has(getattr(known, key)))


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Make tensors without memory inside; a module that is moved gets new parameters, since those of its kind cannot be swapped."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # a second to import

    class WithoutDevice(FakeTensorMode):
        """Never asks the device for the value of a constant, as torch does where it takes the device type for one that is there."""

        avoid_device_init = True

    original = torch.nn.Module._apply
    moved: dict[int, tuple[Any, torch.Tensor, torch.nn.Parameter]] = {}

    def apply(self: torch.nn.Module, fn: Any, recurse: bool = True) -> torch.nn.Module:
        if recurse:
            for child in self.children():
                child._apply(fn)
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if parameter is None:
                    continue
                kept = moved.get(id(parameter))
                if kept is None or kept[0] is not fn or kept[1] is not parameter:
                    made = fn(parameter)
                    new = parameter if made is parameter else torch.nn.Parameter(made, parameter.requires_grad)
                    kept = moved[id(parameter)] = (fn, parameter, new)
                self._parameters[name] = kept[2]
            for name, buffer in self._buffers.items():
                if buffer is not None:
                    self._buffers[name] = fn(buffer)
        return self

    generator = StochasticRounding._generator
    torch.nn.Module._apply = apply  # type: ignore[method-assign] # until the end of this context
    # A device in Python has no generators, and numbers without memory need none.
    StochasticRounding._generator = lambda self, device: None  # type: ignore[assignment,method-assign,return-value]
    try:
        with WithoutDevice(allow_fallback_kernels=False, allow_non_fake_inputs=True):
            yield
    finally:
        StochasticRounding._generator = generator  # type: ignore[method-assign]
        torch.nn.Module._apply = original  # type: ignore[method-assign]


class Casts:
    """Casts of fp32 weights, each made once under an outermost autocast, as torch's own kernels do (``cached_cast`` in aten/src/ATen/autocast_mode.cpp)."""

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def clear(self) -> None:
        """Forget all; when the outermost autocast is left."""
        self._by_id.clear()

    def lower(self, value: Any, dtype: torch.dtype, device_type: str) -> Any:
        """Return a value with its floating-point tensors on the device in a format; fp64 ones and the rest as they are."""
        if isinstance(value, torch.Tensor):
            if not eligible(value, device_type) or value.dtype is dtype:
                return value
            if value.dtype is torch.float32 and value.requires_grad and value.is_leaf and not value._is_view() and torch.is_autocast_cache_enabled():
                kept = self._by_id.get(id(value))
                if kept is None:
                    kept = self._by_id[id(value)] = (value, value.to(dtype))
                return kept[1]
            return value.to(dtype)
        if isinstance(value, (list, tuple)) and any(isinstance(item, torch.Tensor) for item in value):
            return [self.lower(item, dtype, device_type) for item in value]
        return value


def eligible(tensor: torch.Tensor, device_type: str) -> bool:
    """Tell whether autocast casts a tensor: floating point, no fp64, on its device."""
    return tensor.is_floating_point() and tensor.dtype is not torch.float64 and tensor.device.type == device_type


def tensors(values: Any) -> list[torch.Tensor]:
    """Return the tensors among arguments, those in lists included."""
    return [item for value in values for item in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(item, torch.Tensor)]


class AutocastPolicy:
    """Gives a device type an operator policy, as kernels on its autocast key.

    Args:
        device_type: the device type.
        key: name of its autocast key.
        policy: operator to policy, as ``Backend.op_policy`` returns it.
        banned: told of every call of a banned operator, which a device would refuse; it runs in fp32 here, so that the audit can go on.
    """

    def __init__(self, device_type: str, key: str, policy: Mapping[str, PolicyKind], banned: Callable[[str], None]) -> None:
        self._type = device_type
        self._key = getattr(torch._C.DispatchKey, key)
        self._excluded = torch._C.DispatchKeySet(self._key)
        self._banned = banned
        self._casts = Casts()
        self._rest: Any = torch.library.Library("_", "IMPL")
        self._rest.fallback(torch.library.fallthrough_kernel, key)
        self._ops: Any = torch.library.Library("aten", "IMPL")
        how = sensitive_ops()
        self.missing: list[str] = []
        for name, kind in policy.items():
            try:
                op = find_op(name)
            except BackendError:
                self.missing.append(name)
                continue
            self._ops.impl(name, self._kernel(name, op, kind, how.get(name, "cast")), key)
        clear = torch.clear_autocast_cache

        def clear_all() -> None:
            self._casts.clear()
            clear()

        torch.clear_autocast_cache = clear_all  # the cache of torch's own kernels is in C++; this one ends with it

    def _kernel(self, name: str, op: Any, kind: PolicyKind, how: str) -> Kernel:
        if kind == "lower":
            return self._casting(op, lambda _: torch.get_autocast_dtype(self._type))
        if kind == "promote":
            return self._casting(op, self._widest)
        if kind == "banned":
            return self._refusing(name, op)
        return set_dtype_kernel(op, self._excluded) if how == "set_dtype" else cast_kernel(op, self._excluded)

    def _widest(self, values: list[Any]) -> torch.dtype:
        wide = any(tensor.dtype is torch.float32 for tensor in tensors(values) if eligible(tensor, self._type))
        return torch.float32 if wide else torch.get_autocast_dtype(self._type)

    def _casting(self, op: Any, choose: Callable[[list[Any]], torch.dtype]) -> Kernel:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(self._excluded):
                dtype = choose([*args, *kwargs.values()])
                cast = [self._casts.lower(value, dtype, self._type) for value in args]
                return op(*cast, **{key: self._casts.lower(value, dtype, self._type) for key, value in kwargs.items()})

        return kernel

    def _refusing(self, name: str, op: Any) -> Kernel:
        run = cast_kernel(op, self._excluded)

        def kernel(*args: Any, **kwargs: Any) -> Any:
            self._banned(name)
            return run(*args, **kwargs)

        return kernel
