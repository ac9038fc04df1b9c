"""The random state of one process: of the host's generators, and of the device's own.

Everything is kept as tensors, lists and plain numbers, so that a safe reader can read it back. The host's generators (torch's, Python's and numpy's) give the
same numbers on every machine; a device's generator belongs to its device type.
"""

from __future__ import annotations

import importlib
import random
import sys
from typing import Any

import msgspec
import torch

from mpbackend.device import Device


class HostState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the host's generators.

    Attributes:
        torch: uint8 tensor.
        python: version, list of words, carried Gaussian; None leaves Python's generator as it is.
        numpy: nested dict; None leaves numpy's generator as it is.
    """

    torch: torch.Tensor
    python: tuple[int, list[int], float | None] | None = None
    numpy: dict[str, Any] | None = None


def host_state() -> HostState:
    """Return the state of the host's generators: torch's, Python's, and numpy's where its generators are loaded."""
    version, words, gauss = random.getstate()
    numpy_random = sys.modules.get("numpy.random")
    return HostState(
        torch=torch.get_rng_state(),
        python=(version, list(words), gauss),
        numpy=None if numpy_random is None else plain(numpy_random.get_state(legacy=False)),
    )


def restore_host(state: HostState) -> None:
    """Restore what ``host_state`` returned; numpy is imported when the state has a part for it, and left out where it is not installed."""
    torch.set_rng_state(state.torch)
    if state.python is not None:
        version, words, gauss = state.python
        random.setstate((version, tuple(words), gauss))
    if state.numpy is not None:
        try:
            numpy_random = importlib.import_module("numpy.random")
        except ImportError:  # nothing here can draw from a generator that is not installed
            return
        numpy_random.set_state(state.numpy)


def device_state(device: Device) -> torch.Tensor | None:
    """Return the state of the device's own generator, a uint8 tensor on the host; None for the host itself."""
    if device.type == "cpu":
        return None
    state: torch.Tensor = torch.get_device_module(device.type).get_rng_state(torch.device(device.type, device.index))
    return state.cpu()


def restore_device(device: Device, state: torch.Tensor) -> None:
    """Restore what ``device_state`` returned for a device of the same type."""
    torch.get_device_module(device.type).set_rng_state(state, torch.device(device.type, device.index))


def plain(value: Any) -> Any:
    """Return nested dicts with their arrays as lists."""
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value
