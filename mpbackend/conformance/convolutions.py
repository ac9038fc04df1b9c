"""Checks of convolutions against fp64: as many products a sum as a window has elements and channels."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import functional

from mpbackend.conformance.answer import Answer, fault, judged
from mpbackend.conformance.operands import normal, placed
from mpbackend.conformance.subject import DTYPES, Running, Subject
from mpbackend.conformance.tolerances import claim_for, distance_bound, gap_of


class Window(NamedTuple):
    """Sizes of a convolution: shapes of input and weight, and what the operator takes besides."""

    x: tuple[int, int, int, int]
    weight: tuple[int, int, int, int]
    stride: int = 1
    padding: int = 0
    groups: int = 1

    def convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the convolution."""
        return functional.conv2d(x, weight, stride=self.stride, padding=self.padding, groups=self.groups)

    @property
    def products(self) -> int:
        """Return the products of one sum of the output."""
        _, channels, height, width = self.weight
        return channels * height * width


WINDOWS = (
    Window((2, 3, 9, 9), (8, 3, 3, 3), padding=1),
    Window((2, 16, 8, 8), (16, 16, 1, 1)),
    Window((1, 8, 11, 7), (12, 4, 5, 3), stride=2, padding=2, groups=2),
)
"""A first layer, a point-wise one, and one with strides and groups."""


def check_convolution(subject: Subject) -> Answer:
    """Convolutions lie within the derived bound of fp64, strided, padded and grouped ones too."""

    def judge(running: Running, name: str) -> Answer:
        claim, gap = claim_for(subject, running.plan, "conv"), 0.0
        for case, window in enumerate(WINDOWS):
            x, weight = normal(window.x, name, case), normal(window.weight, name, 100 + case)
            with running.forward():
                found = window.convolve(placed(x, name, subject.place), placed(weight, name, subject.place))
            if found.dtype is not DTYPES[name]:
                return fault(f"the result is in {found.dtype}, not in {name}")
            exact, size = window.convolve(x, weight), window.convolve(x.abs(), weight.abs())
            gap = max(gap, gap_of(found, exact, distance_bound(exact, size, claim, window.products, name)))
        return judged(gap, "the convolution")

    return subject.each_format(judge)


def check_convolution_gradients(subject: Subject) -> Answer:
    """The gradients of input and weight lie within the bounds of their own sums."""

    def judge(running: Running, name: str) -> Answer:
        claim, gaps = claim_for(subject, running.plan, "conv"), {"dgrad": 0.0, "wgrad": 0.0}
        for case, window in enumerate(WINDOWS):
            x, weight = normal(window.x, name, 10 + case), normal(window.weight, name, 110 + case)
            left, right = placed(x, name, subject.place, grad=True), placed(weight, name, subject.place, grad=True)
            with running.forward():
                out = window.convolve(left, right)
            g = normal(tuple(out.shape), name, 210 + case)
            with running.backward():
                out.backward(placed(g, name, subject.place))
            if left.grad is None or right.grad is None:
                return fault("a gradient is missing")
            exact, size = gradients(x, weight, g, window), gradients(x.abs(), weight.abs(), g.abs(), window)
            counts = (window.products // window.weight[1] * window.weight[0] // window.groups, g.numel() // g.shape[1])
            for product, found, near, far, k in zip(gaps, (left.grad, right.grad), exact, size, counts, strict=True):
                gaps[product] = max(gaps[product], gap_of(found, near, distance_bound(near, far, claim, k, name)))
        return judged(max(gaps.values()), max(gaps, key=lambda product: gaps[product]), **gaps)

    return subject.each_format(judge)


def gradients(x: Tensor, weight: Tensor, g: Tensor, window: Window) -> tuple[Tensor, Tensor]:
    """Return the gradients of input and weight in fp64."""
    module: Any = importlib.import_module("torch.nn.grad")  # not annotated
    options = {"stride": window.stride, "padding": window.padding, "groups": window.groups}
    dgrad: Tensor = module.conv2d_input(x.shape, weight, g, **options)
    wgrad: Tensor = module.conv2d_weight(x, weight.shape, g, **options)
    return dgrad, wgrad
