"""``mpbackend recipes``."""

from __future__ import annotations

from pathlib import Path

import click

from mpbackend.cli.options import emit, format_option, out_option, split_names, warn_unavailable
from mpbackend.device import Device, device_from_matrix
from mpbackend.errors import DocumentError, PlanError
from mpbackend.matrix import Matrix
from mpbackend.planning import Plan, plan_recipe
from mpbackend.plugins import Plugins, load_plugins
from mpbackend.recipe import Recipe
from mpbackend.report.recipes import Cell, cells_report, describe_presets, describe_roles, presets_report, recipe_cell, roles_report


@click.command()
@click.option("--roles", is_flag=True, help="List every role with its default and what it allows.")
@click.option("--table", is_flag=True, help="Show every recipe on the devices given by --device.")
@click.option("--device", "devices", multiple=True, metavar="KEY", help="Devices of the table, joined by commas or repeated.")
@format_option("text", "md", "json")
@out_option
def command(roles: bool, table: bool, devices: tuple[str, ...], output: str, out: Path | None) -> None:
    """List the recipes, their roles, or what they become on devices."""
    keys = split_names(devices)
    if roles and table:
        raise DocumentError("--roles with --table", found="two listings", remedy="give one of them")
    if bool(keys) != table:
        found = "no device" if table else "--device without --table"
        raise DocumentError("recipes", found=found, remedy="write `mpbackend recipes --table --device KEY,KEY`; `mpbackend devices --known` lists the keys")
    if roles:
        listed = describe_roles()
        emit(roles_report(listed), output, listed, out)
        return
    plugins = load_plugins()
    if table:
        cells = fill_table(plugins, keys)
        emit(cells_report(cells), output, cells, out)
    else:
        descriptions = describe_presets(plugins.presets, plugins.owners)
        emit(presets_report(descriptions), output, descriptions, out)
    warn_unavailable(plugins)


def fill_table(plugins: Plugins, keys: tuple[str, ...]) -> list[Cell]:
    """Return every preset on every device, by device."""
    matrix = plugins.matrix()
    devices = {device.key: device for device in (device_from_matrix(matrix, key) for key in keys)}
    return [recipe_cell(matrix, recipe, key, plan_or_refusal(recipe, device, matrix)) for key, device in devices.items() for recipe in plugins.presets.values()]


def plan_or_refusal(recipe: Recipe, device: Device, matrix: Matrix) -> Plan | PlanError:
    """Return the plan of a recipe, or the refusal as a value."""
    try:
        return plan_recipe(recipe, device, matrix)
    except PlanError as refusal:
        return refusal
