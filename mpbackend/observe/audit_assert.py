"""An audit in a test: what must hold of the operations, casts and requests of a step. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase

from mpbackend.observe.audit_document import AuditDocument

MOST_LINES = 20
"""Lines that a failure shows."""


def assert_audit(
    audit: AuditDocument,
    *,
    compute: Mapping[str, str] | None = None,
    findings: Collection[str] = (),
    fallbacks: int = 0,
    casts: int | None = None,
    requested: bool = True,
) -> None:
    """Assert what an audit found.

    Args:
        audit: the audit.
        compute: pattern (``fnmatch``) of ``phase module operation`` to the format that every such operation must compute in: ``"* aten::*mm": "bf16"``. A
            pattern that matches no operation fails.
        findings: rules that are expected; each must be found, and no other may be.
        fallbacks: most calls that the device may leave to the host.
        casts: most conversions; None for any number.
        requested: whether every role must have run as granted.

    Raises:
        AssertionError: with a line for each thing that does not hold.
    """
    __tracebackhide__ = True
    wrong = list(faults(audit, compute or {}, findings, fallbacks, casts, requested=requested))
    if wrong:
        more = [f"and {len(wrong) - MOST_LINES} more"] if len(wrong) > MOST_LINES else []
        raise AssertionError("\n".join([f"audit of {audit.workload}, {audit.recipe} on {audit.device}:", *wrong[:MOST_LINES], *more]))


def faults(audit: AuditDocument, compute: Mapping[str, str], findings: Collection[str], fallbacks: int, casts: int | None, *, requested: bool) -> Iterator[str]:
    """Yield a line for each thing that does not hold; arguments as those of ``assert_audit``."""
    for pattern, wanted in compute.items():
        matching = [row for row in audit.ops if fnmatchcase(f"{row.phase} {row.module} {row.op}", pattern)]
        if not matching:
            yield f"no operation matches {pattern!r}"
        for row in matching:
            if row.compute != wanted:
                yield f"{row.phase} {row.module} {row.op} computes in {row.compute or 'no format'}, not in {wanted} ({row.calls} calls)"
    found = {finding.rule for finding in audit.findings}
    for finding in audit.findings:
        if finding.rule not in findings:
            yield f"found {finding.rule}: {finding.where}: {finding.message}"
    for rule in findings:
        if rule not in found:
            yield f"did not find {rule}"
    left = sum(row.count for row in audit.fallbacks)
    if left > fallbacks:
        yield f"{left} calls were left to the host, at most {fallbacks} may be"
    count = sum(row.count for row in audit.casts)
    if casts is not None and count > casts:
        yield f"{count} conversions, at most {casts} may be"
    if requested:
        for request in audit.requests:
            if request.same is False:
                yield f"{request.role}: granted {request.granted}, ran {request.ran}"
