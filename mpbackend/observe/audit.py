"""What was really computed and held: the operations of a step with their formats, and the bytes of the five classes.

Everything here costs microseconds per operation, so a session uses it on the first step only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import msgspec
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from mpbackend.observe.flops import Operation
from mpbackend.observe.memory import dtype_name, dtypes

Phase = Literal["forward", "backward", "optimizer"]

PAIR = " × "  # noqa: RUF001 - the multiplication sign is meant, as in reports
"""Joins the formats of the operands of a product where they differ."""


class OpCount(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of one operation with the same formats.

    Attributes:
        phase: when it ran.
        op: name with its namespace, ``aten::mm``.
        inputs: formats of its tensor arguments in order; a list of tensors gives each of its formats once.
        outputs: formats of its results, likewise.
        calls: number of calls.
        flops: floating-point operations, a multiply-add counted as two; 0 where it is no matrix product.
        compute: formats of the operands of a matrix product, one name when they are equal; empty otherwise.
    """

    phase: Phase
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    calls: int
    flops: int
    compute: str = ""


class CastCount(msgspec.Struct, frozen=True, kw_only=True):
    """Conversions from one format to another: how many tensors, and the bytes written."""

    phase: Phase
    source: str
    target: str
    count: int
    bytes: int


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    """What an ``Observer`` saw.

    Attributes:
        effective: the effective compute format, for people: ``bf16``, or ``bf16 98 % · fp32 2 %``; ``none`` when nothing was multiplied,
            ``unknown`` when only ``uncounted`` operations did.
        shares: share of the matrix-product FLOPs of forward and backward by operand format, largest first; sums to 1 unless empty.
        shares_by_phase: the same for each phase that multiplied.
        flops: matrix-product FLOPs of forward and backward.
        casts: conversions in all phases.
        cast_bytes: bytes they wrote.
        cast_table: the conversions by phase and formats, most bytes first.
        ops: every operation, most FLOPs first.
        uncounted: operations that hide matrix products but have no formula; the shares leave them out.
    """

    effective: str
    shares: dict[str, float]
    shares_by_phase: dict[str, dict[str, float]]
    flops: int
    casts: int
    cast_bytes: int
    cast_table: tuple[CastCount, ...]
    ops: tuple[OpCount, ...]
    uncounted: tuple[str, ...]

    @property
    def products(self) -> dict[str, dict[str, int]]:
        """Calls of each operation that multiplies matrices, by the formats of its operands."""
        found: dict[str, dict[str, int]] = {}
        for op in self.ops:
            if op.compute:
                calls = found.setdefault(f"{op.phase} {op.op}", {})
                calls[op.compute] = calls.get(op.compute, 0) + op.calls
        return found

    @property
    def conversions(self) -> dict[str, dict[str, int]]:
        """Conversions of each phase by formats."""
        found: dict[str, dict[str, int]] = {}
        for cast in self.cast_table:
            found.setdefault(cast.phase, {})[f"{cast.source} to {cast.target}"] = cast.count
        return found


class Observer(TorchDispatchMode):
    """Records every operation inside the context with the formats it was asked to work in.

    Enter it last, on top of any mode that emulates arithmetic: it then sees the operands as the model gave them, and not what the emulation does with them
    below. It may be entered again for the next pass; counts add up. The backward pass is told apart by itself, ``phase`` marks the optimizer. What fp32
    operands are computed in (tf32, say) is decided by a switch and cannot be seen here. A plugin's own products are counted when it registers them with
    ``torch.utils.flop_counter.register_flop_formula``.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch leaves it unannotated
        self._phase: Phase | None = None
        self._ops: dict[Any, Operation] = {}
        self._rows: dict[tuple[Phase, Any, tuple[torch.dtype, ...], tuple[torch.dtype, ...], tuple[torch.dtype, ...]], list[int]] = {}
        self._casts: dict[tuple[Phase, torch.dtype, torch.dtype], list[int]] = {}
        self._uncounted: dict[str, None] = {}

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Book what runs inside under ``name``."""
        before, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = before

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Run ``func`` one mode further down and record it."""
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # the subclass runs first; what it computes below comes back here
        kwargs = kwargs or {}
        op = self._ops.get(func)
        if op is None:
            op = self._ops[func] = Operation(func)
        if op.composite:
            with self:
                return func.decompose(*args, **kwargs)
        out = self._call(func, op, args, kwargs)
        if not op.ignored:
            self._record(func, op, args, kwargs, out)
        return out

    def _call(self, func: Any, op: Operation, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return func(*args, **kwargs)

    @property
    def present_phase(self) -> Phase:
        """The phase of an operation that runs now."""
        return self._phase or ("forward" if torch._C._current_graph_task_id() == -1 else "backward")

    def _record(self, func: Any, op: Operation, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> tuple[int, tuple[torch.dtype, ...]]:
        """Count a call; returns its FLOPs and the formats of the operands of its product."""
        phase = self.present_phase
        flops = 0
        operands: tuple[torch.dtype, ...] = ()
        if op.flops is not None:
            try:
                flops, operands = op.flops(args, kwargs, out), tuple(args[position].dtype for position in op.operands)
            except (AssertionError, AttributeError, IndexError, RuntimeError, TypeError, ValueError):  # a stranger's formula, or shapes it does not foresee
                self._uncounted[op.name] = None
        elif op.hides_products:
            self._uncounted[op.name] = None
        key = (phase, func, dtypes((*args, *kwargs.values())), dtypes((out,)), operands)
        row = self._rows.setdefault(key, [0, 0])
        row[0] += 1
        row[1] += flops
        if op.base == "_to_copy":
            self._cast(phase, args[0], out)
        elif op.base == "copy_":
            self._cast(phase, args[1], args[0])
        elif op.base == "_foreach_copy_":
            for target, source in zip(args[0], args[1], strict=True):
                self._cast(phase, source, target)
        return flops, operands

    def _cast(self, phase: Phase, source: torch.Tensor, target: torch.Tensor) -> None:
        if source.dtype != target.dtype:
            cast = self._casts.setdefault((phase, source.dtype, target.dtype), [0, 0])
            cast[0] += 1
            cast[1] += target.numel() * target.element_size()

    def summary(self) -> Audit:
        """Return what was seen so far."""
        ops = [
            OpCount(
                phase=phase,
                op=self._ops[func].name,
                inputs=tuple(map(dtype_name, inputs)),
                outputs=tuple(map(dtype_name, outputs)),
                calls=calls,
                flops=flops,
                compute=PAIR.join(dict.fromkeys(map(dtype_name, operands))),
            )
            for (phase, func, inputs, outputs, operands), (calls, flops) in self._rows.items()
        ]
        casts = [
            CastCount(phase=phase, source=dtype_name(source), target=dtype_name(target), count=count, bytes=size)
            for (phase, source, target), (count, size) in self._casts.items()
        ]
        trained = [op for op in ops if op.phase != "optimizer"]
        by_phase = {phase: shares_of(op for op in ops if op.phase == phase) for phase in ("forward", "backward", "optimizer")}
        return Audit(
            effective=effective_text(shares_of(trained)) or ("unknown" if self._uncounted else "none"),
            shares=shares_of(trained),
            shares_by_phase={phase: shares for phase, shares in by_phase.items() if shares},
            flops=sum(op.flops for op in trained),
            casts=sum(cast.count for cast in casts),
            cast_bytes=sum(cast.bytes for cast in casts),
            cast_table=tuple(sorted(casts, key=lambda cast: -cast.bytes)),
            ops=tuple(sorted(ops, key=lambda op: -op.flops)),
            uncounted=tuple(self._uncounted),
        )


def shares_of(ops: Iterable[OpCount]) -> dict[str, float]:
    """Return the share of the FLOPs by operand format, largest first; empty when there are none."""
    flops: dict[str, int] = {}
    for op in ops:
        if op.flops:
            flops[op.compute] = flops.get(op.compute, 0) + op.flops
    total = sum(flops.values())
    return {name: count / total for name, count in sorted(flops.items(), key=lambda item: -item[1])}


def effective_text(shares: Mapping[str, float]) -> str:
    """Return shares for people, empty for none; a format that has a part never reads as 0 %, and one that lacks a part never as 100 %."""
    if len(shares) < 2:
        return "".join(shares)
    return " · ".join(f"{name} {'<1' if share < 0.01 else '>99' if share > 0.99 else f'{share:.0%}'[:-1]} %" for name, share in shares.items())


class _Saved:
    """A tensor saved for backward; tells when autograd lets go of it."""

    __slots__ = ("owner", "storage", "tensor")

    def __init__(self, tensor: torch.Tensor, storage: StorageWeakRef, owner: SavedActivations) -> None:
        self.tensor, self.storage, self.owner = tensor, storage, owner

    def __del__(self) -> None:
        self.owner._release(self.storage)


class SavedActivations(torch.autograd.graph.saved_tensors_hooks):
    """Measures what forward passes inside the context keep for backward: the storages of saved tensors, each once while it is kept.

    It may be entered again: what backward let go of in between no longer counts.

    Args:
        held: tensors that are held anyway and not counted: parameters and buffers.

    Attributes:
        bytes: the most bytes kept at one time, by format; a storage counts whole, in the format of the first tensor saved on it.
        unmeasured: saved tensors without one storage (sparse ones), which are not in ``bytes``.
    """

    def __init__(self, held: Iterable[torch.Tensor]) -> None:
        self._held = {StorageWeakRef(tensor.untyped_storage()) for tensor in held}
        self._kept: dict[StorageWeakRef, tuple[int, str, int]] = {}  # storage: saved tensors on it, format, bytes
        self._now: dict[str, int] = {}
        self.bytes: dict[str, int] = {}
        self.unmeasured = 0
        super().__init__(self._pack, lambda saved: saved.tensor if isinstance(saved, _Saved) else saved)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Saved:
        if tensor.layout is not torch.strided:
            self.unmeasured += 1
            return tensor
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        if reference in self._held:
            return tensor
        count, name, size = self._kept.get(reference, (0, dtype_name(tensor.dtype), storage.nbytes()))
        self._kept[reference] = (count + 1, name, size)
        if count == 0:
            self._now[name] = self._now.get(name, 0) + size
            if sum(self._now.values()) > sum(self.bytes.values()):
                self.bytes = {name: size for name, size in sorted(self._now.items()) if size}
        return _Saved(tensor, reference, self)

    def _release(self, reference: StorageWeakRef) -> None:
        count, name, size = self._kept.pop(reference)
        if count > 1:
            self._kept[reference] = (count - 1, name, size)
        else:
            self._now[name] -= size
