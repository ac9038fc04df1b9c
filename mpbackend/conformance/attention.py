"""Checks of fused attention against fp64.

First-order error propagation, from the claim about sums and the formats that a kernel may round to in between: scores, probabilities and the result in the
operands' format, softmax in fp32. A kernel that keeps more is nearer. Every step takes the error of the one before it at its largest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from mpbackend.conformance.answer import Answer, fault, judged
from mpbackend.conformance.operands import normal, placed
from mpbackend.conformance.subject import DTYPES, Running, Subject
from mpbackend.conformance.tolerances import ELEMENTARY, FP32, claim_for, gap_of, rounded, sum_distance
from mpbackend.formats import FORMATS
from mpbackend.numerics.arithmetic import Arithmetic
from mpbackend.numerics.tolerance import roundoff, tiny

BATCH, HEADS, QUERIES, KEYS, WIDTH = 2, 2, 24, 40, 16

BLOCK = 16
"""The fewest keys that a fused kernel takes at a time; after each it rescales what it has, one exponential and two roundings more."""


@dataclass(frozen=True)
class Exact:
    """Attention in fp64 and the distances that a device may have.

    Attributes:
        q: queries, (batch, heads, queries, width).
        k: keys, (batch, heads, keys, width).
        v: values, shape of ``k``.
        claim: the arithmetic of the products.
        name: format of the operands.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    claim: Arithmetic
    name: str

    @property
    def scale(self) -> float:
        """Return what scores are multiplied by."""
        return 1 / math.sqrt(self.q.shape[-1])

    @property
    def unit(self) -> float:
        """Return the unit roundoff of the operands' format."""
        return roundoff(FORMATS[self.name].mantissa_bits, "rne")

    @property
    def probabilities(self) -> Tensor:
        """Return the exact probabilities."""
        return (self.scale * self.q @ self.k.mT).softmax(-1)

    def probability_error(self) -> Tensor:
        """Return the largest relative error of each probability, before an underflow.

        The root of the scale may be put on both operands and the score be rounded: three roundings to the format. An error e of a score and E of the largest
        one change a probability by ``exp(e + E)``; the exponential, the sum over keys and the division are in fp32.
        """
        size = self.q.abs() @ self.k.abs().mT
        score = self.scale * ((1 + self.unit) ** 3 * (size + sum_distance(size, self.claim, self.q.shape[-1], self.name)) - size)
        score = score + 2 * FP32 * (self.scale * size).amax(-1, keepdim=True)  # x - max, and x * log2(e)
        blocks = math.ceil(self.k.shape[-2] / BLOCK)
        elementary = (1 + ELEMENTARY) ** (2 + blocks) * (1 + FP32) ** (self.k.shape[-2] + 2 * blocks)
        return torch.exp(score + score.amax(-1, keepdim=True)) * elementary * (1 + self.unit) - 1

    def output(self) -> tuple[Tensor, Tensor]:
        """Return the exact output and its distance."""
        p, error = self.probabilities, self.probability_error()
        size = (p * (1 + error) + self.smallest) @ self.v.abs()
        distance = (p * error + self.smallest) @ self.v.abs() + sum_distance(size, self.claim, self.k.shape[-2], self.name)
        return p @ self.v, rounded(p @ self.v, distance, self.name)

    @property
    def smallest(self) -> float:
        """Return what a probability loses when it underflows."""
        return tiny(self.name, FORMATS[self.name].mantissa_bits)

    def gradients(self, g: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the exact gradients of queries, keys and values and their distances, for the gradient ``g`` of the output.

        ``dS = P * (dP - D)`` with ``dP = g V^T`` and ``D`` the sum of ``P * dP`` or of ``g * output`` over a row, whichever a kernel takes.
        """
        p, error = self.probabilities, self.probability_error()
        width, keys, queries = self.q.shape[-1], self.k.shape[-2], self.q.shape[-2]
        dp, dp_size = g @ self.v.mT, g.abs() @ self.v.abs().mT
        dp_error = rounded(dp, sum_distance(dp_size, self.claim, width, self.name), self.name)
        out, out_error = self.output()
        d = (p * dp).sum(-1, keepdim=True)
        by_products = (p * (error * dp.abs() + (1 + error) * dp_error)).sum(-1, keepdim=True) + keys * FP32 * (p * (1 + error) * dp.abs()).sum(-1, keepdim=True)
        by_output = (g.abs() * out_error).sum(-1, keepdim=True) + width * FP32 * (g.abs() * (out.abs() + out_error)).sum(-1, keepdim=True)
        d_error = torch.maximum(by_products, by_output)
        ds = p * (dp - d)
        inside = dp_error + d_error + 2 * FP32 * (dp.abs() + d.abs() + dp_error + d_error)
        ds_error = rounded(ds, error * ds.abs() + (p * (1 + error) + self.smallest) * inside + self.smallest * (dp - d).abs(), self.name)
        dv_size = (p * (1 + error) + self.smallest).mT @ g.abs()
        dv_error = (p * error + self.smallest).mT @ g.abs() + sum_distance(dv_size, self.claim, queries, self.name)
        found = {"dv": (p.mT @ g, rounded(p.mT @ g, dv_error, self.name))}
        for label, left, right, count in (("dq", ds, self.k, keys), ("dk", ds.mT, self.q, queries)):
            left_error = ds_error if label == "dq" else ds_error.mT
            size = (left.abs() + left_error) @ right.abs()
            # The root of the scale on the operand and on the result: two roundings to the format besides the last.
            distance = (left_error @ right.abs() + sum_distance(size, self.claim, count, self.name)) * (1 + self.unit) ** 2 + ((1 + self.unit) ** 2 - 1) * size
            found[label] = (self.scale * left @ right, rounded(self.scale * left @ right, self.scale * distance, self.name))
        return found


def operands(name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries, keys, values and the gradient of the output."""
    sizes = (QUERIES, KEYS, KEYS, QUERIES)
    q, k, v, g = (normal((BATCH, HEADS, size, WIDTH), name, 300 + case) for case, size in enumerate(sizes))
    return q, k, v, g


def attend(*operands: Tensor) -> Tensor:
    """Return the fused attention of queries, keys and values."""
    q, k, v = operands
    return functional.scaled_dot_product_attention(q, k, v)


def check_attention(subject: Subject) -> Answer:
    """Fused attention lies within the derived distance of fp64, and its output has the format of the recipe."""

    def judge(running: Running, name: str) -> Answer:
        q, k, v, _ = operands(name)
        with running.forward():
            found = attend(*(placed(x, name, subject.place) for x in (q, k, v)))
        if found.dtype is not DTYPES[name]:
            return fault(f"the output is in {found.dtype}, not in {name}")
        exact, distance = Exact(q, k, v, claim_for(subject, running.plan), name).output()
        return judged(gap_of(found, exact, distance), "the output")

    return subject.each_format(judge)


def check_attention_gradients(subject: Subject) -> Answer:
    """The gradients of queries, keys and values lie within theirs."""

    def judge(running: Running, name: str) -> Answer:
        q, k, v, g = operands(name)
        inputs = {label: placed(x, name, subject.place, grad=True) for label, x in (("dq", q), ("dk", k), ("dv", v))}
        with running.forward():
            out = attend(*inputs.values())
        with running.backward():
            out.backward(placed(g, name, subject.place))
        gaps: dict[str, float] = {}
        for label, (exact, distance) in Exact(q, k, v, claim_for(subject, running.plan), name).gradients(g).items():
            gradient = inputs[label].grad
            if gradient is None:
                return fault(f"{label} is missing")
            gaps[label] = gap_of(gradient, exact, distance)
        return judged(max(gaps.values()), max(gaps, key=lambda label: gaps[label]), **gaps)

    return subject.each_format(judge)
