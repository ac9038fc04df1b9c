"""What importing costs: the root loads nothing heavy, and plugins are listed without torch or a vendor's package."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

import pytest

HEAVY = ("torch", "click", "rich", "jinja2")
CORE_PACKAGES = frozenset(["mpbackend", "msgspec", "packaging", "pluggy"])
"""What an entry-point module may import besides its own package and the standard library."""

NEW_MODULES = """
import sys
before = set(sys.modules)
{statements}
print(*sorted({{name.partition(".")[0] for name in set(sys.modules) - before}}))
"""


def loaded_by(statements: str, run_python: Callable[[str], str]) -> set[str]:
    """Return the top-level modules that statements load in a fresh interpreter."""
    return set(run_python(NEW_MODULES.format(statements=statements)).split())


def heavy(loaded: Set[str], unwanted: Iterable[str] = HEAVY) -> list[str]:
    """Return the unwanted modules among the loaded ones."""
    return sorted(loaded & set(unwanted))


def foreign(loaded: Set[str], own: str) -> list[str]:
    """Return loaded modules that belong neither to the standard library, nor to the core and its light dependencies, nor to the plugin."""
    return sorted(name for name in loaded - CORE_PACKAGES - sys.stdlib_module_names - {own} if not name.startswith("__editable__"))


def module_level_imports(source: str) -> set[str]:
    """Return top-level names of the packages that a module imports outside functions."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    tree = ast.parse(source)
    inside = {id(node) for function in ast.walk(tree) if isinstance(function, functions) for node in ast.walk(function)}
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and id(node) not in inside:
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and id(node) not in inside and node.module is not None:
            names.add(node.module.partition(".")[0])
    return names


def entry_points(projects: Mapping[str, dict[str, Any]]) -> list[str]:
    """Return the modules that the plugins of this repository register."""
    return [module for project in projects.values() for module in project["project"]["entry-points"]["mpbackend"].values()]


def test_importing_the_root_loads_nothing_heavy(run_python: Callable[[str], str]) -> None:
    assert heavy(loaded_by("import mpbackend", run_python)) == []


def test_planning_loads_no_torch(run_python: Callable[[str], str]) -> None:
    assert heavy(loaded_by("import mpbackend; mpbackend.plan; mpbackend.parse_recipe('bf16'); mpbackend.load_matrix()", run_python)) == []


def test_listing_devices_loads_no_torch(run_python: Callable[[str], str]) -> None:
    assert heavy(loaded_by("import mpbackend; p = mpbackend.load_plugins(); assert p.devices(); p.matrix()", run_python)) == []


def test_entry_point_modules_load_only_the_core(plugin_projects: Mapping[str, dict[str, Any]], run_python: Callable[[str], str]) -> None:
    modules = entry_points(plugin_projects)
    assert modules
    core = loaded_by("import mpbackend.plugins", run_python)
    for module in modules:
        assert foreign(loaded_by(f"import {module}", run_python) - core, module.partition(".")[0]) == []


def test_entry_point_modules_import_only_the_core(plugin_projects: Mapping[str, dict[str, Any]], plugin_sources: Mapping[str, str]) -> None:
    for module in entry_points(plugin_projects):
        assert foreign(module_level_imports(plugin_sources[module]), module.partition(".")[0]) == []


def test_a_heavy_import_is_seen(run_python: Callable[[str], str]) -> None:
    assert heavy(loaded_by("import click", run_python)) == ["click"]


@pytest.mark.parametrize("source", ["import torch", "from torch import nn", "if True:\n    import torch.nn", "class A:\n    import torch"])
def test_planted_import_of_an_entry_point_is_found(source: str) -> None:
    assert foreign(module_level_imports(f"import json\nfrom mpbackend import hookimpl\nimport own.backend\n{source}"), "own") == ["torch"]


def test_imports_in_functions_are_permitted() -> None:
    assert module_level_imports("def f():\n    import torch\n    from own.backend import B") == set()
