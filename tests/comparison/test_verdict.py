"""The verdict of every planted difference, and of none."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

import mpbackend
from mpbackend.comparison.verdict import Comparison, compare
from mpbackend.errors import DocumentError
from mpbackend.observe.record import ClassReading, ComputeReading, Recorded, Run
from tests.comparison.building import falling, plan, recorded, rows, switch

OTHER_DEVICE: dict[str, Any] = {"device": "ascend-910b3", "arch": "ascend-a2"}
SHARED: dict[str, Any] = {"fingerprints": {"data": "same", "weights": "same"}}


def close(gap: float, seed: int = 1, *, scatter: float = 0.0, **changes: Any) -> Recorded:
    """Return a run whose losses lie by ``gap`` above those of ``recorded``, with scatter of its own."""
    generator = random.Random(f"{seed}/{gap}/{scatter}")
    shift = gap + scatter * generator.gauss(0, 1)
    return recorded([loss + shift for loss in falling()], seed=seed, **changes)


def reasons(found: Comparison) -> str:
    return "\n".join(found.reasons)


def test_the_same_run_twice_is_equivalent() -> None:
    found = compare(recorded(falling(20)), recorded(falling(20)))
    assert (found.verdict, found.question) == ("equivalent", "vendor")
    assert "bit for bit" in found.reasons[0]
    assert [curve.identical for curve in found.curves] == [True]


def test_identical_losses_with_another_gradient_norm_are_not_bit_for_bit_alike() -> None:
    other = recorded(steps=tuple(msgspec.structs.replace(row, grad_norm=1.0000001) for row in rows(falling())))
    assert compare(recorded(), other).verdict == "inconclusive"


@pytest.mark.parametrize("changes", [{}, {"recipe": "bf16"}], ids=["vendor", "recipe"])
def test_another_seed_is_not_comparable(changes: dict[str, Any]) -> None:
    found = compare(recorded(seed=1), recorded(seed=2, **changes))
    assert found.verdict == "not comparable"
    assert found.reasons[0].startswith("seed differs: 1 and 2")
    assert found.question == ("recipe" if changes else "vendor")


def test_reshuffled_data_is_not_comparable() -> None:
    found = compare(recorded(), recorded(fingerprints={"data": "shuffled", "weights": "weights of 1"}))
    assert found.verdict == "not comparable"
    assert reasons(found).startswith("data differs: data of 1 and shuffled")


def test_hf32_convolution_in_one_fp32_run_is_different_and_the_switch_is_named() -> None:
    clean = recorded(**OTHER_DEVICE, switches={"conv.allow_hf32": switch("False", planned="False", before="True")})
    hf32 = recorded(**OTHER_DEVICE, switches={"conv.allow_hf32": switch("True")})
    found = compare(clean, hf32)
    assert (found.verdict, found.question) == ("different", "vendor")
    assert "conv.allow_hf32" in found.reasons[0]
    assert "conv ran in hf32_e8m11, and the plan says fp32" in reasons(found)


def test_hf32_convolution_is_found_across_vendors_whose_switches_have_other_names() -> None:
    first = recorded(switches={"conv.fp32_precision": switch("ieee", planned="ieee", before="tf32")})
    second = recorded(**OTHER_DEVICE, switches={"conv.allow_hf32": switch("True")})
    found = compare(first, second)
    assert found.verdict == "different"
    assert found.differences[0].name == "conv.allow_hf32"
    clean = recorded(**OTHER_DEVICE, switches={"conv.allow_hf32": switch("False", planned="False")})
    assert not any(difference.decides for difference in compare(first, clean).differences)


def test_a_departure_that_both_sides_share_is_told() -> None:
    hf32 = recorded(**OTHER_DEVICE, switches={"conv.allow_hf32": switch("True")})
    found = compare(hf32, hf32)
    assert found.verdict == "equivalent"
    assert any("conv.allow_hf32 stood at True: conv ran in hf32_e8m11" in note for note in found.notes)


def test_settings_that_mean_one_format_decide_nothing() -> None:
    cpu: dict[str, Any] = {"device": "a-cpu", "arch": "x86-64-avx512_bf16"}
    first = recorded(**cpu, switches={"conv.fp32_precision": switch("ieee", planned="ieee", before="none")})
    found = compare(first, recorded(**cpu, switches={"conv.fp32_precision": switch("tf32")}))
    assert [(item.name, item.decides, item.reason) for item in found.differences] == [("conv.fp32_precision", False, "that is fp32 and fp32")]
    unknown = compare(first, recorded(**cpu, switches={"conv.fp32_precision": switch("hf32")}))
    assert (unknown.verdict, unknown.differences[0].name) == ("different", "conv.fp32_precision")
    unplanned = [recorded(**cpu, switches={"deterministic": switch(value)}) for value in ("default", "warn")]
    assert not compare(*unplanned).differences[0].decides


def test_an_fp32_baseline_that_ran_hf32_is_no_baseline_for_a_recipe() -> None:
    hf32 = recorded(**OTHER_DEVICE, switches={"conv.allow_hf32": switch("True")})
    found = compare(hf32, recorded(**OTHER_DEVICE, recipe="bf16"))
    assert (found.verdict, found.question) == ("not comparable", "recipe")
    assert "fp32 is not what ran" in found.reasons[0]
    assert "conv.allow_hf32" in found.reasons[0]


def test_a_recipe_that_became_another_format_is_different() -> None:
    lowered = recorded(recipe="bf16", plan=plan("bf16", compute__forward="fp16"), **OTHER_DEVICE)
    found = compare(recorded(recipe="bf16"), lowered)
    assert found.verdict == "different"
    assert found.reasons[0].startswith("compute.forward (matmul): bf16 (native) and fp16 (native)")


def test_an_ordered_choice_is_named_and_decides_nothing() -> None:
    def fast(granted: str, **changes: Any) -> Recorded:
        decisions = [msgspec.structs.replace(decision, asked="tf32|hf32|fp32") for decision in plan(granted)]
        return recorded(recipe="fp32-fast", plan=tuple(decisions), compute=ComputeReading(shares={"fp32": 1.0}), **changes)

    found = compare(fast("tf32"), fast("hf32_e8m11", **OTHER_DEVICE))
    named = {difference.name: difference.decides for difference in found.differences}
    assert named["compute.forward (matmul)"] is False
    assert found.verdict == "equivalent", "every recorded bit is the same"


def test_a_run_that_computed_in_fp32_under_bf16_is_different() -> None:
    silent = recorded(recipe="bf16", compute=ComputeReading(shares={"fp32": 0.9, "bf16": 0.1}), **OTHER_DEVICE)
    found = compare(recorded(recipe="bf16"), silent)
    assert found.verdict == "different"
    assert "90% of the products were observed in fp32, and the plan says bf16" in reasons(found)


def test_other_formats_of_held_numbers_are_different() -> None:
    low = recorded(classes={"parameters": ClassReading(asked="fp32", observed={"bf16": 2048})}, **OTHER_DEVICE)
    found = compare(recorded(), low)
    assert (found.verdict, found.differences[0].name) == ("different", "parameters")
    counters = recorded(classes={"parameters": ClassReading(asked="fp32", observed={"fp32": 4096, "int64": 4096, "bf16": 8})}, **OTHER_DEVICE)
    assert compare(recorded(), counters).verdict == "equivalent"


def test_layers_converted_on_one_side_only_are_different() -> None:
    rows_of = [{"layer": "up", "action": "converted"}, {"layer": "down", "action": "skipped"}]
    padded = [{"layer": "up", "action": "padded"}, {"layer": "down", "action": "skipped"}]
    both = [{"layer": "up", "action": "converted"}, {"layer": "down", "action": "converted"}]
    one, two, three = (recorded(conversion=tuple(layers), **SHARED) for layers in (rows_of, padded, both))
    assert compare(one, two).verdict == "equivalent"
    found = compare(one, three)
    assert found.verdict == "different"
    assert "on one side only: down" in reasons(found)


def test_accumulators_of_other_widths_are_named() -> None:
    def with_sum(bits: int, **changes: Any) -> Recorded:
        decisions = plan("bf16")
        summed = [msgspec.structs.replace(item, reason=f"keeping {bits} fraction bits") if item.role == "accumulate.forward" else item for item in decisions]
        return recorded(recipe="bf16", plan=tuple(summed), **changes)

    found = compare(with_sum(23), with_sum(13, **OTHER_DEVICE))
    named = next(difference for difference in found.differences if difference.name == "accumulate.forward (matmul)")
    assert named.reason == "keeping 23 fraction bits / keeping 13 fraction bits"


def test_bf16_against_fp32_is_answered_as_recipe() -> None:
    found = compare(recorded(), close(1e-5, recipe="bf16"))
    assert (found.verdict, found.question, found.question_basis) == ("inconclusive", "recipe", "several recipes on one device")
    assert "one run a side" in found.reasons[0]
    assert found.limits[1].startswith("cannot tell a rounding error")


def test_neither_question_fits_when_recipe_and_device_differ() -> None:
    found = compare(recorded(), recorded(recipe="bf16", **OTHER_DEVICE))
    assert found.verdict == "not comparable"
    assert "neither question fits" in found.question_basis
    assert compare(recorded(), recorded(recipe="bf16", **OTHER_DEVICE), question="recipe").reasons[0].startswith("device differs: h100 and ascend-910b3")


def test_a_baseline_that_is_not_fp32_is_told() -> None:
    found = compare(recorded(recipe="bf16"), recorded())
    assert any("the baseline computes compute.forward in bf16, not in fp32" in note for note in found.notes)


def sides(baseline: Sequence[float], candidate: Sequence[float], **changes: Any) -> Comparison:
    """Compare runs of seeds 1, 2, … that end these distances above the usual loss."""
    one = [close(gap, seed, name=f"a{seed}") for seed, gap in enumerate(baseline, 1)]
    other = [close(gap, seed, name=f"b{seed}", **OTHER_DEVICE) for seed, gap in enumerate(candidate, 1)]
    return compare(one, other, **changes)


def test_two_noisy_seeds_are_inconclusive() -> None:
    found = sides([0.0, 0.02], [0.001, 0.017])
    assert (found.verdict, found.design) == ("inconclusive", "paired")
    assert found.equivalence is not None
    assert found.equivalence.needed is not None
    assert f"{found.equivalence.needed} seeds show it" in found.reasons[0]


def test_seeds_that_agree_are_equivalent() -> None:
    found = sides([0.0, 0.05, -0.04, 0.02], [0.0002, 0.0501, -0.0401, 0.0199])
    assert (found.verdict, found.design, found.scope) == ("equivalent", "paired", "seeds 1, 2, 3, 4, 400 steps")
    assert found.quality.margin == pytest.approx(0.001 * 2.0, rel=0.05)


def test_one_identical_seed_does_not_speak_for_the_others() -> None:
    found = sides([0.0, 0.05], [0.0, 0.09])
    assert [curve.identical for curve in found.curves] == [True, False]
    assert found.verdict == "inconclusive"


def test_seeds_that_all_end_higher_are_different() -> None:
    found = sides([0.0, 0.05, -0.04, 0.02], [0.031, 0.08, -0.011, 0.052])
    assert found.verdict == "different"
    assert "outside the margin" in found.reasons[0]
    assert found.equivalence is not None
    assert found.equivalence.difference == pytest.approx(0.0305, rel=0.01), "the candidate less the baseline"
    assert sides([0.0, 0.05, -0.04, 0.02], [0.031, 0.08, -0.011, 0.052], margin=0.1).verdict == "equivalent"


def test_seeds_are_matched_as_sets_and_what_is_left_out_is_named() -> None:
    one = [close(0.01 * seed, seed, name=f"a{seed}") for seed in (3, 1, 2)]
    other = [close(0.01 * seed + 1e-5 * seed, seed, name=f"b{seed}", **OTHER_DEVICE) for seed in (1, 2, 3, 9)]
    found = compare(one, other)
    assert (found.verdict, found.design) == ("equivalent", "paired")
    assert [curve.seed for curve in found.curves] == [3, 1, 2]
    assert any("left out" in note and note.endswith("b9") for note in found.notes)


def test_seeds_that_no_side_shares_are_independent_samples() -> None:
    one = [close(0.0001 * seed, seed, name=f"a{seed}", **SHARED) for seed in (1, 2, 3)]
    other = [close(0.0001 * seed, seed, name=f"b{seed}", **SHARED, **OTHER_DEVICE) for seed in (4, 5, 6)]
    found = compare(one, other)
    assert (found.verdict, found.design) == ("equivalent", "two-sample")
    shuffled = [msgspec.structs.replace(run, record=msgspec.structs.replace(run.record, fingerprints={"data": "x", "weights": "same"})) for run in other]
    capped = compare(one, shuffled)
    assert capped.verdict == "inconclusive"
    assert capped.reasons[0].startswith("not known to be the same, data")


def test_repeats_of_one_seed_make_a_noise_floor() -> None:
    one = [close(gap, name=f"a{number}") for number, gap in enumerate((0.0, 0.0001, -0.0001))]
    found = compare(one, close(0.00005, name="b", **OTHER_DEVICE))
    assert (found.verdict, found.design, found.scope) == ("equivalent", "repeats", "seed 1, 400 steps")
    assert found.floor is not None
    assert found.floor.df == 2
    assert found.floor.largest == pytest.approx(0.0002, rel=1e-6)
    assert found.limits[1].startswith("cannot speak about other seeds")
    far = compare(one, close(0.01, name="b", **OTHER_DEVICE))
    assert far.verdict == "different"


def test_repeats_without_noise_are_no_floor() -> None:
    one = [close(0.0, name="a"), close(0.0, name="again")]
    found = compare(one, close(0.00005, name="b", **OTHER_DEVICE))
    assert found.verdict == "inconclusive"
    assert "the repeats are bit for bit alike" in found.reasons[0]


def test_repeats_of_which_one_differs_are_not_alike() -> None:
    one = [close(0.0, name="a"), close(0.0, name="again"), close(0.0001, name="other")]
    found = compare(one, close(0.00005, name="b", **OTHER_DEVICE))
    assert found.floor is not None
    assert (found.floor.identical, found.floor.runs, found.floor.df) == (False, 3, 2)


def test_a_record_given_twice_is_no_repeat() -> None:
    run = close(0.0, name="a")
    found = compare([run, run], close(0.00005, name="b"))
    assert found.design == "single"
    assert "a run of the baseline was given more than once and counts once" in found.notes


@pytest.mark.parametrize("end", ["nan", "inf"])
def test_one_run_that_diverged_is_different(end: Any) -> None:
    broken = recorded([*falling(), end, end])
    found = compare(recorded([*falling(), 2.0, 2.0]), broken)
    assert found.verdict == "different"
    assert "ends non-finite in 1 of 1 runs of the candidate only" in found.reasons[0]
    assert compare(broken, recorded([*falling(), 2.0, end])).verdict == "inconclusive"


def test_what_is_unknown_and_matters_caps_the_verdict() -> None:
    found = compare(recorded(), recorded(fingerprints={"weights": "weights of 1"}))
    assert found.verdict == "inconclusive"
    assert found.reasons[0] == "not known to be the same, data: data of 1 and not recorded (a fingerprint of the batches in their order)"
    seedless = recorded(run=Run(id="x"))
    assert compare(seedless, seedless).verdict == "inconclusive"


def test_no_steps_and_no_losses_are_inconclusive() -> None:
    assert compare(recorded([]), recorded([])).verdict == "inconclusive"
    found = compare(recorded([None] * 400), recorded([None] * 400))
    assert found.verdict == "inconclusive"
    assert "no step of one side records the training loss" in reasons(found)


def scaled(skipped: Sequence[int], steps: int = 400, shift: float = 0.0, **changes: Any) -> Recorded:
    losses = [loss + shift for loss in falling(steps)]
    return recorded(steps=rows(losses, skipped=skipped), recipe="fp16", plan=plan("fp16", loss_scale__mode="dynamic"), **changes)


def test_skipping_more_than_a_hundredth_is_different() -> None:
    seeds = [1, 2, 3]
    base = [recorded(seed=seed, name=f"a{seed}") for seed in seeds]
    few = [scaled([50], shift=1e-6 * seed, seed=seed, name=f"b{seed}") for seed in seeds]
    assert compare(base, few).verdict == "equivalent"
    many = [scaled(range(50, 60), shift=1e-6 * seed, seed=seed, name=f"c{seed}") for seed in seeds]
    found = compare(base, many)
    assert found.verdict == "different"
    assert found.reasons[0] == "only the candidate skips 2.5% of its steps; stable training skips less than 1%"


def test_non_finite_steps_are_counted() -> None:
    found = compare(recorded(), recorded(["nan", "inf", *falling(398)]))
    assert [skip.nonfinite for skip in found.skips] == [0, 2]


def test_events_that_only_one_session_counted_are_named() -> None:
    found = compare(recorded(counters={"skips": 1}), recorded(counters={"skips": 1, "lost_updates": 7}))
    assert [(item.kind, item.name, item.baseline, item.candidate, item.decides) for item in found.differences] == [("counter", "lost_updates", "0", "7", False)]


def test_the_search_for_a_scale_is_no_skipping() -> None:
    seeds = [1, 2, 3]
    base = [recorded(seed=seed, name=f"a{seed}") for seed in seeds]
    searched = [scaled(range(2, 12), shift=1e-6 * seed, seed=seed, name=f"c{seed}", counters={"startup_skips": 10}) for seed in seeds]
    found = compare(base, searched)
    assert found.verdict == "equivalent"
    assert (found.skips[3].steps, found.skips[3].skipped, found.skips[3].search) == (390, 0, 10)


def test_fewer_than_300_steps_cannot_show_that_few_are_skipped() -> None:
    seeds = [1, 2, 3]
    base = [recorded(falling(299), seed=seed, name=f"a{seed}") for seed in seeds]
    short = [scaled([], 299, 1e-6 * seed, seed=seed, name=f"b{seed}") for seed in seeds]
    found = compare(base, short)
    assert found.verdict == "inconclusive"
    assert found.reasons[0] == "299 steps are too few to show that fewer than 1% of them are skipped"
    exact = scaled([], 299)
    assert compare(exact, exact).verdict == "equivalent"


def test_runs_of_unequal_length_are_compared_where_both_have_steps() -> None:
    longer = recorded(falling(500), fingerprints={"data": "longer", "weights": "weights of 1"})
    found = compare(recorded(falling(400)), longer)
    assert (found.verdict, found.quality.step, found.curves[0].steps) == ("inconclusive", 400, 400)
    assert found.reasons[0].endswith("(the runs differ in length, and a fingerprint covers a whole run)")


def test_a_validation_metric_is_the_quality_where_every_run_has_one() -> None:
    def validated(value: float, seed: int, **changes: Any) -> Recorded:
        made = rows(falling())
        steps = tuple(msgspec.structs.replace(row, metrics={"val_loss": value + 1 / row.step, "batch": 1.0}) if row.step % 100 == 0 else row for row in made)
        return recorded(steps=steps, seed=seed, **changes)

    found = compare([validated(1.5, 1, name="a1"), validated(1.6, 2, name="a2")], [validated(1.5, 1, name="b1"), validated(1.6, 2, name="b2")])
    assert (found.quality.metric, found.quality.better) == ("val_loss", "lower")
    assert found.baseline[0].quality == pytest.approx(1.5 + 1 / 400)
    assert found.quality.margin == pytest.approx(0.001 * (1.55 + 1 / 400))
    with pytest.raises(DocumentError, match="not every run has it"):
        compare(validated(1.5, 1), recorded(), metric="val_loss")


def test_two_percent_is_a_custom_and_decides_nothing() -> None:
    found = compare(recorded(), close(0.03, name="b"))
    assert found.custom_gap is not None
    assert found.custom_gap < 0.02
    assert found.within_custom is True
    assert found.verdict == "inconclusive"


def test_an_emulated_run_is_told() -> None:
    emulated = recorded(run=Run(id="x", seed=1, kind="emulated"))
    assert any(note.startswith("emulated: ") and "not those of hardware" in note for note in compare(recorded(), emulated).notes)


def test_rows_out_of_order_are_put_in_order_and_told() -> None:
    steps = rows(falling())
    shuffled = recorded(steps=(*steps[1:], steps[0], steps[5]))
    found = compare(recorded(), shuffled)
    assert found.verdict == "equivalent"
    assert any("stood out of order or twice" in note for note in found.notes)


@pytest.mark.parametrize("margin", ["", "x", "-1", "nan%", "inf", -0.5, float("nan")])
def test_a_margin_that_is_none_is_refused(margin: Any) -> None:
    with pytest.raises(DocumentError, match="margin"):
        compare(recorded(), recorded(), margin=margin)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(DocumentError, match="no such question"):
        compare(recorded(), recorded(), question="both")
    with pytest.raises(DocumentError, match="no run"):
        compare([], recorded())


def test_the_root_exports_it() -> None:
    assert mpbackend.compare is compare
    assert mpbackend.Comparison is Comparison


def test_operations_in_other_formats_and_other_conversions_are_named() -> None:
    """A product that fell back to fp32 in the backward pass, with the casts that this takes."""
    usual = ComputeReading(products={"forward aten::mm": {"bf16": 4}, "backward aten::mm": {"bf16": 8}}, conversions={"forward": {"fp32 to bf16": 6}})
    fallen = ComputeReading(
        products={"forward aten::mm": {"bf16": 4}, "backward aten::mm": {"bf16": 7, "fp32": 1}},
        conversions={"forward": {"fp32 to bf16": 6}, "backward": {"bf16 to fp32": 2}},
    )
    found = {entry.name: entry for entry in compare(recorded(compute=usual), recorded(compute=fallen)).differences if entry.kind == "audit"}
    assert {name: (entry.baseline, entry.candidate) for name, entry in found.items()} == {
        "backward aten::mm": ("bf16 x 8", "bf16 x 7, fp32 x 1"),
        "conversions, backward": ("none", "bf16 to fp32 x 2"),
    }
    assert not any(entry.decides for entry in found.values())
    unobserved = compare(recorded(compute=usual), recorded(compute=ComputeReading()))
    assert [entry for entry in unobserved.differences if entry.kind == "audit"] == []
