"""The table of autocast policies against the dispatcher of the installed torch_npu, and the pinned policy on top of it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import mpbackend
from mpbackend.backend import PolicyKind
from mpbackend.train.policy import PinnedPolicy, sensitive_ops
from mpbackend_ascend.op_policy import AUTOCAST_KEY, POLICY
from mpbackend_cpu.op_policy import fill

LOWER, THIRD = torch.float16, torch.bfloat16
"""Autocast's format, which every device takes; and one that is neither it nor fp32."""

BY_CAST: dict[torch.dtype | None, PolicyKind] = {LOWER: "lower", torch.float32: "fp32"}

INDICES = [torch.zeros(1, dtype=torch.int64)]
"""The indices of ``index_put``, which come between its two operands."""


class Reached(Exception):  # noqa: N818 - it stops a call, it reports no error
    """Carries what the first operator below autocast casts to."""

    def __init__(self, target: torch.dtype | None) -> None:
        self.target = target
        super().__init__(str(target))


class Stop(TorchDispatchMode):
    """Stops at the first operator: a cast, or one that was given the format of its result."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [value for value in (*args, *(kwargs or {}).values()) if isinstance(value, torch.dtype)]
        raise Reached(given[0] if given else None)


def first_cast(op: Any, first: torch.dtype, others: torch.dtype) -> torch.dtype | None:
    made = [torch.ones(2, 2, dtype=dtype, device="npu") for dtype in (first, *[others] * 9)]
    operands: Iterator[torch.Tensor] = chain(made, repeat(made[-1]))
    positional = [
        INDICES if str(argument.type) == "List[Optional[Tensor]]" else fill(argument, operands) for argument in op._schema.arguments if not argument.kwarg_only
    ]
    named = {argument.name: fill(argument, operands) for argument in op._schema.arguments if argument.kwarg_only}
    try:
        with torch.autocast("npu", dtype=LOWER), Stop():  # type: ignore[no-untyped-call] # torch's dispatch mode is not annotated
            op(*positional, **named)
    except Reached as reached:
        return reached.target
    except (RuntimeError, ValueError, IndexError, TypeError):
        return None
    return None


def test_104_names_are_those_of_the_wheel() -> None:
    registered = torch._C._dispatch_get_registrations_for_dispatch_key(AUTOCAST_KEY)
    assert {name.removeprefix("aten::") for name in registered} == set(POLICY)
    assert len(POLICY) == 104


def test_every_policy_is_what_the_wheel_does() -> None:
    seen: dict[str, PolicyKind] = {}
    for name, kind in POLICY.items():
        base, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, base), overload or "default")
        if kind == "banned":
            with pytest.raises(RuntimeError, match="unsafe to autocast"), torch.autocast("npu", dtype=LOWER):
                op(*[torch.ones(2, device="npu")] * 2)
            seen[name] = kind
            continue
        target = first_cast(op, THIRD, THIRD)
        if target in BY_CAST:
            seen[name] = BY_CAST[target]
        elif first_cast(op, LOWER, torch.float32) is torch.float32:
            seen[name] = "promote"
    differing = {name: (POLICY[name], kind) for name, kind in seen.items() if POLICY[name] != kind}
    assert differing == {}
    assert set(seen) == set(POLICY)


def test_pinned_policy_fills_the_gaps_and_is_undone(target: mpbackend.Target) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).half().to(target.device)

    def norm() -> torch.Tensor:
        with torch.autocast("npu", dtype=torch.float16):
            return torch.nn.functional.rms_norm(x, (8,))

    pinned = PinnedPolicy(AUTOCAST_KEY, POLICY)
    assert set(pinned.pinned) == {name for name in sensitive_ops() if POLICY.get(name) != "fp32"}
    assert {"rms_norm", "cross_entropy_loss"} <= set(pinned.pinned)
    assert norm().dtype is torch.float16, "torch_npu's list lacks it"
    with pinned:
        assert norm().dtype is torch.float32
        assert torch.equal(norm().cpu(), torch.nn.functional.rms_norm(x.cpu().float(), (8,)))
    assert norm().dtype is torch.float16


def test_cross_entropy_computes_its_log_softmax_in_fp32(target: mpbackend.Target) -> None:
    logits = (torch.randn(64, 512, generator=torch.Generator().manual_seed(1)) * 8).half()
    wanted = torch.arange(64)
    exact = torch.nn.functional.cross_entropy(logits.double(), wanted)
    with torch.autocast("npu", dtype=torch.float16):
        native = torch.nn.functional.cross_entropy(logits.to(target.device), wanted.to(target.device))
        with PinnedPolicy(AUTOCAST_KEY, POLICY):
            pinned = torch.nn.functional.cross_entropy(logits.to(target.device), wanted.to(target.device))
    assert abs(pinned.cpu().double() - exact) < 1e-5
    assert abs(native.cpu().double() - exact) > 10 * abs(pinned.cpu().double() - exact)
