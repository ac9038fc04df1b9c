"""Converting a model to low-bit linear layers of Transformer Engine, and back to plain ones."""

from __future__ import annotations

from typing import Any

from torch.nn import Linear, Module

from mpbackend.lowbit import LowBit
from mpbackend.train.conversion import convert_linears, put
from mpbackend_cuda.execution import EngineExecution
from mpbackend_cuda.te_layers import LowBitLinear, convert_layer
from mpbackend_cuda.te_recipes import Lowered


def convert_model(model: Module, low: LowBit, lowered: Lowered, kind: Any, execution: EngineExecution, micro_batches: int) -> list[dict[str, str]]:
    """Replace linear layers in place, and return a row for each; see ``convert_linears``.

    Features are the M, N and K of the three products in turn, so that all of them must fit; tokens are padded by the layers.

    Args:
        model: the model, without layers of an earlier recipe.
        low: what is asked.
        lowered: the recipe of Transformer Engine.
        kind: ``transformer_engine.pytorch.Linear``.
        execution: the execution of the plan.
        micro_batches: micro-batches a step.
    """
    keeps_weight = micro_batches > 1 and not execution.delayed

    def make(name: str, linear: Linear) -> Module:
        return convert_layer(linear, kind, execution, lowered.multiple, keeps_weight=keeps_weight)

    by = "; ".join((f"Transformer Engine {type(lowered.recipe).__name__}, tokens padded to a multiple of {lowered.multiple}", *lowered.notes))
    return convert_linears(model, make, low, by=by, multiple=lowered.multiple)


def restore_plain(model: Module) -> int:
    """Put plain linear layers, with the same parameters, in the place of converted ones of an earlier plan; return how many there were.

    Under another plan a converted layer would not be in Transformer Engine's region, and compute as a plain one without a word.
    """
    made: dict[int, Linear] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, LowBitLinear):
            if id(module) not in made:
                made[id(module)] = plain(module)
            put(model, name, made[id(module)])
    return len(made)


def plain(layer: LowBitLinear) -> Linear:
    """Return a plain linear layer that holds the parameters of a converted one."""
    outputs, inputs = layer.weight.shape
    parameters = dict(layer.named_parameters(recurse=False))
    linear = Linear(inputs, outputs, bias="bias" in parameters, device="meta")
    for name, parameter in parameters.items():
        linear.register_parameter(name, parameter)
    return linear.train(layer.training)
