"""Plans on this machine's CPU, for tests that need a plan and its backend but no session."""

from __future__ import annotations

from mpbackend.backend import Backend
from mpbackend.planning import Plan
from mpbackend.plugins import load_plugins
from mpbackend.selection import plan, select_device


def planned(recipe: str, micro_batches: int = 1) -> tuple[Plan, Backend]:
    """Return a plan of ``recipe``, emulating what this CPU lacks, and the CPU's backend."""
    plugins = load_plugins()
    chosen = select_device("cpu", plugins, {})
    return plan(recipe, chosen.device, plugins=plugins, on_unsupported="emulate", micro_batches=micro_batches), chosen.backend
