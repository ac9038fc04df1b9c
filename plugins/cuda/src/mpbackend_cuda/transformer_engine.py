"""Finding Transformer Engine. It fails to import in many ways and with many classes of exception, so it is looked at from outside first.

``installed`` reads files and metadata only; ``load`` imports, once, and only where torch has a GPU: without one Transformer Engine raises even when asked
whether it is available.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

PACKAGE = "transformer_engine"
MODULE = "transformer_engine.pytorch"
RECIPES = "transformer_engine.common.recipe"
DISTRIBUTIONS = ("transformer-engine", "transformer-engine-torch", "transformer-engine-cu12", "transformer-engine-cu13")
INSTALL = "pip install --no-build-isolation 'transformer_engine[pytorch,core_cu13]'"

LIBRARIES = (("core library", "libtransformer_engine*"), ("torch extension", "transformer_engine_torch*"))
"""What the Python package needs beside itself, and the files that it looks for."""
LIBRARY_SUFFIXES = frozenset({".so", ".dylib", ".dll", ".pyd"})


class Engine(NamedTuple):
    """Transformer Engine, or why there is none.

    Attributes:
        pytorch: the module ``transformer_engine.pytorch``; None when it cannot be used.
        recipes: the module ``transformer_engine.common.recipe``; None when it cannot be used.
        reason: why not; empty when it can.
    """

    pytorch: Any
    recipes: Any
    reason: str


def state() -> str:
    """Return why Transformer Engine cannot be used, empty when nothing speaks against it. Imports it only in a process that already holds a CUDA context."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return load().reason
    return installed()


def installed() -> str:
    """Return what is missing or does not fit, from files and metadata; empty when all parts are there in one version. Imports nothing."""
    spec = importlib.util.find_spec(PACKAGE) if PACKAGE not in sys.modules else sys.modules[PACKAGE].__spec__
    if spec is None or spec.origin is None:
        return f"Transformer Engine is not installed ({INSTALL})"
    package = Path(spec.origin).parent
    files = [file.name for folder in (package.parent, package, package / "wheel_lib") if folder.is_dir() for file in folder.iterdir()]
    for name, pattern in LIBRARIES:
        stem = pattern.rstrip("*")
        if not any(file.startswith(stem) and Path(file).suffix in LIBRARY_SUFFIXES for file in files):
            return f"Transformer Engine is there without its {name} ({INSTALL})"
    versions: dict[str, str] = {}
    for distribution in DISTRIBUTIONS:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[distribution] = importlib.metadata.version(distribution)
    if len(set(versions.values())) > 1:
        return f"the parts of Transformer Engine differ: {', '.join(f'{name} {version}' for name, version in versions.items())}"
    return ""


@functools.cache
def load() -> Engine:
    """Import Transformer Engine, once for the process; every failure becomes a reason."""
    if reason := installed():
        return Engine(None, None, reason)
    import torch

    if not torch.cuda.is_available():
        return Engine(None, None, "Transformer Engine needs a GPU, and torch finds none")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of libraries that it looks for and this plugin does not use
            module = importlib.import_module(MODULE)  # the package alone imports even where this module does not
            recipes = importlib.import_module(RECIPES)
    except Exception as error:  # noqa: BLE001 - OSError, RuntimeError, AssertionError, AttributeError, ImportError and others were all seen
        return Engine(None, None, f"importing Transformer Engine failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
    missing = [name for name in ("autocast", "Linear") if not hasattr(module, name)]
    if missing:
        return Engine(None, None, f"Transformer Engine 2.9 or later is needed: the installed one has no {MODULE}.{missing[0]}")
    return Engine(module, recipes, "")


def unavailable(engine: Engine, check: str) -> str:
    """Return why the present GPU lacks a scale layout according to Transformer Engine itself; empty when it has it.

    Args:
        engine: Transformer Engine, loaded.
        check: name of the function of ``transformer_engine.pytorch`` to ask.
    """
    ask = getattr(engine.pytorch, check, None)
    if ask is None:
        return f"the installed Transformer Engine has no {check}"
    try:
        available, reason = ask(return_reason=True)
    except (AssertionError, RuntimeError, ValueError) as error:  # which class it raises changed between releases
        return f"{type(error).__name__}: {error}"
    return "" if available else str(reason)
