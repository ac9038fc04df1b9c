"""Two live sessions never update one parameter: the second is refused, and a session that nobody can reach is closed first."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

import mpbackend
from mpbackend.errors import SessionError
from mpbackend.train.ownership import CLAIMS, ClaimRegistry, claim
from tests.support.training import Prepare


def net() -> nn.Sequential:
    """Return two layers."""
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


def sgd(*modules: nn.Module) -> torch.optim.SGD:
    """Return an optimizer of the parameters of modules."""
    return torch.optim.SGD([parameter for module in modules for parameter in module.parameters()], lr=0.1)


@pytest.fixture
def registry() -> ClaimRegistry:
    """A registry of its own."""
    return ClaimRegistry()


def test_a_second_session_is_refused_and_told_which_one_is_live(registry: ClaimRegistry) -> None:
    model = net()
    release = claim(model, [sgd(model)], "the session of bf16-master", registry)
    with pytest.raises(SessionError) as caught:
        claim(model, [sgd(model)], "the session of bf16", registry)
    assert str(caught.value).startswith(
        "prepare() for the session of bf16: parameter 0.weight is held by the session of bf16-master, which is live; close() that session first"
    )
    release()
    claim(model, [sgd(model)], "the session of bf16", registry)()
    assert not registry.claims


def test_a_refused_claim_holds_nothing(registry: ClaimRegistry) -> None:
    model = net()
    release = claim(model, [sgd(model[1])], "one", registry)
    with pytest.raises(SessionError, match=r"parameter 1\.weight is held by one"):
        claim(model, [sgd(model)], "two", registry)
    release()
    claim(model, [sgd(model[0])], "three", registry)


def test_sessions_of_one_model_that_update_different_parameters_are_fine(registry: ClaimRegistry) -> None:
    model = net()
    claim(model, [sgd(model[0])], "one", registry)
    claim(model, [sgd(model[1])], "two", registry)


def test_models_that_share_a_frozen_part_are_fine(registry: ClaimRegistry) -> None:
    frozen = nn.Linear(4, 4).requires_grad_(False)
    models = [nn.Sequential(frozen, nn.Linear(4, 1)) for _ in range(2)]
    for number, model in enumerate(models):
        claim(model, [sgd(model)], str(number), registry)


def test_one_optimizer_in_two_sessions_is_refused_whatever_it_holds(registry: ClaimRegistry) -> None:
    """Under working weights a live session's optimizer holds other tensors than the parameters."""
    model = net()
    optimizer = sgd(model)
    claim(model, [optimizer], "one", registry)
    optimizer.param_groups[0]["params"] = [torch.zeros(1, requires_grad=True)]
    with pytest.raises(SessionError, match="the optimizer SGD is held by one"):
        claim(model, [optimizer], "two", registry)


def test_releasing_twice_does_not_release_what_somebody_else_claimed(registry: ClaimRegistry) -> None:
    model = net()
    optimizer = sgd(model)
    release = claim(model, [optimizer], "one", registry)
    release()
    claim(model, [optimizer], "one", registry)
    release()
    with pytest.raises(SessionError, match="held by one"):
        claim(model, [optimizer], "two", registry)


class Owner:
    """Stands for a session that was never closed; unreachable ones wait for the collector, since they hold a cycle."""

    def __init__(self, release: Callable[[], None]) -> None:
        self.itself = self
        weakref.finalize(self, release)


def test_a_session_that_nobody_can_reach_is_collected_first(registry: ClaimRegistry) -> None:
    model = net()
    gc.disable()
    try:
        owner = Owner(claim(model, [sgd(model)], "one", registry))
        with pytest.raises(SessionError, match="held by one"):
            claim(model, [sgd(model)], "two", registry)
        del owner
        claim(model, [sgd(model)], "two", registry)
    finally:
        gc.enable()
    assert {made.owner for made in registry.claims.values()} == {"two"}


def test_claims_of_this_process_are_the_default() -> None:
    model = net()
    release = claim(model, [sgd(model)], "one")
    try:
        assert {id(parameter) for parameter in model.parameters()} <= set(CLAIMS.claims)
        with pytest.raises(SessionError, match="held by one"):
            claim(model, [sgd(model)], "two")
    finally:
        release()


RECIPES = ("bf16-master", "bf16", "fp16", "bf16-kahan", "fp32")


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_notebook_cell_that_is_run_twice_is_refused_and_the_first_session_goes_on(prepare: Prepare, recipe: str) -> None:
    model = net()
    session = prepare(model, sgd(model), recipe)
    formats = {name: parameter.dtype for name, parameter in model.named_parameters()}
    for optimizer in (sgd(model), session.optimizers[0]):
        with pytest.raises(SessionError, match=rf"is held by the session of {recipe}, which is live; close\(\) that session first"):
            prepare(model, optimizer, "bf16-master")
    assert {name: parameter.dtype for name, parameter in model.named_parameters()} == formats
    with session.autocast():
        loss = model(torch.ones(2, 4)).float().square().mean()
    session.backward(loss)
    assert session.step().reason in ("", "gradient_overflow")
    session.close()
    prepare(model, sgd(model), "bf16-master")


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_session_that_was_dropped_without_close_gives_the_model_back_to_the_next(target: mpbackend.Target, recipe: str) -> None:
    model = net()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    session = target.prepare(model, sgd(model), recipe, on_unsupported="emulate")
    dropped = weakref.ref(session)
    del session
    with target.prepare(model, optimizer := sgd(model), "bf16-master", on_unsupported="emulate"):
        assert dropped() is None
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16 if recipe == "bf16-kahan" else torch.float32}
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))
    if recipe != "bf16-kahan":
        assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_a_prepare_that_fails_leaves_the_model_free(prepare: Prepare) -> None:
    model = net()
    with pytest.raises(SessionError, match="stateful"):
        prepare(model, sgd(model), "bf16-master", stateful={"sampler": 3})
    prepare(model, sgd(model), "bf16-master")


def test_a_generator_and_a_discriminator_have_a_session_each(prepare: Prepare) -> None:
    generator, discriminator = net(), net()
    prepare(generator, sgd(generator), "bf16-master")
    prepare(discriminator, sgd(discriminator), "bf16-master")
