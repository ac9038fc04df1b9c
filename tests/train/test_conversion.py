"""Replacing linear layers: every layer is decided about by itself, and an error leaves the model as it was."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from mpbackend.errors import BackendError, UnknownNameError
from mpbackend.lowbit import LowBit, low_bit
from mpbackend.recipe import parse_recipe
from mpbackend.train.conversion import check_plain, check_tokens, convert_linears, converted_share, pad_rows
from mpbackend.train.reference import LowBitLinear

FP8 = low_bit(parse_recipe("fp8"))
BLOCK = low_bit(parse_recipe("fp8-block"))


def make(name: str, linear: nn.Linear) -> nn.Module:
    return LowBitLinear.from_linear(linear, FP8)


def by_layer(rows: list[dict[str, str]]) -> dict[str, tuple[str, str]]:
    return {row["layer"]: (row["action"], row["reason"]) for row in rows}


class Tree(nn.Module):
    """A misfit before, between and under layers that fit."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 10)
        self.body = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 24), nn.Linear(24, 64), nn.Sequential(nn.Linear(64, 128)))
        self.table = nn.ModuleDict({"a": nn.Linear(128, 64), "b": nn.ModuleList([nn.Linear(64, 32)])})
        self.head = nn.Linear(64, 95, bias=False)


def names_and_types(model: nn.Module) -> list[tuple[str, type]]:
    return [(name, type(module)) for name, module in model.named_modules()]


def test_a_misfit_does_not_stop_its_siblings() -> None:
    model = Tree()
    order = [name for name, _ in model.named_modules()]
    rows = convert_linears(model, make, FP8)
    assert [name for name, _ in model.named_modules()] == order
    found = by_layer(rows)
    assert [name for name, (action, _) in found.items() if action == "converted"] == ["body.0", "body.4.0", "table.a", "table.b.0"]
    assert found["first"] == ("skipped", "out_features 10: not a multiple of 16, which a product of the forward or backward pass needs")
    assert "out_features 24" in found["body.2"][1]
    assert "in_features 24" in found["body.3"][1]
    assert found["head"][0] == "skipped"
    assert found["body.0"][1] == "LowBitLinear"
    assert {name for name, module in model.named_modules() if isinstance(module, LowBitLinear)} == {"body.0", "body.4.0", "table.a", "table.b.0"}


def test_shares_are_those_of_the_multiplications_and_sum_to_one() -> None:
    rows = convert_linears(Tree(), make, FP8)
    work = {"first": 640, "body.0": 4096, "body.2": 1536, "body.3": 1536, "body.4.0": 8192, "table.a": 8192, "table.b.0": 2048, "head": 6080}
    total = sum(work.values())
    assert {row["layer"]: row["flop_share"] for row in rows} == {name: f"{amount / total:.6f}" for name, amount in work.items()}
    assert sum(float(row["flop_share"]) for row in rows) == pytest.approx(1, abs=len(rows) * 5e-7)
    assert converted_share(rows) == pytest.approx((4096 + 8192 + 8192 + 2048) / total, abs=4e-6)


@pytest.mark.parametrize(("rules", "fits"), [(FP8, {"a", "b", "c"}), (low_bit(parse_recipe("mxfp8")), {"b", "c"}), (BLOCK, {"c"})])
def test_alignment_is_that_of_all_three_products(rules: LowBit, fits: set[str]) -> None:
    model = nn.ModuleDict({"a": nn.Linear(48, 16), "b": nn.Linear(96, 32), "c": nn.Linear(256, 128), "d": nn.Linear(24, 128), "e": nn.Linear(128, 24)})
    rows = convert_linears(model, make, rules)
    assert {row["layer"] for row in rows if row["action"] == "converted"} == fits


def test_a_vendor_may_ask_for_another_multiple_or_pad() -> None:
    model = nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(24, 64)})
    rows = by_layer(convert_linears(model, make, FP8, multiple=8, by="a library"))
    assert rows == {"a": ("converted", "a library"), "b": ("converted", "a library")}
    padded = by_layer(convert_linears(nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(24, 64)}), make, FP8, by="a library", pads=True))
    assert padded == {"a": ("converted", "a library"), "b": ("padded", "a library; in_features 24: padded with zeros to a multiple of 16")}


def test_kept_layers_by_pattern_of_the_recipe_and_of_the_call() -> None:
    model = Tree()
    rows = by_layer(convert_linears(model, make, low_bit(parse_recipe("fp8"), keep=("body.*",)), keep=["table.a"]))
    assert rows["body.0"] == ("skipped", "kept: its name matches 'body.*'")
    assert rows["table.a"] == ("skipped", "kept: its name matches 'table.a'")
    assert rows["table.b.0"][0] == "converted"


def test_a_pattern_that_names_nothing_is_an_error() -> None:
    model = Tree()
    with pytest.raises(UnknownNameError, match=r"unknown linear layer 'haed'.*nearest: head"):
        convert_linears(model, make, FP8, keep=["haed"])
    assert not any(isinstance(module, LowBitLinear) for module in model.modules())


def test_a_shared_layer_is_converted_once() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(32, 32)
            self.two = self.one
            self.other = nn.Linear(32, 32)

    made: list[str] = []

    def count(name: str, linear: nn.Linear) -> nn.Module:
        made.append(name)
        return make(name, linear)

    model = Shared()
    rows = convert_linears(model, count, FP8)
    assert made == ["one", "other"]
    assert model.one is model.two
    assert type(model.one) is LowBitLinear
    assert by_layer(rows)["one"] == ("converted", "LowBitLinear; also two")
    assert [row["flop_share"] for row in rows] == ["0.666667", "0.333333"]


def test_tied_weights_stay_tied_and_an_optimizer_keeps_what_it_holds() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(96, 32)
            self.up = nn.Linear(32, 32)
            self.head = nn.Linear(32, 96, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: Tensor) -> Tensor:
            out: Tensor = self.head(self.up(self.embedding(tokens)))
            return out

    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [parameter.clone() for parameter in model.parameters()]
    convert_linears(model, make, FP8)
    assert model.head.weight is model.embedding.weight
    model(torch.arange(8)).square().sum().backward()
    optimizer.step()
    assert all(not torch.equal(parameter, old) for parameter, old in zip(model.parameters(), before, strict=True))


def weight_norm(linear: nn.Linear) -> nn.Module:
    module: nn.Module = parametrizations.weight_norm(linear)
    return module


def hooked(linear: nn.Linear) -> nn.Module:
    linear.register_forward_pre_hook(lambda module, inputs: None)
    return linear


class Wrapped(nn.Parameter):
    """Stands for the parameter of a wrapper (sharded, quantized)."""


def wrapped(linear: nn.Linear) -> nn.Module:
    linear.weight = Wrapped(linear.weight.detach())
    return linear


class Own(nn.Linear):
    """A subclass whose forward may be anything."""


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        (lambda: weight_norm(nn.Linear(32, 32)), "its class is ParametrizedLinear, not torch.nn.Linear itself"),
        (lambda: Own(32, 32), "its class is Own, not"),
        (lambda: nn.MultiheadAttention(32, 2).out_proj, "its class is NonDynamicallyQuantizableLinear, not"),
        (lambda: hooked(nn.Linear(32, 32)), "hooks that a replacement would lose (forward_pre_hooks)"),
        (lambda: wrapped(nn.Linear(32, 32)), "the class of its weight is Wrapped: convert before the model is wrapped"),
    ],
)
def test_layers_that_are_more_than_a_product_are_left_alone(odd: Callable[[], nn.Module], reason: str) -> None:
    module = odd()
    model = nn.ModuleDict({"odd": module, "plain": nn.Linear(32, 32)})
    rows = convert_linears(model, make, FP8)
    assert model["odd"] is module
    (row,) = [row for row in rows if row["layer"].startswith("odd")]
    assert row["action"] == "skipped"
    assert reason in row["reason"]
    assert type(model["plain"]) is LowBitLinear


def test_a_factory_may_refuse_a_layer() -> None:
    def refuse(name: str, linear: nn.Linear) -> nn.Module | str:
        return "no kernel for it" if name == "a" else make(name, linear)

    model = nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(32, 32)})
    assert by_layer(convert_linears(model, refuse, FP8)) == {"a": ("skipped", "no kernel for it"), "b": ("converted", "LowBitLinear")}


class FactoryError(Exception):
    """Raised by a factory."""


def fails_on(wanted: str, fault: Callable[[nn.Linear], nn.Module]) -> Any:
    return lambda name, linear: fault(linear) if name == wanted else make(name, linear)


def raise_error(linear: nn.Linear) -> nn.Module:
    raise FactoryError("no kernel")


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        (raise_error, FactoryError, "^no kernel$"),
        (lambda linear: LowBitLinear(64, 32, low_bit=FP8), BackendError, "the LowBitLinear made for it does not hold its weight"),
    ],
)
def test_an_error_leaves_the_model_as_it_was(fault: Callable[[nn.Linear], nn.Module], error: type[Exception], message: str) -> None:
    model = Tree()
    before = names_and_types(model)
    modules = list(model.modules())
    with pytest.raises(error, match=message):
        convert_linears(model, fails_on("table.b.0", fault), FP8)
    assert names_and_types(model) == before
    assert all(now is then for now, then in zip(model.modules(), modules, strict=True))


def test_a_parent_that_refuses_a_replacement_leaves_the_model_as_it_was() -> None:
    class Stubborn(nn.Module):
        def __setattr__(self, name: str, value: Any) -> None:
            if isinstance(value, LowBitLinear):
                raise FactoryError
            super().__setattr__(name, value)

    model = nn.Sequential(nn.Linear(32, 32), Stubborn())
    model[1].inner = nn.Linear(32, 32)
    before = names_and_types(model)
    with pytest.raises(FactoryError):
        convert_linears(model, make, FP8)
    assert names_and_types(model) == before


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Linear(32, 32), "it is the model itself and cannot be replaced in place"),
        (nn.Sequential(nn.Linear(10, 10)), "0: in_features 10 and out_features 10: not a multiple of 16"),
        (nn.ReLU(), "the model has no torch.nn.Linear"),
    ],
)
def test_a_low_bit_run_without_a_low_bit_layer_is_an_error(model: nn.Module, reason: str) -> None:
    with pytest.raises(BackendError, match=f"no layer can be converted.*{reason}"):
        convert_linears(model, make, FP8)


def test_a_model_can_be_converted_again_for_another_recipe() -> None:
    model = nn.Sequential(nn.Linear(128, 128))
    weight = model[0].weight
    convert_linears(model, make, FP8)
    convert_linears(model, lambda name, linear: LowBitLinear.from_linear(linear, BLOCK), BLOCK)
    assert isinstance(model[0], LowBitLinear)
    assert model[0].low_bit == BLOCK
    assert model[0].weight is weight


def test_a_plan_that_is_not_low_bit_refuses_low_bit_layers() -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    check_plain(model)
    convert_linears(model, make, FP8)
    with pytest.raises(BackendError, match="0 is a LowBitLinear, made for an earlier low-bit recipe"):
        check_plain(model)


@pytest.mark.parametrize(("rows", "multiple", "wanted"), [(5, 4, 8), (8, 4, 8), (0, 16, 0), (1, 1, 1)])
def test_padding_of_rows(rows: int, multiple: int, wanted: int) -> None:
    tensor = torch.ones(rows, 3)
    padded = pad_rows(tensor, multiple)
    assert padded.shape == (wanted, 3)
    assert torch.equal(padded[:rows], tensor)
    assert not padded[rows:].any()


def test_tokens_are_checked_at_run_time() -> None:
    check_tokens(torch.Size([2, 8, 64]), 16, "head")
    check_tokens(torch.Size([0, 64]), 16, "head")
    with pytest.raises(BackendError, match=r"low-bit product of head: 15 tokens \(3, 5, 64\), not a multiple of 16"):
        check_tokens(torch.Size([3, 5, 64]), 16, "head")


def test_rows_are_what_a_record_takes() -> None:
    rows: list[Mapping[str, str]] = list(convert_linears(Tree(), make, FP8))
    assert all(set(row) == {"layer", "action", "reason", "flop_share"} and all(isinstance(value, str) for value in row.values()) for row in rows)
