"""A check that a low-bit layer multiplies what the recipe says: its output and gradients against those of the plain layer, within a derived bound."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mpbackend.conformance.scales import CheckResult
from mpbackend.lowbit import low_bit
from mpbackend.recipe import parse_recipe
from mpbackend.roles import PASSES
from mpbackend.train.conversion import Make
from mpbackend.train.reference import LowBitLinear

TOKENS, INPUTS, OUTPUTS = 128, 256, 384
"""Multiples of 128, the largest that a granularity asks for."""

STEPS = 3
"""So that delayed scales are those of earlier steps."""

OUTPUT_ERROR = 2.0**-7
"""Relative: the result, and a bias added to it, rounded to bf16 twice (2^-9 each) by one of the two and at another place by the other."""

PRODUCTS_PER_STEP, FRACTION_BITS = 32, 13
"""The narrowest register of a tensor core that is known: 13 fraction bits, 32 products a step (the fp8 unit of sm_90, without promotion)."""

Run = Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""Gives output, gradient of the input and gradient of the weight of one step of a layer, in fp32 on the CPU, for an input and the gradient of the output."""


def check_products(name: str, make: Make, recipe: str = "fp8", device: str = "cpu", *, run: Run | None = None) -> CheckResult:
    """Train a layer of a lowering and the plain one for a few steps under bf16 autocast, and compare output and gradients.

    The two may differ by the rounding of the result, and by the register that sums: one unit in its last fraction bit of the sum of magnitudes for each step of
    32 products. A product in other formats differs by more in some element.

    Args:
        name: what the result calls the lowering.
        make: makes its layer from a plain one.
        recipe: text of a recipe.
        device: torch device of the lowering; the plain layer runs on the CPU.
        run: runs a step of the lowering's layer; under bf16 autocast of the device when omitted.
    """
    run_made = run_layer if run is None else run
    rules = low_bit(parse_recipe(recipe))
    generator = torch.Generator().manual_seed(0)
    weight, bias = (torch.randn(size, generator=generator) / INPUTS**0.5 for size in ((OUTPUTS, INPUTS), (OUTPUTS,)))
    made = make("layer", linear(weight, bias).to(device))
    if isinstance(made, str):
        return CheckResult(lowering=name, check="products", outcome="skipped", detail=made)
    reference = LowBitLinear.from_linear(linear(weight, bias), rules)
    for step in range(STEPS):
        x = torch.randn(TOKENS, INPUTS, generator=generator) * 2.0**step
        gradient = torch.randn(TOKENS, OUTPUTS, generator=generator) * 2.0 ** (-8 - step)
        wanted, found = run_layer(reference, x, gradient), run_made(made, x.to(device), gradient.to(device))
        magnitudes = (x.abs() @ weight.abs().t(), gradient.abs() @ weight.abs(), gradient.abs().t() @ x.abs())
        for product, summed, theirs, mine, magnitude in zip(PASSES, (INPUTS, OUTPUTS, TOKENS), found, wanted, magnitudes, strict=True):
            bound = OUTPUT_ERROR * mine.abs() + summed / PRODUCTS_PER_STEP * 2.0**-FRACTION_BITS * magnitude
            excess = ((theirs - mine).abs() / bound).max().item()
            if not excess <= 1:
                detail = f"{recipe}, step {step + 1}: {product} differs by {excess:.2g} times what sums and roundings explain"
                return CheckResult(lowering=name, check="products", outcome="failed", detail=detail)
    return CheckResult(lowering=name, check="products", outcome="passed")


def linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    """Return a layer with copies of the given parameters."""
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.load_state_dict({"weight": weight, "bias": bias})
    return layer


def run_layer(layer: nn.Module, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, gradient of the input and gradient of the weight of one step, in fp32 on the CPU."""
    x = x.clone().requires_grad_()
    for parameter in layer.parameters():
        parameter.grad = None
    with torch.autocast(x.device.type, torch.bfloat16):
        out = layer(x)
    out.backward(gradient.to(out.dtype))
    weight = layer.get_parameter("weight")
    if x.grad is None or weight.grad is None:
        return out.detach().float().cpu(), torch.full_like(x, torch.nan).cpu(), torch.full_like(weight, torch.nan).cpu()
    return out.detach().float().cpu(), x.grad.float().cpu(), weight.grad.float().cpu()
