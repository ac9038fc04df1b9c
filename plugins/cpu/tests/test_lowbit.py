"""Low-bit layers on a CPU: which lowering makes them, that both give the same numbers, and that a model trains with them."""

from __future__ import annotations

import importlib
import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import mpbackend
from examples import gpt
from mpbackend.conformance.lowering import Reference, Step
from mpbackend.conformance.products import check_products
from mpbackend.conformance.scales import CHECKS, check_scale_stream
from mpbackend.errors import BackendError
from mpbackend.lowbit import LowBit, Operand, low_bit
from mpbackend.observe.record import load_record
from mpbackend.recipe import parse_recipe
from mpbackend.train.conversion import Make
from mpbackend.train.reference import LowBitLinear
from mpbackend_cpu import lowbit
from mpbackend_cpu.discovery import torchao_state
from mpbackend_cpu.lowbit import choose, torchao_maker, torchao_misfit

ROW = "fp8:scaling.inputs=row,scaling.weights=row"
TORCHAO_RECIPES = ("fp8", ROW, "fp8:scaling.format=e8m0", "fp8:compute=fp8_e4m3", f"{ROW},scaling.format=e8m0,compute=fp8_e4m3")
needs_torchao = pytest.mark.skipif(bool(torchao_state()[1]), reason=torchao_state()[1])


def rules(text: str) -> LowBit:
    return low_bit(parse_recipe(text))


def made_by_torchao(text: str, linear: nn.Linear) -> nn.Module:
    made = torchao_maker(rules(text))("x", linear)
    assert isinstance(made, nn.Module)
    return made


@pytest.fixture
def without_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torchao look as if it were not installed."""
    monkeypatch.setattr(lowbit, "torchao_state", lambda: ("", "torchao is not installed"))


@pytest.fixture(scope="module")
def target() -> mpbackend.Target:
    return mpbackend.select("cpu")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("fp8-delayed", "no delayed scaling"),
        ("fp8-block", "no scales per 128x128, 1x128"),
        ("mxfp8", "no scales per 1x32"),
        ("nvfp4", "no inputs in fp4_e2m1"),
        ("hif8", "no inputs in hif8"),
        ("fp8:scaling.inputs=row", "no scales per row, tensor"),
        ("fp8:scaling.margin=2", "no margin of 2^2"),
        ("fp8:compute.dgrad=bf16,compute.wgrad=bf16", "no gradients in bf16"),
        ("fp8:compute.dgrad=fp8_e4m3", "one format for both products of the gradient"),
    ],
)
def test_what_torchao_does_not_do_is_lowered_by_plain_torch(text: str, reason: str) -> None:
    found = torchao_misfit(rules(text))
    assert found.startswith("torchao has ")
    assert reason in found


@pytest.mark.parametrize("text", TORCHAO_RECIPES)
def test_what_torchao_does(text: str) -> None:
    assert torchao_misfit(rules(text)) == ""


def test_without_torchao_plain_torch_makes_the_layers(without_torchao: None) -> None:
    make, by = choose(rules("fp8"))
    assert by == "plain torch: torchao is not installed"
    assert type(make("x", nn.Linear(16, 16))) is LowBitLinear


@pytest.mark.parametrize("error", [ImportError("undefined symbol"), OSError("no such file"), RuntimeError("built for another torch")])
def test_a_broken_torchao_is_named_and_replaced(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise error

    monkeypatch.setattr(lowbit, "torchao_state", lambda: ("0.18.0", ""))
    monkeypatch.setattr(importlib, "import_module", broken)
    make, by = choose(rules("fp8"))
    assert by == f"plain torch: torchao: {type(error).__name__}: {error}"
    assert type(make("x", nn.Linear(16, 16))) is LowBitLinear


@needs_torchao
def test_a_torchao_without_an_option_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    real = lowbit.load_torchao()

    class Older:
        """torchao before power-of-two scales."""

        config, CastConfig, Float8GemmConfig, Float8LinearConfig = real.config, real.CastConfig, real.Float8GemmConfig, real.Float8GemmConfig

    monkeypatch.setattr(lowbit, "load_torchao", lambda: Older)
    _, by = choose(rules("fp8"))
    assert by.startswith("plain torch: torchao: Float8LinearConfig lacks cast_config_grad_output")


@needs_torchao
@pytest.mark.parametrize("text", TORCHAO_RECIPES)
def test_torchao_and_plain_torch_give_the_same_bits(text: str) -> None:
    plain = nn.Linear(64, 48, bias=False)
    results = []
    for module in (made_by_torchao(text, plain), LowBitLinear.from_linear(plain, rules(text))):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(3, 7, 64, generator=generator).requires_grad_()
        gradient = torch.randn(3, 7, 48, generator=generator) * 1e-3
        plain.weight.grad = None
        with torch.autocast("cpu", torch.bfloat16):
            out = module(x)
        out.backward(gradient.to(out.dtype))
        assert out.dtype is torch.bfloat16
        results.append((out.detach(), x.grad, plain.weight.grad))
    for mine, theirs in zip(*results, strict=True):
        assert mine is not None
        assert theirs is not None
        assert torch.equal(mine, theirs)


@needs_torchao
@pytest.mark.parametrize("text", TORCHAO_RECIPES)
def test_torchao_multiplies_what_the_recipe_says(text: str) -> None:
    assert check_products("torchao", torchao_maker(rules(text)), text).outcome == "passed"


class TorchaoScales(Reference):
    """torchao's conversion of a tensor, as the conformance checks see it."""

    name = "torchao"

    def refuses(self, low_bit: LowBit) -> str:
        return torchao_misfit(low_bit)

    def scales(self, low_bit: LowBit, operand: Operand, steps: Sequence[Step]) -> Sequence[Tensor]:
        return [self.convert(low_bit, operand, step.tensor)._scale.reshape(-1) for step in steps]

    def values(self, low_bit: LowBit, operand: Operand, tensor: Tensor) -> Tensor:
        found: Tensor = self.convert(low_bit, operand, tensor).to_original_precision()
        return found

    def convert(self, low_bit: LowBit, operand: Operand, tensor: Tensor) -> Any:
        config = lowbit.torchao_config(low_bit, lowbit.load_torchao())
        scaling = importlib.import_module("torchao.float8.float8_scaling_utils")
        linear = importlib.import_module("torchao.float8.float8_training_tensor").LinearMMConfig()
        dtype = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}[operand.format]
        granularity = config.cast_config_input.scaling_granularity
        axis = scaling.get_maybe_axiswise_dim(-1, granularity)
        options = {"scaling_granularity": granularity, "axiswise_dim": axis, "round_scales_to_power_of_2": config.round_scales_to_power_of_2}
        return scaling.hp_tensor_to_float8_dynamic(tensor, dtype, linear, **options)


@needs_torchao
def test_torchao_conforms_but_for_extreme_amaxes_and_one_rounding() -> None:
    expected = {
        "power_of_two": "it takes log2 in fp32, which rounds a scale one unit below a power of two up to it",
        "zero_amax": "it takes 1e-12 for an amax below it, so the scale of zeros is 4.48e14; zeros stay zeros",
        "tiny_amax": "it takes 1e-12 for an amax below it",
        "inf_amax": "it divides by an amax of inf: the scale is 0 and everything becomes NaN, which shows",
    }
    results = {result.check: result for result in check_scale_stream(TorchaoScales(), expected)}
    assert {name: result.detail for name, result in results.items() if result.outcome == "failed"} == {}
    assert {name for name, result in results.items() if result.outcome == "expected"} == set(expected)
    assert {name for name, result in results.items() if result.outcome == "skipped"} == {
        "current_block", "current_mx", "current_two_level", "current_hif8", "delayed_first", "delayed_expiry", "delayed_max", "most_recent", "evaluation",
        "saturation", "margin",
    }  # fmt: skip
    assert set(results) == set(CHECKS)


@needs_torchao
def test_torchao_layers_keep_parameters_mode_and_state() -> None:
    plain = nn.Linear(32, 16).eval()
    made = made_by_torchao("fp8", plain)
    assert made.get_parameter("weight") is plain.weight
    assert made.get_parameter("bias") is plain.bias
    assert not made.training
    made.load_state_dict(plain.state_dict())
    assert list(made.state_dict()) == list(plain.state_dict())


class Headed(gpt.GPT):
    """The demo's model with a head of its own, for a vocabulary that is no multiple of 16."""

    def __init__(self, config: gpt.Config, vocabulary: int) -> None:
        super().__init__(config)
        self.head = nn.Linear(config.width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (batch, time) to logits (batch, time, vocabulary)."""
        positions = torch.arange(tokens.shape[1])
        logits: Tensor = self.head(self.norm(self.blocks(self.token(tokens) + self.position(positions))))
        return logits


SMALL = gpt.Config(layers=2, heads=2, width=32, context=32, batch=8)


def train(target: mpbackend.Target, recipe: str, steps: int, record: Path | None = None) -> tuple[list[float], Sequence[Any]]:
    """Train the small model; return its losses and the conversion report."""
    torch.manual_seed(1)
    model = Headed(SMALL, 95)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    with target.prepare(model, optimizer, recipe, on_unsupported="emulate", clip_norm=1.0, record=record) as session:
        for inputs, wanted in gpt.batches(gpt.corpus(), SMALL, steps, seed=1):
            with session.autocast():
                loss = functional.cross_entropy(model(inputs).flatten(0, 1), wanted.clamp(max=94).flatten())
            session.backward(loss)
            session.step()
            losses.append(loss.item())
    return losses, session.conversion


@pytest.fixture(scope="module")
def bf16(target: mpbackend.Target) -> list[float]:
    return train(target, "bf16", 40)[0]


@pytest.mark.parametrize("recipe", ["fp8", "fp8-delayed:scaling.history=8", ROW])
@pytest.mark.parametrize("by", ["plain torch", pytest.param("torchao", marks=needs_torchao)])
def test_a_gpt_trains_with_its_misaligned_head_left_out(
    target: mpbackend.Target, bf16: list[float], recipe: str, by: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if by == "plain torch":
        request.getfixturevalue("without_torchao")
    losses, conversion = train(target, recipe, 40, tmp_path / "run")
    # Rounding to 3 and 2 bits adds noise to every product; half of what bf16 has learned is far from both noise (1 % here) and from learning nothing.
    assert bf16[0] - losses[-1] > 0.5 * (bf16[0] - bf16[-1]) > 0.3
    assert losses != bf16
    rows = {row["layer"]: row for row in conversion}
    assert len(rows) == 4 * SMALL.layers + 1
    assert rows["head"]["action"] == "skipped"
    assert rows["head"]["reason"].startswith("out_features 95: not a multiple of 16")
    layers = [row for name, row in rows.items() if name != "head"]
    assert {row["action"] for row in layers} == {"converted"}
    expected = "plain torch" if recipe.startswith("fp8-delayed") else by
    assert all(row["reason"].startswith(expected) for row in layers)
    assert math.isclose(sum(float(row["flop_share"]) for row in rows.values()), 1, abs_tol=1e-5)
    recorded = load_record(tmp_path / "run").record
    assert recorded.conversion == tuple(dict(row) for row in conversion)
    low = sum(share for formats, share in recorded.compute.shares.items() if "fp8" in formats)
    assert 0.5 < low < 1
    assert {name for name in recorded.compute.shares if "fp8" in name} == {"fp8_e4m3", "fp8_e5m2 × fp8_e4m3"}  # noqa: RUF001 - the record's own sign


def test_losses_repeat(target: mpbackend.Target, without_torchao: None) -> None:
    assert train(target, "fp8", 3)[0] == train(target, "fp8", 3)[0]


def test_delayed_scaling_is_saved_and_restored(target: mpbackend.Target, tmp_path: Path) -> None:
    def session_of(seed: int) -> Any:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))
        return target.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp8-delayed:scaling.history=4", on_unsupported="emulate")

    def steps(session: Any, seeds: Sequence[int]) -> Iterator[float]:
        for seed in seeds:
            x = torch.randn(8, 32, generator=torch.Generator().manual_seed(seed))
            with session.autocast():
                loss = session.model(x).float().square().mean()
            session.backward(loss)
            session.step()
            yield loss.item()

    with session_of(0) as first:
        list(steps(first, range(3)))
        first.save(tmp_path / "checkpoint")
        wanted = list(steps(first, range(3, 6)))
    with session_of(9) as second:
        second.load(tmp_path / "checkpoint")
        assert list(steps(second, range(3, 6))) == wanted


def test_a_model_that_an_earlier_session_made_low_bit_does_not_pass_for_bf16(target: mpbackend.Target) -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    target.prepare(model, optimizer, "fp8", on_unsupported="emulate").close()
    target.prepare(model, optimizer, "fp8-delayed", on_unsupported="emulate").close()
    assert isinstance(model[0], LowBitLinear)
    assert model[0].low_bit.mode == "delayed"
    with pytest.raises(BackendError, match="made for an earlier low-bit recipe"):
        target.prepare(model, optimizer, "bf16", on_unsupported="emulate")


def test_what_is_not_converted_runs_in_bf16(target: mpbackend.Target) -> None:
    model = nn.ModuleDict({"fits": nn.Linear(32, 32), "left": nn.Linear(32, 10)})
    with target.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp8", on_unsupported="emulate") as session, session.autocast():
        x = model["fits"](torch.randn(4, 32))
        assert x.dtype is torch.bfloat16
        assert model["left"](x).dtype is torch.bfloat16


def test_a_plan_says_that_fp8_is_emulated_and_is_refused_without_leave(target: mpbackend.Target) -> None:
    plan = target.plan("fp8", on_unsupported="emulate")
    assert plan.runnable
    assert plan.decision("compute.forward", "matmul").level == "emulated"
    with pytest.raises(mpbackend.errors.PlanError, match="fp8 is refused"):
        target.plan("fp8")


def test_the_rows_of_the_report_name_the_maker(target: mpbackend.Target) -> None:
    makes: Make
    makes, by = choose(rules("fp8"))
    model = nn.Sequential(nn.Linear(32, 32))
    session = target.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp8", on_unsupported="emulate")
    session.close()
    assert session.conversion[0]["reason"] == by
    assert type(model[0]) is type(makes("x", nn.Linear(16, 16)))


def test_a_recipe_names_the_layers_that_stay() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(body=nn.Linear(32, 32), gate=nn.Linear(32, 32), head=nn.Linear(32, 32)))
    target = mpbackend.select("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with target.prepare(model, optimizer, "fp8:scaling.keep=head|ga*", on_unsupported="emulate") as session:
        actions = {row["layer"]: row["action"] for row in session.conversion}
    assert actions == {"body": "converted", "gate": "skipped", "head": "skipped"}
    assert session.plan.recipe == "fp8:scaling.keep=head|ga*"
