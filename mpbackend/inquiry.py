"""Asking a backend. A stranger's method may raise, exit, hang or answer with something else; each becomes a cause, and nothing is lost that was answered."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import msgspec

from mpbackend.backend import Backend, Implementation
from mpbackend.device import Device
from mpbackend.errors import BackendError, MpbackendError, describe

if TYPE_CHECKING:
    from mpbackend.planning import Plan

TIME_LIMIT = 20.0
"""Seconds that a backend has to list its devices; the probes that it runs in a subprocess have lower limits of their own."""

REMEDY = "update or uninstall the plugin"


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a backend answered to ``discover``.

    Attributes:
        devices: its devices, in its order.
        causes: what went wrong, one sentence each.
        hung: whether it was given up; it may still be running, in a thread that ends with the process.
    """

    devices: tuple[Device, ...] = ()
    causes: tuple[str, ...] = ()
    hung: bool = False


def ask_devices(backend: Backend, limit: float | None = None) -> Answer:
    """Return what ``discover`` yields, and what went wrong with it; raises nothing.

    Args:
        backend: the backend.
        limit: seconds to wait for it; ``TIME_LIMIT`` when omitted.
    """
    seconds = TIME_LIMIT if limit is None else limit
    devices: list[Device] = []
    causes: list[str] = []

    def ask() -> None:
        try:
            for device in backend.discover():
                fault = device_fault(backend, device)
                if fault:
                    causes.append(f"discover() {fault}")
                else:
                    devices.append(device)
        except BaseException as error:  # noqa: BLE001 - a thread of its own: whatever is raised, nobody else could tell of it
            causes.append(f"discover() raised {describe(error)}")

    thread = threading.Thread(target=ask, name=f"discover of {backend.name}", daemon=True)
    thread.start()
    thread.join(seconds)
    hung = thread.is_alive()
    found = tuple(dict.fromkeys(causes))
    return Answer(devices=tuple(devices), causes=(*found, f"discover() gave no answer within {seconds:g} s") if hung else found, hung=hung)


def device_fault(backend: Backend, device: Any) -> str:
    """Return what is wrong with what a backend calls its device; empty when nothing is."""
    if not isinstance(device, Device):
        return f"returned a {type(device).__name__}, which is no Device"
    try:
        problem = "" if msgspec.convert(msgspec.to_builtins(device), Device, strict=True) == device else "a field has another type"
    except (msgspec.ValidationError, TypeError) as error:
        problem = str(error)
    if problem:
        return f"returned a device that is not valid: {problem}"
    return "" if device.backend == backend.name else f"returned a device of backend {device.backend!r}"


def ask_address(backend: Backend, text: str) -> Device:
    """Return the device that the part of a spec after the colon names.

    Raises:
        UnknownNameError: the backend has no such device.
        BackendError: the backend raised something else, or answered with something else.
    """
    asked = f"device '{backend.name}:{text}'"
    try:
        device = backend.address(text)
    except MpbackendError:
        raise
    except (Exception, SystemExit) as error:
        raise BackendError(asked, found=f"address() raised {describe(error)}", remedy=REMEDY) from error
    fault = device_fault(backend, device)
    if fault:
        raise BackendError(asked, found=f"address() {fault}", remedy=REMEDY)
    return device


def ask_implementations(backend: Backend, device: Device) -> list[Implementation]:
    """Return what a backend can run on a device.

    Raises:
        BackendError: the backend raised, or answered with something else.
    """
    asked = f"what backend {backend.name!r} runs on {device.key}"
    try:
        found = list(backend.implements(device))
    except (Exception, SystemExit) as error:
        raise BackendError(asked, found=f"implements() raised {describe(error)}", remedy=REMEDY) from error
    for item in found:
        if not isinstance(item, Implementation):
            raise BackendError(asked, found=f"implements() returned a {type(item).__name__}, which is no Implementation", remedy=REMEDY)
    return found


def ask_notes(backend: Backend, plan: Plan) -> tuple[str, ...]:
    """Return what a backend says about a plan besides its decisions; nothing where it has no ``notes``.

    Raises:
        BackendError: the backend raised, or answered with something else.
    """
    notes = getattr(backend, "notes", None)
    if notes is None:
        return ()
    asked = f"what backend {backend.name!r} notes about {plan.granted} on {plan.device.key}"
    try:
        found = tuple(notes(plan))
    except (Exception, SystemExit) as error:
        raise BackendError(asked, found=f"notes() raised {describe(error)}", remedy=REMEDY) from error
    strange = next((item for item in found if not isinstance(item, str)), None)
    if strange is not None:
        raise BackendError(asked, found=f"notes() returned a {type(strange).__name__}, which is no text", remedy=REMEDY)
    return found
