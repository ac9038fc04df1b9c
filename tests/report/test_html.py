from __future__ import annotations

import html.parser
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from mpbackend.capability import EVIDENCE_KINDS, LEVELS
from mpbackend.matrix import Matrix
from mpbackend.report.difference import compare_devices
from mpbackend.report.html import matrix_page, page_data, read_template, script_json
from mpbackend.report.rows import RowFilter, select_rows
from mpbackend.report.view import EVIDENCE_MEANING, SYMBOLS

NODE = shutil.which("node")
CHROMIUM = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)


class Outline(html.parser.HTMLParser):
    """Collects elements, and the text of script elements."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.inside = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside = tag == "script"
        if self.inside:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag != "script"

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.scripts[-1] += data


def page(matrix: Matrix, compare: tuple[str, str] | None = None) -> str:
    return matrix_page(matrix, matrix.rows(), compare)


def test_hostile_text_stays_text(matrix: Matrix, hostile: str) -> None:
    text = page(matrix)
    assert "alert('x')</script>" not in text
    assert "<!--" not in text.partition("</style>")[2]
    outline = Outline(text)
    assert len(outline.scripts) == 2
    data = json.loads(outline.scripts[0])
    assert data["rows"][0]["note"] == hostile
    assert hostile in [source[1] for source in data["sources"]]


def test_the_script_never_writes_markup() -> None:
    code = read_template("matrix.js") + read_template("logic.js")
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", code)


def test_hostile_names_in_the_template_are_escaped(matrix: Matrix, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpbackend.report.html.__version__", "<img src=x>")
    assert "&lt;img src=x&gt;" in page(matrix)


def test_it_needs_no_network(shipped: Matrix) -> None:
    outline = Outline(page(shipped))
    for tag, attributes in outline.tags:
        for name in ("src", "href", "action"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:")), (tag, value)
    assert not re.findall(r"\b(?:fetch|XMLHttpRequest|import|WebSocket|sendBeacon)\s*\(", outline.scripts[1])
    assert not re.findall(r"url\(|@import", read_template("matrix.css"))
    policy = next(attributes["content"] for tag, attributes in outline.tags if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'")


def test_it_is_pure(shipped: Matrix) -> None:
    assert page(shipped) == page(shipped)
    assert not re.findall(r"\d{1,2}:\d{2}:\d{2}", page(shipped).partition('id="data"')[0])


def test_the_header_counts_every_kind_of_evidence(shipped: Matrix, matrix: Matrix) -> None:
    for known in (shipped, matrix):
        text = page(known)
        counts = known.summary()["evidence"]
        for kind in EVIDENCE_KINDS:
            assert f"{EVIDENCE_MEANING[kind].replace(chr(39), '&#39;')}: <b>{counts.get(kind, 0)}</b>" in text
    assert "measured on a device: <b>1</b>" in page(matrix)


def test_every_level_has_its_word_symbol_and_style() -> None:
    style = read_template("matrix.css")
    for level in LEVELS:
        assert f".{level} {{ color: var(--{level}); background: var(--{level}-b);" in style
        assert style.count(f"--{level}: #") == 2, "light and dark"
    assert "prefers-color-scheme: dark" in style


def test_levels_in_the_page_have_symbol_and_word(matrix: Matrix) -> None:
    text = page(matrix)
    for level in LEVELS:
        assert f'<span aria-hidden="true">{SYMBOLS[level]}</span> {level}' in text


def test_fields_have_labels_and_ids_are_unique(matrix: Matrix) -> None:
    outline = Outline(page(matrix))
    ids = [attributes["id"] for _, attributes in outline.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    fields = [index for index, (tag, _) in enumerate(outline.tags) if tag in ("select", "input")]
    assert len(fields) == 6
    assert all(outline.tags[index - 1][0] == "label" for index in fields)
    assert ("html", {"lang": "en"}) in outline.tags


def test_the_data_has_every_row_and_each_source_once(shipped: Matrix) -> None:
    rows = shipped.rows()
    data = page_data(shipped, rows, None)
    assert len(data["rows"]) == len(rows)
    assert len({tuple(source) for source in data["sources"]}) == len(data["sources"])
    for row, shown in zip(rows, data["rows"], strict=True):
        family = shipped.family_of(row.arch)
        assert [data["sources"][number][1] for number in shown["sources"]] == [shipped.sources[(family, source)].location for source in row.source]
    assert [device["key"] for device in data["devices"]] == list(shipped.devices)


def test_the_comparison_is_kept(matrix: Matrix) -> None:
    assert json.loads(Outline(page(matrix, ("acme-1", "acme-2"))).scripts[0])["compare"] == ["acme-1", "acme-2"]
    assert json.loads(Outline(page(matrix)).scripts[0])["compare"] is None


def test_json_in_a_script_element() -> None:
    assert "<" not in script_json({"a": "</script>", "b": "<!--"})
    assert json.loads(script_json({"a": "</script>"})) == {"a": "</script>"}


def run_node(code: str, folder: Path) -> object:
    """Run the page's logic with ``code`` after it and return what ``code`` prints as JSON."""
    assert NODE is not None
    program = folder / "program.js"
    program.write_text(f"{read_template('logic.js')}\n{code}", encoding="utf-8")
    done = subprocess.run([NODE, str(program)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(NODE is None, reason="no node here to run the page's script")
def test_the_page_compares_as_the_report_does(shipped: Matrix, tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text(script_json(page_data(shipped, shipped.rows(), None)), encoding="utf-8")
    keys = list({model.arch: model.key for model in shipped.devices.values()}.values())
    pairs = list(zip(keys, keys[1:] + keys[:1], strict=True))
    asked = [[*pair, shipped.device(pair[0]).arch, shipped.device(pair[1]).arch] for pair in pairs]
    code = f"""
    const data = JSON.parse(require("fs").readFileSync({json.dumps(str(tmp_path / "data.json"))}, "utf-8"));
    const pairs = {json.dumps(asked)};
    const answer = pairs.map(([, , a, b]) => compareRows(data.rows, a, b, data.order).map((e) => [e.key, e.status, e.first.length, e.second.length]));
    console.log(JSON.stringify(answer));
    """
    expected = [[[list(entry.key), entry.status, len(entry.first), len(entry.second)] for entry in compare_devices(shipped, *pair)] for pair in pairs]
    assert run_node(code, tmp_path) == expected


@pytest.mark.skipif(NODE is None, reason="no node here to run the page's script")
def test_the_page_filters_as_the_command_does(shipped: Matrix, tmp_path: Path) -> None:
    data = page_data(shipped, shipped.rows(), None)
    (tmp_path / "data.json").write_text(script_json(data), encoding="utf-8")
    arch = shipped.rows()[0].arch
    filters = [{"op": "conv"}, {"operand": "bf16"}, {"arch": arch, "op": "matmul"}, {"levels": ["absent"]}, {"text": "NO row has these words"}]
    wanted = [RowFilter(op="conv"), RowFilter(operand="bf16"), RowFilter(archs=(arch,), op="matmul"), RowFilter(level="absent")]
    code = f"""
    const data = JSON.parse(require("fs").readFileSync({json.dumps(str(tmp_path / "data.json"))}, "utf-8"));
    for (const row of data.rows) row.words = searchable(row, data);
    console.log(JSON.stringify({json.dumps(filters)}.map((filter) => data.rows.filter((row) => passes(row, filter)).length)));
    """
    assert run_node(code, tmp_path) == [*(len(select_rows(shipped, one)) for one in wanted), 0]


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here to open the page")
def test_a_browser_shows_the_rows_without_an_error(matrix: Matrix, tmp_path: Path) -> None:
    assert CHROMIUM is not None
    (tmp_path / "page.html").write_text(page(matrix, ("acme-1", "acme-2")), encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", "--dump-dom"]
    for fragment, rows in (("", 5), ("#device=acme-1", 5), ("#op=conv", 1)):
        address = f"file://{tmp_path / 'page.html'}{fragment}"
        done = subprocess.run([CHROMIUM, *options, address], capture_output=True, text=True, timeout=120, check=True)
        assert "CONSOLE" not in done.stderr
        body = done.stdout.partition("<tbody")[2].partition("</tbody>")[0]
        shown = [tag for tag in re.findall(r"<tr [^>]*>", body) if "hidden" not in tag]
        assert len(shown) == rows, fragment
        assert "<script>alert" not in done.stdout.replace("\\u003c", "")
