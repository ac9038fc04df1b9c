"""The intermediate representation of a low-bit recipe: what every lowering must do, in numbers and rules.

A recipe says ``scaling.mode=delayed``; a lowering needs to know what the scale of step n is made from, in which direction it multiplies, and what an amax of
zero gives. Lowerings (Transformer Engine, torchao, an NPU's quantized operators, the plain reference) take a ``LowBit`` and nothing else, so that two of
them can be compared: the same tensors must give the same scales.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from mpbackend.errors import DocumentError
from mpbackend.formats import FORMATS
from mpbackend.recipe import FAST, Recipe
from mpbackend.roles import Granularity, TensorScaling

SCALE_FORMATS = ("fp32", "e8m0", "ue4m3")
"""Formats of a scale: free, a power of two, or two levels (a ``ue4m3`` scale a block and one fp32 scale a tensor)."""

LONGEST_SIDE = {"none": 1, "tensor": 16, "row": 16, "1x16": 16, "1x32": 32, "1x128": 128, "128x128": 128}
"""The multiple that a granularity asks of every dimension: its longest side; 16 for tensor and row scales, as cuBLASLt asks for 8-bit operands."""

HIF8_AMAX_TO = (15.0, 224.0)
"""What an amax is scaled to in hif8, for inputs and weights and for gradients: the bands with 3 and 2 fraction bits. Towards its largest value 2^15 it has one.

Source: MindSpeed, te/pytorch/fp8/constants.py."""


class Operand(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One operand of a matrix product.

    Attributes:
        format: element format.
        granularity: extent of one scale: ``tensor``, ``row`` (along the summed dimension K), ``1x128``, ``128x128``, ``1x32`` or ``1x16``, of which the
            second number runs along K; ``none`` for a format that needs no scale. K differs between the products, so a tensor that enters two of them is
            quantized twice unless its scales cover both directions.
        amax_to: value that the largest magnitude of a group is scaled to; None for the largest value of the format.
    """

    format: str
    granularity: Granularity
    amax_to: float | None = None

    @property
    def top(self) -> float:
        """The value that the largest magnitude of a group is scaled to."""
        return FORMATS[self.format].max if self.amax_to is None else self.amax_to

    @property
    def rounding(self) -> Literal["rne", "rna"]:
        """How a value is rounded to the format: to nearest even; half away from zero in hif8, whose casts have no other deterministic rounding to nearest."""
        return "rna" if self.format == "hif8" else "rne"


class Product(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of the three matrix products of a linear layer ``y = x W^T``.

    Attributes:
        a: first operand: x for the output, the output's gradient for both gradients.
        b: second operand: W for the output and the input's gradient, x for the weight's gradient.
        accumulate: ``fast`` takes the unit's own register; ``split`` adds partial sums in fp32.
    """

    a: Operand
    b: Operand
    accumulate: Literal["fast", "split"]


class LowBit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a low-bit recipe means.

    The scale s of a group with largest magnitude amax makes the stored value ``round(x * s)`` and the dequantized one ``stored * (1 / s)``; a lowering that
    stores the inverse converts. ``s = top / amax / 2^margin`` in fp32, where top is ``Operand.top``; an s beyond fp32 becomes the largest fp32 value. With
    ``power_of_two`` it is rounded down to a power of two, so that nothing saturates. That is how e8m0 scales of 8-bit elements are made by Transformer Engine,
    by torchao (RCEIL) and by CANN (scaleAlg 1); the rule of OCP Microscaling Formats v1.0, section 6.3 (scaleAlg 0), is another one: it lets an amax whose
    fraction exceeds that of the format's largest value saturate.

    With ue4m3 scales the tensor has ``s_t = 448 * top / amax(tensor)``, a block stores ``d = round(amax(block) / top * s_t)`` in ue4m3, and ``s = s_t / d``.
    No Hadamard transform and no stochastic rounding is meant.

    A finite value beyond the largest one of the format becomes that one, whatever a cast does. A non-finite value is not hidden: its whole group dequantizes
    to NaN. The result of a product is rounded once, to the format of the activations (that of autocast); the weight's gradient too.

    Attributes:
        forward: the product that gives the output.
        dgrad: the product that gives the input's gradient.
        wgrad: the product that gives the weight's gradient.
        mode: ``current`` scales by this tensor's amax; ``delayed`` by a window of the amax of earlier steps, this step's being written after its use.
        window: steps in the window of delayed scaling; the oldest leaves when a new one enters. A step is one forward and backward pass of the layer.
        algorithm: ``max`` of the window or its ``most_recent`` entry.
        margin: power of two kept free below the largest value.
        scale_format: format of a scale, one of ``SCALE_FORMATS``.
        power_of_two: whether scales are rounded down to powers of two.
        zero_amax: an amax of 0 leaves the present scale; without one it is 1.
        inf_amax: a non-finite amax leaves the present scale; without one it is 1. It enters the window like any other, and leaves it like any other.
        reduce_amax: whether delayed scaling takes the largest amax over the ranks that share a tensor.
        keep: layers left as they are: name patterns; the last ``Linear`` is only kept when it is named here or misfits.
        evaluation: under ``eval()`` the products stay low-bit and the window of delayed scaling is not written.
        overflow: what becomes of a value beyond the format's largest.
    """

    forward: Product
    dgrad: Product
    wgrad: Product
    mode: Literal["current", "delayed"]
    window: int
    algorithm: Literal["max", "most_recent"]
    margin: int
    scale_format: str
    power_of_two: bool
    zero_amax: Literal["keep"] = "keep"
    inf_amax: Literal["keep"] = "keep"
    reduce_amax: bool = True
    keep: tuple[str, ...] = ()
    evaluation: Literal["low-bit, window frozen"] = "low-bit, window frozen"
    overflow: Literal["finite saturates, else NaN"] = "finite saturates, else NaN"

    @property
    def multiple(self) -> int:
        """The multiple that tokens, input and output features must have, so that all three products run."""
        return max(required_multiple(product) for product in (self.forward, self.dgrad, self.wgrad))


def is_low_bit_recipe(recipe: Recipe) -> bool:
    """Tell whether a recipe's forward products are low-bit."""
    return is_low_bit_format(recipe.compute.forward)


def is_low_bit_format(name: str) -> bool:
    """Tell whether a format needs scaled tensors; False for an ordered choice."""
    return name in FORMATS and FORMATS[name].is_low_bit


def low_bit(recipe: Recipe, keep: tuple[str, ...] = ()) -> LowBit:
    """Return what a low-bit recipe means.

    Args:
        recipe: a recipe whose compute formats are settled (no ordered choice).
        keep: name patterns (``fnmatch``) of layers that stay as they are, besides those of the recipe.

    Raises:
        DocumentError: the recipe is not low-bit, or its scaling says nothing that could be carried out.
    """
    scaling = recipe.scaling
    if not is_low_bit_recipe(recipe):
        raise DocumentError(f"recipe {recipe.preset!r}", found=f"compute.forward={recipe.compute.forward} is not low-bit")
    check_scaling(recipe.preset, scaling)

    def operand(name: str, granularity: Granularity, *, gradient: bool = False) -> Operand:
        if not is_low_bit_format(name):
            return Operand(format=name, granularity="none")
        return Operand(format=name, granularity=granularity, amax_to=HIF8_AMAX_TO[gradient] if name == "hif8" else None)

    def effect(name: str) -> Literal["fast", "split"]:
        return "fast" if getattr(recipe.accumulate, name) == FAST else "split"

    inputs = operand(recipe.compute.forward, scaling.inputs)
    weights = operand(recipe.compute.forward, scaling.weights)
    return LowBit(
        forward=Product(a=inputs, b=weights, accumulate=effect("forward")),
        dgrad=Product(a=operand(recipe.compute.dgrad, scaling.inputs, gradient=True), b=weights, accumulate=effect("dgrad")),
        wgrad=Product(a=operand(recipe.compute.wgrad, scaling.inputs, gradient=True), b=inputs, accumulate=effect("wgrad")),
        mode="delayed" if scaling.mode == "delayed" else "current",
        window=scaling.history,
        algorithm=scaling.algorithm,
        margin=scaling.margin,
        scale_format=scaling.format,
        power_of_two=scaling.format == "e8m0",
        keep=(*keep, *filter(None, scaling.keep.split("|"))),
    )


def check_scaling(preset: str, scaling: TensorScaling) -> None:
    """Check that a scaling can be carried out.

    Args:
        preset: name of the recipe, for the message.
        scaling: the scaling.

    Raises:
        DocumentError: no mode or no granularity, delayed scales of anything but whole tensors, or a scale format that the granularity does not have.
    """
    asked = f"recipe {preset!r}"
    if scaling.mode == "none":
        raise DocumentError(asked, found="scaling.mode=none", allowed=["current", "delayed"])
    pair = {"scaling.inputs": scaling.inputs, "scaling.weights": scaling.weights}
    for path, granularity in pair.items():
        if granularity == "none":
            raise DocumentError(asked, found=f"{path}=none", allowed=[name for name in LONGEST_SIDE if name != "none"])
        if scaling.mode == "delayed" and granularity != "tensor":
            raise DocumentError(asked, found=f"scaling.mode=delayed with {path}={granularity}", remedy="a window of amaxes belongs to a whole tensor")
        if scaling.format == "ue4m3" and granularity != "1x16":
            raise DocumentError(asked, found=f"scaling.format=ue4m3 with {path}={granularity}", remedy="ue4m3 scales belong to blocks of 1x16")
    if scaling.format not in SCALE_FORMATS:
        raise DocumentError(asked, found=f"scaling.format={scaling.format}", allowed=SCALE_FORMATS)


def required_multiple(product: Product) -> int:
    """Return the multiple that every dimension of a product's operands must have: 16 for tensor and row scales, else the longest side of a scale's extent."""
    return max(LONGEST_SIDE[product.a.granularity], LONGEST_SIDE[product.b.granularity])
