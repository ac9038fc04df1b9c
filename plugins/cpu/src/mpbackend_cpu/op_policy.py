"""What autocast does with each operator on a CPU, observed on the installed torch.

The CPU's list is compiled into torch and stands in no header. So each operator that has an autocast kernel is called under autocast on operands whose format
tells the policies apart, and the call is stopped at the first operator below autocast: no kernel computes anything.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import chain, repeat
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mpbackend.backend import PolicyKind

AUTOCAST_KEY = "AutocastCPU"
NAMESPACE = "aten::"

LOWER = torch.bfloat16
"""Autocast format of the probe."""
THIRD = torch.float16
"""Neither the autocast format nor fp32: what an operand of it is cast to is the policy."""

BY_CAST: dict[torch.dtype, PolicyKind] = {LOWER: "lower", torch.float32: "fp32"}

FILLERS: dict[str, Any] = {"int": 1, "SymInt": 1, "float": 1.0, "number": 1, "bool": False, "str": "", "List[int]": [1], "List[SymInt]": [1]}
"""Values for arguments that have no default, by type of the schema. They need not make sense: only the operands are looked at."""


class Classified(NamedTuple):
    """Autocast's policy by operator (``name`` or ``name.overload``), and the operators whose policy could not be observed."""

    policy: dict[str, PolicyKind]
    unclassified: tuple[str, ...]


class _ReachedError(Exception):
    """Stops a call; carries what the first operator below autocast casts to, or None when it is no cast."""

    def __init__(self, target: torch.dtype | None) -> None:
        self.target = target
        super().__init__(str(target))


class _Stop(TorchDispatchMode):
    """Raises at the first operator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _ReachedError((kwargs or {}).get("dtype") if func is torch.ops.aten._to_copy.default else None)


@functools.cache
def classify() -> Classified:
    """Classify every operator that has an autocast kernel for the CPU. Takes some 30 ms once, and loads torch._dynamo as any dispatch mode does."""
    found: dict[str, PolicyKind | None] = {}
    for qualified in sorted(torch._C._dispatch_get_all_op_names()):
        if qualified.startswith(NAMESPACE) and torch._C._dispatch_has_kernel_for_dispatch_key(qualified, AUTOCAST_KEY):
            found[qualified.removeprefix(NAMESPACE)] = observe(qualified.removeprefix(NAMESPACE))
    policy = {name: kind for name, kind in found.items() if kind is not None}
    return Classified(policy, tuple(name for name, kind in found.items() if kind is None))


def observe(name: str) -> PolicyKind | None:
    """Return the policy of one operator; None when it casts in none of the ways that are known."""
    base, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, base), overload or "default")
    target = first_cast(op, THIRD, THIRD)
    if target in BY_CAST:
        return BY_CAST[target]
    return "promote" if first_cast(op, LOWER, torch.float32) is torch.float32 else None


def first_cast(op: Any, first: torch.dtype, others: torch.dtype) -> torch.dtype | None:
    """Return what autocast casts the first operand to, or None when the call gets below autocast without a cast.

    Args:
        op: the operator.
        first: format of its first operand.
        others: format of all others.
    """
    operands = (torch.ones(2, 2, dtype=dtype) for dtype in chain([first], repeat(others)))
    positional = [fill(argument, operands) for argument in op._schema.arguments if not argument.kwarg_only]
    named = {argument.name: fill(argument, operands) for argument in op._schema.arguments if argument.kwarg_only}
    try:
        with torch.autocast("cpu", dtype=LOWER), _Stop():  # type: ignore[no-untyped-call] # torch's dispatch mode is not annotated
            op(*positional, **named)
    except _ReachedError as reached:
        return reached.target
    except (RuntimeError, ValueError, IndexError, TypeError):
        return None  # the operator refused the fillers before anything was cast
    return None


def fill(argument: Any, operands: Iterator[torch.Tensor]) -> Any:
    """Return a value for one argument of a schema."""
    kind = str(argument.type)
    if kind == "Tensor":
        return next(operands)
    if kind == "List[Tensor]":
        return [next(operands), next(operands)]
    return argument.default_value if argument.has_default_value() else FILLERS.get(kind)
