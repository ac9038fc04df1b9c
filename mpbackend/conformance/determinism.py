"""Checks that the same numbers give the same bits twice: what comparing two runs rests on."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from mpbackend.conformance.answer import Answer, fault, fine
from mpbackend.conformance.operands import normal, placed
from mpbackend.conformance.subject import Running, Subject
from mpbackend.conformance.training import Run, difference, each_recipe, same_bits

STEPS = 3
TIMES = 3


def check_products_repeat(subject: Subject) -> Answer:
    """Products, convolutions and attention, forward and backward, give the same bits each time."""

    def judge(running: Running, name: str) -> Answer:
        first: dict[str, Tensor] = {}
        for _ in range(TIMES):
            for label, values in passes(subject, running, name).items():
                kept = first.setdefault(label, values)
                if not same_bits(kept, values):
                    return fault(f"{label} has other bits when it is computed again")
        return fine()

    return subject.each_format(judge)


def passes(subject: Subject, running: Running, name: str) -> dict[str, Tensor]:
    """Return results and gradients of one pass of each product, on the host."""
    found: dict[str, Tensor] = {}
    shapes = {"matmul": ((65, 130), (130, 33)), "convolution": ((2, 8, 9, 9), (8, 8, 3, 3)), "attention": ((2, 2, 33, 16), (2, 2, 33, 16))}
    for label, (left, right) in shapes.items():
        a, b = (placed(normal(shape, name, case), name, subject.place, grad=True) for case, shape in enumerate((left, right)))
        with running.forward():
            if label == "matmul":
                out = a @ b
            elif label == "convolution":
                out = functional.conv2d(a, b, padding=1)
            else:
                out = functional.scaled_dot_product_attention(a, b, b)
        with running.backward():
            out.backward(torch.ones_like(out))
        results = {"": out, " dgrad": a.grad, " wgrad": b.grad}
        found |= {f"{label}{part}": value.detach().cpu() for part, value in results.items() if value is not None}
    return found


def check_training_repeats(subject: Subject) -> Answer:
    """Two runs of a few steps from the same seed end with the same bits."""

    def judge(recipe: str) -> Answer:
        states = []
        for _ in range(2):
            run = Run(subject)
            with subject.session(run.model, run.optimizer, recipe) as session:
                for number in range(STEPS):
                    run.step(session, number)
            states.append(run.state())
        changed = difference(*states)
        return fault(f"{changed} differs") if changed else fine()

    return each_recipe(subject, judge)
