"""Memory arithmetic: the bytes that a recipe needs for each role, before anything runs.

Counts what is proportional to the parameters: parameters, the copy that keeps the bits an update loses, gradients, optimizer moments, low-bit copies of the
weights. Activations depend on the batch and the model and are not modeled; they are measured in a run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import msgspec

from mpbackend.errors import DocumentError, UnknownNameError
from mpbackend.formats import DEVICE_RESOLVED, FORMATS
from mpbackend.recipe import PRESETS, Recipe, canonical_text
from mpbackend.roles import Granularity

LIMIT = 10**15
"""Most parameters that are taken seriously."""

LOW_BIT_COPIES = "low-bit copies"
"""The line of the weights held in a low-bit format beside the parameters, scales included."""

Shape = tuple[int, ...]


class Moments(msgspec.Struct, frozen=True, kw_only=True):
    """What an optimizer keeps for each parameter.

    Attributes:
        roles: one ``exp_avg`` or ``exp_avg_sq`` per tensor of the parameter's shape: the member of ``Recipe.optimizer`` that gives its format. First moments
            and momentum buffers are ``exp_avg``, sums and averages of squares ``exp_avg_sq``. Step counters are not counted.
        source: where that is defined.
    """

    roles: tuple[str, ...]
    source: str


OPTIMIZERS: Mapping[str, Moments] = MappingProxyType(
    {
        "adagrad": Moments(roles=("exp_avg_sq",), source="torch.optim.Adagrad: sum"),
        "adam": Moments(roles=("exp_avg", "exp_avg_sq"), source="torch.optim.Adam: exp_avg, exp_avg_sq (arXiv 1412.6980)"),
        "adam-amsgrad": Moments(roles=("exp_avg", "exp_avg_sq", "exp_avg_sq"), source="torch.optim.Adam(amsgrad=True): exp_avg, exp_avg_sq, max_exp_avg_sq"),
        "adamw": Moments(roles=("exp_avg", "exp_avg_sq"), source="torch.optim.AdamW: exp_avg, exp_avg_sq (arXiv 1711.05101)"),
        "lion": Moments(roles=("exp_avg",), source="arXiv 2302.06675, algorithm 2: one momentum"),
        "muon": Moments(roles=("exp_avg",), source="torch.optim.Muon: momentum_buffer"),
        "rmsprop": Moments(roles=("exp_avg_sq",), source="torch.optim.RMSprop without momentum and centering: square_avg"),
        "sgd": Moments(roles=(), source="torch.optim.SGD without momentum: nothing"),
        "sgd-momentum": Moments(roles=("exp_avg",), source="torch.optim.SGD with momentum: momentum_buffer"),
    }
)
"""Optimizers by name, with what each keeps."""


class Line(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One role.

    Attributes:
        role: dotted path of the recipe; ``LOW_BIT_COPIES`` for those of the weights.
        format: format of the elements; ``-`` where nothing is kept.
        bytes: bytes, >= 0.
        fp32_bytes: bytes of the same role under the recipe ``fp32``.
    """

    role: str
    format: str
    bytes: int
    fp32_bytes: int


class Footprint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The memory of a recipe.

    Attributes:
        recipe: canonical text of the recipe.
        optimizer: key of ``OPTIMIZERS``.
        parameters: number of parameters.
        lines: one per role; their sum is ``total``.
        total: bytes held between steps and during one, activations excluded.
        fp32_total: the same under the recipe ``fp32``.
        saving: ``fp32_total - total``; negative when the recipe needs more.
        saving_ratio: ``saving / fp32_total``.
        working: most bytes of 16-bit weight copies that autocast makes in the forward pass and backward releases; not in ``total``.
        checkpoint: bytes of a checkpoint that resumes exactly: parameters, master, moments.
        checkpoint_model: bytes of the parameters alone.
        notes: what the numbers leave out or assume, one sentence each.
    """

    recipe: str
    optimizer: str
    parameters: int
    lines: tuple[Line, ...]
    total: int
    fp32_total: int
    saving: int
    saving_ratio: float
    working: int
    checkpoint: int
    checkpoint_model: int
    notes: tuple[str, ...]

    def bytes_of(self, role: str) -> int:
        """Return the bytes of a role, or of a group (``optimizer``); 0 for a role without a line."""
        return sum(line.bytes for line in self.lines if line.role == role or line.role.startswith(f"{role}."))


def footprint(recipe: Recipe, parameters: int, optimizer: str, shapes: Sequence[Shape] = ()) -> Footprint:
    """Return the memory of a recipe.

    Args:
        recipe: the recipe; an ordered choice counts as its first format.
        parameters: number of parameters, 1 to ``LIMIT``.
        optimizer: key of ``OPTIMIZERS``.
        shapes: shapes of the parameters, which make the scales of low-bit copies exact; empty when only their number is known.

    Raises:
        DocumentError: ``parameters`` is out of range, or differs from the elements of ``shapes``.
        UnknownNameError: unknown optimizer.
    """
    check_count(parameters, "parameters")
    if shapes and sum(map(math.prod, shapes)) != parameters:
        raise DocumentError(f"parameters = {parameters}", found=f"the shapes have {sum(map(math.prod, shapes))} elements", remedy="make the two equal")
    if optimizer not in OPTIMIZERS:
        raise UnknownNameError("optimizer", optimizer, OPTIMIZERS)
    mine = roles(recipe, parameters, optimizer)
    reference = roles(PRESETS["fp32"], parameters, optimizer)
    copies = low_bit_copies(recipe, parameters, shapes)
    lines = [Line(role=role, format=name, bytes=size, fp32_bytes=reference[role][1]) for role, (name, size) in mine.items()]
    if copies:
        lines.append(Line(role=LOW_BIT_COPIES, format=first(recipe.compute.forward), bytes=copies, fp32_bytes=0))
    total = sum(line.bytes for line in lines)
    fp32_total = sum(line.fp32_bytes for line in lines)
    return Footprint(
        recipe=canonical_text(recipe),
        optimizer=optimizer,
        parameters=parameters,
        lines=tuple(lines),
        total=total,
        fp32_total=fp32_total,
        saving=fp32_total - total,
        saving_ratio=(fp32_total - total) / fp32_total,
        working=working_copies(recipe, parameters),
        checkpoint=sum(line.bytes for line in lines if line.role in ("params", "master") or line.role.startswith("optimizer")),
        checkpoint_model=mine["params"][1],
        notes=tuple(notes(recipe, parameters, shapes, (name for name, _ in mine.values()))),
    )


def roles(recipe: Recipe, parameters: int, optimizer: str) -> dict[str, tuple[str, int]]:
    """Return format and bytes of every role that is as large as the parameters."""
    master = {"fp32": "fp32", "kahan": recipe.params}.get(recipe.master, "-")
    members = {"params": recipe.params, "master": master, "grads": recipe.grads}
    found = {role: (name, 0 if name == "-" else stored(parameters, name)) for role, name in members.items()}
    for member in OPTIMIZERS[optimizer].roles:
        name = getattr(recipe.optimizer, member)
        role = f"optimizer.{member}"
        found[role] = (name, found.get(role, ("", 0))[1] + stored(parameters, name))
    return found


def first(choice: str) -> str:
    """Return the first format of an ordered choice, a device-resolved name replaced by one of its formats, which are all stored alike."""
    name = choice.split("|")[0]
    return DEVICE_RESOLVED[name][0] if name in DEVICE_RESOLVED else name


def bits(name: str) -> int:
    """Return the bits that one element takes in storage."""
    return FORMATS[FORMATS[first(name)].storage].bits


def stored(elements: int, name: str) -> int:
    """Return the bytes of ``elements`` in a format: ``ceil(elements * bits / 8)``, so that two 4-bit elements share a byte."""
    return -(-elements * bits(name) // 8)


def holds_low_bit_copies(recipe: Recipe) -> bool:
    """Tell whether weights are also held in a low-bit format, beside the parameters."""
    forward = first(recipe.compute.forward)
    return FORMATS[forward].is_low_bit and forward != recipe.params


def copies_per_weight(granularity: Granularity) -> int:
    """Return how many quantized copies of a weight the forward and dgrad products need.

    The two contract over different dimensions. Scales along one dimension must lie along the contraction (OCP Microscaling Formats (MX) 1.0, the dot
    product), so each product has a copy of its own; one scale per tensor or per square serves both.
    """
    return 2 if granularity == "row" or granularity.startswith("1x") else 1


def low_bit_copies(recipe: Recipe, parameters: int, shapes: Sequence[Shape]) -> int:
    """Return the bytes of the low-bit copies of the weights and their scales; 0 when the recipe has none.

    With shapes, tensors of two or more dimensions are converted and scales are exact. Without, every parameter is taken for a weight, and only the scales
    of blocks are counted, as if the dimensions were multiples of the block.
    """
    if not holds_low_bit_copies(recipe):
        return 0
    granularity = recipe.scaling.weights
    name = first(recipe.compute.forward)
    copies = copies_per_weight(granularity)
    if not shapes:
        return copies * (stored(parameters, name) + stored(block_scales(parameters, granularity), recipe.scaling.format))
    total = 0
    for shape in shapes:
        if len(shape) < 2:
            continue
        rows, columns = math.prod(shape[:-1]), shape[-1]
        for height, width in [(rows, columns), (columns, rows)][:copies]:
            total += stored(rows * columns, name) + stored(scales(height, width, granularity), recipe.scaling.format)
    return total


def block_scales(elements: int, granularity: Granularity) -> int:
    """Return the scales of ``elements`` in full blocks; 0 where their number depends on the shapes."""
    if "x" not in granularity:
        return 0
    height, width = map(int, granularity.split("x"))
    return -(-elements // (height * width))


def scales(rows: int, columns: int, granularity: Granularity) -> int:
    """Return the scales of a matrix, partial blocks counted whole."""
    if granularity == "none":
        return 0
    if granularity == "tensor":
        return 1
    if granularity == "row":
        return rows
    height, width = map(int, granularity.split("x"))
    return -(-rows // height) * -(-columns // width)


def working_copies(recipe: Recipe, parameters: int) -> int:
    """Return the bytes of the weight copies that autocast makes: every parameter once, in a 16-bit compute format that the parameters do not have."""
    name = first(recipe.compute.forward)
    return stored(parameters, name) if bits(name) == 16 and name != recipe.params else 0


def notes(recipe: Recipe, parameters: int, shapes: Sequence[Shape], held: Iterable[str]) -> list[str]:
    """Return what the numbers leave out or assume; ``held`` are the formats of the tensors as large as the parameters."""
    forward = first(recipe.compute.forward)
    said = ["Activations are not modeled: they depend on the batch and the model; a run measures them."]
    if working_copies(recipe, parameters):
        said.append(f"Working copies: autocast casts the weights of matrix products to {forward} and keeps them from forward to backward.")
    if holds_low_bit_copies(recipe):
        scope = "tensors of two or more dimensions" if shapes else "every parameter (an upper bound: only linear layers are converted)"
        said.append(f"Low-bit copies: {copies_per_weight(recipe.scaling.weights)} in {forward} of {scope}; fewer where they are made anew for each product.")
        if copies_per_weight(recipe.scaling.weights) == 1:
            said.append("A unit that reads one layout only keeps a transposed low-bit copy as well.")
        if not shapes:
            counted = "counted as if dimensions were multiples of the block" if block_scales(parameters, recipe.scaling.weights) else "not counted"
            said.append(f"Scales ({recipe.scaling.format}, per {recipe.scaling.weights}) are {counted}; give --shape for the exact number.")
    low_bit = sorted({name for name in held if name != "-" and FORMATS[first(name)].is_low_bit})
    if low_bit:
        said.append(f"Scales of the tensors held in {', '.join(low_bit)} only are not counted.")
    if recipe.master == "fp32" and recipe.params != "fp32":
        said.append("The fp32 copy is kept in full: a checkpoint that resumes exactly holds it beside the parameters.")
    if recipe.master == "stochastic":
        said.append("Stochastic rounding keeps no copy.")
    if recipe.grads != recipe.params:
        more = f"{stored(parameters, recipe.params):,} B"
        said.append(f"Gradients arrive in {recipe.params} and are summed in {recipe.grads}; until they are added, at most {more} more are held.")
    if "|" in recipe.compute.forward:
        said.append(f"compute.forward is an ordered choice; counted as {forward}.")
    return said


def check_count(count: int, what: str) -> int:
    """Return ``count`` if it is a number of parameters.

    Raises:
        DocumentError: not a whole number from 1 to ``LIMIT``.
    """
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= LIMIT:
        raise DocumentError(f"{what} = {count}", found="out of range", allowed=[f"a whole number from 1 to {LIMIT:.0e}"])
    return count
