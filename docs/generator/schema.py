"""Reference pages of the documents: matrix files and run records."""

from __future__ import annotations

import inspect
import re
from typing import Any, get_args

from docs.generator.markdown import code, constant_docs, inline, page, paragraphs, parse_doc, record_text, table
from mpbackend import capability, documents
from mpbackend.capability import LEVEL_MEANING, LEVELS
from mpbackend.decisions import Decision
from mpbackend.device import Device
from mpbackend.documents import load_vocabulary
from mpbackend.observe import record
from mpbackend.report.view import EVIDENCE_MEANING, SYMBOLS
from mpbackend.train.checkpoint import CheckpointInfo

ELEMENT = re.compile(r"tuple\[(\w+), \.\.\.\]")
WORDS = ("Layer", "Rounding", "OverflowMode")


def matrix_schema_page() -> str:
    """Return the page of the matrix files: words, records and vocabulary."""
    documented = constant_docs(capability)
    words = [
        f"### {name}\n\n{', '.join(code(word) for word in get_args(getattr(capability, name)))}. {inline(documented.get(name, ''))}".rstrip() for name in WORDS
    ]
    arrays = {element[1]: name for name, text in documents.MatrixFile.__annotations__.items() if (element := ELEMENT.match(text))}
    tables = [f"### [[{name}]]: {kind}\n\n{schema_text(getattr(capability, kind, None) or getattr(documents, kind))}" for kind, name in arrays.items()]
    inner = [f"### {kind.__name__}\n\n{schema_text(kind)}" for kind in (capability.Cited, capability.Conflict, capability.Accumulator, capability.Align)]
    others = [documents.Vocabulary, documents.PathMeaning, documents.DroppedFile, documents.Dropped]
    return page(
        "Matrix files",
        paragraphs(parse_doc(capability).text),
        "A matrix file is TOML. [Add a device to a matrix](../how-to/add-a-device-to-a-matrix.md) shows one; "
        "[the rules](../../matrices/README.md#rules) say what holds beyond the types.",
        "## Words",
        "### Level\n\n" + table(("level", "symbol", "meaning"), [(code(level), SYMBOLS[level], LEVEL_MEANING[level]) for level in LEVELS]),
        "### EvidenceKind\n\n" + table(("kind", "meaning"), [(code(kind), meaning) for kind, meaning in EVIDENCE_MEANING.items()]),
        *words,
        "## The file",
        schema_text(documents.MatrixFile),
        "## Its tables",
        *tables,
        "## Records inside them",
        *inner,
        "## The vocabulary",
        vocabulary_text(),
        "## Other documents",
        *(f"### {kind.__name__}\n\n{schema_text(kind)}" for kind in others),
    )


def schema_text(kind: type[Any]) -> str:
    """Return a record with its own fields, and where the others come from."""
    cited = issubclass(kind, capability.Cited) and kind is not capability.Cited
    return record_text(kind) + ("\n\nAnd the fields of [`Cited`](#cited)." if cited else "")


def vocabulary_text() -> str:
    """Return the names that rows may use, with their meanings."""
    words = load_vocabulary()
    paths = [(code(name), path.layer, path.meaning) for name, path in words.path.items()]
    return "\n\n".join(
        [
            "`vocabulary.toml` holds the names that rows may use.",
            table(("op", "meaning"), [(code(name), meaning) for name, meaning in words.op.items()]),
            table(("scaling", "meaning"), [(code(name), meaning) for name, meaning in words.scaling.items()]),
            table(("path", "layer", "meaning"), paths),
        ]
    )


def record_schema_page() -> str:
    """Return the page of the run record."""
    kinds = [value for value in vars(record).values() if inspect.isclass(value) and issubclass(value, record.Document) and value is not record.Document]
    inner: list[type[Any]] = [*(kind for kind in kinds if kind not in (record.RunRecord, record.StepRow)), Decision, Device]
    return page(
        "Run records",
        paragraphs(parse_doc(record).text),
        f"Schema version {record.SCHEMA}. `{record.RECORD_FILE}` is one JSON object, a [`RunRecord`](#runrecord), replaced whole at each flush. "
        f"`{record.STEPS_FILE}` holds one JSON object a line, a [`StepRow`](#steprow). An unknown field is an error. "
        f"The five classes are {', '.join(record.CLASSES)}. [Read a record](../how-to/read-a-record.md) shows how.",
        f"## RunRecord\n\n{record_text(record.RunRecord)}",
        f"## StepRow\n\n{record_text(record.StepRow)}",
        *(f"## {kind.__name__}\n\n{record_text(kind)}" for kind in inner),
        "## Checkpoints\n\n`Session.save` writes a folder: `checkpoint.json`, and the state files that its token names, read with `weights_only`:"
        f"\n\n{record_text(CheckpointInfo)}",
    )
