from __future__ import annotations

import pytest

from mpbackend.capability import Accumulator, Align, Arch, Conflict, DeviceModel, Peak, Row, Source
from mpbackend.documents import MatrixFile
from mpbackend.matrix import Matrix, load_matrix

HOSTILE = "</script><script>alert('x')</script> | a *note* <!-- [b](c)"


def row(arch: str, level: str = "native", **fields: object) -> Row:
    """Return a row whose unnamed fields do not matter."""
    plain = {"op": "matmul", "a": "bf16", "b": "bf16", "path": "simt", "accumulate": "fp32", "source": ("manual",), "evidence": "documented"}
    return Row(**{"arch": arch, "level": level, **plain, **fields})  # type: ignore[arg-type] # a test's shorthand


def small_matrix() -> Matrix:
    """Return two architectures: what they share, what differs, what only one has, and text that would break a page."""
    made = {"source": ("manual",), "evidence": "documented"}
    document = MatrixFile(
        schema=1,
        family="acme",
        facts={"acme": 3},
        source=(Source(id="manual", title="Manual", location="https://acme.example/x", date="2026-01-02"), Source(id="lab", title="A | B", location=HOSTILE)),
        arch=tuple(Arch(key=key, name=f"Acme {key}", family="acme", **made) for key in ("one", "two")),  # type: ignore[arg-type] # a test's shorthand
        device=(
            DeviceModel(key="acme-1", arch="one", name="Acme 1", aliases=("first",), memory_bytes=(80 * 10**9,), **made),  # type: ignore[arg-type] # as above
            DeviceModel(key="acme-1b", arch="one", name="Acme 1b", **made),  # type: ignore[arg-type] # as above
            DeviceModel(key="acme-2", arch="two", name="Acme 2", memory_bytes=(2**35, 2**36), **made),  # type: ignore[arg-type] # as above
        ),
        row=(
            row("one", note=HOSTILE, accumulator=Accumulator(products_per_step=16, fraction_bits=25, rounding="rz"), facts=("acme/0",)),
            row("one", path="wgmma", since={"toolkit": "8.6"}, align=Align(m=16, n=1, k="unknown")),
            row("one", "absent", a="fp8_e4m3", b="fp8_e5m2", accumulate="none"),
            row("one", a="hf32_e8m11", b="hf32_e8m11", evidence="measured"),
            row("one", "converted", op="conv", a="fp32", b="fp32", computes="fp16", conflict=(Conflict(claim="It is native.", source="lab"),)),
            row("two", "library", path="triton", scaling="mx_1x32", source=("lab", "manual")),
            row("two", "library"),
            row("two", op="conv", a="fp32", b="fp32"),
            row("two", "unknown", a="int8", b="int8", accumulate="int32"),
        ),
        peak=(
            Peak(device="acme-1", format="bf16", accumulate="fp32", tera_per_s=300.0, basis="vendor", **made),  # type: ignore[arg-type] # as above
            Peak(device="acme-1", format="bf16", accumulate="fp32", tera_per_s=600.0, sparsity="2:4", basis="vendor", **made),  # type: ignore[arg-type] # as above
            Peak(device="acme-1", format="fp32", accumulate="fp32", tera_per_s=20.0, unit="vector", basis="derived", **made),  # type: ignore[arg-type] # as above
        ),
    )
    return Matrix([("acme.toml", document)])


@pytest.fixture
def matrix() -> Matrix:
    return small_matrix()


@pytest.fixture
def hostile() -> str:
    return HOSTILE


@pytest.fixture(scope="session")
def shipped() -> Matrix:
    return load_matrix()
