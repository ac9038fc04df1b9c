"""Selecting a device: from ``auto`` or ``name[:address]`` to a backend and one of its devices."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from mpbackend.backend import Backend
from mpbackend.device import Device, device_from_matrix
from mpbackend.errors import BackendError
from mpbackend.granting import OnUnsupported
from mpbackend.inquiry import ask_address, ask_implementations, ask_notes
from mpbackend.matrix import Matrix
from mpbackend.planning import Plan, plan_recipe
from mpbackend.plugins import AUTO, Plugins, load_plugins
from mpbackend.recipe import Recipe, parse_recipe

VARIABLE = "MPBACKEND"
LOCAL_RANK = "LOCAL_RANK"
LONGEST_RANK = 9
"""Digits of a rank: more than any machine has processes, and few enough for every integer type."""


class Selection(NamedTuple):
    """A backend and the device of it that was chosen."""

    backend: Backend
    device: Device


def select_device(spec: str, plugins: Plugins, environ: Mapping[str, str] | None = None) -> Selection:
    """Resolve a spec.

    Args:
        spec: ``auto``, or a backend's name or device type, with ``:`` and digits or a device key after it. ``auto`` takes the value of the environment
            variable ``MPBACKEND`` when that is set, else the best usable device: hardware other than the host first, then the host.
        plugins: the loaded plugins.
        environ: environment; the process's own when omitted.

    Returns:
        The backend and the device. ``LOCAL_RANK`` picks the index when the spec has no address.

    Raises:
        UnknownNameError: no such backend or device.
        BackendError: the device is not usable, or ``auto`` found none; gives cause and remedy.
    """
    environment = os.environ if environ is None else environ
    if spec == AUTO:
        spec = environment.get(VARIABLE, "").strip() or AUTO
    if spec == AUTO:
        return pick(plugins, local_rank(environment))
    name, colon, address = spec.partition(":")
    backend = plugins.backend(name)
    if colon:
        device = ask_address(backend, address)
    else:
        found = plugins.devices_of(backend)
        usable = [device for device in found if device.usable] or list(found)
        if not usable:
            problem = ": ".join([f"backend {name!r} found no device here", *plugins.causes(backend.name)[:1]])
            raise BackendError(f"device {spec!r}", found=problem, remedy="`mpbackend doctor` gives the cause")
        device = of_rank(usable, local_rank(environment))
    if not device.usable:
        raise BackendError(f"device {spec!r}", found=f"not usable: {device.cause}", remedy=device.remedy)
    return Selection(backend, device)


def local_rank(environ: Mapping[str, str]) -> int:
    """Return ``LOCAL_RANK`` of a launcher, 0 when it is not set.

    Raises:
        BackendError: the variable is not a whole number of at most 9 digits.
    """
    text = environ.get(LOCAL_RANK, "0")
    if not text.isdecimal() or len(text) > LONGEST_RANK:
        shown = text if len(text) <= 20 else f"{text[:17]}..."
        found = f"not a whole number from 0 to {'9' * LONGEST_RANK}"
        raise BackendError(f"{LOCAL_RANK}={shown!r}", found=found, remedy="unset it, or start with a launcher that sets it")
    return int(text)


def of_rank(devices: Sequence[Device], rank: int) -> Device:
    """Return the device of a rank. Ranks share the host; an accelerator belongs to one.

    Raises:
        BackendError: there are fewer accelerators than ranks.
    """
    if rank < len(devices):
        return devices[rank]
    if devices[0].type == "cpu":
        return devices[0]
    found = f"backend {devices[0].backend!r} has {len(devices)} usable devices"
    raise BackendError(f"{LOCAL_RANK}={rank}", found=found, remedy="start at most that many processes on this machine, or name the device in the spec")


def pick(plugins: Plugins, rank: int) -> Selection:
    """Choose for ``auto``: hardware only, accelerators before the host, the launcher's index among equals."""
    found = plugins.devices()
    devices = [device for device in found if device.usable and device.kind == "hardware"]
    if not devices:
        causes = [f"{device.key}: {device.cause or 'no hardware'}" for device in found]
        causes += [f"{name}: {cause}" for name in plugins.backends for cause in plugins.causes(name)]
        raise BackendError("device 'auto'", found="; ".join(causes) or "no plugin found a device", remedy="`mpbackend doctor` says what to install")
    accelerators = [device for device in devices if device.type != "cpu"]
    pool = accelerators or devices
    device = of_rank([device for device in pool if device.backend == pool[0].backend], rank)
    return Selection(plugins.backends[device.backend], device)


def plan(
    recipe: Recipe | str,
    device: Device | str,
    *,
    plugins: Plugins | None = None,
    on_unsupported: OnUnsupported = "error",
    strict: bool = False,
    micro_batches: int = 1,
) -> Plan:
    """Plan a recipe onto a device of this machine, or onto any device that a matrix declares; imports no torch.

    Args:
        recipe: a recipe or its text form.
        device: a device, or a device key such as ``h100``.
        plugins: the loaded plugins; those installed when omitted.
        on_unsupported: see ``mpbackend.planning.plan_recipe``.
        strict: refuse what no source speaks about.
        micro_batches: micro-batches a step.

    Raises:
        UnknownNameError: unknown preset, role, format or device.
        PlanError: a format is refused.
    """
    known = load_plugins() if plugins is None else plugins
    matrix = known.matrix()
    asked = parse_recipe(recipe, known.presets) if isinstance(recipe, str) else recipe
    target = find_device(device, known, matrix) if isinstance(device, str) else device
    backend = known.backends.get(target.backend)
    implementations = None if backend is None else ask_implementations(backend, target)
    made = plan_recipe(asked, target, matrix, implementations, on_unsupported=on_unsupported, strict=strict, micro_batches=micro_batches, presets=known.presets)
    return made if backend is None else msgspec.structs.replace(made, notes=ask_notes(backend, made))


def find_device(key: str, plugins: Plugins, matrix: Matrix) -> Device:
    """Return this machine's device with a key, else the one that a matrix declares.

    Raises:
        UnknownNameError: neither knows the key.
    """
    model = device_from_matrix(matrix, key)
    for device in plugins.devices():
        if device.key == model.key and device.usable:
            return device
    return model
