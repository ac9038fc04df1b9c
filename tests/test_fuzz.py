"""Broken recipes and broken matrices, generated: each is taken or refused with an error of mpbackend, never with another exception.

Every case has a random generator of its own, seeded with ``SEED`` and its number, both printed with the input when it fails.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
from click.testing import CliRunner

from mpbackend.cli.main import main
from mpbackend.device import device_from_matrix
from mpbackend.documents import MatrixFile, decode_toml, read_document, shipped_files
from mpbackend.errors import MpbackendError
from mpbackend.matrix import Matrix, load_matrix
from mpbackend.planning import plan_recipe
from mpbackend.plugins import Plugins
from mpbackend.recipe import PRESETS, Recipe, canonical_text, parse_recipe

SEED = 20260129
CASES = 1000
LARGE_EVERY = 100
"""One mutated matrix in this many is a shipped file; the others are the fixture, which is a hundredth of the size."""

FIXTURE = (Path(__file__).parent / "fixtures" / "acme.toml").read_bytes()
LARGE = [path.read_bytes() for path in shipped_files()]
ACME = Matrix([("acme.toml", decode_toml(FIXTURE, MatrixFile, "acme.toml"))])

ResultT = TypeVar("ResultT")


def generator(case: int) -> random.Random:
    """Return the random generator of one case."""
    return random.Random(f"{SEED}/{case}")


def attempt(case: int, content: str | bytes, action: Callable[[], ResultT]) -> ResultT | MpbackendError:
    """Run an action; return its result or the error of mpbackend, and fail on any other exception."""
    try:
        return action()
    except MpbackendError as error:
        if isinstance(content, str):
            assert str(error).isprintable(), f"seed {SEED}, case {case}: {str(error)!r} is not one printable line; input: {content!r}"
        return error
    except Exception as error:  # noqa: BLE001 - that nothing else is raised is what is tested
        pytest.fail(f"seed {SEED}, case {case}: {type(error).__name__}: {error}; input: {content[:2000]!r}")


# recipes

PATHS = [*PRESETS["fp32"].flat(), "compute", "accumulate", "optimizer"]
JUNK = [
    "",
    " ",
    ":",
    ",",
    "=",
    "|",
    ".",
    "\x00",
    "\n",
    "\t",
    "\x1b[31m",
    "é",
    "\u2028",
    "\ud800",
    "\U0001f600",
    "''",
    '"',
    "-",
    "--",
    "%s",
    "{0}",
    "$(x)",
    "../x",
]
NUMBERS = ["0", "-1", "1e400", "-1e400", "nan", "inf", "3", "1.5", "0x10", "9" * 400, "9" * 5000, "1_000", "1e-400", "٤", "true", "65536", "4096", "1"]
VALUES = [
    "bf16",
    "fp16",
    "fp8",
    "fp8_e4m3",
    "tf32|fp32",
    "|",
    "bf16|",
    "keep",
    "fast",
    "dynamic",
    "none",
    "None",
    "kahan",
    "1x32",
    "hf32",
    "e8m0",
    "int8",
    "float",
    "x" * 3000,
]


def broken_recipe(rng: random.Random) -> str:
    """Return the text of a recipe with something wrong in it, most times."""
    count = rng.randrange(5)
    text = rng.choice(list(PRESETS))
    if count:
        text += ":" + ",".join(f"{rng.choice(PATHS)}={rng.choice(VALUES + NUMBERS)}" for _ in range(count))
    for _ in range(rng.randrange(4)):
        text = rng.choice([drop, double, insert, cut, swap, shout, repeat])(text, rng)
    return text


def drop(text: str, rng: random.Random) -> str:
    """Leave one character out."""
    at = rng.randrange(len(text) + 1)
    return text[:at] + text[at + 1 :]


def double(text: str, rng: random.Random) -> str:
    """Write a part twice."""
    first, last = sorted(rng.randrange(len(text) + 1) for _ in range(2))
    return text[:last] + text[first:]


def insert(text: str, rng: random.Random) -> str:
    """Insert junk."""
    at = rng.randrange(len(text) + 1)
    return text[:at] + rng.choice([*JUNK, chr(rng.randrange(0x110000))]) + text[at:]


def cut(text: str, rng: random.Random) -> str:
    """Cut the end off."""
    return text[: rng.randrange(len(text) + 1)]


def swap(text: str, rng: random.Random) -> str:
    """Put one separator for another."""
    return text.replace(rng.choice(":,=|."), rng.choice(":,=|. "), 1)


def shout(text: str, _: random.Random) -> str:
    """Write in capitals."""
    return text.upper()


def repeat(text: str, rng: random.Random) -> str:
    """Repeat the whole many times."""
    return text * rng.randrange(50)


def use_recipe(text: str) -> Recipe:
    """Do with a recipe what every command does: parse, print, plan, encode."""
    recipe = parse_recipe(text)
    assert parse_recipe(canonical_text(recipe)) == recipe
    for key in ACME.devices:
        try:
            plan = plan_recipe(recipe, device_from_matrix(ACME, key), ACME)
        except MpbackendError as error:
            assert str(error).isprintable()
            continue
        msgspec.json.encode(plan)
    return recipe


def test_a_broken_recipe_is_refused_with_one_line() -> None:
    refused = 0
    for case in range(CASES):
        text = broken_recipe(generator(case))
        refused += isinstance(attempt(case, text, lambda text=text: use_recipe(text)), MpbackendError)  # type: ignore[misc]
    assert CASES * 0.7 < refused < CASES, f"seed {SEED}: {refused} of {CASES} were refused, so the generator says little"


def test_a_recipe_of_any_characters_is_refused() -> None:
    for case in range(CASES):
        rng = generator(case)
        text = "".join(chr(rng.choice([rng.randrange(128), rng.randrange(0x110000)])) for _ in range(rng.randrange(40)))
        assert isinstance(attempt(case, text, lambda text=text: use_recipe(text)), MpbackendError), f"seed {SEED}, case {case}: {text!r}"  # type: ignore[misc]


# matrices

LITERALS = [
    *("1", "-1", "0", "1.5", "true", '""', '"x"', "[]", "{}", "[1]", '["x"]', "[[]]", "{ a = 1 }", "nan", "inf", "-inf", "2026-01-01", "1979-05-27T07:32:00Z"),
    *(
        str(2**63),
        str(2**64),
        str(-(2**63) - 1),
        "9" * 100,
        "9" * 5000,
        "0x" + "f" * 40,
        "1e999",
        '"\\n"',
        '"\\u001b[31m"',
        '"\\u0000"',
        '"\\ud800"',
        '"' + "x" * 5000 + '"',
    ),
    *("[" * 50 + "]" * 50, "[" * 3000, "{ a = " * 300, "'''", '"""\n"""', "x", ""),
]


def replace_value(lines: list[str], rng: random.Random) -> None:
    """Give a field a value of another type or size."""
    at = rng.choice([number for number, line in enumerate(lines) if " = " in line] or [0])
    lines[at] = f"{lines[at].partition(' = ')[0]} = {rng.choice(LITERALS)}"


def replace_inner(lines: list[str], rng: random.Random) -> None:
    """Give an inner value of an array or an inline table another type or size."""
    at = rng.choice([number for number, line in enumerate(lines) if re.search(r"= [\[{]", line)] or [0])
    found = list(re.finditer(r'"[^"]*"|\d+', lines[at]))
    if found:
        inner = rng.choice(found)
        lines[at] = lines[at][: inner.start()] + rng.choice(LITERALS) + lines[at][inner.end() :]


def replace_word(lines: list[str], rng: random.Random) -> None:
    """Put a word of the file in the place of another: a name that is not declared, a level as a format, a source as an architecture."""
    words = sorted({word for line in rng.sample(lines, min(50, len(lines))) for word in re.findall(r'"[^"]*"', line)})
    at = rng.choice([number for number, line in enumerate(lines) if '"' in line] or [0])
    if words:
        lines[at] = re.sub(r'"[^"]*"', lambda _: rng.choice(words), lines[at])


def delete_lines(lines: list[str], rng: random.Random) -> None:
    """Delete a line or a run of lines."""
    at = rng.randrange(len(lines))
    del lines[at : at + rng.choice([1, 1, 1, 5, 30])]


def duplicate_lines(lines: list[str], rng: random.Random) -> None:
    """Copy a line or a run of lines to another place."""
    at = rng.randrange(len(lines))
    copied = lines[at : at + rng.choice([1, 1, 5, 12])]
    to = rng.choice([at, rng.randrange(len(lines))])
    lines[to:to] = copied


def swap_lines(lines: list[str], rng: random.Random) -> None:
    """Exchange two lines."""
    first, second = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[first], lines[second] = lines[second], lines[first]


def add_field(lines: list[str], rng: random.Random) -> None:
    """Add a field that no record has, or a table."""
    added = rng.choice(
        ["color = 1", '"" = 1', "a.b.c = 1", "[extra]", "[[extra]]", "[[row]]", "[row]", "[[source]]", "[source.x]", "schema = 1", "key = 'x'", "]", "=", "#"]
    )
    lines.insert(rng.randrange(len(lines) + 1), added)


def rename_field(lines: list[str], rng: random.Random) -> None:
    """Misspell a field."""
    at = rng.choice([number for number, line in enumerate(lines) if " = " in line] or [0])
    lines[at] = lines[at][: rng.randrange(3)] + lines[at][rng.randrange(3, 6) :]


MUTATIONS: Sequence[Callable[[list[str], random.Random], None]] = (
    replace_value,
    replace_value,
    replace_inner,
    replace_word,
    delete_lines,
    duplicate_lines,
    swap_lines,
    add_field,
    rename_field,
)


def truncate(content: bytes, rng: random.Random) -> bytes:
    """Cut the file anywhere."""
    return content[: rng.randrange(len(content) + 1)]


def overwrite(content: bytes, rng: random.Random) -> bytes:
    """Write random bytes over a place."""
    at = rng.randrange(len(content) + 1)
    noise = rng.randbytes(rng.choice([1, 1, 4, 64]))
    return content[:at] + noise + content[at + len(noise) :]


def reencode(content: bytes, rng: random.Random) -> bytes:
    """Store the file in another encoding, with a mark or with other line ends."""
    text = content.decode(errors="replace")
    return rng.choice(
        [text.encode("utf-16"), b"\xef\xbb\xbf" + content, content.replace(b"\n", b"\r\n"), content.replace(b"\n", b"\r"), b"\x00" + content, b"\xff" + content]
    )


def mutated_matrix(rng: random.Random, content: bytes) -> bytes:
    """Return a matrix file with one to three things wrong in it, most times."""
    for _ in range(rng.choice([1, 1, 2, 3])):
        if rng.random() < 0.8 and content:
            lines = content.decode(errors="surrogateescape").split("\n")
            rng.choice(MUTATIONS)(lines, rng)
            content = "\n".join(lines).encode(errors="surrogateescape")
        else:
            content = rng.choice([truncate, overwrite, reencode])(content, rng)
    return content


def use_matrix(content: bytes) -> Matrix:
    """Do with a matrix what commands do: load, list, identify, plan, encode."""
    document = decode_toml(content, MatrixFile, "mutated.toml")
    matrix = Matrix([("mutated.toml", document)])
    msgspec.json.encode(document)
    msgspec.json.encode(matrix.summary())
    matrix.identify("ACME X1", "1.0")
    for model in list(matrix.devices.values())[:3]:
        device = device_from_matrix(matrix, model.key)
        for preset in ("fp32-fast", "fp8"):
            try:
                msgspec.json.encode(plan_recipe(PRESETS[preset], device, matrix, on_unsupported="nearest"))
            except MpbackendError as error:
                assert str(error)
    return matrix


def test_a_broken_matrix_is_refused_and_nothing_else_is_raised() -> None:
    refused = 0
    for case in range(CASES):
        rng = generator(case)
        content = mutated_matrix(rng, rng.choice(LARGE) if case % LARGE_EVERY == 0 else FIXTURE)
        refused += isinstance(attempt(case, content, lambda content=content: use_matrix(content)), MpbackendError)  # type: ignore[misc]
    assert CASES * 0.6 < refused < CASES, f"seed {SEED}: {refused} of {CASES} were refused, so the mutations say little"


@pytest.mark.parametrize("depth", [100, 10_000, 200_000])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ("{ a = ", " }"), ("[{ a = ", "}]")])
def test_deep_nesting_is_refused(depth: int, opening: str, closing: str) -> None:
    content = f"schema = {opening * depth}1{closing * depth}".encode()
    assert isinstance(attempt(depth, content[:100], lambda: use_matrix(content)), MpbackendError)


def test_the_unchanged_files_are_used_without_an_error() -> None:
    for content in (FIXTURE, *LARGE):
        use_matrix(content)


# through the command line and the plugins


def test_the_command_line_answers_a_broken_recipe_with_one_line() -> None:
    runner = CliRunner()
    for case in range(0, CASES, CASES // 40):
        text = broken_recipe(generator(case))
        outcome = attempt(case, text, lambda text=text: use_recipe(text))  # type: ignore[misc]
        if not isinstance(outcome, MpbackendError):
            continue
        result = runner.invoke(main, ["plan", "--device", "h100", "--", text])
        assert (result.exit_code, result.stdout) == (2, ""), f"seed {SEED}, case {case}: {text!r}: {result.output}"
        assert result.stderr.startswith("error: "), f"seed {SEED}, case {case}: {text!r}: {result.stderr}"
        assert result.stderr.count("\n") == 1
        assert isinstance(result.exception, SystemExit)


def test_a_broken_matrix_of_a_plugin_is_named_and_hides_nothing(tmp_path: Path) -> None:
    whole = load_matrix().summary()
    for case in range(0, CASES, CASES // 10):
        path = tmp_path / f"case{case}.toml"
        path.write_bytes(mutated_matrix(generator(case), FIXTURE))
        plugins = Plugins(matrices=[*shipped_files(), path])
        matrix = plugins.matrix()
        alone = attempt(case, path.read_bytes(), lambda path=path: load_matrix([path]))  # type: ignore[misc]
        if isinstance(alone, MpbackendError):
            assert [entry.name for entry in plugins.unavailable] == [path.name]
            assert matrix.summary() == whole
        else:
            assert plugins.unavailable == []
            assert matrix.summary()["rows"] == whole["rows"] + alone.summary()["rows"]


def test_reading_refuses_what_is_no_file(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none", tmp_path / ("x" * 5000)):
        assert isinstance(attempt(0, str(path), lambda path=path: read_document(path)), MpbackendError)  # type: ignore[misc]
