"""Working weights: updates of 16-bit parameters that are not lost, gradient sums that are not low, and a model that is given back."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from mpbackend.errors import SessionError
from mpbackend.recipe import parse_recipe
from mpbackend.train.weights import make_weights
from tests.support.weights import RECIPES, clear, descend, ones, train, working

BF16 = torch.bfloat16


def net() -> nn.Sequential:
    """Return a small seeded model."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """Return an optimizer with two moments."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.parametrize(
    ("recipe", "mean", "within"),
    [
        ("bf16-master", 0.0, 2e-5),
        ("bf16-kahan", 0.0, 1e-3),
        ("bf16-sr", 0.0, 6 * math.sqrt(1000) * 2**-9 / math.sqrt(4096)),
        ("bf16-params", 1.0, 0.0),
        ("bf16:params=bf16", 1.0, 0.0),
    ],
)
def test_case_22_a_thousand_small_steps_from_one_to_zero(recipe: str, mean: float, within: float) -> None:
    """Each step of 1e-3 is below half a spacing (2^-9) of 1.

    Stochastic rounding: a step adds at most s^2/4 to the variance, where the spacing s is at most 2^-8 from 1 down. So the standard deviation of a weight is at
    most sqrt(1000) * 2^-9 = 0.062, that of the mean of 4,096 weights a 64th of it.
    """
    layer = ones()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    with working(layer, optimizer, recipe) as weights:
        end = descend(layer, optimizer, weights, 1000)
        assert layer.weight.dtype == BF16
        assert abs(end.mean().item() - mean) <= within
        if recipe != "bf16-sr":
            assert end.unique().numel() == 1


def test_fp32_sums_of_512_micro_batches_lose_nothing_that_bf16_sums_lose() -> None:
    """The sum of 512 gradients of 1/3 is 2 % low in bf16 at the least, since adding 1/3 to 64 or more does not reach half a spacing."""
    exact = torch.tensor(1 / 3).to(BF16).double().item() * 512
    sums = {}
    for recipe in ("bf16-master", "bf16-kahan"):
        layer = ones(4)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
        with working(layer, optimizer, recipe) as weights:
            for _ in range(512):
                (layer.weight.sum() * torch.tensor(1 / 3, dtype=BF16)).backward()
            (source,) = weights.sources()
            assert source.grad is not None
            sums[recipe] = source.grad
    assert sums["bf16-master"].dtype == torch.float32
    assert sums["bf16-master"].double().tolist() == [[exact] * 4]
    assert sums["bf16-kahan"].dtype == BF16
    assert sums["bf16-kahan"].max().item() < 0.98 * exact


def test_masters_are_the_exact_fp32_parameters_and_every_step_is_the_fp32_step() -> None:
    """With the same gradients, masters follow fp32 training bit for bit, and parameters are their rounding."""
    model, twin = net(), net()
    optimizer, reference = adamw(model), adamw(twin)
    with working(model, optimizer, "bf16-master") as weights:
        for number in range(5):
            for low, high in zip(model.parameters(), twin.parameters(), strict=True):
                gradient = torch.randn(low.shape, generator=torch.Generator().manual_seed(number)).to(BF16)
                (low * gradient).sum().backward()
                high.grad = gradient.float()
            weights.sources()
            weights.step(optimizer)
            clear(weights)
            reference.step()
        for low, high in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(low, high.to(BF16))
    for low, high in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(low, high), "a model that came in fp32 leaves with its masters"
        assert optimizer.state[low]["exp_avg"].dtype == torch.float32
        assert torch.equal(optimizer.state[low]["exp_avg"], reference.state[high]["exp_avg"])


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_session_that_is_refused_leaves_the_model_bit_for_bit(recipe: str) -> None:
    model = net()
    optimizer = adamw(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    weights = make_weights(model, [optimizer], parse_recipe(recipe), seed=0)
    assert weights is not None
    weights.close()
    assert all(torch.equal(value, before[name]) and value.dtype == before[name].dtype for name, value in model.state_dict().items())
    assert all(a is b for a, b in zip(held, optimizer.param_groups[0]["params"], strict=True))
    assert not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("recipe", RECIPES)
def test_after_close_inference_works_and_the_optimizer_holds_the_parameters(recipe: str) -> None:
    model = net()
    optimizer = adamw(model)
    with working(model, optimizer, recipe) as weights:
        dtype = next(model.parameters()).dtype
        train(model, optimizer, weights, 3, dtype=dtype)
    own = list(model.parameters())
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], own, strict=True))
    assert set(optimizer.state) == set(own)
    kept = torch.float32 if parse_recipe(recipe).master == "fp32" else dtype
    assert {parameter.dtype for parameter in own} == {kept}
    assert model(torch.randn(2, 8, dtype=kept)).isfinite().all()
    moments = {value.dtype for state in optimizer.state.values() for key, value in state.items() if key != "step"}
    assert all(torch.promote_types(moment, kept) == moment for moment in moments), "cast up where that loses nothing, never down"
    if moments == {kept}:
        model(torch.randn(2, 8, dtype=kept)).sum().backward()
        optimizer.step()


def test_state_from_before_the_session_moves_and_comes_back() -> None:
    model = net()
    optimizer = adamw(model)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = [state["exp_avg"].clone() for state in optimizer.state.values()]
    with working(model, optimizer, "bf16-kahan"):
        assert len(optimizer.state) == len(before)
        assert not set(optimizer.state) & set(model.parameters())
    assert all(torch.equal(optimizer.state[parameter]["exp_avg"], kept) for parameter, kept in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("recipe", ["bf16-master", "bf16-kahan", "bf16-params"])
def test_a_group_added_later_is_taken_over(recipe: str) -> None:
    model = net()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with working(model, optimizer, recipe) as weights:
        optimizer.add_param_group({"params": list(model[2].parameters())})
        assert len(weights.sources()) == 4
        before = model.get_parameter("2.weight").detach().clone()
        train(model, optimizer, weights, 1, dtype=BF16)
        assert not torch.equal(before, model.get_parameter("2.weight"))
        assert model.get_parameter("2.weight").grad is None
    assert optimizer.param_groups[1]["params"][0] is model.get_parameter("2.weight")


def test_a_parameter_that_is_added_twice_is_refused() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with working(model, optimizer, "bf16-master") as weights:
        optimizer.add_param_group({"params": [model.get_parameter("2.weight")]})
        with pytest.raises(SessionError, match=r"parameter 2\.weight is held twice"):
            weights.sources()


def test_a_parameter_that_is_unfrozen_later_is_summed_in_fp32() -> None:
    model = net()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with working(model, optimizer, "bf16-master") as weights:
        sources = weights.sources()
        assert not model.get_parameter("0.weight").requires_grad
        model[0].requires_grad_(True)
        for _ in range(2):
            model(torch.ones(1, 8, dtype=BF16)).sum().backward()
        assert {source.grad.dtype for source in sources if source.grad is not None} == {torch.float32}
        assert all(source.grad is not None for source in sources)
        assert all(parameter.grad is None for parameter in model.parameters())


def test_a_gradient_from_before_its_group_was_added_counts() -> None:
    model = net()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with working(model, optimizer, "bf16-master") as weights:
        model(torch.ones(1, 8, dtype=BF16)).sum().backward()
        arrived = model.get_parameter("2.weight").grad
        assert arrived is not None
        optimizer.add_param_group({"params": [model.get_parameter("2.weight")]})
        source = weights.sources()[-1]
        assert source.grad is not None
        assert torch.equal(source.grad, arrived.float())
        assert model.get_parameter("2.weight").grad is None


@pytest.mark.parametrize("recipe", ["fp16-master", "fp16-master:master=kahan,grads=fp16", "fp16-master:master=kahan", "fp16-master:master=none,grads=fp16"])
def test_the_multiplier_reaches_16_bit_gradients_in_fp32(recipe: str) -> None:
    """A gradient of 2^-26 under a scale of 2^12 is 2^-14; unscaled in fp16 it would be 0, and the step of 2^-16 with it."""
    layer = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(layer.weight)
    optimizer = torch.optim.SGD(layer.parameters(), lr=2.0**10)
    with working(layer, optimizer, recipe) as weights:
        layer.weight.grad = torch.full((1, 1), 2.0**-14, dtype=torch.float16)
        weights.sources()
        weights.step(optimizer, torch.tensor(2.0**-12))
        assert layer.weight.item() == -(2.0**-16)


def test_weights_written_by_somebody_else_win_over_their_masters() -> None:
    layer = ones(8)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    for recipe in ("bf16-master", "bf16-kahan"):
        with working(layer, optimizer, recipe) as weights:
            descend(layer, optimizer, weights, 1)
            with torch.no_grad():
                layer.weight[0, :4] = 0.0
            end = descend(layer, optimizer, weights, 2)
            kept = weights.state_dict()
            exact = kept["masters"]["weight"] if recipe == "bf16-master" else end + kept["compensation"]["weight"].float()
            assert exact[0, 0].item() == pytest.approx(-0.002, rel=1e-2)
            assert exact[0, 7].item() == pytest.approx(0.997, abs=2e-5), "the other elements keep what rounding lost"
        layer = ones(8)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)


def test_a_kahan_term_starts_with_what_casting_the_model_lost() -> None:
    layer = ones(64)
    exact = torch.linspace(1.0, 1.99, 64).view(1, 64)
    with torch.no_grad():
        layer.weight.copy_(exact)
    with working(layer, torch.optim.SGD(layer.parameters(), lr=1.0), "bf16-kahan") as weights:
        kept = layer.weight.float() + weights.state_dict()["compensation"]["weight"].float()
        assert (layer.weight.float() - exact).abs().max() > 2.0**-9
        assert (kept - exact).abs().max() <= 2.0**-17, "the term of at most 2^-8 is rounded to 8 bits"


def test_a_master_that_nobody_wrote_stays_where_it_is() -> None:
    layer = ones(8)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    with working(layer, optimizer, "bf16-master") as weights:
        pointer = optimizer.param_groups[0]["params"][0].data_ptr()
        descend(layer, optimizer, weights, 3)
        assert optimizer.param_groups[0]["params"][0].data_ptr() == pointer


def test_a_wrapper_that_reduces_gradients_is_refused_unless_the_session_does(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = net()

    monkeypatch.setattr(nn.parallel, "DistributedDataParallel", Wrapper)
    model = Wrapper()
    with pytest.raises(SessionError, match="bf16 parameters: a wrapper reduces the gradients"):
        make_weights(model, [adamw(model)], parse_recipe("bf16-master"), seed=0)
    assert next(model.parameters()).dtype == torch.float32
    weights = make_weights(model, [adamw(model)], parse_recipe("bf16-master"), seed=0, reduces=True)
    assert weights is not None
    weights.close()


def test_recipes_that_keep_everything_in_fp32_need_nothing() -> None:
    for recipe in ("fp32", "bf16", "fp16", "fp8"):
        assert make_weights(net(), [], parse_recipe(recipe), seed=None) is None
