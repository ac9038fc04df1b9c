"""What the tests of the emulator share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import mpbackend
from mpbackend.matrix import Matrix, load_matrix
from mpbackend_emulator.products import Products
from mpbackend_emulator.settings import Settings
from mpbackend_emulator.unit import Unit


@pytest.fixture(scope="session")
def matrix() -> Matrix:
    """The shipped facts."""
    return load_matrix()


@pytest.fixture
def products_of(matrix: Matrix) -> Callable[[str], Products]:
    """Makes the products of a device with settings of its own."""

    def make(key: str) -> Products:
        return Products(Unit(matrix, key, matrix.device(key).arch, Settings()))

    return make


@pytest.fixture(scope="session")
def target_of() -> Callable[[str], mpbackend.Target]:
    """Selects an emulated device once."""
    known: dict[str, mpbackend.Target] = {}

    def select(key: str) -> mpbackend.Target:
        if key not in known:
            known[key] = mpbackend.select(f"emu:{key}")
        return known[key]

    return select
