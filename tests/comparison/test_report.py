"""Comparisons as text, Markdown and JSON: the verdict first, everything named, nothing that acts."""

from __future__ import annotations

import json
import unicodedata
from typing import Any

import msgspec
import pytest

from mpbackend.cli.options import json_text
from mpbackend.comparison.verdict import Comparison, compare
from mpbackend.observe.record import Recorded
from mpbackend.report import markdown, terminal
from mpbackend.report.comparison import comparison_document, comparison_report, fold
from mpbackend.report.view import Table
from tests.comparison.building import falling, plan, recorded, rows, switch

HOSTILE = "\x1b[2J</script><script>alert(1)</script> | *a* \u202e\u2028 `x`"


def run(shift: float = 0.0, seed: int = 1, **changes: Any) -> Recorded:
    return recorded([loss + shift for loss in falling()], seed=seed, **changes)


def several() -> Comparison:
    return compare([run(0.0, seed, name=f"a{seed}") for seed in (1, 2, 3)], [run(1e-4 * seed, seed, name=f"b{seed}", recipe="bf16") for seed in (1, 2, 3)])


CASES: dict[str, Any] = {
    "equivalent": several,
    "single": lambda: compare(run(), run(0.01, recipe="bf16")),
    "not comparable": lambda: compare(run(), run(seed=2)),
    "repeats": lambda: compare([run(name="a"), run(1e-4, name="b")], run(2e-4, name="c")),
    "nothing": lambda: compare(recorded([]), recorded([])),
    "different": lambda: compare(run(), recorded([*falling(), "nan"], plan=plan("fp32", compute__forward="fp16"))),
}


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("name", CASES)
def test_a_comparison_fits_and_begins_with_its_verdict(name: str, width: int) -> None:
    found = CASES[name]()
    text = terminal.render(comparison_report(found), width)
    assert max(map(len, text.splitlines())) <= width
    assert found.verdict in text.splitlines()[0]


@pytest.mark.parametrize("name", CASES)
def test_every_row_has_a_cell_for_every_column(name: str) -> None:
    tables = [block for block in comparison_report(CASES[name]()).blocks if isinstance(block, Table)]
    assert tables
    for table in tables:
        assert {len(row) for row in table.rows} == {len(table.columns)}, table.title


def test_the_text_holds_what_the_verdict_rests_on() -> None:
    text = terminal.render(comparison_report(several()), 200)
    for part in (
        "= equivalent: bf16 on h100 against fp32 on h100",
        "recipe: one device, under recipes that may differ",
        "seeds 1, 2, 3, 400 steps",
        "(0.1% of the baseline)",
        "two one-sided t tests, paired by seed, 2 degrees of freedom",
        "interval",
        "runs needed",
        "decision: compute (matmul)",
        "which decides nothing here",
        "steps x step time",
        "The five classes",
        "learning rates",
    ):
        assert part in text, part


def test_a_condition_that_differs_says_why() -> None:
    found = compare(run(), run(seed=2))
    text = markdown.render(comparison_report(found))
    assert "| seed | ≠ different | yes | 1 | 2 | it decides weights, order of the data and dropout |" in text
    assert "| optimizers | = same | yes | AdamW | same |  |" in text
    assert "| steps | = same | no | 400 | same |  |" in text, "why is asked of what is not the same"


def test_a_noise_floor_and_limits_are_shown() -> None:
    text = terminal.render(comparison_report(CASES["repeats"]()), 200)
    assert "2 repeats, deviation 7.07" in text
    assert "cannot speak about other seeds" in text
    assert "unknown: no run was repeated with its seed" in terminal.render(comparison_report(CASES["single"]()), 200)


def test_faster_by_the_step_and_later_to_quality_is_named() -> None:
    slow = recorded(steps=rows([4.0 - step / 400 for step in range(800)], ms=8.0), recipe="bf16")
    fast = recorded(steps=rows([4.0 - step / 200 for step in range(400)], ms=10.0))
    text = terminal.render(comparison_report(compare(fast, slow)), 200)
    assert "faster per step" in text
    found = compare(fast, recorded(steps=rows([4.0 - step / 210 for step in range(400)], ms=9.9), recipe="bf16"))
    assert found.speed.words == "faster per step, and never at the quality of the baseline"


def test_the_document_is_json_with_words_for_what_json_lacks() -> None:
    broken = compare(run(), recorded([*falling(399), "inf"]))
    document = json.loads(json_text(comparison_document(broken)))
    assert document["verdict"] == "different"
    assert document["candidate"][0]["quality"] == "inf"
    assert set(document) == set(Comparison.__struct_fields__)
    zero = json.loads(json_text(comparison_document(compare(recorded([0.0]), recorded([1.0])))))
    assert zero["curves"][0]["first_gap"] == "inf"


def test_numbers_beyond_64_bits_are_words() -> None:
    document = json.loads(json_text(comparison_document(compare(run(seed=2**64), run(seed=2**64)))))
    assert document["baseline"][0]["seed"] == "1.8446744073709552e+19"
    assert json.loads(json_text(comparison_document(compare(run(seed=2**62), run(seed=2**62)))))["baseline"][0]["seed"] == 2**62


def test_passes_that_say_the_same_are_folded() -> None:
    names = [difference.name for difference in fold(compare(run(), run(0.01, recipe="bf16")).differences)]
    assert names[:2] == ["compute (matmul)", "compute.forward (conv)"]
    one = compare(run(), run(plan=plan("fp32", compute__dgrad="bf16", compute__wgrad="bf16")))
    assert "compute.{dgrad,wgrad} (matmul)" in [difference.name for difference in fold(one.differences)]


def hostile(value: Any) -> Any:
    """Return plain data in which every text that is free is hostile."""
    if isinstance(value, dict):
        return {name: hostile(item) for name, item in value.items()}
    if isinstance(value, list):
        return [hostile(item) for item in value]
    return HOSTILE if isinstance(value, str) and value not in ("nan", "inf", "hardware", "native", "granted", "storage") else value


def test_what_a_stranger_wrote_shows_and_does_not_act() -> None:
    source = run(switches={HOSTILE: switch("a")}, notes=("note",), conversion=({"layer": "x", "action": "converted"},))
    record = msgspec.convert(hostile(msgspec.to_builtins(source.record)), type(source.record))
    found = compare(Recorded(record, source.steps), run(0.01))
    report = comparison_report(found)
    outputs = [terminal.render(report, 100), markdown.render(report), json_text(comparison_document(found))]
    for text in outputs:
        assert [c for c in text if c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")] == []
        assert "x1b" in text.replace("u001b", "x1b")
    assert "<script>" not in outputs[1]
