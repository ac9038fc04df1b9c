"""Write the generated pages, the generated sections of other pages, and the outputs that pages show: `make docs`.

Each page and section is a pure function of the code and the matrices, so that a test compares what is on disk with what they return now.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run as a script, Python puts this file's folder there instead

from docs.generator import blocks, catalog, modules, reference, schema  # noqa: E402 - the path is set above

PAGES: Mapping[str, Callable[[], str]] = {
    "docs/reference/backend.md": reference.backend_page,
    "docs/reference/cli.md": reference.cli_page,
    "docs/reference/cpu-backend.md": catalog.cpu_page,
    "docs/reference/errors.md": reference.errors_page,
    "docs/reference/formats.md": catalog.formats_page,
    "docs/reference/hooks.md": reference.hooks_page,
    "docs/reference/matrix-schema.md": schema.matrix_schema_page,
    "docs/reference/recipes.md": catalog.recipes_page,
    "docs/reference/record-schema.md": schema.record_schema_page,
    "matrices/README.md": catalog.matrices_page,
}
"""Pages that are generated whole, by their path."""

SECTIONS: Mapping[str, Callable[[], str]] = {
    "counts": catalog.counts_line,
    "evidence": catalog.evidence_table,
    "grants": catalog.grants_table,
    "modules": modules.modules_table,
    "support": catalog.support_table,
    "trained": catalog.trained_line,
}
"""Sections inside of pages that are written by hand, by the name in their markers."""

SECTION = re.compile(r"(?<=^<!-- generated: )(?P<name>\w+) -->\n.*?^(?=<!-- end -->$)", re.MULTILINE | re.DOTALL)


def written_pages(root: Path = ROOT) -> list[Path]:
    """Return the pages that are written by hand and show sections, examples or outputs."""
    docs = (path for path in (root / "docs").rglob("*.md") if "examples" not in path.parts and str(path.relative_to(root)) not in PAGES)
    return [root / "README.md", *sorted(root.glob("plugins/*/README.md")), *sorted(docs)]


def fill_sections(text: str) -> str:
    """Return a page with its generated sections as they are now."""
    return SECTION.sub(lambda found: f"{found['name']} -->\n\n{SECTIONS[found['name']]()}\n\n", text)


def main() -> None:
    """Write everything again; say what changed."""
    for name, make in PAGES.items():
        write(ROOT / name, make())
    for path in written_pages():
        with tempfile.TemporaryDirectory() as folder:
            write(path, blocks.run_page(fill_sections(path.read_text(encoding="utf-8")), Path(folder)))


def write(path: Path, text: str) -> None:
    """Write a page if it changed."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8", newline="\n")
        print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
