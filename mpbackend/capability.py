"""The records of a capability matrix: what an architecture computes in, at which level, and who says so.

One ``Row`` is one combination of operand formats, scaling, path and accumulator on one architecture. Support is never a bool: it is a ``Level`` with a
source. Every record is immutable; every document is decoded strictly, so a misspelt field is an error and not an ignored line.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

Level = Literal["native", "library", "emulated", "converted", "storage", "absent", "unknown"]
"""How an architecture supports a combination.

native: an instruction computes it. library: the hardware has it and a named library exposes it. emulated: accepted, computed by other means.
converted: silently computed in another format. storage: holds and casts only. absent: a source says it does not exist. unknown: no source says.
"""

LEVELS: tuple[Level, ...] = ("native", "library", "emulated", "converted", "storage", "absent", "unknown")

LEVEL_MEANING: dict[Level, str] = {
    "native": "an instruction of the architecture computes it",
    "library": "the hardware has it and a named library exposes it",
    "emulated": "accepted, but computed by other means",
    "converted": "silently computed in another format",
    "storage": "holds and casts values only",
    "absent": "a source says that it does not exist",
    "unknown": "no source says",
}

EvidenceKind = Literal["documented", "compiled", "literature", "derived", "replayed", "queried", "probed", "measured"]
"""Where a claim comes from, from a vendor's text to a measurement on the device."""

EVIDENCE_KINDS: tuple[EvidenceKind, ...] = ("documented", "compiled", "literature", "derived", "replayed", "queried", "probed", "measured")

Unknown = Literal["unknown"]
UNKNOWN: Unknown = "unknown"

Count = Annotated[int, msgspec.Meta(ge=1, le=2**20)]
"""A number of elements, products or bits: at least 1."""

Layer = Literal["instruction", "toolkit", "library", "framework"]
"""How far a path is from the user's matmul: a hardware instruction, a toolkit to write kernels with, a library operator, or what the framework runs unasked."""

Rounding = Literal["rne", "rz", "rna", "exact", "unknown"]
"""Rounding: rne to nearest even, rz toward zero (truncation), rna half away from zero, exact when nothing is lost."""

OverflowMode = Literal["inf_nan", "saturating", "unknown"]
"""Overflow: inf_nan as in IEEE 754, saturating to the largest finite value (NaN becomes 0)."""


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of all matrix records: immutable, keyword-only, unknown fields refused."""


class Conflict(Record, frozen=True, kw_only=True):
    """A claim that contradicts the record it stands in.

    Attributes:
        claim: what the other source says.
        source: the id of that source in the same file.
    """

    claim: str
    source: str


class Cited(Record, frozen=True, kw_only=True):
    """Base of every record that makes a claim.

    Attributes:
        source: ids of the sources in the same file; at least one.
        evidence: the kind of the strongest source.
        facts: indices of the collected facts that the record was made from, as ``file/index``.
        conflict: claims of other sources that contradict this record.
        note: what a reader must know besides.
    """

    source: tuple[str, ...]
    evidence: EvidenceKind
    facts: tuple[str, ...] = ()
    conflict: tuple[Conflict, ...] = ()
    note: str = ""


class Source(Record, frozen=True, kw_only=True):
    """A document, program or measurement that records cite.

    Attributes:
        id: short name, unique in the file.
        title: what it is.
        location: where to find it: repository and commit, path and lines, or address.
        date: ISO date of the document or of the reading; empty when not stated.
    """

    id: str
    title: str
    location: str
    date: str = ""


class Accumulator(Record, frozen=True, kw_only=True):
    """How a matrix unit adds products. Each value may be ``unknown``.

    Attributes:
        products_per_step: exact products that one step adds to the accumulator.
        fraction_bits: fraction bits kept when the terms of a step are aligned to the largest.
        rounding: what alignment does to the bits below.
        output_rounding: rounding of the accumulator to the result of a step.
        promotion_interval: products after which the partial sum is added to a wider register; ``none`` when it never is.
        order: ``sequential`` along K, or ``byte_pairs``: of every 4 products of a step the first two, in a step from zero, then the others in a second
            one, and their sum is added to the rest by an ordinary addition, whose rounding ``output_rounding`` is.
    """

    products_per_step: Count | Unknown = UNKNOWN
    fraction_bits: Count | Unknown = UNKNOWN
    rounding: Rounding = UNKNOWN
    output_rounding: Rounding = UNKNOWN
    promotion_interval: Count | Literal["none", "unknown"] = UNKNOWN
    order: Literal["sequential", "byte_pairs", "unknown"] = UNKNOWN


class Align(Record, frozen=True, kw_only=True):
    """Sizes that the path needs, in elements; 1 means any size, ``unknown`` that no source says."""

    m: Count | Unknown = UNKNOWN
    n: Count | Unknown = UNKNOWN
    k: Count | Unknown = UNKNOWN


class Row(Cited, frozen=True, kw_only=True):
    """One combination on one architecture. The first seven fields are the key and are unique over all matrices.

    Attributes:
        arch: key of the architecture.
        op: operation, from the vocabulary: ``matmul``, ``conv``, ...
        a: format of the first operand.
        b: format of the second operand (for a conversion: the same as ``a``).
        scaling: scale layout, from the vocabulary; ``none`` for plain operands.
        path: instruction, library operator or framework default, from the vocabulary.
        accumulate: format of the accumulator; ``unknown`` where no source states it, ``none`` where nothing accumulates.
        out: formats a result can be written in.
        level: support.
        computes: for ``converted`` and ``emulated``: the format that is really used.
        accumulator: the arithmetic of the accumulator, where known.
        align: required sizes.
        since: software that is needed, name to lowest version.
    """

    arch: str
    op: str
    a: str
    b: str
    scaling: str = "none"
    path: str
    accumulate: str
    out: tuple[str, ...] = ()
    level: Level
    computes: str = ""
    accumulator: Accumulator | None = None
    align: Align | None = None
    since: dict[str, str] = {}

    @property
    def key(self) -> tuple[str, str, str, str, str, str, str]:
        """The unique key (arch, op, a, b, scaling, path, accumulate)."""
        return (self.arch, self.op, self.a, self.b, self.scaling, self.path, self.accumulate)


class Arch(Cited, frozen=True, kw_only=True):
    """An architecture: the thing that capability rows belong to.

    Attributes:
        key: short name used by rows and devices.
        name: name in the vendor's documents.
        family: the group that the CLI lists it under.
        identifiers: exact capability strings that the vendor's runtime reports (``9.0``).
        name_prefixes: prefixes of reported names that the vendor's own software maps to this architecture.
    """

    key: str
    name: str
    family: str
    identifiers: tuple[str, ...] = ()
    name_prefixes: tuple[str, ...] = ()


class DeviceModel(Cited, frozen=True, kw_only=True):
    """A device that can be planned for. It inherits every row of its architecture.

    Attributes:
        key: what ``--device`` takes.
        arch: key of the architecture.
        name: name for people.
        names: exact names that the vendor's runtime reports; nothing is matched by prefix.
        codes: numbers that the vendor's software gives to reported names.
        aliases: further keys accepted by ``--device``.
        memory_bytes: capacities of the variants, bytes; empty when unknown.
        bandwidth_bytes_per_s: memory bandwidth of the variants, lowest and highest; empty when unknown.
    """

    key: str
    arch: str
    name: str
    names: tuple[str, ...] = ()
    codes: dict[str, int] = {}
    aliases: tuple[str, ...] = ()
    memory_bytes: tuple[int, ...] = ()
    bandwidth_bytes_per_s: tuple[int, ...] = ()


class Ambiguous(Record, frozen=True, kw_only=True):
    """A key that people write and that would be a guess; the message says what to write instead."""

    key: str
    message: str
    candidates: tuple[str, ...]


class Peak(Cited, frozen=True, kw_only=True):
    """A peak rate of one device for one format and accumulator.

    Attributes:
        device: key of the device.
        variant: exact reported name when the figure holds for one variant only.
        format: format of both operands.
        accumulate: format of the accumulator; ``unknown`` where the figure does not say.
        scaling: scale layout.
        unit: ``matrix`` (tensor core, cube) or ``vector``.
        sparsity: ``dense`` or the structured pattern.
        tera_per_s: 10^12 operations a second; a multiply and an add are two.
        basis: ``vendor`` states it, ``published`` by others, or ``derived`` from cores, clock and shape.
    """

    device: str
    variant: str = ""
    format: str
    accumulate: str
    scaling: str = "none"
    unit: Literal["matrix", "vector"] = "matrix"
    sparsity: Literal["dense", "2:4", "4:2"] = "dense"
    tera_per_s: float
    basis: Literal["vendor", "published", "derived"]


class SwitchDefault(Cited, frozen=True, kw_only=True):
    """A global switch of the software stack and the arithmetic that each setting gives.

    Attributes:
        arch: key of the architecture, or ``*`` for every one of the file.
        name: name of the switch as the backend's fence spells it.
        op: operation that it changes.
        format: format the user asked for.
        default: setting that the software starts with.
        computes: setting to the format that is then really used.
    """

    arch: str
    name: str
    op: str
    format: str
    default: str
    computes: dict[str, str]


class Overflow(Cited, frozen=True, kw_only=True):
    """What an architecture does on overflow.

    Attributes:
        arch: key of the architecture.
        mode: ``inf_nan`` (IEEE), ``saturating`` (largest finite value, NaN becomes 0), or ``unknown``.
        switch: environment variable or register that changes it; empty when there is none.
        status_register: whether a device register tells that an overflow happened.
    """

    arch: str
    mode: OverflowMode
    switch: str = ""
    status_register: bool | Unknown = UNKNOWN


class Collective(Cited, frozen=True, kw_only=True):
    """Whether a collective operation of the vendor's library takes a format.

    Attributes:
        arch: key of the architecture, or ``*`` for every one of the file.
        op: ``all_reduce_sum``, ``all_reduce_avg`` or ``move`` (gather, broadcast, send).
        format: element format.
        level: support; ``emulated`` when the framework builds it from other operations.
        accumulate: format of the sum; ``unknown`` where no source states it.
    """

    arch: str
    op: Literal["all_reduce_sum", "all_reduce_avg", "move"]
    format: str
    level: Level
    accumulate: str = UNKNOWN
