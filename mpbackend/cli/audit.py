"""``mpbackend audit``."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import click

from mpbackend.cli.options import emit, format_option, out_option, warn_unavailable
from mpbackend.errors import DocumentError
from mpbackend.granting import ON_UNSUPPORTED, OnUnsupported
from mpbackend.observe.audit_document import AuditDocument, load_audit
from mpbackend.plugins import Plugins, load_plugins
from mpbackend.report.audits import audit_report

WRITE = "write `mpbackend audit module:function --device KEY --recipe RECIPE`, or `mpbackend audit --diff a.json b.json`"


@click.command()
@click.argument("workload", required=False, metavar="MODULE:FUNCTION")
@click.option(
    "--device", default="cpu", show_default=True, metavar="KEY", help="A device of this machine (cpu, cpu:0, emu:h100), or the key of any device of a matrix."
)
@click.option("--recipe", default="bf16", show_default=True, help="Recipe, as `mpbackend plan` takes it.")
@click.option("--on-unsupported", type=click.Choice(ON_UNSUPPORTED), default="error", show_default=True, help="What to do about a refused format.")
@click.option(
    "--steps", type=click.IntRange(0, 10_000), default=0, show_default=True, help="Steps to time after the audited one; only on a device that is here."
)
@click.option("--strict", is_flag=True, help="Stop at the first operation that the device leaves to the host.")
@click.option("--full", is_flag=True, help="Show every row.")
@click.option("--diff", nargs=2, type=click.Path(path_type=Path), default=None, metavar="A B", help="Compare two audits that were written as JSON.")
@format_option("text", "md", "json")
@out_option
def command(
    workload: str | None,
    device: str,
    recipe: str,
    on_unsupported: str,
    steps: int,
    strict: bool,
    full: bool,
    diff: tuple[Path, Path] | None,
    output: str,
    out: Path | None,
) -> None:
    """Show which formats every operation of one training step really runs in, on a device or, without hardware, for one.

    MODULE:FUNCTION (or file.py:function) takes a torch device and returns (model, loss): loss() runs one forward pass and returns the scalar loss. A device
    that is not in this machine is audited with tensors without memory, under its own operator policy.
    """
    if (workload is None) == (diff is None):
        raise DocumentError("audit", found="neither a workload nor --diff" if workload is None else "a workload with --diff", remedy=WRITE)
    if diff is not None:
        from mpbackend.observe.audit_diff import audit_differences
        from mpbackend.observe.ledger import speed_text
        from mpbackend.report.audits import differences_report

        first, second = map(load_audit, diff)
        found = audit_differences(first, second)
        speed = speed_text(first, second, load_plugins().matrix()) if first.seconds and second.seconds else ""
        emit(differences_report(found, str(diff[0]), str(diff[1]), speed), output, found, out)
        return
    plugins = load_plugins()
    policy: OnUnsupported = next(known for known in get_args(OnUnsupported) if known == on_unsupported)
    audit = run(workload or "", device, recipe, plugins, policy, steps=steps, strict=strict)
    emit(audit_report(audit, full=full), output, audit, out)
    warn_unavailable(plugins)


def run(workload: str, device: str, recipe: str, plugins: Plugins, on_unsupported: OnUnsupported, *, steps: int, strict: bool) -> AuditDocument:
    """Audit on a device that is here, else without hardware.

    Raises:
        DocumentError: steps are to be timed, or fallbacks refused, on a device that is not here.
    """
    name = device.partition(":")[0]
    if name in plugins.backends or any(name in backend.device_types for backend in plugins.backends.values()):
        from mpbackend.observe.audit_run import audit_workload
        from mpbackend.observe.audit_workload import find_build
        from mpbackend.target import select

        target = select(device)
        return audit_workload(find_build(workload), target, target.plan(recipe, on_unsupported=on_unsupported), name=workload, steps=steps, strict=strict)
    if steps or strict:
        found = f"{device} is no device of this machine, and tensors without memory take no time and fall back to nothing"
        raise DocumentError("--steps" if steps else "--strict", found=found, remedy="leave it out, or name a device that `mpbackend devices` lists")
    from mpbackend.observe.audit_target import audit_target

    return audit_target(workload, device, recipe, on_unsupported=on_unsupported)
