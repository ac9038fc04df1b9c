"""What somebody states about a run that no session made: recipe, device, and the settings that a comparison asks for. Nothing here is observed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from mpbackend.device import Device, Kind
from mpbackend.errors import DocumentError, printable
from mpbackend.observe.record import RecipeName
from mpbackend.plugins import Plugins
from mpbackend.recipe import canonical_text, parse_recipe, recipe_hash

UNKNOWN = "unknown"
STATED = "stated: "
"""Begins a fingerprint that was stated. It says the same as another one that was stated, and nothing beside one that was computed."""

FINGERPRINTS: tuple[str, ...] = ("data", "weights")
LARGEST = 2**63 - 1


class Stated(NamedTuple):
    """Settings as a record holds them.

    Attributes:
        settings: by the names that a session uses.
        fingerprints: of data and weights.
        samples: of a step on one rank, 0 where it was not stated.
    """

    settings: dict[str, str]
    fingerprints: dict[str, str]
    samples: int


def stated_recipe(text: str, plugins: Plugins) -> RecipeName:
    """Return a recipe that a run is said to have trained under.

    Raises:
        UnknownNameError: no such preset, role or format.
        PlanError: the text is no recipe.
    """
    parsed = parse_recipe(text, plugins.presets)
    return RecipeName(text=canonical_text(parsed, plugins.presets), hash=recipe_hash(parsed, plugins.presets), granted=UNKNOWN)


def stated_device(key: str, kind: Kind, plugins: Plugins) -> Device:
    """Return a device that a run is said to have used; an empty key is one that is not known.

    Raises:
        UnknownNameError: no matrix has the key.
    """
    if not key:
        return Device(key=UNKNOWN, arch=UNKNOWN, name=UNKNOWN, kind=kind)
    model = plugins.matrix().device(key)
    return Device(key=model.key, arch=model.arch, name=model.name, kind=kind)


def parse_settings(given: Mapping[str, object]) -> Stated:
    """Return settings as a record holds them.

    Args:
        given: ``ranks``, ``samples`` (of a step on one rank), ``micro_batches``: whole numbers from 1. ``clip_norm``, ``clip_value``: a positive limit, or
            ``none``. ``average``: whether the losses of micro-batches are averaged rather than added. ``optimizers``, ``schedulers``: names of the classes.
            ``data``, ``weights``: what identifies the batches in their order and the weights at the start, such as the hash of a file.

    Raises:
        DocumentError: no such setting, or a value that it does not have.
    """
    settings: dict[str, str] = {}
    for name, value in given.items():
        if name not in PARSERS:
            raise DocumentError(f"setting {name}", found="no setting of a run has that name", allowed=sorted(PARSERS))
        settings[name] = PARSERS[name](name, str(value).strip())
    named = [name for name in FINGERPRINTS if name in settings]
    fingerprints = {name: STATED + settings.pop(name) for name in named}
    return Stated(settings, fingerprints, int(settings.pop("samples", "0")))


def count(name: str, text: str) -> str:
    """Return a whole number from 1."""
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:20]) <= LARGEST):
        raise refused(name, text, "a whole number from 1")
    return str(int(text))


def limit(name: str, text: str) -> str:
    """Return a positive number, or ``none``."""
    try:
        value = None if text.lower() == "none" else float(text)
    except ValueError:
        value = math.nan
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise refused(name, text, "a positive number, or none")
    return "none" if value is None else f"{value:g}"


def flag(name: str, text: str) -> str:
    """Return ``true`` or ``false``."""
    if text.lower() not in ("true", "false"):
        raise refused(name, text, "true or false")
    return text.lower()


def words(name: str, text: str) -> str:
    """Return a text that is not empty."""
    if not text or len(text) > 200 or not text.isprintable():
        raise refused(name, text, "1 to 200 printable characters")
    return text


def refused(name: str, text: str, allowed: str) -> DocumentError:
    """Return the error for a value that a setting does not have."""
    return DocumentError(f"setting {name}={printable(text[:40])}", found="a value that it does not have", remedy=f"give {allowed}")


PARSERS: Mapping[str, Callable[[str, str], str]] = {
    "ranks": count,
    "samples": count,
    "micro_batches": count,
    "clip_norm": limit,
    "clip_value": limit,
    "average": flag,
    "optimizers": words,
    "schedulers": words,
    "data": words,
    "weights": words,
}
