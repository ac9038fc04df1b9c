"""Weights that somebody else writes between two steps keep what was written, and lose nothing where nobody wrote."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mpbackend.errors import SessionError
from mpbackend.train import edits
from mpbackend.train.edits import follow_masters, void_terms
from mpbackend.train.session import Session
from tests.support.training import Prepare, make_net
from tests.support.weights import clear, descend, ones, working

BF16, FP16 = torch.bfloat16, torch.float16
KEEPING = ("bf16-master", "bf16-master:grads=bf16", "fp16-master:loss_scale.mode=none", "bf16-kahan", "bf16-sr")
"""Recipes whose optimizers hold shadows."""

Edit = Callable[[Tensor], object]

host = edits.unwritten
"""Looks whether something was written, which happens on the host only; tests that replace it go the way of a device."""


def no_grad_clamp(weight: Tensor) -> None:
    """Clamp as torch recommends."""
    with torch.no_grad():
        weight.clamp_(-0.01, 0.01)


def replace(weight: Tensor) -> None:
    """Bind other data."""
    weight.data = weight.data.clamp(-0.01, 0.01)


CLAMPS: dict[str, Edit] = {
    "under no_grad": no_grad_clamp,
    "through data": lambda weight: weight.data.clamp_(-0.01, 0.01),
    "through detach": lambda weight: weight.detach().clamp_(-0.01, 0.01),
    "other data": replace,
}


def pull(session: Session, layer: nn.Linear, slope: float | Tensor = 1.0) -> None:
    """Take a step along a gradient."""
    with session.autocast():
        loss = (layer.weight.float() * slope).sum()
    session.backward(loss)
    assert session.step().stepped


def layer_and_optimizer(value: float = 1.0, count: int = 8, lr: float = 1e-3) -> tuple[nn.Linear, torch.optim.SGD]:
    """Return a layer whose weights are all ``value``."""
    layer = ones(count)
    nn.init.constant_(layer.weight, value)
    return layer, torch.optim.SGD(layer.parameters(), lr=lr)


@pytest.mark.parametrize("recipe", KEEPING)
@pytest.mark.parametrize("clamp", CLAMPS.values(), ids=CLAMPS.keys())
def test_weights_that_are_clamped_after_every_step_do_not_drift(prepare: Prepare, recipe: str, clamp: Edit) -> None:
    """Four steps of 0.01 up, clamped at 0.01, then one down: the weight is 0, not 0.03."""
    layer, optimizer = layer_and_optimizer(0.005, lr=0.01)
    session = prepare(layer, optimizer, recipe, seed=0)
    for slope in (-1.0, -1.0, -1.0, -1.0, 1.0):
        pull(session, layer, slope)
        clamp(layer.weight)
    session.close()
    assert layer.weight.abs().max().item() <= 2.0**-9 * 0.02


@pytest.mark.parametrize("recipe", KEEPING)
def test_weights_that_are_masked_through_data_stay_zero_and_the_others_keep_their_bits(prepare: Prepare, recipe: str) -> None:
    ends = []
    mask = torch.tensor([[1.0, 0.0] * 4])
    for masked in (True, False):
        layer, optimizer = layer_and_optimizer()
        session = prepare(layer, optimizer, recipe, seed=0)
        for _ in range(5):
            pull(session, layer, mask)
            if masked:
                layer.weight.data.mul_(mask.to(layer.weight.dtype))
        session.close()
        ends.append(layer.weight.detach())
    assert torch.equal(ends[0], ends[1] * mask)


@pytest.mark.parametrize("recipe", ["bf16-master", "bf16-kahan"])
@pytest.mark.parametrize("zero", [lambda weight: weight.data.zero_(), lambda weight: weight.detach().zero_()], ids=["data", "detach"])
def test_a_checkpoint_has_what_was_written_before_it(prepare: Prepare, tmp_path: Path, recipe: str, zero: Edit) -> None:
    layer, optimizer = layer_and_optimizer()
    session = prepare(layer, optimizer, recipe)
    pull(session, layer)
    zero(layer.weight)
    session.save(tmp_path / "ckpt")
    other, optimizer = layer_and_optimizer(2.0)
    resumed = prepare(other, optimizer, recipe)
    resumed.load(tmp_path / "ckpt")
    pull(resumed, other, 0.0)
    assert not other.weight.any()
    resumed.close()
    assert not other.weight.any()


@pytest.mark.parametrize("recipe", ["bf16-master", "fp16-master:loss_scale.init=1024"])
def test_the_best_weights_that_were_loaded_last_are_those_that_stay(prepare: Prepare, recipe: str) -> None:
    layer, optimizer = layer_and_optimizer()
    session = prepare(layer, optimizer, recipe)
    pull(session, layer)
    best = copy.deepcopy(layer.state_dict())
    for _ in range(20):
        pull(session, layer)
    layer.load_state_dict(best)
    session.close()
    assert layer.weight.dtype == torch.float32
    assert torch.equal(layer.weight, best["weight"].float())


def test_averaged_weights_that_were_swapped_in_and_out_leave_the_run_as_it_was(prepare: Prepare) -> None:
    ends = []
    for swap in (True, False):
        layer, optimizer = layer_and_optimizer()
        session = prepare(layer, optimizer, "bf16-master")
        for _ in range(10):
            pull(session, layer)
            if swap:
                own = layer.weight.detach().clone()
                layer.weight.data.fill_(3.0)
                layer.weight.data.copy_(own)
        session.close()
        ends.append(layer.weight.detach())
    assert torch.equal(*ends)


def patterns(dtype: torch.dtype) -> Tensor:
    """Return fp32 numbers around every value of a 16-bit format and every midpoint between two: exact, and a little to either side."""
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).float()
    near = torch.cat([values, (values + values.roll(-1)) / 2])
    near = near[near.isfinite()]
    infinity = torch.tensor(torch.inf)
    return torch.cat([near, torch.nextafter(near, infinity), torch.nextafter(near, -infinity), torch.tensor([torch.inf, -torch.inf])])


@pytest.mark.parametrize(("slice_size", "look"), [(1 << 22, True), (1 << 10, True), (1 << 10, False)])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_a_master_that_nobody_wrote_keeps_every_bit(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, slice_size: int, look: bool) -> None:
    monkeypatch.setattr(edits, "HOST_SLICE", slice_size)
    monkeypatch.setattr(edits, "unwritten", lambda own, parameter: look and host(own, parameter))
    large = patterns(dtype)
    masters = [large.clone(), large[:100].view(10, 10).clone(), large[7].clone(), large[:0].clone()]
    parameters = [master.to(dtype) for master in masters]
    before = [master.clone() for master in masters]
    follow_masters(masters, parameters, dtype)
    assert all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(masters, before, strict=True))


@pytest.mark.parametrize(("slice_size", "look"), [(1 << 22, True), (1 << 10, True), (1 << 10, False)])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_a_kahan_term_of_its_own_parameter_is_never_void(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, slice_size: int, look: bool) -> None:
    """Terms just below half a spacing are rounded up to it: beside an odd parameter their sum would round to its neighbor."""
    monkeypatch.setattr(edits, "HOST_SLICE", slice_size)
    monkeypatch.setattr(edits, "unwritten", lambda own, parameter: look and host(own, parameter))
    exact = patterns(dtype)
    exact = exact[exact.to(dtype).isfinite()]
    parameters = [exact.to(dtype), exact[:64].to(dtype)]
    terms = [(value - parameter.float()).to(dtype) for value, parameter in zip((exact, exact[:64]), parameters, strict=True)]
    before = [term.clone() for term in terms]
    assert terms[0].any()
    void_terms(terms, parameters)
    assert all(torch.equal(a, b) for a, b in zip(terms, before, strict=True))


@pytest.mark.parametrize("count", [15, 1 << 10, 1 << 17, (1 << 17) + 2])
@pytest.mark.parametrize("look", [True, False])
def test_what_was_written_is_taken_element_by_element(monkeypatch: pytest.MonkeyPatch, count: int, look: bool) -> None:
    monkeypatch.setattr(edits, "unwritten", lambda own, parameter: look and host(own, parameter))
    master = torch.linspace(1.0, 1.9, count)
    before, parameter = master.clone(), master.to(BF16)
    parameter[::3] = 0.0
    parameter[1::3] = torch.nan
    follow_masters([master], [parameter], BF16)
    assert not master[::3].any()
    assert master[1::3].isnan().all()
    assert torch.equal(master[2::3], before[2::3])
    terms = (before - before.to(BF16).float()).to(BF16)
    kept = terms.clone()
    void_terms([terms], [parameter])
    assert not terms[::3].any()
    assert torch.equal(terms[2::3], kept[2::3])
    assert kept[::3].any()


@pytest.mark.parametrize("count", [1, 3, 1 << 10, (1 << 10) + 2])
@pytest.mark.parametrize("transposed", [False, True])
def test_one_written_element_is_seen_on_the_host(count: int, transposed: bool) -> None:
    own = torch.ones(2, count, dtype=BF16)
    written = own.clone()
    if transposed:
        own, written = own.T, written.T
    assert edits.unwritten(own, written)
    written[-1, -1] = 1.0078125
    assert not edits.unwritten(own, written)
    assert not edits.unwritten(own, own.float())


@pytest.mark.parametrize("recipe", ["bf16-master", "bf16-kahan", "bf16-params", "bf16:params=bf16", "bf16-master:optimizer=bf16"])
@pytest.mark.parametrize(("cast", "now"), [(nn.Module.float, "fp32"), (nn.Module.half, "fp16"), (nn.Module.double, "fp64")])
def test_a_model_that_was_cast_is_refused_at_the_step_and_nothing_was_updated(recipe: str, cast: Callable[[nn.Module], nn.Module], now: str) -> None:
    layer, optimizer = layer_and_optimizer()
    with working(layer, optimizer, recipe) as weights:
        descend(layer, optimizer, weights, 1)
        before = layer.weight.detach().clone()
        cast(layer)
        layer.weight.sum().backward()
        weights.sources()
        with pytest.raises(SessionError, match=rf"step\(\): parameter weight is {now} on cpu, the session has it in bf16 on cpu; do not cast"):
            weights.step(optimizer)
        clear(weights)
        layer.bfloat16()
        assert torch.equal(layer.weight, before)
        descend(layer, optimizer, weights, 1)


@pytest.mark.parametrize("recipe", ["bf16-master", "fp32:optimizer=bf16"])
def test_a_tensor_beside_the_model_or_a_norm_that_was_cast_is_refused_too(recipe: str) -> None:
    model, extra = make_net(), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([*model.parameters(), extra], lr=0.1)
    with working(model, optimizer, recipe) as weights:
        model.norm.bfloat16()
        with pytest.raises(SessionError, match=r"parameter norm\.weight is bf16 on cpu, the session has it in fp32"):
            weights.step(optimizer)
        model.norm.float()
        extra.data = extra.data.double()
        with pytest.raises(SessionError, match=r"a tensor of shape \(3,\) is fp64 on cpu, the session has it in fp32"):
            weights.step(optimizer)


def test_a_model_that_was_moved_is_refused_at_the_step() -> None:
    """With one device here, the session is made to believe that it took the model on another."""
    layer, optimizer = layer_and_optimizer()
    with working(layer, optimizer, "bf16-kahan") as weights:
        kinds = weights._holdings._kinds
        for key, (tensor, dtype, _) in kinds.items():
            kinds[key] = (tensor, dtype, torch.device("meta"))
        with pytest.raises(SessionError, match="parameter weight is bf16 on cpu, the session has it in bf16 on meta"):
            weights.step(optimizer)


def test_a_model_that_was_cast_during_a_session_leaves_with_its_masters(prepare: Prepare) -> None:
    ends = []
    for cast in (True, False):
        layer, optimizer = layer_and_optimizer()
        session = prepare(layer, optimizer, "bf16-master")
        for _ in range(3):
            pull(session, layer)
        if cast:
            layer.float()
        session.close()
        ends.append(layer.weight.detach())
    assert torch.equal(*ends)
    assert ends[0].unique().item() == pytest.approx(0.997, abs=1e-6)


def test_a_parameter_of_another_shape_is_left_to_its_writer(prepare: Prepare) -> None:
    layer, optimizer = layer_and_optimizer()
    session = prepare(layer, optimizer, "bf16-kahan")
    layer.weight.data = torch.zeros(1, 4, dtype=BF16)
    assert session.weights is not None
    session.weights.state_dict()
    session.close()
    assert layer.weight.shape == (1, 4)
