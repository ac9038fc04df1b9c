"""What pages show runs: Python examples, commands, and the output that each is shown with."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.generate import ROOT, written_pages
from docs.generator.blocks import BLOCK, run_page

FENCE = re.compile(r"^```([^\n]*)\n.*?^```$", re.MULTILINE | re.DOTALL)
LANGUAGES = ("console", "python", "text", "toml")


@pytest.mark.parametrize("path", written_pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_page_runs_and_shows_its_output(path: Path, tmp_path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert run_page(text, tmp_path) == text


@pytest.mark.parametrize("path", written_pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_block_is_of_a_known_language(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    languages = FENCE.findall(text)
    assert [language for language in languages if language not in LANGUAGES] == []
    assert len(languages) == sum(1 + (block["output"] is not None) for block in BLOCK.finditer(text))


def test_the_readme_and_the_tutorial_run_something() -> None:
    for name in ("README.md", "docs/tutorial.md"):
        blocks = list(BLOCK.finditer((ROOT / name).read_text(encoding="utf-8")))
        assert {block["language"] for block in blocks if block["mark"] != "not run"} >= {"console", "python"}


def shown(source: str, output: str, mark: str = "", language: str = "python") -> str:
    """Return a page of one block and its output."""
    below = f"```\n\n```text\n{output}```\n" if language == "python" else f"{output}```\n"
    return f"{mark}```{language}\n{source}\n{below}"


def test_wrong_output_is_replaced(tmp_path: Path) -> None:
    assert run_page(shown("print(1 + 1)", "3\n"), tmp_path) == shown("print(1 + 1)", "2\n")
    assert run_page(shown("$ echo two", "three\n", language="console"), tmp_path) == shown("$ echo two", "two\n", language="console")


def test_right_output_is_kept(tmp_path: Path) -> None:
    page = (
        "text\n\n"
        + shown("x = 2", "").replace("\n\n```text\n```", "")
        + "\n"
        + shown("print(x)", "2\n")
        + "\n"
        + shown("$ echo a\na\n$ echo b", "b\n", language="console")
    )
    assert run_page(page, tmp_path) == page


def test_output_that_is_not_shown_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="prints what the page does not show"):
        run_page("```python\nprint(1)\n```\n", tmp_path)


def test_failing_block_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        run_page("```python\n1 / 0\n```\n", tmp_path)
    with pytest.raises(RuntimeError, match="status 1"):
        run_page("```console\n$ false\n```\n", tmp_path)
    with pytest.raises(UserWarning, match="careful"):
        run_page("```python\nimport warnings\nwarnings.warn('careful')\n```\n", tmp_path)


def test_refusal_of_a_command_is_shown(tmp_path: Path) -> None:
    assert "error: unknown preset 'bf17'" in run_page("```console\n$ mpbackend plan bf17 --device h100\n```\n", tmp_path)


def test_numbers_may_vary_and_words_may_not(tmp_path: Path) -> None:
    mark = "<!-- varies: a reason -->\n"
    kept = shown("print('loss', 1.25, 'after', 10)", "loss 1.5e-3 after 7\n", mark)
    assert run_page(kept, tmp_path) == kept
    replaced = run_page(shown("print('loss', 1.25)", "norm 1.25\n", mark), tmp_path)
    assert replaced == shown("print('loss', 1.25)", "loss 1.25\n", mark)


def test_marks(tmp_path: Path) -> None:
    for page in (
        "<!-- not run: a reason -->\n```python\n1 / 0\n```\n",
        shown("$ echo two", "anything\n", "<!-- not compared: a reason -->\n", "console"),
        "<!-- file: a.toml -->\n```toml\nx = 1\n```\n\n```console\n$ cat a.toml\nx = 1\n```\n",
    ):
        assert run_page(page, tmp_path) == page
    with pytest.raises(ZeroDivisionError):
        run_page("<!-- not run: -->\n```python\n1 / 0\n```\n", tmp_path)


def test_a_module_of_a_page_is_forgotten(tmp_path: Path) -> None:
    page = "<!-- file: mine.py -->\n```python\nx = 1\n```\n\n" + shown("import sys\nsys.path.insert(0, '.')\nimport mine\nprint(mine.x)", "1\n")
    for content in (page, page.replace("x = 1", "x = 2").replace("\n1\n", "\n2\n")):
        assert run_page(content, tmp_path) == content


def test_variables_that_choose_a_device_are_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPBACKEND", "no-such-backend")
    page = shown("import mpbackend\nprint(mpbackend.select('auto').info.backend)", "cpu\n")
    assert run_page(page, tmp_path) == page
    page = shown('$ echo "$MPBACKEND"', "\n", language="console")
    assert run_page(page, tmp_path) == page
