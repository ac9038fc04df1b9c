"""Modules import only from their left in the pipeline, and nothing left of training imports torch."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping

import pytest

PURE: tuple[tuple[str, ...], ...] = (
    ("__init__",),
    ("errors",),
    ("formats",),
    ("capability",),
    ("documents",),
    ("matrix",),
    ("roles",),
    ("recipe",),
    ("device",),
    ("backend",),
    ("hookspecs",),
    ("inquiry",),
    ("plugins",),
    ("granting",),
    ("decisions",),
    ("accumulation",),
    ("drafting",),
    ("remedies",),
    ("planning",),
    ("selection",),
    ("footprint",),
    ("lowbit",),
    ("numerics.arithmetic",),
    ("numerics.rounding_rules",),
    ("numerics.*",),
    ("numerics.fingerprint",),
    ("observe.record",),
    ("observe.record_writer",),
    ("observe.event_files", "observe.stated"),
    ("observe.imports",),
    ("observe.audit_document",),
    ("observe.audit_assert", "observe.audit_diff", "observe.audit_target", "observe.ledger"),
    ("conformance.answer", "conformance.evidence"),
    ("conformance.parity",),
    ("comparison.distributions", "comparison.margin", "comparison.runs"),
    ("comparison.quality", "comparison.readings", "comparison.statistics"),
    ("comparison.conditions", "comparison.departures", "comparison.skips", "comparison.speed"),
    ("comparison.curves", "comparison.differences", "comparison.question"),
    ("comparison.floor", "comparison.remarks"),
    ("comparison.equality",),
    ("comparison.deciding",),
    ("comparison.verdict",),
    ("report.view",),
    ("report.*",),
    ("report.comparison", "report.difference", "report.recipes"),
    ("report.html",),
    ("report.charts",),
    ("report.curves", "report.differing", "report.markup"),
    ("report.comparison_page",),
    ("report.index_page",),
)
"""Groups from left to right. Modules of one group do not import each other; ``package.*`` stands for every module of the package not named elsewhere."""

WITH_TORCH: tuple[tuple[str, ...], ...] = (
    ("numerics.rounding",),
    ("numerics.block_scales", "numerics.exact_sums", "numerics.kernel"),
    ("numerics.quantize",),
    ("numerics.numba_loops",),
    ("numerics.kernel_numba",),
    ("numerics.matmul",),
    ("numerics.scaled",),
    ("numerics.probe_rows",),
    ("numerics.probe_model",),
    ("numerics.probe_steps", "numerics.probe_sums"),
    ("numerics.probe_check", "numerics.probe_tree"),
    ("numerics.probe_answers",),
    ("numerics.probes",),
    ("observe.memory",),
    ("observe.flops",),
    ("observe.audit",),
    ("observe.audit_fallback", "observe.audit_modules", "observe.audit_rules", "observe.audit_workload", "observe.classes"),
    ("observe.audit_observer",),
    ("observe.audit_summary",),
    ("train.*",),
    (
        "train.content",
        "train.device_scale",
        "train.distributed",
        "train.gradients",
        "train.holdings",
        "train.host_copy",
        "train.journal",
        "train.patience",
        "train.reference",
        "train.verdict",
    ),
    ("train.backward", "train.blocks", "train.buffers", "train.deferral", "train.fitting", "train.position", "train.schedule", "train.weights"),
    ("train.passes", "train.sharded_state", "train.sources"),
    ("train.boundary", "train.data", "train.state"),
    ("train.recorder", "train.recording", "train.session_record"),
    ("train.session",),
    ("target",),
    ("observe.fake_attention", "observe.fake_device", "observe.portability", "observe.stand_in"),
    ("observe.audit_outcome", "observe.audit_step"),
    ("observe.audit_run",),
    ("observe.fake_run",),
    ("conformance.lowering",),
    ("conformance.streams",),
    ("conformance.scales",),
    ("conformance.products",),
    ("conformance.subject",),
    ("conformance.operands", "conformance.tolerances"),
    ("conformance.training",),
    ("conformance.*",),
    ("conformance.registry",),
    ("conformance.runner",),
    ("conformance.testing",),
    ("cli.options",),
    ("cli.*",),
    ("cli.demo", "cli.matrix"),
    ("cli.main",),
)

ORDER = PURE + WITH_TORCH
ROOT_VALUES = frozenset(["__version__"])
"""What a module may take from the package root itself; everything else there is an alias of a name in a module."""


def position(module: str, order: tuple[tuple[str, ...], ...] = ORDER) -> int | None:
    """Return the group of ``module`` (without the root's name), or None when the order does not name it."""
    wildcard = f"{module.rpartition('.')[0]}.*"
    for name in (module, wildcard):
        for index, group in enumerate(order):
            if name in group:
                return index
    return None


def run_time_imports(tree: ast.AST) -> Iterator[tuple[int, str, tuple[str, ...]]]:
    """Yield (line, module, names) of every import, those in functions included, those under ``TYPE_CHECKING`` left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).removeprefix("typing.") == "TYPE_CHECKING":
            for child in node.orelse:
                yield from run_time_imports(ast.Module(body=[child], type_ignores=[]))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, ()
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, "." * node.level + (node.module or ""), tuple(alias.name for alias in node.names)
        else:
            yield from run_time_imports(node)


def edges(module: str, source: str, modules: frozenset[str]) -> Iterator[tuple[int, str]]:
    """Yield line and dotted name (without the root's) of everything that a core module imports from the core."""
    for line, name, names in run_time_imports(ast.parse(source)):
        if name.startswith("."):
            yield line, name
        elif name == "mpbackend":
            yield from ((line, item) for item in names or ("the root itself",) if item not in ROOT_VALUES)
        elif name.startswith("mpbackend."):
            inner = name.removeprefix("mpbackend.")
            if inner in modules:
                yield line, inner
            else:
                yield from ((line, f"{inner}.{item}") for item in names or ("__init__",))


def order_faults(sources: Mapping[str, str], order: tuple[tuple[str, ...], ...] = ORDER) -> list[str]:
    """Return a line for each module that the order does not name and for each import that does not go to the left."""
    short = {name.removeprefix("mpbackend."): source for name, source in sources.items()}
    faults: list[str] = []
    for module, source in short.items():
        package = module.endswith(".__init__")
        here = position(module, order)
        if here is None and not package:
            faults.append(f"{module}: the order does not name it")
            continue
        for line, target in edges(module, source, frozenset(short)):
            there = position(target, order) if target in short else None
            if package:
                faults.append(f"{module}:{line}: a package imports {target}")
            elif there is None:
                faults.append(f"{module}:{line}: imports {target}, which is no module of the order")
            elif here is not None and there >= here:
                faults.append(f"{module}:{line}: imports {target}, which is not to its left")
    return faults


def is_pure(module: str) -> bool:
    """Return whether a module (with the root's name) stands left of training."""
    here = position(module.removeprefix("mpbackend."))
    return here is not None and here < len(PURE)


def torch_imports(sources: Mapping[str, str]) -> list[str]:
    """Return a line for each import of torch in a module left of training."""
    return [
        f"{module}:{line}: imports {name}"
        for module, source in sources.items()
        if is_pure(module)
        for line, name, _ in run_time_imports(ast.parse(source))
        if name.partition(".")[0] == "torch"
    ]


def test_imports_go_to_the_left(core: Mapping[str, str]) -> None:
    assert order_faults(core) == []


def test_every_named_module_exists(core: Mapping[str, str]) -> None:
    named = {name for group in ORDER for name in group if not name.endswith(".*")}
    assert sorted(named - {module.removeprefix("mpbackend.") for module in core}) == []


def test_nothing_left_of_training_imports_torch(core: Mapping[str, str]) -> None:
    assert torch_imports(core) == []


def test_pure_modules_load_without_torch(core: Mapping[str, str], run_python: Callable[[str], str]) -> None:
    modules = [module.removesuffix(".__init__") for module in core if is_pure(module)]
    assert len(modules) > 15
    program = f"""
import importlib, sys
for module in {modules!r}:
    importlib.import_module(module)
    if "torch" in sys.modules:
        print(module)
        break
"""
    assert run_python(program) == ""


ORDER_OF_THREE = (("__init__",), ("a",), ("b", "c"), ("pkg.*",), ("pkg.last",))


@pytest.mark.parametrize(
    ("module", "source", "fault"),
    [
        ("a", "from mpbackend.b import x", "a:1: imports b, which is not to its left"),
        ("a", "import mpbackend.b", "a:1: imports b, which is not to its left"),
        ("a", "from mpbackend import b", "a:1: imports b, which is not to its left"),
        ("a", "def f():\n    from mpbackend.b import x", "a:2: imports b, which is not to its left"),
        ("a", "if TYPE_CHECKING:\n    pass\nelse:\n    import mpbackend.b", "a:4: imports b, which is not to its left"),
        ("b", "from mpbackend.c import x", "b:1: imports c, which is not to its left"),
        ("b", "from mpbackend import Device", "b:1: imports Device, which is no module of the order"),
        ("b", "import mpbackend", "b:1: imports the root itself, which is no module of the order"),
        ("b", "from . import a", "b:1: imports ., which is no module of the order"),
        ("pkg.one", "from mpbackend.pkg import last", "pkg.one:1: imports pkg.last, which is not to its left"),
        ("pkg.one", "from mpbackend.pkg.two import x", "pkg.one:1: imports pkg.two, which is not to its left"),
        ("pkg.__init__", "from mpbackend.a import x", "pkg.__init__:1: a package imports a"),
        ("stray", "x = 1", "stray: the order does not name it"),
    ],
)
def test_planted_order_fault_is_found(module: str, source: str, fault: str) -> None:
    sources = dict.fromkeys(["a", "b", "c", "pkg.one", "pkg.two", "pkg.last"], "") | {module: source}
    assert order_faults({f"mpbackend.{name}": text for name, text in sources.items()}, ORDER_OF_THREE) == [fault]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("a", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from mpbackend.b import x"),
        ("b", "from mpbackend.a import x\nfrom mpbackend import __version__"),
        ("pkg.last", "from mpbackend.pkg import one\nimport torch"),
    ],
)
def test_permitted_import_passes(module: str, source: str) -> None:
    sources = dict.fromkeys(["a", "b", "c", "pkg.one", "pkg.two", "pkg.last"], "") | {module: source}
    assert order_faults({f"mpbackend.{name}": text for name, text in sources.items()}, ORDER_OF_THREE) == []


@pytest.mark.parametrize("source", ["import torch", "from torch.nn import Module", "def f():\n    import torch.nn as nn"])
def test_planted_torch_import_is_found(source: str) -> None:
    assert len(torch_imports({"mpbackend.planning": source, "mpbackend.train.session": source})) == 1
