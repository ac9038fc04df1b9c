"""One recipe on one device: what is granted, why, and what the refusals say.

The shipped matrices answer for the devices people have; a made-up vendor's file answers for the cases that no shipped device shows.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpbackend.backend import Implementation
from mpbackend.decisions import Decision
from mpbackend.device import Device, device_from_matrix
from mpbackend.documents import shipped_files
from mpbackend.errors import DocumentError, MpbackendError, PlanError
from mpbackend.granting import ON_UNSUPPORTED, OnUnsupported
from mpbackend.matrix import Matrix, load_matrix
from mpbackend.planning import NO_PLUGIN, Plan, plan_recipe, storage_blockers
from mpbackend.recipe import PRESETS, canonical_text, parse_recipe, recipe_hash
from mpbackend.roles import PASSES

FIXTURE = Path(__file__).parent / "fixtures" / "acme.toml"
SHIPPED = load_matrix()
ACME = load_matrix([FIXTURE])
DEVICES = sorted({model.arch: model.key for model in SHIPPED.devices.values()}.values())
"""One shipped device of each architecture."""

REDUCED_FP32 = ("fp32_precision", "allow_hf32")
"""How the switches that reduce fp32 are called on the vendors."""


def on(recipe: str, key: str, matrix: Matrix = SHIPPED, implementations: list[Implementation] | None = None, **options: Any) -> Plan:
    """Plan a recipe onto a device that a matrix declares."""
    return plan_recipe(parse_recipe(recipe), device_from_matrix(matrix, key), matrix, implementations, **options)


def acme(recipe: str, key: str, **options: Any) -> Plan:
    """Plan onto a device of the made-up vendor."""
    return on(recipe, key, ACME, **options)


def refusal(recipe: str, key: str, matrix: Matrix = SHIPPED, **options: Any) -> PlanError:
    """Return the refusal of a recipe on a device."""
    with pytest.raises(PlanError) as caught:
        on(recipe, key, matrix, **options)
    assert "\n" not in str(caught.value)
    assert caught.value.decisions
    return caught.value


def refused(error: PlanError) -> list[Decision]:
    """Return the refused decisions that an error carries."""
    decisions = [decision for decision in error.decisions if isinstance(decision, Decision)]
    assert [decision.grant for decision in decisions] == ["refused"] * len(error.decisions)
    return decisions


@pytest.fixture
def edit(tmp_path: Path) -> Callable[..., Matrix]:
    """Load a file with texts replaced, each where it stands first."""

    def edited(*changes: tuple[str, str]) -> Matrix:
        text = FIXTURE.read_text(encoding="utf-8")
        for old, new in changes:
            assert old in text
            text = text.replace(old, new, 1)
        path = tmp_path / "acme.toml"
        path.write_text(text, encoding="utf-8")
        return load_matrix([path])

    return edited


# bf16 where it is emulated or absent


@pytest.mark.parametrize("key", ["t4", "v100", "p100"])
def test_bf16_is_refused_where_it_is_emulated(key: str) -> None:
    error = refusal("bf16", key)
    first = refused(error)[0]
    assert (first.role, first.op, first.level) == ("compute.forward", "matmul", "emulated")
    assert first.source
    assert str(error).startswith(f"bf16 is refused on {key}: compute.forward: matmul in bf16 is emulated")
    assert first.source in str(error)
    assert error.remedy == "nearest: fp16 + dynamic loss scaling, taken by `--on-unsupported nearest`"


@pytest.mark.parametrize("key", ["t4", "v100", "p100", "ascend-910a", "ascend-310p"])
def test_the_rung_below_bf16_is_fp16_with_dynamic_scaling(key: str) -> None:
    plan = on("bf16", key, on_unsupported="nearest")
    assert (plan.recipe, plan.granted) == ("bf16", "bf16:compute=fp16,loss_scale.mode=dynamic")
    assert plan.recipe_hash == recipe_hash(PRESETS["bf16"])
    assert canonical_text(plan.effective) == plan.granted
    for name in PASSES:
        decision = plan.decision(f"compute.{name}")
        assert (decision.asked, decision.granted) == ("bf16", "fp16")
        assert "bf16 was refused: matmul in bf16 is" in decision.reason
    conv = plan.decision("compute.forward", "conv")
    assert (conv.asked, conv.granted) == ("bf16", "fp16")
    scale = plan.decision("loss_scale.mode")
    assert (scale.asked, scale.granted, scale.grant) == ("none", "dynamic from 65536", "granted")
    assert scale.reason.endswith("changed with compute, where bf16 was refused")
    assert plan.synchronizations[0].startswith("step(): one scalar read")


def test_emulation_is_granted_when_asked_for_and_shown() -> None:
    plan = on("bf16", "t4", on_unsupported="emulate")
    assert plan.granted == "bf16"
    assert {decision.level for decision in plan.decisions if decision.role.startswith("compute")} == {"emulated"}
    assert "computed in fp32" in plan.decision("compute.forward").reason


@pytest.mark.parametrize("policy", ["error", "emulate"])
def test_absent_is_refused_and_not_emulated(policy: OnUnsupported) -> None:
    error = refusal("bf16", "ascend-910a", on_unsupported=policy)
    assert refused(error)[0].level == "absent"
    assert "nearest: fp16 + dynamic loss scaling" in error.remedy


def test_an_unsupported_bf16_ends_alike_on_two_vendors() -> None:  # E1
    assert type(refusal("bf16", "t4")) is type(refusal("bf16", "ascend-910a"))
    texts = {on("bf16", key, on_unsupported="nearest").granted for key in ("t4", "ascend-910a")}
    assert texts == {"bf16:compute=fp16,loss_scale.mode=dynamic"}


def test_bf16_support_is_a_level_and_not_a_bool() -> None:  # E11
    levels = {key: refused(refusal("bf16", key, strict=True))[0].level for key in ("t4", "v100", "p100", "ascend-910a", "ascend-310p", "ascend-310b")}
    assert levels == {"t4": "emulated", "v100": "emulated", "p100": "emulated", "ascend-910a": "absent", "ascend-310p": "absent", "ascend-310b": "unknown"}
    for key in ("a100", "h100", "ascend-910b3", "ascend-910c", "ascend-950"):
        assert on("bf16", key).decision("compute.forward").level in ("native", "library")


def test_sources_that_disagree_are_granted_with_a_warning_that_says_so() -> None:
    plan = on("bf16", "ascend-310b")
    decision = plan.decision("compute.forward", "matmul")
    assert (decision.level, decision.grant) == ("unknown", "warned")
    assert "sources disagree" in decision.reason
    assert any(warning.startswith("compute.forward: matmul in bf16 is unknown") for warning in plan.warnings)


# fp32 that is not fp32


@pytest.mark.parametrize("key", ["ascend-910a", "ascend-310p"])
@pytest.mark.parametrize("policy", ON_UNSUPPORTED)
def test_fp32_is_refused_where_it_is_computed_in_fp16(key: str, policy: OnUnsupported) -> None:  # E13
    error = refusal("fp32", key, on_unsupported=policy)
    first = refused(error)[0]
    assert first.level == "converted"
    assert "computed in fp16" in first.reason
    assert error.remedy == "granted there: fp16"


def test_an_overflow_is_seen_by_the_register_where_the_device_saturates() -> None:  # E14
    for key in ("ascend-910a", "ascend-310p"):
        overflow = SHIPPED.overflow(key)
        assert overflow is not None
        assert overflow.mode == "saturating"
        decision = on("fp16", key).decision("loss_scale.mode")
        assert (decision.grant, decision.reason) == ("granted", "an overflow is seen by the status register")
        assert decision.source == SHIPPED.citation(overflow, key)
    assert on("fp16", "h100").decision("loss_scale.mode").reason == "an overflow is seen by inf and NaN in the gradients"


def test_dynamic_scaling_is_refused_where_no_overflow_can_be_seen() -> None:
    error = refusal("fp16:accumulate=fp16", "acme-x0", ACME)
    (decision,) = refused(error)
    assert decision.role == "loss_scale.mode"
    assert "the device saturates and no status register tells of an overflow" in decision.reason
    assert decision.source == "Acme programmer's manual, chapter 3"
    assert error.remedy == "`fp16:accumulate=fp16,loss_scale.mode=static` is granted there"
    assert acme("fp16:accumulate=fp16,loss_scale.mode=static", "acme-x0").decision("loss_scale.mode").grant == "granted"


@pytest.mark.parametrize(
    ("register", "grant"),
    [("status_register = false", "refused"), ('status_register = "unknown"', "refused"), ("", "refused"), ("status_register = true", "granted")],
)
def test_only_a_register_that_is_there_counts(edit: Callable[..., Matrix], register: str, grant: str) -> None:
    matrix = edit(("status_register = false", register))
    if grant == "refused":
        assert refused(refusal("fp16:accumulate=fp16", "acme-x0", matrix))[0].role == "loss_scale.mode"
    else:
        assert on("fp16:accumulate=fp16", "acme-x0", matrix).decision("loss_scale.mode").grant == grant


def test_a_saturating_device_is_named_where_no_scaling_is_needed(edit: Callable[..., Matrix]) -> None:
    matrix = edit(('mode = "inf_nan"', 'mode = "saturating"'))
    assert on("bf16", "acme-x1", matrix).decision("loss_scale.mode").reason.endswith("the device saturates, so inf and NaN never show an overflow")
    assert "saturates" not in acme("bf16", "acme-x1").decision("loss_scale.mode").reason


@pytest.mark.parametrize(
    "change", [('mode = "inf_nan"', 'mode = "unknown"'), ('[[overflow]]\narch = "ax1"\nmode = "inf_nan"\nsource = ["manual"]\nevidence = "documented"\n', "")]
)
def test_an_unknown_overflow_is_warned_and_refused_under_strict(edit: Callable[..., Matrix], change: tuple[str, str]) -> None:
    matrix = edit(change)
    decision = on("fp16", "acme-x1", matrix).decision("loss_scale.mode")
    assert (decision.grant, decision.reason) == ("warned", "no source says whether this device overflows to inf or saturates")
    assert refused(refusal("fp16", "acme-x1", matrix, strict=True))[-1].role == "loss_scale.mode"


# loss scaling


def test_fp16_without_scaling_is_a_warning() -> None:
    plan = on("fp16:loss_scale.mode=none", "h100")
    assert plan.decision("loss_scale.mode").grant == "warned"
    assert any("fp16 without loss scaling" in warning for warning in plan.warnings)


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ("bf16:loss_scale.mode=static,loss_scale.init=1024", "powers of two change no bit here: the exponent range is that of fp32"),
        ("fp32:loss_scale.mode=static", "powers of two change no bit here: the exponent range is that of fp32"),
        ("fp32:compute=tf32,loss_scale.mode=static", "powers of two change no bit here: the exponent range is that of fp32"),
        ("fp16:loss_scale.mode=static,loss_scale.init=1024", "constant scale 1024"),
        ("fp8:loss_scale.mode=static,loss_scale.init=1024", "constant scale 1024"),
        ("bf16", "the range of the compute format needs none"),
        ("fp8", "low-bit tensors have scales of their own"),
    ],
)
def test_what_scaling_does_in_a_format(recipe: str, reason: str) -> None:
    decision = on(recipe, "h100").decision("loss_scale.mode")
    assert (decision.grant, decision.reason) == ("granted", reason)


@pytest.mark.parametrize(("mode", "granted"), [("none", "none"), ("static", "static from 65536"), ("dynamic", "dynamic from 65536")])
def test_the_scale_that_is_granted_says_where_it_starts(mode: str, granted: str) -> None:
    assert on(f"bf16:loss_scale.mode={mode}", "h100").decision("loss_scale.mode").granted == granted


def test_only_dynamic_scaling_waits_for_the_device() -> None:
    assert len(on("fp16", "h100").synchronizations) == 5
    assert on("fp16:loss_scale.mode=static", "h100").synchronizations == on("bf16", "h100").synchronizations
    assert [point.split(":")[0].split(",")[0] for point in on("bf16", "h100").synchronizations] == ["reading rows", "watch()"]


# low-bit recipes


def test_fp8_is_refused_with_a_citation_where_it_is_absent() -> None:
    error = refusal("fp8", "ascend-910b3")
    first = refused(error)[0]
    assert (first.level, first.role) == ("absent", "compute.forward")
    assert first.source in str(error)
    assert error.remedy == "nearest: bf16, taken by `--on-unsupported nearest`"
    plan = on("fp8", "ascend-910b3", on_unsupported="nearest")
    assert plan.granted == "fp8:accumulate=fp32,compute=bf16,scaling.inputs=none,scaling.mode=none,scaling.weights=none"
    wgrad = plan.decision("compute.wgrad")
    assert (wgrad.asked, wgrad.granted) == ("fp8_e5m2", "bf16")
    assert "fp8_e5m2 was refused: matmul in fp8_e5m2 x fp8_e4m3 is absent" in wgrad.reason
    assert plan.decision("scaling.mode").reason.endswith("changed with compute, where fp8_e4m3 was refused")


def test_the_ladder_is_taken_as_far_down_as_needed() -> None:
    assert on("fp8", "t4", on_unsupported="nearest").effective.compute.forward == "fp16"
    assert on("fp8", "t4", on_unsupported="nearest").effective.loss_scale.mode == "dynamic"
    assert on("nvfp4", "h100", on_unsupported="nearest").effective.compute.forward == "bf16"
    for policy in ("error", "emulate"):
        assert refusal("fp8", "t4", on_unsupported=policy).remedy.startswith("nearest: fp16 + dynamic loss scaling"), "nearest passes over an emulated rung"


def test_fp8_on_a_unit_with_a_narrow_accumulator() -> None:  # E12
    plan = on("fp8", "h100")
    assert (plan.decision("compute.forward").level, plan.decision("compute.forward").granted) == ("native", "fp8_e4m3")
    assert plan.decision("compute.wgrad").pair == ("fp8_e5m2", "fp8_e4m3")
    fast = plan.decision("accumulate.forward")
    assert (fast.asked, fast.granted, fast.grant) == ("fast", "fp32", "granted")
    assert "13 fraction bits" in fast.reason
    assert fast.reason.endswith("fast takes it as it is")
    for name in ("dgrad", "wgrad"):
        precise = plan.decision(f"accumulate.{name}")
        assert (precise.asked, precise.granted) == ("fp32", "fp32 by promotion")
        assert "13 fraction bits" in precise.reason
        assert "unless promoted" in precise.reason
    assert plan.decision("compute.forward", "conv").granted == "bf16"
    assert not plan.runnable
    assert plan.blockers == ("no installed plugin runs this (none found the device h100 here)",)


def test_the_precise_accumulator_is_asked_for_by_its_effect() -> None:  # E12
    assert on("fp8:accumulate=fp32", "h100").decision("accumulate.forward").granted == "fp32 by promotion"
    assert on("fp8:accumulate=fp32", "b200").decision("accumulate.forward").granted == "fp32"
    assert on("bf16", "h100").decision("accumulate.forward").granted == "fp32"


def test_the_layers_that_a_low_bit_recipe_leaves_run_one_rung_up() -> None:
    conv = acme("fp8", "acme-x1").decision("compute.forward", "conv")
    assert (conv.asked, conv.granted) == ("bf16", "bf16")
    assert conv.reason.startswith("a low-bit recipe converts linear layers; conv in bf16 is native")


def test_microscaling_needs_a_unit_that_takes_the_scales() -> None:
    error = refusal("mxfp8", "h100")
    assert "matmul in fp8_e4m3 with mx_1x32 scales is absent" in str(error)
    assert on("mxfp8", "b200").decision("compute.forward").level == "native"
    assert on("mxfp8", "ascend-950").decision("compute.forward").level == "native"
    assert on("hif8", "ascend-950").decision("compute.forward").granted == "hif8"


# ordered choices


@pytest.mark.parametrize(
    ("key", "granted"),
    [
        ("a100", "tf32"),
        ("h100", "tf32"),
        ("ascend-910b3", "hf32_e8m11"),
        ("ascend-910c", "hf32_e8m11"),
        ("ascend-950", "hf32_e8m10"),
        ("v100", "fp32"),
        ("t4", "fp32"),
    ],
)
def test_fp32_fast_takes_the_reduced_fp32_of_the_device(key: str, granted: str) -> None:
    plan = on("fp32-fast", key)
    assert plan.granted == f"fp32-fast:compute={granted}"
    assert plan.recipe == "fp32-fast"
    for decision in plan.decisions:
        if decision.role.startswith("compute."):
            assert (decision.asked, decision.granted) == ("tf32|hf32|fp32", granted), decision


@pytest.mark.parametrize("key", DEVICES)
def test_one_choice_for_all_passes_is_made_once(key: str) -> None:
    try:
        plan = on("fp32-fast", key)
    except PlanError:
        return
    assert len({plan.decision(f"compute.{name}").granted for name in PASSES}) == 1


def test_a_name_that_the_device_decides_stays_open_where_it_offers_two(edit: Callable[..., Matrix]) -> None:
    switches = [('on = "tf32"', 'on = "hf32_e8m10"')] * 2
    one = edit(('a = "tf32"\nb = "tf32"', 'a = "hf32_e8m10"\nb = "hf32_e8m10"'), *switches)
    assert on("fp32:compute=hf32", "acme-x1", one).decision("compute.forward").granted == "hf32_e8m10"
    switches = [('on = "tf32"', 'on = "hf32"')] * 2
    rows = [('a = "tf32"\nb = "tf32"', f'a = "{name}"\nb = "{name}"') for name in ("hf32_e8m10", "hf32_e8m11")]
    two = edit(*rows, *switches)
    decision = on("fp32:compute=hf32", "acme-x1", two).decision("compute.forward")
    assert (decision.granted, decision.level, decision.grant) == ("hf32", "unknown", "warned")


def test_a_known_format_is_taken_before_an_unknown_one() -> None:
    assert acme("fp32:compute=hif8|bf16", "acme-x1").decision("compute.forward").granted == "bf16"
    assert acme("fp32:compute=fp64|hif8", "acme-x1").decision("compute.forward").granted == "fp64", "the first of two that no row speaks about"
    assert acme("fp32:compute=fp64|hif8", "acme-x1").decision("compute.forward").grant == "warned"


def test_a_choice_may_end_differently_for_convolution_and_so_do_the_switches() -> None:
    plan = acme("fp32-fast", "acme-x1")
    assert plan.decision("compute.forward", "matmul").granted == "tf32"
    assert plan.decision("compute.forward", "conv").granted == "fp32"
    assert plan.switches == {"matmul.reduced": "on", "conv.reduced": "off", "sum.half": "false"}


def test_every_format_of_a_choice_can_be_refused() -> None:
    error = refusal("fp32-fast", "ascend-910a")
    assert refused(error)[0].asked == "tf32|hf32|fp32"
    assert "converted" in str(error)


# switches


def fp32_switches(plan: Plan) -> dict[str, str]:
    """Return the settings of the switches that reduce fp32."""
    return {name: setting for name, setting in plan.switches.items() if name.endswith(REDUCED_FP32)}


@pytest.mark.parametrize("key", DEVICES)
@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
def test_true_fp32_turns_every_reduced_fp32_off(key: str, recipe: str) -> None:  # E4
    try:
        plan = on(recipe, key, on_unsupported="emulate")
    except PlanError:
        return
    chosen = fp32_switches(plan)
    declared = {
        switch.name: switch for switch in SHIPPED.switches(plan.device.arch) if switch.name.endswith(REDUCED_FP32) and "fp32" in switch.computes.values()
    }
    assert set(chosen) == set(declared)
    for name, setting in chosen.items():
        assert declared[name].computes[setting] == "fp32"


@pytest.mark.parametrize(
    ("key", "off", "on_"),
    [
        ("h100", {"matmul.fp32_precision": "ieee", "conv.fp32_precision": "ieee"}, {"matmul.fp32_precision": "tf32", "conv.fp32_precision": "tf32"}),
        ("ascend-910b3", {"matmul.allow_hf32": "False", "conv.allow_hf32": "False"}, {"matmul.allow_hf32": "True", "conv.allow_hf32": "True"}),
        ("ascend-950", {"matmul.allow_hf32": "False", "conv.allow_hf32": "False"}, {"matmul.allow_hf32": "True", "conv.allow_hf32": "True"}),
    ],
)
def test_both_families_of_operations_are_switched(key: str, off: dict[str, str], on_: dict[str, str]) -> None:  # E4
    assert off.items() <= on("fp32", key).switches.items()
    assert on_.items() <= on("fp32-fast", key).switches.items()
    defaults = {switch.name: switch.computes[switch.default] for switch in SHIPPED.switches(SHIPPED.device(key).arch) if switch.name.startswith("conv.")}
    assert "fp32" not in defaults.values(), "by default convolution is reduced, which is why the plan says otherwise"


def test_the_accumulator_sets_the_switches_of_the_sums() -> None:
    assert acme("bf16", "acme-x1").switches["sum.half"] == "false"
    assert on("bf16", "h100").switches["matmul.reduced_precision_reduction_bf16"] == "false"
    assert on("fp16:accumulate=fp16", "h100").switches["matmul.fp16_accumulation"] == "true"
    assert on("fp16", "h100").switches["matmul.fp16_accumulation"] == "false"


# accumulate


def test_an_accumulator_that_the_unit_lacks_is_refused() -> None:
    error = refusal("fp16", "acme-x0", ACME)
    decision = refused(error)[0]
    assert (decision.role, decision.granted) == ("accumulate.forward", "fp16")
    assert error.remedy == "`fp16:accumulate=fp16,loss_scale.mode=static` is granted there"
    assert acme("fp16:accumulate=fp16,loss_scale.mode=static", "acme-x0").decision("accumulate.forward").granted == "fp16"
    assert acme("fp16:accumulate=fast,loss_scale.mode=static", "acme-x0").decision("accumulate.forward").granted == "fp16"


def test_an_unknown_accumulator_is_a_warning_and_refused_under_strict(edit: Callable[..., Matrix]) -> None:
    matrix = edit(('a = "bf16"\nb = "bf16"\npath = "mma.sync"\naccumulate = "fp32"', 'a = "bf16"\nb = "bf16"\npath = "mma.sync"\naccumulate = "unknown"'))
    decision = on("bf16", "acme-x1", matrix).decision("accumulate.forward")
    assert (decision.granted, decision.level, decision.grant) == ("unknown", "unknown", "warned")
    assert decision.reason == "no source states the accumulator"
    assert {decision.role for decision in refused(refusal("bf16", "acme-x1", matrix, strict=True))} == {f"accumulate.{name}" for name in PASSES}


# what is stored, and between ranks


@pytest.mark.parametrize("recipe", ["bf16-params", "bf16:params=bf16", "fp16:params=fp16"])
def test_a_low_precision_parameter_without_a_master_is_a_warning(recipe: str) -> None:
    decision = on(recipe, "h100").decision("params")
    assert decision.grant == "warned"
    assert "no master copy: an update below 0.0" in decision.reason
    assert "bf16-kahan and bf16-sr keep it" in decision.reason


@pytest.mark.parametrize("recipe", ["bf16-master", "bf16-kahan", "bf16-sr", "fp16-master", "bf16", "fp32"])
def test_what_keeps_the_bits_of_an_update_is_no_warning(recipe: str) -> None:
    assert on(recipe, "h100").warnings == []


@pytest.mark.parametrize(("recipe", "bits"), [("bf16-params", "0.00195312"), ("fp16:params=fp16", "0.000244141")])
def test_the_warning_states_what_is_less_than_half_an_ulp_of_every_weight(recipe: str, bits: str) -> None:
    assert f"below {bits} of a weight" in on(recipe, "h100").decision("params").reason


def test_a_master_recipe_keeps_its_master_on_the_next_rung() -> None:
    plan = on("bf16-master", "t4", on_unsupported="nearest")
    assert (plan.effective.params, plan.effective.master, plan.effective.loss_scale.mode) == ("fp16", "fp32", "dynamic")
    pure = on("bf16-params", "t4", on_unsupported="nearest")
    assert (pure.effective.params, pure.effective.master, pure.effective.grads, pure.effective.optimizer.exp_avg) == ("fp16", "fp32", "fp32", "fp32")
    assert pure.decision("params").reason.endswith("changed with compute, where bf16 was refused")


def test_the_sum_between_ranks_is_looked_up() -> None:
    reduce = acme("bf16", "acme-x1").decision("reduce.format")
    assert (reduce.asked, reduce.granted, reduce.level, reduce.grant) == ("fp32, divide before", "fp32, divide before", "native", "granted")
    assert reduce.source == "Acme programmer's manual, chapter 3"
    unknown = acme("bf16:reduce.format=bf16", "acme-x1").decision("reduce.format")
    assert (unknown.level, unknown.grant) == ("unknown", "warned")
    assert refused(refusal("bf16:reduce.format=bf16", "acme-x1", ACME, strict=True))[0].role == "reduce.format"
    error = refusal("bf16:reduce.format=bf16", "acme-x0", ACME, on_unsupported="emulate")
    assert [decision.role for decision in refused(error)] == ["reduce.format"]


def test_a_sum_that_can_overflow_says_so() -> None:
    assert "divided afterwards and can overflow" in acme("fp16:reduce.format=fp16,reduce.divide=after", "acme-x1").decision("reduce.format").reason
    assert "overflow" not in acme("fp16:reduce.format=fp16", "acme-x1").decision("reduce.format").reason
    assert "overflow" not in acme("fp16:reduce.divide=after", "acme-x1").decision("reduce.format").reason


# strict, unknown devices, plugins


def test_strict_refuses_what_no_source_speaks_about() -> None:
    assert acme("fp32:compute=hif8", "acme-x1").decision("compute.forward").grant == "warned"
    error = refusal("fp32:compute=hif8", "acme-x1", ACME, strict=True)
    assert {decision.level for decision in refused(error)} == {"unknown"}
    assert on("bf16", "h100", strict=True).warnings == []


@pytest.mark.parametrize("recipe", PRESETS)
def test_an_unknown_architecture_is_all_warnings(recipe: str) -> None:
    stranger = Device(key="stranger", arch="unknown", name="Stranger 1")
    plan = plan_recipe(PRESETS[recipe], stranger, SHIPPED)
    assert {decision.grant for decision in plan.decisions if decision.role.startswith(("compute", "accumulate", "reduce"))} == {"warned"}
    assert plan.switches == {}
    with pytest.raises(PlanError, match="stranger"):
        plan_recipe(PRESETS[recipe], stranger, SHIPPED, strict=True)


RUNS = [Implementation(op=op, a="bf16", b="bf16", path="mma.sync", level="native") for op in ("matmul", "conv")]


def test_a_plugin_that_runs_all_of_it_makes_the_plan_runnable() -> None:
    device = msgspec.structs.replace(device_from_matrix(ACME, "acme-x1"), usable=True, cause="")
    plan = plan_recipe(PRESETS["bf16"], device, ACME, RUNS)
    assert (plan.runnable, plan.blockers) == (True, ())


def test_what_keeps_a_plan_from_running_is_named() -> None:
    assert acme("bf16", "acme-x1", implementations=RUNS).blockers == ("acme-x1 is not usable: planned from the matrix; no such device was found here",)
    cannot = Implementation(op="conv", a="bf16", b="bf16", path="mma.sync", level=None, reason="convolution is not written")
    device = msgspec.structs.replace(device_from_matrix(ACME, "acme-x1"), usable=True)
    plan = plan_recipe(PRESETS["bf16"], device, ACME, [RUNS[0], cannot])
    assert (plan.runnable, plan.blockers) == (False, ("compute.forward (conv) in bf16: convolution is not written",))
    plan = plan_recipe(PRESETS["fp16"], device, ACME, RUNS)
    assert plan.blockers[0] == f"compute.forward (matmul) in fp16: {NO_PLUGIN}"
    assert plan_recipe(PRESETS["bf16"], device, ACME).blockers == (f"{NO_PLUGIN} (none found the device acme-x1 here)",)


@pytest.mark.parametrize(
    "recipe",
    [
        *(name for name in PRESETS if PRESETS[name].params != "fp32"),
        "bf16-master:master=kahan,optimizer=fp16",
        "bf16-sr:grads=fp32,buffers=bf16",
        "fp16-master:grads=fp16,optimizer.exp_avg=bf16",
        "fp8:params=bf16,master=fp32",
        "fp32:optimizer=bf16,buffers=fp16",
    ],
)
def test_every_mixture_of_storage_roles_that_makes_sense_trains(recipe: str) -> None:
    assert storage_blockers(parse_recipe(recipe)) == {}


@pytest.mark.parametrize(
    ("recipe", "role", "reason"),
    [
        ("bf16:master=fp32", "master", "fp32 parameters lose nothing that it would keep; write master=none"),
        ("bf16:master=stochastic", "master", "fp32 parameters lose nothing"),
        ("bf16:grads=bf16", "grads", "gradients arrive in fp32; sum them in fp32"),
        ("bf16-master:grads=fp16", "grads", "gradients arrive in bf16; sum them in bf16 or fp32"),
        ("fp8:params=fp8_e4m3", "params", "a session keeps it in fp32, bf16, fp16"),
        ("bf16-master:optimizer.exp_avg=fp8_e4m3", "optimizer.exp_avg", "a session keeps it in fp32, bf16, fp16"),
        ("bf16:optimizer.exp_avg_sq=fp64", "optimizer.exp_avg_sq", "a session keeps it in"),
        ("bf16:buffers=fp8_e5m2", "buffers", "a session keeps it in"),
        ("fp32:params=bf16", "params", "compute.forward is fp32: without autocast its layers would compute in bf16; keep params=fp32, or compute in bf16"),
        ("fp16-master:params=bf16", "params", "compute.forward is fp16: autocast casts it to fp16 for every product"),
        ("fp8:params=fp16,master=fp32", "params", "compute.forward is fp8_e4m3: autocast casts it to bf16"),
    ],
)
def test_storage_that_makes_no_sense_is_a_blocker_with_its_reason(recipe: str, role: str, reason: str) -> None:
    (found,) = storage_blockers(parse_recipe(recipe)).items()
    assert found[0] == role
    assert reason in found[1]


def test_a_storage_blocker_keeps_a_plan_from_running() -> None:
    device = msgspec.structs.replace(device_from_matrix(ACME, "acme-x1"), usable=True, cause="")
    assert plan_recipe(PRESETS["bf16-master"], device, ACME, RUNS).runnable
    plan = plan_recipe(parse_recipe("bf16:master=kahan"), device, ACME, RUNS)
    assert (plan.runnable, plan.blockers) == (False, ("master=kahan: fp32 parameters lose nothing that it would keep; write master=none",))


@pytest.mark.parametrize(
    ("recipe", "role", "reason"),
    [
        ("bf16-master", "master", "the optimizer updates an fp32 copy, and the parameter is its rounding to bf16"),
        ("bf16-kahan", "master", "a term in bf16 keeps what rounding the updated parameter loses"),
        ("bf16-sr", "master", "rounded up or down by chance, right on average"),
        ("bf16-master", "grads", "each arrives in bf16 and is added in fp32"),
        ("bf16-kahan", "grads", "a sum of bf16 loses what is below half a spacing of it"),
        ("fp16-master", "buffers", "only parameters are cast"),
    ],
)
def test_the_reason_of_a_storage_role_says_how_it_is_carried_out(recipe: str, role: str, reason: str) -> None:
    assert reason in on(recipe, "h100").decision(role).reason


@pytest.mark.parametrize("count", [0, -1])
def test_micro_batches_start_at_one(count: int) -> None:
    with pytest.raises(DocumentError, match="micro_batches"):
        acme("bf16", "acme-x1", micro_batches=count)


# the plan as a whole


@pytest.mark.parametrize("policy", ON_UNSUPPORTED)
@pytest.mark.parametrize("recipe", PRESETS)
def test_every_preset_on_every_architecture_is_planned_or_refused_with_reasons(recipe: str, policy: OnUnsupported) -> None:
    for key in DEVICES:
        try:
            plan = on(recipe, key, on_unsupported=policy)
        except PlanError as error:
            assert all(decision.reason for decision in refused(error))
            assert "\n" not in str(error)
            assert error.remedy
            continue
        roles = {decision.role for decision in plan.decisions}
        assert roles == set(PRESETS[recipe].flat()) - {path for path in PRESETS[recipe].flat() if path.startswith(("loss_scale.", "scaling.", "reduce."))} | {
            "loss_scale.mode",
            "scaling.mode",
            "reduce.format",
        }
        for decision in plan.decisions:
            assert decision.grant != "refused"
            assert decision.reason
            assert decision.source or decision.level in ("unknown", "storage")
        assert parse_recipe(plan.granted) == plan.effective
        assert plan.device.key == key


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.sampled_from(sorted(PRESETS)),
    st.fixed_dictionaries(
        {},
        optional={
            "compute": st.sampled_from(["fp32", "tf32", "hf32", "bf16", "fp16", "fp8_e4m3", "hif8", "int8", "e8m0", "bf16|fp16", "fp8_e4m3|bf16"]),
            "compute.dgrad": st.sampled_from(["fp32", "hf32", "bf16", "fp8_e5m2|fp16"]),
            "accumulate": st.sampled_from(["fast", "fp32", "fp16", "hf32", "int32", "e8m0"]),
            "params": st.sampled_from(["fp64", "bf16", "fp8_e4m3"]),
            "scaling.inputs": st.sampled_from(["none", "tensor", "1x32", "1x128"]),
            "scaling.mode": st.sampled_from(["none", "current"]),
            "loss_scale.mode": st.sampled_from(["none", "static", "dynamic"]),
            "reduce.format": st.sampled_from(["fp32", "fp16", "bf16", "fp64", "fp8_e4m3"]),
        },
    ),
    st.sampled_from(DEVICES),
    st.sampled_from(ON_UNSUPPORTED),
    st.booleans(),
)
def test_any_recipe_is_planned_or_refused(recipe: str, changes: dict[str, str], key: str, policy: OnUnsupported, strict: bool) -> None:
    asked = PRESETS[recipe].evolve(**changes)
    try:
        plan = plan_recipe(asked, device_from_matrix(SHIPPED, key), SHIPPED, on_unsupported=policy, strict=strict)
    except MpbackendError as error:
        assert isinstance(error, PlanError)
        return
    assert (plan.recipe, plan.recipe_hash) == (canonical_text(asked), recipe_hash(asked))
    left_open = any("|" in value or value == "hf32" for value in (getattr(asked.compute, name) for name in PASSES))
    assert policy == "nearest" or left_open or plan.granted == plan.recipe


def test_a_plan_is_plain_data_that_reads_back() -> None:
    plan = on("fp8", "h100", micro_batches=4)
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan


def test_a_decision_is_found_by_role_and_operation() -> None:
    plan = acme("bf16", "acme-x1")
    assert plan.decision("compute.forward").op == "matmul"
    assert plan.decision("compute.forward", "conv").op == "conv"
    for role, op in (("compute", ""), ("params", "matmul")):
        with pytest.raises(KeyError, match=role):
            plan.decision(role, op)


# the hash


def test_the_hash_is_that_of_the_arithmetic_and_not_of_the_device() -> None:
    assert on("bf16", "h100").hash == on("bf16", "h100").hash
    assert on("bf16", "h100").hash == on("bf16", "h200").hash, "one architecture, one arithmetic"
    device = msgspec.structs.replace(device_from_matrix(ACME, "acme-x1"), backend="acme", index=3, usable=True)
    assert plan_recipe(PRESETS["bf16"], device, ACME, RUNS).hash == acme("bf16", "acme-x1").hash


def test_the_hash_tells_plans_apart() -> None:
    plans = [
        on("bf16", "h100"),
        on("bf16", "a100"),
        on("bf16", "ascend-910b3"),
        on("fp16", "h100"),
        on("bf16:reduce.format=bf16", "h100"),
        on("bf16", "h100", micro_batches=2),
        on("bf16", "t4", on_unsupported="nearest"),
        on("bf16", "t4", on_unsupported="emulate"),
        on("fp16:loss_scale.init=4096", "h100"),
        on("fp16:loss_scale.interval=100", "h100"),
    ]
    assert len({plan.hash for plan in plans}) == len(plans)


def test_the_hash_is_the_same_in_every_process() -> None:
    program = "from mpbackend.selection import plan; from mpbackend.plugins import Plugins; print(plan('fp8', 'h100', plugins=Plugins()).hash)"
    for seed in ("0", "1"):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env={**os.environ, "PYTHONHASHSEED": seed})
        assert done.stdout.strip() == on("fp8", "h100").hash


# one row changes the plan


def flipped(folder: Path, file: str, key: dict[str, str], level: str) -> Matrix:
    """Copy the shipped matrices with the level of every row that has these fields changed."""
    count = 0
    paths = []
    for path in shipped_files():
        text = path.read_text(encoding="utf-8")
        if path.name == file:
            blocks = re.split(r"(?m)^(?=\[\[)", text)
            for number, block in enumerate(blocks):
                if block.startswith("[[row]]") and all(f'\n{name} = "{value}"\n' in block for name, value in key.items()):
                    blocks[number] = re.sub(r'(?m)^level = ".*"$', f'level = "{level}"', block)
                    count += blocks[number] != block
            text = "".join(blocks)
        paths.append(folder / path.name)
        paths[-1].write_text(text, encoding="utf-8")
    assert count, "no row was changed"
    return load_matrix(paths)


def test_a_copy_of_the_matrices_gives_the_same_plans(tmp_path: Path) -> None:
    paths = [tmp_path / path.name for path in shipped_files()]
    for source, target in zip(shipped_files(), paths, strict=True):
        target.write_bytes(source.read_bytes())
    assert on("bf16", "h100", load_matrix(paths)) == on("bf16", "h100")


@pytest.mark.parametrize("level", ["emulated", "converted", "storage", "absent"])
def test_one_row_that_is_flipped_refuses_the_plan_with_another_reason(tmp_path: Path, level: str) -> None:
    matrix = flipped(tmp_path, "nvidia.toml", {"arch": "sm_90", "op": "matmul", "a": "bf16", "b": "bf16"}, level)
    before = on("bf16", "h100").decision("compute.forward")
    assert before.reason.startswith("matmul in bf16 is native")
    error = refusal("bf16", "h100", matrix)
    assert f"matmul in bf16 is {level}" in refused(error)[0].reason
    plan = on("bf16", "h100", matrix, on_unsupported="nearest")
    assert plan.granted == "bf16:compute=fp16,loss_scale.mode=dynamic"
    assert f"bf16 was refused: matmul in bf16 is {level}" in plan.decision("compute.forward").reason
    assert on("bf16", "a100", matrix) == on("bf16", "a100"), "another architecture is not touched"


def test_a_row_that_becomes_unknown_is_warned(tmp_path: Path) -> None:
    matrix = flipped(tmp_path, "nvidia.toml", {"arch": "sm_90", "op": "matmul", "a": "bf16", "b": "bf16"}, "unknown")
    plan = on("bf16", "h100", matrix)
    assert plan.decision("compute.forward").grant == "warned"
    assert plan.hash != on("bf16", "h100").hash
    assert refused(refusal("bf16", "h100", matrix, strict=True))[0].level == "unknown"


def test_one_row_that_is_flipped_grants_the_plan(tmp_path: Path) -> None:
    matrix = flipped(tmp_path, "ascend.toml", {"arch": "ascend-910a", "a": "bf16", "b": "bf16"}, "native")
    assert on("bf16", "ascend-910a", matrix).decision("compute.forward").level == "native"


def test_every_policy_is_a_value_of_the_plan() -> None:
    for policy, strict in itertools.product(ON_UNSUPPORTED, (False, True)):
        assert acme("bf16", "acme-x1", on_unsupported=policy, strict=strict).on_unsupported == policy
