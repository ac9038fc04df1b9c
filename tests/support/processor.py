"""What the processor at hand can compute."""

from __future__ import annotations

import functools

import mpbackend


@functools.cache
def has_bf16() -> bool:
    """Tell whether matrix products in bf16 are more than emulated here."""
    return mpbackend.select("cpu").plan("bf16", on_unsupported="emulate").decision("compute.forward", "matmul").level != "emulated"
