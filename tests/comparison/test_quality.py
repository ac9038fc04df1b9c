from __future__ import annotations

from typing import Any

import msgspec
import pytest

from mpbackend.comparison.quality import choose_quality, direction, words
from mpbackend.comparison.runs import ComparedRun, read_run
from mpbackend.errors import DocumentError
from tests.comparison.building import recorded, rows


def run(losses: list[Any], metrics: dict[str, float] | None = None, skipped: tuple[int, ...] = ()) -> ComparedRun:
    return read_run(recorded(steps=rows(losses, metrics=metrics or {}, skipped=skipped)))


@pytest.mark.parametrize(
    ("name", "better"),
    [("val_loss", "lower"), ("valLoss", "lower"), ("eval/perplexity", "lower"), ("val-accuracy", "higher"), ("validation F1", "higher"), ("val_x", "unknown")],
)
def test_the_direction_is_read_from_the_words_of_a_name(name: str, better: str) -> None:
    assert direction(name) == better


def test_words_are_whole() -> None:
    assert words("evaluate_interval/trainLoss") == {"evaluate", "interval", "train", "loss"}


def test_a_loss_comes_before_other_validation_metrics() -> None:
    both = run([1.0], {"val_acc": 0.5, "val_loss": 2.0, "grad": 1.0})
    found = choose_quality([both, both], None, 1)
    assert (found.metric, found.at_the_end(both, 1)) == ("val_loss", 2.0)
    assert "of 2 validation metrics" in found.basis
    assert choose_quality([both, run([1.0], {"val_acc": 0.5})], None, 1).metric == "val_acc"
    assert choose_quality([both, run([1.0])], None, 1).metric == "training loss"


def test_a_metric_can_be_asked_for() -> None:
    both = run([1.0], {"val_acc": 0.5, "bleu": 2.0})
    assert choose_quality([both], "bleu", 1).better == "higher"
    assert choose_quality([both], "training loss", 1).basis.endswith("as asked")
    with pytest.raises(DocumentError, match="allowed: bleu, val_acc, training loss"):
        choose_quality([both], "rouge", 1)


def test_the_loss_at_the_end_is_the_mean_of_the_last_tenth_of_the_taken_steps() -> None:
    one = run([9.0] * 95 + [1.0] * 5)
    found = choose_quality([one], None, 100)
    assert (found.window, found.at_the_end(one, 100)) == (10, 5.0)
    assert found.at_the_end(one, 95) == 9.0
    skipping = run([9.0] * 90 + [1.0] * 9 + ["inf"], skipped=(100,))
    assert found.at_the_end(skipping, 100) == pytest.approx(1.8)
    assert choose_quality([run([1.0] * 9)], None, 9).window == 1
    assert choose_quality([run([1.0] * 20000)], None, 20000).window == 1000


def test_the_last_value_that_there_is_counts() -> None:
    steps = rows([1.0] * 10)
    logged = tuple(msgspec.structs.replace(row, metrics={"val_loss": float(row.step)} if row.step % 4 == 0 else {}) for row in steps)
    one = read_run(recorded(steps=logged))
    found = choose_quality([one], None, 10)
    assert [found.at_the_end(one, last) for last in (10, 7, 3)] == [8.0, 4.0, None]
