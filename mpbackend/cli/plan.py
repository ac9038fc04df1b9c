"""``mpbackend plan``."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import click

from mpbackend.cli.options import emit, format_option, out_option, warn_unavailable
from mpbackend.granting import ON_UNSUPPORTED, OnUnsupported
from mpbackend.plugins import load_plugins
from mpbackend.report.plans import plan_document, plan_report
from mpbackend.selection import plan


@click.command()
@click.argument("recipe")
@click.option("--device", required=True, metavar="KEY", help="Device key, of this machine or of a matrix.")
@click.option("--on-unsupported", type=click.Choice(ON_UNSUPPORTED), default="error", show_default=True, help="What to do about a refused format.")
@click.option("--strict", is_flag=True, help="Refuse what no source speaks about instead of warning.")
@click.option("--micro-batches", type=int, default=1, show_default=True, help="Micro-batches a step.")
@format_option("text", "md", "json")
@out_option
def command(recipe: str, device: str, on_unsupported: str, strict: bool, micro_batches: int, output: str, out: Path | None) -> None:
    """Show what RECIPE becomes on a device, with a reason and a source for every decision.

    RECIPE is a preset, with changes if wanted: bf16, fp16:loss_scale.init=4096,reduce.format=fp16. `mpbackend recipes` lists them.
    """
    policy: OnUnsupported = next(known for known in get_args(OnUnsupported) if known == on_unsupported)
    plugins = load_plugins()
    made = plan(recipe, device, plugins=plugins, on_unsupported=policy, strict=strict, micro_batches=micro_batches)
    emit(plan_report(made), output, plan_document(made), out)
    warn_unavailable(plugins)
