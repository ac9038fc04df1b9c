from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from mpbackend.footprint import OPTIMIZERS, footprint
from mpbackend.observe.audit import SavedActivations
from mpbackend.observe.classes import observed_classes
from mpbackend.observe.memory import dtype_name, nested_tensors, state_tensors, tensor_bytes
from mpbackend.recipe import parse_recipe

Builder = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

BUILDERS: dict[str, Builder] = {
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adam-amsgrad": lambda parameters: torch.optim.Adam(parameters, amsgrad=True),
    "adamw": torch.optim.AdamW,
    "muon": torch.optim.Muon,
    "rmsprop": torch.optim.RMSprop,
    "sgd": torch.optim.SGD,
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
}


def step(builder: Builder, dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = nn.Linear(24, 40, bias=False).to(dtype)
    optimizer = builder(list(net.parameters()))
    net(torch.randn(4, 24, dtype=dtype)).float().sum().backward()
    optimizer.step()
    return net, optimizer


@pytest.mark.parametrize("optimizer", BUILDERS)
@pytest.mark.parametrize(("recipe", "dtype"), [("fp32", torch.float32), ("bf16-params", torch.bfloat16)])
def test_prediction_equals_what_torch_holds(optimizer: str, recipe: str, dtype: torch.dtype) -> None:
    net, stepped = step(BUILDERS[optimizer], dtype)
    classes = observed_classes(net, stepped, {})
    predicted = footprint(parse_recipe(recipe), 24 * 40, optimizer)
    found = [sum(classes[name].values()) for name in ("parameters", "gradients", "optimizer state")]
    assert found == [predicted.bytes_of(role) for role in ("params", "grads", "optimizer")]


def test_every_optimizer_that_torch_has_is_compared() -> None:
    assert OPTIMIZERS.keys() - BUILDERS.keys() == {"lion"}


def test_working_copies_equal_what_autocast_saves() -> None:
    net = nn.Sequential(nn.Linear(24, 40, bias=False), nn.Linear(40, 8, bias=False))
    x = torch.randn(4, 24, requires_grad=True)
    activations = SavedActivations(net.parameters())
    with activations, torch.autocast("cpu", dtype=torch.bfloat16):
        net(x)
    inputs = 2 * 4 * (24 + 40)
    assert activations.bytes == {"bf16": inputs + footprint(parse_recipe("bf16"), 24 * 40 + 40 * 8, "adamw").working}


def test_a_tensor_is_counted_once_and_formats_are_sorted() -> None:
    one, other = torch.zeros(3), torch.zeros(5, dtype=torch.bfloat16)
    assert list(tensor_bytes([one, other, one]).items()) == [("bf16", 10), ("fp32", 12)]
    assert tensor_bytes(iter([])) == {}


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float32, "fp32"),
        (torch.bfloat16, "bf16"),
        (torch.float8_e4m3fn, "fp8_e4m3"),
        (torch.float8_e8m0fnu, "e8m0"),
        (torch.int64, "int64"),
        (torch.bool, "bool"),
        (torch.complex64, "complex64"),
    ],
)
def test_names_of_dtypes(dtype: torch.dtype, name: str) -> None:
    assert dtype_name(dtype) == name


def test_counters_are_left_out_of_the_state() -> None:
    _, optimizer = step(torch.optim.AdamW, torch.float32)
    [state] = optimizer.state.values()
    assert "step" in state
    state["damping"] = torch.tensor(1.0)
    assert [tuple(tensor.shape) for tensor in state_tensors(optimizer)] == [(40, 24), (40, 24)]


def test_moments_of_a_scalar_parameter_are_state() -> None:
    scalar = nn.Parameter(torch.tensor(1.0))
    optimizer = torch.optim.AdamW([scalar])
    scalar.grad = torch.tensor(1.0)
    optimizer.step()
    assert tensor_bytes(state_tensors(optimizer)) == {"fp32": 8}


def test_state_in_containers_is_found() -> None:
    nested = {"a": [torch.zeros(1), (torch.zeros(2), None)], "b": {"c": torch.zeros(3), "d": 4.0}}
    assert [tensor.numel() for tensor in nested_tensors(nested)] == [1, 2, 3]
