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
from mpbackend.roles import Granularity


class Operand(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One operand of a matrix product.

    Attributes:
        format: element format.
        granularity: extent of one scale: ``tensor``, ``row`` (along the summed dimension K), ``1x128``, ``128x128``, ``1x32`` or ``1x16``.
    """

    format: str
    granularity: Granularity


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

    The scale s of a group with largest magnitude amax makes the stored value ``round(x * s)`` and the dequantized one ``stored / s``; a lowering that stores
    the inverse converts. With fp32 scales ``s = max(format) / amax / 2^margin``, rounded down to a power of two if ``power_of_two``. With e8m0 scales the
    exponent is ``floor(log2(amax)) - emax(format)`` (OCP Microscaling Formats v1.0, section 6.3).

    Attributes:
        forward: the product that gives the output.
        dgrad: the product that gives the input's gradient.
        wgrad: the product that gives the weight's gradient.
        mode: ``current`` scales by this tensor's amax; ``delayed`` by a window of the amax of earlier steps, this step's being written after its use.
        window: steps in the window of delayed scaling; the oldest leaves when a new one enters.
        algorithm: ``max`` of the window or its ``most_recent`` entry.
        margin: power of two kept free below the largest value.
        scale_format: format of a scale.
        power_of_two: whether scales are rounded down to powers of two.
        zero_amax: an amax of 0 leaves the present scale; without one it is 1.
        inf_amax: a non-finite amax leaves the present scale; without one it is 1.
        reduce_amax: whether delayed scaling takes the largest amax over the ranks that share a tensor.
        keep: layers left as they are: name patterns; the last ``Linear`` is only kept when it is named here or misfits.
        evaluation: under ``eval()`` the products stay low-bit and the window of delayed scaling is not written.
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


def is_low_bit_recipe(recipe: Recipe) -> bool:
    """Tell whether a recipe's forward products are low-bit."""
    name = recipe.compute.forward
    return name in FORMATS and FORMATS[name].is_low_bit


def low_bit(recipe: Recipe, keep: tuple[str, ...] = ()) -> LowBit:
    """Return what a low-bit recipe means.

    Args:
        recipe: a recipe whose compute formats are settled (no ordered choice).
        keep: name patterns (``fnmatch``) of layers that stay as they are.

    Raises:
        DocumentError: the recipe is not low-bit, or has no scaling.
    """
    scaling = recipe.scaling
    if not is_low_bit_recipe(recipe):
        raise DocumentError(f"recipe {recipe.preset!r}", found=f"compute.forward={recipe.compute.forward} is not low-bit")
    if scaling.mode == "none":
        raise DocumentError(f"recipe {recipe.preset!r}", found="scaling.mode=none", allowed=["current", "delayed"])
    inputs = Operand(format=recipe.compute.forward, granularity=scaling.inputs)
    weights = Operand(format=recipe.compute.forward, granularity=scaling.weights)

    def gradient(name: str) -> Operand:
        return Operand(format=getattr(recipe.compute, name), granularity=scaling.inputs)

    def effect(name: str) -> Literal["fast", "split"]:
        return "fast" if getattr(recipe.accumulate, name) == FAST else "split"

    return LowBit(
        forward=Product(a=inputs, b=weights, accumulate=effect("forward")),
        dgrad=Product(a=gradient("dgrad"), b=weights, accumulate=effect("dgrad")),
        wgrad=Product(a=gradient("wgrad"), b=inputs, accumulate=effect("wgrad")),
        mode=scaling.mode,
        window=scaling.history,
        algorithm=scaling.algorithm,
        margin=scaling.margin,
        scale_format=scaling.format,
        power_of_two=scaling.format == "e8m0",
        keep=keep,
    )


def required_multiple(product: Product) -> int:
    """Return the multiple that every dimension of a product's operands must have: 16 for tensor and row scales, else the longest side of a scale's extent."""
    longest = {"none": 1, "tensor": 16, "row": 16, "1x16": 16, "1x32": 32, "1x128": 128, "128x128": 128}
    return max(longest[product.a.granularity], longest[product.b.granularity])
