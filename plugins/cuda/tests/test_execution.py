"""When Transformer Engine's region is open, and what happens to the windows of delayed scaling."""

from __future__ import annotations

import copy
import threading
import types
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from mpbackend.errors import SessionError
from mpbackend_cuda import execution as module
from mpbackend_cuda.execution import EngineExecution, clear_window, read_window, windows, write_window
from mpbackend_cuda.te_layers import LowBitLinear, convert_layer
from plugins.cuda.tests.support.engine import DelayedScaling, Engine, Float8CurrentScaling


def make(engine: Engine, *, delayed: bool = False, history: int = 4) -> EngineExecution:
    kind: Any = DelayedScaling if delayed else Float8CurrentScaling
    recipe = kind(amax_history_len=history)
    return EngineExecution(engine.pytorch.autocast, recipe, delayed=delayed)


def layer_of(engine: Engine, execution: EngineExecution, *, inputs: int = 16) -> LowBitLinear:
    return convert_layer(torch.nn.Linear(inputs, 16), engine.pytorch.Linear, execution, 16, keeps_weight=False)


def test_the_first_layer_opens_the_region_and_leaving_closes_it(engine: Engine) -> None:
    execution = make(engine)
    layer = layer_of(engine, execution)
    inp = torch.randn(16, 16)
    with execution.context():
        assert engine.depth == 0
        layer(inp)
        assert (engine.depth, engine.recipe) == (1, execution.recipe)
        layer(inp)
        assert engine.depth == 1
    assert (engine.depth, engine.enabled) == (0, False)
    assert engine.regions == [{"enabled": True, "calibrating": False, "recipe": execution.recipe, "amax_reduction_group": None}]
    assert [call.low_bit for call in engine.calls] == [True, True]


def test_a_backward_pass_opens_none(engine: Engine) -> None:
    execution = make(engine)
    layer = layer_of(engine, execution)
    with execution.context():
        loss = layer(torch.randn(16, 16)).sum()
    with execution.context():
        loss.backward()
    assert len(engine.regions) == 1
    assert layer.weight.grad is not None


def test_a_forward_pass_that_is_computed_again_runs_as_it_first_did(engine: Engine) -> None:
    execution = make(engine)
    layer = layer_of(engine, execution)
    with execution.context():
        out: torch.Tensor = torch.utils.checkpoint.checkpoint(layer, torch.randn(16, 16, requires_grad=True), use_reentrant=False)
    with execution.context():
        out.sum().backward()
    assert [call.low_bit for call in engine.calls] == [True, True]
    assert (len(engine.regions), engine.depth) == (2, 0)


def test_autograd_computes_a_forward_pass_again_on_a_thread_of_its_own(engine: Engine) -> None:
    """On a GPU it does; the thread is in no context, and checkpointing turns its autocast on."""
    execution = make(engine)
    layer = layer_of(engine, execution)

    def work(autocast: bool) -> None:
        torch.set_autocast_enabled("cuda", autocast)
        layer(torch.randn(16, 16))

    for armed, autocast, low_bit in ((True, True, [True]), (True, False, []), (False, True, [])):
        engine.calls.clear()
        thread = threading.Thread(target=work, args=(autocast,))
        with execution.context() if armed else nullcontext():
            thread.start()
            thread.join(timeout=30)
        assert [call.low_bit for call in engine.calls] == low_bit
        assert engine.depth == 0


def test_outside_a_context_a_layer_is_a_plain_one(engine: Engine) -> None:
    layer = layer_of(engine, make(engine))
    inp = torch.randn(3, 16)
    assert torch.equal(layer(inp), torch.nn.functional.linear(inp, layer.weight, layer.bias))
    assert engine.calls == []


def test_contexts_nest(engine: Engine) -> None:
    execution = make(engine)
    layer = layer_of(engine, execution)
    inp = torch.randn(16, 16)
    with execution.context():
        with execution.context():
            layer(inp)
        assert engine.depth == 1, "the outer context keeps it open"
        layer(inp)
    assert (engine.depth, len(engine.regions)) == (0, 1)


def test_threads_share_the_region_and_the_last_one_closes_it(engine: Engine) -> None:
    execution = make(engine)
    layer = layer_of(engine, execution)
    opened, go_on = threading.Event(), threading.Event()
    depths: list[int] = []

    def work() -> None:
        torch.set_autocast_enabled("cuda", True)
        with execution.context():
            layer(torch.randn(16, 16))
            opened.set()
            go_on.wait(timeout=30)
            layer(torch.randn(16, 16))
            depths.append(engine.depth)

    thread = threading.Thread(target=work)
    with execution.context():
        layer(torch.randn(16, 16))
        thread.start()
        assert opened.wait(timeout=30)
    depths.append(engine.depth)
    go_on.set()
    thread.join(timeout=30)
    assert depths == [1, 1], "still open for the thread"
    assert (engine.depth, len(engine.regions)) == (0, 1)
    assert all(call.low_bit for call in engine.calls)


def test_an_error_in_the_region_closes_it(engine: Engine) -> None:
    execution = make(engine)
    layer = layer_of(engine, execution)
    with pytest.raises(ZeroDivisionError), execution.context():
        layer(torch.randn(16, 16))
        raise ZeroDivisionError
    assert engine.depth == 0


def test_without_autocast_what_is_not_converted_would_not_run_as_planned(engine: Engine) -> None:
    execution = make(engine)
    layer = layer_of(engine, execution)
    torch.set_autocast_enabled("cuda", False)
    with pytest.raises(SessionError, match="autocast is off, and the plan runs everything else in bf16"), execution.context():
        layer(torch.randn(16, 16))


def test_a_copied_model_runs_under_the_same_plan(engine: Engine) -> None:
    execution = make(engine)
    layer = layer_of(engine, execution)
    copied = copy.deepcopy(layer)
    assert copied.execution is execution
    with execution.context():
        copied(torch.randn(16, 16))
    assert engine.calls[-1].low_bit


def test_training_writes_the_window_and_evaluation_does_not(engine: Engine) -> None:
    execution = make(engine, delayed=True)
    layer = layer_of(engine, execution)
    small, large = torch.ones(16, 16), torch.full((16, 16), 1000.0)
    with execution.context():
        layer(small)
    trained = read_window(layer)
    assert trained["scaling_fwd.scale"][0] == 448
    layer.eval()
    for grad in (True, False):
        with torch.set_grad_enabled(grad), execution.context():
            layer(large)
            layer(large)
        assert all(torch.equal(value, trained[name]) for name, value in read_window(layer).items())
        assert engine.calls[-1].low_bit, "and stays low-bit"
    layer.train()
    with execution.context():
        layer(large)
    assert windows(layer)["scaling_fwd.scale"][0] == 448 / 1000


def test_evaluating_before_training_leaves_an_empty_window(engine: Engine) -> None:
    execution = make(engine, delayed=True)
    layer = layer_of(engine, execution).eval()
    with execution.context():
        layer(torch.full((16, 16), 1000.0))
    found = read_window(layer)
    assert found["scaling_fwd.scale"].tolist() == [1, 1, 1]
    assert not found["scaling_fwd.amax_history"].any()


def test_current_scaling_keeps_no_window(engine: Engine) -> None:
    execution = make(engine)
    layer = layer_of(engine, execution).eval()
    with execution.context():
        layer(torch.randn(16, 16))
        assert not execution._kept
    assert windows(layer) == {}


def test_a_window_of_another_shape_is_refused(engine: Engine) -> None:
    execution = make(engine, delayed=True)
    layer = layer_of(engine, execution)
    with execution.context():
        layer(torch.randn(16, 16))
    window = read_window(layer)
    with pytest.raises(SessionError, match=r"scaling_fwd.amax_history of shape \(9, 3\): the layer has \(4, 3\)"):
        write_window(layer, {"scaling_fwd.amax_history": torch.zeros(9, 3)})
    with pytest.raises(SessionError, match="the layer has nothing"):
        write_window(torch.nn.Linear(1, 1), window)
    clear_window(layer)
    assert windows(layer)["scaling_bwd.scale"].tolist() == [1, 1]


def test_the_largest_amax_is_taken_over_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert module.reduction_group(DelayedScaling()) is None
    distributed: Any = torch.distributed
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "group", types.SimpleNamespace(WORLD="all ranks"))
    assert module.reduction_group(DelayedScaling()) == "all ranks"
    alone = DelayedScaling()
    alone.reduce_amax = False
    assert module.reduction_group(alone) is None
    assert module.reduction_group(Float8CurrentScaling()) is None
