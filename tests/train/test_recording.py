from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import mpbackend
from mpbackend.errors import DocumentError, SessionError
from mpbackend.observe.record import load_record
from mpbackend.report.runs import run_lines
from mpbackend.train.session import Session
from tests.support.training import Batch, Net, Prepare, make_batches, make_net


def train(model: nn.Module, session: Session, batches: list[Batch]) -> None:
    for x, y in session.watch(batches):
        with session.autocast():
            loss = functional.mse_loss(model(x), y)
        session.backward(loss)
        session.step()


def recorded(prepare: Prepare, record: Path, recipe: str, model: nn.Module, steps: int = 3) -> Session:
    session = prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), recipe, record=record, seed=5, clip_norm=1.0)
    train(model, session, make_batches(steps))
    return session


def test_a_record_holds_what_was_asked_planned_and_observed(prepare: Prepare, record: Path) -> None:
    session = recorded(prepare, record, "bf16", make_net(), steps=4)
    session.close()
    read = load_record(record)
    document = read.record
    assert (document.recipe.text, document.recipe.granted, document.run.seed, document.run.kind) == ("bf16", "bf16", 5, "hardware")
    assert document.device == session.plan.device
    assert document.plan == session.plan.decisions
    assert (document.totals.steps, document.totals.stepped, document.totals.samples) == (4, 4, 24)
    assert [row.step for row in read.steps] == [1, 2, 3, 4]
    assert all(row.stepped and not row.nonfinite and isinstance(row.loss, float) and isinstance(row.grad_norm, float) for row in read.steps)
    assert document.compute.shares == {"bf16": 1.0}
    weights = sum(parameter.numel() for parameter in make_net().parameters()) * 4
    assert document.classes["parameters"].observed == {"fp32": weights}
    assert document.classes["gradients"].observed == {"fp32": weights}
    assert document.classes["optimizer state"].observed == {"fp32": 2 * weights}
    assert "bf16" in document.classes["activations"].observed
    assert all(document.fingerprints.values())
    assert document.memory["peak"] is None or document.memory["peak"] > 0
    for name, value in session.plan.switches.items():
        if name in document.switches:
            assert document.switches[name].set == value


def test_a_planted_fp32_cast_changes_the_effective_format(prepare: Prepare, record: Path) -> None:
    class Cast(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = torch.relu(self.norm(self.first(x)))
            with torch.autocast("cpu", enabled=False):
                out: torch.Tensor = functional.linear(hidden.float(), self.last.weight, self.last.bias)
            return out

    torch.manual_seed(0)
    recorded(prepare, record, "bf16", Cast()).close()
    recorded(prepare, record.with_name("plain"), "bf16", make_net()).close()
    cast, plain = load_record(record), load_record(record.with_name("plain"))
    assert run_lines([plain, cast])["compute, observed"][0] == "bf16"
    assert "fp32" in run_lines([plain, cast])["compute, observed"][1]


def test_fp16_is_shown_as_emulated_and_observed_as_fp16(prepare: Prepare, record: Path) -> None:
    recorded(prepare, record, "fp16", make_net()).close()
    lines = run_lines([load_record(record)])
    assert lines["compute, observed"] == ["fp16"]
    assert lines["loss scale, last"] == ["2^16"]
    if "(emulated)" not in lines["compute, asked"][0]:
        assert load_record(record).record.device.key.endswith(("fp16", "amx", "aarch64"))


def test_an_overflow_is_recorded_at_once_with_words_for_what_json_has_not(prepare: Prepare, record: Path) -> None:
    model = make_net()
    session = recorded(prepare, record, "fp16", model, steps=2)
    x, y = make_batches(1)[0]
    train(model, session, [(x * math.inf, y)])
    lines = (record / "steps.jsonl").read_text().splitlines()
    row = json.loads(lines[2])
    assert (row["stepped"], row["reason"], row["nonfinite"]) == (False, "forward_nonfinite", True)
    assert row["loss"] in ("nan", "inf")
    assert load_record(record).record.totals.skipped == 1


def test_a_nonfinite_loss_without_scaling_is_counted(prepare: Prepare, record: Path) -> None:
    model = nn.Linear(8, 4)
    session = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", record=record)
    x, y = make_batches(1)[0]
    with pytest.warns(UserWarning, match="step 1 was taken although its loss or gradient norm is inf or NaN"):
        train(model, session, [(x * math.inf, y)])
    session.close()
    assert load_record(record).record.totals.nonfinite == 1


def test_draining_gives_plain_rows_once_with_the_users_metrics(prepare: Prepare) -> None:
    model = make_net()
    session = prepare(model, torch.optim.AdamW(model.parameters()), "fp32")
    session.log(accuracy=0.5)
    train(model, session, make_batches(3))
    rows = list(session.drain())
    assert [row.step for row in rows] == [1, 2, 3]
    assert rows[0].metrics == {"accuracy": 0.5}
    assert all(type(row.loss) is float for row in rows)
    assert list(session.drain()) == []


def test_micro_batches_record_the_mean_loss(prepare: Prepare) -> None:
    model = nn.Linear(1, 1, bias=False)
    session = prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), "fp32", micro_batches=2)
    for value in (1.0, 3.0):
        session.backward((model.weight * 0).sum() + value)
        session.step()
    (row,) = session.drain()
    assert row.loss == 2.0


def test_a_second_run_in_the_same_folder_is_refused(prepare: Prepare, record: Path) -> None:
    recorded(prepare, record, "fp32", make_net()).close()
    with pytest.raises(DocumentError, match="already holds a record"):
        recorded(prepare, record, "fp32", make_net())


def test_the_account_shows_the_five_classes_after_a_step(prepare: Prepare, record: Path) -> None:
    model = make_net()
    session = prepare(model, torch.optim.AdamW(model.parameters()), "bf16", record=record)
    with pytest.raises(SessionError, match="no step was observed"):
        session.account()
    train(model, session, make_batches(1))
    text = session.account()
    for word in ("parameters", "activations", "gradients", "optimizer state", "communication", "bf16 100.0%"):
        assert word in text


def test_the_record_is_written_while_the_run_goes_on(prepare: Prepare, record: Path) -> None:
    model = make_net()
    session = recorded(prepare, record, "fp32", model, steps=1)
    assert load_record(record).record.totals.steps == 1
    train(model, session, make_batches(50))
    assert load_record(record).record.totals.steps >= 50


@pytest.mark.filterwarnings("ignore:bf16-params:UserWarning")  # says that updates may be lost
def test_case_22_the_record_counts_the_updates_that_are_lost(prepare: Prepare, record: Path) -> None:
    model = nn.Linear(8, 1, bias=False)
    nn.init.ones_(model.weight)
    session = prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3), "bf16-params", record=record)
    for _ in range(3):
        with session.autocast():
            loss = model.weight[:, :6].sum()  # two of eight weights get a gradient of 0
        session.backward(loss)
        session.step()
    session.close()
    assert load_record(record).record.counters == {"lost_updates": 6, "sampled_updates": 6}


def test_case_11_fp16_with_scaling_turned_off_stands_in_the_record_as_the_users_choice(prepare: Prepare, record: Path) -> None:
    session = recorded(prepare, record, "fp16:loss_scale.mode=none", make_net())
    session.close()
    (decision,) = [decision for decision in load_record(record).record.plan if decision.role == "loss_scale.mode"]
    assert (decision.grant, decision.granted) == ("warned", "none")
    assert decision.reason == "fp16 without loss scaling: gradients below 6e-8 become 0; the recipe asks for it"
    assert any("fp16 without loss scaling" in warning for warning in session.plan.warnings)


def test_the_same_start_has_the_same_fingerprint_under_every_recipe(tmp_path: Path) -> None:
    """Masters and low-bit layers change formats after the start is read; one process says that it is one rank."""
    found = set()
    for recipe in ("fp32", "bf16-master", "bf16-kahan"):
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8)
        folder = tmp_path / recipe
        with mpbackend.select("cpu").prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), recipe, record=str(folder), on_unsupported="emulate"
        ) as session:
            with session.autocast():
                loss = model(torch.ones(2, 8)).float().sum()
            session.backward(loss)
            session.step()
        record = load_record(folder).record
        found.add(record.fingerprints["weights"])
        assert record.settings["ranks"] == "1"
    assert len(found) == 1


def test_the_record_says_which_products_ran_and_what_was_converted(prepare: Prepare, tmp_path: Path) -> None:
    recorded(prepare, tmp_path / "run", "fp32", make_net()).close()
    compute = load_record(tmp_path / "run").record.compute
    assert {formats for calls in compute.products.values() for formats in calls} == {"fp32"}
    assert {name.partition(" ")[0] for name in compute.products} == {"forward", "backward"}
    assert compute.conversions == {}
