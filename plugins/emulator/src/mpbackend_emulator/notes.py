"""What the plan of an emulated device says besides its decisions: how each product is summed, and what is left to the host. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from mpbackend.decisions import wanted_in_16_bits
from mpbackend.errors import BackendError
from mpbackend.formats import FORMATS
from mpbackend.granting import SCALING_ROWS
from mpbackend.lowbit import is_low_bit_recipe
from mpbackend.numerics.arithmetic import Arithmetic
from mpbackend.planning import Plan
from mpbackend_emulator.implementations import OPS
from mpbackend_emulator.unit import Unit

HOST = "the host's library in {register}, in an order of its own"
ROUNDS = {"rne": "rounded to nearest even", "rz": "truncated", "rna": "rounded half away from zero"}

NOT_EMULATED = (
    "left to the host: fused attention (in fp32 from the operands' format, rounded once), recurrent layers, products of a matrix and a vector, norms, softmax, "
    "reductions, element by element operations, split-K, the format and order of collectives, speed and memory"
)
CONVOLUTION = "convolutions are summed as products of their windows, channel by channel; libraries choose an order or another algorithm"
EPILOGUE = "a bias, and beta * self of addmm, is added in the format of the sums; the result is rounded once"
AUTOCAST = (
    "autocast is the CPU's: recurrent cells and products with a vector are not lowered, scatter_add, index_put, atan2 and cross are not promoted, "
    "and binary_cross_entropy is not refused as on the device; `mpbackend policy --diff {peer} emu` lists every operator"
)
PEERS = {"nvidia": "cuda", "ascend": "ascend"}
"""Family of the matrices to the backend whose autocast list is the device's own."""

SCALES = "scales of tensors and rows multiply the fp32 sums, as one fp32 number for each element"
BLOCKS = "each block of 128 along K is summed by itself, scaled, and added in fp32"
MICROSCALES = "scales of blocks are applied inside the unit; of two levels the tensor's multiplies the fp32 sums"
SATURATION = "an inf or NaN among results becomes the largest finite value or 0 and sets the status register; what a mask places does not"
LOW_BIT_CASTS = "casts to low-bit formats and their scales are the core's, as in every lowering"


def notes(unit: Unit, plan: Plan) -> tuple[str, ...]:
    """Return what a plan on an emulated device does not say, a sentence each."""
    found = ["emulated on this machine's processor: nothing here was measured on the device"]
    found += sum_notes(unit, plan)
    found += [CONVOLUTION, EPILOGUE]
    if is_low_bit_recipe(plan.effective):
        inputs = plan.effective.scaling.inputs
        found += [LOW_BIT_CASTS, BLOCKS if "128" in inputs else MICROSCALES if inputs in ("1x32", "1x16") else SCALES]
    if unit.saturates:
        found.append(SATURATION)
    peer = PEERS.get(unit.matrix.family_of(unit.arch))
    found += [AUTOCAST.format(peer=peer)] if peer is not None and wanted_in_16_bits(plan.effective) else []
    return tuple(dict.fromkeys((*found, NOT_EMULATED)))


def sum_notes(unit: Unit, plan: Plan) -> Iterator[str]:
    """Yield how each planned product is summed, the passes that sum alike together, and what that assumes."""
    passes: dict[str, list[str]] = {}
    assumed: dict[str, None] = {}
    for decision in plan.decisions:
        if not decision.role.startswith("compute.") or decision.op not in OPS:
            continue
        name = decision.role.removeprefix("compute.")
        try:
            arithmetic = planned(unit, plan, name, decision.pair)
        except BackendError as error:
            passes.setdefault(error.found, []).append(f"{name} ({decision.op})")
            continue
        label = " x ".join(dict.fromkeys(decision.pair))
        passes.setdefault(f"{label} is summed by {describe(arithmetic)}", []).append(name if decision.op == "matmul" else decision.op)
        assumed |= dict.fromkeys(arithmetic.assumed)
    yield from (f"{', '.join(dict.fromkeys(names))}: {text}" for text, names in passes.items())
    yield from (f"assumed: {text}" for text in assumed)


def planned(unit: Unit, plan: Plan, name: str, pair: tuple[str, str]) -> Arithmetic:
    """Return the arithmetic of one pass.

    Args:
        unit: the matrix unit.
        plan: the plan.
        name: ``forward``, ``dgrad`` or ``wgrad``.
        pair: formats of the operands.

    Raises:
        BackendError: there is none.
    """
    scaling = plan.effective.scaling
    low = FORMATS[pair[0]].is_low_bit or FORMATS[pair[1]].is_low_bit
    if not low:
        return unit.find(*pair)
    split = getattr(plan.effective.accumulate, name) != "fast" and "128" not in scaling.inputs
    layouts = SCALING_ROWS.get((scaling.inputs, scaling.weights), ("none",))
    present = [layout for layout in layouts if unit.matrix.rows(unit.arch, op="matmul", a=pair[0], b=pair[1], scaling=layout)]
    return unit.scaled(*pair, (present or ["none"])[0], split=split)


def describe(arithmetic: Arithmetic) -> str:
    """Return how an arithmetic sums, in words, with its source."""
    if arithmetic.model == "host":
        return f"{HOST.format(register=arithmetic.register)}, from {arithmetic.a} operands ({arithmetic.source})"
    if arithmetic.fraction_bits is None:
        text = f"one fused multiply-add after another in {arithmetic.register}"
    else:
        groups = f", groups of {arithmetic.exact_group} added exactly," if arithmetic.exact_group != 1 else ","
        text = f"steps of {arithmetic.products_per_step} products{groups} aligned to {arithmetic.fraction_bits} fraction bits, "
        text += f"into {arithmetic.register} with {arithmetic.kept_bits} fraction bits, {ROUNDS[arithmetic.register_rounding]}"
    if arithmetic.promotion_interval is not None:
        text += f", joined to an {arithmetic.promoted} sum after every {arithmetic.promotion_interval} products"
    return f"{text} ({arithmetic.source})"
