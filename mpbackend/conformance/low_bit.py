"""Checks of low-bit recipes as the backend carries them out: converted layers, their products, and what stays as it is."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from mpbackend.conformance.answer import Answer, fault, fine
from mpbackend.conformance.operands import SEED
from mpbackend.conformance.products import check_products
from mpbackend.conformance.subject import PLAIN, Running, Subject
from mpbackend.conformance.training import difference
from mpbackend.lowbit import is_low_bit_recipe
from mpbackend.recipe import PRESETS

ACTIONS = ("converted", "padded", "skipped")
SIDE = 128


LOW_BIT = tuple(name for name, recipe in PRESETS.items() if is_low_bit_recipe(recipe))
"""The low-bit presets."""


def check_low_bit_products(subject: Subject) -> Answer:
    """Under every low-bit preset a converted layer multiplies as the plain lowering does, forward, dgrad and wgrad, in a derived distance."""

    def judge(running: Running, recipe: str) -> Answer:
        def make(name: str, linear: nn.Linear) -> nn.Module | str:
            model = nn.ModuleDict({name: linear})
            rows = subject.backend.convert(model, running.plan)
            made: nn.Module = model[name]
            return made if rows and rows[0]["action"] != "skipped" else f"the layer is skipped: {rows[0]['reason'] if rows else 'no row'}"

        found = check_products(subject.backend.name, make, recipe, str(subject.place), run=functools.partial(passes, running))
        if found.outcome == "skipped":
            return fault(f"{found.detail}, and the plan runs")
        return fault(found.detail) if found.outcome == "failed" else fine()

    return subject.each_format(judge, LOW_BIT)


def passes(running: Running, layer: nn.Module, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, gradient of the input and gradient of the weight of one step under a plan, in fp32 on the host."""
    x = x.clone().requires_grad_()
    for parameter in layer.parameters():
        parameter.grad = None
    with running.forward():
        out = layer(x)
    with running.backward():
        out.backward(gradient.to(out.dtype))
    weight = layer.get_parameter("weight")
    missing = torch.full((1,), torch.nan)
    return out.detach().float().cpu(), *(missing if grad is None else grad.detach().float().cpu() for grad in (x.grad, weight.grad))


class Tied(nn.Module):
    """Two layers with one weight, one of other sizes, and one that no unit takes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(SIDE, SIDE)
        self.second = nn.Linear(SIDE, SIDE)
        self.second.weight = self.first.weight
        self.wide = nn.Linear(SIDE, 2 * SIDE, bias=False)
        self.odd = nn.Linear(7, 5)


def check_conversion_tells_every_layer(subject: Subject) -> Answer:
    """A conversion has a row with a reason for each linear layer, keeps the very parameters and their names, and leaves tied weights tied."""

    def judge(running: Running, recipe: str) -> Answer:
        torch.manual_seed(SEED)
        model = Tied().to(subject.place)
        parameters = dict(model.named_parameters())
        rows = subject.backend.convert(model, running.plan)
        told = {row.get("layer", ""): row for row in rows}
        missing = [name for name in ("first", "second", "wide", "odd") if name not in told]
        if missing:
            return fault(f"no row tells about {missing[0]}")
        for name, row in told.items():
            if row.get("action") not in ACTIONS or not row.get("reason"):
                return fault(f"the row of {name} has action {row.get('action')!r} and reason {row.get('reason', '')!r}")
        if not any(row["action"] != "skipped" for row in rows):
            return fault("no layer is converted")
        after = dict(model.named_parameters())
        changed = [name for name, parameter in parameters.items() if after.get(name) is not parameter]
        if changed:
            return fault(f"{changed[0]} is another parameter, and an optimizer would not step it")
        if model.get_parameter("second.weight") is not model.get_parameter("first.weight"):
            return fault("tied weights are no longer tied")
        return fine(converted=sum(row["action"] != "skipped" for row in rows))

    return subject.each_format(judge, LOW_BIT)


def check_low_bit_keeps_nonfinite(subject: Subject) -> Answer:
    """An inf or a NaN in the input of a converted layer shows in its output: no cast turns it into the largest number."""

    def judge(running: Running, recipe: str) -> Answer:
        torch.manual_seed(SEED)
        model = nn.Sequential(nn.Linear(SIDE, SIDE)).to(subject.place)
        subject.backend.convert(model, running.plan)
        for value in (torch.inf, torch.nan):
            x = torch.ones(SIDE, SIDE)
            x[3, 5] = value
            with running.forward(), torch.no_grad():
                out = model(x.to(subject.place)).cpu()
            if bool(out[3].isfinite().all()):
                return fault(f"{value} in a row of the input gives finite numbers, {out[3, 0].item():g} for one")
        return fine()

    return subject.each_format(judge, LOW_BIT)


def check_plain_recipes_convert_nothing(subject: Subject) -> Answer:
    """Under fp32, bf16 and fp16 no module is replaced and no parameter touched."""

    def judge(running: Running, name: str) -> Answer:
        torch.manual_seed(SEED)
        model = Tied().to(subject.place)
        kinds = {path: type(module) for path, module in model.named_modules()}
        before = {path: tensor.detach().cpu().clone() for path, tensor in model.state_dict().items()}
        rows = subject.backend.convert(model, running.plan)
        if rows:
            return fault(f"it reports {rows[0].get('layer', 'a layer')} as {rows[0].get('action', 'changed')}")
        if {path: type(module) for path, module in model.named_modules()} != kinds:
            return fault("it replaces a module and does not tell")
        changed = difference(before, {path: tensor.detach().cpu() for path, tensor in model.state_dict().items()})
        return fault(f"it changes {changed}") if changed else fine()

    return subject.each_format(judge, PLAIN)
