"""Links between pages resolve, to files and to headings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from docs.generate import PAGES, ROOT, written_pages

LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
EXTERNAL = ("http://", "https://", "mailto:")

ALSO = ("CONTRIBUTING.md", "CHANGELOG.md", "docs/examples/third_party_plugin/README.md")


def slug(heading: str) -> str:
    """Return the anchor that GitHub gives a heading: lower case, punctuation left out, blanks as hyphens."""
    text = LINK.sub("]", heading).replace("[", "").replace("]", "") if "](" in heading else heading
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


def anchors(text: str) -> set[str]:
    """Return the anchors of a page."""
    return {slug(heading) for heading in HEADING.findall(FENCE.sub("", text))}


def dead_links(page: Path, text: str, root: Path) -> list[str]:
    """Return the links of a page that lead to no file inside of ``root``, or to no heading of it."""
    dead: list[str] = []
    for target in LINK.findall(CODE.sub("``", FENCE.sub("", text))):
        if target.startswith(EXTERNAL):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        found = file.exists() and file.is_relative_to(root)
        if not found or (anchor and anchor not in anchors(file.read_text(encoding="utf-8"))):
            dead.append(target)
    return dead


def pages() -> Mapping[str, Path]:
    """Return every page by its name."""
    paths = {*written_pages(), *(ROOT / name for name in (*PAGES, *ALSO))}
    return {str(path.relative_to(ROOT)): path for path in sorted(paths)}


@pytest.mark.parametrize("name", pages())
def test_links_resolve(name: str) -> None:
    path = pages()[name]
    assert dead_links(path, path.read_text(encoding="utf-8"), ROOT) == []


def test_every_page_is_reached_from_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / target.partition("#")[0]).resolve() for target in LINK.findall(index.read_text(encoding="utf-8"))}
    docs = {path for path in (ROOT / "docs").rglob("*.md") if "examples" not in path.parts and path != index}
    assert docs - linked == set()


@pytest.mark.parametrize("link", ["gone.md", "#gone", "other.md#gone", "../outside.md", "other.md#a-headin"])
def test_planted_dead_link_is_found(link: str, tmp_path: Path) -> None:
    (tmp_path / "outside.md").write_text("x", encoding="utf-8")
    root = tmp_path / "root"
    root.mkdir()
    page = root / "page.md"
    (root / "other.md").write_text("# A heading: `code`, and [[more]]\n", encoding="utf-8")
    page.write_text("# Title\n", encoding="utf-8")
    assert dead_links(page, f"see [this]({link})", root) == [link]


@pytest.mark.parametrize("link", ["other.md", "#title", "other.md#a-heading-code-and-more", "https://example.org/x"])
def test_live_link_passes(link: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    (tmp_path / "other.md").write_text("# A heading: `code`, and [[more]]\n", encoding="utf-8")
    page.write_text("# Title\n", encoding="utf-8")
    assert dead_links(page, f"see [this]({link})", tmp_path) == []
