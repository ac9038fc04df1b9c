"""The matrix files obey their rules, and each rule catches the fault it is there for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from mpbackend.capability import Ambiguous, Arch, Collective, Conflict, DeviceModel, Overflow, Peak, Row, Source, SwitchDefault
from mpbackend.documents import Dropped, DroppedFile, MatrixFile, PathMeaning, Vocabulary
from tests.matrices.rules import RULES, Collection, problems, shipped

replace: Callable[..., Any] = msgspec.structs.replace

CITED: dict[str, Any] = {"source": ("manual",), "evidence": "documented"}
PRODUCT: dict[str, Any] = {"arch": "one", "op": "matmul", "path": "mac", "accumulate": "fp32", **CITED}
FIRST = Row(a="bf16", b="bf16", out=("bf16", "fp32"), level="native", facts=("acme/0", "acme/2"), **PRODUCT)
SECOND = Row(a="fp32", b="fp32", out=("fp32",), level="converted", computes="tf32", facts=("acme/1",), **PRODUCT)
OTHER_CLAIM = (Conflict(claim="It is the first.", source="manual"),)
DEVICES = (
    DeviceModel(key="card-s", arch="one", name="Card S", names=("Card S", "Card S2"), codes={"Card S": 1}, aliases=("small",), **CITED),
    DeviceModel(key="card-x", arch="two", name="Card X", names=("Card X",), **CITED),
)
ARCHS = (
    Arch(key="one", name="First", family="acme", identifiers=("1.0",), name_prefixes=("Card S",), **CITED),
    Arch(key="two", name="Second", family="acme", identifiers=("2.0",), source=("paper",), evidence="literature", conflict=OTHER_CLAIM),
)
PEAK = Peak(device="card-s", variant="Card S", format="bf16", accumulate="fp32", tera_per_s=1.5, basis="vendor", facts=("acme/2",), **CITED)
SWITCH = SwitchDefault(arch="one", name="fast", op="matmul", format="fp32", default="True", computes={"True": "tf32", "False": "fp32"}, **CITED)
SOURCES = (Source(id="manual", title="Manual", location="acme/manual@1:3", date="2026-01-31"), Source(id="paper", title="Paper", location="doi"))


def sound() -> Collection:
    document = MatrixFile(
        schema=1,
        family="acme",
        facts={"acme": 4},
        source=SOURCES,
        arch=ARCHS,
        device=DEVICES,
        ambiguous=(Ambiguous(key="card", message="which one", candidates=("card-s", "card-x")),),
        row=(FIRST, SECOND),
        peak=(PEAK,),
        switch=(SWITCH,),
        overflow=(Overflow(arch="one", mode="inf_nan", **CITED),),
        collective=(Collective(arch="*", op="move", format="bf16", level="library", **CITED),),
    )
    vocabulary = Vocabulary(
        schema=1,
        op={"conv": "convolution", "matmul": "product"},
        scaling={"none": "plain"},
        path={"mac": PathMeaning(layer="instruction", meaning="multiply and add")},
    )
    return Collection(
        files=[("acme.toml", document)],
        vocabulary=vocabulary,
        dropped=DroppedFile(schema=1, dropped=(Dropped(fact="acme/3", reason="a phone"),)),
        unused={"op.conv": "planned for"},
    )


def planted(**tables: Any) -> Collection:
    """Return the sound collection with tables of its file replaced."""
    collection = sound()
    name, document = collection.files[0]
    return collection._replace(files=[(name, replace(document, **tables))])


def dropping(*entries: Dropped) -> Collection:
    return sound()._replace(dropped=DroppedFile(schema=1, dropped=entries))


def twice() -> Collection:
    """Return the sound collection with a second file of another family that repeats the first one's records."""
    collection = sound()
    document = collection.files[0][1]
    other = replace(document, family="copy", facts={})
    return collection._replace(files=[*collection.files, ("copy.toml", other)])


FAULTS: dict[str, tuple[Collection, str]] = {
    "source not declared": (planted(row=(replace(FIRST, source=("manual", "rumor")), SECOND)), "source 'rumor' is cited but not declared"),
    "source of a conflict not declared": (
        planted(arch=(ARCHS[0], replace(ARCHS[1], conflict=(Conflict(claim="No.", source="rumor"),)))),
        "source 'rumor' is cited but not declared",
    ),
    "source not used": (planted(arch=(ARCHS[0], replace(ARCHS[1], source=("manual",)))), "source 'paper' is declared but not cited"),
    "no source": (planted(row=(replace(FIRST, source=()), SECOND)), "row one matmul bf16 bf16 none mac fp32 cites no source"),
    "source without a place": (planted(source=(replace(SOURCES[0], location=" "), SOURCES[1])), "source 'manual' has no title or no location"),
    "date not ISO": (planted(source=(replace(SOURCES[0], date="31.1.2026"), SOURCES[1])), "not an ISO date"),
    "fact neither cited nor dropped": (dropping(), "fact 'acme/3' is neither cited nor dropped"),
    "fact lost by a record": (planted(row=(FIRST, replace(SECOND, facts=()))), "fact 'acme/1' is neither cited nor dropped"),
    "fact beyond the collection": (planted(row=(FIRST, replace(SECOND, facts=("acme/1", "acme/4")))), "cites fact 'acme/4', which was not collected"),
    "fact of no collection": (planted(row=(FIRST, replace(SECOND, facts=("acme/1", "other/0")))), "cites fact 'other/0'"),
    "fact cited and dropped": (dropping(Dropped(fact="acme/1", reason="no"), Dropped(fact="acme/3", reason="no")), "fact 'acme/1' is dropped and yet cited"),
    "dropped fact of no collection": (dropping(Dropped(fact="acme/3", reason="no"), Dropped(fact="acme/9", reason="no")), "dropped.toml names fact 'acme/9'"),
    "dropped without a reason": (dropping(Dropped(fact="acme/3", reason="")), "'acme/3' is dropped without a reason"),
    "operation not in the vocabulary": (planted(row=(replace(FIRST, op="matrix"), SECOND)), "has the op 'matrix', which is not in the vocabulary"),
    "scaling not in the vocabulary": (planted(peak=(replace(PEAK, scaling="tile"),)), "has the scaling 'tile'"),
    "path not in the vocabulary": (planted(row=(FIRST, replace(SECOND, path="mad"))), "has the path 'mad'"),
    "vocabulary name idle": (sound()._replace(unused={}), "op.conv is used by no row"),
    "vocabulary excuse stale": (
        sound()._replace(unused={"op.conv": "planned for", "op.matmul": "why"}),
        "op.matmul has a reason for being unused but is used or gone",
    ),
    "format unknown": (planted(row=(replace(FIRST, a="fp12"), SECOND)), "names 'fp12', which is no format"),
    "format not canonical": (planted(row=(replace(FIRST, out=("bfloat16", "fp32")), SECOND)), "writes 'bfloat16' for 'bf16'"),
    "format that the device decides": (planted(switch=(replace(SWITCH, computes={"True": "hf32", "False": "fp32"}),)), "names 'hf32', which is no format"),
    "accumulator not canonical": (planted(peak=(replace(PEAK, accumulate="float32"),)), "writes 'float32' for 'fp32'"),
    "level unknown": (planted(row=(replace(FIRST, level="yes"), SECOND)), "has an unknown level"),
    "evidence unknown": (planted(peak=(replace(PEAK, evidence="hearsay"),)), "has the evidence 'hearsay'"),
    "converted to nothing": (planted(row=(FIRST, replace(SECOND, computes=""))), "is converted and does not say to what"),
    "native in another format": (planted(row=(replace(FIRST, computes="fp16"), SECOND)), "is native and yet computes in fp16"),
    "absent with a result": (planted(row=(replace(FIRST, level="absent"), SECOND)), "is absent and yet has a result"),
    "absent although disputed": (
        planted(row=(replace(FIRST, level="absent", out=(), conflict=(Conflict(claim="It is there.", source="paper"),)), SECOND)),
        "is absent although sources disagree",
    ),
    "rows out of order": (planted(row=(SECOND, FIRST)), "stands after"),
    "sources out of order": (planted(source=SOURCES[::-1]), "source manual stands after paper"),
    "vocabulary out of order": (
        sound()._replace(vocabulary=replace(sound().vocabulary, op={"matmul": "product", "conv": "convolution"})),
        "vocabulary.toml: the names of op are out of order",
    ),
    "dropped facts out of order": (dropping(Dropped(fact="acme/3", reason="no"), Dropped(fact="acme/2", reason="no")), "dropped.toml: facts are out of order"),
    "facts out of order": (planted(row=(replace(FIRST, facts=("acme/2", "acme/0")), SECOND)), "lists its facts out of order or twice"),
    "row twice": (planted(row=(FIRST, FIRST, SECOND)), "row one matmul bf16 bf16 none mac fp32 also stands in acme.toml"),
    "row in two files": (twice(), "copy.toml: row one matmul bf16 bf16 none mac fp32 also stands in acme.toml"),
    "reported name twice": (planted(device=(DEVICES[0], replace(DEVICES[1], names=("Card S", "Card X")))), "reported name 'Card S' stands for two devices"),
    "alias of another device": (planted(device=(replace(DEVICES[0], aliases=("card-x",)), DEVICES[1])), "alias 'card-x' stands for two devices"),
    "ambiguous and a device": (
        planted(ambiguous=(Ambiguous(key="card-s", message="?", candidates=("card-s", "card-x")),)),
        "'card-s' is ambiguous and yet a device",
    ),
    "key that nobody can ask for": (planted(device=(replace(DEVICES[0], aliases=("Small",)), DEVICES[1])), "'Small' is not in lower case"),
    "identifier twice": (planted(arch=(ARCHS[0], replace(ARCHS[1], identifiers=("1.0",)))), "identifier '1.0' stands for two architectures"),
    "prefix over another architecture": (planted(arch=(replace(ARCHS[0], name_prefixes=("Card",)), ARCHS[1])), "covers 'Card X' of another architecture"),
    "code of an unreported name": (planted(device=(replace(DEVICES[0], codes={"Card T": 1}), DEVICES[1])), "has a code for 'Card T'"),
    "architecture not declared": (planted(overflow=(Overflow(arch="three", mode="inf_nan", **CITED),)), "names the architecture 'three'"),
    "row of every architecture": (planted(row=(replace(FIRST, arch="*"), SECOND)), "names the architecture '*'"),
    "candidate that is no device": (
        planted(ambiguous=(Ambiguous(key="card", message="?", candidates=("card-s", "card-y")),)),
        "offers 'card-y', which is no device",
    ),
    "peak of no device": (planted(peak=(replace(PEAK, device="card-y"),)), "is of no device"),
    "peak of an unreported variant": (planted(peak=(replace(PEAK, variant="Card T"),)), "is of a variant that the device does not report"),
    "peak of zero": (planted(peak=(replace(PEAK, tera_per_s=0.0),)), "is not positive"),
    "default setting unexplained": (planted(switch=(replace(SWITCH, default="None"),)), "does not say what its default computes"),
    "note not ASCII": (planted(row=(replace(FIRST, note="\u6ce8"), SECOND)), "has text that is not ASCII"),
    "note too long": (planted(row=(replace(FIRST, note="x" * 241), SECOND)), "has a note of 241 characters"),
    "source id not a name": (planted(source=(replace(SOURCES[0], id="the manual"), SOURCES[1])), "source id 'the manual' is not a short name"),
}


def test_the_shipped_matrices_break_no_rule() -> None:
    assert problems(shipped()) == []


def test_a_sound_collection_breaks_no_rule() -> None:
    assert problems(sound()) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: str) -> None:
    collection, expected = FAULTS[fault]
    found = problems(collection)
    assert any(expected in problem for problem in found), found


def test_every_rule_catches_a_planted_fault() -> None:
    caught = {rule.__name__ for rule in RULES for collection, _ in FAULTS.values() if list(rule(collection))}
    assert caught == {rule.__name__ for rule in RULES}
