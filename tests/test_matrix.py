"""Loading matrices: strict decoding, what may not be declared twice, and the questions a matrix answers."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mpbackend.capability import Accumulator
from mpbackend.device import Device, device_from_matrix
from mpbackend.documents import NOT_MATRICES, MatrixFile, Vocabulary, decode_toml, load_dropped, load_vocabulary, read_document, shipped_files
from mpbackend.errors import DocumentError, UnknownNameError
from mpbackend.matrix import Matrix, count_by, effective_fraction_bits, load_matrix

FIXTURE = Path(__file__).parent / "fixtures" / "acme.toml"
SHIPPED = [pytest.param(path, id=path.stem) for path in shipped_files()]
CITED = ("arch", "device", "row", "peak", "switch", "overflow", "collective")


@pytest.fixture(scope="module")
def acme() -> Matrix:
    return load_matrix([FIXTURE])


@pytest.fixture(scope="module")
def shipped() -> Matrix:
    return load_matrix()


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Matrix]:
    """Load the fixture with one text replaced, or with text added."""

    def load_changed(old: str = "", new: str = "", *, add: str = "") -> Matrix:
        text = FIXTURE.read_text(encoding="utf-8")
        assert old in text
        path = tmp_path / "acme.toml"
        path.write_text((text.replace(old, new, 1) if old else text) + add, encoding="utf-8")
        return load_matrix([path])

    return load_changed


def block(kind: str, number: int = 0) -> str:
    """Return one table of the fixture, as text."""
    blocks: list[str] = re.findall(rf"^\[\[{kind}\]\]\n(?:.+\n)+", FIXTURE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return "\n" + blocks[number]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("source", r"acme\.toml: source 'manual' is declared twice"),
        ("arch", r"acme\.toml: architecture 'ax1' is declared twice"),
        ("device", r"acme\.toml: device 'acme-x1' is declared twice"),
        ("ambiguous", r"acme\.toml: ambiguous key 'acme-x' is declared twice"),
        ("row", r"acme\.toml: row ax1 matmul fp32 fp32 none simt fp32: the same key stands twice"),
        ("switch", r"acme\.toml: switchdefault \* matmul\.reduced matmul fp32 is declared twice"),
        ("overflow", r"acme\.toml: overflow ax1 is declared twice"),
        ("collective", r"acme\.toml: collective \* all_reduce_sum fp32 is declared twice"),
    ],
)
def test_what_is_declared_twice_is_refused(load: Callable[..., Matrix], kind: str, message: str) -> None:
    with pytest.raises(DocumentError, match=message):
        load(add=block(kind))


def test_an_alias_declared_twice_is_refused(load: Callable[..., Matrix]) -> None:
    with pytest.raises(DocumentError, match=r"alias 'x1' is declared twice"):
        load(add=block("device", 1).replace('key = "acme-x0"', 'key = "acme-x2"\naliases = ["x1"]'))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('aliases = ["x1"]', 'aliases = ["acme-x1"]'),
        ('aliases = ["x1"]', 'aliases = ["ACME-X1"]'),
        ('aliases = ["x1"]', 'aliases = ["x1", "X1"]'),
        ('key = "acme-x"\n', 'key = "acme-x1"\n'),
        ('key = "acme-x"\n', 'key = "X1"\n'),
        ('key = "acme-x0"\n', 'key = "X1"\n'),
    ],
)
def test_keys_aliases_and_ambiguous_keys_share_one_space_of_names(load: Callable[..., Matrix], old: str, new: str) -> None:
    with pytest.raises(DocumentError, match="is declared twice"):
        load(old, new)


def test_a_device_whose_key_has_capitals_is_found(load: Callable[..., Matrix]) -> None:
    changed = load('key = "acme-x0"', 'key = "Acme-X0"')
    assert changed.device("acme-x0").key == changed.device("ACME-X0").key == "Acme-X0"


OTHER = """
schema = 1
family = "other"
source = [{ id = "report", title = "a report", location = "page 9" }]
"""
ROW_OF_OTHER = """[[row]]
arch = "ax1"
op = "matmul"
a = "hif8"
b = "hif8"
path = "mma.sync"
accumulate = "fp32"
level = "absent"
source = ["report"]
evidence = "measured"
"""


@pytest.mark.parametrize("family", ["other", "acme"])
@pytest.mark.parametrize(
    ("record", "label"),
    [
        (ROW_OF_OTHER, "row ax1 matmul hif8 hif8 none mma.sync fp32: architecture 'ax1'"),
        (
            '[[peak]]\ndevice = "acme-x1"\nformat = "fp16"\naccumulate = "fp32"\ntera_per_s = 1.0\nbasis = "vendor"\n'
            'source = ["report"]\nevidence = "measured"\n',
            "peak acme-x1 fp16: device 'acme-x1'",
        ),
    ],
)
def test_a_file_may_not_add_records_to_what_another_declares(record: str, label: str, family: str) -> None:
    other = OTHER.replace('family = "other"', f'family = "{family}"')
    files = [(name, decode_toml(text, MatrixFile, name)) for name, text in [("acme.toml", FIXTURE.read_bytes()), ("other.toml", (other + record).encode())]]
    with pytest.raises(DocumentError) as caught:
        Matrix(files)
    assert str(caught.value).startswith(f"other.toml: {label} is declared in acme.toml")
    with pytest.raises(DocumentError, match="is not declared"):
        Matrix(files[1:])


DEVICE_OF_OTHER = """[[device]]
key = "other-1"
arch = "ax1"
name = "Other 1"
names = ["OTHER 1"]
source = ["report"]
evidence = "measured"
"""


def test_a_file_may_declare_a_device_of_another_files_architecture() -> None:
    files = [(name, decode_toml(text, MatrixFile, name)) for name, text in [("a", FIXTURE.read_bytes()), ("b", (OTHER + DEVICE_OF_OTHER).encode())]]
    both = Matrix(files)
    assert both.identify("OTHER 1") == (both.devices["other-1"], both.archs["ax1"])


def test_a_reported_name_leads_to_one_device() -> None:
    other = OTHER + DEVICE_OF_OTHER.replace('"OTHER 1"', '"OTHER 1", "ACME X1 64GB"')
    files = [(name, decode_toml(text, MatrixFile, name)) for name, text in [("acme.toml", FIXTURE.read_bytes()), ("other.toml", other.encode())]]
    with pytest.raises(DocumentError, match=r"^other\.toml: device 'other-1': reported name 'ACME X1 64GB' is that of 'acme-x1' in acme\.toml"):
        Matrix(files)


def test_a_refused_key_is_one_printable_line(load: Callable[..., Matrix]) -> None:
    changed = load('message = "write acme-x0 or acme-x1"', 'message = "write\\u001b[31m\\nacme-x0\\u202e"')
    with pytest.raises(UnknownNameError) as caught:
        changed.device("acme-x")
    assert str(caught.value) == "device 'acme-x' is refused: write\\x1b[31m acme-x0\\u202e"


def test_two_files_may_not_declare_the_same_device() -> None:
    document = decode_toml(read_document(FIXTURE), MatrixFile, "acme.toml")
    other = msgspec.structs.replace(document, family="other", arch=(), row=(), ambiguous=())
    with pytest.raises(DocumentError, match=r"two\.toml: device 'acme-x1' is declared twice"):
        Matrix([("one.toml", document), ("two.toml", other)])


def test_rows_that_differ_in_one_field_of_the_key_stand_together(load: Callable[..., Matrix]) -> None:
    before = len(load().rows())
    for old, new in [
        ('arch = "ax1"', 'arch = "ax0"'),
        ('op = "matmul"', 'op = "grouped_matmul"'),
        ('a = "fp32"', 'a = "fp64"'),
        ('b = "fp32"', 'b = "fp64"'),
        ('path = "simt"', 'scaling = "tensor"\npath = "simt"'),
        ('path = "simt"', 'path = "wgmma"'),
        ('accumulate = "fp32"', 'accumulate = "fp64"'),
    ]:
        assert len(load(add=block("row").replace(old, new, 1)).rows()) == before + 1


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('key = "acme-x1"\narch = "ax1"', 'key = "acme-x1"\narch = "ax9"', r"device 'acme-x1': architecture 'ax9' is not declared"),
        ('[[row]]\narch = "ax1"', '[[row]]\narch = "ax9"', r"row ax9 matmul fp32 fp32 none simt fp32: architecture 'ax9' is not declared"),
        ('source = ["manual", "probe"]', 'source = ["manual", "rumor"]', r"row: source 'rumor' is not declared"),
        ('basis = "vendor"\nsource = ["manual"]', 'basis = "vendor"\nsource = ["rumor"]', r"peak: source 'rumor' is not declared"),
        ('device = "acme-x1"\nformat', 'device = "acme-x9"\nformat', r"peak acme-x9 bf16: device 'acme-x9' is not declared"),
        (
            '[[switch]]\narch = "*"',
            '[[switch]]\narch = "ax9"',
            r"switchdefault ax9 matmul\.reduced matmul fp32: architecture 'ax9' is not declared in this file",
        ),
        *[("tera_per_s = 100.0", f"tera_per_s = {rate}", r"peak acme-x1 bf16: tera_per_s = .* is no rate") for rate in ("0", "-1.5", "nan", "inf")],
        ('name_prefixes = ["ACME X0"]', 'name_prefixes = [""]', r"architecture 'ax0': an empty name prefix would match every device"),
        ("memory_bytes = [17179869184]", "memory_bytes = [0]", r"device 'acme-x0': a size of \(0,\) is not above 0"),
        ("memory_bytes = [17179869184]", "bandwidth_bytes_per_s = [2, -1]", r"device 'acme-x0': a size of \(2, -1\) is not above 0"),
        ('[[overflow]]\narch = "ax1"', '[[overflow]]\narch = "ax9"', r"overflow ax9: architecture 'ax9' is not declared in this file"),
        ('[[overflow]]\narch = "ax1"', '[[overflow]]\narch = "*"', r"overflow \*: architecture '\*' is not declared in this file"),
        ('[[collective]]\narch = "*"', '[[collective]]\narch = "ax9"', r"collective ax9 all_reduce_sum fp32: architecture 'ax9' is not declared in this file"),
        ('mode = "inf_nan"\nsource = ["manual"]', 'mode = "inf_nan"\nsource = []', r"overflow: it cites no source"),
        ('saw fp32.", source = "probe"', 'saw fp32.", source = "rumor"', r"row: source 'rumor' is not declared"),
    ],
)
def test_a_name_that_is_not_declared_is_refused(load: Callable[..., Matrix], old: str, new: str, message: str) -> None:
    with pytest.raises(DocumentError, match=rf"acme\.toml: .*{message}"):
        load(old, new)


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("schema = 1", "schema = 2", r"\$\.schema"),
        ("schema = 1", "", r"missing required field `schema`"),
        ("schema = 1", "schema = 1\nsichema = 1", r"unknown field `sichema`"),
        ('level = "native"', 'level = "supported"', r"\$\.row\[0\]\.level"),
        ('level = "native"', "level = true", r"\$\.row\[0\]\.level"),
        ('level = "native"', 'level = "native"\nfaster = 1', r"unknown field `faster` - at `\$\.row\[0\]`"),
        ('evidence = "documented"\n\n[[row]]', 'evidence = "heard"\n\n[[row]]', r"evidence"),
        ("fraction_bits = 23", "fraction_bits = 23.0", r"\$\.row\[0\]\.accumulator\.fraction_bits"),
        ("fraction_bits = 23", 'fraction_bits = "many"', r"\$\.row\[0\]\.accumulator\.fraction_bits"),
        ("status_register = false", 'status_register = "no"', r"\$\.overflow\[1\]\.status_register"),
        ('mode = "saturating"', 'mode = "wrap"', r"\$\.overflow\[1\]\.mode"),
        ('title = "Acme programmer', 'titel = "Acme programmer', r"\$\.source\[0\]"),
        ("[[row]]", "[row]", r"cannot read"),
        ('op = "matmul"', 'op = "matmul', r"cannot read"),
    ],
)
def test_a_malformed_file_is_refused_by_field(load: Callable[..., Matrix], old: str, new: str, field: str) -> None:
    with pytest.raises(DocumentError, match=field) as caught:
        load(old, new)
    assert "acme.toml" in str(caught.value)
    assert "matrix-schema.md" in caught.value.remedy


@pytest.mark.parametrize("content", [b"\xff\xfe", b'schema = 1\nfamily = "\xc3\x28"', b"\x00", b"["])
def test_what_is_not_text_or_not_toml_is_refused(content: bytes) -> None:
    with pytest.raises(DocumentError, match=r"cannot read x\.toml"):
        decode_toml(content, MatrixFile, "x.toml")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="No such file"):
        load_matrix([tmp_path / "none.toml"])
    with pytest.raises(DocumentError, match="directory"):
        load_matrix([tmp_path])
    with pytest.raises(DocumentError, match="null"):
        load_matrix([tmp_path / "a\0b"])


def test_no_file_at_all_is_an_empty_matrix() -> None:
    assert load_matrix([]).summary()["rows"] == 0


@pytest.mark.parametrize("key", ["acme-x1", "ACME-X1", "x1", "X1"])
def test_a_device_is_found_by_key_and_alias_in_any_case(acme: Matrix, key: str) -> None:
    assert acme.device(key).key == "acme-x1"


def test_an_unknown_device_is_answered_with_the_nearest(acme: Matrix) -> None:
    with pytest.raises(UnknownNameError, match=r"unknown device 'acme-x9': .*nearest: acme-x") as caught:
        acme.device("acme-x9")
    assert caught.value.allowed == ("acme-x0", "acme-x1", "x1")


def test_an_ambiguous_key_is_refused_with_what_to_write(acme: Matrix) -> None:
    with pytest.raises(UnknownNameError) as caught:
        acme.device("Acme-X")
    assert str(caught.value) == "device 'Acme-X' is refused: write acme-x0 or acme-x1"
    assert caught.value.allowed == ("acme-x0", "acme-x1")


def test_an_unknown_architecture_is_answered_with_the_nearest(acme: Matrix) -> None:
    with pytest.raises(UnknownNameError, match=r"unknown architecture 'ax2'.*nearest: ax1, ax0|nearest: ax0, ax1"):
        acme.arch("ax2")
    assert acme.arch("ax1").name == "Acme X1 core"
    assert acme.family_of("ax1") == "acme"


@pytest.mark.parametrize(
    ("name", "identifier", "model", "arch"),
    [
        ("ACME X1 32GB", "", "acme-x1", "ax1"),
        ("ACME X1 64GB", "9.9", "acme-x1", "ax1"),
        ("ACME X1", "", None, None),
        ("ACME X1 32GB+", "", None, None),
        ("acme x1 32gb", "", None, None),
        ("ACME X1 128GB", "1.0", None, "ax1"),
        ("ACME X1 128GB", "1.00", None, None),
        ("ACME X0 16GB", "", "acme-x0", "ax0"),
        ("ACME X0 8GB", "", None, "ax0"),
        ("", "", None, None),
    ],
)
def test_identify_is_exact(acme: Matrix, name: str, identifier: str, model: str | None, arch: str | None) -> None:
    found, architecture = acme.identify(name, identifier)
    assert (found and found.key, architecture and architecture.key) == (model, arch)


def test_rows_are_filtered_by_every_field(acme: Matrix) -> None:
    assert len(acme.rows()) == 15
    assert [row.a for row in acme.rows("ax1", op="matmul", b="fp8_e4m3")] == ["fp8_e4m3", "fp8_e5m2"]
    assert [row.key for row in acme.rows(level="absent")] == [("ax1", "conv", "tf32", "tf32", "none", "simt", "fp32")]
    assert acme.rows("nowhere") == []


def test_other_tables_are_those_of_the_architecture(acme: Matrix) -> None:
    assert [switch.name for switch in acme.switches("ax0")] == ["matmul.reduced"]
    assert [switch.name for switch in acme.switches("ax1")] == ["matmul.reduced", "conv.reduced", "sum.half"]
    assert [(record.op, record.format) for record in acme.collectives("ax0")] == [("all_reduce_sum", "fp32"), ("all_reduce_sum", "bf16")]
    assert [peak.format for peak in acme.peaks("acme-x1")] == ["bf16"]
    assert acme.peaks("acme-x0") == []
    overflow = acme.overflow("ax0")
    assert overflow is not None
    assert (overflow.mode, overflow.status_register) == ("saturating", False)


def test_what_no_record_says_is_none_or_unknown(load: Callable[..., Matrix]) -> None:
    silent = load(block("overflow").strip("\n"), "")
    assert silent.overflow("ax1") is None
    overflow = load().overflow("ax1")
    assert overflow is not None
    assert overflow.status_register == "unknown"


def test_a_citation_names_the_first_source_and_counts_the_others(acme: Matrix) -> None:
    first, second = acme.rows("ax1", a="fp32")[0], acme.rows("ax1", a="bf16")[0]
    assert acme.citation(first, "ax1") == "Acme programmer's manual, chapter 3"
    assert acme.citation(second, "ax1") == "Acme programmer's manual, chapter 3 (+1 more)"


def test_the_summary_of_the_fixture(acme: Matrix) -> None:
    assert acme.summary() == {
        "rows": 15,
        "records": 28,
        "architectures": 2,
        "devices": 2,
        "sources": 2,
        "facts": 4,
        "facts_used": 4,
        "facts_dropped": 0,
        "levels": {"absent": 1, "converted": 1, "emulated": 2, "native": 11},
        "evidence": {"documented": 12, "probed": 3},
        "conflicts": 1,
    }


def test_the_summary_of_the_shipped_matrices_counts_what_the_files_hold(shipped: Matrix) -> None:
    documents = [tomllib.loads(path.read_text(encoding="utf-8")) for path in shipped_files()]
    rows = [row for document in documents for row in document.get("row", [])]
    records = [record for document in documents for table in CITED for record in document.get(table, [])]
    names = {name for document in documents for name in document.get("facts", {})}
    assert shipped.summary() == {
        "rows": len(rows),
        "records": len(records),
        "architectures": sum(len(document["arch"]) for document in documents),
        "devices": sum(len(document["device"]) for document in documents),
        "sources": sum(len(document["source"]) for document in documents),
        "facts": sum(sum(document.get("facts", {}).values()) for document in documents),
        "facts_used": len({fact for record in records for fact in record.get("facts", [])}),
        "facts_dropped": sum(1 for entry in load_dropped().dropped if entry.fact.split("/")[0] in names),
        "levels": dict(sorted(Counter(row["level"] for row in rows).items())),
        "evidence": dict(sorted(Counter(row["evidence"] for row in rows).items())),
        "conflicts": sum(1 for row in rows if row.get("conflict")),
    }


def test_files_can_be_loaded_in_any_order(shipped: Matrix) -> None:
    assert load_matrix(reversed(shipped_files())).summary() == shipped.summary()


@pytest.mark.parametrize("path", SHIPPED)
def test_a_shipped_file_stands_on_its_own(path: Path) -> None:
    assert load_matrix([path]).summary()["rows"] > 0


def test_shipped_files_are_the_matrices_and_nothing_else() -> None:
    names = [path.name for path in shipped_files()]
    assert names == sorted(names)
    assert not set(names) & set(NOT_MATRICES)
    assert all(name.endswith(".toml") for name in names)


def test_every_shipped_key_and_alias_leads_to_a_device(shipped: Matrix) -> None:
    for model in shipped.devices.values():
        for key in (model.key, *model.aliases):
            assert shipped.device(key) is model
        for name in model.names:
            assert shipped.identify(name)[0] is model


def test_every_shipped_ambiguous_key_is_refused_and_its_candidates_are_not(shipped: Matrix) -> None:
    assert shipped.ambiguous
    for key, ambiguous in shipped.ambiguous.items():
        with pytest.raises(UnknownNameError, match="is refused"):
            shipped.device(key)
        for candidate in ambiguous.candidates:
            assert shipped.device(candidate).key == candidate


@pytest.mark.parametrize(
    ("name", "model", "arch"),
    [
        ("Ascend910B", "ascend-910a", "ascend-910a"),
        ("Ascend910B2", "ascend-910b2", "ascend-a2"),
        ("Ascend910_9392", "ascend-910c", "ascend-a3"),
        ("Ascend950PR_9599", "ascend-950pr", "ascend-950"),
        ("Ascend777", None, None),
        ("Ascend910B9", None, None),
        ("Ascend910", None, None),
    ],
)
def test_names_that_share_a_prefix_are_told_apart(shipped: Matrix, name: str, model: str | None, arch: str | None) -> None:
    found, architecture = shipped.identify(name)
    assert (found and found.key, architecture and architecture.key) == (model, arch)


@pytest.mark.parametrize(("name", "arch"), [("7.0", "sm_70"), ("7.5", "sm_75"), ("6.0", "sm_60"), ("9.0", "sm_90"), ("9.00", None), ("9", None)])
def test_a_capability_leads_to_an_architecture_only(shipped: Matrix, name: str, arch: str | None) -> None:
    found, architecture = shipped.identify("a name that no file holds", name)
    assert found is None
    assert (architecture and architecture.key) == arch


def test_the_key_that_is_two_families_says_which_to_write(shipped: Matrix) -> None:
    with pytest.raises(UnknownNameError, match=r"ascend-910a.*ascend-910b1|ascend-910b1.*ascend-910a"):
        shipped.device("ascend-910b")


def test_a_device_of_a_matrix_is_planned_for_and_not_usable(acme: Matrix) -> None:
    assert device_from_matrix(acme, "x1") == Device(
        key="acme-x1",
        arch="ax1",
        name="Acme X1",
        usable=False,
        cause="planned from the matrix; no such device was found here",
        remedy="`mpbackend doctor` says what is installed",
    )
    assert device_from_matrix(acme, "acme-x0").memory_bytes == 17179869184, "one variant, so its memory is known"
    assert device_from_matrix(acme, "x1").address == "acme-x1"


@pytest.mark.parametrize(("accumulator", "bits"), [(None, None), (Accumulator(), None), (Accumulator(fraction_bits=13), 13)])
def test_effective_fraction_bits(accumulator: Accumulator | None, bits: int | None) -> None:
    assert effective_fraction_bits(accumulator) == bits


def test_counts_are_sorted_by_name() -> None:
    assert list(count_by(["b", "a", "b"]).items()) == [("a", 1), ("b", 2)]


def test_records_are_immutable(acme: Matrix) -> None:
    record: Any = acme.rows()[0]
    with pytest.raises(AttributeError, match="immutable"):
        record.level = "absent"


def test_the_vocabulary_is_strict() -> None:
    assert isinstance(load_vocabulary(), Vocabulary)
    with pytest.raises(DocumentError, match="layer"):
        decode_toml(b'schema = 1\n[op]\n[scaling]\n[path]\nx = { layer = "magic", meaning = "" }', Vocabulary, "v.toml")
