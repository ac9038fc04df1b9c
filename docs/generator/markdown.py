"""Markdown from plain text, from Google docstrings and from annotated records."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

HEADER = "<!-- Written by `make docs` from the code; a test compares. Do not edit. -->"

SECTION = re.compile(r"^(Args|Attributes|Example|Raises|Returns|Yields):$")
ITEM = re.compile(r"^(\*{0,2}[\w.]+): (.*)$")


class Doc(NamedTuple):
    """A Google docstring: its paragraphs, and the body of each section by heading."""

    text: str
    sections: Mapping[str, str]


def page(title: str, *parts: str) -> str:
    """Return a generated page: header, title and the parts that are not empty, an empty line between them."""
    return "\n\n".join([HEADER, f"# {title}", *(part for part in parts if part)]) + "\n"


def inline(text: str) -> str:
    """Return docstring text as one line of Markdown: double backticks become single ones, and ``<`` outside of code starts no tag."""
    parts = " ".join(text.split()).replace("``", "`").split("`")
    return "`".join(part if index % 2 else part.replace("<", "&lt;") for index, part in enumerate(parts))


def code(text: object) -> str:
    """Return text as code; empty stays empty."""
    return f"`{text}`" if str(text) else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; a column that is empty in every row is left out."""
    body = [list(row) for row in rows]
    kept = [index for index in range(len(head)) if any(row[index] for row in body)]
    lines = [[head[index] for index in kept], ["---"] * len(kept), *([row[index].replace("|", "\\|") for index in kept] for row in body)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def parse_doc(documented: Any) -> Doc:
    """Return the docstring of an object, in parts."""
    lines: dict[str, list[str]] = {"": []}
    section = ""
    for line in (inspect.getdoc(documented) or "").splitlines():
        heading = SECTION.match(line)
        if heading:
            section = heading[1]
            lines[section] = []
        else:
            lines[section].append(line)
    bodies = {name: inspect.cleandoc("\n" + "\n".join(body)) for name, body in lines.items()}
    return Doc(bodies.pop(""), bodies)


def paragraphs(text: str) -> str:
    """Return the paragraphs of a docstring's text as Markdown."""
    return "\n\n".join(inline(part) for part in text.split("\n\n") if part.strip())


def items(body: str) -> dict[str, str]:
    """Return the entries of an ``Args``, ``Attributes`` or ``Raises`` section: name to text, continuation lines joined."""
    found: dict[str, str] = {}
    name = ""
    for line in body.splitlines():
        entry = ITEM.match(line)
        if entry:
            name = entry[1]
            found[name] = entry[2]
        elif line.strip() and name:
            found[name] += f" {line.strip()}"
    return found


def signature(function: Callable[..., Any]) -> str:
    """Return name, parameters and result of a function as they are written, ``self`` left out."""
    parts: list[str] = []
    found = inspect.signature(function)
    for parameter in found.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        default = "" if parameter.default is inspect.Parameter.empty else f" = {parameter.default!r}"
        parts.append(f"{parameter.name}: {parameter.annotation}{default}")
    return f"{function.__name__}({', '.join(parts)}) -> {found.return_annotation}"


def function_text(function: Callable[..., Any]) -> str:
    """Return signature, text, arguments, result and exceptions of a function."""
    doc = parse_doc(function)
    parts = [f"```text\n{signature(function)}\n```", paragraphs(doc.text)]
    for heading in ("Args", "Returns", "Raises"):
        body = doc.sections.get(heading, "")
        named = items(body)
        if named:
            parts.append(f"{heading}:\n\n" + "\n".join(f"- `{name}`: {inline(text)}" for name, text in named.items()))
        elif body:
            parts.append(f"{heading}: {inline(body)}")
    return "\n\n".join(part for part in parts if part)


def record_text(kind: type[Any]) -> str:
    """Return the text of a record's class and a table of its own fields: type, default and meaning."""
    doc = parse_doc(kind)
    meanings = items(doc.sections.get("Attributes", ""))
    defaults = {field.name: default_text(field) for field in msgspec.structs.fields(kind)} if issubclass(kind, msgspec.Struct) else {}
    rows = [
        (code(name), code(annotation), defaults.get(name, ""), inline(meanings.get(name, "")))
        for name, annotation in kind.__annotations__.items()
        if not str(annotation).startswith("ClassVar")
    ]
    fields = table(("field", "type", "default", "meaning"), rows) if rows else ""
    return "\n\n".join(part for part in (paragraphs(doc.text), fields) if part)


def default_text(field: msgspec.structs.FieldInfo) -> str:
    """Return the default of a field as code; ``required`` without one."""
    if field.default is not msgspec.NODEFAULT:
        value = field.default
        return code(f"{type(value).__name__}()" if isinstance(value, msgspec.Struct) else '""' if value == "" else repr(value))
    if field.default_factory is not msgspec.NODEFAULT:
        return code(repr(field.default_factory()))
    return "required"


def constant_docs(module: Any) -> dict[str, str]:
    """Return the docstrings that stand below the constants of a module, by name."""
    found: dict[str, str] = {}
    body = ast.parse(inspect.getsource(module)).body
    for node, below in itertools.pairwise(body):
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target if isinstance(node, ast.AnnAssign) else None
        match (target, below):
            case ast.Name(id=name), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = inspect.cleandoc(text)
    return found
