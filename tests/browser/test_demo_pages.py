"""The pages of a demo in a browser: what a reader does first, at the smallest and the largest width, in light and in dark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mpbackend.comparison.verdict import compare
from tests.support.browsing import SCHEMES, STEPS, WIDTHS, Open, Watched, stop_outside

PAGES = ("index.html", "comparison.html", "matrix.html", "matrix.html#view=grid", "matrix.html#device=h100")

# Elements that reach beyond the window and stand in nothing that scrolls; the heads of tables are hidden where their lines are cards.
WIDER = """(width) => [...document.querySelectorAll("main *")]
  .filter((element) => element.checkVisibility() && element.getBoundingClientRect().right > width + 1 && !element.closest(".scroll, .wide, thead")).length"""

# Contrast of text by WCAG 2.2, 1.4.3, of every element with text of its own; a background that is not opaque lies on the one behind it.
CONTRAST = """() => {
  const parse = (text) => { const n = text.match(/[\\d.]+/g).map(Number); return n.length > 3 ? n : [...n, 1]; };
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const over = (top, below) => top.slice(0, 3).map((c, i) => c * top[3] + below[i] * (1 - top[3])).concat(1);
  const ground = (element) => {
    const own = parse(getComputedStyle(element).backgroundColor);
    return own[3] === 1 ? own : over(own, element.parentElement ? ground(element.parentElement) : [255, 255, 255, 1]);
  };
  const low = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || !element.checkVisibility() || element.closest("script, svg, .skip, option, optgroup")) continue;
    const style = getComputedStyle(element);
    if (!/^rgb/.test(style.color)) continue;
    const back = ground(element);
    const [a, b] = [light(over(parse(style.color), back)), light(back)];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) low.push(`${element.tagName}.${element.className} ${ratio.toFixed(2)} ${element.textContent.trim().slice(0, 30)}`);
  }
  return [...new Set(low)].slice(0, 10);
}"""


def verdict_words(page: Any) -> list[str]:
    return [word.strip() for word in page.locator(".verdict .word").all_inner_texts()]


def test_a_reader_goes_from_the_first_page_to_the_verdict(watched: Open, demo: Path) -> None:
    window = watched()
    page = window.open(demo / "index.html")
    words = verdict_words(page)
    page.get_by_role("link", name="Comparison of the runs").click()
    assert page.url.endswith("comparison.html")
    assert verdict_words(page) == words
    expected = [compare(demo / "fp32", demo / name) for name in ("bf16", "fp16")]
    assert [word.partition(" ")[2] for word in words] == [found.verdict for found in expected]
    reasons = page.locator(".verdict").first.locator("li").all_inner_texts()
    assert reasons == list(expected[0].reasons)
    assert page.locator("svg.chart").count() == 5
    assert page.locator("svg.chart").first.get_attribute("aria-labelledby")


def test_a_reader_filters_the_matrix(watched: Open, demo: Path) -> None:
    page = watched().open(demo / "index.html")
    page.get_by_role("link", name="Capability matrix").click()
    page.get_by_role("button", name="Browse rows").click()
    total = page.locator("#results tbody tr:visible").count()
    page.get_by_label("Operation").select_option("conv")
    shown = page.locator("#results tbody tr:visible")
    assert 0 < shown.count() < total
    assert set(shown.locator('td[data-label="Operation"]').all_inner_texts()) == {"conv"}
    assert page.locator("#count").inner_text() == f"{shown.count()} of {total} rows"
    page.get_by_label("Text").fill("no row says this")
    assert shown.count() == 0
    page.get_by_role("button", name="Reset").click()
    assert shown.count() == total


def test_a_reader_asks_why_a_recipe_is_refused(watched: Open, demo: Path) -> None:
    page = watched().open(demo / "matrix.html")
    page.get_by_role("button", name="Recipes on devices").click()
    page.locator("#device").select_option("ascend-910b3")
    [line] = page.locator("#results tbody tr").all()
    refused = line.locator('td[data-label="fp8"]')
    assert "absent" in refused.inner_text()
    refused.get_by_role("button", name="why").click()
    assert "matmul in fp8_e4m3 is absent" in refused.locator(".more").inner_text()
    page.keyboard.press("Escape")
    assert not refused.locator(".more").is_visible()
    assert page.url.endswith("#device=ascend-910b3&view=grid")
    page.reload()
    assert page.locator("#results tbody tr").count() == 1


def test_a_reader_leaves_out_what_needs_later_software(watched: Open, demo: Path) -> None:
    page = watched().open(demo / "matrix.html", "#device=h100")
    rows = page.locator("#results tbody tr:visible")
    total = rows.count()
    choice = page.get_by_label("cuda")
    choice.select_option("0")
    assert 0 < rows.count() < total
    assert "software=cuda%3A0" in page.url
    choice.select_option("")
    assert rows.count() == total


def test_the_header_says_what_was_measured(watched: Open, demo: Path) -> None:
    page = watched().open(demo / "matrix.html")
    assert "measured on a device: " in page.locator(".evidence").inner_text()


def test_records_are_linked(watched: Open, demo: Path) -> None:
    window = watched()
    page = window.open(demo / "index.html")
    for name in ("fp32", "bf16", "fp16"):
        page.get_by_role("link", name=name, exact=True).click()
        record = json.loads(page.locator("body").inner_text())
        assert (record["recipe"]["text"], record["totals"]["steps"]) == (name, STEPS)
        page.go_back()


def test_the_keyboard_reaches_everything_that_scrolls_or_opens(watched: Open, demo: Path) -> None:
    page = watched().open(demo / "comparison.html")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "curves"
    seen: set[str] = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("document.activeElement.tagName + ' ' + document.activeElement.className"))
        if page.evaluate("document.activeElement === document.querySelector('details:last-of-type > summary')"):
            break
    assert {"DIV scroll", "SUMMARY "} <= seen
    assert page.locator("details:last-of-type .scroll").is_visible() is False
    page.keyboard.press("Enter")
    assert page.locator("details:last-of-type .scroll").is_visible()


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_pages_fit_and_can_be_read(watched: Open, demo: Path, pictures: Path, width: int, scheme: str, name: str) -> None:
    file, _, fragment = name.partition("#")
    page = watched(width, scheme).open(demo / file, f"#{fragment}" if fragment else "")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    wide = page.evaluate(WIDER, width)
    assert wide == 0
    assert page.evaluate(CONTRAST) == []
    title = "-".join(part for part in (Path(file).stem, fragment.partition("=")[2], str(width), scheme) if part)
    page.screenshot(path=pictures / f"{title}.png", full_page=file != "matrix.html")


def test_a_page_that_asks_for_something_is_caught(browser: Any, tmp_path: Path) -> None:
    """The watch itself: a page that loads from elsewhere and fails is seen."""
    (tmp_path / "bad.html").write_text('<img src="https://192.0.2.1/x.png"><script>console.log("said"); throw new Error("thrown")</script>', encoding="utf-8")
    context = browser.new_context()
    stop_outside(context)
    window = Watched(context)
    window.open(tmp_path / "bad.html")
    context.close()
    assert "https://192.0.2.1/x.png" in window.requests
    assert "said" in window.said
    assert "thrown" in window.said
