"""One product for probes. The functions take the device from outside, so a CPU stands in for the NPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mpbackend.errors import UnknownNameError
from mpbackend_ascend.implementations import A2, A5, FIRST_910
from mpbackend_ascend.product import product, settings

HOST = torch.device("cpu")


@pytest.mark.parametrize(("arch", "name"), [(A2, "fp32"), (A2, "bf16"), (A2, "hf32_e8m11"), (A5, "hf32_e8m10"), (FIRST_910, "fp16"), (FIRST_910, "fp32")])
def test_sums_of_small_integers_are_exact_in_every_format(library: Any, arch: str, name: str) -> None:
    a = torch.arange(-8.0, 8.0).reshape(4, 4).double()
    found = product(HOST, arch, name)(a, a.t())
    assert found.dtype is torch.float64
    assert torch.equal(found, a @ a.t())


@pytest.mark.parametrize(("name", "setting"), [("fp32", False), ("hf32_e8m11", True)])
def test_the_format_of_fp32_tensors_is_set_for_the_product_only(npu: Any, name: str, setting: bool) -> None:
    npu.matmul.allow_hf32 = not setting
    with settings(A2, name):
        assert npu.matmul.allow_hf32 is setting
    assert npu.matmul.allow_hf32 is not setting


def test_where_there_is_no_choice_nothing_is_set(npu: Any) -> None:
    npu.matmul.allow_hf32 = True
    for arch, name in ((FIRST_910, "fp32"), (A2, "bf16")):
        with settings(arch, name):
            assert npu.matmul.allow_hf32 is True


@pytest.mark.parametrize(("arch", "name"), [(FIRST_910, "bf16"), (A2, "hf32_e8m10"), (A2, "hif8")])
def test_other_formats_are_unknown(library: Any, arch: str, name: str) -> None:
    with pytest.raises(UnknownNameError, match=f"unknown format of products on {arch} '{name}'"):
        product(HOST, arch, name)
