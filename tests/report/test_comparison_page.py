from __future__ import annotations

import html.parser
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mpbackend.decisions import Decision
from mpbackend.device import Device
from mpbackend.observe.record import ClassReading, RecipeName, Recorded, Run, RunRecord, StepRow, SwitchReading
from mpbackend.observe.record_writer import count_totals
from mpbackend.report.comparison_page import VERDICT_SYMBOLS, Side, Verdict, comparison_page
from mpbackend.report.curves import gap_curve, numbers_table, run_names
from mpbackend.report.index_page import Link, Outcome, index_page
from mpbackend.report.view import Facts, Listing

HOSTILE = """</script></style></title><script>alert('x')</script><img src=x onerror=alert(1)>" onmouseover="alert(2)' \x1b[2J\u202e{{ 7 * 7 }}"""


def recorded(recipe: str = "bf16", steps: Sequence[StepRow] = (), **changes: Any) -> Recorded:
    """Return a record; ``changes`` replace its fields."""
    record = RunRecord(
        run=Run(id="x", seed=1),
        environment={"torch": "2.13.0"},
        device=Device(key="dev", arch="arch", name="name"),
        recipe=RecipeName(text=recipe, hash="0", granted=recipe),
        plan=(Decision(role="compute.forward", op="matmul", asked=recipe, granted=recipe, level="native", reason="a reason"),),
        classes={"parameters": ClassReading(asked="fp32", observed={"fp32": 2048})},
        memory={"peak": 2**20},
        memory_basis="resident set",
        totals=count_totals(steps),
    )
    return Recorded(msgspec.structs.replace(record, **changes), tuple(steps))


def rows(losses: Sequence[float | str], scale: float = 1.0) -> tuple[StepRow, ...]:
    return tuple(StepRow(step=n, loss=loss, grad_norm=1.0, scale=scale, stepped=True, ms=float(n)) for n, loss in enumerate(losses, 1))  # type: ignore[arg-type] # words


class Outline(html.parser.HTMLParser):
    """Collects tags with their attributes, and the text in the page."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def pair(**changes: Any) -> list[Side]:
    return [Side("baseline", recorded("fp32", rows([3.0, 2.0, 1.0]))), Side("candidate", recorded("bf16", rows([3.0, 2.5, 1.0]), **changes))]


def assert_inert(page: str) -> None:
    """Assert that a page holds no script, no handler and nothing that loads."""
    outline = Outline(page)
    assert {tag for tag, _ in outline.tags} & {"script", "img", "iframe", "object", "embed", "base", "form"} == set()
    for tag, attributes in outline.tags:
        assert not [name for name in attributes if name.startswith("on") or name == "src"], (tag, attributes)
        assert (attributes.get("href") or "#").startswith(("#", "data:,")), (tag, attributes)
    assert "<script" not in page.lower()
    assert "\x1b" not in page
    assert "\u202e" not in page


def test_the_verdict_comes_first() -> None:
    verdict = Verdict("bf16 against fp32", "different", ["because"], [("scope", "seed 1")], [Facts("Conditions", [("data", "same")])])
    body = comparison_page(pair(), [verdict]).partition("<main")[2]
    order = [
        "different</span>",
        "because",
        "seed 1",
        ">Curves<",
        ">Runs side by side<",
        ">Classes",
        ">Decisions that differ<",
        ">Memory<",
        ">Conditions<",
        ">Raw numbers",
    ]
    assert [body.count(text) > 0 for text in order] == [True] * len(order)
    assert [body.index(text) for text in order] == sorted(body.index(text) for text in order)


def test_runs_are_shown_without_a_verdict() -> None:
    page = comparison_page(pair())
    assert 'class="verdict' not in page
    assert page.count('class="chart"') == 5


@pytest.mark.parametrize("word", VERDICT_SYMBOLS)
def test_a_verdict_is_told_by_sign_word_and_color(word: str) -> None:
    page = comparison_page(pair(), [Verdict("a", word, [], [], [])])
    assert f'<span aria-hidden="true">{VERDICT_SYMBOLS[word]}</span> {word}' in page
    kind = re.findall(r'<article class="verdict ([\w-]+)"', page)
    style = page.partition("<style>")[2].partition("</style>")[0]
    assert f".{kind[0]} {{ --v: var(--" in style


def test_only_what_differs_is_listed() -> None:
    page = comparison_page(pair(switches={"conv.reduced": SwitchReading(before="false", set="true", read_back="true")}))
    switches = page.partition(">Switches that differ</h2>")[2].partition("</table>")[0]
    assert "conv.reduced" in switches
    assert "true (before false)" in switches
    assert ">Environment and settings that differ</h2>" not in page
    same = comparison_page([Side("baseline", recorded()), Side("candidate", recorded())])
    assert "that differ</h2>" not in same


def test_decisions_that_differ_have_both_reasons() -> None:
    decisions = page_part(comparison_page(pair()), "Decisions that differ")
    assert "fp32, native: a reason" in decisions
    assert "bf16, native: a reason" in decisions


def page_part(page: str, title: str) -> str:
    return page.partition(f">{title}</h2>")[2].partition("</table>")[0]


def test_classes_stand_side_by_side_and_are_marked() -> None:
    other = {"parameters": ClassReading(asked="bf16 + fp32 master", observed={"bf16": 1024})}
    classes = page_part(comparison_page(pair(classes=other)), "Classes, asked and observed")
    assert classes.count('class="state different"') == 2
    assert "bf16 1.0 KiB" in classes


def test_nothing_of_a_record_becomes_markup() -> None:
    text = dict.fromkeys([HOSTILE], HOSTILE)
    run = recorded(
        HOSTILE,
        [StepRow(step=1, loss=1.0, stepped=False, reason=HOSTILE, metrics={HOSTILE: 1.0})],
        run=Run(id=HOSTILE, seed=3),
        environment=text,
        device=Device(key=HOSTILE, arch=HOSTILE, name=HOSTILE, versions=text),
        plan=(Decision(role=HOSTILE, op=HOSTILE, asked=HOSTILE, granted=HOSTILE, level="native", reason=HOSTILE, source=HOSTILE),),
        switches={HOSTILE: SwitchReading(before=HOSTILE)},
        classes={HOSTILE: ClassReading(asked=HOSTILE, observed={HOSTILE: 1})},
        settings=text,
        memory={HOSTILE: 1},
        memory_basis=HOSTILE,
        counters={HOSTILE: 1},
        notes=(HOSTILE,),
    )
    verdict = Verdict(HOSTILE, "different", [HOSTILE], [(HOSTILE, HOSTILE)], [Facts(HOSTILE, [(HOSTILE, HOSTILE)]), Listing(HOSTILE, [HOSTILE])])
    page = comparison_page([Side("baseline", recorded()), Side(HOSTILE, run)], [verdict, verdict])
    assert_inert(page)
    assert "49" not in page.partition("</style>")[2].partition("alert")[0]
    assert "alert('x')" in Outline(page).text


def test_a_word_that_is_no_verdict_gets_no_class_of_its_own() -> None:
    page = comparison_page(pair(), [Verdict("a", 'x" onclick="alert(1)', [], [], [])])
    assert_inert(page)


def test_ids_are_unique_and_headings_are_in_order() -> None:
    outline = Outline(comparison_page(pair(), [Verdict("a", "equivalent", ["b"], [("x", "y")], [Facts("c", [("d", "e")])])]))
    ids = [attributes["id"] for _, attributes in outline.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    levels = [int(tag[1]) for tag, _ in outline.tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))


def test_it_is_pure() -> None:
    assert comparison_page(pair()) == comparison_page(pair())


def test_long_records_make_small_pages() -> None:
    long = tuple(StepRow(step=n, loss=3.0 / n, grad_norm=1.0 + n % 7, scale=2.0**16, stepped=True, ms=5.0 + n % 3) for n in range(1, 100_001))
    page = comparison_page([Side("baseline", recorded("fp32", long)), Side("candidate", recorded("bf16", long))])
    assert len(page) < 300_000


def test_names_tell_runs_apart() -> None:
    base = recorded("fp32")
    assert run_names([base, recorded("bf16")], ["baseline", "candidate"]) == ["baseline, fp32", "candidate, bf16"]
    seeds = [recorded("fp32", run=Run(id=str(seed), seed=seed)) for seed in (1, 2)]
    assert run_names(seeds, ["baseline"] * 2) == ["baseline, fp32, seed 1", "baseline, fp32, seed 2"]
    assert run_names([base, base], ["baseline"] * 2) == ["baseline, fp32 (1)", "baseline, fp32 (2)"]


def test_a_gap_is_taken_where_both_runs_have_one_loss() -> None:
    first = recorded(steps=rows([3.0, 2.0, "nan", 1.0]))
    second = recorded(steps=(*rows([3.5, 2.0, 1.0]), StepRow(step=2, loss=9.0, stepped=True)))
    points = gap_curve(first, second, "gap").points
    assert points[0] == (1, 0.5)
    assert [step for step, _ in points] == [1, 3]
    assert str(points[1][1]) == "nan"


def test_raw_numbers_keep_the_first_and_the_last_step() -> None:
    runs = [recorded(steps=rows([float(n) for n in range(1000)])) for _ in range(2)]
    table = numbers_table(runs, ["a", "b"])
    assert [row[0] for row in (table.rows[0], table.rows[-1])] == ["1", "1,000"]
    assert table.title == "Raw numbers: 20 of 1000 steps"
    assert len(table.rows) == 40


def test_the_index_links_and_shows_verdicts() -> None:
    link = Link("comparison.html", "Comparison", "of runs")
    page = index_page("Demo", HOSTILE, [link], [Outcome("bf16", "equivalent", HOSTILE)], [Link("fp32/record.json", "fp32", HOSTILE)], [])
    outline = Outline(page)
    assert [attributes["href"] for tag, attributes in outline.tags if tag == "a"] == ["#pages", "comparison.html", "fp32/record.json"]
    assert "= equivalent bf16" in outline.text
    assert_inert(page.replace('href="comparison.html"', 'href="#"').replace('href="fp32/record.json"', 'href="#"'))


def test_templates_load_nothing() -> None:
    folder = Path(__file__).parents[2] / "mpbackend/report/templates"
    for name in ("comparison.html", "index.html"):
        text = (folder / name).read_text(encoding="utf-8")
        assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in text
        assert "script" not in text
    assert not re.findall(r"url\(|@import", (folder / "comparison.css").read_text(encoding="utf-8"))
