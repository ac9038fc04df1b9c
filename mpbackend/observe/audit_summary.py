"""From an observer and a plan to the rows of an audit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from mpbackend.capability import Row
from mpbackend.formats import FORMATS
from mpbackend.matrix import Matrix
from mpbackend.observe.audit import PAIR, Audit
from mpbackend.observe.audit_document import CastRow, FallbackRow, OpRow, ProductRow, RequestRow
from mpbackend.observe.audit_observer import Auditor
from mpbackend.observe.memory import dtype_name
from mpbackend.planning import Plan

CONVOLUTION = "convolution"


def op_rows(auditor: Auditor, plan: Plan) -> tuple[OpRow, ...]:
    """Return the operations, most FLOPs first, then most calls."""
    joined: dict[tuple[str, ...], list[int]] = {}
    rows: dict[tuple[str, ...], OpRow] = {}
    trained = sum(flops for (phase, *_), (_, flops) in auditor.rows.items() if phase != "optimizer")
    for (phase, module, op, inputs, outputs, operands), (calls, flops) in auditor.rows.items():
        row = OpRow(
            phase=phase,
            module=module,
            op=op.name,
            inputs=tuple(map(dtype_name, inputs)),
            compute=compute_of(plan, op.base, operands, inputs),
            outputs=tuple(map(dtype_name, outputs)),
            calls=calls,
            flops=flops,
        )
        key = (phase, module, op.name, *row.inputs, "->", *row.outputs, row.compute)
        rows.setdefault(key, row)
        counts = joined.setdefault(key, [0, 0])
        counts[0] += calls
        counts[1] += flops
    found = [
        OpRow(
            phase=row.phase,
            module=row.module,
            op=row.op,
            inputs=row.inputs,
            compute=row.compute,
            outputs=row.outputs,
            calls=joined[key][0],
            flops=joined[key][1],
            share=joined[key][1] / trained if trained and row.phase != "optimizer" else 0.0,
        )
        for key, row in rows.items()
    ]
    return tuple(sorted(found, key=lambda row: (-row.flops, -row.calls, row.phase, row.module, row.op)))


def compute_of(plan: Plan, base: str, operands: Sequence[torch.dtype], inputs: Sequence[torch.dtype]) -> str:
    """Return the format that an operation computes in.

    A product of fp32 operands is computed in what the plan granted for its kind, since a switch decides that (tf32). The widest floating-point operand stands
    for every other operation.
    """
    if operands:
        names = list(dict.fromkeys(map(dtype_name, operands)))
        return PAIR.join(granted_inside(plan, base, name) for name in names)
    reals = [dtype for dtype in inputs if dtype.is_floating_point]
    return dtype_name(max(reals, key=lambda dtype: dtype.itemsize)) if reals else ""


def granted_inside(plan: Plan, base: str, operand: str) -> str:
    """Return the format that products of an operand format are computed in under a plan: another one of the same storage where the plan grants it."""
    kind = "conv" if CONVOLUTION in base else "matmul"
    for decision in plan.decisions:
        granted = decision.granted
        if decision.role == "compute.forward" and decision.op == kind and granted in FORMATS and granted != operand and FORMATS[granted].storage == operand:
            return granted
    return operand


def product_rows(auditor: Auditor, plan: Plan, matrix: Matrix, total: int) -> tuple[ProductRow, ...]:
    """Return the products by shape, most FLOPs first, with the dimensions that miss the alignment of the target's rows.

    Args:
        auditor: what was seen.
        plan: says what operands of a format are computed in, whose rows then speak.
        matrix: the facts.
        total: FLOPs of the audit, for the shares.
    """
    found = [
        ProductRow(
            phase=phase,
            op=op,
            a=a,
            b=b,
            m=m,
            n=n,
            k=k,
            calls=calls,
            flops=flops,
            share=flops / total if total and phase != "optimizer" else 0.0,
            misses=misses(matrix, plan.device.arch, (granted_inside(plan, op, a), granted_inside(plan, op, b)), {"m": m, "n": n, "k": k}),
        )
        for (phase, op, a, b, m, n, k), (calls, flops) in auditor.products.items()
    ]
    return tuple(sorted(found, key=lambda row: (-row.flops, row.phase, row.op)))


def misses(matrix: Matrix, arch: str, pair: tuple[str, str], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the dimensions that are no multiple of what every path needs which the matrix has for the operands; empty when one path takes them, or none says.

    Args:
        matrix: the facts.
        arch: architecture.
        pair: formats of the operands.
        sizes: m, n and k.
    """
    return min((tuple(missed(row, sizes)) for row in aligned_rows(matrix, arch, pair)), key=len, default=())


def aligned_rows(matrix: Matrix, arch: str, pair: tuple[str, str]) -> list[Row]:
    """Return the rows that state the sizes which a product of two formats needs on an architecture."""
    if arch not in matrix.archs:
        return []
    return [row for row in matrix.rows(arch, op="matmul", a=pair[0], b=pair[1]) if row.align is not None and row.level in ("native", "library")]


def missed(row: Row, sizes: Mapping[str, int]) -> Iterator[str]:
    """Yield the dimensions that are no multiple of what a row needs."""
    for name, size in sizes.items():
        needed = getattr(row.align, name)
        if isinstance(needed, int) and size % needed:
            yield f"{name}={size} not a multiple of {needed}"


def unaligned_notes(products: Sequence[ProductRow], plan: Plan, matrix: Matrix) -> list[str]:
    """Return a sentence for each pair of formats that was multiplied and whose sizes no row states: nothing is said about its shapes then."""
    arch = plan.device.arch
    pairs = dict.fromkeys((granted_inside(plan, row.op, row.a), granted_inside(plan, row.op, row.b)) for row in products)
    unknown = [PAIR.join(dict.fromkeys(pair)) for pair in pairs if not aligned_rows(matrix, arch, pair)]
    return [f"No source states the sizes that products in {', '.join(unknown)} need on {arch}; their shapes were not judged."] if unknown else []


def cast_rows(auditor: Auditor) -> tuple[CastRow, ...]:
    """Return the conversions, most bytes first."""
    found = [
        CastRow(phase=phase, module=module, source=source, target=target, count=count, bytes=size)
        for (phase, module, source, target), (count, size) in auditor.cast_rows.items()
    ]
    return tuple(sorted(found, key=lambda row: (-row.bytes, row.phase, row.module, row.source, row.target)))


def fallback_rows(auditor: Auditor) -> tuple[FallbackRow, ...]:
    """Return what the device left to the host, longest first."""
    found = [
        FallbackRow(phase=phase, op=op, count=int(count), bytes=int(size), seconds=seconds, timed=timed)
        for (phase, op, timed), (count, size, seconds) in auditor.fallbacks.items()
    ]
    return tuple(sorted(found, key=lambda row: (-row.seconds, -row.count, row.op)))


def request_rows(plan: Plan, seen: Audit, classes: Mapping[str, Mapping[str, int]]) -> Iterator[RequestRow]:
    """Yield what was asked, granted and run, role by role.

    Args:
        plan: the plan.
        seen: the products.
        classes: bytes of the five classes by format.
    """
    for phase, roles in (("forward", ("compute.forward",)), ("backward", ("compute.dgrad", "compute.wgrad"))):
        shares = seen.shares_by_phase.get(phase, {})
        beside = next((storage_of(d.granted) for d in plan.decisions if d.role == "compute.forward"), "")
        for role in roles:
            decision = next((d for d in plan.decisions if d.role == role), None)
            if decision is not None:
                stored = storage_of(decision.granted)
                ran = ", ".join(f"{name} {share:.1%}" for name, share in shares.items()) or "no product seen"
                yield RequestRow(
                    role=role, asked=decision.asked, granted=decision.granted, ran=ran, same=multiplied(shares, stored, beside) if shares else None
                )
    flat = {role: str(value) for role, value in plan.effective.flat().items()}
    extra = {"fp32": ("fp32",), "kahan": (flat["params"],)}  # what a master adds to the optimizer state
    held = {"params": "parameters", "grads": "gradients", "optimizer.exp_avg": "optimizer state"}
    for role, klass in held.items():
        formats = classes.get(klass, {})
        wanted = {flat[role]} if klass != "optimizer state" else {flat[role], flat["optimizer.exp_avg_sq"], *extra.get(flat["master"], ())}
        ran = ", ".join(f"{name} {size:,} B" for name, size in formats.items()) or "nothing held"
        yield RequestRow(role=role, asked=flat[role], granted=flat[role], ran=ran, same=set(formats) <= wanted if formats else None)
    yield master_row(flat, classes.get("optimizer state", {}))


def storage_of(name: str) -> str:
    """Return the format that numbers of a format are stored in; the name itself where it is none."""
    return FORMATS[name].storage if name in FORMATS else name


def multiplied(shares: Mapping[str, float], asked: str, beside: str) -> bool:
    """Return whether every product had an operand of a format, and the other one of the same or of what forward products take.

    Args:
        shares: of FLOPs by operand format, or by both formats where they differ.
        asked: of a backward pass the format of the gradients, whose other operands are those of the forward pass.
        beside: format of the operands of forward products.
    """
    return all(asked in (pair := name.split(PAIR)) and set(pair) <= {asked, beside} for name in shares)


def master_row(flat: Mapping[str, str], state: Mapping[str, int]) -> RequestRow:
    """Return the row of what keeps the bits that 16-bit parameters lose: fp32 masters, or Kahan terms in the format of the parameters.

    Args:
        flat: the roles of the recipe.
        state: bytes of the optimizer state by format.
    """
    master = flat["master"]
    name = {"fp32": "fp32", "kahan": flat["params"]}.get(master, "")
    kept = state.get(name, 0) if flat["params"] != "fp32" else 0
    what = "masters and moments" if master == "fp32" else "Kahan terms"
    return RequestRow(role="master", asked=master, granted=master, ran=f"{name} {kept:,} B, {what}" if kept else "none", same=bool(kept) == bool(name))
