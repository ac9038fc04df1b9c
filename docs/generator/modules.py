"""The modules of the core in import order, each with the first sentence of its docstring."""

from __future__ import annotations

import ast
from pathlib import Path

import mpbackend
from docs.generator.markdown import code, inline, table
from tests.architecture.test_import_order import PURE, position

CORE = Path(mpbackend.__file__).parent


def modules_table() -> str:
    """Return the modules from left to right: whether each may import torch, and what it is."""
    rows = []
    for path in CORE.rglob("*.py"):
        name = ".".join(path.relative_to(CORE).with_suffix("").parts)
        group = position(name)
        if group is None or path.name == "__init__.py":
            continue
        summary = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n\n")[0]
        rows.append((group, name, "no" if group < len(PURE) else "yes", inline(summary)))
    return table(("module", "may import torch", "what it is"), [(code(name), torch, summary) for _, name, torch, summary in sorted(rows)])
