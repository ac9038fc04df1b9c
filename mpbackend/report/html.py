"""The capability matrix as one HTML file that needs no network: filters, a comparison of two devices, sources on hover and on focus.

The page is the template with its style and script inside, and the rows as JSON, which the script shows as text and never as markup.
"""

from __future__ import annotations

import contextlib
import importlib.resources
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import msgspec

from mpbackend import __version__
from mpbackend.capability import EVIDENCE_KINDS, LEVEL_MEANING, LEVELS, Row, Source
from mpbackend.documents import load_vocabulary
from mpbackend.errors import DocumentError, escaped
from mpbackend.matrix import Matrix
from mpbackend.report.devices import dense_peaks, memory_text
from mpbackend.report.difference import STATUSES
from mpbackend.report.recipes import Cell
from mpbackend.report.rows import NO_ROW_MEANS, version_key
from mpbackend.report.view import EVIDENCE_MEANING, SYMBOLS, accumulator_text, json_escaped, sources_of

TEMPLATES = "mpbackend.report.templates"
PAGE = "matrix.html"


def matrix_page(matrix: Matrix, rows: Sequence[Row], compare: tuple[str, str] | None = None, cells: Sequence[Cell] = ()) -> str:
    """Return the page.

    Args:
        matrix: the loaded matrices.
        rows: rows that the page holds.
        compare: keys of two devices; the page then opens with their comparison.
        cells: recipes on devices; without any, the page has no view of them.
    """
    environment = jinja2.Environment(autoescape=True, keep_trailing_newline=True, loader=jinja2.FunctionLoader(read_template), undefined=jinja2.StrictUndefined)
    summary = matrix.summary()
    return environment.get_template(PAGE).render(
        data=script_json({**page_data(matrix, rows, compare), "grid": grid_data(cells)}),
        grid=bool(cells),
        version=__version__,
        summary=summary,
        evidence=[(kind, EVIDENCE_MEANING[kind], summary["evidence"].get(kind, 0)) for kind in EVIDENCE_KINDS],
        levels=[(level, SYMBOLS[level], LEVEL_MEANING[level], summary["levels"].get(level, 0)) for level in LEVELS],
        no_row=NO_ROW_MEANS,
    )


def read_template(name: str) -> str:
    """Return the text of a file of the templates."""
    return importlib.resources.files(TEMPLATES).joinpath(name).read_text(encoding="utf-8")


def script_json(data: Any) -> str:
    """Return JSON that may stand in a script element: ``<`` is written as an escape, so that nothing in it can end the element or open a comment."""
    return json_escaped(msgspec.json.encode(visible_data(data), order="deterministic").decode()).replace("<", "\\u003c")


def visible_data(data: Any) -> Any:
    """Return plain data in which every character of every text only shows."""
    if isinstance(data, str):
        return escaped(data)
    if isinstance(data, Mapping):
        return {visible_data(key): visible_data(value) for key, value in data.items()}
    return [visible_data(item) for item in data] if isinstance(data, list | tuple) else data


def page_data(matrix: Matrix, rows: Sequence[Row], compare: tuple[str, str] | None) -> dict[str, Any]:
    """Return what the script needs: devices, words, sources once each, and rows that refer to them by number."""
    numbers: dict[Source, int] = {}
    data: list[dict[str, Any]] = []
    for row in rows:
        family = matrix.family_of(row.arch)
        cited = [numbers.setdefault(source, len(numbers)) for source in sources_of(matrix, row, row.arch)]
        claims = [(conflict.claim, numbers.setdefault(matrix.sources[(family, conflict.source)], len(numbers))) for conflict in row.conflict]
        data.append(
            {
                **{name: getattr(row, name) for name in ("arch", "op", "a", "b", "scaling", "path", "accumulate", "level", "computes", "evidence", "note")},
                "out": list(row.out),
                "sum": accumulator_text(row),
                "align": align_text(row),
                "since": ", ".join(f"{name} {version}" for name, version in sorted(row.since.items())),
                "sources": cited,
                "conflict": claims,
            }
        )
    vocabulary = load_vocabulary()
    software = software_versions(rows)
    for row, entry in zip(rows, data, strict=True):
        entry["needs"] = [(name, software[name].index(version) + 1) for name, version in sorted(row.since.items()) if version in software.get(name, ())]
    return {
        "software": software,
        "rows": data,
        "sources": [[source.title, source.location, source.date] for source in numbers],
        "devices": [device_data(matrix, key) for key in matrix.devices],
        "archs": {arch.key: arch.name for arch in matrix.archs.values()},
        "levels": {level: [SYMBOLS[level], LEVEL_MEANING[level]] for level in LEVELS},
        "order": list(LEVELS),
        "statuses": list(STATUSES),
        "evidence": EVIDENCE_MEANING,
        "ops": vocabulary.op,
        "scaling": vocabulary.scaling,
        "paths": {name: path.meaning for name, path in vocabulary.path.items()},
        "compare": list(compare) if compare is not None else None,
    }


def software_versions(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Return the software that rows depend on, with the versions from which they hold, in release order; what is no version leaves no row out."""
    since: dict[str, dict[str, Any]] = {}
    for row in rows:
        for name, version in row.since.items():
            with contextlib.suppress(DocumentError):
                key = version_key(version)
                since.setdefault(name, {})[version] = key
    return {name: [version for _, version in sorted((key, version) for version, key in versions.items())] for name, versions in sorted(since.items())}


def grid_data(cells: Sequence[Cell]) -> dict[str, Any]:
    """Return recipes on devices for the page: names once each, and for each device its cells as level, granted formats, and numbers of sentences."""
    sentences: dict[str, int] = {}
    devices: dict[str, list[tuple[str, str, list[int]]]] = {}
    for cell in cells:
        why = [sentences.setdefault(sentence, len(sentences)) for sentence in (*([cell.refused] if cell.refused else []), *cell.warnings)]
        devices.setdefault(cell.device, []).append((cell.level, " / ".join(cell.granted), why))
    return {"recipes": list(dict.fromkeys(cell.recipe for cell in cells)), "devices": devices, "sentences": list(sentences)}


def device_data(matrix: Matrix, key: str) -> dict[str, Any]:
    """Return a device for the page."""
    model = matrix.devices[key]
    return {
        "key": key,
        "name": model.name,
        "arch": model.arch,
        "family": matrix.family_of(model.arch),
        "memory": memory_text(model.memory_bytes),
        "peaks": [
            {"format": peak.format, "accumulate": peak.accumulate, "unit": peak.unit, "rate": peak.tera_per_s, "basis": peak.basis, "variant": peak.variant}
            for peak in dense_peaks(matrix, key)
        ],
    }


def align_text(row: Row) -> str:
    """Return the sizes that a row needs; empty where every size will do or no source says."""
    if row.align is None:
        return ""
    sizes = {"m": row.align.m, "n": row.align.n, "k": row.align.k}
    return ", ".join(f"{name} a multiple of {size}" for name, size in sizes.items() if size not in (1, "unknown"))
