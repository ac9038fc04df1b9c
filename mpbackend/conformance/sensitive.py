"""Checks of what a recipe pins to fp32: layer norm, softmax and cross-entropy of 16-bit operands, against fp64.

The bounds are those of fp32 arithmetic in any order of the sums (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., sections 1.9 and 3.1), with
``ELEMENTARY`` for each call of exp, log and rsqrt. Under a 16-bit format of the operator's own they are exceeded thousandfold.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from mpbackend.conformance.answer import Answer, fault, judged
from mpbackend.conformance.operands import normal, placed
from mpbackend.conformance.subject import DTYPES, Running, Subject
from mpbackend.conformance.tolerances import ELEMENTARY, FP32, gap_of, rounded

ROWS, WIDTH = 12, 192
EPSILON = 1e-5


def chain(count: int) -> float:
    """Return Higham's gamma of so many roundings in fp32: ``n * u / (1 - n * u)``."""
    return count * FP32 / (1 - count * FP32)


def check_layer_norm(subject: Subject) -> Answer:
    """Layer norm of 16-bit operands is computed and returned in fp32, by one pass or by two."""

    def judge(running: Running, name: str) -> Answer:
        x = (normal((ROWS, WIDTH), name, 1) + 2).to(DTYPES[name]).double()
        weight, bias = normal((WIDTH,), "fp32", 2), normal((WIDTH,), "fp32", 3)
        with running.forward():
            scale, shift = (placed(parameter, "fp32", subject.place) for parameter in (weight, bias))
            found = functional.layer_norm(placed(x, name, subject.place), (WIDTH,), scale, shift, EPSILON)
        if found.dtype is not torch.float32:
            return fault(f"the result is in {found.dtype}, and the recipe pins it to fp32")
        exact = functional.layer_norm(x, (WIDTH,), weight, bias, EPSILON)
        return judged(gap_of(found, exact, norm_distance(x, weight, bias)), "the result")

    return subject.each_format(judge)


def norm_distance(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return how far a layer norm in fp32 may lie from the exact one.

    Args:
        x: (rows, width) fp64.
        weight: (width) fp64.
        bias: likewise.
    """
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, correction=0, keepdim=True)
    centered = x - mean
    mean_error = chain(WIDTH + 1) * x.abs().mean(-1, keepdim=True)
    centered_error = mean_error + FP32 * (centered.abs() + mean_error)
    two_passes = (2 * centered.abs() * centered_error + centered_error.square()).mean(-1, keepdim=True)
    two_passes = two_passes + chain(WIDTH + 2) * (variance + two_passes)
    squares = x.square().mean(-1, keepdim=True)
    one_pass = chain(WIDTH + 2) * squares + 2 * mean.abs() * mean_error + mean_error.square() + 2 * FP32 * (squares + mean.square())
    shrunk = 1 - torch.maximum(one_pass, two_passes) / (variance + EPSILON) - 2 * FP32
    spread = shrunk.rsqrt() * (1 + ELEMENTARY) - 1
    root = (variance + EPSILON).rsqrt()
    normalized = root * ((1 + spread) * centered_error + spread * centered.abs())
    size = (root * centered.abs() + normalized) * weight.abs()
    return normalized * weight.abs() + 3 * FP32 * size + FP32 * (size + bias.abs())


def check_softmax(subject: Subject) -> Answer:
    """Softmax of 16-bit operands is computed and returned in fp32."""

    def judge(running: Running, name: str) -> Answer:
        x = normal((ROWS, WIDTH), name, 4) * 4
        with running.forward():
            found = functional.softmax(placed(x, name, subject.place), -1)
        if found.dtype is not torch.float32:
            return fault(f"the result is in {found.dtype}, and the recipe pins it to fp32")
        exact = x.softmax(-1)
        return judged(gap_of(found, exact, exact * probability_error(x)), "the result")

    return subject.each_format(judge)


def probability_error(x: Tensor) -> Tensor:
    """Return the relative error of each probability of a softmax in fp32: of x - max, of its product with log2(e), the exponential, the sum, the division."""
    below = x.amax(-1, keepdim=True) - x
    return torch.exp(2 * FP32 * below) * (1 + ELEMENTARY) ** 3 * (1 + chain(x.shape[-1])) - 1


def check_cross_entropy(subject: Subject) -> Answer:
    """Cross-entropy of 16-bit logits is computed and returned in fp32: its mean, and its gradient, rounded once to the format of the logits."""

    def judge(running: Running, name: str) -> Answer:
        logits, target = normal((ROWS, WIDTH), name, 5) * 4, torch.arange(ROWS) * 7 % WIDTH
        placed_logits = placed(logits, name, subject.place, grad=True)
        with running.forward():
            loss = functional.cross_entropy(placed_logits, target.to(subject.place))
        if loss.dtype is not torch.float32:
            return fault(f"the loss is in {loss.dtype}, and the recipe pins it to fp32")
        with running.backward():
            loss.backward()
        if placed_logits.grad is None:
            return fault("the gradient of the logits is missing")
        exact = functional.cross_entropy(logits, target)
        of_loss = gap_of(loss, exact, loss_distance(logits, target))
        gradient = (logits.softmax(-1) - functional.one_hot(target, WIDTH)) / ROWS
        distance = (logits.softmax(-1) * probability_error(logits) + 4 * FP32) / ROWS  # p - 1, the quotient by the rows, and the incoming gradient
        of_gradient = gap_of(placed_logits.grad, gradient, rounded(gradient, distance, name))
        worst = "the loss" if of_loss >= of_gradient else "its gradient"
        return judged(max(of_loss, of_gradient), worst, loss=of_loss, gradient=of_gradient)

    return subject.each_format(judge)


def loss_distance(logits: Tensor, target: Tensor) -> Tensor:
    """Return how far the mean cross-entropy in fp32 may lie from the exact one: of the log of a sum, two subtractions, and the mean over rows."""
    sums = torch.exp(logits - logits.amax(-1, keepdim=True)).sum(-1)
    spread = (logits.amax(-1, keepdim=True) - logits).abs()
    log_error = torch.log1p(probability_error(logits).amax(-1)) + ELEMENTARY * (1 + sums.log().abs())
    of_row = log_error + 2 * FP32 * (spread.gather(-1, target[:, None]).squeeze(-1) + sums.log().abs() + log_error)
    losses = functional.cross_entropy(logits, target, reduction="none")
    return of_row.mean() + chain(len(logits) + 1) * (losses + of_row).mean()
