"""Checks of what a backend says about itself: its members, devices, implementations and versions."""

from __future__ import annotations

import inspect
from typing import Any

import msgspec
import torch

from mpbackend.backend import MEMBERS, Implementation
from mpbackend.capability import LEVELS
from mpbackend.conformance.answer import Answer, fault, fine, skip
from mpbackend.conformance.subject import Subject
from mpbackend.errors import UnknownNameError
from mpbackend.formats import FORMATS
from mpbackend.inquiry import ask_address, ask_devices, ask_implementations, device_fault

DATA = ("name", "device_types", "autocast_key")
"""Members that are no methods."""

HOST = "cpu"
NOWHERE = "no-such-device"


def check_members(subject: Subject) -> Answer:
    """Every member of the contract is there, methods take the arguments that it names, and torch knows the autocast key."""
    for member in MEMBERS:
        if not hasattr(subject.backend, member):
            return fault(f"it lacks {member}")
        if member not in DATA and not callable(getattr(subject.backend, member)):
            return fault(f"{member} is no method")
    for member, arguments in ARGUMENTS.items():
        try:
            inspect.signature(getattr(subject.backend, member)).bind(*arguments)
        except TypeError as error:
            return fault(f"{member}() does not take {len(arguments)} arguments: {error}")
    if not hasattr(torch._C.DispatchKey, subject.backend.autocast_key):
        return fault(f"torch has no dispatch key {subject.backend.autocast_key!r}")
    return fine(autocast_key=subject.backend.autocast_key)


ARGUMENTS: dict[str, tuple[Any, ...]] = {name: (None,) for name in MEMBERS if name not in (*DATA, "discover", "convert")} | {
    "discover": (),
    "convert": (None, None),
}
"""Arguments in the contract's number; of what kind they are plays no part in binding."""


def check_devices(subject: Subject) -> Answer:
    """What ``discover`` lists is valid, twice the same, and ``address`` finds each device by its index and by its key."""
    first, second = ask_devices(subject.backend), ask_devices(subject.backend)
    if first.causes:
        return fault(first.causes[0])
    if first.devices != second.devices:
        return fault("discover() lists other devices when it is asked again")
    for device in (*first.devices, subject.device):
        for text in (str(device.index), device.key) if device in first.devices else (device.key,):
            found = ask_address(subject.backend, text)
            if (found.key, found.arch, found.type) != (device.key, device.arch, device.type):
                return fault(f"address({text!r}) finds {found.key} of {found.arch}, not {device.key} of {device.arch}")
    return fine(devices=len(first.devices))


def check_device_tells_its_kind(subject: Subject) -> Answer:
    """The device is a valid record of this backend, its torch device exists, and one that is no hardware says so in its kind or name."""
    problem = device_fault(subject.backend, subject.device)
    if problem:
        return fault(f"the device {problem.removeprefix('returned a ')}")
    if not subject.device.usable:
        return fault(f"the device is not usable: {subject.device.cause}")
    made = torch.empty(1, device=subject.place)
    if made.device.type != subject.device.type:
        return fault(f"tensors on {subject.place} are on {made.device}")
    known = subject.device.arch in subject.matrix.archs
    if known and subject.matrix.family_of(subject.device.arch) != HOST and subject.device.type == HOST and subject.device.kind == "hardware":
        return fault(f"{subject.device.key} is computed on the host, and its kind says hardware")
    return fine(kind=subject.device.kind)


def check_unknown_address_is_refused(subject: Subject) -> Answer:
    """An address that names nothing is an ``UnknownNameError`` with the name in it, and never the nearest device."""
    for text in (NOWHERE, "", "999999"):
        try:
            device = subject.backend.address(text)
        except UnknownNameError as error:
            if text not in str(error):
                return fault(f"address({text!r}) is refused without its name: {error}")
            continue
        return fault(f"address({text!r}) finds {device.key}")
    return fine()


def check_implementations(subject: Subject) -> Answer:
    """Implementations are valid records of known formats and levels, each refusal has a reason, and asking twice gives the same."""
    rows = ask_implementations(subject.backend, subject.device)
    if rows != ask_implementations(subject.backend, subject.device):
        return fault("implements() answers something else when it is asked again")
    if not rows:
        return fault("implements() lists nothing")
    for row in rows:
        label = f"{row.op} {row.a} x {row.b}"
        try:
            msgspec.convert(msgspec.to_builtins(row), Implementation, strict=True)
        except msgspec.ValidationError as error:
            return fault(f"{label}: {error}")
        unknown = [name for name in (row.a, row.b, row.accumulate) if name not in FORMATS and name not in ("none", "unknown")]
        if unknown:
            return fault(f"{label}: {unknown[0]!r} is no format")
        if row.level is not None and row.level not in LEVELS:
            return fault(f"{label}: {row.level!r} is no level")
        if row.level is None and not row.reason:
            return fault(f"{label} cannot run, and no reason is given")
    runs = {(row.op, row.a, row.b, row.scaling) for row in rows if row.level is not None}
    refused = {(row.op, row.a, row.b, row.scaling) for row in rows if row.level is None and row.path == "none"}
    both = sorted(runs & refused)
    return fault(f"{' '.join(both[0])} runs by one row and is refused by another") if both else fine(runs=len(runs))


def check_environment(subject: Subject) -> Answer:
    """The environment names the installed torch and the plugin's own version, in text, and is the same when it is asked again."""
    found = subject.backend.environment(subject.device)
    strange = [name for name, value in found.items() if not isinstance(name, str) or not isinstance(value, str)]
    if strange:
        return fault(f"{strange[0]!r} is not text")
    if dict(subject.backend.environment(subject.device)) != dict(found):
        return fault("it is something else when it is asked again")
    if found.get("torch") != str(torch.__version__):
        return fault(f"torch is {torch.__version__}, and it says {found.get('torch', 'nothing')}")
    owner = subject.plugins.owners.get(f"backend {subject.backend.name}", "")
    name, _, version = owner.partition(" ")
    if not name:
        return skip("no installed distribution brings the backend")
    stated = {**subject.device.versions, **found}.get(name)
    if stated is None:
        return fault(f"neither it nor the device names {name}, whose code runs")
    return fine(values=len(found)) if stated == version else fault(f"{name} is {version}, and it says {stated}")


def check_collective_formats(subject: Subject) -> Answer:
    """The collective library has a name, and what it says to sum are formats that torch has tensors of, each once."""
    found = subject.backend.collectives(subject.device)
    if not found.name:
        return fault("the collective library has no name")
    wrong = [name for name in found.reduces if name not in FORMATS or FORMATS[name].carrier_dtype is None]
    if wrong:
        return fault(f"{wrong[0]!r} is no format of a tensor")
    if len(set(found.reduces)) < len(found.reduces):
        return fault("it names a format twice")
    return fine(library=found.name, sums=", ".join(found.reduces))
