from __future__ import annotations

from typing import Any

import msgspec
import pytest

from mpbackend.comparison.conditions import Condition, judge_conditions
from mpbackend.comparison.runs import match, read_run
from mpbackend.decisions import Decision
from mpbackend.observe.record import ClassReading, Recorded, Run
from tests.comparison.building import SETTINGS, falling, recorded, rows


def judged(one: Recorded, other: Recorded, question: Any = "vendor") -> dict[str, Condition]:
    found = judge_conditions(match([read_run(one)], [read_run(other)]), question)
    return {condition.name: condition for condition in found}


PLANTED: dict[str, dict[str, Any]] = {
    "recipe": {"recipe": "bf16"},
    "device": {"device": "ascend-910b3", "arch": "ascend-a2"},
    "effective batch": {"steps": tuple(msgspec.structs.replace(row, samples=16) for row in rows(falling()))},
    "tokens": {"steps": tuple(msgspec.structs.replace(row, tokens=128) for row in rows(falling()))},
    "first step": {"steps": rows(falling(), start=101)},
    "clipping and averaging": {"settings": {**SETTINGS, "clip_norm": "none"}},
    "optimizers": {"settings": {**SETTINGS, "optimizers": "SGD"}},
    "torch": {"environment": {"torch": "2.12.0+x"}},
    "seed": {"seed": 2, "fingerprints": {"data": "data of 1", "weights": "weights of 1"}},
    "initial weights": {"fingerprints": {"data": "data of 1", "weights": "others"}},
    "data": {"fingerprints": {"data": "others", "weights": "weights of 1"}},
    "learning rates": {"steps": rows(falling(), lr=2e-3)},
    "micro-batches": {"settings": {**SETTINGS, "micro_batches": "4"}},
    "loss scale mode": {"plan": (Decision(role="loss_scale.mode", asked="dynamic", granted="dynamic", level="storage", reason=""),)},
    "communication": {"settings": {**SETTINGS, "communication": "sum, 2 ranks", "ranks": "1"}},
    "steps": {"steps": rows(falling(300))},
}
MATTERS = {
    "vendor": {
        "recipe",
        "effective batch",
        "tokens",
        "first step",
        "clipping and averaging",
        "optimizers",
        "seed",
        "initial weights",
        "data",
        "learning rates",
    },
    "recipe": {
        *("device", "effective batch", "tokens", "first step", "clipping and averaging", "optimizers", "torch", "seed", "initial weights", "data"),
        "learning rates",
    },
}


@pytest.mark.parametrize("question", ["vendor", "recipe"])
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_difference_is_named_and_nothing_else_is(name: str, question: str) -> None:
    found = judged(recorded(), recorded(**PLANTED[name]), question)
    also = {"first step": {"steps"}, "loss scale mode": set(), "recipe": set()}.get(name, set())
    assert {item.name for item in found.values() if item.status == "different"} - {"versions and variables"} - also == {name}
    assert found[name].matters == (name in MATTERS[question])
    assert found[name].baseline != found[name].candidate


def test_equal_runs_have_equal_conditions() -> None:
    found = judged(recorded(), recorded())
    assert {item.status for item in found.values() if item.matters} == {"same"}
    assert next(iter(found.values())).matters, "those that matter stand first"


MISSING: dict[str, dict[str, Any]] = {
    "seed": {"run": Run(id="x")},
    "initial weights": {"fingerprints": {"data": "data of 1"}},
    "data": {"fingerprints": {"data": "", "weights": "weights of 1"}},
    "effective batch": {"settings": {name: value for name, value in SETTINGS.items() if name != "communication"}},
    "clipping and averaging": {"settings": {name: value for name, value in SETTINGS.items() if name != "clip_norm"}},
    "learning rates": {"steps": tuple(msgspec.structs.replace(row, lr=None) for row in rows(falling()))},
    "tokens": {"steps": tuple(msgspec.structs.replace(row, tokens=0) for row in rows(falling()))},
}


@pytest.mark.parametrize("name", MISSING)
def test_what_a_record_does_not_say_is_unknown(name: str) -> None:
    found = judged(recorded(), recorded(**MISSING[name]))
    assert {item.name for item in found.values() if item.status == "unknown" and item.matters} == {name}
    assert found[name].candidate in ("not recorded", "none counted")


def test_data_without_tokens_has_the_same_tokens() -> None:
    bare = tuple(msgspec.structs.replace(row, tokens=0) for row in rows(falling()))
    assert judged(recorded(steps=bare), recorded(steps=bare))["tokens"].status == "same"


def test_fingerprints_of_weights_in_other_formats_cannot_be_compared() -> None:
    low: dict[str, Any] = {"classes": {"parameters": ClassReading(asked="bf16 + fp32 master")}, "fingerprints": {"data": "data of 1", "weights": "others"}}
    assert judged(recorded(), recorded(**low), "recipe")["initial weights"].status == "unknown"


def test_a_fingerprint_of_a_longer_run_cannot_be_compared() -> None:
    shorter = recorded(falling(300), fingerprints={"data": "a part", "weights": "weights of 1"})
    assert judged(recorded(), shorter)["data"].status == "unknown"


def test_a_skipped_step_delays_the_schedule_and_does_not_change_it() -> None:
    rates = [1e-3 * step for step in range(1, 21)]
    taken = rows(falling(20))
    plain = tuple(msgspec.structs.replace(row, lr=rate) for row, rate in zip(taken, rates, strict=True))
    delayed = [msgspec.structs.replace(plain[0]), msgspec.structs.replace(plain[1], stepped=False)]
    delayed += [msgspec.structs.replace(row, lr=rate) for row, rate in zip(plain[2:], rates[1:], strict=False)]
    assert judged(recorded(steps=plain), recorded(steps=tuple(delayed)))["learning rates"].status == "same"


def test_rates_are_the_same_up_to_two_roundings_to_fp32() -> None:
    def with_rate(rate: float) -> Recorded:
        return recorded(steps=rows(falling(20), lr=rate))

    assert judged(with_rate(1e-3), with_rate(1e-3 * (1 + 2.0**-24)))["learning rates"].status == "same"
    found = judged(with_rate(1e-3), with_rate(1e-3 * (1 + 2.0**-22)))["learning rates"]
    assert (found.status, found.note) == ("different", "from taken step 1 on: 0.001 and 0.00100000024")


def test_a_side_that_mixes_recipes_or_devices_is_no_side() -> None:
    mixed = [read_run(recorded(seed=1)), read_run(recorded(seed=2, device="other"))]
    found = judge_conditions(match(mixed, [read_run(recorded(seed=1)), read_run(recorded(seed=2))]), "vendor")
    assert [item.name for item in found if item.matters and item.status == "different"] == ["one device a side"]


def test_emulation_is_another_device() -> None:
    emulated = recorded(run=Run(id="x", seed=1, kind="emulated"))
    assert judged(recorded(), emulated, "recipe")["device"].candidate == "h100, emulated"
    assert judged(recorded(), emulated, "recipe")["device"].status == "different"


def test_the_build_of_torch_is_no_version() -> None:
    found = judged(recorded(environment={"torch": "2.13.0+cpu"}), recorded(environment={"torch": "2.13.0+other"}), "recipe")
    assert found["torch"].status == "same"
    assert found["versions and variables"].status == "different"
