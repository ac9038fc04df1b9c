"""One module of errors: at most six classes, each also the builtin that a caller would expect to catch."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Mapping

HOME = "mpbackend.errors"
ALLOWED = 6


def exception_classes(sources: Mapping[str, str]) -> dict[str, tuple[str, frozenset[str]]]:
    """Return the exception classes that sources define: name to (module, builtins it derives from, directly or through another of them)."""
    bases = {
        node.name: (module, [ast.unparse(base).rpartition(".")[2] for base in node.bases])
        for module, source in sources.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
    }

    def builtin_bases(name: str, seen: frozenset[str] = frozenset()) -> frozenset[str]:
        if name in bases and name not in seen:
            return frozenset().union(*(builtin_bases(base, seen | {name}) for base in bases[name][1]))
        kind = getattr(builtins, name, None)
        return frozenset([name]) if isinstance(kind, type) and issubclass(kind, BaseException) else frozenset()

    return {name: (module, found) for name, (module, _) in bases.items() if (found := builtin_bases(name)) and not is_signal(name, sources[module])}


def is_signal(name: str, source: str) -> bool:
    """Tell whether a class is a private signal: its own module catches it, so that no caller ever sees it."""
    caught = {ast.unparse(handler.type) for handler in ast.walk(ast.parse(source)) if isinstance(handler, ast.ExceptHandler) and handler.type is not None}
    return name.startswith("_") and name in caught


def error_faults(sources: Mapping[str, str]) -> list[str]:
    """Return a line for each exception class outside ``errors.py``, for one that is only an ``Exception``, and for too many of them."""
    classes = exception_classes(sources)
    faults = [f"{name} is defined in {module}" for name, (module, _) in classes.items() if module != HOME]
    faults += [f"{name} is no builtin besides Exception" for name, (_, kinds) in list(classes.items())[1:] if kinds <= {"Exception"}]
    if len(classes) > ALLOWED:
        faults.append(f"{len(classes)} classes")
    return faults


BASE = "class MpbackendError(Exception): ...\n"


def test_errors_of_the_core_and_its_plugins(core: Mapping[str, str], plugin_sources: Mapping[str, str]) -> None:
    assert len(exception_classes({HOME: core[HOME]})) == ALLOWED
    assert error_faults({HOME: core[HOME], **core, **plugin_sources}) == []


def test_an_error_elsewhere_is_found() -> None:
    assert error_faults({HOME: BASE, "mpbackend.planning": "class NoPlan(errors.MpbackendError, ValueError): ..."}) == [
        "NoPlan is defined in mpbackend.planning"
    ]


def test_an_error_that_is_no_builtin_is_found() -> None:
    assert error_faults({HOME: BASE + "class PlanError(MpbackendError): ..."}) == ["PlanError is no builtin besides Exception"]


def test_a_seventh_class_is_found() -> None:
    assert error_faults({HOME: BASE + "\n".join(f"class E{n}(MpbackendError, ValueError): ..." for n in range(6))}) == ["7 classes"]


def test_a_private_error_that_leaves_its_module_is_found() -> None:
    assert error_faults({HOME: BASE, "plugin.a": "class _Stop(Exception): ..."}) == ["_Stop is defined in plugin.a", "_Stop is no builtin besides Exception"]
    assert error_faults({HOME: BASE, "plugin.a": "class _Stop(Exception): ...\ntry:\n    f()\nexcept _Stop as stop:\n    g(stop)"}) == []


def test_other_classes_are_left_alone() -> None:
    assert error_faults({HOME: BASE, "mpbackend.device": "class Device(msgspec.Struct): ...\nclass Loop(Loop): ..."}) == []
