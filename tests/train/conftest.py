"""Fixtures of session tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import mpbackend
from mpbackend.train.session import Session
from tests.support.training import Prepare


@pytest.fixture(scope="session")
def target() -> mpbackend.Target:
    """The CPU of this machine."""
    return mpbackend.select("cpu")


@pytest.fixture
def prepare(target: mpbackend.Target) -> Iterator[Prepare]:
    """Return ``prepare(model, optimizer, recipe, **options)``, emulating what this CPU lacks; sessions are closed afterwards."""
    sessions: list[Session] = []

    def make(model: nn.Module, optimizer: Any, recipe: str, **options: Any) -> Session:
        session = target.prepare(model, optimizer, recipe, on_unsupported="emulate", **options)
        sessions.append(session)
        return session

    yield make
    for session in reversed(sessions):
        session.close()


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """A folder for a record that does not exist yet."""
    return tmp_path / "record"
