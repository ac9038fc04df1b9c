"""Text of a stranger (a device's name, a matrix, a record) never reaches a terminal or a page with characters that act instead of show."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from mpbackend.capability import Arch, DeviceModel, Row, Source
from mpbackend.device import Device
from mpbackend.documents import MatrixFile
from mpbackend.errors import escaped
from mpbackend.matrix import Matrix
from mpbackend.plugins import Unavailable
from mpbackend.report import markdown, terminal
from mpbackend.report.devices import doctor_report, found_report, known_report
from mpbackend.report.difference import compare_devices, difference_report
from mpbackend.report.html import matrix_page
from mpbackend.report.rows import rows_document, rows_report
from mpbackend.report.view import Column, Facts, Listing, Report, Table, json_escaped, visible

ACTING = "".join(map(chr, [*range(0x20), *range(0x7F, 0xA0), 0xAD, 0x061C, *range(0x200B, 0x2010), *range(0x2028, 0x202F), *range(0x2060, 0x2070), 0xFEFF]))
"""C0, delete and C1 controls; soft hyphen; marks, embeddings, overrides and isolates of direction; zero width; line and paragraph separators."""

HOSTILE = f"a{ACTING}\x1b]0;title\x07\x1b[2J\U000e0041z"
"""With a title, a cleared screen, and a tag character beyond the basic plane."""


def acts(text: str) -> list[str]:
    """Return the characters that do more than show."""
    return sorted({repr(c) for c in text if c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")})


def hostile_matrix() -> Matrix:
    """Return a matrix in which every text that its types allow is hostile."""
    made: dict[str, Any] = {"source": (HOSTILE,), "evidence": "documented", "note": HOSTILE}
    row: dict[str, Any] = {"op": HOSTILE, "a": HOSTILE, "b": "bf16", "path": "simt", "accumulate": HOSTILE, "out": (HOSTILE,), "since": {HOSTILE: HOSTILE}}
    document = MatrixFile(
        schema=1,
        family=HOSTILE,
        source=(Source(id=HOSTILE, title=HOSTILE, location=HOSTILE, date=HOSTILE),),
        arch=(Arch(key=HOSTILE, name=HOSTILE, family=HOSTILE, **made),),
        device=tuple(
            DeviceModel(key=f"{n}{HOSTILE}", arch=HOSTILE, name=HOSTILE, names=(f"{n}{HOSTILE}",), aliases=(f"alias{n}{HOSTILE}",), **made) for n in "12"
        ),
        row=(Row(arch=HOSTILE, level="native", **row, **made),),
    )
    return Matrix([("hostile.toml", document)])


def reports() -> dict[str, Report]:
    """Return reports made of hostile text."""
    matrix = hostile_matrix()
    device = Device(key=HOSTILE, arch=HOSTILE, name=HOSTILE, backend=HOSTILE, usable=False, cause=HOSTILE, remedy=HOSTILE)
    facts = {HOSTILE: HOSTILE}
    first, second = matrix.devices
    return {
        "found": found_report([device]),
        "doctor": doctor_report({"environment": facts, "plugins": facts, "variables": facts}, [device], [Unavailable(HOSTILE, HOSTILE, HOSTILE, HOSTILE)]),
        "known": known_report(matrix),
        "rows": rows_report(matrix, matrix.rows(), notes=True),
        "difference": difference_report(matrix, first, second, compare_devices(matrix, first, second)),
        "blocks": Report(HOSTILE, [Table(HOSTILE, [Column(HOSTILE)], [[HOSTILE]]), Facts(HOSTILE, [(HOSTILE, HOSTILE)]), Listing(HOSTILE, [HOSTILE])]),
    }


RENDERERS: dict[str, Callable[[Report], str]] = {"terminal": lambda report: terminal.render(report, 80), "markdown": markdown.render}


@pytest.mark.parametrize("renderer", RENDERERS)
@pytest.mark.parametrize("name", reports())
def test_what_is_printed_shows_and_does_not_act(name: str, renderer: str) -> None:
    text = RENDERERS[renderer](reports()[name])
    assert acts(text) == []
    assert "x1b" in text.replace("\n", "").replace(" ", "")


def test_a_page_shows_and_does_not_act() -> None:
    matrix = hostile_matrix()
    page = matrix_page(matrix, matrix.rows())
    data = page.partition('id="data"')[2].partition(">")[2].partition("</script>")[0]
    assert acts(page) == []
    assert acts("".join(texts(json.loads(data)))) == []


def texts(value: object) -> list[str]:
    """Return every text in plain data, keys included."""
    if isinstance(value, dict):
        return [text for pair in value.items() for item in pair for text in texts(item)]
    if isinstance(value, list):
        return [text for item in value for text in texts(item)]
    return [value] if isinstance(value, str) else []


def test_json_is_escaped_and_the_same_document() -> None:
    matrix = hostile_matrix()
    document = rows_document(matrix, matrix.rows())
    plain = msgspec.json.encode(document).decode()
    assert acts(plain) != []
    text = json_escaped(plain)
    assert acts(text) == []
    assert json.loads(text) == json.loads(plain)


def test_what_shows_stays() -> None:
    text = "ä β\xa0● ◐ ≈ ⇄ ▤ ✕ ? é 漢字 -_.:;/\\ line\nline"
    assert escaped(text) == text
    assert json_escaped(text) == text
    report = Report(text, [Facts(text, [(text, text)])])
    assert visible(report) == report


def test_everything_of_a_report_is_made_visible() -> None:
    found = visible(reports()["blocks"])
    assert acts(repr(found)) == []
    assert [type(block) for block in found.blocks] == [Table, Facts, Listing]
    assert found.title == escaped(HOSTILE)
