"""The entry point, and the members that other tests do not reach."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

import mpbackend
from mpbackend.backend import MEMBERS, Backend
from mpbackend.errors import UnknownNameError
from mpbackend.plugins import load_plugins
from mpbackend_emulator.backend import EmulatorBackend
from mpbackend_emulator.products import FORMAT_OF, Products

Select = Callable[[str], mpbackend.Target]
Make = Callable[[str], Products]

IMPORTS_NO_TORCH = """
import sys
import mpbackend_emulator.plugin as plugin
(backend,) = plugin.mpbackend_backends()
device = backend.address("h100")
backend.implements(device), backend.discover(), backend.collectives(device), backend.memory(device).read(), backend.clock(device).mark()
loaded = sorted(name for name in sys.modules if name.split(".")[0] in ("torch", "numpy"))
assert not loaded, loaded
"""


def test_the_entry_point_is_found_and_complete() -> None:
    backend = load_plugins().backend("emu")
    assert isinstance(backend, EmulatorBackend)
    assert isinstance(backend, Backend)
    assert all(hasattr(backend, member) for member in MEMBERS)


def test_listing_loads_no_torch() -> None:
    subprocess.run([sys.executable, "-c", IMPORTS_NO_TORCH], check=True, timeout=60)


def test_the_address_of_a_device_selects_it_again(target_of: Select) -> None:
    info = target_of("ascend-910b3").info
    assert info.address == "emu:ascend-910b3"
    assert mpbackend.select(info.address).info == info


def test_what_is_the_hosts(target_of: Select) -> None:
    target = target_of("h100")
    backend, info = target.backend, target.info
    assert backend.collectives(info).name == "gloo"
    assert (backend.memory(info).read().allocated or 0) > 2**20
    clock = backend.clock(info)
    assert clock.elapsed_ms(clock.mark(), clock.mark()) >= 0.0


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "fp64"])
def test_a_product_for_probes_is_that_of_a_session(products_of: Make, target_of: Select, name: str) -> None:
    dtype = next(dtype for dtype, form in FORMAT_OF.items() if form == name)
    a, b = (torch.randn(9, 9, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (1, 2))
    backend = target_of("h100").backend
    assert isinstance(backend, EmulatorBackend)
    found = backend.product(target_of("h100").info, name)(a.double(), b.double())
    products = products_of("h100")
    if name == "fp32":  # a session's setting may be tf32, a probe asks for fp32
        assert products.unit.plain("matmul", "fp32").a == "fp32"
    assert found.dtype is torch.float64
    assert torch.equal(found, products.mm(a, b).double()), "seeds 1, 2"


def test_a_product_of_another_format_keeps_its_sum(target_of: Select) -> None:
    """128 * 128 + 1: the register of an h100 keeps 13 fraction bits of fp8, that of a b200 all of fp32; tf32 cuts its operands."""
    a, b = torch.zeros(1, 64).double(), torch.zeros(64, 1).double()
    a[0, 0], b[0, 0], a[0, 40], b[40, 0] = 128.0, 128.0, 1.0, 1.0
    for key, result in (("h100", 16384.0), ("b200", 16385.0)):
        target = target_of(key)
        assert isinstance(target.backend, EmulatorBackend)
        assert target.backend.product(target.info, "fp8_e4m3")(a, b).item() == result, key
        assert target.backend.product(target.info, "tf32")(a + a * 2.0**-12, b).item() == 16385.0
    with pytest.raises(UnknownNameError, match="unknown format of products on h100 'hif8'"):
        target_of("h100").backend.product(target_of("h100").info, "hif8")  # type: ignore[attr-defined] # an optional member of the protocol
