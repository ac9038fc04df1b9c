"""Scalars in TensorBoard event files, read without TensorBoard: TFRecord framing around protocol buffers.

Framing (TensorFlow, ``core/lib/io/record_writer.h``): length (uint64), masked CRC of the length (uint32), data, masked CRC of the data, all little-endian. The
CRC is CRC-32C (RFC 3720, appendix B.4), rotated right by 15 bits, plus 0xa282ead8. Fields: TensorFlow's ``event.proto``, ``summary.proto``, ``tensor.proto``.
Nothing of a file is executed, and no length in it is believed before its CRC was checked and the file is long enough.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from mpbackend.errors import DocumentError

FILE_PATTERN = "*tfevents*"
VERSION = b"brain.Event:"
MASK_DELTA = 0xA282EAD8
POLYNOMIAL = 0x82F63B78
"""Castagnoli's polynomial, bits reversed."""

HEADER = struct.Struct("<QI")
VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
LONGEST_VARINT = 10
FLOAT, DOUBLE = 1, 2
"""Values of ``DataType`` in ``types.proto``."""


class Scalar(NamedTuple):
    """A number in an event file: its step, its tag and its value."""

    step: int
    tag: str
    value: float


def crc_table() -> tuple[int, ...]:
    """Return the CRC-32C of every byte."""
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (POLYNOMIAL if crc & 1 else 0)
        table.append(crc)
    return tuple(table)


TABLE = crc_table()


def masked_crc(data: bytes) -> int:
    """Return the masked CRC-32C of data."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + MASK_DELTA) & 0xFFFFFFFF


def read_scalars(path: Path) -> Iterator[Scalar]:
    """Yield the scalars of an event file, or of every event file of a folder by name, in the order in which they were written.

    Args:
        path: file or folder. A last event that is cut short is left out: it was being written.

    Raises:
        DocumentError: there is no event file, it cannot be read, or it is malformed.
    """
    files = sorted(item for item in path.glob(FILE_PATTERN) if item.is_file()) if path.is_dir() else [path]
    if not files:
        raise DocumentError(f"event files in {path}", found=f"no file named {FILE_PATTERN}", remedy="name the folder that TensorBoard would show")
    for file in files:
        try:
            if not file.is_file():
                raise DocumentError(f"cannot read {file}", found="no such file" if not file.exists() else "it is no regular file")
            with file.open("rb") as stream:
                yield from stream_scalars(stream, file.stat().st_size)
        except OSError as error:
            raise DocumentError(f"cannot read {file}", found=error.strerror or str(error)) from error
        except ValueError as error:
            raise DocumentError(f"{file} is no event file of TensorBoard", found=str(error)) from error


def stream_scalars(stream: BinaryIO, size: int) -> Iterator[Scalar]:
    """Yield the scalars of an open file of ``size`` bytes."""
    for number, (data, crc) in enumerate(frames(stream, size), 1):
        try:
            version, scalars = parse_event(data)
        except (ValueError, struct.error) as error:
            raise ValueError(f"event {number}: {error}") from error
        if number == 1 and not version.startswith(VERSION):
            raise ValueError("event 1 does not name a version")
        # The CRC of what holds no scalar, an image for one, is not worth the time.
        if (scalars or number == 1) and masked_crc(data) != crc:
            raise ValueError(f"event {number}: wrong CRC")
        yield from scalars


def frames(stream: BinaryIO, size: int) -> Iterator[tuple[bytes, int]]:
    """Yield the data of every whole record with its masked CRC."""
    left = size
    while len(header := stream.read(HEADER.size)) == HEADER.size:
        length, crc = HEADER.unpack(header)
        if masked_crc(header[:8]) != crc:
            raise ValueError("wrong CRC of a length")
        left -= HEADER.size
        if length + 4 > left:
            return
        data, tail = stream.read(length), stream.read(4)
        if len(data) + len(tail) < length + 4:
            return
        left -= length + 4
        yield data, int.from_bytes(tail, "little")


def parse_event(data: bytes) -> tuple[bytes, list[Scalar]]:
    """Return the version that an event names, empty when it names none, and its scalars."""
    step, version, summaries = 0, b"", []
    for number, kind, value in fields(data):
        if (number, kind) == (2, VARINT) and isinstance(value, int):
            step = value - 2**64 if value >= 2**63 else value
        elif (number, kind) == (3, LENGTH) and isinstance(value, bytes):
            version = value
        elif (number, kind) == (5, LENGTH) and isinstance(value, bytes):
            summaries.append(value)
    found = [
        parse_value(value) for summary in summaries for number, kind, value in fields(summary) if (number, kind) == (1, LENGTH) and isinstance(value, bytes)
    ]
    return version, [Scalar(step, tag, value) for tag, value in found if value is not None]


def parse_value(data: bytes) -> tuple[str, float | None]:
    """Return tag and value of a summary; None for what is no scalar."""
    tag, number = "", None
    for field, kind, value in fields(data):
        if isinstance(value, bytes):
            if (field, kind) == (1, LENGTH):
                tag = value.decode()
            elif (field, kind) == (2, FIXED32):
                number = unpack("<f", value)
            elif (field, kind) == (8, LENGTH):
                number = parse_tensor(value)
    return tag, number


def parse_tensor(data: bytes) -> float | None:
    """Return the only element of a float or double tensor; None for another tensor."""
    dtype, content, values = 0, b"", []
    for field, kind, value in fields(data):
        if (field, kind) == (1, VARINT) and isinstance(value, int):
            dtype = value
        elif isinstance(value, bytes):
            if (field, kind) == (4, LENGTH):
                content = value
            elif field == 5:
                values.append(("<f", value))
            elif field == 6:
                values.append(("<d", value))
    form = {FLOAT: "<f", DOUBLE: "<d"}.get(dtype)
    if form is None:
        return None
    if content:
        return unpack(form, content) if len(content) == struct.calcsize(form) else None
    return unpack(form, values[0][1]) if len(values) == 1 and values[0][0] == form and len(values[0][1]) == struct.calcsize(form) else None


def unpack(form: str, data: bytes) -> float:
    """Return a number."""
    number: float = struct.unpack(form, data)[0]
    return number


def fields(data: bytes) -> Iterator[tuple[int, int, int | bytes]]:
    """Yield number, wire type and value of every field of a message (Protocol Buffers, encoding)."""
    place = 0
    while place < len(data):
        key, place = varint(data, place)
        kind = key & 7
        if kind == VARINT:
            value, place = varint(data, place)
            yield key >> 3, kind, value
            continue
        if kind == LENGTH:
            size, place = varint(data, place)
        elif kind in (FIXED32, FIXED64):
            size = 4 if kind == FIXED32 else 8
        else:
            raise ValueError(f"wire type {kind}")
        if size > len(data) - place:
            raise ValueError("a field is longer than its message")
        yield key >> 3, kind, data[place : place + size]
        place += size


def varint(data: bytes, place: int) -> tuple[int, int]:
    """Return a variable-length integer and the place after it."""
    value = 0
    for index in range(LONGEST_VARINT):
        if place + index >= len(data):
            raise ValueError("an integer is cut short")
        byte = data[place + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, place + index + 1
    raise ValueError("an integer of more than ten bytes")
