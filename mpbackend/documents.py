"""The documents that matrices are read from: their records, and strict decoding.

Importing this module reads nothing.
"""

from __future__ import annotations

import functools
import importlib.resources
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
import tomli

from mpbackend.capability import Ambiguous, Arch, Collective, DeviceModel, Layer, Overflow, Peak, Record, Row, Source, SwitchDefault
from mpbackend.errors import DocumentError

PACKAGE = "mpbackend.matrices"
NOT_MATRICES = ("vocabulary.toml", "dropped.toml")
TableT = TypeVar("TableT", bound=Record)


class PathMeaning(Record, frozen=True, kw_only=True):
    """A path of the vocabulary: which layer it is of, and what it is."""

    layer: Layer
    meaning: str


class MatrixFile(Record, frozen=True, kw_only=True):
    """One matrix file, as decoded from TOML. See ``matrices/README.md`` for the rules its content obeys.

    Attributes:
        schema: version of this layout, 1.
        family: name of the file's vendor or platform, for listings.
        facts: name of the fact collection and how many facts it holds.
        path: paths of this file's own, in the form of the vocabulary's.
        source: what the records cite.
        arch: architectures.
        device: devices; each inherits the rows of its architecture.
        ambiguous: keys that would be a guess.
        row: capability rows.
        peak: peak rates.
        switch: global precision switches with their defaults.
        overflow: overflow modes.
        collective: what collectives reduce.
    """

    schema: Literal[1]
    family: str
    facts: dict[str, int] = msgspec.field(default_factory=dict)
    path: dict[str, PathMeaning] = msgspec.field(default_factory=dict)
    source: tuple[Source, ...] = ()
    arch: tuple[Arch, ...] = ()
    device: tuple[DeviceModel, ...] = ()
    ambiguous: tuple[Ambiguous, ...] = ()
    row: tuple[Row, ...] = ()
    peak: tuple[Peak, ...] = ()
    switch: tuple[SwitchDefault, ...] = ()
    overflow: tuple[Overflow, ...] = ()
    collective: tuple[Collective, ...] = ()


class Vocabulary(Record, frozen=True, kw_only=True):
    """The names that rows may use, each with one line of meaning."""

    schema: Literal[1]
    op: dict[str, str]
    scaling: dict[str, str]
    path: dict[str, PathMeaning]


class Dropped(Record, frozen=True, kw_only=True):
    """A collected fact that no record was made from, with the reason."""

    fact: str
    reason: str


class DroppedFile(Record, frozen=True, kw_only=True):
    """The file of dropped facts."""

    schema: Literal[1]
    dropped: tuple[Dropped, ...] = ()


def decode_toml(text: bytes, kind: type[TableT], where: str) -> TableT:
    """Decode a TOML document strictly into ``kind``.

    Raises:
        DocumentError: not UTF-8, not TOML, a wrong type, a missing or an unknown field; names the document and the field.
    """
    try:
        return msgspec.convert(tomli.loads(text.decode("utf-8")), type=kind, strict=True)
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise DocumentError(f"cannot read {where}", found=str(error), remedy="docs/reference/matrix-schema.md describes the fields") from error


def read_document(path: Path) -> bytes:
    """Return the bytes of ``path``.

    Raises:
        DocumentError: the file cannot be read.
    """
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise DocumentError(f"cannot read {path}", found=(error.strerror if isinstance(error, OSError) else "") or str(error)) from error


def shipped_files() -> list[Path]:
    """Return the matrix files of this distribution, sorted by name."""
    folder = importlib.resources.files(PACKAGE)
    return sorted(Path(str(item)) for item in folder.iterdir() if item.name.endswith(".toml") and item.name not in NOT_MATRICES)


@functools.cache
def load_vocabulary() -> Vocabulary:
    """Return the names that rows may use."""
    path = Path(str(importlib.resources.files(PACKAGE))) / "vocabulary.toml"
    return decode_toml(read_document(path), Vocabulary, path.name)


def load_dropped() -> DroppedFile:
    """Return the facts that no record was made from, with reasons."""
    path = Path(str(importlib.resources.files(PACKAGE))) / "dropped.toml"
    return decode_toml(read_document(path), DroppedFile, path.name)
