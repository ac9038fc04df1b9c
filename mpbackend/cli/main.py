"""The command line. A command's module is imported when the command is run or its help is shown, so that one command does not pay for another."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click

from mpbackend import __version__
from mpbackend.cli.options import OneLine, output_error, say
from mpbackend.errors import MpbackendError, nearest_names

COMMANDS = ("audit", "compare", "conformance", "demo", "devices", "doctor", "matrix", "memory", "plan", "policy", "probe", "recipes", "record", "show")
"""Commands by name; ``mpbackend.cli.<name>`` defines ``command``."""


class LazyGroup(click.Group):
    """A group that knows its commands by name and imports them on demand."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, sorted."""
        return sorted({*COMMANDS, *super().list_commands(ctx)})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; None when there is none of that name."""
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        command = importlib.import_module(f"mpbackend.cli.{cmd_name}").command
        if not isinstance(command, click.Command):
            raise TypeError(f"mpbackend.cli.{cmd_name}.command is a {type(command).__name__}")
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve a command; an unknown name is answered with the nearest ones."""
        name = args[0]
        if name not in self.list_commands(ctx) and not name.startswith("-"):
            near = nearest_names(name, COMMANDS)
            ctx.fail(f"no command {name!r}; " + (f"nearest: {', '.join(near)}" if near else f"commands: {', '.join(COMMANDS)}"))
        return super().resolve_command(ctx, args)

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run the command line; output that cannot be written, to a device that is full for one, becomes one line and exit code 1."""
        try:
            return super().main(*args, **extra)
        except OSError as error:
            if not output_fails():
                raise
            output_error(error).show()
            sys.exit(1)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an error of mpbackend becomes one line."""
        try:
            return super().invoke(ctx)
        except MpbackendError as error:
            raise OneLine(str(error)) from error


def output_fails() -> bool:
    """Tell whether standard output still holds what it cannot write, as after the help of a command."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        return True
    return False


def show_version(ctx: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    """Print the version of the core and of every plugin, and what is unavailable."""
    if not wanted or ctx.resilient_parsing:
        return
    from mpbackend.plugins import load_plugins

    plugins = load_plugins()
    say(f"mpbackend {__version__}")
    for name, version in sorted(plugins.distributions.items()):
        say(f"{name} {version}")
    for entry in plugins.unavailable:
        owner = f" ({entry.distribution})" if entry.distribution else ""
        say(f"unavailable: {entry.name}{owner}: {entry.cause}")
    ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=show_version, help="Show the versions of the core and the plugins.")
def main() -> None:
    """Plan and run one mixed-precision training recipe on several vendors' devices, with a reason and a source for every decision."""


if __name__ == "__main__":
    main()
