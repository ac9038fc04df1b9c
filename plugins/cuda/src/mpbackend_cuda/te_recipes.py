"""From a low-bit recipe to a recipe of Transformer Engine.

Its recipe classes drop keyword arguments that they do not know without a word, take defaults from environment variables read at import, and keep some
settings in class attributes that their own fields do not reach. So every field is checked against the class, every field that matters is given, and what
was given is read back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from mpbackend.errors import BackendError, UnknownNameError
from mpbackend.lowbit import LowBit
from mpbackend_cuda.implementations import SCHEMES

Kind = Literal["DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling"]

PINNED: Mapping[str, Any] = {
    "fp8_dpa": False,
    "fp8_mha": False,
    "backward_override": None,
    "enable_2d_quantization": False,
    "row_scaled_activation": False,
    "nvfp4_4over6": "none",
}
"""Fields that could change what runs, several of them with an environment variable as their default: attention in fp8, a backward pass in other formats, scales
of another extent. A class or a release without the field has no such setting."""

QUANTIZED = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")
"""Class attributes with the rounding of scales, which the layers read instead of ``use_power_2_scales`` and ``use_f32_scales``: those change the
attributes only through an environment variable at import."""

PRODUCTS = (("forward", "fp8_gemm_fprop"), ("dgrad", "fp8_gemm_dgrad"), ("wgrad", "fp8_gemm_wgrad"))
FIXED: Mapping[str, str] = {"forward": "fast", "dgrad": "split", "wgrad": "split"}
"""Accumulation of the classes without a field for it: ``_2X_ACC_FPROP``, ``_2X_ACC_DGRAD`` and ``_2X_ACC_WGRAD`` of ``module/base.py``."""

FORMATS: Mapping[tuple[str, str], str] = {("fp8_e4m3", "fp8_e4m3"): "E4M3", ("fp8_e4m3", "fp8_e5m2"): "HYBRID"}
"""Formats of the forward pass and of gradients to the name of Transformer Engine's enumeration."""

SCHEME_OF: Mapping[tuple[str, str], str] = {
    ("tensor", "tensor"): "tensor",
    ("1x128", "128x128"): "block_1x128_128x128",
    ("1x128", "1x128"): "block_1x128",
    ("1x32", "1x32"): "mx_1x32",
    ("1x16", "1x16"): "nv_1x16",
}
"""Granularity of inputs and weights to the scale layout of the matrix vocabulary."""

SATURATES = "inf is stored as the largest finite value"
"""PTX ISA, ``cvt.satfinite``, which every conversion to 8 bits or fewer takes. A recipe means NaN there; NaN stays NaN."""

SHARED_WINDOWS = "the window of every layer moves when any forward pass ends, whether the layer ran in it or not"
"""``FP8GlobalStateManager.reduce_and_update_fp8_tensors`` goes over all layers of the process."""

SCALE_FORMATS: Mapping[str, tuple[str, ...]] = {"tensor": ("fp32", "e8m0"), "mx_1x32": ("e8m0",), "nv_1x16": ("ue4m3",)}
BLOCK_SCALES = ("fp32", "e8m0")


class Lowered(NamedTuple):
    """A recipe of Transformer Engine.

    Attributes:
        recipe: the recipe object.
        scheme: scale layout of the matrix vocabulary.
        multiple: what tokens and features must be a multiple of.
        notes: where what runs is another thing than what was asked.
    """

    recipe: Any
    scheme: str
    multiple: int
    notes: tuple[str, ...]


def scheme_of(low: LowBit) -> str:
    """Return the scale layout of a low-bit recipe.

    Raises:
        BackendError: Transformer Engine has no such layout.
    """
    granularity = (low.forward.a.granularity, low.forward.b.granularity)
    if granularity not in SCHEME_OF:
        allowed = [f"inputs={inputs},weights={weights}" for inputs, weights in SCHEME_OF]
        raise BackendError(f"scales per {' and '.join(granularity)}", found="Transformer Engine has no such layout", allowed=allowed)
    return SCHEME_OF[granularity]


def lower(low: LowBit, module: Any) -> Lowered:
    """Return the recipe of Transformer Engine that means the same.

    Args:
        low: what is asked.
        module: ``transformer_engine.common.recipe``.

    Raises:
        BackendError: no recipe class means that; names the field that does not fit.
        UnknownNameError: the installed release lacks a field that is needed.
    """
    scheme = scheme_of(low)
    kind = kind_of(low, scheme)
    check(low, scheme, kind)
    fields: dict[str, Any] = {"fp8_format": getattr(module.Format, format_of(low, kind))}
    match kind:
        case "DelayedScaling":
            fields |= {"margin": low.margin, "amax_history_len": low.window, "amax_compute_algo": low.algorithm, "reduce_amax": low.reduce_amax}
        case "Float8CurrentScaling":
            fields |= {"use_power_2_scales": low.power_of_two} | accumulators(low, module)
        case "Float8BlockScaling":
            weights = 2 if scheme == "block_1x128_128x128" else 1
            fields |= {"use_f32_scales": not low.power_of_two, "x_block_scaling_dim": 1, "w_block_scaling_dim": weights, "grad_block_scaling_dim": 1}
            fields |= {field: module.MMParams(use_split_accumulator=True) for _, field in PRODUCTS}
        case "NVFP4BlockScaling":
            fields |= {"fp4_format": module.Format.E2M1, "disable_rht": True, "disable_stochastic_rounding": True, "disable_2d_quantization": True}
    recipe = build(getattr(module, kind), fields)
    if kind in ("Float8CurrentScaling", "Float8BlockScaling"):
        set_power_of_two(recipe, low.power_of_two)
    return Lowered(recipe, scheme, SCHEMES[scheme].multiple, notes(low, kind))


def kind_of(low: LowBit, scheme: str) -> Kind:
    """Return the name of the recipe class."""
    if scheme == "tensor":
        return "DelayedScaling" if low.mode == "delayed" else "Float8CurrentScaling"
    if scheme == "mx_1x32":
        return "MXFP8BlockScaling"
    return "NVFP4BlockScaling" if scheme == "nv_1x16" else "Float8BlockScaling"


def format_of(low: LowBit, kind: Kind) -> str:
    """Return the name of the format: of fp8 operands, and for nvfp4 of the scales.

    Raises:
        BackendError: Transformer Engine does not train in these formats.
    """
    gradients = {low.dgrad.a.format, low.wgrad.a.format}
    forward = {low.forward.a.format, low.forward.b.format}
    asked = f"{' and '.join(sorted(forward))} forward, {' and '.join(sorted(gradients))} for gradients"
    if kind == "NVFP4BlockScaling":
        if forward | gradients != {"fp4_e2m1"}:
            raise BackendError(asked, found=f"{kind} takes fp4_e2m1 for every operand")
        return "E4M3"
    pairs = [(a, b) for a in forward for b in gradients]
    if len(pairs) != 1 or pairs[0] not in FORMATS:
        allowed = [f"{a} forward, {b} for gradients" for a, b in FORMATS]
        raise BackendError(asked, found="Transformer Engine has no such format", allowed=allowed)
    return FORMATS[pairs[0]]


def check(low: LowBit, scheme: str, kind: Kind) -> None:
    """Check what has no field in the recipe class.

    Raises:
        BackendError: the recipe asks for something that the class cannot do, and would do differently without a word.
    """
    if low.mode == "delayed" and kind != "DelayedScaling":
        raise BackendError(f"delayed scaling with {scheme} scales", found=f"{kind} scales by the present amax only", remedy="use scaling.mode=current")
    if low.margin and kind != "DelayedScaling":
        raise BackendError(f"scaling.margin={low.margin}", found=f"{kind} keeps no margin", remedy="use scaling.margin=0, or scaling.mode=delayed")
    allowed = ("fp32",) if kind == "DelayedScaling" else SCALE_FORMATS.get(scheme, BLOCK_SCALES)
    if low.scale_format not in allowed:
        raise BackendError(f"scaling.format={low.scale_format}", found=f"not a format of the scales of {kind}", allowed=allowed)
    if kind == "DelayedScaling" and low.forward.accumulate == "split":
        found = f"{kind} has no field for it: its forward product takes the unit's own register"
        raise BackendError("accumulate.forward=fp32", found=found, remedy="use accumulate.forward=fast, or scaling.mode=current")


def accumulators(low: LowBit, module: Any) -> dict[str, Any]:
    """Return the accumulation of the three products. ``use_split_accumulator`` adds partial sums in fp32; its documentation says the opposite of its code."""
    return {field: module.MMParams(use_split_accumulator=getattr(low, name).accumulate == "split") for name, field in PRODUCTS}


def notes(low: LowBit, kind: Kind) -> tuple[str, ...]:
    """Return where what runs is another thing than what was asked."""
    return (SATURATES, *((SHARED_WINDOWS,) if kind == "DelayedScaling" else ()), *accumulation_notes(low, kind))


def accumulation_notes(low: LowBit, kind: Kind) -> list[str]:
    """Return where the class accumulates otherwise than asked. It is never a loss: ``check`` refuses that."""
    if kind == "Float8CurrentScaling":
        return []
    found = []
    for name, _ in PRODUCTS:
        asked = getattr(low, name).accumulate
        taken = "split" if kind == "Float8BlockScaling" else FIXED[name]
        if asked == "fast" and taken == "split":
            found.append(f"{kind} adds the {name} product in fp32, which is more than asked")
        elif asked != taken:
            found.append(f"{kind} has no field for split accumulation of the {name} product, which its units do not need")
    return found


def build(kind: Any, fields: Mapping[str, Any]) -> Any:
    """Make a recipe and read every field back.

    Args:
        kind: a recipe class.
        fields: values; those of ``PINNED`` are added where the class has the field.

    Raises:
        UnknownNameError: the class has no such field. Left to itself it would drop it.
        BackendError: the class refuses a value, or holds another one afterwards.
    """
    known = {field.name for field in dataclasses.fields(kind)}
    for name in fields:
        if name not in known:
            raise UnknownNameError(f"field of {kind.__name__}", name, known, remedy="the installed Transformer Engine is of another release")
    given = {**{name: value for name, value in PINNED.items() if name in known}, **fields}
    try:
        recipe = kind(**given)
    except (AssertionError, TypeError, ValueError) as error:
        raise BackendError(f"recipe {kind.__name__}", found=" ".join(str(error).split())) from error
    for name, value in given.items():
        if getattr(recipe, name) != value:
            raise BackendError(f"field {name} = {value!r} of {kind.__name__}", found=f"it reads back {getattr(recipe, name)!r}")
    return recipe


def set_power_of_two(recipe: Any, wanted: bool) -> None:
    """Set how the layers round their scales; see ``QUANTIZED``.

    Raises:
        BackendError: the recipe lacks a setting that the layers would read.
    """
    for name in QUANTIZED:
        present = getattr(recipe, name, None)
        if present is None:
            raise BackendError(f"rounding of scales of {type(recipe).__name__}", found=f"it has no {name}", remedy="Transformer Engine 2.9 to 2.20 has it")
        setattr(recipe, name, dataclasses.replace(present, power_2_scale=wanted))
        if getattr(recipe, name).power_2_scale != wanted:
            raise BackendError(f"{name}.power_2_scale = {wanted}", found="it reads back otherwise")
