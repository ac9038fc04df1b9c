"""The fast engines give the oracle's bits, whatever the arithmetic and the operands."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from mpbackend.errors import BackendError, UnknownNameError
from mpbackend.numerics import exact_sums, kernel
from mpbackend.numerics.arithmetic import Arithmetic
from mpbackend.numerics.matmul import Engine, mm
from mpbackend.numerics.oracle import dot
from tests.support.arithmetics import random_arithmetic, random_exact_arithmetic, random_operand

ENGINES: tuple[Engine, ...] = ("extension", "numba") if kernel.library() is not None else ("numba",)
HOPPER_FP8 = Arithmetic(a="fp8_e4m3", b="fp8_e4m3", products_per_step=32, fraction_bits=13, register_bits=13, register_rounding="rz", zero_exponent=-133)


def differing(x: torch.Tensor, y: torch.Tensor) -> int:
    """Return the elements whose bits differ; all NaNs are one."""
    return int(((x.view(torch.int32) != y.view(torch.int32)) & ~(x.isnan() & y.isnan())).sum())


def compare(seed: int, engines: tuple[Engine, ...], draw: Callable[[random.Random], Arithmetic] = random_arithmetic) -> str:
    """Return what differs between engines and the oracle in one random case, empty for nothing."""
    rng = random.Random(seed)
    arithmetic = draw(rng)
    m, n = rng.choice(((1, 3), (2, 2), (3, 1)))
    k = rng.choice((1, 5, 32, 33, 64, 100, 200))
    a, b = random_operand(rng, arithmetic.a, m, k), random_operand(rng, arithmetic.b, k, n)
    addend = random_operand(rng, "fp16" if "fp16" in (arithmetic.register, arithmetic.promoted) else "bf16", m, n, exact=True).half().float()
    columns = b.T.double().tolist()
    rows = [[dot(row, column, arithmetic, addend[i, j].item()) for j, column in enumerate(columns)] for i, row in enumerate(a.double().tolist())]
    expected = torch.tensor(rows, dtype=torch.float64).float()
    return "".join(
        f"seed {seed}, {engine} by {kernel.loop_for(arithmetic)}: {count} of {m * n} differ, {arithmetic}\n"
        for engine in engines
        if (count := differing(mm(a, b, arithmetic, addend=addend, engine=engine), expected))
    )


@pytest.mark.parametrize("start", range(0, 300, 50))
def test_random_arithmetics_by_the_fast_engines_equal_the_oracle(start: int) -> None:
    assert "".join(compare(seed, ENGINES) for seed in range(start, start + 50)) == ""


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1000, 11000, 500))
def test_ten_thousand_random_arithmetics_equal_the_oracle(start: int) -> None:
    assert "".join(compare(seed, ENGINES) for seed in range(start, start + 500)) == ""


@pytest.mark.parametrize("start", range(0, 300, 50))
def test_random_exact_steps_by_whole_matrices_equal_the_oracle(start: int) -> None:
    assert all(exact_sums.models(random_exact_arithmetic(random.Random(seed))) for seed in range(start, start + 50))
    assert "".join(compare(seed, ("auto",), random_exact_arithmetic) for seed in range(start, start + 50)) == ""


@pytest.mark.parametrize("depth", [1, 5, 32, 40])
@pytest.mark.parametrize(
    ("engine", "products"), [*((engine, 1) for engine in ENGINES), *((engine, products) for engine in ("auto", "oracle") for products in (1, 4))]
)
def test_exact_sums_of_negative_zeros_stay_negative_in_every_order(engine: Engine, products: int, depth: int) -> None:
    arithmetic = Arithmetic(a="fp16", b="fp16", order="byte_pairs", products_per_step=products)
    a, b, addend = torch.full((2, depth), -0.0), torch.ones(depth, 2), torch.full((2, 2), -0.0)
    assert mm(a, b, arithmetic, addend=addend, engine=engine).signbit().all()
    assert not mm(a, b, arithmetic, engine=engine).signbit().any()


def test_a_sum_beside_a_half_is_rounded_once() -> None:
    """1 + 2^-24 + 2^-80 lies above the middle of two fp32 numbers: float64 alone would take it for the middle."""
    arithmetic = Arithmetic(a="bf16", b="bf16", products_per_step=3)
    a, b = torch.tensor([[1.0, 2.0**-12, 2.0**-40]]), torch.tensor([[1.0], [2.0**-12], [2.0**-40]])
    assert mm(a, b, arithmetic).item() == 1 + 2.0**-23
    assert mm(a, -b, arithmetic).item() == -1 - 2.0**-23
    assert mm(a, b * torch.tensor([[1.0], [1.0], [-1.0]]), arithmetic).item() == 1


def test_every_loop_is_taken_by_the_random_arithmetics() -> None:
    taken = {kernel.loop_for(random_arithmetic(random.Random(seed))) for seed in range(300)}
    assert taken >= set(kernel.LOOPS)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"products_per_step": 16, "fraction_bits": 25, "register_bits": None, "a": "fp16", "b": "fp16"},
        {"products_per_step": 4, "fraction_bits": 23, "register_bits": None, "a": "bf16", "b": "bf16"},
        {"products_per_step": 8, "fraction_bits": 24, "register_bits": None, "register": "fp16", "register_rounding": "rne", "a": "fp16", "b": "fp16"},
        {"promotion_interval": 128},
        {"products_per_step": 1, "fraction_bits": None, "register_bits": None, "register_rounding": "rne", "a": "fp32", "b": "fp32"},
    ],
)
def test_whole_matrices_have_the_bits_of_single_elements(change: dict[str, Any], engine: Engine) -> None:
    """Tiles, threads and blocks of K: any element is what the oracle makes of its row and column."""
    arithmetic = msgspec.structs.replace(HOPPER_FP8, **change)
    torch.manual_seed(5)
    a, b, addend = torch.randn(70, 600), torch.randn(600, 101), torch.randn(70, 101).half().float()
    whole = mm(a, b, arithmetic, addend=addend, engine=engine)
    rng = random.Random(6)
    for _ in range(12):
        i, j = rng.randrange(70), rng.randrange(101)
        alone = mm(a[i : i + 1], b[:, j : j + 1], arithmetic, addend=addend[i : i + 1, j : j + 1], engine="oracle")
        assert differing(whole[i : i + 1, j : j + 1], alone) == 0, (i, j)


@pytest.mark.parametrize("engine", ENGINES)
def test_sums_beyond_32_bits_are_exact(engine: Engine) -> None:
    arithmetic = Arithmetic(a="fp16", b="fp16", products_per_step=16, fraction_bits=25, register_rounding="rz")
    assert kernel.loop_for(arithmetic) == "checked"
    a, addend = torch.full((3, 64), 2 - 2**-10), torch.full((3, 3), 2 - 2**-10)
    expected = mm(a, a.T, arithmetic, addend=addend, engine="oracle")
    assert differing(mm(a, a.T, arithmetic, addend=addend, engine=engine), expected) == 0


@pytest.mark.parametrize("engine", [*ENGINES, "oracle"])
def test_tiny_sums_are_aligned_to_the_zero_exponent(engine: Engine) -> None:
    """2^-24 has no place in a step that is cut 4 bits below 2^-19."""
    arithmetic = Arithmetic(a="bf16", b="bf16", products_per_step=4, fraction_bits=4, zero_exponent=-19, register="fp16", output="fp16")
    a, b = torch.tensor([[2.0**-24, 0.0, 0.0, 0.0]]), torch.ones(4, 1)
    assert mm(a, b, arithmetic, engine=engine).item() == 0.0
    assert mm(a, b, msgspec.structs.replace(arithmetic, zero_exponent=None), engine=engine).item() == 2.0**-24


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_do_not_change_a_bit(threads: int) -> None:
    torch.manual_seed(1)
    a, b = torch.randn(37, 320), torch.randn(320, 65)
    before, expected = torch.get_num_threads(), mm(a, b, HOPPER_FP8)
    try:
        torch.set_num_threads(threads)
        assert differing(mm(a, b, HOPPER_FP8), expected) == 0
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(0, 4, 5), (4, 0, 5), (4, 5, 0)])
@pytest.mark.parametrize("engine", [*ENGINES, "oracle"])
def test_empty_products(shape: tuple[int, int, int], engine: Engine) -> None:
    m, k, n = shape
    result = mm(torch.ones(m, k), torch.ones(k, n), HOPPER_FP8, engine=engine)
    assert result.shape == (m, n)
    assert not result.any()


def test_strided_operands() -> None:
    torch.manual_seed(2)
    a, b = torch.randn(64, 8), torch.randn(33, 64)
    assert differing(mm(a.T, b.T, HOPPER_FP8), mm(a.T.contiguous(), b.T.contiguous(), HOPPER_FP8, engine="oracle")) == 0


def test_an_engine_that_does_not_model_the_arithmetic_says_so() -> None:
    exact = Arithmetic(a="fp16", b="fp16", products_per_step=4)
    assert kernel.loop_for(exact) is None
    with pytest.raises(BackendError, match="take engine 'oracle'"):
        mm(torch.ones(2, 4), torch.ones(4, 2), exact, engine="numba")
    assert mm(torch.ones(2, 4), torch.ones(4, 2), exact).tolist() == [[4.0, 4.0], [4.0, 4.0]]


def test_bad_input() -> None:
    with pytest.raises(BackendError, match=r"\(M, K\) and \(K, N\)"):
        mm(torch.ones(2, 3), torch.ones(2, 3), HOPPER_FP8)
    with pytest.raises(UnknownNameError, match="fast"):
        mm(torch.ones(2, 3), torch.ones(3, 2), HOPPER_FP8, engine="fast")  # type: ignore[arg-type] # the error is the point


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler, so the extension is left out")
@pytest.mark.skipif(not (Path(kernel.__file__).parents[2] / ".git").exists(), reason="a copy of the sources, which nothing was built in")
def test_the_extension_is_built_where_there_is_a_compiler() -> None:
    assert kernel.library() is not None
