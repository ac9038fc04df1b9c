"""Checks of matrix products against fp64, in the distance that the device's row allows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mpbackend.conformance.answer import Answer, fault, judged
from mpbackend.conformance.operands import normal, placed
from mpbackend.conformance.subject import DTYPES, Running, Subject
from mpbackend.conformance.tolerances import claim_for, distance_bound, gap_of, rounded

SHAPES = ((1, 1, 1), (16, 16, 16), (17, 33, 65), (64, 128, 48))
"""M, K and N of the quick products: single, one tile, ragged, several tiles."""

LONG_SHAPES = ((3, 4097, 5), (256, 1024, 256))
"""M, K and N of the others."""


def check_matmul(subject: Subject) -> Answer:
    """Products of two matrices lie within the derived bound of fp64, whatever their shape, and have the format of the recipe."""
    return products(subject, torch.matmul)


def check_batched_matmul(subject: Subject) -> Answer:
    """Products of two batches of matrices do too."""
    return products(subject, torch.matmul, batch=(3,))


def check_transposed_matmul(subject: Subject) -> Answer:
    """So do products of matrices that are stored transposed, as the backward pass multiplies them."""
    return products(subject, lambda a, b: torch.matmul(a.mT.contiguous().mT, b.mT.contiguous().mT))


def products(subject: Subject, multiply: Callable[[Tensor, Tensor], Tensor], batch: tuple[int, ...] = ()) -> Answer:
    """Return the answer about one way to multiply."""
    shapes = SHAPES if subject.quick else SHAPES + LONG_SHAPES

    def judge(running: Running, name: str) -> Answer:
        claim, gap = claim_for(subject, running.plan), 0.0
        for case, (m, k, n) in enumerate(shapes):
            a, b = normal((*batch, m, k), name, case), normal((*batch, k, n), name, 100 + case)
            with running.forward():
                found = multiply(placed(a, name, subject.place), placed(b, name, subject.place))
            if found.dtype is not DTYPES[name]:
                return fault(f"the product is in {found.dtype}, not in {name}")
            gap = max(gap, gap_of(found, a @ b, distance_bound(a @ b, a.abs() @ b.abs(), claim, k, name)))
        return judged(gap, "the product")

    return subject.each_format(judge)


def check_linear(subject: Subject) -> Answer:
    """A linear layer with fp32 parameters rounds them to the recipe's format, multiplies, and adds the bias within the bound."""

    def judge(running: Running, name: str) -> Answer:
        m, k, n = 20, 96, 40
        x, weight, bias = normal((m, k), name, 1), normal((n, k), name, 2), normal((n,), name, 3)
        layer = nn.Linear(k, n)
        layer.load_state_dict({"weight": weight.float(), "bias": bias.float()})
        layer.to(subject.place)
        with running.forward():
            found = layer(x.float().to(subject.place))
        if found.dtype is not DTYPES[name]:
            return fault(f"the output is in {found.dtype}, not in {name}")
        exact, size = x @ weight.T + bias, x.abs() @ weight.T.abs() + bias.abs()
        # A product that is rounded before the bias is added is rounded twice.
        distance = distance_bound(x @ weight.T, size, claim_for(subject, running.plan), k, name, extra=1)
        return judged(gap_of(found, exact, rounded(exact, distance, name)), "the output")

    return subject.each_format(judge)


def check_matmul_gradients(subject: Subject) -> Answer:
    """Both gradients of a product lie within the bounds of their own sums, with the gradient of the result given exactly."""

    def judge(running: Running, name: str) -> Answer:
        m, k, n = 24, 80, 56
        a, b, g = normal((m, k), name, 4), normal((k, n), name, 5), normal((m, n), name, 6)
        left, right = placed(a, name, subject.place, grad=True), placed(b, name, subject.place, grad=True)
        with running.forward():
            out = left @ right
        with running.backward():
            out.backward(placed(g, name, subject.place))
        if left.grad is None or right.grad is None:
            return fault("a gradient is missing")
        claim = claim_for(subject, running.plan)
        dgrad = gap_of(left.grad, g @ b.T, distance_bound(g @ b.T, g.abs() @ b.T.abs(), claim, n, name))
        wgrad = gap_of(right.grad, a.T @ g, distance_bound(a.T @ g, a.T.abs() @ g.abs(), claim, m, name))
        return judged(max(dgrad, wgrad), "dgrad" if dgrad > wgrad else "wgrad", dgrad=dgrad, wgrad=wgrad)

    return subject.each_format(judge)
