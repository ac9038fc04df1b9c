"""Recipes: one value for each role that a number plays in training.

A recipe says what is wanted; a plan says what a device grants. The text form is ``preset[:path=value(,path=value)*]``, for example
``fp16:loss_scale.init=4096,reduce.format=fp16``. Printing is canonical: paths sorted, values equal to the preset's left out, a group whose members are equal
written once. The semantic hash is of that text, and of every value too where a plugin brought the preset.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from mpbackend.errors import DocumentError, UnknownNameError
from mpbackend.formats import FORMATS, format_name
from mpbackend.roles import PASSES, RANGES, Gemm, Granularity, LossScaling, MasterKind, OptimizerState, Part, Reduce, TensorScaling, flatten, words


class Recipe(Part, frozen=True, kw_only=True):
    """A value for every role. Build one with ``parse_recipe`` or ``Recipe.evolve``; compare with ``recipe_hash``.

    Attributes:
        preset: name of the preset that the text form starts from.
        params: format of the parameters that the model holds.
        master: what keeps the bits an update loses: nothing, an ``fp32`` copy, a ``kahan`` compensation term, or ``stochastic`` rounding.
        compute: operand formats of matrix products; an ordered choice such as ``tf32|hf32|fp32`` takes the first that is granted.
        accumulate: formats of the sums inside matrix products.
        grads: format in which gradients are summed over micro-batches.
        optimizer: formats of the optimizer's moments.
        reduce: gradient reduction between ranks.
        buffers: ``keep``, or a format that floating-point buffers are cast to.
        sensitive: ``fp32`` runs layer and group norms, softmax and losses in fp32 on every backend, batch norm not; ``native`` leaves the backend's list.
        loss_scale: loss scaling.
        scaling: scaling of low-bit tensors.
    """

    preset: str
    params: str = "fp32"
    master: MasterKind = "none"
    compute: Gemm = Gemm(forward="fp32", dgrad="fp32", wgrad="fp32")
    accumulate: Gemm = Gemm(forward="fp32", dgrad="fp32", wgrad="fp32")
    grads: str = "fp32"
    optimizer: OptimizerState = OptimizerState()
    reduce: Reduce = Reduce()
    buffers: str = "keep"
    sensitive: Literal["fp32", "native"] = "fp32"
    loss_scale: LossScaling = LossScaling()
    scaling: TensorScaling = TensorScaling()

    def flat(self) -> dict[str, Any]:
        """Return every role as a dotted path to its value."""
        return flatten(self)

    def evolve(self, **changes: Any) -> Recipe:
        """Return a copy with dotted paths (``loss_scale__init`` or a mapping by ``**{"loss_scale.init": 1024}``) replaced.

        Raises:
            UnknownNameError: a path is not a role.
            DocumentError: a value does not fit its role.
        """
        return apply_changes(self, {path.replace("__", "."): value for path, value in changes.items()})


GROUPS = ("accumulate", "compute", "optimizer")
"""Roles whose members may be set together: ``compute=bf16``."""

CHOICE_PATHS = frozenset(f"compute.{name}" for name in PASSES)
FAST = "fast"


def canonical_format(path: str, value: str) -> str:
    """Return the canonical spelling of a format, an ordered choice, ``fast`` or ``keep``, as the path allows."""
    if path.startswith("accumulate.") and value == FAST:
        return FAST
    if path == "buffers" and value == "keep":
        return value
    parts = value.split("|")
    if len(parts) > 1 and path not in CHOICE_PATHS:
        raise DocumentError(f"recipe field {path} = {value!r}", found="an ordered choice", remedy="only compute.* takes an ordered choice")
    names = [format_name(part.strip()) for part in parts]
    if len(set(names)) != len(names):
        raise DocumentError(f"recipe field {path} = {value!r}", found="the same format twice")
    if path in STORED_PATHS and names[0] not in STORED_FORMATS:
        raise DocumentError(f"recipe field {path} = {value!r}", found="not a format that tensors are stored in", allowed=STORED_FORMATS)
    return "|".join(names)


STORED_PATHS = frozenset(["params", "grads", "buffers", "reduce.format", "optimizer.exp_avg", "optimizer.exp_avg_sq"])
STORED_FORMATS = tuple(name for name, row in FORMATS.items() if row.kind == "float" and row.storage == name)
FORMAT_PATHS = STORED_PATHS | {"scaling.format", *(f"{group}.{name}" for group in ("compute", "accumulate") for name in PASSES)}


WORDS: Mapping[str, tuple[str, ...]] = words(Recipe)
"""Roles that take one of a few words, to the words."""


def apply_changes(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """Return ``recipe`` with dotted paths replaced, checked. See ``Recipe.evolve``."""
    tree = msgspec.to_builtins(recipe)
    leaves = recipe.flat()
    for path, value in sorted(changes.items(), key=lambda change: change[0] not in GROUPS):  # a member says more than its group, in whatever order
        targets = [leaf for leaf in leaves if leaf.startswith(f"{path}.")] if path in GROUPS else [path]
        if path not in leaves and path not in GROUPS:
            raise UnknownNameError("role", path, [*leaves, *GROUPS], remedy="`mpbackend recipes --roles` lists them")
        for leaf in targets:
            node = tree
            *parents, name = leaf.split(".")
            for parent in parents:
                node = node[parent]
            node[name] = coerce(leaf, value, leaves[leaf])
    return convert(tree, f"recipe with {', '.join(f'{path}={value}' for path, value in changes.items())}")


def coerce(path: str, value: Any, default: Any) -> Any:
    """Turn a value as people write it into the type of its field."""
    if path in FORMAT_PATHS:
        try:
            return canonical_format(path, value if isinstance(value, str) else format_name(value))
        except UnknownNameError as error:
            raise UnknownNameError(f"format for {path}", error.name, error.allowed, remedy=error.remedy) from error
    if path in WORDS and value not in WORDS[path]:
        raise DocumentError(f"recipe field {path} = {value!r}", found="not one of its values", allowed=WORDS[path])
    if not isinstance(default, (int, float)) or not isinstance(value, str):
        return value
    try:
        number = float(value)
        if isinstance(default, float):
            return number
        if number != int(number):
            raise ValueError
        return int(number)
    except (ValueError, OverflowError) as error:
        kind = "a number" if isinstance(default, float) else "a whole number"
        raise DocumentError(f"recipe field {path} = {value!r}", found="not a number that fits", allowed=[kind]) from error


def convert(tree: Any, asked: str) -> Recipe:
    """Return plain data as a recipe, checked; ``DocumentError`` about ``asked`` names the field that does not fit."""
    try:
        recipe = msgspec.convert(tree, Recipe, strict=True)
    except msgspec.ValidationError as error:
        raise DocumentError(asked, found=str(error)) from error
    check(recipe)
    return recipe


def validate(recipe: Recipe) -> None:
    """Check a recipe that was built by hand, which msgspec leaves to the caller: types, words, spelling of formats, ranges.

    Raises:
        DocumentError: a value does not fit its role, or is not the canonical spelling.
        UnknownNameError: a format has no such name.
    """
    asked = f"recipe {recipe.preset!r}"
    try:
        same = convert(msgspec.to_builtins(recipe), asked)
    except TypeError as error:
        raise DocumentError(asked, found=str(error)) from error
    if same != recipe:
        raise DocumentError(asked, found="a value has another type than its role")
    for path, value in same.flat().items():
        if path in FORMAT_PATHS and (spelling := coerce(path, value, value)) != value:
            raise DocumentError(f"recipe field {path} = {value!r}", found=f"write it {spelling}")


def check(recipe: Recipe) -> None:
    """Check what the types cannot say.

    Raises:
        DocumentError: a numeric role is out of its range; names the role and the range.
    """
    flat = recipe.flat()
    for path, (allowed, holds) in RANGES.items():
        if not holds(flat[path]):
            raise DocumentError(f"recipe field {path} = {flat[path]!r}", found=f"not {allowed}")
    scale = recipe.loss_scale
    if not scale.min <= scale.init <= scale.max:
        found = f"loss_scale.min <= init <= max does not hold: {scale.min:g}, {scale.init:g}, {scale.max:g}"
        raise DocumentError(f"recipe {recipe.preset!r}", found=found)


def gemm(forward: str, gradients: str | None = None) -> Gemm:
    """Return one value for the forward pass and one for both gradient passes."""
    return Gemm(forward=forward, dgrad=gradients or forward, wgrad=gradients or forward)


def low_bit(preset: str, compute: Gemm, scaling: TensorScaling) -> Recipe:
    """Return a preset with fp32 parameters and low-bit matrix products; the forward pass takes the unit's own accumulator."""
    return Recipe(preset=preset, compute=compute, accumulate=gemm(FAST, "fp32"), scaling=scaling)


def scaled(mode: Literal["current", "delayed"], inputs: Granularity, weights: Granularity, scale_format: str = "fp32") -> TensorScaling:
    """Return the scaling of low-bit tensors."""
    return TensorScaling(mode=mode, inputs=inputs, weights=weights, format=scale_format)


_DYNAMIC = LossScaling(mode="dynamic")
_HYBRID = gemm("fp8_e4m3", "fp8_e5m2")

PRESETS: Mapping[str, Recipe] = {
    recipe.preset: recipe
    for recipe in (
        Recipe(preset="fp32"),
        Recipe(preset="fp32-fast", compute=gemm("tf32|hf32|fp32")),
        Recipe(preset="fp16", compute=gemm("fp16"), loss_scale=_DYNAMIC),
        Recipe(preset="bf16", compute=gemm("bf16")),
        Recipe(preset="bf16-master", params="bf16", master="fp32", compute=gemm("bf16")),
        Recipe(preset="fp16-master", params="fp16", master="fp32", compute=gemm("fp16"), loss_scale=_DYNAMIC),
        Recipe(preset="bf16-params", params="bf16", compute=gemm("bf16"), grads="bf16", optimizer=OptimizerState(exp_avg="bf16", exp_avg_sq="bf16")),
        Recipe(preset="bf16-kahan", params="bf16", master="kahan", compute=gemm("bf16"), grads="bf16"),
        Recipe(preset="bf16-sr", params="bf16", master="stochastic", compute=gemm("bf16"), grads="bf16"),
        low_bit("fp8", _HYBRID, scaled("current", "tensor", "tensor")),
        low_bit("fp8-delayed", _HYBRID, scaled("delayed", "tensor", "tensor")),
        low_bit("fp8-block", gemm("fp8_e4m3"), scaled("current", "1x128", "128x128")),
        low_bit("mxfp8", gemm("fp8_e4m3"), scaled("current", "1x32", "1x32", "e8m0")),
        low_bit("nvfp4", gemm("fp4_e2m1"), scaled("current", "1x16", "1x16", "ue4m3")),
        low_bit("hif8", gemm("hif8"), scaled("current", "tensor", "tensor")),
    )
}
"""The presets of this distribution; plugins add theirs through the ``mpbackend_recipes`` hook."""

DESCRIPTIONS: Mapping[str, str] = {
    "fp32": "true fp32 in matmul and convolution",
    "fp32-fast": "fp32 storage, the fastest reduced fp32 the device has",
    "fp16": "fp32 parameters, fp16 compute, dynamic loss scaling",
    "bf16": "fp32 parameters, bf16 compute",
    "bf16-master": "bf16 working weights, fp32 masters and fp32 gradient sums",
    "fp16-master": "fp16 working weights, fp32 masters, dynamic loss scaling",
    "bf16-params": "pure bf16, small updates are lost",
    "bf16-kahan": "bf16 parameters with a Kahan compensation term",
    "bf16-sr": "bf16 parameters, stochastic rounding of the update",
    "fp8": "e4m3 forward, e5m2 gradients, current scaling per tensor",
    "fp8-delayed": "e4m3 forward, e5m2 gradients, delayed scaling per tensor",
    "fp8-block": "e4m3, scales per 1x128 (inputs) and 128x128 (weights)",
    "mxfp8": "e4m3, one e8m0 scale per 32 elements",
    "nvfp4": "e2m1, one ue4m3 scale per 16 elements",
    "hif8": "HiFloat8, current scaling per tensor",
}


def parse_recipe(text: str, presets: Mapping[str, Recipe] | None = None) -> Recipe:
    """Parse the text form of a recipe.

    Args:
        text: ``preset[:path=value(,path=value)*]``; surrounding blanks are ignored.
        presets: known presets; those of this distribution when omitted.

    Raises:
        UnknownNameError: unknown preset, role or format, with the nearest names.
        DocumentError: a malformed assignment, a path given twice, or a value outside its range.
    """
    known = PRESETS if presets is None else presets
    name, colon, rest = (part.strip() for part in text.partition(":"))
    if name not in known:
        raise UnknownNameError("preset", name, known, remedy="`mpbackend recipes` lists them")
    if not colon:
        return known[name]
    changes: dict[str, str] = {}
    for assignment in rest.split(","):
        path, equals, value = (part.strip() for part in assignment.partition("="))
        if not equals or not path or not value:
            raise DocumentError(f"recipe {text!r}", found=f"{assignment!r} is not path=value", remedy="write preset:path=value,path=value")
        if path in changes:
            raise DocumentError(f"recipe {text!r}", found=f"{path!r} is given twice")
        changes[path] = value
    return apply_changes(known[name], changes)


def recipe_hash(recipe: Recipe, presets: Mapping[str, Recipe] | None = None) -> str:
    """Return the semantic hash: SHA-256 of the canonical text, the first 16 hexadecimal digits.

    The text of a preset that this distribution does not ship says nothing about its content, so the values of all roles are hashed with it.
    """
    content, name = canonical_text(recipe, presets).encode(), recipe.preset
    if name not in PRESETS or (presets is not None and presets.get(name) != PRESETS[name]):
        content += b"\n" + msgspec.json.encode(recipe.flat(), order="deterministic")
    return hashlib.sha256(content).hexdigest()[:16]


def canonical_text(recipe: Recipe, presets: Mapping[str, Recipe] | None = None) -> str:
    """Return the canonical text of ``recipe`` over its preset."""
    known = PRESETS if presets is None else presets
    base = known.get(recipe.preset, Recipe(preset=recipe.preset)).flat()
    mine = recipe.flat()
    changed = {path: value for path, value in mine.items() if value != base[path]}
    for group in GROUPS:
        members = [path for path in mine if path.startswith(f"{group}.")]
        values = {mine[path] for path in members}
        if len(values) == 1 and any(path in changed for path in members):
            changed = {path: value for path, value in changed.items() if path not in members} | {group: values.pop()}
    if not changed:
        return recipe.preset
    return f"{recipe.preset}:" + ",".join(f"{path}={print_value(value)}" for path, value in sorted(changed.items()))


def print_value(value: Any) -> str:
    """Print a value so that parsing gives it back: whole numbers without a fraction."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
