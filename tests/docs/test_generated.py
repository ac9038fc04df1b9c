"""Generated pages and sections equal what the code makes of them now; `make docs` writes them again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.generate import PAGES, ROOT, SECTIONS, fill_sections, written_pages
from docs.generator import markdown

MARKER = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)


@pytest.mark.parametrize("name", PAGES)
def test_page_is_up_to_date(name: str) -> None:
    assert (ROOT / name).read_text(encoding="utf-8") == PAGES[name]()


@pytest.mark.parametrize("path", written_pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_sections_are_up_to_date(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert fill_sections(text) == text


def test_every_section_is_shown_and_known() -> None:
    shown = [name for path in written_pages() for name in MARKER.findall(path.read_text(encoding="utf-8"))]
    assert sorted(set(shown)) == sorted(SECTIONS)


def test_an_old_section_is_replaced() -> None:
    old = "a\n\n<!-- generated: counts -->\n\nold\n\n<!-- end -->\n\nb\n"
    assert fill_sections(old) == f"a\n\n<!-- generated: counts -->\n\n{SECTIONS['counts']()}\n\n<!-- end -->\n\nb\n"


def test_every_reference_page_is_generated() -> None:
    assert {f"docs/reference/{path.name}" for path in (ROOT / "docs" / "reference").iterdir()} == {name for name in PAGES if name.startswith("docs/reference/")}


def documented(first: int, *, second: str = "x") -> str:
    """Do a thing with ``a|b`` and <c>.

    More about it.

    Args:
        first: a number,
            continued.
        second: a text.

    Raises:
        ValueError: never.
    """
    return f"{first}{second}"


def test_docstring_becomes_markdown() -> None:
    assert markdown.function_text(documented) == (
        "```text\ndocumented(first: int, *, second: str = 'x') -> str\n```\n\n"
        "Do a thing with `a|b` and &lt;c>.\n\nMore about it.\n\n"
        "Args:\n\n- `first`: a number, continued.\n- `second`: a text.\n\nRaises:\n\n- `ValueError`: never."
    )


def test_table_leaves_an_empty_column_out_and_escapes_bars() -> None:
    assert markdown.table(("a", "b", "c"), [("1|2", "", "`x|y`"), ("3", "", "4")]) == "| a | c |\n| --- | --- |\n| 1\\|2 | `x\\|y` |\n| 3 | 4 |"
