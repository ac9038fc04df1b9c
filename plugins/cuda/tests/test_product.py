"""One product for probes. The functions take the device from outside, so a CPU stands in for the GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from mpbackend.errors import UnknownNameError
from mpbackend_cuda.product import DTYPES, product, settings

MATMUL: Any = torch.backends.cuda.matmul  # its properties are not seen by type checkers
HOST = torch.device("cpu")


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_sums_of_small_integers_are_exact_in_every_format(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    a = torch.randint(-3, 4, (16, 16), generator=generator).double()
    b = torch.randint(-3, 4, (16, 32), generator=generator).double()
    found = product(HOST, name)(a, b)
    assert found.dtype is torch.float64
    assert torch.equal(found, a @ b), "seed 1"


def test_the_format_of_fp32_tensors_is_set_for_the_product_only() -> None:
    before = MATMUL.fp32_precision
    for name, setting in (("fp32", "ieee"), ("tf32", "tf32")):
        with settings(name):
            assert MATMUL.fp32_precision == setting
        assert MATMUL.fp32_precision == before


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_parts_of_sums_are_not_rounded_to_16_bits(name: str) -> None:
    attribute = f"allow_{name}_reduced_precision_reduction"
    assert getattr(MATMUL, attribute)
    with settings(name):
        assert not getattr(MATMUL, attribute)
    assert getattr(MATMUL, attribute)


def test_fp8_keeps_the_fp32_sum() -> None:
    """448 * 448 * 16 is beyond every 8- and 16-bit format but bf16, which has not its bits when 1 is added."""
    a, b = torch.full((16, 32), 448.0).double(), torch.full((32, 16), 448.0).double()
    a[:, 16:], b[16:] = 0.0, 0.0
    a[:, 16], b[16] = 1.0, 16.0
    assert product(HOST, "fp8_e4m3")(a, b)[0, 0].item() == math.fsum([448.0 * 448.0 * 16, 16.0])


def test_other_formats_are_unknown() -> None:
    with pytest.raises(UnknownNameError, match="unknown format of products on a GPU 'hif8'"):
        product(HOST, "hif8")
