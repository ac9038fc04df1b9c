"""Quantized linear layers: on a 950 the same numbers as the core's reference layers, elsewhere refused with a citation.

The simulated operators dequantize and multiply in fp32. What is shown is that the right operands, scales, formats and groupings arrive, and that the real
wheel's own shape rules take the calls.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import mpbackend
from mpbackend.errors import PlanError
from mpbackend.lowbit import LowBit, low_bit
from mpbackend.recipe import parse_recipe
from mpbackend.train.quantize import Stored
from mpbackend.train.quantize import quantize as reference_quantize
from mpbackend.train.reference import LowBitLinear
from mpbackend_ascend.lowbit import AscendLinear, multiply, quantize

RECIPES = ("fp8", "fp8:scaling.inputs=row,scaling.weights=row", "fp8-delayed", "fp8-block:scaling.inputs=128x128", "mxfp8", "hif8")


def meaning_of(text: str) -> LowBit:
    return low_bit(parse_recipe(text))


def only_on_950(arch: str) -> None:
    if arch != "ascend-950":
        pytest.skip("only the 950 multiplies 8-bit floats; the others refuse")


@pytest.mark.parametrize("recipe", ["fp8", "mxfp8", "hif8"])
def test_other_devices_refuse_with_a_source(recipe: str, target: mpbackend.Target, arch: str) -> None:
    if arch == "ascend-950":
        assert target.plan(recipe).runnable
        return
    with pytest.raises(PlanError, match=r"is absent .*@") as refused:
        target.plan(recipe)
    assert "quant_batch_matmul" in str(refused.value) or "Mmad" in str(refused.value)


@pytest.mark.parametrize("recipe", RECIPES)
def test_scales_and_elements_are_the_references(recipe: str, target: mpbackend.Target, arch: str) -> None:
    only_on_950(arch)
    meaning = meaning_of(recipe)
    generator = torch.Generator().manual_seed(1)
    tensor = torch.randn(48, 160, generator=generator) * torch.logspace(-6, 6, 160)
    tensor[3] = 0.0
    for operand in (meaning.forward.a, meaning.forward.b, meaning.dgrad.a):
        mine, theirs = quantize(tensor.to(target.device), operand, meaning), reference_quantize(tensor, operand, meaning)
        assert torch.equal(mine.scale.cpu(), theirs.scale)
        assert torch.equal(mine.inverse.cpu(), theirs.inverse)
        assert torch.equal(mine.amax.cpu(), theirs.amax)
        assert torch.equal(mine.stored.cpu().view(torch.uint8), theirs.stored.view(torch.uint8))


@pytest.mark.parametrize("recipe", RECIPES)
def test_layer_computes_what_the_reference_layer_does(recipe: str, target: mpbackend.Target, arch: str) -> None:
    only_on_950(arch)
    meaning = meaning_of(recipe)
    torch.manual_seed(2)
    plain = nn.Linear(160, 96)
    reference = LowBitLinear.from_linear(plain, meaning)
    device_plain = nn.Linear(160, 96).to(target.device)
    device_plain.load_state_dict(plain.state_dict())
    layer = AscendLinear.from_linear(device_plain, meaning)
    for step in range(3):
        x = torch.randn(5, 12, 160, generator=torch.Generator().manual_seed(step)) * 2.0**step
        pair = [x.clone().requires_grad_(), x.to(target.device).requires_grad_()]
        outs = [reference(pair[0]), layer(pair[1])]
        for out in outs:
            (out * out).sum().backward()
        assert torch.allclose(outs[1].cpu(), outs[0], rtol=1e-5, atol=1e-5)
        for mine, theirs in ((pair[1], pair[0]), (layer.weight, reference.weight), (layer.bias, reference.bias)):
            assert mine.grad is not None
            assert theirs.grad is not None
            scale = theirs.grad.abs().max().item()
            # one rounding of an operand may fall the other way where the outputs differ in their last bit
            assert torch.allclose(mine.grad.cpu(), theirs.grad, rtol=1e-2, atol=1e-2 * scale)
        if layer.amaxes is not None:
            assert reference.amaxes is not None
            assert torch.allclose(layer.amaxes.present.cpu(), reference.amaxes.present, rtol=1e-5)
            assert int(layer.amaxes.steps) == step + 1


@pytest.mark.parametrize("recipe", RECIPES)
def test_session_trains_and_lists_every_layer(recipe: str, target: mpbackend.Target, arch: str) -> None:
    only_on_950(arch)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128), nn.Linear(128, 10)).to(target.device)
    x, wanted = torch.randn(128, 128).to(target.device), torch.randn(128, 10).to(target.device)
    with target.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), recipe, clip_norm=1.0) as session:
        losses = []
        for _ in range(5):
            with session.autocast():
                loss = nn.functional.mse_loss(model(x), wanted)
            session.backward(loss)
            session.step()
            losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert [row["action"] for row in session.conversion] == ["converted", "converted", "skipped"]
    assert "out_features 10" in session.conversion[2]["reason"]


def test_pairs_that_the_operator_lacks_are_refused_before_training(target: mpbackend.Target, arch: str) -> None:
    only_on_950(arch)
    model = nn.Sequential(nn.Linear(128, 128)).to(target.device)
    with pytest.raises(PlanError, match=r"1x128 with scales per 1x128.*scaling\.inputs=128x128"):
        target.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp8-block")
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_wheels_own_shape_rules_take_the_calls(recipe: str, arch: str) -> None:
    only_on_950(arch)
    meaning = meaning_of(recipe)
    torch_npu: Any = __import__("torch_npu")
    with FakeTensorMode():
        for product in (meaning.forward, meaning.dgrad, meaning.wgrad):
            sides = []
            for operand, rows in ((product.a, 48), (product.b, 96)):
                values = torch.empty(rows, 160, device="npu")
                elements = torch_npu.npu_dtype_cast(
                    values, getattr(torch_npu, {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "hif8": "hifloat8"}[operand.format])
                )
                groups = {"tensor": (1, 1), "row": (rows, 1), "128x128": (1, 2), "1x32": (rows, 5)}[operand.granularity]
                sides.append(Stored(stored=elements, inverse=torch.empty(groups, device="npu"), format=operand.format, granularity=operand.granularity))
            out = multiply(sides[0], sides[1], torch.bfloat16)
            assert (out.shape, out.dtype) == ((48, 96), torch.bfloat16)
