"""Tables of what there is: formats, recipes, matrix files, and recipes on devices."""

from __future__ import annotations

from collections.abc import Iterable

from docs.generator.markdown import code, inline, items, page, paragraphs, parse_doc, table
from mpbackend import formats, recipe
from mpbackend.capability import EVIDENCE_KINDS, LEVEL_MEANING, LEVELS, Row
from mpbackend.cli.recipes import plan_or_refusal
from mpbackend.device import Device, device_from_matrix
from mpbackend.documents import MatrixFile, load_dropped
from mpbackend.errors import PlanError
from mpbackend.formats import AMBIGUOUS, DEVICE_RESOLVED, FORMATS, Format
from mpbackend.granting import ON_UNSUPPORTED, OnUnsupported, grant
from mpbackend.matrix import Matrix, count_by, load_matrix
from mpbackend.planning import plan_recipe
from mpbackend.recipe import DESCRIPTIONS, PRESETS, Recipe, canonical_text
from mpbackend.report.recipes import describe_roles
from mpbackend.report.view import EVIDENCE_MEANING
from mpbackend_cpu.backend import CpuBackend
from mpbackend_cpu.discovery import ARM_ARCH, BACKEND, X86_ARCHS
from mpbackend_cpu.implementations import implementations
from mpbackend_cpu.switches import switches
from tests.matrices.rules import LONGEST_NOTE, RULES

CPU = "x86-64-avx512_bf16"
SHOWN_DEVICES = ("v100", "a100", "h100", "b200", "ascend-910a", "ascend-910b3", "ascend-950pr", CPU)
"""Devices of the support table: one of each generation whose answers differ."""


def number(value: float) -> str:
    """Return a finite number in few digits: powers of two below 1 as such, whole numbers up to a million in full."""
    if value == 0 or (abs(value) < 10**6 and value == int(value)):
        return str(int(value))
    mantissa, exponent = float(value).hex().split("p")
    return f"2^{exponent.lstrip('+')}" if mantissa == "0x1.0000000000000" and value < 1 else f"{value:.4g}"


def formats_page() -> str:
    """Return the page of the number formats."""
    head = ("format", "kind", "bits", "exponent", "mantissa", "bias", "max", "smallest normal", "smallest subnormal", "eps", "inf", "NaN", "torch dtype")
    refused = [(code(name), ", ".join(map(code, choices))) for name, choices in AMBIGUOUS.items()]
    resolved = [(code(name), ", ".join(map(code, choices))) for name, choices in DEVICE_RESOLVED.items()]
    spellings = [(code(row.name), row.encoding, row.storage, ", ".join(map(code, row.aliases)), row.source, inline(row.note)) for row in FORMATS.values()]
    return page(
        "Formats",
        paragraphs(parse_doc(formats).text),
        table(head, [format_cells(row) for row in FORMATS.values()]),
        "Bits, exponent and mantissa are field widths; the mantissa leaves the implicit one out. `yes` says that some code is infinity or NaN.",
        "## Names and sources\n\nCase does not matter, nor does a `torch.` or `ml_dtypes.` prefix.",
        table(("format", "encoding", "storage", "also written", "source", "note"), spellings),
        "## Names that the device decides\n\n" + table(("name", "one of"), resolved),
        "## Names that are refused\n\nPeople mean different formats by them.\n\n" + table(("name", "could be"), refused),
    )


def format_cells(row: Format) -> tuple[str, ...]:
    """Return a format as cells of the table."""
    widths = (row.bits, row.exponent_bits, row.mantissa_bits, row.bias)
    values = (row.max, row.smallest_normal, row.smallest_subnormal, row.eps)
    answers = ("yes" if row.has_inf else "no", "yes" if row.has_nan else "no")
    return (code(row.name), row.kind, *map(str, widths), *map(number, values), *answers, code(row.torch_dtype or ""))


def trains(preset: Recipe, matrix: Matrix, policy: OnUnsupported = "emulate") -> bool:
    """Tell whether a session of this version trains a preset under a policy on a CPU that has bf16 instructions."""
    device = Device(key=CPU, arch=CPU, name=CPU, backend=BACKEND, type="cpu")
    try:
        plan = plan_recipe(preset, device, matrix, CpuBackend().implements(device), on_unsupported=policy)
    except PlanError:
        return False
    return plan.runnable


def trained_line() -> str:
    """Return which presets a session trains, in two sentences."""
    matrix = load_matrix()
    plain = [name for name, preset in PRESETS.items() if trains(preset, matrix, "error")]
    emulated = [name for name, preset in PRESETS.items() if trains(preset, matrix) and name not in plain]
    return (
        f'On a CPU with bf16 instructions a session of this version trains {", ".join(map(code, plain))}, and with `on_unsupported="emulate"` '
        f"also {', '.join(map(code, emulated))}. The other {len(PRESETS) - len(plain) - len(emulated)} presets are planned only."
    )


def recipes_page() -> str:
    """Return the page of presets and roles."""
    matrix = load_matrix()
    presets = [
        (code(name), DESCRIPTIONS[name], "yes" if trains(preset, matrix) else "no", code(difference_from_fp32(preset))) for name, preset in PRESETS.items()
    ]
    roles = [(code(role.path), code(role.default), inline(role.allowed)) for role in describe_roles()]
    meanings = parse_doc(Recipe).sections["Attributes"]
    return page(
        "Recipes",
        paragraphs(parse_doc(recipe).text),
        "## Presets\n\n`trains` says whether a session of this version trains the preset with `mpbackend-cpu`; every preset can be planned. "
        "The last column is what the preset changes against `fp32`.",
        table(("preset", "what it is", "trains", "against fp32"), presets),
        "## What a role is\n\n" + attribute_table(meanings),
        "## Roles and values\n\nThe default is that of the preset `fp32`. "
        f"{', '.join(map(code, recipe.GROUPS))} set all their members at once: `compute=bf16`.",
        table(("role", "default", "allowed"), roles),
    )


def attribute_table(body: str) -> str:
    """Return an ``Attributes`` section as a table."""
    return table(("role", "meaning"), [(code(name), inline(text)) for name, text in items(body).items()])


def difference_from_fp32(preset: Recipe) -> str:
    """Return what a preset changes against ``fp32``, in the text form."""
    return canonical_text(preset, {preset.preset: Recipe(preset=preset.preset)}).partition(":")[2]


def support_table() -> str:
    """Return presets on a few devices: the level that decides, or why a preset is refused there."""
    matrix = load_matrix()
    rows = [(code(name), *(support_cell(preset, device_from_matrix(matrix, key), matrix) for key in SHOWN_DEVICES)) for name, preset in PRESETS.items()]
    return table(("recipe", *map(code, SHOWN_DEVICES)), rows)


def support_cell(preset: Recipe, device: Device, matrix: Matrix) -> str:
    """Return one cell: the level of the forward product, with the format where the recipe leaves a choice; or the refusal."""
    outcome = plan_or_refusal(preset, device, matrix)
    if isinstance(outcome, PlanError):
        first = outcome.decisions[0]
        role, level = getattr(first, "role", ""), getattr(first, "level", "")
        return f"refused: {level}" if role.startswith("compute") else f"refused: {role}"
    decision = outcome.decision("compute.forward", "matmul")
    chosen = f"{decision.level}, {decision.granted}" if "|" in decision.asked else decision.level
    return f"{chosen} (warned)" if outcome.warnings else chosen


def evidence_table() -> str:
    """Return the rows of each matrix file by the kind of their strongest source."""
    files = load_matrix().files
    counts = [count_by(row.evidence for row in document.row) for _, document in files]
    rows = [(code(kind), EVIDENCE_MEANING[kind], *(str(count.get(kind, 0)) for count in counts)) for kind in EVIDENCE_KINDS]
    rows.append(("all", "", *(str(len(document.row)) for _, document in files)))
    return table(("evidence", "meaning", *(document.family for _, document in files)), rows)


def counts_line() -> str:
    """Return the size of the matrices in one sentence."""
    summary = load_matrix().summary()
    return (
        f"The matrices hold {summary['rows']} rows about {summary['devices']} devices of {summary['architectures']} architectures, "
        f"from {summary['sources']} sources. In {summary['conflicts']} rows sources disagree; each of them carries every claim."
    )


def grants_table() -> str:
    """Return what each level grants under each policy."""
    words = {"granted": "granted", "warned": "granted with a warning", "refused": "refused"}
    rows = []
    for level in LEVELS:
        cells = [words[grant(level, policy, strict=False)] for policy in ON_UNSUPPORTED]
        cells[1] = "next rung" if cells[1] == "refused" else cells[1]
        rows.append((code(level), LEVEL_MEANING[level], *cells, words[grant(level, "error", strict=True)]))
    return table(("level", "meaning", *(code(policy) for policy in ON_UNSUPPORTED), "`error` with `strict`"), rows)


def matrices_page() -> str:
    """Return the page of the shipped matrix files."""
    matrix = load_matrix()
    rules = [f"- {inline(parse_doc(rule).text)}" for rule in RULES]
    return page(
        "Capability matrices",
        "What accelerators and processors compute in, and who says so. [The schema](../docs/reference/matrix-schema.md) describes every field; "
        "`mpbackend matrix` shows the rows. `vocabulary.toml` holds the names that rows may use, "
        f"`dropped.toml` the collected facts that no record was made from ({len(load_dropped().dropped)}), with reasons.",
        counts_line(),
        "## Rows by level\n\n" + levels_table(matrix.files),
        "## Rows by evidence\n\n" + evidence_table(),
        *(file_text(name, document) for name, document in matrix.files),
        "## Rules\n\nThe schema refuses unknown fields. A test holds these rules as well:\n\n" + "\n".join(rules),
        f"A note has at most {LONGEST_NOTE} characters. A missing row means unknown, not absent. "
        "Where sources disagree the row is `unknown` or carries the other claim as `conflict`; none is chosen silently.",
    )


def levels_table(files: Iterable[tuple[str, MatrixFile]]) -> str:
    """Return the rows of each file by level."""
    documents = [document for _, document in files]
    rows = [(code(level), LEVEL_MEANING[level], *(str(count_level(document.row, level)) for document in documents)) for level in LEVELS]
    return table(("level", "meaning", *(document.family for document in documents)), rows)


def count_level(rows: Iterable[Row], level: str) -> int:
    """Count the rows of a level."""
    return sum(1 for row in rows if row.level == level)


def file_text(name: str, document: MatrixFile) -> str:
    """Return one file: its tables and its devices."""
    sizes = ", ".join(f"{len(getattr(document, field))} {field}" for field in ("row", "peak", "switch", "overflow", "collective", "source"))
    devices = [(code(device.key), code(device.arch), device.name, ", ".join(map(code, device.names))) for device in document.device]
    refused = "".join(f"\n- `{entry.key}` is refused: {inline(entry.message)}" for entry in document.ambiguous)
    return f"## {name}\n\nRecords: {sizes}.\n\n" + table(("device", "architecture", "name", "reported names"), devices) + (f"\n{refused}" if refused else "")


def cpu_page() -> str:
    """Return the page of what the CPU backend runs and which switches it has."""
    return page(
        "The CPU backend",
        "What `mpbackend-cpu` runs on each architecture, as the flags of the processor tell it: the level of a matrix product, and what runs it. "
        '`mkl` stands for the BLAS behind torch. A level that is `emulated` runs only with `on_unsupported="emulate"`, and the plan and the record say so.',
        cpu_table(),
        "## Switches\n\nA session sets those that its plan names, reads them back, restores them, and records all of them.",
        switches_table(),
    )


def cpu_table() -> str:
    """Return what the CPU backend runs on each architecture: level and path of a matrix product."""
    formats_shown = ("fp32", "fp64", "bf16", "fp16")
    archs = [(key, frozenset[str]()) for key, _ in X86_ARCHS] + [(ARM_ARCH, frozenset[str]()), (ARM_ARCH, frozenset(["bf16"]))]
    rows = []
    for arch, features in archs:
        cells = {row.a: f"{row.level} ({row.path})" for row in implementations(arch, features) if row.level is not None and row.op == "matmul"}
        with_features = "".join(f" with `{name}`" for name in features)
        rows.append((code(arch) + with_features, *(cells[name] for name in formats_shown)))
    return table(("architecture", *formats_shown), rows)


def switches_table() -> str:
    """Return the global switches of the CPU backend."""
    return table(("switch", "settings", "what it changes"), [(code(row.name), ", ".join(map(code, row.allowed)), inline(row.meaning)) for row in switches()])
