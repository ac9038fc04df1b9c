"""Quantized layers over fake operators that compute on CPU tensors: the same scales, elements and gradients as the core's reference layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mpbackend.decisions import Decision
from mpbackend.device import Device
from mpbackend.errors import BackendError
from mpbackend.lowbit import LowBit, low_bit
from mpbackend.planning import Plan
from mpbackend.recipe import parse_recipe
from mpbackend.train.quantize import quantize as reference_quantize
from mpbackend.train.reference import LowBitLinear
from mpbackend_ascend.backend import AscendBackend
from mpbackend_ascend.lowbit import AscendLinear, exponents, misfit, quantize

A5 = Device(key="ascend-950pr", arch="ascend-950", name="Ascend950PR_9599", backend="ascend", type="npu")
RECIPES = ("fp8", "fp8:scaling.inputs=row,scaling.weights=row", "fp8-delayed", "fp8-block:scaling.inputs=128x128", "mxfp8", "hif8")


def meaning_of(text: str) -> LowBit:
    return low_bit(parse_recipe(text))


def make_plan(text: str) -> Plan:
    recipe = parse_recipe(text)
    pair = (recipe.compute.forward, recipe.compute.forward)
    decision = Decision(role="compute.forward", op="matmul", asked=text, granted=pair[0], level="native", reason="", pair=pair)
    return Plan(recipe=text, recipe_hash="", granted=text, effective=recipe, device=A5, decisions=(decision,))


@pytest.mark.parametrize("recipe", RECIPES)
def test_quantize_is_the_references(recipe: str, library: Any) -> None:
    meaning = meaning_of(recipe)
    tensor = torch.randn(40, 96, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 96)
    tensor[0, 0], tensor[5] = float("inf"), 0.0
    for operand in (meaning.forward.a, meaning.forward.b, meaning.dgrad.a):
        mine, theirs = quantize(tensor, operand, meaning), reference_quantize(tensor, operand, meaning)
        for name in ("scale", "inverse", "amax"):
            assert torch.equal(getattr(mine, name).nan_to_num(7.0), getattr(theirs, name).nan_to_num(7.0)), name
        assert mine.inverse.isnan().any(), "the group with the infinity"
        finite = ~torch.isnan(theirs.dequantized())
        assert torch.equal(mine.dequantized()[finite], theirs.dequantized()[finite])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bias", [False, True])
def test_layer_is_the_references(recipe: str, bias: bool, library: Any) -> None:
    meaning = meaning_of(recipe)
    torch.manual_seed(1)
    plain = nn.Linear(96, 64, bias=bias)
    reference, layer = LowBitLinear.from_linear(plain, meaning), AscendLinear.from_linear(plain, meaning)
    assert layer.weight is plain.weight
    gradients = []
    for step in range(2):
        outs, inputs = [], []
        for made in (reference, layer):
            plain.zero_grad()
            x = torch.randn(3, 7, 96, generator=torch.Generator().manual_seed(step)).requires_grad_()
            out = made(x)
            out.square().sum().backward()
            outs.append(out.detach())
            inputs.append(x.grad)
            gradients.append([parameter.grad for parameter in plain.parameters()])
        assert torch.allclose(outs[0], outs[1], rtol=1e-5, atol=1e-5)
        assert inputs[0] is not None
        assert inputs[1] is not None
        assert torch.allclose(inputs[0], inputs[1], rtol=1e-2, atol=1e-2 * inputs[0].abs().max().item())
        for mine, theirs in zip(gradients.pop(), gradients.pop(), strict=True):
            assert mine is not None
            assert theirs is not None
            assert torch.allclose(mine, theirs, rtol=1e-2, atol=1e-2 * theirs.abs().max().item())
    if layer.amaxes is not None:
        assert reference.amaxes is not None
        assert torch.allclose(layer.amaxes.window, reference.amaxes.window, rtol=1e-5)


def test_what_reaches_the_operator(library: Any) -> None:
    x = torch.randn(32, 128)
    expected: dict[str, dict[str, Any]] = {
        "fp8": {"scale": (1,), "pertoken": (1,), "group_sizes": None},
        "fp8:scaling.inputs=row,scaling.weights=row": {"scale": (128,), "pertoken": (32,), "group_sizes": None},
        "fp8-block:scaling.inputs=128x128": {"scale": (1, 1), "pertoken": (1, 1), "group_sizes": [128, 128, 128]},
        "mxfp8": {"scale": (2, 128, 2), "pertoken": (32, 2, 2), "group_sizes": [1, 1, 32]},
        "hif8": {"scale": (1,), "pertoken": (1,), "group_sizes": None},
    }
    for recipe, shapes in expected.items():
        library.calls.clear()
        layer = AscendLinear.from_linear(nn.Linear(128, 128, bias=False), meaning_of(recipe))
        out = layer(x.bfloat16())
        assert out.dtype is torch.bfloat16
        (call,) = [options for name, options in library.calls if name == "npu_quant_matmul"]
        assert tuple(call["scale"]) == shapes["scale"], recipe
        assert tuple(call["pertoken_scale"].shape) == shapes["pertoken"], recipe
        assert call.get("group_sizes") == shapes["group_sizes"], recipe
        assert call["output_dtype"] is torch.bfloat16
        assert ("x1_dtype" in call) == (recipe == "hif8")
        assert ("scale_dtype" in call) == (recipe == "mxfp8")


def test_evaluation_leaves_the_window_alone(library: Any) -> None:
    layer = AscendLinear.from_linear(nn.Linear(32, 32), meaning_of("fp8-delayed")).eval()
    assert layer.amaxes is not None
    with torch.no_grad():
        layer(torch.randn(16, 32))
    assert int(layer.amaxes.steps) == 0
    layer.train()
    layer(torch.randn(16, 32)).sum().backward()
    assert int(layer.amaxes.steps) == 1
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    layer(torch.randn(16, 32))
    assert int(layer.amaxes.steps) == 2, "a training step without anything to differentiate counts"


def test_exponents_are_those_of_the_inverse() -> None:
    inverse = torch.tensor([[1.0, 2.0, 0.5], [2.0**-126, 2.0**127, float("nan")]])
    codes = exponents(inverse)
    assert (codes.shape, codes.dtype) == (torch.Size([2, 2, 2]), torch.uint8)
    assert codes.tolist() == [[[127, 128], [126, 0]], [[1, 254], [255, 0]]]


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ("fp8", ""),
        ("mxfp8", ""),
        ("hif8", ""),
        ("fp8:scaling.inputs=row", ""),
        ("fp8-block:scaling.inputs=128x128", ""),
        ("fp8-block", "the product of the weight's gradient: torch_npu.npu_quant_matmul does not pair scales per 1x128 with scales per 1x128"),
        ("fp8:compute.dgrad=bf16", "the product of the input's gradient: torch_npu.npu_quant_matmul has no operand in bf16"),
        ("fp8:compute.wgrad=hif8", "the product of the weight's gradient: torch_npu.npu_quant_matmul does not pair hif8 with fp8_e4m3"),
        ("mxfp8:scaling.format=fp32", "takes blocks of 32 in fp8 with e8m0 scales only"),
        ("hif8:scaling.inputs=1x32,scaling.weights=1x32,scaling.format=e8m0", "takes blocks of 32 in fp8 with e8m0 scales only"),
        ("nvfp4", "has no operand in fp4_e2m1"),
    ],
)
def test_misfits(recipe: str, reason: str) -> None:
    found = misfit(meaning_of(recipe))
    assert reason in found
    assert bool(found) == bool(reason)


def test_convert_lists_every_layer_and_keeps_siblings_of_a_misfit(library: Any) -> None:
    model = nn.Sequential(nn.Linear(32, 10), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    rows = AscendBackend().convert(model, make_plan("fp8"))
    assert [(row["layer"], row["action"]) for row in rows] == [("0", "skipped"), ("1", "converted"), ("3", "converted")]
    assert "out_features 10" in rows[0]["reason"]
    assert rows[1]["reason"] == "torch_npu.npu_quant_matmul"
    assert sum(float(row["flop_share"]) for row in rows) == pytest.approx(1.0)
    assert [type(model[i]) for i in (0, 1, 3)] == [nn.Linear, AscendLinear, AscendLinear]
    with pytest.raises(BackendError, match="made for an earlier low-bit recipe"):
        AscendBackend().convert(model, make_plan("bf16"))


def test_convert_refuses_before_it_changes_anything(library: Any) -> None:
    model = nn.Sequential(nn.Linear(128, 128))
    with pytest.raises(BackendError, match=r"scaling\.inputs=128x128 pairs in all three products"):
        AscendBackend().convert(model, make_plan("fp8-block"))
    assert type(model[0]) is nn.Linear
