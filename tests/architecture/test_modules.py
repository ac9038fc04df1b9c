"""Small modules, one idea each; a package's ``__init__`` only re-exports."""

from __future__ import annotations

import ast
from collections.abc import Mapping

import pytest

CEILING = 300
TABLE_CEILING = 400
TABLES = frozenset(["mpbackend.formats", "mpbackend.capability"])
"""Tables of formats and of records, which may be longer."""

ROOT_NAMES = frozenset(["__version__", "_EXPORTS", "__all__"])
ROOT_FUNCTIONS = frozenset(["__getattr__", "__dir__"])


def long_modules(sources: Mapping[str, str]) -> list[str]:
    """Return ``module: lines`` of every module over its ceiling."""
    counts = {module: len(source.splitlines()) for module, source in sources.items()}
    return [f"{module}: {count}" for module, count in counts.items() if count > (TABLE_CEILING if module in TABLES else CEILING)]


def statement_fault(node: ast.stmt, is_root: bool) -> bool:
    """Tell whether a statement does more than re-export: documentation, imports and names of exports are permitted, and the lazy exports of the root."""
    match node:
        case ast.Expr(value=ast.Constant(value=str())) | ast.Import() | ast.ImportFrom():
            return False
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return name not in (ROOT_NAMES if is_root else {"__all__", "__version__"})
        case ast.FunctionDef(name=name):
            return not (is_root and name in ROOT_FUNCTIONS)
        case ast.If(test=ast.Name(id="TYPE_CHECKING"), body=body, orelse=[]):
            return any(statement_fault(child, is_root) for child in body)
    return True


def busy_packages(sources: Mapping[str, str]) -> list[str]:
    """Return ``module:line`` of every statement of a package's ``__init__`` that does more than re-export."""
    return [
        f"{module}:{node.lineno}"
        for module, source in sources.items()
        if module.endswith(".__init__")
        for node in ast.parse(source).body
        if statement_fault(node, module == "mpbackend.__init__")
    ]


def test_modules_are_small(core: Mapping[str, str], plugin_sources: Mapping[str, str]) -> None:
    assert plugin_sources
    assert long_modules({**core, **plugin_sources}) == []


def test_packages_only_re_export(core: Mapping[str, str], plugin_sources: Mapping[str, str]) -> None:
    assert busy_packages({**core, **plugin_sources}) == []


def test_long_module_is_found() -> None:
    sources = {"mpbackend.a": "\n" * 301, "mpbackend.b": "\n" * 300, "mpbackend.formats": "\n" * 400, "mpbackend.capability": "\n" * 401}
    assert long_modules(sources) == ["mpbackend.a: 301", "mpbackend.capability: 401"]


@pytest.mark.parametrize("source", ["X = 1", "def f(): ...", "class A: ...", "print(1)", "for x in (): ...", "if True:\n    import a", "__getattr__ = 1"])
def test_planted_statement_is_found(source: str) -> None:
    assert busy_packages({"mpbackend.pkg.__init__": f'"""Package."""\n{source}'}) == ["mpbackend.pkg.__init__:2"]


def test_re_exports_are_permitted() -> None:
    source = '"""Package."""\nfrom __future__ import annotations\nfrom a import b\n__all__ = ["b"]\n__version__ = "1"\nif TYPE_CHECKING:\n    import c'
    assert busy_packages({"plugin.__init__": source}) == []
