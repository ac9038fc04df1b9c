"""Stored outputs of real devices, bit for bit.

``replay`` takes any file of the same kind: ``a`` and ``b`` (rows, K), ``c`` (rows), ``d`` (rows), and an arithmetic. MPBACKEND_SILICON names another folder.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from mpbackend.matrix import load_matrix
from mpbackend.numerics import kernel
from mpbackend.numerics.accumulate import arithmetic_for
from mpbackend.numerics.arithmetic import Arithmetic
from mpbackend.numerics.matmul import Engine, bmm

FOLDER = Path(os.environ.get("MPBACKEND_SILICON", Path(__file__).parents[3] / "shared" / "silicon"))
FILES = {
    "v100_fp16_fp32": ("v100", "fp16"),
    "a100_fp16_fp32": ("a100", "fp16"),
    "a100_bf16_fp32": ("a100", "bf16"),
    "a100_tf32_fp32": ("a100", "tf32"),
    "ada_fp8_e4m3_fp32": ("l40s", "fp8_e4m3"),
    "ada_fp8_e5m2_fp32": ("l40s", "fp8_e5m2"),
    "h100_fp16_fp32": ("h100", "fp16"),
    "h100_bf16_fp32": ("h100", "bf16"),
}
"""File to the device and the format of the operands."""

if not FOLDER.is_dir():
    pytest.skip("no stored outputs of devices here; MPBACKEND_SILICON names their folder", allow_module_level=True)


def arithmetic_of(device: str, name: str) -> Arithmetic:
    matrix = load_matrix()
    return arithmetic_for(matrix, matrix.device(device).arch, name, name)


def replay(file: Path, arithmetic: Arithmetic, rows: int | None = None, engine: Engine = "oracle") -> int:
    """Return how many results of a file differ from an engine's in any bit."""
    stored = np.load(file)
    a, b, c, d = (stored[name][:rows] for name in "abcd")
    left, right, addend = (torch.from_numpy(x).float() for x in (a[:, None, :], b[:, :, None], c.reshape(-1, 1, 1)))
    found = bmm(left, right, arithmetic, addend=addend, engine=engine).flatten().numpy()
    return int(np.count_nonzero(found.view(np.int32) != d.astype(np.float32).view(np.int32)))


@pytest.mark.parametrize("file", FILES)
def test_the_rows_of_a_device_give_its_stored_outputs(file: str) -> None:
    assert replay(FOLDER / f"{file}.npz", arithmetic_of(*FILES[file]), rows=300) == 0


@pytest.mark.parametrize("engine", ["extension", "numba"] if kernel.library() is not None else ["numba"])
@pytest.mark.parametrize("file", FILES)
def test_the_fast_engines_give_all_stored_outputs(file: str, engine: Engine) -> None:
    assert replay(FOLDER / f"{file}.npz", arithmetic_of(*FILES[file]), engine=engine) == 0


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_the_rows_of_a_device_give_all_its_stored_outputs(file: str) -> None:
    assert replay(FOLDER / f"{file}.npz", arithmetic_of(*FILES[file])) == 0


@pytest.mark.parametrize("change", [{"fraction_bits": 24}, {"products_per_step": 8}, {"register_rounding": "rne"}, {"fraction_bits": 26}], ids=str)
def test_another_arithmetic_does_not(change: dict[str, Any]) -> None:
    other = msgspec.structs.replace(arithmetic_of("h100", "fp16"), **change)
    assert replay(FOLDER / "h100_fp16_fp32.npz", other, rows=300) > 0
