from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from mpbackend.decisions import Decision
from mpbackend.device import Device
from mpbackend.observe.record import ClassReading, ComputeReading, RecipeName, Recorded, Run, RunRecord, StepRow
from mpbackend.observe.record_writer import count_totals
from mpbackend.report import terminal
from mpbackend.report.runs import percent, run_lines, runs_report
from mpbackend.report.view import Listing


def recorded(recipe: str = "bf16", steps: tuple[StepRow, ...] = (), **changes: Any) -> Recorded:
    decisions = (
        Decision(role="compute.forward", op="matmul", asked=recipe, granted=recipe, level="native", reason=""),
        Decision(role="loss_scale.mode", asked="none", granted="none", level="storage", reason=""),
    )
    record = RunRecord(
        run=Run(id="x"),
        environment={},
        device=Device(key="dev", arch="arch", name="name"),
        recipe=RecipeName(text=recipe, hash="0", granted=recipe),
        plan=decisions,
        classes={"parameters": ClassReading(asked="fp32", observed={"fp32": 2048})},
        compute=ComputeReading(shares={recipe: 1.0}),
        memory={"peak": 2**20},
        memory_basis="resident set",
        totals=count_totals(steps),
    )
    return Recorded(msgspec.structs.replace(record, **changes), steps)


def rows(losses: Sequence[float | str], *, skipped: int = -1) -> tuple[StepRow, ...]:
    return tuple(
        StepRow(step=n, loss=loss, grad_norm=1.0, stepped=n != skipped, ms=float(n), nonfinite=isinstance(loss, str))  # type: ignore[arg-type] # words
        for n, loss in enumerate(losses, 1)
    )


def test_a_run_shows_its_end_its_skips_and_its_median_step() -> None:
    lines = run_lines([recorded(steps=rows([9.0] * 5 + [2.0] * 10 + [50.0], skipped=16))])
    assert lines["loss, mean of last 10"] == ["2.0000"]
    assert (lines["steps"], lines["skipped steps"], lines["non-finite steps"]) == (["16"], ["1"], ["0"])
    assert lines["step time, median ms"] == ["11.0"]
    assert lines["peak memory, resident set"] == ["1.0 MiB"]
    assert lines["parameters, observed"] == ["fp32 2.0 KiB"]


def test_a_nonfinite_loss_is_shown_and_not_left_out() -> None:
    lines = run_lines([recorded(steps=rows([1.0] * 9 + ["nan"]))])
    assert lines["loss, mean of last 10"] == ["nan"]
    assert lines["non-finite steps"] == ["1"]


def test_notes_are_listed_once_with_the_runs_that_have_them() -> None:
    report = runs_report([recorded(notes=("sums are nominal", "it saturates")), recorded("fp16", notes=("sums are nominal",))])
    assert report.blocks[1:] == [Listing("Notes", ["sums are nominal", "dev bf16: it saturates"])]
    assert "dev bf16: it saturates" in terminal.render(report, 100)
    assert "Notes" not in terminal.render(runs_report([recorded()]), 100)


def test_an_emulated_run_says_so() -> None:
    run = recorded()
    decision = msgspec.structs.replace(run.record.plan[0], level="emulated")
    lines = run_lines([recorded(plan=(decision, run.record.plan[1]))])
    assert lines["compute, asked"] == ["bf16 (emulated)"]
    assert run_lines([recorded(run=Run(id="x", kind="simulated"))])["device"] == ["dev (simulated)"]


@pytest.mark.parametrize(("share", "text"), [(1.0, "100.0%"), (0.98, "98.0%"), (1e-9, "<0.1%"), (1 - 1e-9, ">99.9%")])
def test_a_part_is_never_rounded_to_none_or_all(share: float, text: str) -> None:
    assert percent(share) == text


def test_mixed_formats_are_listed_by_share() -> None:
    run = recorded(compute=ComputeReading(shares={"fp32": 0.25, "bf16": 0.75}))
    assert run_lines([run])["compute, observed"] == ["bf16 75.0%, fp32 25.0%"]
    assert run_lines([recorded(compute=ComputeReading())])["compute, observed"] == ["not observed"]
    hidden = ComputeReading(shares={"bf16": 1.0}, uncounted=("aten::mkldnn_rnn_layer",))
    assert run_lines([recorded(compute=hidden)])["compute, observed"] == ["unknown: aten::mkldnn_rnn_layer cannot be counted"]


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits(width: int) -> None:
    text = terminal.render(runs_report([recorded(name) for name in ("fp32", "bf16", "fp16")]), width)
    assert max(map(len, text.splitlines())) <= width


def test_runs_with_unlike_classes_stand_side_by_side() -> None:
    lines = run_lines([recorded(), recorded(classes={"gradients": ClassReading(asked="bf16")})])
    assert lines["parameters, asked"] == ["fp32", "not recorded"]
    assert lines["gradients, asked"] == ["not recorded", "bf16"]


@pytest.mark.parametrize(("losses", "shown"), [([1e308, 1e308], "nan"), (["inf", "-inf"], "nan"), (["inf", 1.0], "inf")])
def test_a_mean_beyond_the_range_is_no_error(losses: Sequence[float | str], shown: str) -> None:
    assert run_lines([recorded(steps=rows(losses))])["loss, mean of last 10"] == [shown]


@pytest.mark.parametrize(("scale", "shown"), [(65536.0, "2^16"), (0.5, "2^-1"), (3.0, "3"), (0.0, "0"), (-2.0, "-2")])
def test_a_scale_is_shown_as_it_is(scale: float, shown: str) -> None:
    dynamic = Decision(role="loss_scale.mode", asked="dynamic", granted="dynamic", level="storage", reason="")
    steps = (StepRow(step=1, scale=scale, stepped=True),)
    assert run_lines([recorded(steps=steps, plan=(dynamic,))])["loss scale, last"] == [shown]


def test_a_record_without_a_plan_has_the_scale_that_its_steps_show() -> None:
    assert run_lines([recorded(plan=(), steps=(StepRow(step=1, scale=65536.0, stepped=True),))])["loss scale, last"] == ["2^16"]
    assert run_lines([recorded(plan=(), steps=rows([1.0]))])["loss scale, last"] == ["not observed"]
