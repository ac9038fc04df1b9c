"""What decisions may never do: grant by a layout that is not there, by a switch that computes something else, or by a level that no source gives."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from pathlib import Path

import msgspec
import pytest

from mpbackend.decisions import Decision
from mpbackend.device import device_from_matrix
from mpbackend.errors import PlanError
from mpbackend.formats import FORMATS
from mpbackend.granting import ON_UNSUPPORTED, OnUnsupported, grant, kept_in_fp32
from mpbackend.matrix import Matrix, load_matrix
from mpbackend.planning import Plan, plan_recipe
from mpbackend.recipe import PRESETS, parse_recipe

SHIPPED = load_matrix()
ACME = load_matrix([Path(__file__).parent / "fixtures" / "acme.toml"])
DEVICES = sorted({model.arch: model.key for model in SHIPPED.devices.values()}.values())
CHANGED = (
    "fp32:compute=tf32",
    "fp32:compute=hf32",
    "fp32:compute=tf32|fp32",
    "fp32:compute.dgrad=tf32",
    "fp32:compute=bf16|fp16|fp32",
    "fp32:compute=fp16|tf32|fp32",
    "fp16:accumulate.forward=fp16",
    "fp16:accumulate=fp16",
    "fp8:scaling.inputs=1x16",
)


def on(recipe: str, key: str, matrix: Matrix = SHIPPED, *, on_unsupported: OnUnsupported = "error", strict: bool = False) -> Plan:
    """Plan a recipe onto a device that a matrix declares."""
    return plan_recipe(parse_recipe(recipe), device_from_matrix(matrix, key), matrix, on_unsupported=on_unsupported, strict=strict)


def refused(recipe: str, key: str, matrix: Matrix = SHIPPED) -> list[Decision]:
    """Return the refused decisions about a recipe."""
    with pytest.raises(PlanError) as caught:
        on(recipe, key, matrix)
    return [decision for decision in caught.value.decisions if isinstance(decision, Decision)]


@functools.cache
def plans() -> list[Plan]:
    """Return every plan of the presets and of some changed recipes on one device of each architecture, under every policy."""
    made = []
    for recipe, key, policy in itertools.product((*PRESETS, *CHANGED), DEVICES, ON_UNSUPPORTED):
        with contextlib.suppress(PlanError):
            made.append(on(recipe, key, on_unsupported=policy))
    return made


# scaling


@pytest.mark.parametrize(
    ("recipe", "key", "pair"),
    [
        ("fp8:scaling.inputs=1x16", "h100", "inputs scaled by 1x16 and weights by tensor"),
        ("fp8:scaling.inputs=row", "h100", "inputs scaled by row and weights by tensor"),
        ("mxfp8:scaling.weights=tensor", "b200", "inputs scaled by 1x32 and weights by tensor"),
    ],
)
def test_scales_that_no_layout_serves_are_a_warning_and_refused_under_strict(recipe: str, key: str, pair: str) -> None:
    plan = on(recipe, key)
    for name in ("forward", "dgrad", "wgrad"):
        decision = plan.decision(f"compute.{name}")
        assert (decision.level, decision.grant) == ("unknown", "warned")
        assert pair in decision.reason
    with pytest.raises(PlanError, match=pair):
        on(recipe, key, strict=True)


# levels


def test_a_level_that_no_source_gives_is_never_granted_without_a_warning() -> None:
    count = 0
    for plan in plans():
        for decision in plan.decisions:
            if decision.level == "unknown":
                count += 1
                assert decision.grant == grant("unknown", "error", strict=False), (plan.recipe, plan.device.key, decision)
    assert count > 100


def test_the_accumulator_of_a_product_of_unknown_level_is_a_warning() -> None:
    decision = on("bf16", "aarch64").decision("accumulate.forward")
    assert (decision.granted, decision.level, decision.grant) == ("fp32", "unknown", "warned")
    assert on("bf16:accumulate=fast", "aarch64").decision("accumulate.forward").grant == "warned"
    with pytest.raises(PlanError) as caught:
        on("bf16", "aarch64", strict=True)
    assert "accumulate.forward" in {decision.role for decision in caught.value.decisions if isinstance(decision, Decision)}


# switches


def test_no_switch_computes_another_format_than_the_one_that_is_granted() -> None:
    count = 0
    for plan in plans():
        products = [decision for decision in plan.decisions if decision.role.startswith("compute.")]
        for switch in SHIPPED.switches(plan.device.arch):
            if switch.format != "fp32":
                continue
            for decision in products:
                if decision.op == switch.op and all(map(kept_in_fp32, decision.pair)):
                    count += 1
                    assert switch.computes[plan.switches[switch.name]] == decision.granted, (plan.recipe, plan.device.key, plan.on_unsupported, decision)
    assert count > 100


def test_a_reduced_fp32_that_no_setting_computes_is_refused_and_passed_over_in_a_choice() -> None:
    first = refused("bf16:compute=tf32", "x86-64-amx")[0]
    assert (first.role, first.level) == ("compute.forward", "absent")
    assert first.reason == "no setting of matmul.fp32_precision is known to compute tf32"
    assert first.source
    assert on("fp32:compute=tf32|fp32", "x86-64-amx").decision("compute.forward").granted == "fp32"
    assert refused("fp32:compute=hf32", "x86-64-amx")[0].level == "absent", "what the device decides needs a setting too"


def test_one_setting_serves_all_three_products() -> None:
    assert "one setting of matmul.fp32_precision would have to compute tf32 and fp32" in refused("fp32:compute.dgrad=tf32", "h100")[0].reason
    assert on("fp32:compute=tf32", "h100").switches["matmul.fp32_precision"] == "tf32"


def test_one_accumulation_setting_serves_all_three_products() -> None:
    decisions = refused("fp16:accumulate.forward=fp16", "h100")
    assert {decision.role for decision in decisions} == {"accumulate.dgrad", "accumulate.wgrad"}
    assert all(re.match(r"one setting of matmul\.\S+ would have to sum in fp32 and, for the forward pass, in fp16", decision.reason) for decision in decisions)
    assert on("fp16:accumulate=fp16", "h100").switches["matmul.fp16_accumulation"] == "true"
    assert on("fp16:accumulate.forward=fast", "h100").switches["matmul.fp16_accumulation"] == "false"


# convolution


def test_convolution_runs_in_the_16_bit_format_of_matmul() -> None:
    count = 0
    for plan in plans():
        matmul, conv = plan.decision("compute.forward", "matmul"), plan.decision("compute.forward", "conv")
        if {matmul.granted, conv.granted} & {"bf16", "fp16"} and not FORMATS[matmul.granted].is_low_bit:
            count += 1
            assert conv.granted == matmul.granted, (plan.recipe, plan.device.key)
    assert count > 100


def test_convolution_is_never_narrower_than_what_the_plan_says_is_granted() -> None:
    for plan in plans():
        effective, conv = plan.effective.compute.forward, plan.decision("compute.forward", "conv")
        if conv.granted in FORMATS and conv.granted != effective and kept_in_fp32(conv.granted) and kept_in_fp32(effective):
            assert FORMATS[conv.granted].mantissa_bits >= FORMATS[effective].mantissa_bits, (plan.recipe, plan.device.key)


def test_where_fp32_is_chosen_for_matmul_convolution_is_not_reduced() -> None:
    plan = on("fp32-fast", "ascend-310b")
    assert (plan.effective.compute.forward, plan.decision("compute.forward", "conv").granted) == ("fp32", "fp32")


def test_a_choice_takes_the_format_that_both_operations_have() -> None:
    plan = on("fp32:compute=bf16|fp16|fp32", "ascend-310b")
    assert {plan.decision("compute.forward", op).granted for op in ("matmul", "conv")} == {plan.effective.compute.forward}


def test_a_convolution_in_another_format_says_so() -> None:
    assert on("fp32-fast", "acme-x1", ACME).decision("compute.forward", "conv").reason.endswith("; matrix products run in tf32")


# what is stored


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "fp4_e2m1", "bf16", "fp16"])
def test_parameters_narrower_than_fp32_without_a_master_lose_updates(name: str) -> None:
    decision = on(f"bf16:params={name}", "h100").decision("params")
    assert decision.grant == "warned"
    assert f"an update below {FORMATS[name].eps / 4:g} of a weight is lost" in decision.reason
    assert on(f"bf16:params={name},master=fp32", "h100").decision("params").grant == "granted"


@pytest.mark.parametrize("name", ["fp32", "fp64"])
def test_wide_parameters_lose_nothing(name: str) -> None:
    assert on(f"bf16:params={name}", "h100").decision("params").grant == "granted"


def test_a_converted_product_runs_on_an_emulated_device_that_was_asked_to_emulate() -> None:
    """On hardware it is refused under every policy: nobody asks for fp16 in the name of fp32. Naming the emulator is asking to see what the device would do."""
    emulated = msgspec.structs.replace(device_from_matrix(SHIPPED, "ascend-910a"), kind="emulated")
    for device, policy in ((emulated, "error"), (device_from_matrix(SHIPPED, "ascend-910a"), "emulate")):
        with pytest.raises(PlanError, match="converted"):
            plan_recipe(parse_recipe("fp32"), device, SHIPPED, on_unsupported=policy)  # type: ignore[arg-type] # the loop widens the words
    plan = plan_recipe(parse_recipe("fp32"), emulated, SHIPPED, on_unsupported="emulate")
    decision = plan.decision("compute.forward", "matmul")
    assert (decision.granted, decision.level, decision.grant) == ("fp32", "converted", "warned")
    assert "computed in fp16; the emulator converts it as the device does" in decision.reason
