"""Devices for people: those of this machine, those that the matrices declare, and what is installed around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from mpbackend.capability import DeviceModel, Peak
from mpbackend.device import Device
from mpbackend.matrix import Matrix
from mpbackend.plugins import Unavailable
from mpbackend.report.view import Block, Column, Facts, Listing, Report, Table, bytes_text


def memory_text(capacities: Sequence[int]) -> str:
    """Return the capacities of a device's variants; ``unknown`` without one."""
    return ", ".join(bytes_text(count) for count in capacities) or "unknown"


def dense_peaks(matrix: Matrix, device: str) -> list[Peak]:
    """Return the peaks of a device without structured sparsity."""
    return [peak for peak in matrix.peaks(device) if peak.sparsity == "dense"]


def known_document(matrix: Matrix) -> list[dict[str, Any]]:
    """Return every declared device as plain data, with its family and peaks."""
    return [
        {
            "key": model.key,
            "name": model.name,
            "family": matrix.family_of(model.arch),
            "arch": model.arch,
            "aliases": list(model.aliases),
            "names": list(model.names),
            "memory_bytes": list(model.memory_bytes),
            "bandwidth_bytes_per_s": list(model.bandwidth_bytes_per_s),
            "rows": len(matrix.rows(model.arch)),
            "peaks": [msgspec.to_builtins(peak) for peak in matrix.peaks(model.key)],
        }
        for model in matrix.devices.values()
    ]


def known_report(matrix: Matrix) -> Report:
    """Return every declared device as a table for each family, and the keys that are refused."""
    families: dict[str, list[DeviceModel]] = {}
    for model in matrix.devices.values():
        families.setdefault(matrix.family_of(model.arch), []).append(model)
    columns = (Column("key", keep=True), Column("architecture"), Column("name", wide=True), Column("memory"), Column("dense peaks known"))
    blocks: list[Block] = [
        Table(family, columns, [(m.key, m.arch, m.name, memory_text(m.memory_bytes), peaks_text(matrix, m.key)) for m in models])
        for family, models in families.items()
    ]
    aliases = [f"{alias} means {model.key}" for model in matrix.devices.values() for alias in model.aliases]
    blocks.append(Listing("Aliases", aliases))
    blocks.append(Listing("Refused keys", [f"{entry.key}: {entry.message}" for entry in matrix.ambiguous.values()]))
    return Report("Known devices", blocks)


def peaks_text(matrix: Matrix, device: str) -> str:
    """Return the formats whose dense peak is known; ``none`` where there is none."""
    return ", ".join(dict.fromkeys(peak.format for peak in dense_peaks(matrix, device))) or "none"


def found_report(devices: Sequence[Device]) -> Report:
    """Return the devices of this machine as a table, with cause and remedy where one is not usable."""
    return Report("Devices of this machine", [devices_table("", devices)] if devices else [Listing("", ("no installed plugin found a device",))])


def devices_table(title: str, devices: Sequence[Device]) -> Table:
    """Return found devices as a table."""
    columns = (Column("device", keep=True), Column("key"), Column("name"), Column("memory"), Column("state"))
    rows = []
    for device in devices:
        memory = memory_text([device.memory_bytes] if device.memory_bytes is not None else [])
        rows.append((device.address, device.key, device.name, memory, state_text(device)))
    return Table(title, columns, rows)


def state_text(device: Device) -> str:
    """Return whether a device is usable, its kind where it is not hardware, else cause and remedy."""
    kind = "" if device.kind == "hardware" else f" ({device.kind})"
    if device.usable:
        return f"usable{kind}"
    return f"not usable{kind}: " + "; ".join(part for part in (device.cause, device.remedy) if part)


def versions_text(device: Device) -> str:
    """Return the software that a device depends on, with versions."""
    return ", ".join(f"{name} {version}" for name, version in device.versions.items())


def unavailable_listing(entries: Sequence[Unavailable]) -> Listing:
    """Return what plugins offer that cannot be used, with causes and remedies."""
    return Listing("Unavailable", [unavailable_text(entry) for entry in entries])


def unavailable_text(entry: Unavailable) -> str:
    """Return one unavailable thing as a line."""
    owner = f" of {entry.distribution}" if entry.distribution else ""
    return f"{entry.name}{owner}: {entry.cause}" + (f"; {entry.remedy}" if entry.remedy else "")


def doctor_report(document: Mapping[str, Any], devices: Sequence[Device], unavailable: Sequence[Unavailable]) -> Report:
    """Return what ``doctor`` found: versions and variables, plugins, devices, and what is unavailable.

    Args:
        document: ``environment``, ``plugins`` and ``variables``, each name to text.
        devices: the devices of this machine.
        unavailable: what cannot be used.
    """
    blocks: list[Block] = [
        Facts("Environment", list(document["environment"].items())),
        Facts("Plugins", list(document["plugins"].items()) or [("none", "install one, for example: pip install mpbackend-cpu")]),
        devices_table("Devices", devices) if devices else Listing("Devices", ("no installed plugin found a device",)),
        Facts("Software of the devices", [(device.address, versions) for device in devices if (versions := versions_text(device))]),
        unavailable_listing(unavailable),
        Facts("Variables", list(document["variables"].items())),
    ]
    return Report("mpbackend doctor", blocks)
