"""``mpbackend conformance``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from mpbackend.cli.options import emit, format_option, say, split_names
from mpbackend.conformance.evidence import Evidence, Result, load_evidence, write_evidence
from mpbackend.errors import DocumentError
from mpbackend.plugins import load_plugins
from mpbackend.report.conformance import check_report, conformance_report, parity_document, parity_report
from mpbackend.selection import select_device

FOLDER = Path("evidence")


@click.command()
@click.option("--backend", default="", metavar="BACKEND", help="Backend to check: its name, or a backend and address such as cpu:0.")
@click.option("--device", default="", metavar="DEVICE", help="Device of the backend: an index or a device key. Its first usable one when omitted.")
@click.option("--quick", is_flag=True, help="Leave out the sizes that take long.")
@click.option("--check", "checks", multiple=True, metavar="CHECK", help="Run this check only, and write no file; repeatable.")
@click.option("--expect", multiple=True, metavar="CHECK=REASON", help="A check that is known to fail, and why; one that passes fails. Repeatable.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=FOLDER, show_default=True, help="Folder for the evidence file.")
@click.option("--diff", nargs=2, type=click.Path(dir_okay=False, path_type=Path), metavar="A B", help="Compare two evidence files instead.")
@click.option("--list", "listing", is_flag=True, help="List the checks instead.")
@format_option("text", "md", "json")
@click.pass_context
def command(
    ctx: click.Context,
    backend: str,
    device: str,
    quick: bool,
    checks: tuple[str, ...],
    expect: tuple[str, ...],
    out: Path,
    diff: tuple[Path, Path] | None,
    listing: bool,
    output: str,
) -> None:
    """Check that a backend does what the contract and its own claims say, and write the results as evidence; or compare two devices' evidence.

    Exits with 1 when a check fails.
    """
    if sum((bool(backend), diff is not None, listing)) != 1:
        raise DocumentError("conformance", found="not exactly one of --backend, --diff and --list", remedy="write `mpbackend conformance --backend cpu`")
    if diff is not None:
        compare(diff, output)
    elif listing:
        show_checks(output)
    else:
        evidence = check(backend, device, quick, split_names(checks), announced(expect), quiet=output == "json")
        if not checks:
            say(f"evidence: {write_evidence(evidence, out)}", err=True)
        emit(conformance_report(evidence), output, evidence)
        if not evidence.passes:
            ctx.exit(1)


def check(backend: str, device: str, quick: bool, checks: Sequence[str], expected: dict[str, str], *, quiet: bool) -> Evidence:
    """Run the checks; tell the failures as they come unless ``quiet``."""
    if device and ":" in backend:
        raise DocumentError(f"--backend {backend} --device {device}", found="two addresses", remedy="give the device once")
    plugins = load_plugins()
    chosen = select_device(f"{backend}:{device}" if device else backend, plugins)
    from mpbackend.conformance.runner import run_checks

    def tell(result: Result) -> None:
        if result.outcome == "failed" and not quiet:
            say(f"failed: {result.check}: {result.detail}", err=True)

    return run_checks(chosen.backend, chosen.device, plugins=plugins, quick=quick, checks=checks or None, expected=expected, progress=tell)


def announced(texts: Sequence[str]) -> dict[str, str]:
    """Return the expected failures, check to reason.

    Raises:
        DocumentError: one has no reason, or a check is named twice.
    """
    found: dict[str, str] = {}
    for text in texts:
        name, _, reason = (part.strip() for part in text.partition("="))
        if not name or not reason:
            raise DocumentError(f"--expect {text!r}", found="no check and reason", remedy="write --expect 'matmul=the unit sums in fp16'")
        if name in found:
            raise DocumentError(f"--expect {text!r}", found=f"{name} is expected twice")
        found[name] = reason
    return found


def compare(paths: tuple[Path, Path], output: str) -> None:
    """Print the parity table of two evidence files."""
    a, b = (load_evidence(path) for path in paths)
    emit(parity_report(a, b), output, parity_document(a, b) if output == "json" else None)


def show_checks(output: str) -> None:
    """Print every check with its meaning."""
    from mpbackend.conformance.registry import CHECKS

    rows = [(entry.theme, name, entry.meaning) for name, entry in CHECKS.items()]
    emit(check_report(rows), output, [{"theme": theme, "check": name, "property": meaning} for theme, name, meaning in rows])
