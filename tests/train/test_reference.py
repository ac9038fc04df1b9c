"""The plain low-bit layer: its three products, its state, and the windows of delayed scaling."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mpbackend.lowbit import LowBit, low_bit
from mpbackend.recipe import parse_recipe
from mpbackend.train import reference
from mpbackend.train.quantize import quantize
from mpbackend.train.reference import AmaxWindow, LowBitLinear, plain_state_dict

RECIPES = ("fp8", "fp8:scaling.inputs=row,scaling.weights=row", "fp8-block", "mxfp8", "nvfp4", "hif8", "fp8:compute.dgrad=bf16", "fp8:compute.wgrad=fp8_e4m3")
DELAYED = "fp8-delayed:scaling.history=3"
INPUTS, OUTPUTS = 48, 40


def rules(text: str) -> LowBit:
    return low_bit(parse_recipe(text))


def layer(text: str, *, bias: bool = True, seed: int = 0) -> LowBitLinear:
    torch.manual_seed(seed)
    return LowBitLinear(INPUTS, OUTPUTS, bias, low_bit=rules(text))


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def step(module: nn.Module, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Run one step; return the output and the gradient of the input."""
    x = x.clone().requires_grad_()
    out = module(x)
    out.backward(gradient.to(out.dtype))
    assert x.grad is not None
    return out.detach(), x.grad


def written(module: LowBitLinear) -> int:
    assert module.amaxes is not None
    return int(module.amaxes.steps)


def present(module: LowBitLinear) -> list[float]:
    assert module.amaxes is not None
    found: list[float] = module.amaxes.present.tolist()
    return found


@pytest.mark.parametrize("text", RECIPES)
@pytest.mark.parametrize("autocast", [False, True])
def test_the_three_products_are_those_of_the_quantized_operands(text: str, autocast: bool) -> None:
    module = layer(text)
    x, gradient = draw(2, 33, INPUTS), draw(2, 33, OUTPUTS, seed=2) * 1e-3
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out, x_gradient = step(module, x, gradient)
    dtype = torch.bfloat16 if autocast else torch.float32
    meaning = rules(text)

    def values(tensor: Tensor, name: str, side: str) -> Tensor:
        return quantize(tensor.reshape(-1, tensor.shape[-1]), getattr(getattr(meaning, name), side), meaning).dequantized().double()

    weight, rows, g = module.weight.detach(), x.to(dtype), gradient.to(dtype)
    wanted = values(rows, "forward", "a") @ values(weight, "forward", "b").t() + module.bias.double()
    wanted_x = values(g, "dgrad", "a") @ values(weight.t(), "dgrad", "b").t()
    wanted_w = values(g.flatten(0, 1).t(), "wgrad", "a") @ values(rows.flatten(0, 1).t(), "wgrad", "b").t()
    assert module.weight.grad is not None
    assert module.bias.grad is not None
    assert (out.dtype, x_gradient.dtype, module.weight.grad.dtype, module.bias.grad.dtype) == (dtype, torch.float32, torch.float32, torch.float32)
    # One rounding to the activations' format (half a unit), and fp32 sums of at most 66 terms of magnitudes far below 2.
    for found, exact in ((out, wanted), (x_gradient, wanted_x), (module.weight.grad, wanted_w)):
        assert ((found.double().reshape(exact.shape) - exact).abs() <= exact.abs() * 2.0**-8 * autocast + 66 * 2.0**-24 * exact.abs().max() * 4).all()
    assert torch.allclose(module.bias.grad.double(), g.double().sum((0, 1)), rtol=0, atol=66 * 2.0**-24)


@pytest.mark.parametrize("shape", [(INPUTS,), (5, INPUTS), (2, 3, 5, INPUTS), (0, INPUTS), (2, 0, INPUTS)])
@pytest.mark.parametrize("text", ["fp8", "mxfp8", DELAYED])
def test_any_leading_dimensions(shape: tuple[int, ...], text: str) -> None:
    module = layer(text)
    out, x_gradient = step(module, draw(*shape), draw(*shape[:-1], OUTPUTS))
    assert (out.shape, x_gradient.shape) == ((*shape[:-1], OUTPUTS), shape)
    assert module.weight.grad is not None
    assert bool(module.weight.grad.any()) is (0 not in shape)


@pytest.mark.parametrize(("trained", "wants_x"), [(True, False), (False, True), (False, False)])
def test_gradients_that_nobody_asks_for_are_not_made(trained: bool, wants_x: bool) -> None:
    module = layer("fp8")
    module.weight.requires_grad_(trained)
    x = draw(8, INPUTS).requires_grad_(wants_x)
    module(x).sum().backward()
    assert (module.weight.grad is not None, x.grad is not None) == (trained, wants_x)
    assert module.bias.grad is not None


def test_a_second_derivative_is_refused() -> None:
    module = layer("fp8")
    x = draw(8, INPUTS).requires_grad_()
    (first,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("text", ["fp8", "nvfp4", DELAYED])
def test_a_non_finite_value_shows_in_output_and_gradients(value: float, text: str) -> None:
    module = layer(text)
    x = draw(8, INPUTS)
    x[3, 3] = value
    assert not module(x)[3].isfinite().any()
    gradient = draw(8, OUTPUTS)
    gradient[2, 1] = value
    _, x_gradient = step(module, draw(8, INPUTS), gradient)
    assert module.weight.grad is not None
    assert not x_gradient[2].isfinite().any()
    assert not module.weight.grad[1].isfinite().all()


def test_a_layer_takes_over_the_very_parameters_and_the_mode() -> None:
    plain = nn.Linear(INPUTS, OUTPUTS).eval()
    made = LowBitLinear.from_linear(plain, rules(DELAYED))
    assert made.weight is plain.weight
    assert made.bias is plain.bias
    assert not made.training
    assert made.amaxes is not None
    assert made.amaxes.window.device == plain.weight.device
    assert LowBitLinear.from_linear(nn.Linear(4, 4, bias=False), rules("fp8")).bias is None
    assert "fp8_e5m2 x fp8_e4m3" in repr(made)


@pytest.mark.parametrize("text", ["fp8", DELAYED])
def test_state_dicts_of_plain_and_low_bit_layers_are_interchangeable(text: str) -> None:
    plain, other = nn.Linear(INPUTS, OUTPUTS), nn.Linear(INPUTS, OUTPUTS)
    module = layer(text, seed=3)
    step(module, draw(8, INPUTS), draw(8, OUTPUTS))
    nn.Sequential(plain).load_state_dict(plain_state_dict(nn.Sequential(module)))
    assert torch.equal(plain.weight, module.weight)
    nn.Sequential(module).load_state_dict(nn.Sequential(other).state_dict())
    assert torch.equal(module.weight, other.weight)
    if text == DELAYED:
        assert (written(module), present(module)) == (0, [0, 0, 0])


def test_the_windows_are_saved_as_plain_tensors_and_restored(tmp_path: Path) -> None:
    module = layer(DELAYED)
    for number in range(5):
        step(module, draw(8, INPUTS, seed=number), draw(8, OUTPUTS, seed=number))
    torch.save(module.state_dict(), tmp_path / "state.pt")
    again = layer(DELAYED, seed=9)
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    x, gradient = draw(8, INPUTS, seed=20), draw(8, OUTPUTS, seed=20)
    for mine, theirs in zip(step(module, x, gradient), step(again, x, gradient), strict=True):
        assert torch.equal(mine, theirs)
    assert present(module) == present(again)


def test_a_state_with_half_a_window_is_refused() -> None:
    module = layer(DELAYED)
    state = module.state_dict()
    del state["amaxes.steps"]
    with pytest.raises(RuntimeError, match=r"Missing key.*amaxes\.steps"):
        module.load_state_dict(state)


def test_a_step_uses_the_amaxes_before_it_and_writes_its_own() -> None:
    module = layer(DELAYED, bias=False)
    amaxes = []
    for number in range(6):
        x, gradient = draw(8, INPUTS, seed=number) * 2.0 ** (3 - number), draw(8, OUTPUTS, seed=number) * 1e-2
        before = present(module)
        out, _ = step(module, x, gradient)
        a, b = (
            quantize(tensor, operand, module.low_bit, torch.tensor(amax)).dequantized()
            for tensor, operand, amax in ((x, module.low_bit.forward.a, before[0]), (module.weight.detach(), module.low_bit.forward.b, before[1]))
        )
        assert torch.allclose(out, a @ b.t(), rtol=2.0**-20, atol=1e-6)
        amaxes.append([float(tensor.abs().max()) for tensor in (x, module.weight.detach(), gradient)])
        assert present(module) == [max(column) for column in zip(*amaxes[-3:], strict=True)]
    assert written(module) == 6


def test_evaluation_stays_low_bit_and_writes_nothing() -> None:
    module = layer(DELAYED)
    step(module, draw(8, INPUTS), draw(8, OUTPUTS))
    before = present(module)
    module.eval()
    x = draw(8, INPUTS, seed=5) * 100
    out, _ = step(module, x, draw(8, OUTPUTS))
    assert not torch.equal(out, nn.functional.linear(x, module.weight, module.bias))
    with torch.no_grad():
        module(x)
        module.train()(x)
    assert (present(module), written(module)) == (before, 1)


def test_a_recomputed_forward_pass_is_the_first_one_again() -> None:
    one, two = layer(DELAYED), layer(DELAYED)
    for number in range(3):
        x, gradient = draw(8, INPUTS, seed=number), draw(8, OUTPUTS, seed=number) * 10.0**number
        out, x_gradient = step(one, x, gradient)
        leaf = x.clone().requires_grad_()
        again = checkpoint(two, leaf, use_reentrant=False)
        again.backward(gradient)
        assert leaf.grad is not None
        assert torch.equal(again, out)
        assert torch.equal(leaf.grad, x_gradient)
        assert (present(one), written(one)) == (present(two), written(two))


def test_a_layer_without_anything_to_differentiate_counts_forward_passes() -> None:
    module = layer(DELAYED).requires_grad_(False)
    x = draw(8, INPUTS)
    module(x)
    assert written(module) == 1
    assert present(module) == [float(x.abs().max()), float(module.weight.abs().max()), 0.0]


def test_a_layer_used_twice_makes_two_entries() -> None:
    module = layer(DELAYED)
    (module(draw(8, INPUTS)).sum() + module(draw(8, INPUTS, seed=2)).sum()).backward()
    assert written(module) == 2


def test_a_copy_has_windows_of_its_own() -> None:
    module = layer(DELAYED)
    other = copy.deepcopy(module)
    step(module, draw(8, INPUTS), draw(8, OUTPUTS))
    assert (written(module), written(other)) == (1, 0)


def push_all(window: AmaxWindow, *amaxes: float) -> list[float]:
    found = []
    for amax in amaxes:
        window.push(torch.tensor([float(amax)]))
        found.append(float(window.present[0]))
    return found


def test_the_oldest_amax_leaves_the_window() -> None:
    assert push_all(AmaxWindow(1, 3, "max"), 9, 1, 2, 3, 1, 1, 1) == [9, 9, 9, 3, 3, 3, 1]
    assert push_all(AmaxWindow(1, 3, "most_recent"), 9, 1, 2) == [9, 1, 2]


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_amaxes_that_say_nothing_leave_the_present_one(algorithm: Any) -> None:
    assert push_all(AmaxWindow(1, 2, algorithm), 0, 0, 4, 0, 0, 0) == [0, 0, 4, 4, 4, 4]
    assert push_all(AmaxWindow(1, 1, algorithm), 5, math.inf, math.nan, 3) == [5, 5, 5, 3]


def test_an_inf_stays_as_long_as_any_amax() -> None:
    assert push_all(AmaxWindow(1, 2, "max"), 5, math.inf, 7, 3, 2) == [5, 5, 5, 7, 3]


def test_ranks_share_the_largest_amax(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_reduce(tensor: Tensor, op: Any) -> None:
        assert op is torch.distributed.ReduceOp.MAX
        torch.maximum(tensor, torch.tensor([4.0]), out=tensor)

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    assert push_all(AmaxWindow(1, 2, "max", reduce=True), 1, 9, 1, 1) == [4, 9, 9, 4]
    assert push_all(AmaxWindow(1, 2, "max"), 1, 9, 1, 1) == [1, 9, 9, 1]
    made = reference.window_of(rules(DELAYED), torch.device("cpu"))
    assert made is not None
    assert made.reduce


def test_autocast_does_not_round_dequantized_operands() -> None:
    module = layer("fp8-block", bias=False)
    x = draw(16, INPUTS)
    with torch.autocast("cpu", torch.bfloat16):
        out = module(x)
    operands = [
        quantize(tensor, getattr(module.low_bit.forward, side), module.low_bit) for tensor, side in ((x.bfloat16(), "a"), (module.weight.detach(), "b"))
    ]
    assert torch.equal(out, (operands[0].dequantized() @ operands[1].dequantized().t()).bfloat16())
    assert not torch.equal(out, operands[0].dequantized().bfloat16() @ operands[1].dequantized().bfloat16().t())
