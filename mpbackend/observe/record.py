"""The record of a run: ``record.json`` (what was asked, planned and observed) and ``steps.jsonl`` (one line a step).

A record is plain JSON, versioned, strictly decoded and safe to load from a stranger. Numbers that JSON cannot hold are the strings ``nan``, ``inf`` and
``-inf``. This module imports no torch: a record is read and compared on a machine without any vendor software.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from mpbackend.decisions import Decision
from mpbackend.device import Device, Kind
from mpbackend.errors import DocumentError
from mpbackend.roles import MasterKind

SCHEMA = 1
RECORD_FILE = "record.json"
STEPS_FILE = "steps.jsonl"
CLASSES = ("parameters", "activations", "gradients", "optimizer state", "communication")

Number = float | Literal["nan", "inf", "-inf"]


class Document(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the records of a run: immutable, unknown fields refused."""


class Run(Document, frozen=True, kw_only=True):
    """Identity of a run.

    Attributes:
        id: name of the run, unique among the runs that are compared.
        seed: seed of the run, or None when none was given.
        kind: ``hardware``, ``emulated`` or ``simulated``.
        segment: 0, counted up when a run is resumed into a new record.
    """

    id: str
    seed: int | None = None
    kind: Kind = "hardware"
    segment: int = 0


class RecipeName(Document, frozen=True, kw_only=True):
    """The recipe as asked and as granted, canonical texts, and the hash of the former."""

    text: str
    hash: str
    granted: str


class SwitchReading(Document, frozen=True, kw_only=True):
    """A global switch: before the run, set by the plan (empty when only reported), read back, and after the run (empty while it lasts)."""

    before: str
    set: str = ""
    read_back: str = ""
    after: str = ""


class ClassReading(Document, frozen=True, kw_only=True):
    """One of the five classes: the format asked for, and the bytes of each format observed; empty where the class was not observed."""

    asked: str
    observed: dict[str, int] = {}


class ComputeReading(Document, frozen=True, kw_only=True):
    """The effective compute format of one step.

    Attributes:
        shares: share of the matrix-product FLOPs by operand format.
        flops: matrix-product FLOPs, a multiply-add counted as two.
        casts: conversions between formats.
        cast_bytes: bytes that they wrote.
        level: level of the planned compute format: ``emulated`` where other arithmetic stands in for it.
        uncounted: operations that hide matrix products and have no formula; while there are any, the shares say nothing about the whole.
        products: calls of each operation that multiplies matrices, by the format of its operands: ``forward aten::mm`` to ``{"bf16": 12}``.
        conversions: conversions of each phase by formats: ``forward`` to ``{"fp32 to bf16": 24}``.
    """

    shares: dict[str, float] = {}
    flops: int = 0
    casts: int = 0
    cast_bytes: int = 0
    uncounted: tuple[str, ...] = ()
    level: str = ""
    products: dict[str, dict[str, int]] = {}
    conversions: dict[str, dict[str, int]] = {}


class Totals(Document, frozen=True, kw_only=True):
    """Sums over the run so far."""

    steps: int = 0
    stepped: int = 0
    skipped: int = 0
    nonfinite: int = 0
    samples: int = 0
    tokens: int = 0
    seconds: float = 0.0


class StepRow(Document, frozen=True, kw_only=True):
    """One optimizer step (or the skip of one).

    Attributes:
        step: counted from 1.
        loss: mean over the micro-batches, before scaling.
        grad_norm: L2 norm of the unscaled gradients before clipping; None when neither clipping, scaling nor recording needed it.
        scale: loss scale that the step used.
        stepped: whether the optimizer stepped.
        reason: why not; empty when it did.
        nonfinite: whether the loss or a gradient was inf or NaN.
        lr: learning rate of the first parameter group.
        ms: milliseconds since the step before; None for the first.
        samples: samples of the step, 0 when the data was not watched.
        tokens: tokens of the step, 0 when the data has none.
        metrics: what the user adds.
    """

    step: int
    loss: Number | None = None
    grad_norm: Number | None = None
    scale: float = 1.0
    stepped: bool
    reason: str = ""
    nonfinite: bool = False
    lr: Number | None = None
    ms: Number | None = None
    samples: int = 0
    tokens: int = 0
    metrics: dict[str, Number] = {}


class RunRecord(Document, frozen=True, kw_only=True):
    """The content of ``record.json``.

    Attributes:
        schema: version of the layout.
        run: identity of the run.
        environment: versions, and variables that change the arithmetic.
        device: where it ran; ``kind`` is about the device, ``compute.level`` about the arithmetic.
        recipe: what was asked and granted.
        plan: the decisions.
        switches: global precision switches.
        classes: the five classes, asked and observed.
        compute: the effective compute format.
        settings: how the session was prepared: clipping, micro-batches, policies, optimizers.
        conversion: one row per converted layer.
        fingerprints: hashes of the data and of the weights at the start.
        memory: bytes allocated now and at the peak.
        memory_basis: what was measured.
        totals: sums over the run so far.
        counters: what the session put right or noticed, by name, such as ``backward_inside_autocast``.
        notes: what the backend says about the plan besides its decisions, such as what an emulator leaves to the host.
    """

    schema: Literal[1] = 1
    run: Run
    environment: dict[str, str]
    device: Device
    recipe: RecipeName
    plan: tuple[Decision, ...]
    switches: dict[str, SwitchReading] = {}
    classes: dict[str, ClassReading] = {}
    compute: ComputeReading = ComputeReading()
    settings: dict[str, str] = {}
    conversion: tuple[dict[str, str], ...] = ()
    fingerprints: dict[str, str] = {}
    memory: dict[str, int | None] = {}
    memory_basis: str = ""
    totals: Totals = Totals()
    counters: dict[str, int] = {}
    notes: tuple[str, ...] = ()


class Recorded(msgspec.Struct, frozen=True):
    """A record read back: the document and its steps."""

    record: RunRecord
    steps: tuple[StepRow, ...]


def to_number(value: float) -> Number:
    """Return a float, or the string that stands for it where JSON has no number; takes whatever ``float`` takes."""
    number = float(value)
    if math.isfinite(number):
        return number
    return "nan" if math.isnan(number) else ("inf" if number > 0 else "-inf")


def from_number(value: Number) -> float:
    """Return the float that a recorded number stands for."""
    return float(value)


def load_record(path: str | os.PathLike[str]) -> Recorded:
    """Read a record.

    Args:
        path: folder of the record, or its ``record.json``.

    Raises:
        DocumentError: a file is missing, malformed, of another version, or has an unknown field; names the file, the line and the field.
    """
    given = Path(path)
    folder = given.parent if given.name == RECORD_FILE else given
    record = decode(folder / RECORD_FILE, read(folder / RECORD_FILE), RunRecord)
    path = folder / STEPS_FILE
    lines = read(path).split(b"\n")
    complete = lines[:-1]  # a last line without its newline is one that was being written
    steps = tuple(decode(path, line, StepRow, f" line {number}") for number, line in enumerate(complete, 1))
    return Recorded(record, steps)


def read(path: Path) -> bytes:
    """Return the bytes of a file of a record; ``DocumentError`` when it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DocumentError(f"cannot read record file {path}", found=error.strerror or str(error), remedy="a record is a folder with record.json") from error


def decode(path: Path, content: bytes, kind: type[Any], where: str = "") -> Any:
    """Decode strictly; ``DocumentError`` names file, line and field."""
    try:
        return msgspec.json.decode(content, type=kind, strict=True)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DocumentError(f"{path}{where} is not a record of schema {SCHEMA}", found=str(error)) from error


MASTER_TEXT: Mapping[MasterKind, str] = {"none": "", "fp32": " + fp32 master", "kahan": " + kahan compensation", "stochastic": ", stochastic rounding"}


def asked_classes(flat: Mapping[str, Any]) -> dict[str, str]:
    """Return the asked format of each of the five classes from the flat roles of a recipe."""
    return {
        "parameters": f"{flat['params']}{MASTER_TEXT[flat['master']]}",
        "activations": str(flat["compute.forward"]),
        "gradients": str(flat["grads"]),
        "optimizer state": f"exp_avg {flat['optimizer.exp_avg']}, exp_avg_sq {flat['optimizer.exp_avg_sq']}",
        "communication": f"{flat['reduce.format']}, divide {flat['reduce.divide']}",
    }
