from __future__ import annotations

import msgspec
import pytest

from mpbackend.backend import PolicyKind
from mpbackend.report import markdown, terminal
from mpbackend.report.policies import BackendPolicy, Survey, outcomes_text, policies_document, policies_report
from mpbackend.train.outcomes import Outcome

AS_GIVEN = {name: Outcome((name,), (name,)) for name in ("bf16", "fp16", "fp32")}
LOWERED = {**AS_GIVEN, "fp32": Outcome(("bf16",), ("bf16",))}
WIDE = {name: Outcome(("fp32",), ("fp32",)) for name in AS_GIVEN}
ROUNDED_INSIDE = {name: Outcome(("fp32",), (name, "fp32")) if name != "fp32" else Outcome(("fp32",), ("fp32",)) for name in AS_GIVEN}
REFUSED = {name: Outcome(refused="RuntimeError: a | b") for name in AS_GIVEN}

ONE: dict[str, PolicyKind] = {"mm": "lower", "loss": "fp32", "cat": "promote"}
TWO: dict[str, PolicyKind] = {"mm": "lower", "softmax.int": "fp32", "bce": "banned"}


def one(**changes: object) -> BackendPolicy:
    made: dict[str, object] = {
        "backend": "one",
        "autocast_key": "AutocastOne",
        "policy": ONE,
        "native": frozenset(ONE),
        "dispatcher": frozenset(ONE),
        "method": "run",
        "outcomes": {"mm": LOWERED, "loss": WIDE, "cat": AS_GIVEN, "softmax.int": AS_GIVEN, "bce": WIDE},
    }
    return BackendPolicy(**{**made, **changes})  # type: ignore[arg-type] # a test's shorthand


def two(**changes: object) -> BackendPolicy:
    made: dict[str, object] = {
        "backend": "two",
        "autocast_key": "AutocastTwo",
        "policy": TWO,
        "native": frozenset(TWO),
        "dispatcher": frozenset(TWO) | {"dot"},
        "method": "fake",
        "reason": "no driver",
        "outcomes": {"mm": LOWERED, "softmax.int": WIDE, "loss": ROUNDED_INSIDE, "cat": AS_GIVEN, "bce": REFUSED},
    }
    return BackendPolicy(**{**made, **changes})  # type: ignore[arg-type] # as above


def survey(*backends: BackendPolicy, **changes: object) -> Survey:
    listed = sorted({op for found in backends for op in found.policy})
    made: dict[str, object] = {
        "torch": "2.13.0",
        "pinned": False,
        "sensitive": frozenset(["softmax.int", "loss"]),
        "backends": backends,
        "errors": {},
        "ops": tuple(listed),
    }
    return Survey(**{**made, **changes})  # type: ignore[arg-type] # as above


def test_every_operator_of_either_set_is_there_with_both_policies() -> None:
    document = policies_document(survey(one(), two()))
    assert {entry["op"]: tuple(side["policy"] for side in entry["backends"].values()) for entry in document["ops"]} == {
        "bce": ("not listed", "banned"),
        "cat": ("promote", "not listed"),
        "loss": ("fp32", "not listed"),
        "mm": ("lower", "lower"),
        "softmax.int": ("not listed", "fp32"),
    }
    assert document["differ"] == ["bce", "cat", "loss", "softmax.int"]
    summary = document["summary"]
    assert (summary["ops"], summary["differ"], summary["same"]) == (5, 4, 1)
    assert summary["backends"]["two"]["policies"] == {"lower": 1, "fp32": 1, "promote": 0, "banned": 1}


def test_results_are_compared_apart_from_policies() -> None:
    entries = {entry["op"]: entry for entry in policies_document(survey(one(), two()))["ops"]}
    assert {op: entry["results_differ"] for op, entry in entries.items()} == {"bce": None, "cat": False, "loss": False, "mm": False, "softmax.int": True}
    assert entries["cat"]["differs"], "a policy, though nothing comes of it"
    assert entries["bce"]["backends"]["two"]["outcomes"]["bf16"] == {"refused": "RuntimeError: a | b"}
    assert entries["loss"]["backends"]["two"]["outcomes"]["bf16"] == {"out": ["fp32"], "inside": ["bf16", "fp32"]}
    summary = policies_document(survey(one(), two()))["summary"]
    assert (summary["results_compared"], summary["results_differ"]) == (4, 1)


def test_lists_are_compared_with_the_dispatcher() -> None:
    summary = policies_document(survey(one(), two()))["summary"]
    assert summary["dispatcher"] == {"ops": 6, "equal": False}
    assert summary["backends"]["one"]["dispatcher"] == {"ops": 3, "equal": True, "only_listed": [], "only_dispatcher": []}
    assert summary["backends"]["two"]["dispatcher"] == {"ops": 4, "equal": False, "only_listed": [], "only_dispatcher": ["dot"]}
    extra = policies_document(survey(one(dispatcher=frozenset(["mm"]))))["summary"]["backends"]["one"]["dispatcher"]
    assert extra["only_listed"] == ["cat", "loss"]


def test_a_backend_without_kernels_here_is_not_compared() -> None:
    absent = two(dispatcher=frozenset(), method="not run", reason="no such device type", outcomes={})
    summary = policies_document(survey(one(), absent))["summary"]
    assert summary["dispatcher"] == {"ops": 3, "equal": True}
    assert summary["backends"]["two"]["dispatcher"] == {"ops": 0, "equal": None, "only_listed": [], "only_dispatcher": []}
    assert list(summary["sensitive"]["backends"]) == ["one"]
    assert policies_document(survey(absent))["summary"]["dispatcher"]["equal"] is None
    text = terminal.render(policies_report(survey(one(), absent)), 250)
    assert "no kernels in this process to check with" in text
    assert "results: not run, no such device type" in text


def test_sensitive_operators_are_looked_into() -> None:
    sensitive = policies_document(survey(one(), two()))["summary"]["sensitive"]
    assert sensitive["differ"] == ["loss", "softmax.int"]
    assert sensitive["backends"] == {"one": {"ran": 2, "not_fp32": ["softmax.int"]}, "two": {"ran": 2, "not_fp32": ["loss"]}}


def test_a_pinned_operator_is_no_part_of_the_backends_own_list() -> None:
    found = one(policy={**ONE, "softmax.int": "fp32"}, pinned=("softmax.int",))
    summary = policies_document(survey(found, pinned=True))["summary"]
    assert (summary["ops"], summary["backends"]["one"]["ops"], summary["backends"]["one"]["pinned"]) == (4, 3, ["softmax.int"])
    assert summary["dispatcher"]["equal"]
    report = policies_report(survey(found, pinned=True))
    assert report.title == "Autocast policy of one, sensitive operators pinned to fp32"
    assert "3 listed, 1 pinned: 1 lower, 2 fp32, 1 promote; the dispatcher has the same 3; results: run" in terminal.render(report, 120)


def test_one_backend_has_no_difference() -> None:
    document = policies_document(survey(one()))
    assert "differ" not in document
    assert "differ" not in document["summary"]
    assert all("differs" not in entry for entry in document["ops"])
    assert "differ" not in terminal.render(policies_report(survey(one())), 250)


def test_the_document_is_plain_data() -> None:
    document = policies_document(survey(one(), two(), errors={"three": "RuntimeError: gone"}))
    assert msgspec.json.decode(msgspec.json.encode(document)) == document
    assert document["summary"]["errors"] == {"three": "RuntimeError: gone"}


def test_tables_show_what_differs_first() -> None:
    text = terminal.render(policies_report(survey(one(), two(), errors={"three": "RuntimeError: gone"})), 250)
    assert text.index("Policies differ (4)") < text.index("\nsoftmax.int") < text.index("Policies agree (1)") < text.index("\nmm ")
    assert "4 differ, 1 agree" in text
    assert "formats differ for 1 of 4 operators that more than one backend ran" in text
    assert "on two 1 of 2 that ran are not fp32 throughout" in text
    assert "- two: bce on bf16, fp16, fp32: RuntimeError: a | b" in text
    assert "- three: RuntimeError: gone" in text
    assert "a device may still refuse" in text
    assert "a device may still refuse" not in terminal.render(policies_report(survey(one())), 250)


def test_markdown() -> None:
    text = markdown.render(policies_report(survey(one(), two())))
    assert "| softmax.int | yes | not listed | bf16 fp16 fp32 | fp32 | fp32 |" in text
    assert "| bce |  | not listed | fp32 | banned | refused |" in text
    assert r"RuntimeError: a \| b" in text


def test_only_what_was_asked_for_is_listed_while_counts_are_of_all() -> None:
    document = policies_document(survey(one(), two(), ops=("mm",)))
    assert [entry["op"] for entry in document["ops"]] == ["mm"]
    assert (document["summary"]["ops"], document["summary"]["results_compared"]) == (5, 1)
    assert "bce on" not in terminal.render(policies_report(survey(one(), two(), ops=("mm",))), 250)


def test_many_refusals_are_counted() -> None:
    names = [f"op{index}" for index in range(20)]
    found = one(policy=dict.fromkeys(names, "lower"), native=frozenset(names), outcomes=dict.fromkeys(names, REFUSED))
    text = terminal.render(policies_report(survey(found, two())), 250)
    assert "- 20 operators on one\n  - 1 operators on two\n  - --format json says why" in text


@pytest.mark.parametrize(
    ("outcomes", "text"),
    [
        (WIDE, "fp32"),
        (LOWERED, "bf16 fp16 bf16"),
        (ROUNDED_INSIDE, "fp32 (bf16, fp16 inside)"),
        (REFUSED, "refused"),
        ({**AS_GIVEN, "fp16": Outcome(refused="x")}, "bf16 refused fp32"),
        ({"bf16": Outcome(("bf16", "fp32"), ("bf16", "fp32"))}, "bf16+fp32"),
        ({}, "not run"),
    ],
)
def test_formats_in_a_cell(outcomes: dict[str, Outcome], text: str) -> None:
    assert outcomes_text(outcomes) == text
