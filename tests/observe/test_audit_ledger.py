"""The ledger, rates and utilization."""

from __future__ import annotations

import pytest

from mpbackend.errors import DocumentError
from mpbackend.matrix import Matrix, load_matrix
from mpbackend.observe.audit_document import AuditDocument, OpRow
from mpbackend.observe.ledger import find_peak, ledger, mfu, optimizer_key, peak_ratio, predicted_classes, rate_per_s, speed_text, speedup
from mpbackend.recipe import PRESETS


@pytest.fixture(scope="module")
def matrix() -> Matrix:
    return load_matrix()


def test_predictions_by_class_and_format() -> None:
    assert predicted_classes(PRESETS["bf16"], 100, "adamw") == {"parameters": {"fp32": 400}, "gradients": {"fp32": 400}, "optimizer state": {"fp32": 800}}
    assert predicted_classes(PRESETS["bf16-master"], 100, "adamw") == {
        "parameters": {"bf16": 200},
        "gradients": {"fp32": 400},
        "optimizer state": {"fp32": 1200},  # masters and two moments
    }
    assert "optimizer state" not in predicted_classes(PRESETS["bf16"], 100, "sgd")


@pytest.mark.parametrize(
    ("name", "options", "key"),
    [
        ("AdamW", {}, "adamw"),
        ("Adam", {"amsgrad": True}, "adam-amsgrad"),
        ("SGD", {}, "sgd"),
        ("SGD", {"momentum": True}, "sgd-momentum"),
        ("Shampoo", {}, None),
    ],
)
def test_optimizers_by_class(name: str, options: dict[str, bool], key: str | None) -> None:
    assert optimizer_key(name, **options) == key


def test_a_ledger_has_a_row_for_each_class_and_format() -> None:
    measured = {"parameters": {"fp32": 400}, "activations": {"bf16": 50, "fp32": 10}, "gradients": {"fp32": 396}, "optimizer state": {}, "communication": {}}
    rows = ledger(measured, PRESETS["bf16"], 100, "adamw", {"predicted": {"bf16": 50}, "fp32": {"fp32": 110}})
    table = {(row.klass, row.format): (row.predicted, row.measured, row.fp32) for row in rows}
    assert table == {
        ("parameters", "fp32"): (400, 400, 400),
        ("activations", "bf16"): (50, 50, 0),
        ("activations", "fp32"): (0, 10, 110),
        ("gradients", "fp32"): (400, 396, 400),
        ("optimizer state", "fp32"): (800, 0, 800),
    }


def test_what_is_not_modeled_is_not_predicted() -> None:
    [parameters, activations] = ledger({"parameters": {"fp32": 4}, "activations": {"bf16": 2}}, PRESETS["bf16"], 1, None)
    assert (parameters.predicted, parameters.fp32, activations.predicted, activations.fp32) == (None, None, None, None)


def test_utilization_is_the_time_at_the_peak_over_the_time_that_passed(matrix: Matrix) -> None:
    peak = find_peak(matrix, "h100", "bf16", "fp32")
    assert peak is not None and peak.tera_per_s == 989.5
    found = mfu({"bf16": 989_500_000_000_000}, "fp32", 2.0, matrix, "h100")
    assert found.share == pytest.approx(0.5)
    assert found.basis == "bf16 with sums in fp32: 989.5 Tops/s (vendor)"
    # Half the time at the peak of bf16 and a quarter at that of tf32.
    both = mfu({"bf16": 494_750_000_000_000, "tf32": 123_625_000_000_000}, "fp32", 1.0, matrix, "h100")
    assert both.share == pytest.approx(0.5 + 0.25)


def test_an_unknown_peak_gives_none(matrix: Matrix) -> None:
    found = mfu({"bf16": 10**15, "fp64": 1}, "fp32", 2.0, matrix, "h100")
    assert found.share is None
    assert found.basis == "no source states a dense peak of h100 for fp64 with sums in fp32"
    assert mfu({"bf16": 10**15}, "bf16", 2.0, matrix, "h100").share is None  # sums in another format are another peak
    assert mfu({"bf16": 10**15}, "fp32", 2.0, matrix, "no-such-device").share is None
    assert mfu({"bf16": 10**15}, "fp32", 0.0, matrix, "h100") == (None, "no step was timed")
    assert mfu({}, "fp32", 1.0, matrix, "h100") == (None, "nothing was multiplied")


def test_more_than_the_peak_is_an_error(matrix: Matrix) -> None:
    with pytest.raises(DocumentError, match="above 100 %"):
        mfu({"bf16": 2 * 10**15}, "fp32", 1.0, matrix, "h100")


def test_a_peak_of_one_variant_holds_for_that_name_only(matrix: Matrix) -> None:
    names = matrix.devices["ascend-910b3"].names
    assert find_peak(matrix, "ascend-910b3", "bf16", "fp32", names[0]) is not None
    assert find_peak(matrix, "ascend-910b3", "bf16", "fp32", "another name") is None


def test_rates() -> None:
    assert rate_per_s(4096, 0.5) == 8192
    assert rate_per_s(0, 0.5) is None and rate_per_s(4096, 0.0) is None
    assert speedup(0.5, 1.5) == 3
    assert speedup(0.5, 0.0) is None


def test_the_ratio_of_peaks_stands_beside_a_speed_up(matrix: Matrix) -> None:
    assert peak_ratio(matrix, "h100", "bf16", "tf32") == pytest.approx(989.5 / 494.5)
    assert peak_ratio(matrix, "h100", "bf16", "hif8") is None


def timed(compute: str, seconds: float, **changes: str) -> AuditDocument:
    row = OpRow(phase="forward", module="", op="aten::mm", inputs=(), compute=compute, outputs=(), calls=1, flops=10)
    fields = {"workload": "w", "device": "h100", "recipe": "r", "granted": "r", "kind": "hardware", "basis": "live", "torch": "2.13", **changes}
    return AuditDocument(parameters=1, ops=(row,), seconds=seconds, **fields)  # type: ignore[arg-type] # a test's shorthand


def test_a_measured_speed_up_is_shown_beside_the_ratio_of_the_peaks(matrix: Matrix) -> None:
    assert speed_text(timed("tf32", 0.3), timed("bf16", 0.2), matrix) == "1.50 times as fast, measured; the peak of bf16 is 2.00 times that of tf32 on h100"
    assert "no source states the peaks of bf16 and fp64" in speed_text(timed("fp64", 0.3), timed("bf16", 0.2), matrix)
    assert "on one device that is hardware only" in speed_text(timed("tf32", 0.3, kind="emulated"), timed("bf16", 0.2), matrix)
    assert speed_text(timed("tf32", 0.0), timed("bf16", 0.2), matrix) == ""
