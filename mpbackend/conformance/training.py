"""A small model and its data, and short runs of it in a session, for checks of whole steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mpbackend.conformance.answer import Answer, skip, together
from mpbackend.conformance.operands import SEED
from mpbackend.conformance.subject import PLAIN, Subject
from mpbackend.train.session import Session

ROWS, FEATURES, WIDTH, CLASSES = 16, 12, 32, 8
RATE = 2.0**-6
BASE = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16:loss_scale.init=1024"}
"""Recipes of short runs: one whose scale of 2^16 overflows at once would skip every step."""


class Net(nn.Module):
    """A linear layer, a layer norm, a batch norm and a linear layer: parameters, buffers of floats and of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.statistics = nn.BatchNorm1d(WIDTH)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, features) to (rows, classes)."""
        out: Tensor = self.last(functional.gelu(self.statistics(self.norm(self.first(x)))))
        return out


class Run:
    """A model, its optimizer and the batches that it is trained on.

    Args:
        subject: the backend and device.

    Attributes:
        model: the model, on the device, made from one seed.
        optimizer: AdamW over it.
    """

    def __init__(self, subject: Subject) -> None:
        generator = torch.Generator().manual_seed(SEED)
        model = Net()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
        self.model = model.to(subject.place)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE)
        self._place = subject.place

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """Return input and target of a step."""
        generator = torch.Generator().manual_seed(SEED + number)
        x, y = torch.randn(ROWS, FEATURES, generator=generator), torch.randint(CLASSES, (ROWS,), generator=generator)
        return x.to(self._place), y.to(self._place)

    def step(self, session: Session, number: int, factor: float = 1.0) -> Any:
        """Make one step and return its result.

        Args:
            session: the session of this run.
            number: number of the batch.
            factor: what the loss is multiplied by.
        """
        x, y = self.batch(number)
        with session.autocast():
            loss = functional.cross_entropy(self.model(x), y) * factor
        session.backward(loss)
        return session.step()

    def state(self) -> dict[str, Tensor]:
        """Return copies of parameters, buffers and moments on the host."""
        found = {name: tensor.detach().cpu().clone() for name, tensor in self.model.state_dict().items()}
        for number, (parameter, values) in enumerate(self.optimizer.state.items()):
            named = {f"moment {number} {name}": value for name, value in values.items() if isinstance(value, Tensor)}
            found |= {name: value.detach().cpu().clone() for name, value in named.items()}
            found[f"gradient {number}"] = torch.zeros(0) if parameter.grad is None else parameter.grad.detach().cpu().clone()
        return found


def difference(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> str:
    """Return the first name under which two states differ in a bit; empty when there is none. NaN equals NaN."""
    for name in dict.fromkeys((*mine, *theirs)):
        left, right = mine.get(name), theirs.get(name)
        if left is None or right is None or left.dtype is not right.dtype or not same_bits(left, right):
            return name
    return ""


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Tell whether two tensors of one dtype on the host hold the same bits."""
    if left.shape != right.shape or left.dtype is not right.dtype:
        return False
    return torch.equal(left.contiguous().reshape(-1).view(torch.uint8), right.contiguous().reshape(-1).view(torch.uint8))


def each_recipe(subject: Subject, judge: Callable[[str], Answer], recipes: tuple[str, ...] = PLAIN) -> Answer:
    """Return one answer over recipes that run here.

    Args:
        subject: the backend and device.
        judge: gives the answer for the text of a recipe.
        recipes: names of ``BASE``, or texts.
    """
    answers: dict[str, Answer] = {}
    for name in recipes:
        recipe = BASE.get(name, name)
        plan = subject.plan(recipe)
        answers[name] = skip(plan) if isinstance(plan, str) else judge(recipe)
    return together(answers)
