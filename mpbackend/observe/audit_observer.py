"""The observer of an audit: operations by module, shapes of products, casts, fallbacks to the host, and calls that go wrong on other devices."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from mpbackend.errors import BackendError
from mpbackend.observe.audit import Observer, Phase
from mpbackend.observe.audit_document import Finding, folded_path
from mpbackend.observe.audit_modules import ModulePaths
from mpbackend.observe.audit_rules import LARGEST_ROOT, loses_layout, mismatch, shape_of, squares_in_fp16, unscales_bf16, widened
from mpbackend.observe.flops import Operation
from mpbackend.observe.memory import dtype_name, dtypes, nested_tensors

Dtypes = tuple[torch.dtype, ...]
LeavesDevice = Callable[[Any], bool]
"""Tells of an ``OpOverload`` whether the device leaves it to the host."""

SCALAR = "_local_scalar_dense"
"""Reads a number from the device, for which a tensor without memory has no answer."""


class Auditor(Observer):
    """Observes a step for an audit. What ``Observer`` says about entering it holds here too.

    Args:
        paths: says which module runs.
        leaves_device: tells which operations the device leaves to the host; None for none.
        strict: raise at the first of them.
        autocast: format of autocast, named as the cause of operands of unlike formats; empty for none.
        answers: numbers to give where the step reads the device and tensors have no memory; None reads.
        repairs: go on where operands have unlike formats, in the format of the first.

    Attributes:
        rows: (phase, module, operation, formats in, formats out, formats of the operands) to [calls, FLOPs].
        products: (phase, operation, a, b, m, n, k) to [calls, FLOPs].
        cast_rows: (phase, module, source, target) to [count, bytes].
        fallbacks: (phase, operation, timed) to [count, bytes, seconds].
        findings: what was found, each once.
        timed: whether a timed step is running.
    """

    def __init__(
        self,
        paths: ModulePaths,
        *,
        leaves_device: LeavesDevice | None = None,
        strict: bool = False,
        autocast: str = "",
        answers: Callable[[torch.Tensor], Any] | None = None,
        repairs: bool = False,
    ) -> None:
        super().__init__()
        self.paths = paths
        self.answers = answers
        self._leaves = leaves_device
        self._strict = strict
        self._autocast = autocast
        self._repairs = repairs
        self._module = ""
        self.rows: dict[tuple[Phase, str, Operation, Dtypes, Dtypes, Dtypes], list[int]] = {}
        self.products: dict[tuple[Phase, str, str, str, int, int, int], list[int]] = {}
        self.cast_rows: dict[tuple[Phase, str, str, str], list[int]] = {}
        self.fallbacks: dict[tuple[Phase, str, bool], list[float]] = {}
        self.findings: dict[Finding, None] = {}
        self.timed = False

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Mark a timed step: what it leaves to the host is flagged."""
        self.timed = True
        try:
            yield
        finally:
            self.timed = False

    def find(self, rule: str, where: str, message: str, remedy: str) -> None:
        """Keep a finding; equal ones once."""
        self.findings[Finding(rule=rule, where=where, message=message, remedy=remedy)] = None

    def _place(self, op: Operation) -> str:
        return f"{folded_path(self._module) or 'outside of every module'}, {op.name}"

    def _call(self, func: Any, op: Operation, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self.answers is not None and op.base == SCALAR:
            return self.answers(args[0])
        self._module = self.paths.path()
        unlike = mismatch(op, args)
        if unlike is not None:
            self._tell_mismatch(op, unlike.formats)
            if self._repairs:
                args = widened(args, unlike)
        if self._leaves is None or op.ignored or not self._leaves(func):
            return func(*args, **kwargs)
        return self._on_host(func, op, args, kwargs)

    def _tell_mismatch(self, op: Operation, formats: tuple[str, ...]) -> None:
        cause = ""
        if self._autocast in formats and self.present_phase == "forward":
            cause = f"; the {self._autocast} one comes from autocast, under which products return {self._autocast}"
        message = f"operands in {' and '.join(dict.fromkeys(formats))}{cause}: a device raises where one promotes or looks away"
        self.find("mixed-formats", self._place(op), message, "cast one of them to the other's dtype: y.to(x.dtype)")

    def _on_host(self, func: Any, op: Operation, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self._strict:
            raise BackendError(
                f"{op.name} on the device", found="it has no kernel there and falls back to the host", remedy="replace it, or audit without strict"
            )
        start = time.perf_counter()
        out = func(*args, **kwargs)
        seconds = time.perf_counter() - start
        row = self.fallbacks.setdefault((self.present_phase, op.name, self.timed), [0, 0, 0.0])
        row[0] += 1
        row[1] += sum(tensor.numel() * tensor.element_size() for tensor in (*nested_tensors(list(args)), *nested_tensors(dict(kwargs)), *nested_tensors(out)))
        row[2] += 0.0 if self._repairs else seconds
        return out

    def _record(self, func: Any, op: Operation, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> tuple[int, Dtypes]:
        flops, operands = super()._record(func, op, args, kwargs, out)
        phase = self.present_phase
        key = (phase, self._module, op, dtypes((*args, *kwargs.values())), dtypes((out,)), operands)
        row = self.rows.setdefault(key, [0, 0])
        row[0] += 1
        row[1] += flops
        shape = shape_of(op, args) if flops else None
        if shape is not None:
            product = self.products.setdefault((phase, op.name, dtype_name(operands[0]), dtype_name(operands[1]), *shape), [0, 0])
            product[0] += 1
            product[1] += flops
        self._look(op, args, out)
        return flops, operands

    def _look(self, op: Operation, args: tuple[Any, ...], out: Any) -> None:
        """Apply the rules about single calls."""
        if squares_in_fp16(op, args, out):
            message = f"squares in fp16: above {LARGEST_ROOT:.1f} the square is inf, and what is divided by its root becomes 0"
            self.find("square-in-fp16", self._place(op), message, "square in fp32: x.float().pow(2), or use the norm that torch has")
        if loses_layout(args, out):
            self.find(
                "channels-last-lost", self._place(op), "takes channels last and returns the plain order", "keep the layout: memory_format=torch.channels_last"
            )
        if unscales_bf16(op, args):
            message = "unscales bf16 gradients, for which accelerators have no kernel (github.com/pytorch/pytorch/issues/127176); the CPU has one"
            self.find("unscale-bf16", self._place(op), message, "no loss scaling with bf16, or gradients in fp32")

    def _cast(self, phase: Phase, source: torch.Tensor, target: torch.Tensor) -> None:
        super()._cast(phase, source, target)
        if source.dtype != target.dtype:
            row = self.cast_rows.setdefault((phase, self._module, dtype_name(source.dtype), dtype_name(target.dtype)), [0, 0])
            row[0] += 1
            row[1] += target.numel() * target.element_size()
