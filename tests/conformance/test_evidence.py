"""Evidence files: strict, whole or not there, and compared."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mpbackend.conformance.answer import Answer, fault, fine, judged, skip, together
from mpbackend.conformance.evidence import Evidence, Result, file_name, load_evidence, plain, write_evidence
from mpbackend.conformance.parity import compare_evidence, same_conditions
from mpbackend.device import Device
from mpbackend.errors import DocumentError

DEVICE = Device(key="acme-x1", arch="acme-1", name="Acme X1", backend="acme", type="cpu", kind="emulated", versions={"torch": "2.13.0"})


def evidence(**changes: Any) -> Evidence:
    results = (
        Result(check="matmul", theme="products", outcome="passed", figures={"bf16 gap": 0.5}),
        Result(check="notes", theme="messages", outcome="skipped", detail="no notes"),
    )
    made = Evidence(backend="acme", device=DEVICE, environment={"torch": "2.13.0"}, mpbackend="0.1.0", commit="a" * 40, date="2026-01-02", results=results)
    return msgspec.structs.replace(made, **changes)


def test_what_is_written_is_loaded(tmp_path: Path) -> None:
    path = write_evidence(evidence(), tmp_path / "new" / "folder")
    assert path.name == "conformance-acme-acme-x1.json"
    assert load_evidence(path) == evidence()
    assert [item.name for item in path.parent.iterdir()] == [path.name], "no temporary file is left"


def test_a_later_run_replaces_the_file(tmp_path: Path) -> None:
    write_evidence(evidence(), tmp_path)
    path = write_evidence(evidence(date="2026-02-03"), tmp_path)
    assert load_evidence(path).date == "2026-02-03"


def test_names_of_backends_and_devices_cannot_leave_the_folder() -> None:
    strange = evidence(backend="../up", device=msgspec.structs.replace(DEVICE, key="a/b c"))
    assert file_name(strange) == "conformance-..-up-a-b-c.json"
    assert "/" not in file_name(strange)


def test_a_folder_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(DocumentError, match=r"cannot write .*: .*; choose another --out"):
        write_evidence(evidence(), tmp_path / "file")


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda document: document.update(extra=1), "unknown field `extra`"),
        (lambda document: document.update(schema=2), "Invalid enum value 2"),
        (lambda document: document.update(kind="probe"), "Invalid enum value"),
        (lambda document: document["results"][0].update(outcome="maybe"), "outcome"),
        (lambda document: document["results"][0].update(figures={"gap": None}), "figures"),
        (lambda document: document["results"].append(document["results"][0]), "it names a check twice"),
        (lambda document: document["device"].update(index="0"), "device.index"),
        (lambda document: document.pop("mpbackend"), "missing required field `mpbackend`"),
    ],
)
def test_another_document_is_refused(change: Any, found: str, tmp_path: Path) -> None:
    document = json.loads(msgspec.json.encode(evidence()))
    change(document)
    path = tmp_path / "evidence.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(DocumentError, match="cannot read") as caught:
        load_evidence(path)
    assert found in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"schema": 1}'])
def test_what_is_no_evidence_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "evidence.json"
    path.write_bytes(content)
    with pytest.raises(DocumentError, match=r"no evidence of schema 1.*give a file that `mpbackend conformance` wrote"):
        load_evidence(path)


def test_damaged_files_are_evidence_or_one_message(tmp_path: Path) -> None:
    generator, refused = random.Random(5), 0
    content = msgspec.json.encode(evidence())
    path = tmp_path / "evidence.json"
    for _ in range(400):
        damaged = bytearray(content)
        for _ in range(generator.randint(1, 3)):
            damaged[generator.randrange(len(damaged))] = generator.randrange(256)
        path.write_bytes(bytes(damaged[: generator.choice((len(damaged), generator.randrange(len(damaged))))]))
        try:
            assert load_evidence(path).kind == "conformance"
        except DocumentError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 200


def test_figures_that_json_has_no_number_for_become_text() -> None:
    assert plain({"a": math.inf, "b": -math.inf, "c": math.nan, "d": 1 / 3, "e": 7, "f": "text"}) == {
        "a": "inf",
        "b": "-inf",
        "c": "nan",
        "d": 0.333333,
        "e": 7.0,
        "f": "text",
    }


def test_counts_and_verdict() -> None:
    assert (evidence().count("passed"), evidence().count("skipped"), evidence().passes) == (1, 1, True)
    failed = Result(check="clock", theme="meters", outcome="failed", detail="slow")
    assert not evidence(results=(*evidence().results, failed)).passes


def test_answers_of_several_cases_are_put_together() -> None:
    assert judged(0.5, "x") == Answer(figures={"gap": 0.5})
    assert judged(2.0, "the sum").fault == "the sum is 2 times its derived bound away from fp64"
    assert judged(math.nan, "x").fault != ""
    mixed = together({"fp32": fine(gap=0.1), "bf16": skip("absent"), "fp16": fault("off", gap=3.0)})
    assert mixed == Answer(fault="fp16: off", note="bf16: absent", figures={"fp32 gap": 0.1, "fp16 gap": 3.0})
    assert together({"fp32": skip("a"), "bf16": skip("b"), "fp16": skip("a")}) == Answer(skip="fp32, fp16: a; bf16: b")
    assert together({"fp32": fine(), "bf16": skip("b")}).skip == ""


def test_parity_tells_what_differs() -> None:
    other = evidence(
        results=(
            Result(check="matmul", theme="products", outcome="failed", detail="off", figures={"bf16 gap": 7.0, "fp16 gap": 0.1}),
            Result(check="notes", theme="messages", outcome="passed"),
            Result(check="clock", theme="meters", outcome="passed"),
        )
    )
    rows = {row.check: row for row in compare_evidence(evidence(), other)}
    assert {name: row.verdict for name, row in rows.items()} == {"matmul": "differs", "notes": "one side only", "clock": "one side only"}
    assert rows["matmul"].figures == {"bf16 gap": (0.5, 7.0), "fp16 gap": (None, 0.1)}
    assert (rows["clock"].a, rows["clock"].b) == (None, other.results[2])
    assert [row.verdict for row in compare_evidence(evidence(), evidence())] == ["same", "same"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quick": True}, "only the quick sizes"),
        ({"commit": "b" * 40}, "other code: mpbackend 0.1.0 at aaaaaaaaaaaa against mpbackend 0.1.0 at bbbbbbbbbbbb"),
        ({"mpbackend": "0.2.0"}, "other code"),
        ({"environment": {}}, "torch 2.13.0 against unknown"),
    ],
)
def test_conditions_that_differ_are_told(changes: dict[str, Any], words: str) -> None:
    found = same_conditions(evidence(), evidence(**changes))
    assert [words in text for text in found] == [True, False] or [words in text for text in found] == [True]
    assert found[-1] == "not both are hardware: emulated against emulated"
