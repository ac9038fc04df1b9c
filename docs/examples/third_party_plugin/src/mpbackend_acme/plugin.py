"""The entry point: three hooks. It is imported whenever mpbackend starts, so it imports no torch, and the backend only when it is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from mpbackend.backend import Backend
from mpbackend.hookspecs import hookimpl
from mpbackend.recipe import Recipe, gemm
from mpbackend.roles import Reduce


@hookimpl
def mpbackend_backends() -> Iterable[Backend]:
    """Return the backend of the Acme X1."""
    from mpbackend_acme.backend import AcmeBackend

    return [AcmeBackend()]


@hookimpl
def mpbackend_matrices() -> Iterable[Path]:
    """Return what the Acme X1 computes in, with a source for every row."""
    return [Path(__file__).with_name("acme.toml")]


@hookimpl
def mpbackend_recipes() -> Mapping[str, Recipe]:
    """Return the preset that Acme recommends: bf16, with gradients divided after the sum between ranks."""
    return {"acme-bf16": Recipe(preset="acme-bf16", compute=gemm("bf16"), reduce=Reduce(format="fp32", divide="after"))}
