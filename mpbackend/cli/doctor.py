"""``mpbackend doctor``."""

from __future__ import annotations

import importlib.metadata
import os
import platform

import click

from mpbackend import __version__
from mpbackend.cli.options import emit, format_option
from mpbackend.plugins import load_plugins
from mpbackend.report.devices import doctor_report
from mpbackend.selection import LOCAL_RANK, VARIABLE


@click.command()
@format_option("text", "json")
def command(output: str) -> None:
    """Show versions, plugins, devices and variables, with cause and remedy for what does not work."""
    plugins = load_plugins()
    plugins.matrix()
    devices = plugins.devices()
    document = {
        "environment": {
            "mpbackend": __version__,
            "python": f"{platform.python_implementation()} {platform.python_version()}",
            "platform": platform.platform(),
            "torch": installed_version("torch"),
        },
        "plugins": dict(sorted(plugins.distributions.items())),
        "variables": {name: os.environ.get(name, "not set") for name in (VARIABLE, LOCAL_RANK)},
    }
    emit(doctor_report(document, devices, plugins.unavailable), output, {**document, "devices": devices, "unavailable": plugins.unavailable})


def installed_version(distribution: str) -> str:
    """Return the version of a distribution without importing it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
