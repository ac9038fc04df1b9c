"""``mpbackend devices``."""

from __future__ import annotations

import click

from mpbackend.cli.options import emit, format_option, warn_unavailable
from mpbackend.plugins import load_plugins
from mpbackend.report.devices import found_report, known_document, known_report


@click.command()
@click.option("--known", is_flag=True, help="List every device that a matrix declares instead.")
@format_option("text", "json")
def command(known: bool, output: str) -> None:
    """List the devices of this machine, with cause and remedy where one is not usable."""
    plugins = load_plugins()
    if known:
        matrix = plugins.matrix()
        emit(known_report(matrix), output, known_document(matrix))
    else:
        devices = plugins.devices()
        emit(found_report(devices), output, devices)
    warn_unavailable(plugins)
