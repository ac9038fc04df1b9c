from __future__ import annotations

from typing import Any

import msgspec
import pytest

from mpbackend.comparison.quality import Quality
from mpbackend.comparison.runs import ComparedRun, read_run
from mpbackend.comparison.speed import Speed, compare_speed, steps_to
from tests.comparison.building import falling, recorded, rows

LOSS = Quality("training loss", "", "lower", 1)


def run(losses: list[Any], *, ms: float = 10.0, **changes: Any) -> ComparedRun:
    return read_run(recorded(steps=rows(losses, ms=ms), **changes))


def speed(one: ComparedRun, other: ComparedRun, reference: float | None = 1.0, margin: float = 0.5, quality: Quality = LOSS) -> Speed:
    return compare_speed([one], [other], quality, reference, margin)


FAST_FALL, SLOW_FALL = [5.0 - 0.1 * step for step in range(40)], [5.0 - 0.05 * step for step in range(80)]


def test_faster_by_the_step_may_be_later_to_quality() -> None:
    found = speed(run(FAST_FALL, ms=10.0), run(SLOW_FALL, ms=8.0))
    assert (found.baseline.steps_to_target, found.candidate.steps_to_target) == (36, 71)
    assert (found.baseline.seconds_to_target, found.candidate.seconds_to_target) == (0.36, 0.568)
    assert found.step_ratio == 0.8
    assert found.seconds_ratio == pytest.approx(0.568 / 0.36)
    assert found.words == "faster per step, later to quality"
    assert speed(run(FAST_FALL, ms=10.0), run(SLOW_FALL, ms=4.0)).words == "faster per step, sooner to quality"
    assert speed(run(SLOW_FALL, ms=10.0), run(FAST_FALL, ms=12.0)).words == "slower per step, sooner to quality"


def test_a_target_may_never_be_reached() -> None:
    found = speed(run(FAST_FALL), run([5.0] * 40, ms=5.0))
    assert (found.target, found.candidate.steps_to_target, found.seconds_ratio) == (1.5, None, None)
    assert found.words == "faster per step, and never at the quality of the baseline"


def test_the_warm_up_is_no_step_time() -> None:
    steps = tuple(msgspec.structs.replace(row, ms=1000.0 if row.step < 6 else 10.0) for row in rows([1.0] * 9))
    assert speed(read_run(recorded(steps=steps)), run([1.0] * 9)).baseline.step_ms == 10.0
    assert speed(run([1.0] * 5), run([1.0] * 9)).baseline.step_ms is None


def test_times_that_are_no_times_are_left_out() -> None:
    steps = tuple(msgspec.structs.replace(row, ms="nan" if row.step % 2 else 7.0) for row in rows([1.0] * 20))
    assert speed(read_run(recorded(steps=steps)), run([1.0] * 20)).baseline.step_ms == 7.0
    negative = tuple(msgspec.structs.replace(row, ms=-1.0 if row.step % 2 else 7.0) for row in rows([1.0] * 20))
    assert speed(read_run(recorded(steps=negative)), run([1.0] * 20)).baseline.step_ms == 7.0


def test_memory_that_was_measured_differently_has_no_ratio() -> None:
    one, other = run([1.0] * 9), run([1.0] * 9, memory_basis="resident set", memory={"peak": 2**21})
    assert speed(one, other).memory_ratio is None
    assert speed(one, run([1.0] * 9, memory={"peak": 2**21})).memory_ratio == 2.0
    assert speed(one, run([1.0] * 9, memory={"peak": None})).candidate.peak_bytes is None


def test_a_smoothed_loss_reaches_the_target_when_its_mean_does() -> None:
    smooth = LOSS._replace(window=3)
    assert steps_to(run([9.0, 1.0, 9.0, 2.0, 1.0, 1.0]), smooth, 2.0) == 6
    assert steps_to(run([9.0, 1.0, 1.0, "nan", 1.0, 1.0, 1.0]), smooth, 1.0) == 7


@pytest.mark.parametrize("seed", range(20))
def test_a_baseline_reaches_its_own_quality(seed: int) -> None:
    losses = falling(200, seed=seed, noise=1e-4)
    one = run([3.0 + loss for loss in losses[:-20]] + [2.0 + (loss - 2.0) / 10 for loss in losses[-20:]])
    smooth = LOSS._replace(window=20)
    end = smooth.at_the_end(one, 200)
    assert end is not None
    assert steps_to(one, smooth, end) == 200, "the last window is the only one as low"


def test_a_metric_that_rises_is_reached_from_below() -> None:
    accuracy = Quality("val_acc", "", "higher")
    steps = tuple(msgspec.structs.replace(row, metrics={"val_acc": row.step / 10}) for row in rows([1.0] * 10))
    one = read_run(recorded(steps=steps))
    found = speed(one, one, reference=1.0, margin=0.3, quality=accuracy)
    assert found.target == pytest.approx(0.7)
    assert found.baseline.steps_to_target == 7
    assert speed(one, one, quality=accuracy._replace(better="unknown")).target is None
    assert speed(one, one, reference=float("nan")).target is None
