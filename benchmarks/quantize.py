"""Quantizing a matrix to fp8_e4m3 and dequantizing it: this package against torchao and gfloat on a CPU.

4096 x 4096 fp32 numbers, one scale a tensor and MX blocks of 32 whose e8m0 scale lets nothing saturate. torchao: ``hp_tensor_to_float8_dynamic`` and
``to_original_precision``; ``MXTensor.to_mx`` (RCEIL) and ``dequantize``. gfloat: amax, scaling and ``round_ndarray`` in float32, which makes values and no
codes, on a part of the rows, its time multiplied accordingly. Ways are interleaved in a shuffled order; all write new tensors but ``out=``, which keeps the
one that values are written to. Before the clock starts the values are compared: they differ by the rounding of a reciprocal at most.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import random
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from mpbackend.numerics.quantize import dequantize, quantize

GFLOAT_SHARE = 16
MX = ("prototype.mx_formats.config", "prototype.mx_formats.mx_tensor")
Way = Callable[[], torch.Tensor]


def ours(x: torch.Tensor, granularity: str, out: torch.Tensor | None = None) -> Way:
    return lambda: dequantize(quantize(x, "fp8_e4m3", granularity), out=out)  # type: ignore[arg-type]  # one of two literals


def torchao_ways(x: torch.Tensor) -> dict[str, Way]:
    """Return torchao's two ways; what it says about kernels that it cannot load is left out."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = (
            "float8.config",
            "float8.float8_scaling_utils",
            "float8.float8_training_tensor",
            "prototype.mx_formats.config",
            "prototype.mx_formats.mx_tensor",
        )
        config, scaling, training, mx_config, mx = (importlib.import_module(f"torchao.{name}") for name in names)
    logging.disable(logging.NOTSET)

    how = {"gemm_input_role": training.GemmInputRole.INPUT, "scaling_granularity": config.ScalingGranularity.TENSORWISE}

    def tensor() -> Any:
        return scaling.hp_tensor_to_float8_dynamic(x, torch.float8_e4m3fn, training.LinearMMConfig(), **how).to_original_precision()

    def blocks() -> Any:
        return mx.MXTensor.to_mx(x, torch.float8_e4m3fn, 32, scaling_mode=mx_config.ScaleCalculationMode.RCEIL).dequantize(torch.float32)

    return {"tensor": tensor, "1x32": blocks}


def gfloat_way(x: torch.Tensor) -> Way:
    gfloat: Any = importlib.import_module("gfloat")
    fp8: Any = importlib.import_module("gfloat.formats").format_info_ocp_e4m3
    part = x[: x.shape[0] // GFLOAT_SHARE].numpy()

    def way() -> torch.Tensor:
        scale = 448 / abs(part).max()
        return torch.from_numpy(gfloat.round_ndarray(fp8, part * scale, sat=True) / scale)

    return way


def check(ways: dict[str, Way]) -> None:
    """Compare every way with the first one; all round x times a scale, and multiply by, or divide through, that scale."""
    values = {name: way() for name, way in ways.items()}
    first = values[next(iter(values))].clone()
    for name, found in values.items():
        if name.startswith("gfloat"):
            continue  # its scale is that of a part
        # A reciprocal is rounded by half an ulp, and so is the product: at most 2^-23 of the value together.
        assert torch.all((found - first).abs() <= first.abs() * 2.0**-23 * (1 + 2.0**-20)), name


def measure(ways: dict[str, Way], rounds: int) -> dict[str, float]:
    """Return the median milliseconds of each way."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    order = list(ways)
    shuffle = random.Random(0).shuffle
    for number in range(rounds + 1):
        shuffle(order)
        for name in order:
            start = time.perf_counter()
            ways[name]()
            if number:
                times[name].append((time.perf_counter() - start) * 1e3 * (GFLOAT_SHARE if name.startswith("gfloat") else 1))
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--size", type=int, default=4096, help="rows and columns, a multiple of 32")
    options = parser.parse_args()
    x = torch.randn(options.size, options.size, generator=torch.Generator().manual_seed(0))
    theirs = torchao_ways(x)
    for granularity, title in (("tensor", "one scale a tensor"), ("1x32", "MX blocks of 32")):
        ways = {"mpbackend": ours(x, granularity), "mpbackend, out=": ours(x, granularity, torch.empty_like(x)), "torchao": theirs[granularity]}
        if granularity == "tensor":
            ways[f"gfloat, 1/{GFLOAT_SHARE} x {GFLOAT_SHARE}"] = gfloat_way(x)
        check(ways)
        results = measure(ways, options.rounds)
        print(f"\n{title}, {x.numel():,} elements, {options.rounds} rounds\n{'way':<20} {'median ms':>10} {'ratio':>7}")
        for name, median in results.items():
            print(f"{name:<20} {median:>10.1f} {median / results['mpbackend']:>7.2f}")


if __name__ == "__main__":
    main()
