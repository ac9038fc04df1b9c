"""What an audit found, as a document: operations by module and pass, casts, fallbacks, requests, memory and findings. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from mpbackend.device import Kind
from mpbackend.errors import DocumentError

SCHEMA = 1

Basis = Literal["live", "fake"]
"""``live``: operations ran on the device; ``fake``: tensors without memory on a stand-in device with the target's operator policy."""

Part = Literal["forward", "backward", "optimizer"]


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the rows: immutable, unknown fields refused."""


class OpRow(Entry, frozen=True, kw_only=True):
    """Calls of one operation in one module with the same formats.

    Attributes:
        phase: when it ran.
        module: path of the module that called it, or whose forward operation it differentiates; empty outside of every module.
        op: ``aten::mm``.
        inputs: formats of its tensor arguments.
        compute: format that it computes in: of a product that of its operands, or what a switch makes of it; of another operation its widest floating-point
            operand; empty where it has none.
        outputs: formats of its results.
        calls: number of calls.
        flops: floating-point operations of matrix products, a multiply-add counted as two.
        share: part of the FLOPs of the audit, 0 to 1.
    """

    phase: Part
    module: str
    op: str
    inputs: tuple[str, ...]
    compute: str
    outputs: tuple[str, ...]
    calls: int
    flops: int = 0
    share: float = 0.0


class ProductRow(Entry, frozen=True, kw_only=True):
    """Matrix products of one shape: (m, k) times (k, n).

    Attributes:
        misses: the dimensions that miss the alignment of the target's row, ``k=50257 not a multiple of 16``; empty when none does, or no row says.
    """

    phase: Part
    op: str
    a: str
    b: str
    m: int
    n: int
    k: int
    calls: int
    flops: int
    share: float
    misses: tuple[str, ...] = ()


class CastRow(Entry, frozen=True, kw_only=True):
    """Conversions in one module: how many tensors, and the bytes written."""

    phase: Part
    module: str
    source: str
    target: str
    count: int
    bytes: int


class FallbackRow(Entry, frozen=True, kw_only=True):
    """Operations that the device left to the host.

    Attributes:
        count: calls.
        bytes: bytes of the tensors that were moved: arguments and results.
        seconds: host seconds that the calls took; 0 where nothing really ran.
        timed: whether they happened inside a timed step, which is then a measurement of the host as well.
    """

    phase: Part
    op: str
    count: int
    bytes: int
    seconds: float
    timed: bool


class RequestRow(Entry, frozen=True, kw_only=True):
    """A role of the recipe: what was asked, what was granted, what ran. ``same`` is None where the audit could not see it."""

    role: str
    asked: str
    granted: str
    ran: str
    same: bool | None


class MemoryRow(Entry, frozen=True, kw_only=True):
    """Bytes of one class in one format.

    Attributes:
        predicted: by arithmetic, before anything ran; None for what is not modeled.
        measured: held in the audited step.
        fp32: the class under the recipe fp32; None when that was not audited.
    """

    klass: str
    format: str
    predicted: int | None
    measured: int
    fp32: int | None = None


class Finding(Entry, frozen=True, kw_only=True):
    """Something that goes wrong, or costs, on the target.

    Attributes:
        rule: short name, ``banned-op``.
        where: module and operation.
        message: what was found and what it does.
        remedy: what to change.
    """

    rule: str
    where: str
    message: str
    remedy: str


class AuditDocument(Entry, frozen=True, kw_only=True):
    """One audit.

    Attributes:
        workload: what was audited, ``module:function``.
        device: key of the target.
        recipe: canonical text of what was asked.
        granted: of what was granted.
        kind: of the device: an emulated one has another's arithmetic, and neither its speed nor its operator policy.
        basis: how it ran.
        torch: version.
        parameters: number of parameters.
        flops: matrix-product FLOPs of forward and backward of one step.
        effective: effective compute format, for people.
        shares: share of those FLOPs by operand format.
        uncounted: operations that hide products and have no formula.
        tokens: tokens of a step; 0 when the workload does not say.
        seconds: median of the timed steps; 0 when nothing was timed.
        tokens_per_s: tokens a second; None when unknown.
        mfu: share of the peak that was reached; None where a peak or a time is unknown.
        mfu_basis: which peaks, or why there is none.
        overflow: what a step does whose gradients overflow; empty without dynamic loss scaling.
        notes: what else a reader must know.
    """

    schema: Literal[1] = 1
    workload: str
    device: str
    recipe: str
    granted: str
    kind: Kind
    basis: Basis
    torch: str
    parameters: int
    flops: int = 0
    effective: str = ""
    shares: dict[str, float] = {}
    uncounted: tuple[str, ...] = ()
    ops: tuple[OpRow, ...] = ()
    products: tuple[ProductRow, ...] = ()
    casts: tuple[CastRow, ...] = ()
    fallbacks: tuple[FallbackRow, ...] = ()
    requests: tuple[RequestRow, ...] = ()
    memory: tuple[MemoryRow, ...] = ()
    findings: tuple[Finding, ...] = ()
    tokens: int = 0
    seconds: float = 0.0
    tokens_per_s: float | None = None
    mfu: float | None = None
    mfu_basis: str = ""
    overflow: str = ""
    notes: tuple[str, ...] = ()

    def bytes_of(self, klass: str) -> int:
        """Return the measured bytes of a class over all formats."""
        return sum(row.measured for row in self.memory if row.klass == klass)


def folded_path(path: str) -> str:
    """Return the path of a module with the numbers of repeated ones as a star, so that equal layers share a row: ``blocks.*.qkv``."""
    return ".".join("*" if part.isdecimal() else part for part in path.split("."))


def load_audit(path: Path) -> AuditDocument:
    """Read an audit that ``mpbackend audit --format json`` wrote.

    Raises:
        DocumentError: the file cannot be read, is malformed or has an unknown field.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=AuditDocument, strict=True)
    except OSError as error:
        raise DocumentError(
            f"cannot read {path}", found=error.strerror or str(error), remedy="`mpbackend audit ... --format json --out FILE` writes one"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DocumentError(f"{path} is not an audit of schema {SCHEMA}", found=str(error)) from error
