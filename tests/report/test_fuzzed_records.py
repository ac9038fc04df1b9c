"""Records that a stranger wrote, through load, compare and page: a verdict or one error, a page without markup of theirs, in bounded size."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mpbackend.comparison.verdict import compare
from mpbackend.decisions import Decision
from mpbackend.device import Device
from mpbackend.errors import MpbackendError
from mpbackend.matrix import Matrix
from mpbackend.observe.record import RECORD_FILE, STEPS_FILE, ClassReading, ComputeReading, RecipeName, Run, RunRecord, StepRow, SwitchReading, load_record
from mpbackend.report import markdown, terminal
from mpbackend.report.comparison import comparison_document, comparison_report
from mpbackend.report.comparison_page import Side, comparison_page, judged
from mpbackend.report.runs import runs_report

SEED = 20261130
TEXTS = (
    "",
    "x",
    "</script><script>alert(1)</script>",
    "\" onload='alert(1)'",
    "<img src=x onerror=alert(1)>",
    "--><svg/onload=alert(1)>",
    "{{ 7 * 7 }}{% include 'x' %}",
    "\x1b]0;t\x07\u202e\u0000\u2028",
    "javascript:alert(1)",
    "a" * 3000,
    "漢字 \U0001f600",
    "fp32",
    "bf16",
    "_.-,|*",
)
FLOATS = (0.0, 1.0, -1.0, 1.5, 1e308, -1.7e308, 5e-324, 1e-300, 65536.0, 2.0**63, 3.0000001)
WORDS = ("nan", "inf", "-inf")
INTEGERS = (0, 1, 2, -1, 7, 2**31, 2**63, 2**64 - 1, 10**30, 10**400, -(10**1000))
FREE = ("environment", "versions", "switches", "classes", "observed", "shares", "settings", "conversion", "fingerprints", "memory", "counters", "metrics")
"""Fields whose keys are anybody's."""
CLOSED = ("schema", "kind", "level", "grant", "pair", "usable")
"""Fields with a few allowed values; another one is refused."""
OPTIONAL = ("loss", "grad_norm", "lr", "ms", "seed", "memory_bytes", "peak", "allocated")
WORDED = ("loss", "grad_norm", "lr", "ms", "val")

HUGE = 3_000_000
"""Characters of a page that a small record must stay far below."""


def whole() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a record with every part in use, as plain data."""
    record = RunRecord(
        run=Run(id="run", seed=1),
        environment={"torch": "2.13.0", "threads": "2"},
        device=Device(key="h100", arch="sm_90", name="name", backend="cpu", type="cpu", versions={"torch": "2.13.0"}, memory_bytes=2**34),
        recipe=RecipeName(text="fp32", hash="0", granted="fp32"),
        plan=(
            Decision(role="compute.forward", op="matmul", asked="fp32", granted="fp32", level="native", reason="r", source="s"),
            Decision(role="loss_scale.mode", asked="dynamic", granted="dynamic", level="storage", reason="r"),
        ),
        switches={"matmul.reduced": SwitchReading(before="false", set="true", read_back="true", after="false")},
        classes={"parameters": ClassReading(asked="fp32", observed={"fp32": 100}), "gradients": ClassReading(asked="fp32")},
        compute=ComputeReading(shares={"fp32": 0.75, "bf16": 0.25}, flops=10, casts=1, cast_bytes=10, level="native"),
        settings={"micro_batches": "1", "clip_norm": "1.0"},
        conversion=({"layer": "x", "what": "padded"},),
        fingerprints={"data": "1", "weights": "2"},
        memory={"allocated": 1, "peak": 2},
        memory_basis="resident set",
        counters={"skips": 1},
        notes=("note",),
    )
    steps = [
        StepRow(step=n, loss=3.0 / n, grad_norm=1.0, scale=65536.0, stepped=n != 3, lr=1e-3, ms=5.0, samples=8, tokens=64, metrics={"val": 1.0 / n})
        for n in range(1, 9)
    ]
    document, rows = json.loads(msgspec.json.encode(record)), json.loads(msgspec.json.encode(steps))
    return document, rows


def mutate(value: Any, source: random.Random, share: float, name: str = "", *, wild: bool = False) -> Any:
    """Return plain data in which a share of what a stranger may choose is chosen again.

    Args:
        value: the data.
        source: of the choices.
        share: probability that a leaf is replaced, and in proportion that a key or an item is.
        name: field that holds it.
        wild: break the rules of the schema now and then, too.
    """
    if wild and source.random() < share / 20:
        return source.choice((None, [], {}, True, "x", -1, 0.5))
    if isinstance(value, dict):
        renamed = {(source.choice(TEXTS) if name in FREE and source.random() < share else key): (key, item) for key, item in value.items()}
        return {key: mutate(item, source, share, old, wild=wild) for key, (old, item) in renamed.items() if name not in FREE or source.random() > share / 4}
    if isinstance(value, list):
        items = [mutate(item, source, share, name, wild=wild) for item in value if name in CLOSED or source.random() > share / 4]
        return items * 2 if name not in CLOSED and source.random() < share else items
    if name in CLOSED or source.random() >= share:
        return value
    if name in OPTIONAL and source.random() < 0.2:
        return None
    if isinstance(value, bool):
        return source.random() < 0.5
    if isinstance(value, str):
        return source.choice(TEXTS)
    if isinstance(value, int):
        return source.choice(INTEGERS)
    return source.choice((*FLOATS, *WORDS) if name in WORDED else FLOATS)


def write(folder: Path, source: random.Random) -> Path:
    """Write a fuzzed record; some of its bytes are flipped now and then."""
    folder.mkdir(exist_ok=True)
    record, steps = whole()
    share = source.choice((0.0, 0.02, 0.1, 0.4))
    wild = source.random() < 0.15
    content = json.dumps(mutate(record, source, share, wild=wild)).encode()
    lines = b"".join(json.dumps(mutate(row, source, share / 2, wild=wild)).encode() + b"\n" for row in (steps if source.random() < 0.95 else []))
    if wild and source.random() < 0.2:
        place = source.randrange(len(content))
        content = content[:place] + source.randbytes(2) + content[place + 2 :]
    (folder / RECORD_FILE).write_bytes(content)
    (folder / STEPS_FILE).write_bytes(lines)
    return folder


def inert(page: str) -> bool:
    """Tell whether every tag of a page is one of the templates' and every attribute is quoted by them."""
    body = page.partition("</style>")[2]
    return not any(mark in body.lower() for mark in ("<script", "<img", "<svg/", "<iframe", "\x1b", "\u202e", "\u2028", "\x00"))


def outcome(folders: tuple[Path, Path], matrix: Matrix) -> str:
    """Run two folders through everything that shows them; return the verdict, or ``refused``."""
    try:
        runs = [load_record(folder) for folder in folders]
        found = compare(*folders, matrix=matrix)
    except MpbackendError as error:
        assert "\n" not in str(error)
        return "refused"
    page = comparison_page([Side("baseline", runs[0]), Side("candidate", runs[1])], [judged(found)])
    assert inert(page)
    assert len(page) < HUGE
    report = comparison_report(found)
    for text in (terminal.render(report, 80), markdown.render(report), terminal.render(runs_report(runs), 80)):
        assert "\x1b" not in text
    msgspec.json.encode(comparison_document(found))
    return found.verdict


def survive(tmp_path: Path, matrix: Matrix, count: int, first: int = 0) -> None:
    outcomes: dict[str, int] = {}
    for number in range(first, first + count):
        source = random.Random(SEED + number)
        folders = (write(tmp_path / "a", source), write(tmp_path / "b", source))
        try:
            word = outcome(folders, matrix)
        except Exception:
            print(f"seed {SEED + number}")
            raise
        outcomes[word] = outcomes.get(word, 0) + 1
    print(outcomes)
    assert outcomes["refused"] < 0.4 * count, "most records must get through, or nothing was tested"
    assert len(outcomes) >= 3


def test_500_fuzzed_records(tmp_path: Path, shipped: Matrix) -> None:
    survive(tmp_path, shipped, 250)  # two records each


@pytest.mark.slow
def test_5000_fuzzed_records(tmp_path: Path, shipped: Matrix) -> None:
    survive(tmp_path, shipped, 2500, first=1000)


def test_a_page_that_escapes_nothing_is_caught(tmp_path: Path, shipped: Matrix, monkeypatch: pytest.MonkeyPatch) -> None:
    from markupsafe import Markup

    monkeypatch.setattr("mpbackend.report.markup.text", Markup)
    with pytest.raises(AssertionError):
        survive(tmp_path, shipped, 100)
