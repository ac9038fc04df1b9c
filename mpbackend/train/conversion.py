"""Replacing the linear layers of a model by low-bit ones, and saying of every layer what became of it.

The walk decides about each layer by itself: one that misfits does not stop its siblings. Nothing is changed until every replacement has been made and checked,
so that an error leaves the model as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional

from mpbackend.errors import BackendError, UnknownNameError
from mpbackend.lowbit import LowBit

Make = Callable[[str, nn.Linear], nn.Module | str]
"""Makes the replacement of a layer from its name and the layer; it must hold the very parameters. Text refuses the layer and says why.

A replacement that is an ``nn.Linear`` tells by an attribute ``low_bit`` what it computes. Such a layer is taken for a plain one and made anew.
"""

Action = Literal["converted", "padded", "skipped"]

HOOKS: Sequence[str] = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks")


class Layer(msgspec.Struct, kw_only=True):
    """One linear layer.

    Attributes:
        module: the layer.
        names: every name it is registered under, in the order of the model.
        action: what becomes of it.
        reason: why.
        made: its replacement; None when it is skipped.
    """

    module: nn.Linear
    names: list[str]
    action: Action = "converted"
    reason: str = ""
    made: nn.Module | None = None


def convert_linears(
    model: nn.Module, make: Make, low_bit: LowBit, keep: Iterable[str] = (), *, by: str = "", multiple: int | None = None, pads: bool = False
) -> list[dict[str, str]]:
    """Replace the ``torch.nn.Linear`` layers of a model in place.

    Args:
        model: the model; its parameters stay the same objects, so that tied weights stay tied and an optimizer keeps what it holds.
        make: makes a replacement; called once for a layer that is registered several times.
        low_bit: the meaning of the recipe; ``low_bit.keep`` names layers that stay.
        keep: more patterns (``fnmatch``) of names of layers that stay.
        by: what makes the replacements, for the report; the class of a replacement when empty.
        multiple: multiple that input and output features must have; that of ``low_bit`` when omitted.
        pads: whether the made layers take any size by padding with zeros. Layers of other sizes are else left out.

    Returns:
        A row for each layer under its first name, in the order of the model: ``layer``, ``action`` (converted, padded, skipped), ``reason``, and
        ``flop_share``, its part of the multiplications of all linear layers if each name is called on the same number of tokens. The shares sum to 1 (six
        digits). Each product of a layer counts alike.

    Raises:
        UnknownNameError: a pattern names no layer.
        BackendError: no layer is converted, or a replacement does not hold the parameters of its layer. The model is as it was.
    """
    layers = find_linears(model)
    check_patterns([*low_bit.keep, *keep], layers)
    needed = low_bit.multiple if multiple is None else multiple
    for layer in layers:
        decide(layer, model, [*low_bit.keep, *keep], needed, pads=pads)
        if layer.action != "skipped":
            replace(layer, make, by)
    if not any(layer.made is not None for layer in layers):
        found = "; ".join(f"{layer.names[0]}: {layer.reason}" for layer in layers[:4]) or "the model has no torch.nn.Linear"
        raise BackendError("low-bit conversion: no layer can be converted", found=found, remedy="train under bf16")
    places = [(name, layer.module, layer.made) for layer in layers if layer.made is not None for name in layer.names]
    try:
        for name, _, made in places:
            put(model, name, made)
    except BaseException:
        for name, module, _ in places:
            put(model, name, module)
        raise
    return rows(layers)


def put(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module where another one is registered, at the same position among its siblings."""
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, module)


def check_plain(model: nn.Module) -> None:
    """Check that no layer computes low-bit; for plans that do not.

    Raises:
        BackendError: one does: an earlier session converted it.
    """
    for name, module in model.named_modules():
        if isinstance(getattr(module, "low_bit", None), LowBit):
            found = f"{name} is a {type(module).__name__}, made for an earlier low-bit recipe"
            raise BackendError("a model without low-bit layers", found=found, remedy="build the model anew and load its weights")


def find_linears(model: nn.Module) -> list[Layer]:
    """Return every linear layer once, with all its names."""
    found: dict[int, Layer] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Linear):
            found.setdefault(id(module), Layer(module=module, names=[])).names.append(name)
    return list(found.values())


def check_patterns(patterns: Sequence[str], layers: Sequence[Layer]) -> None:
    """Check that every pattern names a layer: a misspelt one would convert what was to be kept.

    Raises:
        UnknownNameError: one names none.
    """
    names = [name for layer in layers for name in layer.names]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UnknownNameError("linear layer", pattern, names, remedy="patterns are those of fnmatch: 'blocks.0.*'")


def decide(layer: Layer, model: nn.Module, patterns: Sequence[str], multiple: int, *, pads: bool) -> None:
    """Decide what becomes of one layer by what it is; see ``convert_linears``."""
    module = layer.module
    sizes = {"in_features": module.in_features, "out_features": module.out_features}
    misfits = [f"{name} {size}" for name, size in sizes.items() if size % multiple]
    again = isinstance(getattr(module, "low_bit", None), LowBit)
    hooked = [name for name in HOOKS if getattr(module, name, None) and not again]
    kept = [pattern for pattern in patterns if any(fnmatchcase(name, pattern) for name in layer.names)]
    if kept:
        layer.reason = f"kept: its name matches {kept[0]!r}"
    elif type(module) is not nn.Linear and not again:
        layer.reason = f"its class is {type(module).__name__}, not torch.nn.Linear itself"
    elif module is model:
        layer.reason = "it is the model itself and cannot be replaced in place; wrap it in a module"
    elif hooked:
        layer.reason = f"it has hooks that a replacement would lose ({hooked[0].strip('_')})"
    elif type(module.weight) is not nn.Parameter:
        layer.reason = f"the class of its weight is {type(module.weight).__name__}: convert before the model is wrapped"
    elif misfits and not pads:
        layer.reason = f"{' and '.join(misfits)}: not a multiple of {multiple}, which a product of the forward or backward pass needs"
    else:
        layer.action = "padded" if misfits else "converted"
        layer.reason = f"{' and '.join(misfits)}: padded with zeros to a multiple of {multiple}" if misfits else ""
        return
    layer.action = "skipped"


def replace(layer: Layer, make: Make, by: str) -> None:
    """Make the replacement of a layer and check it.

    Raises:
        BackendError: it does not hold the parameters of the layer: an optimizer would train others than the model uses.
    """
    made = make(layer.names[0], layer.module)
    if isinstance(made, str):
        layer.action, layer.reason = "skipped", made
        return
    held = {id(parameter) for parameter in made.parameters()}
    lost = [name for name, parameter in layer.module.named_parameters() if id(parameter) not in held]
    if lost:
        raise BackendError(f"low-bit conversion of {layer.names[0]}", found=f"the {type(made).__name__} made for it does not hold its {lost[0]}")
    layer.made = made
    layer.reason = "; ".join(part for part in (by or type(made).__name__, layer.reason) if part)


def rows(layers: Sequence[Layer]) -> list[dict[str, str]]:
    """Return the report: one row for each layer; see ``convert_linears``."""
    work = [layer.module.in_features * layer.module.out_features * len(layer.names) for layer in layers]
    total = sum(work) or 1
    return [
        {"layer": layer.names[0], "action": layer.action, "reason": describe(layer), "flop_share": f"{amount / total:.6f}"}
        for layer, amount in zip(layers, work, strict=True)
    ]


def describe(layer: Layer) -> str:
    """Return the reason, and the other names of a layer that has several."""
    return layer.reason + (f"; also {', '.join(layer.names[1:])}" if len(layer.names) > 1 else "")


def converted_share(conversion: Iterable[Mapping[str, str]]) -> float:
    """Return the part of the linear layers' multiplications that is low-bit, from 0 to 1."""
    return sum(float(row["flop_share"]) for row in conversion if row["action"] != "skipped")


def pad_rows(tensor: Tensor, multiple: int) -> Tensor:
    """Append rows of zeros so that their number is a multiple; for layers whose products need one of their tokens, which cuts the result back.

    Args:
        tensor: (rows, features).
        multiple: at least 1.
    """
    missing = -tensor.shape[0] % multiple
    return functional.pad(tensor, (0, 0, 0, missing)) if missing else tensor


def check_tokens(shape: torch.Size, multiple: int, layer: str) -> None:
    """Check the tokens of a call, for layers that cannot pad them.

    Args:
        shape: (..., features) of the input.
        multiple: what the number of tokens must be a multiple of; they are the summed dimension of the weight's gradient.
        layer: its name, for the message.

    Raises:
        BackendError: it is not.
    """
    tokens = shape.numel() // shape[-1] if shape and shape[-1] else 0
    if tokens % multiple:
        remedy = f"pad the batch, or keep the layer: keep={layer!r}"
        raise BackendError(f"low-bit product of {layer}", found=f"{tokens} tokens {tuple(shape)}, not a multiple of {multiple}", remedy=remedy)
