"""Products of matrices in the arithmetic of a device, on a CPU: the one entry to the engines.

An engine changes the time only: ``extension``, ``numba`` and ``oracle`` give the same bits. ``chunk`` does not, and is asked for by name.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Literal

import msgspec
import torch

from mpbackend.errors import BackendError, UnknownNameError
from mpbackend.formats import FORMATS
from mpbackend.numerics import exact_sums, kernel, oracle
from mpbackend.numerics.arithmetic import Arithmetic
from mpbackend.numerics.rounding import round_to

Engine = Literal["auto", "extension", "numba", "oracle", "chunk"]

ENGINES: tuple[Engine, ...] = ("auto", "extension", "numba", "oracle", "chunk")


def mm(a: torch.Tensor, b: torch.Tensor, arithmetic: Arithmetic, *, addend: torch.Tensor | None = None, engine: Engine = "auto") -> torch.Tensor:
    """Return ``a @ b + addend`` in an arithmetic.

    Args:
        a: (M, K) numbers of any floating dtype on the CPU, converted to ``arithmetic.a`` first.
        b: (K, N) numbers, converted to ``arithmetic.b`` first.
        arithmetic: the unit.
        addend: what the sums start from, broadcast to (M, N): values of the register's format, or of ``promoted`` where there is promotion.
        engine: ``auto`` takes the extension, else numba, else ``exact_sums`` where a step is exact, else the oracle.

    Returns:
        (M, N) values of ``arithmetic.output``, in fp64 where the register or a format has that width, else in fp32.

    Raises:
        BackendError: shapes that do not fit, or an engine that is not installed or does not model the arithmetic.
        UnknownNameError: no such engine.
    """
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise BackendError("a product of matrices", found=f"shapes {tuple(a.shape)} and {tuple(b.shape)}", remedy="give (M, K) and (K, N)")
    if engine not in ENGINES:
        raise UnknownNameError("engine of products", engine, ENGINES, remedy="take one of these")
    dtype = sums_dtype(arithmetic)
    left, right = operand(a, arithmetic.a, arithmetic, dtype), operand(b, arithmetic.b, arithmetic, dtype)
    start = torch.zeros((), dtype=dtype) if addend is None else addend.to(dtype)
    start = start.expand(left.shape[0], right.shape[1])
    return written(sums(left, right, start, arithmetic, engine), arithmetic)


def bmm(a: torch.Tensor, b: torch.Tensor, arithmetic: Arithmetic, *, addend: torch.Tensor | None = None, engine: Engine = "auto") -> torch.Tensor:
    """Return the products of two batches of matrices.

    Args:
        a: (B, M, K).
        b: (B, K, N).
        arithmetic: the unit.
        addend: as in ``mm``, broadcast to (B, M, N).
        engine: as in ``mm``.

    Returns:
        (B, M, N), as ``mm`` gives each.

    Raises:
        BackendError: as ``mm``.
    """
    if a.dim() != 3 or b.dim() != 3 or a.shape[0] != b.shape[0] or a.shape[2] != b.shape[1]:
        raise BackendError("a batch of products", found=f"shapes {tuple(a.shape)} and {tuple(b.shape)}", remedy="give (B, M, K) and (B, K, N)")
    if not len(a):
        return written(torch.zeros(0, a.shape[1], b.shape[2], dtype=sums_dtype(arithmetic)), arithmetic)
    starts = None if addend is None else addend.expand(len(a), a.shape[1], b.shape[2])
    if arithmetic.model == "host":
        dtype = sums_dtype(arithmetic)
        left, right = operand(a, arithmetic.a, arithmetic, dtype), operand(b, arithmetic.b, arithmetic, dtype)
        return written(host_sums(left, right, torch.zeros((), dtype=dtype) if starts is None else starts.to(dtype)), arithmetic)
    return torch.stack([mm(x, y, arithmetic, addend=None if starts is None else starts[i], engine=engine) for i, (x, y) in enumerate(zip(a, b, strict=True))])


def addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, arithmetic: Arithmetic, *, engine: Engine = "auto") -> torch.Tensor:
    """Return ``a @ b + bias`` as libraries fuse it: the bias is added to the last sum in the register's format, before the output is written.

    Args:
        bias: broadcast to (M, N).
        a: (M, K).
        b: (K, N).
        arithmetic: the unit.
        engine: as in ``mm``.

    Returns:
        (M, N), as ``mm``.
    """
    wide = msgspec.structs.replace(arithmetic, output=arithmetic.register, output_subnormals="kept", overflow="inf_nan")
    total = mm(a, b, wide, engine=engine)
    return written(round_to(total + bias.to(total.dtype), arithmetic.register), arithmetic)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, arithmetic: Arithmetic, *, engine: Engine = "auto") -> torch.Tensor:
    """Return ``x @ weight.T + bias``.

    Args:
        x: (..., K).
        weight: (N, K).
        bias: (N), or None.
        arithmetic: the unit.
        engine: as in ``mm``.

    Returns:
        (..., N), as ``mm``.
    """
    rows = x.reshape(-1, x.shape[-1])
    total = mm(rows, weight.T, arithmetic, engine=engine) if bias is None else addmm(bias, rows, weight.T, arithmetic, engine=engine)
    return total.reshape(*x.shape[:-1], len(weight))


def sums_dtype(arithmetic: Arithmetic) -> torch.dtype:
    """Return the dtype that carries operands and sums."""
    wide = "fp64" in (arithmetic.a, arithmetic.b, arithmetic.register, arithmetic.output)
    return torch.float64 if wide else torch.float32


def sums(
    left: torch.Tensor, right: torch.Tensor, start: torch.Tensor, arithmetic: Arithmetic, engine: Engine, shifts: kernel.Shifts | None = None
) -> torch.Tensor:
    """Return the last sums of a product of converted operands, by an engine; ``shifts`` (see ``kernel.accumulate``) are for the fast ones."""
    if arithmetic.model == "host":
        return host_sums(left, right, start)
    if engine == "chunk":
        return chunk_sums(left, right, start, arithmetic)
    loop = kernel.loop_for(arithmetic)
    chosen = engine if engine != "auto" else "oracle" if loop is None else best_engine()
    if chosen == "oracle" and engine == "auto" and exact_sums.models(arithmetic):
        return exact_sums.accumulate(left, right, start, arithmetic)
    if chosen == "oracle":
        return oracle_sums(left, right, start, arithmetic)
    if loop is None:
        raise BackendError(f"engine {engine}", found=f"an arithmetic that it does not model: {arithmetic.source or arithmetic}", remedy="take engine 'oracle'")
    left, right = in_steps(left, right, arithmetic)
    shifts = None if shifts is None else in_steps(*shifts, arithmetic)
    if chosen == "extension":
        if kernel.library() is None:
            raise BackendError(
                "engine extension", found="no compiled extension", remedy="install mpbackend where there is a C++ compiler, or take engine 'numba'"
            )
        return kernel.accumulate(left.contiguous(), right.contiguous(), start, arithmetic, loop, shifts)
    if importlib.util.find_spec("numba") is None:
        raise BackendError("engine numba", found="numba is not installed", remedy="pip install 'mpbackend[emulator]'")
    from mpbackend.numerics import kernel_numba

    return kernel_numba.accumulate(left.contiguous(), right.contiguous(), start, arithmetic, loop, shifts)


@functools.cache
def best_engine() -> Engine:
    """Return the fastest engine that is installed."""
    if kernel.library() is not None:
        return "extension"
    return "numba" if importlib.util.find_spec("numba") is not None else "oracle"


def operand(x: torch.Tensor, name: str, arithmetic: Arithmetic, dtype: torch.dtype) -> torch.Tensor:
    """Return a matrix as the unit sees it: values of its format, in fp32 or fp64."""
    flushes = arithmetic.operand_subnormals == "flushed"
    if FORMATS[name].torch_dtype == str(x.dtype).removeprefix("torch.") and not flushes:
        return x.to(dtype)
    wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    return round_to(wide, name, arithmetic.operand_rounding, subnormals=arithmetic.operand_subnormals).to(dtype)


def written(x: torch.Tensor, arithmetic: Arithmetic) -> torch.Tensor:
    """Return the last sums in the output's format."""
    saturates, flushes = arithmetic.overflow == "saturating", arithmetic.output_subnormals == "flushed"
    summed = arithmetic.register if arithmetic.promotion_interval is None else arithmetic.promoted
    if arithmetic.output == summed and not saturates and not flushes:
        return x
    x = torch.nan_to_num(x, nan=0.0, posinf=torch.inf, neginf=-torch.inf) if saturates else x
    overflow: Literal["saturate"] | None = "saturate" if saturates else None
    return round_to(x, arithmetic.output, arithmetic.output_rounding, overflow=overflow, subnormals=arithmetic.output_subnormals)


def in_steps(left: torch.Tensor, right: torch.Tensor, arithmetic: Arithmetic) -> tuple[torch.Tensor, torch.Tensor]:
    """Return operands whose products stand in the order of the unit, with zeros up to whole steps."""
    depth, permuted = left.shape[1], arithmetic.order == "byte_pairs"
    # An exact step needs no filling, and a zero more would make a sum of negative zeros positive.
    whole = arithmetic.fraction_bits is None and arithmetic.products_per_step == 1
    unit = 1 if whole else oracle.BYTE_PAIRS if permuted else arithmetic.products_per_step
    missing = -depth % unit
    if missing:
        left = torch.nn.functional.pad(left, (0, missing))
        right = torch.nn.functional.pad(right, (0, 0, 0, missing))
    if permuted:
        order = torch.tensor([index for step in oracle.steps(depth + missing, arithmetic) for index in step], dtype=torch.long)
        left, right = left[:, order], right[order]
    return left, right


def host_sums(left: torch.Tensor, right: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """Return sums in the order of the host's library, with full products: torch's reduced-precision switches are not let in."""
    total = left @ right
    return total + start if start.any() else total


def oracle_sums(left: torch.Tensor, right: torch.Tensor, start: torch.Tensor, arithmetic: Arithmetic) -> torch.Tensor:
    """Return sums one element at a time."""
    rows, columns = left.double().tolist(), right.double().T.contiguous().tolist()
    values = [[oracle.sums(row, column, arithmetic, start[i, j].item()) for j, column in enumerate(columns)] for i, row in enumerate(rows)]
    return torch.tensor(values, dtype=left.dtype).reshape(start.shape)


def chunk_sums(left: torch.Tensor, right: torch.Tensor, start: torch.Tensor, arithmetic: Arithmetic) -> torch.Tensor:
    """Return an approximation that keeps the register's width and the promotion, and leaves alignment and rounding inside a step to the host.

    Products are added in fp32 by the host's library; every 32, or every step where it has more, the register is cut toward zero to ``effective_bits``, or
    rounded to fp16. A register of 23 bits is not cut at all.
    """
    if left.dtype != torch.float32:
        raise BackendError("engine chunk", found=f"an arithmetic with fp64: {arithmetic.source or arithmetic}", remedy="take engine 'auto'")
    interval = arithmetic.promotion_interval or max(1, left.shape[1])
    cut = 23 - arithmetic.effective_bits
    step = max(32, arithmetic.products_per_step) if cut > 0 else interval
    register, outer = torch.empty(start.shape), start.clone()
    view = register.view(torch.int32)
    for first in range(0, left.shape[1], interval):
        for k in range(first, min(first + interval, left.shape[1]), step):
            end = min(k + step, first + interval)
            if k == first:
                torch.mm(left[:, k:end], right[k:end], out=register)
            else:
                register.addmm_(left[:, k:end], right[k:end])
            if arithmetic.register == "fp16":
                register.copy_(register.half())
            elif cut > 0:
                view.bitwise_and_(-1 << cut)
        outer += register
    return outer
