"""Steps in parts: the same as one step, for every optimizer of torch; nothing is left behind by one that fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from mpbackend.train import weights as module
from mpbackend.train.weights import WorkingWeights
from tests.support.weights import clear, train, working

BF16 = torch.bfloat16
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    name: getattr(torch.optim, name)
    for name in ("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD", "Muon")
    if hasattr(torch.optim, name)
}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in OPTIMIZERS),
    ("Adam", {"fused": True, "amsgrad": True}),
    ("AdamW", {"foreach": True}),
    ("SGD", {"fused": True, "momentum": 0.9}),
    ("RMSprop", {"centered": True, "momentum": 0.9}),
]


def net() -> nn.Sequential:
    """Return a seeded model without biases: Muon takes matrices only."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Linear(16, 8, bias=False), nn.Linear(8, 4, bias=False))


def groups(model: nn.Sequential) -> list[dict[str, Any]]:
    """Return two parameter groups."""
    return [{"params": [model.get_parameter("0.weight"), model.get_parameter("3.weight")]}, {"params": [model.get_parameter("2.weight")], "lr": 0.05}]


def formats(optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.dtype]]:
    """Return key and format of everything of a parameter's shape in the state."""
    found = {(key, value.dtype) for state in optimizer.state.values() for key, value in state.items() if isinstance(value, torch.Tensor) and value.dim()}
    return sorted(found, key=str)


@pytest.mark.parametrize("recipe", ["bf16-kahan", "bf16-sr", "bf16-master:optimizer=bf16", "bf16:params=bf16,optimizer=fp16", "fp32:optimizer=bf16"])
@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_parts_step_like_the_whole(monkeypatch: pytest.MonkeyPatch, recipe: str, name: str, options: dict[str, Any]) -> None:
    ends: list[list[torch.Tensor]] = []
    kept: list[list[tuple[str, torch.dtype]]] = []
    calls: list[int] = []
    for size in (1, 1 << 24):
        monkeypatch.setattr(module, "PART_ELEMENTS", size)
        model = net()
        optimizer = OPTIMIZERS[name](groups(model), lr=0.02, **options)
        with working(model, optimizer, recipe) as weights:
            before = len(calls)
            monkeypatch.setattr(WorkingWeights, "_begin_part", counting(calls))
            train(model, optimizer, weights, 3, dtype=model.get_parameter("0.weight").dtype)
            monkeypatch.undo()
            monkeypatch.setattr(module, "PART_ELEMENTS", size)
            assert len(calls) - before == (9 if size == 1 else 3)
            ends.append([parameter.detach().clone() for parameter in model.parameters()])
            kept.append(formats(optimizer))
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    assert kept[0] == kept[1]


def counting(calls: list[int]) -> Callable[..., None]:
    """Return ``_begin_part`` that notes each call."""
    real = WorkingWeights._begin_part

    def begin(self: WorkingWeights, *arguments: Any) -> None:
        calls.append(1)
        real(self, *arguments)

    return begin


@pytest.mark.parametrize(
    ("recipe", "first", "second"),
    [("bf16-master:optimizer=bf16", BF16, BF16), ("bf16-kahan:optimizer.exp_avg=fp16", torch.float16, torch.float32), ("bf16-params", BF16, BF16)],
)
def test_moments_have_the_formats_of_the_recipe_between_steps(recipe: str, first: torch.dtype, second: torch.dtype) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with working(model, optimizer, recipe) as weights:
        train(model, optimizer, weights, 2, dtype=BF16)
        assert formats(optimizer) == sorted([("exp_avg", first), ("exp_avg_sq", second)], key=str)


def test_between_steps_a_shadow_without_master_has_no_memory_and_no_values() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with working(model, optimizer, "bf16-kahan:grads=fp32") as weights:
        train(model, optimizer, weights, 1, dtype=BF16)
        for shadow in optimizer.param_groups[0]["params"]:
            assert shadow.untyped_storage().nbytes() == 4
            assert shadow.isnan().all()
            assert shadow.grad is None
        with pytest.raises(RuntimeError, match="refers to a single memory location"):
            optimizer.param_groups[0]["params"][0].data.mul_(2.0)


def test_step_hooks_of_others_are_called_once_and_see_the_new_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART_ELEMENTS", 1)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    seen: list[torch.Tensor] = []
    optimizer.register_step_post_hook(lambda *_: seen.append(model.get_parameter("0.weight").detach().clone()))
    with working(model, optimizer, "bf16-kahan") as weights:
        train(model, optimizer, weights, 1, dtype=BF16)
        assert len(seen) == 1
        assert torch.equal(seen[0], model.get_parameter("0.weight"))


def test_an_optimizer_of_somebody_else_steps_once() -> None:
    class Mine(torch.optim.SGD):
        calls = 0

        def step(self, closure: Any = None) -> Any:
            """Count."""
            self.calls += 1
            return super().step(closure)

    model = net()
    optimizer = Mine(model.parameters(), lr=0.1)
    with pytest.MonkeyPatch.context() as patch, working(model, optimizer, "bf16-kahan") as weights:
        patch.setattr(module, "PART_ELEMENTS", 1)
        before = model.get_parameter("0.weight").detach().clone()
        train(model, optimizer, weights, 2, dtype=BF16)
        assert optimizer.calls == 2
        assert not torch.equal(before, model.get_parameter("0.weight"))


@pytest.mark.parametrize("recipe", ["bf16-kahan", "bf16-sr", "bf16-master:optimizer=bf16", "bf16-master:grads=bf16"])
def test_an_optimizer_that_raises_leaves_groups_and_memory_as_they_were(monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    monkeypatch.setattr(module, "PART_ELEMENTS", 1)
    model = net()
    optimizer = torch.optim.AdamW(groups(model), lr=0.1)
    with working(model, optimizer, recipe) as weights:
        train(model, optimizer, weights, 1, dtype=BF16)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        held = [list(group["params"]) for group in optimizer.param_groups]
        model(torch.ones(1, 8, dtype=BF16)).sum().backward()
        weights.sources()
        with monkeypatch.context() as patch:
            patch.setattr(optimizer, "_init_group", fail)  # of the object: compiling a model replaces that of the classes
            with pytest.raises(ZeroDivisionError):
                weights.step(optimizer)
        assert [[id(tensor) for tensor in group["params"]] for group in optimizer.param_groups] == [[id(tensor) for tensor in tensors] for tensors in held]
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
        if "optimizer" in recipe:
            assert {dtype for _, dtype in formats(optimizer)} == {BF16}
        if "master" not in recipe:
            assert all(tensor.untyped_storage().nbytes() == 4 for tensors in held for tensor in tensors)
        clear(weights)
        train(model, optimizer, weights, 1, dtype=BF16)
        assert not torch.equal(before[0], model.get_parameter("0.weight"))


def fail(*_: object) -> None:
    """Stand for an optimizer that raises in the middle of a step."""
    raise ZeroDivisionError


@pytest.mark.parametrize("recipe", ["bf16-params", "bf16:params=bf16"])
def test_lost_updates_are_counted_of_weights_that_have_a_gradient(recipe: str) -> None:
    layer = nn.Linear(6, 1, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 1.0, 1e-3, 1e-3, 1.0, 1.0]]))
    with working(layer, optimizer, recipe) as weights:
        assert weights.take_lost() is None
        weights.sample = True
        (layer.weight * torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 8.0], dtype=BF16)).sum().backward()
        weights.sources()
        weights.step(optimizer)
        counted = weights.take_lost()
        assert counted is not None
        assert [int(value) for value in counted] == [2, 5]
        assert not weights.sample
        assert weights.take_lost() is None


def test_recipes_that_keep_updates_have_no_lost_ones_to_count() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with working(model, optimizer, "bf16-kahan") as weights:
        weights.sample = True
        train(model, optimizer, weights, 1, dtype=BF16)
        assert weights.take_lost() is None


@pytest.mark.parametrize("recipe", ["bf16-master:optimizer=bf16", "fp32:optimizer=bf16"])
def test_16_bit_moments_are_updated_in_fp32_and_rounded_once_a_step(recipe: str) -> None:
    model, twin = net(), net()
    options: dict[str, Any] = {"lr": 0.01, "foreach": False}
    optimizer, reference = torch.optim.AdamW(model.parameters(), **options), torch.optim.AdamW(twin.parameters(), **options)
    with working(model, optimizer, recipe) as weights:
        for number in range(4):
            for source, other in zip(weights.sources(), twin.parameters(), strict=True):
                gradient = torch.randn(other.shape, generator=torch.Generator().manual_seed(number))
                source.grad, other.grad = gradient.clone(), gradient
            weights.step(optimizer)
            reference.step()
            for state in reference.state.values():
                for key in ("exp_avg", "exp_avg_sq"):
                    state[key] = state[key].to(BF16).float()
        for mine, theirs in zip(optimizer.state.values(), reference.state.values(), strict=True):
            assert mine["exp_avg"].dtype == BF16
            assert all(torch.equal(mine[key].float(), theirs[key]) for key in ("exp_avg", "exp_avg_sq"))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
