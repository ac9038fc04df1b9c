"""Under the pinned policy every sensitive operator computes what fp32 computes on the upcast operands: each step inside and the result, bit for bit."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own documentation calls it F
from torch.utils._python_dispatch import TorchDispatchMode

from mpbackend.backend import PolicyKind
from mpbackend.observe.audit import SavedActivations
from mpbackend.observe.memory import nested_tensors
from mpbackend.train.policy import PINS, PinnedPolicy, find_op, sensitive_ops
from mpbackend.train.samples import sample
from mpbackend_cpu.op_policy import AUTOCAST_KEY, classify

NATIVE: Mapping[str, PolicyKind] = classify().policy
FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16}
CPU = torch.device("cpu")

Op = Callable[..., torch.Tensor]
Step = tuple[str, tuple[torch.Tensor, ...]]

LABELS = torch.arange(8) % 5

CASES: dict[str, Op] = {
    "softmax": lambda a, *_: torch.softmax(a, -1),
    "log_softmax": lambda a, *_: F.log_softmax(a, -1),
    "layer_norm": lambda a, b, c, d: F.layer_norm(a, (64,), c, d),
    "rms_norm": lambda a, b, c, d: F.rms_norm(a, (64,), c),
    "group_norm": lambda a, b, c, d: F.group_norm(a, 4, c, d),
    "cross_entropy": lambda a, *_: F.cross_entropy(a, LABELS),
    "cross_entropy, smoothed and weighted": lambda a, b, c, d: F.cross_entropy(a, LABELS, c.detach(), label_smoothing=0.1),
    "cross_entropy of probabilities": lambda a, b, *_: F.cross_entropy(a, b.detach()),
    "nll_loss": lambda a, *_: F.nll_loss(a, LABELS),
    "mse_loss": lambda a, b, *_: F.mse_loss(a, b),
    "l1_loss": lambda a, b, *_: F.l1_loss(a, b),
    "smooth_l1_loss": lambda a, b, *_: F.smooth_l1_loss(a, b),
    "huber_loss": lambda a, b, *_: F.huber_loss(a, b, delta=0.25),
    "kl_div": lambda a, b, *_: F.kl_div(a, b, reduction="batchmean"),
    "poisson_nll_loss": lambda a, b, *_: F.poisson_nll_loss(a, b),
    "soft_margin_loss": lambda a, b, *_: F.soft_margin_loss(a, b.detach()),
    "binary_cross_entropy_with_logits": lambda a, b, *_: F.binary_cross_entropy_with_logits(a, b),
    "cosine_similarity": lambda a, b, *_: F.cosine_similarity(a, b),
    "cosine_embedding_loss": lambda a, b, *_: F.cosine_embedding_loss(a, b, torch.ones(8)),
    "cdist": lambda a, b, *_: torch.cdist(a, b),
    "exp": lambda a, *_: torch.exp(a),
    "expm1": lambda a, *_: torch.expm1(a),
    "log": lambda a, *_: torch.log(a),
    "log1p": lambda a, *_: torch.log1p(a),
    "rsqrt": lambda a, *_: torch.rsqrt(a),
    "reciprocal": lambda a, *_: torch.reciprocal(a),
    "pow, scalar exponent": lambda a, *_: a**1.5,
    "pow, tensor exponent": lambda a, b, *_: a**b,
    "pow, scalar base": lambda a, *_: 3**a,
    "sum": lambda a, *_: a.sum(),
    "sum of rows": lambda a, *_: a.sum(0),
    "prod": lambda a, *_: a.prod(-1),
    "cumsum": lambda a, *_: a.cumsum(0),
    "cumprod": lambda a, *_: a.cumprod(0),
    "norm": lambda a, *_: torch.ops.aten.norm.Scalar(a, 2),
    "norm of rows": lambda a, *_: torch.ops.aten.norm.ScalarOpt_dim(a, 2, [-1]),
    "vector_norm": lambda a, *_: torch.linalg.vector_norm(a),
    "logsumexp": lambda a, *_: a.logsumexp(-1),
    "softplus": lambda a, *_: F.softplus(a),
    "interpolate, nearest": lambda a, *_: F.interpolate(a[None], scale_factor=2),
    "interpolate, linear": lambda a, *_: F.interpolate(a[None], scale_factor=2, mode="linear"),
    "interpolate, bicubic": lambda a, *_: F.interpolate(a[None, None], scale_factor=2, mode="bicubic"),
}
"""Calls as models make them, on two operands of 8 rows of 64 and two of 64 elements."""

CASTS_AND_MEMORY = frozenset(["_to_copy", "empty", "empty_like"])
"""Operators that compute nothing: casts, and memory that is not written yet."""

ROUNDED_BACKWARD: dict[str, Op] = {
    "cumsum": lambda a, *_: a.cumsum(0, dtype=torch.float32),
    "cumprod": lambda a, *_: a.cumprod(0, dtype=torch.float32),
    "vector_norm": lambda a, *_: torch.linalg.vector_norm(a, dtype=torch.float32),
}
"""Calls that are pinned by their ``dtype`` argument, as torch's own autocast does it, and whose derivative in torch goes through the operand's format."""

VIEWS = frozenset(["unsqueeze", "squeeze", "view", "alias", "detach"])
"""Operators that move no bit, which a call may make before the sensitive one."""

COPIES = frozenset(f"{prefix}{rank}d" for prefix in ("upsample_nearest", "_upsample_nearest_exact") for rank in (1, 2, 3))
"""Sensitive operators that only copy elements, so that the format is all that a pin changes."""


class Steps(TorchDispatchMode):
    """Keeps the results of every operator below autocast, casts left out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch leaves it unannotated
        self.taken: list[Step] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if name not in CASTS_AND_MEMORY:
            self.taken.append((name, tuple(tensor.detach().clone() for tensor in nested_tensors(out))))
        return out


def steps_of(call: Callable[[], Any], autocast: torch.dtype | None = None) -> list[Step]:
    """Return the steps of a call and then its result, under autocast or without."""
    with torch.no_grad(), torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None), Steps() as steps:
        result = call()
    return [*steps.taken, ("result", tuple(nested_tensors(result)))]


def same_bits(first: list[Step], second: list[Step]) -> bool:
    """Tell whether two lists of steps are the same operators with the same results."""
    return len(first) == len(second) and all(
        name == other and len(left) == len(right) and all(map(torch.equal, left, right)) and [t.dtype for t in left] == [t.dtype for t in right]
        for (name, left), (other, right) in zip(first, second, strict=True)
    )


def values(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Return seeded operands between 0.05 and 0.95, which use all bits of ``dtype``."""
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 0.9 + 0.05).to(dtype)


def operands(name: str, dtype: torch.dtype) -> tuple[list[Any], dict[str, Any]]:
    """Return fitting arguments of an operator, with seeded values."""
    positional, named = sample(find_op(name), CPU, dtype)
    seeds = itertools.count()
    return replace_tensors(positional, lambda tensor: values(dtype, *tensor.shape, seed=next(seeds)) if tensor.is_floating_point() else tensor), named


def replace_tensors(arguments: list[Any], change: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    """Return arguments with every tensor changed."""
    return [change(value) if isinstance(value, torch.Tensor) else value for value in arguments]


def call_operands(dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the operands of ``CASES``."""
    return [values(dtype, *shape, seed=seed) for seed, shape in enumerate(((8, 64), (8, 64), (64,), (64,)))]


def widen(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


@pytest.fixture(params=FORMATS)
def lower(request: pytest.FixtureRequest) -> torch.dtype:
    return FORMATS[request.param]


@pytest.fixture(autouse=True)
def nothing_stays_pinned() -> Iterator[None]:
    yield
    assert not PINS.counts


@pytest.mark.parametrize("name", sorted(sensitive_ops()))
def test_every_listed_operator_has_the_steps_of_fp32(name: str, lower: torch.dtype) -> None:
    op = find_op(name)
    arguments, named = operands(name, lower)
    wide = replace_tensors(arguments, widen)
    expected = steps_of(lambda: op(*wide, **named))
    with PinnedPolicy(AUTOCAST_KEY, NATIVE):
        pinned = steps_of(lambda: op(*arguments, **named), lower)
    assert len(expected) > 1
    assert all(tensor.dtype is torch.float32 for _, tensors in pinned for tensor in tensors if tensor.is_floating_point())
    assert same_bits(pinned, expected)


@pytest.mark.parametrize("name", CASES)
def test_calls_as_models_make_them_have_the_steps_of_fp32(name: str, lower: torch.dtype) -> None:
    operands = call_operands(lower)
    expected = steps_of(lambda: CASES[name](*map(widen, operands)))
    with PinnedPolicy(AUTOCAST_KEY, NATIVE):
        pinned = steps_of(lambda: CASES[name](*operands), lower)
    assert same_bits([step for step in pinned if step[0] not in VIEWS], [step for step in expected if step[0] not in VIEWS])


def unpinned(name: str) -> tuple[bool, bool] | None:
    """Return whether the steps, and whether the values of the result alone, are those of fp32 without a pin; None where bf16 is refused."""
    op = find_op(name)
    arguments, named = operands(name, torch.bfloat16)
    wide = replace_tensors(arguments, widen)
    expected = steps_of(lambda: op(*wide, **named))
    try:
        found = steps_of(lambda: op(*arguments, **named), torch.bfloat16)
    except RuntimeError:
        return None
    return same_bits(found, expected), all(map(torch.equal, map(widen, found[-1][1]), map(widen, expected[-1][1])))


def test_without_the_pin_they_do_not() -> None:
    found = {name: same for name in sensitive_ops() if (same := unpinned(name)) is not None}
    pinned = [name for name in PinnedPolicy(AUTOCAST_KEY, NATIVE).pinned if name in found]
    assert len(pinned) > 40
    assert [name for name in pinned if found[name][0]] == [], "each has another step or another format"
    assert {name for name in pinned if found[name][1]} == COPIES, "and each that computes has another value"
    assert all(found[name] == (True, True) for name in found if name not in pinned), "what the backend runs in fp32 by itself needs no pin"


def gradients_of(case: Op, operands: list[torch.Tensor], autocast: torch.dtype | None = None) -> list[torch.Tensor | None]:
    """Return the gradients of an fp32 result, weighted with seeded values, with respect to every operand that it depends on."""
    leaves = [tensor.detach().requires_grad_() for tensor in operands]
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        value = case(*leaves)
    assert value.dtype is torch.float32
    return list(torch.autograd.grad(value, leaves, values(torch.float32, *value.shape), allow_unused=True))


@pytest.mark.parametrize("name", [name for name in CASES if name not in ROUNDED_BACKWARD])
def test_gradients_are_those_of_fp32_rounded_once(name: str, lower: torch.dtype) -> None:
    operands = call_operands(lower)
    with PinnedPolicy(AUTOCAST_KEY, NATIVE):
        gradients = gradients_of(CASES[name], operands, lower)
    expected = gradients_of(CASES[name], [widen(tensor) for tensor in operands])
    assert gradients[0] is not None
    for gradient, reference in zip(gradients, expected, strict=True):
        assert (gradient is None) == (reference is None)
        if gradient is not None and reference is not None:
            assert gradient.dtype is lower
            assert torch.equal(gradient, reference.to(lower))


@pytest.mark.parametrize("name", ROUNDED_BACKWARD)
def test_gradients_are_those_of_the_operator_with_a_dtype(name: str, lower: torch.dtype) -> None:
    operands = call_operands(lower)
    with PinnedPolicy(AUTOCAST_KEY, NATIVE):
        (gradient, *_) = gradients_of(CASES[name], operands, lower)
    (expected, *_) = gradients_of(ROUNDED_BACKWARD[name], operands)
    (wide, *_) = gradients_of(CASES[name], [widen(tensor) for tensor in operands])
    assert gradient is not None
    assert expected is not None
    assert wide is not None
    assert torch.equal(gradient, expected)
    assert not torch.equal(gradient, wide.to(lower)), "or it belongs to the other test"


def test_leaving_undoes_everything_after_errors_inside_of_operators_too() -> None:
    operands = x, *_ = call_operands(torch.bfloat16)
    native = {name: steps_of(functools.partial(op, *operands), torch.bfloat16) for name, op in CASES.items()}
    pin = PinnedPolicy(AUTOCAST_KEY, NATIVE)
    with pytest.raises(RuntimeError, match=re.escape("normalized_shape")), pin:
        steps_of(lambda: F.layer_norm(x, (63,)), torch.bfloat16)
    with pytest.raises(IndexError), pin, pin:
        steps_of(lambda: torch.softmax(x, 5), torch.bfloat16)
    assert not PINS.libraries
    for name, op in CASES.items():
        assert same_bits(steps_of(functools.partial(op, *operands), torch.bfloat16), native[name]), name


def test_an_error_inside_of_an_operator_leaves_the_pin_standing() -> None:
    x = values(torch.bfloat16, 8, 64)
    expected = steps_of(lambda: torch.softmax(x.float(), -1))
    with PinnedPolicy(AUTOCAST_KEY, NATIVE):
        with pytest.raises(IndexError):
            steps_of(lambda: torch.softmax(x, 5), torch.bfloat16)
        assert same_bits(steps_of(lambda: torch.softmax(x, -1), torch.bfloat16), expected)


def test_two_pins_compute_the_same_as_one() -> None:
    x = values(torch.bfloat16, 8, 64)
    expected = steps_of(lambda: F.layer_norm(x.float(), (64,)))
    first, second = PinnedPolicy(AUTOCAST_KEY, NATIVE), PinnedPolicy(AUTOCAST_KEY, {})
    with first:
        with second:
            assert same_bits(steps_of(lambda: F.layer_norm(x, (64,)), torch.bfloat16), expected)
        assert same_bits(steps_of(lambda: F.layer_norm(x, (64,)), torch.bfloat16), expected)
    assert not same_bits(steps_of(lambda: F.layer_norm(x, (64,)), torch.bfloat16), expected)


@pytest.mark.parametrize(("pinned", "kept"), [(True, 4), (False, 2 + 4)])
def test_cross_entropy_keeps_its_logits_in_fp32(pinned: bool, kept: int) -> None:
    """By itself it is ``log_softmax`` in the format of the logits, then ``nll_loss`` in fp32, as on backends that do not list it; each result is kept."""
    rows, vocabulary = 64, 512
    hidden, weight = torch.randn(rows, 8).requires_grad_(), torch.randn(vocabulary, 8).requires_grad_()
    labels = torch.arange(rows)
    saved = SavedActivations([hidden, weight])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = F.linear(hidden, weight)
        with saved:
            if pinned:
                with PinnedPolicy(AUTOCAST_KEY, {}):
                    F.cross_entropy(logits, labels)
            else:
                F.nll_loss(F.log_softmax(logits, -1), labels)
    per_logit = {name: size / (rows * vocabulary) for name, size in saved.bytes.items() if name != "int64"}
    assert round(sum(per_logit.values())) == kept
