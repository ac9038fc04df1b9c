"""The rules that the content of matrix files obeys beyond their schema, as functions that list what breaks them."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from mpbackend.capability import EVIDENCE_KINDS, LEVELS, Cited, Collective, Source, SwitchDefault
from mpbackend.documents import NOT_MATRICES, DroppedFile, MatrixFile, Vocabulary, decode_toml, read_document
from mpbackend.errors import UnknownNameError
from mpbackend.formats import parse_format
from mpbackend.matrix import cited_records

MATRICES = Path(__file__).resolve().parents[2] / "matrices"
NO_FORMAT = ("none", "unknown")
LONGEST_NOTE = 240

UNUSED: Mapping[str, str] = {}
"""Vocabulary names that no shipped row uses, ``table.name`` to the reason for keeping them."""


class Collection(NamedTuple):
    """What the rules look at: matrix files by name, the names rows may use and why some are not used, and the facts left out."""

    files: Sequence[tuple[str, MatrixFile]]
    vocabulary: Vocabulary
    dropped: DroppedFile
    unused: Mapping[str, str] = {}


def shipped() -> Collection:
    """Read every matrix file of the repository, without needing the package to be installed."""
    paths = sorted(path for path in MATRICES.glob("*.toml") if path.name not in NOT_MATRICES)
    return Collection(
        files=[(path.name, decode_toml(read_document(path), MatrixFile, path.name)) for path in paths],
        vocabulary=decode_toml(read_document(MATRICES / "vocabulary.toml"), Vocabulary, "vocabulary.toml"),
        dropped=decode_toml(read_document(MATRICES / "dropped.toml"), DroppedFile, "dropped.toml"),
        unused=UNUSED,
    )


def problems(collection: Collection) -> list[str]:
    """Return every broken rule of a collection, one line each; empty when it is sound."""
    return [problem for rule in RULES for problem in rule(collection)]


def label(record: Any) -> str:
    """Name a record for a message: its kind and what identifies it."""
    return f"{type(record).__name__.lower()} {' '.join(str(part) for part in identity(record))}"


def identity(record: Any) -> tuple[Any, ...]:
    """Return what a record of its kind is sorted by and unique in."""
    fields = {
        "Row": ("arch", "op", "a", "b", "scaling", "path", "accumulate"),
        "Peak": ("device", "variant", "format", "accumulate", "scaling", "unit", "sparsity", "basis"),
        "SwitchDefault": ("arch", "name", "op", "format"),
        "Overflow": ("arch",),
        "Collective": ("arch", "op", "format"),
        "Source": ("id",),
    }
    return tuple(getattr(record, name) for name in fields.get(type(record).__name__, ("key",)))


def tables(document: MatrixFile) -> Iterator[Sequence[Any]]:
    """Yield every table of a file."""
    yield from (document.source, document.arch, document.device, document.ambiguous)
    yield from (document.row, document.peak, document.switch, document.overflow, document.collective)


def repeated(values: Iterable[Any]) -> list[Any]:
    """Return the values that occur more than once."""
    return [value for value, count in Counter(values).items() if count > 1]


def every_record(collection: Collection) -> Iterator[tuple[str, Cited]]:
    """Yield every record that makes a claim, with the name of its file."""
    for name, document in collection.files:
        for record in cited_records(document):
            yield name, record


def sources_declared_and_used(collection: Collection) -> Iterator[str]:
    """Sources are declared once, said where to find, cited only when declared, and all cited."""
    for name, document in collection.files:
        declared = {source.id: source for source in document.source}
        cited = {source for record in cited_records(document) for source in (*record.source, *(claim.source for claim in record.conflict))}
        yield from (f"{name}: source {source!r} is cited but not declared" for source in sorted(cited - set(declared)))
        yield from (f"{name}: source {source!r} is declared but not cited" for source in sorted(set(declared) - cited))
        yield from (f"{name}: {label(record)} cites no source" for record in cited_records(document) if not record.source)
        for source in document.source:
            if not source.title.strip() or not source.location.strip():
                yield f"{name}: source {source.id!r} has no title or no location"
            if source.date and not is_date(source.date):
                yield f"{name}: source {source.id!r} has the date {source.date!r}, not an ISO date"


def is_date(text: str) -> bool:
    """Tell whether ``text`` is an ISO date."""
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def facts_used_or_dropped(collection: Collection) -> Iterator[str]:
    """Every collected fact is cited by a record or dropped with a reason, never both; no record cites a fact that was not collected."""
    collected = {f"{facts}/{index}" for _, document in collection.files for facts, count in document.facts.items() for index in range(count)}
    used: dict[str, str] = {}
    for name, record in every_record(collection):
        for fact in record.facts:
            used.setdefault(fact, f"{name}: {label(record)}")
    left_out = [entry.fact for entry in collection.dropped.dropped]
    yield from (f"{used[fact]} cites fact {fact!r}, which was not collected" for fact in sorted(set(used) - collected))
    yield from (f"dropped.toml names fact {fact!r}, which was not collected" for fact in sorted(set(left_out) - collected))
    yield from (f"fact {fact!r} is neither cited nor dropped" for fact in sorted(collected - set(used) - set(left_out), key=fact_order))
    yield from (f"fact {fact!r} is dropped and yet cited by {used[fact]}" for fact in sorted(set(left_out) & set(used), key=fact_order))
    yield from (f"fact {fact!r} is dropped twice" for fact in repeated(left_out))
    yield from (f"fact {entry.fact!r} is dropped without a reason" for entry in collection.dropped.dropped if not entry.reason.strip())


def fact_order(fact: str) -> tuple[str, int]:
    """Sort key of a fact: collection, then number; a malformed one sorts first."""
    name, _, index = fact.partition("/")
    return name, int(index) if index.isdecimal() else -1


def names_in_vocabulary(collection: Collection) -> Iterator[str]:
    """Operations, scale layouts and paths come from the vocabulary, and every name of it is used or has a reason to be kept."""
    vocabulary = collection.vocabulary
    allowed: dict[str, set[str]] = {"op": set(vocabulary.op), "scaling": set(vocabulary.scaling), "path": set(vocabulary.path)}
    used: dict[str, set[str]] = {table: set() for table in allowed}
    for name, document in collection.files:
        for record in (*document.row, *document.peak, *document.switch):
            for table, names in allowed.items():
                value = getattr(record, table, None)
                if value is None:
                    continue
                used[table].add(value)
                if value not in names:
                    yield f"{name}: {label(record)} has the {table} {value!r}, which is not in the vocabulary"
    idle = {f"{table}.{name}" for table, names in allowed.items() for name in names - used[table]}
    yield from (f"vocabulary.toml: {name} is used by no row and has no reason to be kept" for name in sorted(idle - set(collection.unused)))
    yield from (f"vocabulary.toml: {name} has a reason for being unused but is used or gone" for name in sorted(set(collection.unused) - idle))
    yield from (f"vocabulary.toml: {name} has an empty reason" for name, reason in collection.unused.items() if not reason.strip())


def formats_canonical(collection: Collection) -> Iterator[str]:
    """Formats are written by their canonical names."""
    for name, document in collection.files:
        for row in document.row:
            yield from check_formats(name, row, (row.a, row.b, *row.out))
            yield from check_formats(name, row, (row.accumulate,), NO_FORMAT)
            yield from check_formats(name, row, (row.computes,), ("", "unknown"))
        for peak in document.peak:
            yield from check_formats(name, peak, (peak.format,))
            yield from check_formats(name, peak, (peak.accumulate,), NO_FORMAT)
        for switch in document.switch:
            yield from check_formats(name, switch, (switch.format,))
            yield from check_formats(name, switch, switch.computes.values(), ("unknown",))
        for collective in document.collective:
            yield from check_formats(name, collective, (collective.format,))
            yield from check_formats(name, collective, (collective.accumulate,), NO_FORMAT)


def check_formats(file: str, record: Any, values: Iterable[str], besides: Sequence[str] = ()) -> Iterator[str]:
    """Yield a problem for each value that is no canonical format and not one of ``besides``."""
    for value in (value for value in values if value not in besides):
        try:
            canonical = parse_format(value).name
        except UnknownNameError:
            yield f"{file}: {label(record)} names {value!r}, which is no format"
            continue
        if canonical != value:
            yield f"{file}: {label(record)} writes {value!r} for {canonical!r}"


def levels_and_evidence(collection: Collection) -> Iterator[str]:
    """Levels and evidence are of the known kinds; a level that replaces the format says by which, and no other level does."""
    for name, record in every_record(collection):
        if record.evidence not in EVIDENCE_KINDS:
            yield f"{name}: {label(record)} has the evidence {record.evidence!r}"
        if getattr(record, "level", LEVELS[0]) not in LEVELS:
            yield f"{name}: {label(record)} has an unknown level"
    for name, document in collection.files:
        for row in document.row:
            if row.level == "converted" and not row.computes:
                yield f"{name}: {label(row)} is converted and does not say to what"
            if row.level not in ("converted", "emulated") and row.computes:
                yield f"{name}: {label(row)} is {row.level} and yet computes in {row.computes}"
            if row.level == "absent" and row.out:
                yield f"{name}: {label(row)} is absent and yet has a result"
            if row.conflict and row.level == "absent":
                yield f"{name}: {label(row)} is absent although sources disagree"


def sorted_tables(collection: Collection) -> Iterator[str]:
    """Every table is sorted by what identifies its records, facts ascend, and the vocabulary is in order."""
    for name, document in collection.files:
        for table in tables(document):
            keys = [identity(record) for record in table]
            for before, after in itertools.pairwise(keys):
                if before > after:
                    yield f"{name}: {type(table[0]).__name__.lower()} {' '.join(after)} stands after {' '.join(before)}"
    for name, record in every_record(collection):
        if list(record.facts) != sorted(set(record.facts), key=fact_order):
            yield f"{name}: {label(record)} lists its facts out of order or twice"
    left_out = [entry.fact for entry in collection.dropped.dropped]
    if left_out != sorted(left_out, key=fact_order):
        yield "dropped.toml: facts are out of order"
    for table in ("op", "path", "scaling"):
        if list(names := getattr(collection.vocabulary, table)) != sorted(names):
            yield f"vocabulary.toml: the names of {table} are out of order"


def unique_records(collection: Collection) -> Iterator[str]:
    """No two records of a kind are identified by the same values, over all files."""
    seen: dict[tuple[str, tuple[Any, ...]], str] = {}
    for name, document in collection.files:
        for table in tables(document):
            for record in table:
                scope = document.family if isinstance(record, (Source, SwitchDefault, Collective)) else ""
                key = (f"{scope} {type(record).__name__}", identity(record))
                if key in seen:
                    yield f"{name}: {label(record)} also stands in {seen[key]}"
                seen[key] = name


def device_names_unique(collection: Collection) -> Iterator[str]:
    """A reported name means one device, a key or alias means one device or is ambiguous, and a prefix rule covers only its own architecture."""
    devices = [(name, device) for name, document in collection.files for device in document.device]
    archs = [(name, arch) for name, document in collection.files for arch in document.arch]
    ambiguous = [(name, entry) for name, document in collection.files for entry in document.ambiguous]
    yield from (f"reported name {value!r} stands for two devices" for value in repeated(value for _, device in devices for value in device.names))
    keys = [key for _, device in devices for key in (device.key, *device.aliases)]
    yield from (f"device key or alias {key!r} stands for two devices" for key in repeated(keys))
    yield from (f"{entry.key!r} is ambiguous and yet a device" for _, entry in ambiguous if entry.key in keys)
    yield from (f"key {key!r} is not in lower case, so nobody can ask for it" for key in [*keys, *(entry.key for _, entry in ambiguous)] if key != key.lower())
    yield from (f"identifier {value!r} stands for two architectures" for value in repeated(value for _, arch in archs for value in arch.identifiers))
    for name, arch in archs:
        for prefix in arch.name_prefixes:
            stolen = [value for _, device in devices if device.arch != arch.key for value in device.names if value.startswith(prefix)]
            yield from (f"{name}: prefix {prefix!r} of {arch.key} covers {value!r} of another architecture" for value in stolen)
    for name, device in devices:
        yield from (f"{name}: {label(device)} has a code for {value!r}, which it does not report" for value in sorted(set(device.codes) - set(device.names)))


def references_resolve(collection: Collection) -> Iterator[str]:
    """What a record names stands somewhere: architectures, devices, variants, candidates, default settings."""
    devices = {device.key: device for _, document in collection.files for device in document.device}
    for name, document in collection.files:
        archs = {arch.key for arch in document.arch}
        for record in cited_records(document):
            arch = getattr(record, "arch", None)
            everywhere = arch == "*" and isinstance(record, (SwitchDefault, Collective))
            if arch is not None and arch not in archs and not everywhere:
                yield f"{name}: {label(record)} names the architecture {arch!r}, which the file does not declare"
        for entry in document.ambiguous:
            yield from (f"{name}: {label(entry)} offers {key!r}, which is no device" for key in entry.candidates if key not in devices)
        for peak in document.peak:
            if peak.device not in devices:
                yield f"{name}: {label(peak)} is of no device"
            elif peak.variant and peak.variant not in devices[peak.device].names:
                yield f"{name}: {label(peak)} is of a variant that the device does not report"
            if not peak.tera_per_s > 0:
                yield f"{name}: {label(peak)} is not positive"
        for switch in document.switch:
            if switch.default not in switch.computes:
                yield f"{name}: {label(switch)} does not say what its default computes"


def text_is_plain(collection: Collection) -> Iterator[str]:
    """Notes are short, and everything a person reads is ASCII; locations may hold any path."""
    for name, record in every_record(collection):
        texts = (record.note, *(claim.claim for claim in record.conflict), getattr(record, "name", ""))
        yield from (f"{name}: {label(record)} has text that is not ASCII" for text in texts if not text.isascii())
        if len(record.note) > LONGEST_NOTE:
            yield f"{name}: {label(record)} has a note of {len(record.note)} characters"
        yield from (f"{name}: {label(record)} has an empty claim" for claim in record.conflict if not claim.claim.strip())
    for name, document in collection.files:
        yield from (f"{name}: source {source.id!r} has a title that is not ASCII" for source in document.source if not source.title.isascii())
        yield from (f"{name}: source id {source.id!r} is not a short name" for source in document.source if not re.fullmatch(r"[a-z0-9][\w.,:+-]*", source.id))


RULES: tuple[Callable[[Collection], Iterator[str]], ...] = (
    sources_declared_and_used,
    facts_used_or_dropped,
    names_in_vocabulary,
    formats_canonical,
    levels_and_evidence,
    sorted_tables,
    unique_records,
    device_names_unique,
    references_resolve,
    text_is_plain,
)
