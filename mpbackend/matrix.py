"""Loading capability matrices and asking them questions.

A ``Matrix`` is the union of matrix files. It answers from its rows or says ``unknown``; it never fills a gap. Importing this module reads nothing:
the files that the package ships are read by ``load_matrix()``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mpbackend.capability import (
    Accumulator,
    Ambiguous,
    Arch,
    Cited,
    Collective,
    DeviceModel,
    Overflow,
    Peak,
    Row,
    Source,
    SwitchDefault,
)
from mpbackend.documents import MatrixFile, PathMeaning, decode_toml, load_dropped, load_vocabulary, read_document, shipped_files
from mpbackend.errors import DocumentError, UnknownNameError, printable


class Matrix:
    """The union of matrix files, indexed.

    Args:
        files: decoded files with the name each is reported under.

    Raises:
        DocumentError: a key, reported name, row, switch, overflow mode or collective is declared twice, a record names an architecture, device or source that
            is not declared, or a record other than a device is about what another file declares.
    """

    def __init__(self, files: Sequence[tuple[str, MatrixFile]]) -> None:
        self.files = tuple(files)
        self.archs: dict[str, Arch] = {}
        self.devices: dict[str, DeviceModel] = {}
        self.ambiguous: dict[str, Ambiguous] = {}
        self.sources: dict[tuple[str, str], Source] = {}
        self.paths: dict[str, PathMeaning] = dict(load_vocabulary().path)
        self._family: dict[str, MatrixFile] = {}
        self._file: dict[tuple[str, str], str] = {}
        self._names: dict[str, str] = {}
        self._reported: dict[str, str] = {}
        self._origin: dict[tuple[str, ...], str] = {}
        self._rows: defaultdict[str, list[Row]] = defaultdict(list)
        for name, document in files:
            self._add(name, document)

    def _add(self, name: str, document: MatrixFile) -> None:
        for path, meaning in document.path.items():
            self._declare(self.paths, path, meaning, f"{name}: path {path!r}")
        for source in document.source:
            self._declare(self.sources, (document.family, source.id), source, f"{name}: source {source.id!r}")
        for arch in document.arch:
            self._declare(self.archs, arch.key, arch, f"{name}: architecture {arch.key!r}")
            self._family[arch.key] = document
            self._file["architecture", arch.key] = name
            self._require(all(arch.name_prefixes), name, f"architecture {arch.key!r}", "an empty name prefix would match every device")
        for device in document.device:
            self._require(device.arch in self.archs, name, f"device {device.key!r}", f"architecture {device.arch!r} is not declared")
            sizes = (*device.memory_bytes, *device.bandwidth_bytes_per_s)
            self._require(all(size > 0 for size in sizes), name, f"device {device.key!r}", f"a size of {sizes} is not above 0")
            for key in (device.key, *device.aliases):
                self._declare(self._names, key.lower(), device.key, f"{name}: {'device' if key == device.key else 'alias'} {key!r}")
            for reported in device.names:
                taken_by = self._reported.setdefault(reported, device.key)
                problem = f"reported name {reported!r} is that of {taken_by!r} in {self._file.get(('device', taken_by), name)}"
                self._require(taken_by == device.key, name, f"device {device.key!r}", problem)
            self.devices[device.key] = device
            self._file["device", device.key] = name
        for ambiguous in document.ambiguous:
            self._declare(self._names, ambiguous.key.lower(), ambiguous.key, f"{name}: ambiguous key {ambiguous.key!r}")
            self.ambiguous[ambiguous.key.lower()] = ambiguous
        for row in document.row:
            label = f"row {' '.join(row.key)}"
            self._own(name, label, "architecture", row.arch, declared_here=self._family.get(row.arch) is document)
            self._require(row.path in self.paths, name, label, f"path {row.path!r} is not in the vocabulary and not declared under [path]")
            self._require(row.key not in self._origin, name, label, "the same key stands twice")
            self._origin[row.key] = document.family
            self._rows[row.arch].append(row)
        bound: tuple[SwitchDefault | Overflow | Collective, ...] = (*document.switch, *document.overflow, *document.collective)
        for record in bound:
            identity = (type(record).__name__.lower(), record.arch, *(getattr(record, field, "") for field in ("name", "op", "format")))
            everywhere = record.arch == "*" and not isinstance(record, Overflow)
            label = " ".join(filter(None, identity))
            self._require(everywhere or self._family.get(record.arch) is document, name, label, f"architecture {record.arch!r} is not declared in this file")
            self._declare(self._origin, (document.family, *identity), document.family, f"{name}: {label}")
        own_devices = {device.key for device in document.device}
        for peak in document.peak:
            label = f"peak {peak.device} {peak.format}"
            self._own(name, label, "device", peak.device, declared_here=peak.device in own_devices)
            self._require(0 < peak.tera_per_s < float("inf"), name, label, f"tera_per_s = {peak.tera_per_s} is no rate")
        for claim in cited_records(document):
            for source_id in (*claim.source, *(conflict.source for conflict in claim.conflict)):
                self._require((document.family, source_id) in self.sources, name, type(claim).__name__.lower(), f"source {source_id!r} is not declared")
            self._require(bool(claim.source), name, type(claim).__name__.lower(), "it cites no source")

    def _own(self, file: str, record: str, kind: str, key: str, *, declared_here: bool) -> None:
        """Refuse a record about something that its file does not declare: another file's facts would change without its reader knowing."""
        declared_in = self._file.get((kind, key))
        problem = (
            f"{kind} {key!r} is not declared" if declared_in is None else f"{kind} {key!r} is declared in {declared_in}, and only that file speaks about it"
        )
        self._require(declared_here, file, record, problem)

    @staticmethod
    def _declare(table: dict[Any, Any], key: object, value: object, what: str) -> None:
        if key in table:
            raise DocumentError(f"{what} is declared twice", remedy="give one of them another key")
        table[key] = value

    @staticmethod
    def _require(condition: bool, file: str, record: str, problem: str) -> None:
        if not condition:
            raise DocumentError(f"{file}: {record}", found=problem)

    def device(self, key: str) -> DeviceModel:
        """Return the device with this key or alias.

        Raises:
            UnknownNameError: no such device; an ambiguous key is refused with what to write instead.
        """
        lowered = key.lower()
        if lowered in self.ambiguous:
            ambiguous = self.ambiguous[lowered]
            error = UnknownNameError("device", key, ambiguous.candidates, remedy=ambiguous.message)
            error.args = (printable(f"device {key!r} is refused: {ambiguous.message}"),)
            raise error
        if lowered not in self._names:
            raise UnknownNameError("device", key, self._names.keys() - self.ambiguous.keys(), remedy="`mpbackend devices --known` lists them")
        return self.devices[self._names[lowered]]

    def arch(self, key: str) -> Arch:
        """Return the architecture with this key; ``UnknownNameError`` if there is none."""
        try:
            return self.archs[key]
        except KeyError:
            raise UnknownNameError("architecture", key, self.archs) from None

    def family_of(self, arch: str) -> str:
        """Return the family of the file that declares ``arch``."""
        return self._family[arch].family

    def identify(self, name: str, identifier: str = "") -> tuple[DeviceModel | None, Arch | None]:
        """Find a device by the exact name its runtime reports, else the architecture by its exact identifier or the vendor's own prefix rule.

        Args:
            name: reported name, for example ``NVIDIA H100 80GB HBM3``.
            identifier: exact capability string, for example ``9.0``.

        Returns:
            (model, architecture); (None, architecture) for an unknown name on a known architecture; (None, None) when nothing matches exactly.
        """
        for model in self.devices.values():
            if name in model.names:
                return model, self.archs[model.arch]
        for arch in self.archs.values():
            if (identifier and identifier in arch.identifiers) or any(name.startswith(prefix) for prefix in arch.name_prefixes):
                return None, arch
        return None, None

    def rows(self, arch: str | None = None, **fields: str) -> list[Row]:
        """Return the rows whose fields equal the given values, in file order.

        Args:
            arch: key of the architecture; all of them when omitted.
            fields: ``op``, ``a``, ``b``, ``scaling``, ``path``, ``accumulate``, ``level``.
        """
        pool: Iterable[Row] = self._rows.get(arch, []) if arch is not None else (row for rows in self._rows.values() for row in rows)
        return [row for row in pool if all(getattr(row, name) == value for name, value in fields.items())]

    def peaks(self, device: str) -> list[Peak]:
        """Return every peak rate stated for a device key."""
        return [peak for _, document in self.files for peak in document.peak if peak.device == device]

    def switches(self, arch: str) -> list[SwitchDefault]:
        """Return the switch defaults of an architecture, those of its whole file included."""
        return [switch for switch in self._family[arch].switch if switch.arch in (arch, "*")]

    def overflow(self, arch: str) -> Overflow | None:
        """Return the overflow mode of an architecture, or None when no record says."""
        return next((record for record in self._family[arch].overflow if record.arch == arch), None)

    def collectives(self, arch: str) -> list[Collective]:
        """Return what the vendor's collectives take on an architecture."""
        return [record for record in self._family[arch].collective if record.arch in (arch, "*")]

    def citation(self, record: Cited, arch: str) -> str:
        """Return ``title, location`` of the record's first source, for a reason or a footnote."""
        family = self._origin[record.key] if isinstance(record, Row) else self.family_of(arch)
        source = self.sources[(family, record.source[0])]
        more = f" (+{len(record.source) - 1} more)" if len(record.source) > 1 else ""
        return f"{source.title}, {source.location}{more}"

    def summary(self) -> dict[str, Any]:
        """Return counts: rows, other records, devices, sources, facts used and dropped, rows by level and by evidence kind."""
        rows = self.rows()
        used = {fact for _, document in self.files for record in cited_records(document) for fact in record.facts}
        collected = {name: count for _, document in self.files for name, count in document.facts.items()}
        dropped = [entry.fact for entry in load_dropped().dropped if entry.fact.split("/")[0] in collected]
        return {
            "rows": len(rows),
            "records": sum(1 for _, document in self.files for _ in cited_records(document)),
            "architectures": len(self.archs),
            "devices": len(self.devices),
            "sources": len(self.sources),
            "facts": sum(collected.values()),
            "facts_used": len(used),
            "facts_dropped": len(dropped),
            "levels": count_by(row.level for row in rows),
            "evidence": count_by(row.evidence for row in rows),
            "conflicts": sum(1 for row in rows if row.conflict),
        }


def cited_records(document: MatrixFile) -> Iterator[Cited]:
    """Yield every record of a file that makes a claim."""
    for table in (document.arch, document.device, document.row, document.peak, document.switch, document.overflow, document.collective):
        yield from table


def count_by(values: Iterable[str]) -> dict[str, int]:
    """Count equal values; keys sorted."""
    counts: dict[str, int] = {}
    for value in values:
        counts[value] = counts.get(value, 0) + 1
    return dict(sorted(counts.items()))


def load_matrix(paths: Iterable[Path] | None = None) -> Matrix:
    """Load matrix files into one ``Matrix``.

    Args:
        paths: files to load; the shipped ones when omitted.

    Raises:
        DocumentError: a file is malformed or contradicts another's declarations.
    """
    chosen = shipped_files() if paths is None else [Path(path) for path in paths]
    return Matrix([(path.name, decode_toml(read_document(path), MatrixFile, str(path))) for path in chosen])


def effective_fraction_bits(accumulator: Accumulator | None) -> int | None:
    """Return the fraction bits an accumulator keeps within a promotion window, or None when unknown."""
    bits = accumulator.fraction_bits if accumulator is not None else "unknown"
    return bits if isinstance(bits, int) else None
