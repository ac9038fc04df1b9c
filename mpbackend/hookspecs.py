"""The three hooks of a plugin.

A plugin is a module named by an entry point of the group ``mpbackend``. It is imported at start-up, so it imports neither torch nor a vendor package at
module level. Hooks are called once, at start-up, never while training.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import pluggy

from mpbackend.backend import Backend
from mpbackend.recipe import Recipe

PROJECT = "mpbackend"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def mpbackend_backends() -> Iterable[Backend]:
    """Return the backends of this plugin.

    Called once when plugins are loaded. Return objects that have every member of ``mpbackend.backend.Backend``; a missing member or a name that another
    plugin took makes the backend unavailable, with the cause shown by ``mpbackend doctor``. Anything raised here does the same.

    Example:
        @hookimpl
        def mpbackend_backends():
            from my_plugin.backend import MyBackend

            return [MyBackend()]
    """
    raise AssertionError("a hook specification is never called")


@hookspec
def mpbackend_matrices() -> Iterable[Path]:
    """Return the capability matrix files of this plugin, for architectures that the shipped matrices do not declare.

    Called once when plugins are loaded. A file that is malformed, or declares a key that another file declares, makes that file unavailable.

    Example:
        @hookimpl
        def mpbackend_matrices():
            return [Path(__file__).with_name("my_device.toml")]
    """
    raise AssertionError("a hook specification is never called")


@hookspec
def mpbackend_recipes() -> Mapping[str, Recipe]:
    """Return further presets, name to recipe; a name that is taken makes that preset unavailable.

    Called once when plugins are loaded. ``Recipe.preset`` must equal the name.

    Example:
        @hookimpl
        def mpbackend_recipes():
            return {"bf16-wide": Recipe(preset="bf16-wide", compute=gemm("bf16"), reduce=Reduce(format="fp32"))}
    """
    raise AssertionError("a hook specification is never called")
