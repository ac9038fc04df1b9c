"""Low-bit linear layers on a CPU: torchao's where it is installed and does what the recipe means, else the plain ones of the core.

Both end in torch's scaled product and give the same bits under bf16 autocast but for the rounding of a bias and for amaxes at the ends of fp32; README.md says
where, and tests hold both to it.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mpbackend.errors import BackendError
from mpbackend.lowbit import LowBit, is_low_bit_recipe, low_bit
from mpbackend.planning import Plan
from mpbackend.train.conversion import Make, check_plain, convert_linears
from mpbackend.train.reference import LowBitLinear
from mpbackend_cpu.discovery import torchao_state
from mpbackend_cpu.implementations import FP8, FP8_SCALINGS

GRANULARITIES = {"tensor": "TENSORWISE", "row": "AXISWISE"}
"""Granularity to torchao's word for it."""


def convert(model: nn.Module, plan: Plan) -> Sequence[Mapping[str, str]]:
    """Make the linear layers of a model low-bit where the plan is; see ``convert_linears``.

    Raises:
        BackendError: no layer can be converted, or the plan is not low-bit and layers of an earlier recipe are.
    """
    if not is_low_bit_recipe(plan.effective):
        check_plain(model)
        return []
    meaning = low_bit(plan.effective)
    make, by = choose(meaning)
    return convert_linears(model, make, meaning, by=by)


def choose(meaning: LowBit) -> tuple[Make, str]:
    """Return what makes the layers of a recipe, and its name with the reason for the choice."""
    version, refusal = torchao_state()
    refusal = refusal or torchao_misfit(meaning)
    if not refusal:
        try:
            return torchao_maker(meaning), f"torchao {version}"
        except BackendError as error:
            refusal = str(error)
    return (lambda name, linear: LowBitLinear.from_linear(linear, meaning)), f"plain torch: {refusal}"


def torchao_misfit(meaning: LowBit) -> str:
    """Return what in a recipe torchao does not do; empty when it does it all."""
    operands = {"inputs": meaning.forward.a, "weights": meaning.forward.b, "gradients": meaning.dgrad.a}
    granularities = {operand.granularity for operand in operands.values()}
    other = [f"{name} in {operand.format}" for name, operand in operands.items() if operand.format not in FP8]
    if meaning.mode == "delayed":
        return "torchao has no delayed scaling"
    if other:
        return f"torchao has no {other[0]}"
    if meaning.dgrad.a != meaning.wgrad.a:
        return "torchao has one format for both products of the gradient"
    if len(granularities) > 1 or not granularities <= set(FP8_SCALINGS):
        return f"torchao has no scales per {', '.join(sorted(granularities))}"
    if meaning.margin or meaning.scale_format == "ue4m3":
        return f"torchao has no margin of 2^{meaning.margin}" if meaning.margin else "torchao has no two-level scales"
    return ""


def load_torchao() -> Any:
    """Return the module ``torchao.float8``; what it says about kernels that it cannot load is left out.

    Raises:
        BackendError: it cannot be imported; carries the class and the message.
    """
    level = logging.root.manager.disable
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logging.disable(logging.WARNING)
            return importlib.import_module("torchao.float8")
    except Exception as error:  # a broken binary package raises any class; it is kept as the reason
        raise BackendError("torchao", found=f"{type(error).__name__}: {error}") from error
    finally:
        logging.disable(level)


def torchao_maker(meaning: LowBit) -> Make:
    """Return what makes torchao's layers of a recipe.

    Raises:
        BackendError: torchao cannot be imported, or lacks an option that the recipe needs.
    """
    config = torchao_config(meaning, load_torchao())
    layer = importlib.import_module("torchao.float8.float8_linear").Float8Linear

    def make(name: str, linear: nn.Linear) -> nn.Module:
        made = layer.from_float(linear, config)
        made.low_bit = meaning
        made.register_forward_pre_hook(to_autocast_dtype)
        made.train(linear.training)
        converted: nn.Module = made
        return converted

    return make


def torchao_config(meaning: LowBit, float8: Any) -> Any:
    """Return torchao's configuration of a recipe.

    Args:
        meaning: a recipe without ``torchao_misfit``.
        float8: the module ``torchao.float8``.

    Raises:
        BackendError: the installed torchao lacks an option.
    """
    row = meaning.forward.a.granularity == "row"
    scaling = getattr(float8.config.ScalingGranularity, GRANULARITIES[meaning.forward.a.granularity])

    def cast(name: str) -> Any:
        return float8.CastConfig(scaling_granularity=scaling, target_dtype=getattr(torch, {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}[name]))

    def gemm(accumulate: str) -> Any:
        # A CPU sums in fp32 either way; without the flag torchao rounds products with row scales to bf16 before it scales them.
        return float8.Float8GemmConfig(use_fast_accum=row or accumulate == "fast")

    options = {
        "cast_config_input": cast(meaning.forward.a.format),
        "cast_config_weight": cast(meaning.forward.b.format),
        "cast_config_grad_output": cast(meaning.dgrad.a.format),
        "gemm_config_output": gemm(meaning.forward.accumulate),
        "gemm_config_grad_input": gemm(meaning.dgrad.accumulate),
        "gemm_config_grad_weight": gemm(meaning.wgrad.accumulate),
        "round_scales_to_power_of_2": meaning.power_of_two,
    }
    lacking = set(options) - {field.name for field in dataclasses.fields(float8.Float8LinearConfig)}
    if lacking:
        raise BackendError("torchao", found=f"Float8LinearConfig lacks {', '.join(sorted(lacking))}")
    return float8.Float8LinearConfig(**options)


def to_autocast_dtype(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Cast the input of a layer as autocast would cast that of a plain one; torchao's own layer only knows autocast of another device."""
    if not torch.is_autocast_enabled("cpu"):
        return inputs
    return (inputs[0].to(torch.get_autocast_dtype("cpu")), *inputs[1:])
