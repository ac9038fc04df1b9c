"""Converted layers: the same parameters and numbers, padded tokens, kept weights, checkpoints."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mpbackend.errors import DocumentError
from mpbackend_cuda.execution import EngineExecution, read_window, windows
from mpbackend_cuda.te_layers import LowBitLinear, convert_layer, layer_class
from plugins.cuda.tests.support.engine import DelayedScaling, Engine, Float8CurrentScaling

SIDES = (16, 32)


def make(engine: Engine, *, delayed: bool = False, keeps_weight: bool = False, bias: bool = True) -> tuple[nn.Linear, LowBitLinear]:
    kind: Any = DelayedScaling if delayed else Float8CurrentScaling
    execution = EngineExecution(engine.pytorch.autocast, kind(amax_history_len=4), delayed=delayed)
    linear = nn.Linear(*SIDES, bias=bias)
    return linear, convert_layer(linear, engine.pytorch.Linear, execution, 16, keeps_weight=keeps_weight)


def whole_numbers(*shape: int) -> torch.Tensor:
    """Return small whole numbers, whose sums of products are exact in any order."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(-8, 9, shape, generator=generator).float()


@pytest.mark.parametrize("bias", [True, False])
def test_the_parameters_are_those_of_the_layer_it_replaces(bias: bool, engine: Engine) -> None:
    linear, layer = make(engine, bias=bias)
    assert dict(layer.named_parameters()).keys() == dict(linear.named_parameters()).keys()
    assert all(parameter is dict(linear.named_parameters())[name] for name, parameter in layer.named_parameters())
    assert isinstance(layer, engine.pytorch.Linear)
    assert layer.training
    inp = torch.randn(16, SIDES[0])
    with layer.execution.context():
        assert torch.equal(layer(inp), linear(inp))
    assert torch.equal(layer(inp), linear(inp))


def test_making_a_layer_draws_no_random_number(engine: Engine) -> None:
    linear, _ = make(engine)
    before = torch.get_rng_state()
    convert_layer(linear, engine.pytorch.Linear, EngineExecution(engine.pytorch.autocast, None, delayed=False), 16, keeps_weight=False)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("shape", [(1,), (5,), (16,), (3, 7), (2, 2, 9), (4, 8)])
def test_padded_tokens_change_no_number(shape: tuple[int, ...], engine: Engine) -> None:
    linear, layer = make(engine)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(whole_numbers(*parameter.shape))
    results = []
    for module, context in ((linear, False), (layer, True)):
        inp = whole_numbers(*shape, SIDES[0]).requires_grad_()
        for parameter in linear.parameters():
            parameter.grad = None
        if context:
            with layer.execution.context():
                out = module(inp)
        else:
            out = module(inp)
        out.backward(whole_numbers(*shape, SIDES[1]))
        results.append((out, inp.grad, linear.weight.grad, linear.bias.grad))
    for plain, low in zip(*results, strict=True):
        assert plain is not None
        assert low is not None
        assert plain.shape == low.shape
        assert torch.equal(plain, low)
    tokens = torch.Size(shape).numel()
    assert [call.tokens for call in engine.calls] == [tokens + -tokens % 16]


def test_nothing_to_compute(engine: Engine) -> None:
    _, layer = make(engine)
    with layer.execution.context():
        assert layer(torch.zeros(2, 0, SIDES[0])).shape == (2, 0, SIDES[1])
    assert engine.calls == []


def test_the_quantized_weight_is_kept_over_the_micro_batches_of_a_step(engine: Engine) -> None:
    _, layer = make(engine, keeps_weight=True)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(2):
        for _ in range(3):
            with layer.execution.context():
                loss = layer(torch.randn(16, SIDES[0])).sum()
            with layer.execution.context():
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [call.first for call in engine.calls] == [True, False, False] * 2


def test_a_kept_weight_gives_the_numbers_of_a_fresh_one(engine: Engine) -> None:
    linear, layer = make(engine, keeps_weight=True)
    inp = torch.randn(16, SIDES[0])
    for _ in range(2):
        with layer.execution.context():
            out = layer(inp)
        assert torch.equal(out, linear(inp))
        out.sum().backward()


def test_a_weight_that_was_written_is_quantized_anew(engine: Engine) -> None:
    linear, layer = make(engine, keeps_weight=True)

    def run() -> torch.Tensor:
        with layer.execution.context():
            out: torch.Tensor = layer(torch.ones(16, SIDES[0]))
        out.sum().backward()
        return out

    run()
    with torch.no_grad():
        linear.weight.mul_(2)  # in the middle of a step, with a gradient standing
    assert torch.equal(run(), linear(torch.ones(16, SIDES[0])))
    assert [call.first for call in engine.calls] == [True, True]


def test_two_uses_in_one_micro_batch_are_two_first_ones(engine: Engine) -> None:
    _, layer = make(engine, keeps_weight=True)
    with layer.execution.context():
        (layer(torch.randn(16, SIDES[0])) + layer(torch.randn(16, SIDES[0]))).sum().backward()
    assert [call.first for call in engine.calls] == [True, True], "no gradient stands yet"


@pytest.mark.parametrize("how", ["evaluating", "without gradients", "one micro-batch"])
def test_nothing_is_kept_where_nothing_is_accumulated(how: str, engine: Engine) -> None:
    _, layer = make(engine, keeps_weight=how != "one micro-batch")
    layer.train(how != "evaluating")
    with torch.set_grad_enabled(how != "without gradients"), layer.execution.context():
        layer(torch.randn(16, SIDES[0]))
    assert [call.first for call in engine.calls] == [None]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_writes_are_counted_except_by_fused_optimizers(kind: Any) -> None:
    """So the count alone does not tell that a weight is stale; a gradient that stands, which a session clears with every step, does."""
    counts = {}
    for fused in (False, True):
        parameter = nn.Parameter(torch.ones(4))
        parameter.grad = torch.ones(4)
        kind([parameter], lr=0.1, fused=fused).step()
        counts[fused] = parameter._version
        assert not torch.equal(parameter, torch.ones(4))
    assert counts[False] > 0
    assert counts[True] == 0, "counted now: LowBitLinear.first_of_step could rely on it"


def test_checkpoints_of_stateless_recipes_are_those_of_plain_layers(engine: Engine) -> None:
    linear, layer = make(engine)
    with layer.execution.context():
        layer(torch.randn(16, SIDES[0]))
    assert layer.state_dict().keys() == linear.state_dict().keys()
    nn.Linear(*SIDES).load_state_dict(layer.state_dict())
    other = nn.Linear(*SIDES)
    layer.load_state_dict(other.state_dict())
    assert torch.equal(layer.weight, other.weight)


def test_the_empty_extra_state_of_transformer_engine_is_dropped(engine: Engine) -> None:
    linear, layer = make(engine)
    model = nn.Sequential(layer)
    state = {f"0.{name}": value for name, value in linear.state_dict().items()}
    model.load_state_dict({**state, "0._extra_state": torch.empty(0, dtype=torch.uint8)})
    model.load_state_dict({**state, "0._extra_state": torch.full((5,), 128, dtype=torch.uint8)})


def test_the_window_of_delayed_scaling_is_saved_as_plain_tensors(engine: Engine, tmp_path: Path) -> None:
    _, layer = make(engine, delayed=True)
    model = nn.Sequential(layer)
    assert model.state_dict()["0._extra_state"] == {}, "before the first pass"
    for size in (1.0, 8.0):
        with layer.execution.context():
            layer(torch.full((16, SIDES[0]), size))
    torch.save(model.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert set(state["0._extra_state"]) == {f"scaling_{name}.{part}" for name, part in itertools.product(("fwd", "bwd"), ("scale", "amax_history"))}

    _, resumed = make(Engine(), delayed=True)
    nn.Sequential(resumed).load_state_dict(state)
    assert resumed.get_extra_state() is not None
    assert windows(resumed) == {}, "its tensors are made in the first pass"
    before = read_window(layer)
    for one in (layer, resumed):
        with one.execution.context():
            one(torch.full((16, SIDES[0]), 2.0))
    assert all(torch.equal(value, read_window(resumed)[name]) for name, value in read_window(layer).items())
    assert not torch.equal(before["scaling_fwd.amax_history"], read_window(layer)["scaling_fwd.amax_history"])
    assert read_window(resumed)["scaling_fwd.scale"][0] == 448 / 8, "the largest of the window, from before the checkpoint"


def test_what_was_loaded_is_saved_again_before_the_first_pass(engine: Engine) -> None:
    _, layer = make(engine, delayed=True)
    with layer.execution.context():
        layer(torch.ones(16, SIDES[0]))
    _, resumed = make(Engine(), delayed=True)
    resumed.load_state_dict(layer.state_dict())
    assert torch.equal(resumed.state_dict()["_extra_state"]["scaling_fwd.scale"], windows(layer)["scaling_fwd.scale"])


def test_evaluating_right_after_loading_keeps_the_loaded_window(engine: Engine) -> None:
    _, layer = make(engine, delayed=True)
    with layer.execution.context():
        layer(torch.ones(16, SIDES[0]))
    _, resumed = make(Engine(), delayed=True)
    resumed.load_state_dict(layer.state_dict())
    resumed.eval()
    with resumed.execution.context():
        resumed(torch.full((16, SIDES[0]), 1000.0))
    assert all(torch.equal(value, read_window(layer)[name]) for name, value in read_window(resumed).items())


def test_plain_weights_load_into_a_delayed_layer(engine: Engine) -> None:
    _, layer = make(engine, delayed=True)
    layer.load_state_dict(nn.Linear(*SIDES).state_dict())
    layer.load_state_dict({**nn.Linear(*SIDES).state_dict(), "_extra_state": torch.empty(0, dtype=torch.uint8)})


def test_a_pickle_of_transformer_engine_is_refused(engine: Engine) -> None:
    _, layer = make(engine, delayed=True)
    with pytest.raises(DocumentError, match="it was pickled by Transformer Engine"):
        layer.load_state_dict({**nn.Linear(*SIDES).state_dict(), "_extra_state": torch.full((5,), 128, dtype=torch.uint8)})


def test_there_is_one_class_for_each_kind(engine: Engine) -> None:
    kind = engine.pytorch.Linear
    assert layer_class(kind, delayed=True) is layer_class(kind, delayed=True)
    assert layer_class(kind, delayed=True) is not layer_class(kind, delayed=False)
