"""The record of a run: what is written reads back, and what is malformed is named by file, line and field."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpbackend.decisions import Decision
from mpbackend.device import Device
from mpbackend.errors import DocumentError
from mpbackend.observe import record as module
from mpbackend.observe.record import (
    CLASSES,
    ClassReading,
    ComputeReading,
    RecipeName,
    Run,
    RunRecord,
    StepRow,
    SwitchReading,
    Totals,
    asked_classes,
    from_number,
    load_record,
    to_number,
)
from mpbackend.observe.record_writer import RecordWriter, count_totals, write_atomically
from mpbackend.recipe import PRESETS

RECORD = RunRecord(
    run=Run(id="h100-bf16", seed=2**64 - 1, kind="emulated", segment=1),
    environment={"torch": "2.13.0", "driver": "580"},
    device=Device(key="h100", arch="sm_90", name="NVIDIA H100 80GB HBM3", backend="x", type="x", versions={"x": "1"}, memory_bytes=85899345920),
    recipe=RecipeName(text="bf16", hash="0" * 16, granted="bf16"),
    plan=(Decision(role="params", asked="fp32", granted="fp32", level="storage", reason="because"),),
    switches={"matmul.fp32_precision": SwitchReading(before="tf32", set="ieee", read_back="ieee")},
    classes={name: ClassReading(asked="fp32", observed={"fp32": 400, "bf16": 20}) for name in CLASSES},
    compute=ComputeReading(shares={"bf16": 0.75, "fp32": 0.25}, flops=2**62, casts=3, cast_bytes=12),
    conversion=({"layer": "head", "action": "skipped", "reason": "k is 3"},),
    fingerprints={"data": "ab", "weights": "cd"},
    memory={"peak": 1024, "allocated": None},
    memory_basis="allocator",
    totals=Totals(steps=3, stepped=2, skipped=1, nonfinite=1, samples=12, tokens=96, seconds=0.25),
)
ROWS = (
    StepRow(step=1, loss=2.5, grad_norm=1.0, scale=65536.0, stepped=True, lr=0.001, samples=4, tokens=32, metrics={"accuracy": 0.5}),
    StepRow(
        step=2, loss="nan", grad_norm="inf", scale=65536.0, stepped=False, reason="gradient_overflow", nonfinite=True, lr="-inf", ms=1.5, samples=4, tokens=32
    ),
    StepRow(step=3, loss=2.25, grad_norm=None, stepped=True, lr=0.001, ms=2.5, samples=4, tokens=32, metrics={"ppl": "inf"}),
)
NUMBERS = st.floats(allow_nan=True, allow_infinity=True, width=64)


def write(folder: Path, record: RunRecord = RECORD, rows: tuple[StepRow, ...] = ROWS) -> Path:
    """Write a whole record; return its folder."""
    writer = RecordWriter(folder)
    writer.append(rows)
    writer.write(record)
    writer.close()
    return folder


def refusal(folder: Path) -> str:
    """Return the message with which a record is refused; one line."""
    with pytest.raises(DocumentError) as caught:
        load_record(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("path", ["", "record.json"])
def test_a_record_reads_back(tmp_path: Path, path: str) -> None:
    write(tmp_path / "runs" / "x")
    found = load_record(tmp_path / "runs" / "x" / path)
    assert found.record == RECORD
    assert found.steps == ROWS
    assert load_record(str(tmp_path / "runs" / "x" / path)) == found


def test_the_files_are_plain_json_without_null_for_a_number(tmp_path: Path) -> None:
    folder = write(tmp_path / "x")
    assert sorted(path.name for path in folder.iterdir()) == ["record.json", "steps.jsonl"]
    document = json.loads((folder / "record.json").read_text(encoding="utf-8"))
    assert list(document)[:2] == ["schema", "run"]
    assert document["schema"] == 1
    lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["loss"] for line in lines] == [2.5, "nan", 2.25]
    assert [line["lr"] for line in lines] == [0.001, "-inf", 0.001]
    assert lines[2]["metrics"] == {"ppl": "inf"}


@settings(max_examples=200, deadline=None, derandomize=True)
@given(NUMBERS)
def test_every_number_reads_back(value: float) -> None:
    text = msgspec.json.encode(to_number(value))
    found = from_number(msgspec.json.decode(text, type=module.Number))
    assert found == value or (math.isnan(found) and math.isnan(value))
    assert text != b"null"


def test_numbers_of_other_types_become_floats() -> None:
    numpy = pytest.importorskip("numpy", reason="a development dependency")
    assert to_number(3) == 3.0
    assert type(to_number(numpy.float32(0.5))) is float
    assert to_number(numpy.float64("nan")) == "nan"
    assert [to_number(value) for value in (math.inf, -math.inf, math.nan)] == ["inf", "-inf", "nan"]


@pytest.mark.parametrize("field", ["loss", "grad_norm", "lr", "ms"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_with_a_bare_nan_is_not_written_as_null(tmp_path: Path, field: str, value: float) -> None:
    bare: dict[str, Any] = {field: value}
    found = load_record(write(tmp_path / "x", rows=(StepRow(step=1, stepped=True, metrics={"m": value}, **bare),))).steps[0]
    assert getattr(found, field) == to_number(value)
    assert found.metrics == {"m": to_number(value)}


def test_a_last_line_that_was_being_written_is_left_out(tmp_path: Path) -> None:
    folder = write(tmp_path / "x")
    steps = folder / "steps.jsonl"
    whole = steps.read_bytes()
    for cut in range(1, len(whole.splitlines()[-1]) + 2):
        steps.write_bytes(whole[:-cut])
        assert load_record(folder).steps == ROWS[:2]
    steps.write_bytes(b"")
    assert load_record(folder).steps == ()


@pytest.mark.parametrize(
    ("line", "text", "message"),
    [
        (1, b"{", "truncated"),
        (2, b"", "truncated"),
        (2, b"\xff", "x/steps.jsonl line 2"),
        (3, b'{"step": 3, "stepped": true, "los": 1}', "unknown field `los`"),
        (3, b'{"step": 3}', "missing required field `stepped`"),
        (2, b'{"step": "2", "stepped": true}', "$.step"),
        (2, b'{"step": 2, "stepped": 1}', "$.stepped"),
        (2, b'{"step": 2, "stepped": true, "loss": "NaN"}', "$.loss"),
        (2, b'{"step": 2, "stepped": true, "loss": NaN}', "malformed"),
        (2, b'{"step": 2, "stepped": true, "loss": 1e999}', "$.loss"),
        (2, b'{"step": 2, "stepped": true, "metrics": {"m": null}}', "$.metrics"),
        (2, b"[" * 100_000, "line 2"),
        (1, b"null", "Expected `object`"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: int, text: bytes, message: str) -> None:
    folder = write(tmp_path / "x")
    lines = (folder / "steps.jsonl").read_bytes().splitlines()
    lines[line - 1] = text
    (folder / "steps.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    said = refusal(folder)
    assert f"steps.jsonl line {line} is not a record of schema 1" in said
    assert message in said


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("schema",), 2, "$.schema"),
        (("schema",), "1", "$.schema"),
        (("schemas",), 1, "unknown field `schemas`"),
        (("run", "kind"), "virtual", "$.run.kind"),
        (("run", "id"), None, "$.run.id"),
        (("run", "owner"), "me", "unknown field `owner` - at `$.run`"),
        (("device", "memory_bytes"), 1.5, "$.device.memory_bytes"),
        (("device", "color"), "red", "$.device"),
        (("plan",), {}, "$.plan"),
        (("plan", 0, "level"), "fast", "$.plan[0].level"),
        (("plan", 0, "extra"), 1, "$.plan[0]"),
        (("switches", "matmul.fp32_precision", "was"), "", "$.switches[...]"),
        (("classes", "gradients", "observed", "fp32"), "many", "$.classes[...].observed[...]"),
        (("compute", "flops"), "x", "$.compute.flops"),
        (("totals", "seconds"), None, "$.totals.seconds"),
        (("environment", "torch"), 2, "$.environment[...]"),
    ],
)
def test_a_malformed_document_is_named_by_field(tmp_path: Path, path: tuple[Any, ...], value: Any, message: str) -> None:
    folder = write(tmp_path / "x")
    document = json.loads((folder / "record.json").read_text(encoding="utf-8"))
    node = document
    for part in path[:-1]:
        node = node[part]
    node[path[-1]] = value
    (folder / "record.json").write_text(json.dumps(document), encoding="utf-8")
    said = refusal(folder)
    assert f"{folder / 'record.json'} is not a record of schema 1" in said
    assert message in said


@pytest.mark.parametrize("field", ["run", "environment", "device", "recipe", "plan"])
def test_a_field_that_is_missing_is_named(tmp_path: Path, field: str) -> None:
    folder = write(tmp_path / "x")
    document = json.loads((folder / "record.json").read_text(encoding="utf-8"))
    del document[field]
    (folder / "record.json").write_text(json.dumps(document), encoding="utf-8")
    assert f"missing required field `{field}`" in refusal(folder)


@pytest.mark.parametrize("text", [b"", b"{", b"\x80\x04.", b"[]", b"\xff\xfe{}", b"{" * 10, b'{"a":' * 100_000])
def test_what_is_not_a_json_object_is_refused(tmp_path: Path, text: bytes) -> None:
    folder = write(tmp_path / "x")
    (folder / "record.json").write_bytes(text)
    assert "record.json is not a record of schema 1" in refusal(folder)


@pytest.mark.parametrize("name", ["record.json", "steps.jsonl"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / "x")
    (folder / name).unlink()
    said = refusal(folder)
    assert f"cannot read record file {folder / name}: No such file" in said
    assert "a record is a folder with record.json" in said


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "nothing")
    assert "irectory" in refusal(write(tmp_path / "x") / "steps.jsonl")


@pytest.mark.parametrize("left", ["record.json", "steps.jsonl"])
def test_a_record_that_is_there_is_not_touched(tmp_path: Path, left: str) -> None:
    folder = write(tmp_path / "x")
    for path in folder.iterdir():
        if path.name != left:
            path.unlink()
    before = (folder / left).read_bytes()
    with pytest.raises(DocumentError, match="it already holds a record; name a new folder: each run, and each segment"):
        RecordWriter(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {left: before}


def test_a_folder_with_other_files_may_take_a_record(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    assert load_record(write(tmp_path)).steps == ROWS
    assert (tmp_path / "notes.txt").read_text(encoding="utf-8") == "mine"


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(DocumentError, match="choose a folder that can be written") as caught:
            RecordWriter(folder)
        assert "already holds" not in str(caught.value)


def test_rows_are_in_the_file_as_soon_as_they_are_appended(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "x")
    writer.write(RECORD)
    assert load_record(tmp_path / "x").steps == ()
    writer.append(ROWS[:1])
    assert load_record(tmp_path / "x").steps == ROWS[:1]
    writer.append(ROWS[1:])
    assert load_record(tmp_path / "x").steps == ROWS
    writer.close()


def test_the_document_is_replaced_and_leaves_nothing_behind(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "x")
    writer.write(RECORD)
    changed = msgspec.structs.replace(RECORD, totals=Totals(steps=9))
    writer.write(changed)
    writer.close()
    assert load_record(tmp_path / "x").record == changed
    assert sorted(path.name for path in (tmp_path / "x").iterdir()) == ["record.json", "steps.jsonl"]


def test_a_reader_sees_the_old_document_until_the_new_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record.json"
    write_atomically(path, b"old")
    seen = []
    replace = Path.replace

    def watched(self: Path, target: Path) -> Path:
        seen.append((path.read_bytes(), self.read_bytes(), self.parent == path.parent))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", watched)
    write_atomically(path, b"new")
    assert seen == [(b"old", b"new", True)]
    assert path.read_bytes() == b"new"


@pytest.mark.parametrize("method", ["write_bytes", "replace"])
def test_a_write_that_fails_leaves_the_old_document_and_no_other_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    writer = RecordWriter(tmp_path / "x")
    writer.write(RECORD)

    def full(self: Path, *_: Any) -> None:
        if method == "write_bytes":
            with self.open("wb") as file:
                file.write(b"{")
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Path, method, full)
    with pytest.raises(DocumentError, match=r"cannot write .*record\.json: No space left on device"):
        writer.write(msgspec.structs.replace(RECORD, totals=Totals(steps=9)))
    monkeypatch.undo()
    writer.close()
    assert load_record(tmp_path / "x").record == RECORD
    assert sorted(path.name for path in (tmp_path / "x").iterdir()) == ["record.json", "steps.jsonl"]


def test_a_row_that_cannot_be_written_is_an_error_of_mpbackend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = RecordWriter(tmp_path / "x")
    steps: Any = writer._steps

    class Full:
        def write(self, _: str) -> None:
            raise OSError(28, os.strerror(28))

    monkeypatch.setattr(writer, "_steps", Full())
    with pytest.raises(DocumentError, match=r"cannot write .*steps\.jsonl: No space left on device"):
        writer.append(ROWS)
    steps.close()


def test_totals_are_sums() -> None:
    assert count_totals(ROWS) == Totals(steps=3, stepped=2, skipped=1, nonfinite=1, samples=12, tokens=96, seconds=0.004)
    assert count_totals([]) == Totals()
    assert count_totals(ROWS, Totals(steps=7, seconds=1.0)) == Totals(steps=10, stepped=2, skipped=1, nonfinite=1, samples=12, tokens=96, seconds=1.004)
    assert count_totals(ROWS[1:], count_totals(ROWS[:1])) == count_totals(ROWS)


@pytest.mark.parametrize("ms", ["nan", "inf", "-inf"])
def test_a_time_that_is_no_number_is_not_summed(ms: Any) -> None:
    assert count_totals([StepRow(step=1, stepped=True, ms=ms), StepRow(step=2, stepped=True, ms=500.0)]).seconds == 0.5


def test_the_five_classes_are_asked_for_by_the_recipe() -> None:
    asked = {name: asked_classes(recipe.flat()) for name, recipe in PRESETS.items()}
    assert all(tuple(classes) == CLASSES for classes in asked.values())
    assert asked["bf16-master"]["parameters"] == "bf16 + fp32 master"
    assert asked["bf16-kahan"]["parameters"] == "bf16 + kahan compensation"
    assert asked["bf16-sr"]["parameters"] == "bf16, stochastic rounding"
    assert asked["bf16"] == {
        "parameters": "fp32",
        "activations": "bf16",
        "gradients": "fp32",
        "optimizer state": "exp_avg fp32, exp_avg_sq fp32",
        "communication": "fp32, divide before",
    }


def test_records_are_immutable() -> None:
    row: Any = ROWS[0]
    with pytest.raises(AttributeError, match="immutable"):
        row.loss = 0.0
