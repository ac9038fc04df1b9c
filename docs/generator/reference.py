"""Reference pages of what a user calls: commands, hooks, the backend protocol, errors."""

from __future__ import annotations

import importlib
import inspect
from typing import Any, Protocol, get_args

import click

from docs.generator.markdown import code, function_text, inline, items, page, paragraphs, parse_doc, record_text, table
from mpbackend import backend, errors, hookspecs
from mpbackend.cli.main import COMMANDS, main


def cli_page() -> str:
    """Return the page of every command."""
    commands = dict(item for name in COMMANDS for item in parts(name, importlib.import_module(f"mpbackend.cli.{name}").command))
    rows = [
        (f"[`mpbackend {name}`](#mpbackend-{name.replace(' ', '-')})", inline((command.help or "").partition("\n\n")[0])) for name, command in commands.items()
    ]
    return page(
        "Commands",
        inline(main.help or ""),
        table(("command", "what it does"), rows),
        "`mpbackend --version` prints the versions of the core and of every plugin. Every command takes `-h` and `--help`. "
        "A command exits with 0, or with 2 and one line on standard error that starts with `error:`. "
        "Text is laid out for the terminal, or for 120 columns where there is none; `NO_COLOR` turns color off.",
        *(command_text(name, command) for name, command in commands.items()),
    )


def parts(name: str, command: click.Command) -> list[tuple[str, click.Command]]:
    """Return a command by its name; those of a group instead of the group."""
    if not isinstance(command, click.Group):
        return [(name, command)]
    return [item for inner in command.commands.values() for item in parts(f"{name} {inner.name}", inner)]


def command_text(name: str, command: click.Command) -> str:
    """Return one command: usage, text, arguments and options."""
    arguments = [parameter for parameter in command.params if isinstance(parameter, click.Argument)]
    options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
    usage = " ".join([f"mpbackend {name}", "[OPTIONS]", *((argument.name or "").upper() for argument in arguments)])
    rows = [(code(", ".join(option.opts)), value_text(option), default_of(option), inline(option.help or "")) for option in options]
    return "\n\n".join(
        [f"## mpbackend {name}", f"```text\n{usage}\n```", paragraphs(command.help or ""), table(("option", "value", "default", "meaning"), rows)]
    )


def value_text(option: click.Option) -> str:
    """Return what an option takes; empty for a flag."""
    if option.is_flag:
        return ""
    if option.metavar:
        return code(option.metavar)
    if isinstance(option.type, click.Choice):
        return ", ".join(code(choice) for choice in option.type.choices)
    return {"integer": "a whole number", "integer range": "a whole number >= 1", "directory": "a folder", "file": "a file"}.get(option.type.name, "text")


def default_of(option: click.Option) -> str:
    """Return the default that the help of an option shows; ``required`` for one that must be given."""
    if option.required:
        return "required"
    return code(option.default) if option.show_default else ""


def hooks_page() -> str:
    """Return the page of the plugin hooks."""
    hooks = [value for name, value in vars(hookspecs).items() if name.startswith("mpbackend_")]
    return page("Hooks", paragraphs(parse_doc(hookspecs).text), *(hook_text(hook) for hook in hooks))


def hook_text(hook: Any) -> str:
    """Return one hook with its example."""
    example = parse_doc(hook).sections["Example"]
    return f"## {hook.__name__}\n\n{function_text(hook)}\n\n<!-- not run: a fragment of a plugin -->\n```python\n{example}\n```"


def backend_page() -> str:
    """Return the page of the backend protocol and the records that its members return."""
    members = "\n\n".join(
        f"### {name}\n\n{function_text(getattr(backend.Backend, name))}" for name in backend.MEMBERS if inspect.isfunction(getattr(backend.Backend, name, None))
    )
    others = [value for value in vars(backend).values() if inspect.isclass(value) and value.__module__ == backend.__name__ and value is not backend.Backend]
    policies = ", ".join(code(kind) for kind in get_args(backend.PolicyKind))
    return page(
        "The backend protocol",
        paragraphs(parse_doc(backend).text),
        f"The members are {', '.join(code(name) for name in backend.MEMBERS)}. A plugin's object is checked for them when it is loaded.",
        "## Backend",
        record_text(backend.Backend),
        members,
        "## What the members return",
        f"`PolicyKind` is one of {policies}.",
        *(f"### {kind.__name__}\n\n{protocol_text(kind) if Protocol in kind.__bases__ else record_text(kind)}" for kind in others),
    )


def protocol_text(kind: type[Any]) -> str:
    """Return a small protocol: its text and its methods."""
    methods = [value for name, value in vars(kind).items() if inspect.isfunction(value) and not name.startswith("_")]
    return "\n\n".join([paragraphs(parse_doc(kind).text), *(function_text(method) for method in methods)])


def errors_page() -> str:
    """Return the page of the error classes."""
    classes = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, errors.MpbackendError)]
    summary = [(f"[`{kind.__name__}`](#{kind.__name__.lower()})", builtin_text(kind), inline(parse_doc(kind).text)) for kind in classes]
    return page(
        "Errors",
        paragraphs(parse_doc(errors).text),
        table(("class", "also a", "meaning"), summary),
        "The command line prints an error as one line, `error: <message>`, and exits with 2. Every error has the attributes of `MpbackendError`.",
        *(error_text(kind) for kind in classes),
    )


def builtin_text(kind: type[BaseException]) -> str:
    """Return the builtin class that an error also is."""
    return ", ".join(code(base.__name__) for base in kind.__bases__ if base.__module__ == "builtins")


def error_text(kind: type[BaseException]) -> str:
    """Return one error class with its attributes."""
    doc = parse_doc(kind)
    listed = [(code(name), inline(text)) for name, text in items(doc.sections.get("Attributes", "")).items()]
    attributes = table(("attribute", "meaning"), listed) if listed else ""
    return "\n\n".join(part for part in (f"## {kind.__name__}", paragraphs(doc.text), attributes) if part)
