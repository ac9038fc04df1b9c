"""Unscaling by hand on several ranks: what a rank gets is reduced, and all ranks judge alike."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mpbackend
from tests.support.ranks import run_ranks

Seen = tuple[list[float], bool, float]


def unscale(rank: int, recipe: str, slopes: list[float], count: int) -> Seen:
    """Unscale a step of ``count`` of two micro-batches by hand; returns the gradients that this rank got, whether it stepped, and the weight."""
    target = mpbackend.select("cpu")
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    nn.init.zeros_(model.module.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with target.prepare(model, optimizer, recipe, on_unsupported="emulate", micro_batches=count) as session:
        for number in range(1, count + 1):
            with session.autocast():
                loss = (model(torch.ones(1, 1)).float() * slopes[rank]).sum()
            session.backward(loss)
            if number < count:
                session.step()
        held = [parameter.grad.item() for parameter in session.unscale() if parameter.grad is not None]
        return held, session.step().stepped, model.module.weight.item()


@pytest.mark.parametrize("recipe", ["fp32:loss_scale.mode=dynamic,loss_scale.init=1024", "bf16-master:loss_scale.mode=dynamic,loss_scale.init=1024"])
def test_gradients_that_are_unscaled_by_hand_are_those_of_all_ranks(recipe: str) -> None:
    for held, stepped, weight in run_ranks(2, unscale, recipe, [1.0, 3.0], 2):
        assert (held, stepped, weight) == ([4.0], True, -4.0)


@pytest.mark.parametrize("recipe", ["fp32:loss_scale.mode=dynamic,loss_scale.init=1024", "bf16-master:loss_scale.mode=dynamic,loss_scale.init=1024"])
def test_an_overflow_of_one_rank_that_is_unscaled_by_hand_skips_the_step_on_all(recipe: str) -> None:
    for held, stepped, weight in run_ranks(2, unscale, recipe, [1.0, math.inf], 1):
        assert not math.isfinite(held[0])
        assert (stepped, weight) == (False, 0.0)
