from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import conv1d, conv2d, conv_transpose2d, linear, scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from mpbackend.observe.audit import Audit, Observer, SavedActivations, effective_text
from mpbackend.observe.classes import observed_classes
from mpbackend.observe.flops import HIDES_PRODUCTS, PRODUCTS, SAME_FLOPS, Operation, product_flops

aten = torch.ops.aten
BF16 = torch.bfloat16


def audit(work: Callable[[], object]) -> Audit:
    observer = Observer()
    with observer:
        work()
    return observer.summary()


def by_phase(summary: Audit) -> dict[str, int]:
    flops: dict[str, int] = {}
    for op in summary.ops:
        flops[op.phase] = flops.get(op.phase, 0) + op.flops
    return flops


class UpcastProducts(TorchDispatchMode):
    """Emulates narrow products: fp32 inside, rounded once."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func in (aten.mm.default, aten.addmm.default) and args[-1].dtype in (torch.float16, BF16):
            return func(*(tensor.float() for tensor in args)).to(args[-1].dtype)
        return func(*args, **(kwargs or {}))


def new_upcast_mode() -> TorchDispatchMode:
    return UpcastProducts()  # type: ignore[no-untyped-call] # torch leaves it unannotated


# FLOPs


@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_takes_2mnk_forward_and_4mnk_backward(bias: bool) -> None:
    m, n, k = 6, 10, 14
    layer = nn.Linear(k, n, bias=bias)
    x = torch.randn(m, k, requires_grad=True)
    summary = audit(lambda: layer(x).sum().backward())
    assert by_phase(summary) == {"forward": 2 * m * n * k, "backward": 4 * m * n * k}
    assert summary.flops == 6 * m * n * k


def test_no_gradient_of_an_input_that_needs_none() -> None:
    layer = nn.Linear(14, 10)
    summary = audit(lambda: layer(torch.randn(6, 14)).sum().backward())
    assert by_phase(summary) == {"forward": 2 * 6 * 10 * 14, "backward": 2 * 6 * 10 * 14}


a, b, batch_a, batch_b, vector = torch.randn(3, 4), torch.randn(4, 5), torch.randn(2, 3, 4), torch.randn(2, 4, 5), torch.randn(4)


@pytest.mark.parametrize(
    ("work", "flops"),
    [
        (lambda: torch.mm(a, b), 2 * 3 * 4 * 5),
        (lambda: torch.mm(a, b, out=torch.empty(3, 5)), 2 * 3 * 4 * 5),
        (lambda: torch.addmm(torch.zeros(5), a, b), 2 * 3 * 4 * 5),
        (lambda: torch.bmm(batch_a, batch_b), 2 * 2 * 3 * 4 * 5),
        (lambda: torch.baddbmm(torch.zeros(2, 3, 5), batch_a, batch_b), 2 * 2 * 3 * 4 * 5),
        (lambda: torch.addbmm(torch.zeros(3, 5), batch_a, batch_b), 2 * 2 * 3 * 4 * 5),
        (lambda: torch.mv(a, vector), 2 * 3 * 4),
        (lambda: torch.addmv(torch.zeros(3), a, vector), 2 * 3 * 4),
        (lambda: torch.dot(vector, vector), 2 * 4),
        (lambda: torch.einsum("bij,bjk->bik", batch_a, batch_b), 2 * 2 * 3 * 4 * 5),
        (lambda: linear(batch_a, b.t()), 2 * 2 * 3 * 4 * 5),
        (lambda: torch.mm(torch.zeros(0, 4), b), 0),
    ],
)
def test_flops_of_matrix_products(work: Callable[[], object], flops: int) -> None:
    summary = audit(work)
    assert (summary.flops, summary.uncounted) == (flops, ())


@pytest.mark.parametrize(
    ("shape_a", "shape_b", "flops"),
    [
        ((9, 4), (2, 4, 5), 2 * 9 * 4 * 5),  # 9 rows in groups
        ((2, 3, 4), (4, 7), 2 * 3 * 4 * 7),  # 7 columns in 2 groups
        ((3, 8), (8, 5), 2 * 3 * 8 * 5),
        ((2, 3, 4), (2, 4, 5), 2 * 2 * 3 * 4 * 5),
    ],
)
def test_flops_of_grouped_products(shape_a: tuple[int, ...], shape_b: tuple[int, ...], flops: int) -> None:
    assert product_flops(torch.empty(shape_a), torch.empty(shape_b)) == flops


def test_an_element_of_a_packed_dtype_counts_as_two() -> None:
    packed = torch.empty(3, 8, dtype=torch.float4_e2m1fn_x2)
    assert product_flops(packed, packed.t()) == 2 * 3 * 16 * 3


CONVOLUTIONS: Mapping[str, tuple[tuple[int, ...], tuple[int, ...], Callable[..., torch.Tensor], int]] = {
    "plain": ((2, 4, 9, 9), (6, 4, 3, 3), lambda x, w: conv2d(x, w, padding=1, stride=2), 2 * 2 * 25 * 6 * 4 * 9),
    "grouped": ((2, 4, 9, 9), (6, 2, 3, 3), lambda x, w: conv2d(x, w, groups=2), 2 * 2 * 49 * 6 * 2 * 9),
    "depthwise": ((2, 4, 9, 9), (4, 1, 3, 3), lambda x, w: conv2d(x, w, groups=4), 2 * 2 * 49 * 4 * 9),
    "transposed": ((2, 4, 5, 5), (4, 6, 3, 3), lambda x, w: conv_transpose2d(x, w, stride=2), 2 * 2 * 25 * 4 * 6 * 9),
    "one-dimensional": ((2, 4, 9), (6, 4, 3), conv1d, 2 * 2 * 7 * 6 * 4 * 3),
}


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_flops_of_convolutions(kind: str) -> None:
    x_shape, w_shape, convolve, flops = CONVOLUTIONS[kind]
    x, weight = torch.randn(x_shape, requires_grad=True), torch.randn(w_shape, requires_grad=True)
    summary = audit(lambda: convolve(x, weight).sum().backward())
    assert by_phase(summary) == {"forward": flops, "backward": 2 * flops}
    assert by_phase(audit(lambda: convolve(x.detach(), weight).sum().backward()))["backward"] == flops
    if kind in ("plain", "transposed", "one-dimensional"):
        with FlopCounterMode(display=False) as counter:
            convolve(x, weight).sum().backward()
        assert counter.get_total_flops() == 3 * flops


def test_flops_of_attention() -> None:
    batch, heads, queries, keys, dim = 2, 3, 8, 16, 4
    q = torch.randn(batch, heads, queries, dim, requires_grad=True)
    k = torch.randn(batch, heads, keys, dim, requires_grad=True)
    once = 2 * batch * heads * queries * keys * dim
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        fused = audit(lambda: scaled_dot_product_attention(q, k, k).sum().backward())
    # Backward recomputes the scores: 5 products, against 2 forward.
    assert by_phase(fused) == {"forward": 2 * once, "backward": 5 * once}
    assert fused.uncounted == ()
    with sdpa_kernel(SDPBackend.MATH):
        plain = audit(lambda: scaled_dot_product_attention(q, k, k).sum().backward())
    assert by_phase(plain) == {"forward": 2 * once, "backward": 4 * once}


def test_flops_of_a_transformer_layer_equal_those_of_torch() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    x = torch.randn(2, 5, 16)
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as counter:
            layer(x).sum().backward()
        summary = audit(lambda: layer(x).sum().backward())
    assert summary.flops == counter.get_total_flops() > 0
    assert summary.effective == "fp32"


def test_every_name_of_the_tables_is_an_operation_of_torch() -> None:
    assert all(hasattr(aten, name) for name in (*PRODUCTS, *SAME_FLOPS))
    assert all(getattr(aten, name) in flop_registry for name in SAME_FLOPS.values())


# Formats


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))


class CastsBack(nn.Module):
    """The same model with its middle layer cast to fp32 by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[1](self.layers[0](x))
        with torch.autocast("cpu", enabled=False):
            x = self.layers[2](x.float())
        output: torch.Tensor = self.layers[4](self.layers[3](x))
        return output


def train_once(net: nn.Module, x: torch.Tensor) -> None:
    with torch.autocast("cpu", dtype=BF16):
        loss = net(x).float().pow(2).mean()
    loss.backward()


def test_a_planted_fp32_cast_changes_the_effective_format() -> None:
    x = torch.randn(4, 16, requires_grad=True)
    clean = audit(lambda: train_once(model(), x))
    planted = audit(lambda: train_once(CastsBack(), x))
    assert (clean.effective, clean.shares) == ("bf16", {"bf16": 1.0})
    middle, others = 32 * 32, 16 * 32 + 32 * 8
    assert planted.shares == {"fp32": middle / (middle + others), "bf16": others / (middle + others)}
    assert planted.effective == "fp32 57 % · bf16 43 %"
    assert planted.shares_by_phase.keys() == {"forward", "backward"}
    assert planted.flops == clean.flops


def test_an_fp32_model_is_fp32() -> None:
    x = torch.randn(4, 16)
    assert audit(lambda: model()(x).sum().backward()).effective == "fp32"


def test_nothing_multiplied_is_none() -> None:
    summary = audit(lambda: torch.relu(a) + a)
    assert (summary.effective, summary.shares, summary.flops, summary.shares_by_phase) == ("none", {}, 0, {})


def test_operands_of_two_formats_are_both_named() -> None:
    one = torch.tensor(1.0)
    left = torch.ones(16, 32).to(torch.float8_e5m2)
    right = torch.ones(16, 32).to(torch.float8_e4m3fn).t()
    summary = audit(lambda: torch._scaled_mm(left, right, scale_a=one, scale_b=one, out_dtype=BF16))
    assert summary.effective == "fp8_e5m2 \N{MULTIPLICATION SIGN} fp8_e4m3"
    assert summary.ops[0].outputs == ("bf16",)
    assert summary.flops == 2 * 16 * 16 * 32


def test_an_operation_is_recorded_with_its_formats_and_calls() -> None:
    x = a.to(BF16)
    [row] = audit(lambda: [x + a for _ in range(3)]).ops
    assert (row.phase, row.op, row.inputs, row.outputs, row.calls, row.flops, row.compute) == ("forward", "aten::add", ("bf16", "fp32"), ("fp32",), 3, 0, "")


def test_views_are_left_out() -> None:
    assert audit(lambda: a.t().reshape(-1).detach().view(2, 6)).ops[0].op == "aten::clone"
    assert audit(lambda: a.t().unsqueeze(0)).ops == ()


def test_a_list_of_tensors_gives_each_format_once() -> None:
    many = [torch.zeros(2) for _ in range(50)]
    [row] = audit(lambda: torch._foreach_add_(many, 1.0)).ops
    assert row.inputs == ("fp32",)


@pytest.mark.parametrize(
    ("shares", "text"),
    [
        ({}, ""),
        ({"bf16": 1.0}, "bf16"),
        ({"bf16": 0.98, "fp32": 0.02}, "bf16 98 % · fp32 2 %"),
        ({"bf16": 0.9999, "fp32": 0.0001}, "bf16 >99 % · fp32 <1 %"),
        ({"bf16": 0.995, "fp32": 0.005}, "bf16 >99 % · fp32 <1 %"),
        ({"bf16": 0.5, "fp32": 0.3, "fp16": 0.2}, "bf16 50 % · fp32 30 % · fp16 20 %"),
    ],
)
def test_effective_text(shares: dict[str, float], text: str) -> None:
    assert effective_text(shares) == text


# Casts


def test_casts_are_counted_with_the_bytes_written() -> None:
    target, targets = torch.zeros(5, dtype=BF16), [torch.zeros(2, dtype=BF16), torch.zeros(3)]

    def work() -> None:
        a.to(BF16)  # 12 elements
        a.to(BF16)
        a.double()
        a.to(torch.float32)  # no cast
        a.clone()
        target.copy_(torch.zeros(5))  # 5 elements
        target.copy_(target.clone())  # no cast
        torch._foreach_copy_(targets, [torch.zeros(2), torch.zeros(3)])  # one of two is a cast

    summary = audit(work)
    found = {(cast.source, cast.target): (cast.count, cast.bytes) for cast in summary.cast_table}
    assert found == {("fp32", "bf16"): (4, 2 * 24 + 10 + 4), ("fp32", "fp64"): (1, 96)}
    assert (summary.casts, summary.cast_bytes) == (5, 62 + 96)
    assert summary.cast_table[0].target == "fp64"


def test_autocast_casts_of_a_linear_layer() -> None:
    layer = nn.Linear(16, 8)
    x = torch.randn(4, 16)

    def work() -> None:
        with torch.autocast("cpu", dtype=BF16):
            layer(x)

    [cast] = audit(work).cast_table
    assert (cast.phase, cast.source, cast.target, cast.count, cast.bytes) == ("forward", "fp32", "bf16", 3, 2 * (4 * 16 + 16 * 8 + 8))


# Modes


def test_an_emulating_mode_below_is_seen_as_what_was_asked_of_it() -> None:
    x, weight = torch.randn(4, 16, dtype=torch.float16, requires_grad=True), torch.randn(16, 8, dtype=torch.float16, requires_grad=True)

    def work() -> None:
        torch.mm(x, weight).sum().backward()

    observer = Observer()
    with new_upcast_mode(), observer:
        work()
    summary = observer.summary()
    assert (summary.effective, summary.casts) == ("fp16", 0)
    assert summary.flops == 3 * 2 * 4 * 16 * 8
    assert sum(op.calls for op in summary.ops if op.op == "aten::mm") == 3

    below = Observer()
    with below, new_upcast_mode():
        work()
    assert below.summary().effective == "fp32"  # entered in the wrong order, it sees the emulation's own work
    assert below.summary().casts == 9


def test_under_fake_tensors() -> None:
    observer = Observer()
    with FakeTensorMode(), observer:
        x = torch.empty(4, 16, requires_grad=True)
        torch.mm(x, torch.empty(16, 8)).sum().backward()
    assert by_phase(observer.summary()) == {"forward": 1024, "backward": 1024}
    assert not any(op.op.startswith("prim::") for op in observer.summary().ops)


def test_inference_mode_is_looked_into() -> None:
    def work() -> None:
        with torch.inference_mode():
            linear(torch.zeros(2, 3), torch.zeros(4, 3)).to(BF16)

    summary = audit(work)
    assert (summary.flops, summary.casts) == (2 * 2 * 3 * 4, 1)


def test_entered_again_counts_add_up_and_phases_are_told_apart() -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    observer = Observer()
    for _ in range(2):
        with observer:
            loss = net(torch.randn(4, 16)).sum()
        with observer:
            loss.backward()
        with observer, observer.phase("optimizer"):
            optimizer.step()
    summary = observer.summary()
    assert {op.phase for op in summary.ops} == {"forward", "backward", "optimizer"}
    assert by_phase(summary)["forward"] == 2 * 2 * 4 * (16 * 32 + 32 * 32 + 32 * 8)
    assert {op.phase for op in summary.ops if op.op == "aten::addcdiv_"} == {"optimizer"}
    assert {op.phase for op in summary.ops if op.op == "aten::threshold_backward"} == {"backward"}


def test_products_of_an_optimizer_are_not_the_compute_format() -> None:
    net = nn.Linear(16, 8, bias=False)
    optimizer = torch.optim.Muon(net.parameters())
    observer = Observer()
    with observer:
        net(torch.randn(4, 16)).sum().backward()
        with observer.phase("optimizer"):
            optimizer.step()
    summary = observer.summary()
    assert summary.effective == "fp32"
    assert summary.shares_by_phase["optimizer"] == {"bf16": 1.0}
    assert summary.flops == 2 * 2 * 4 * 16 * 8


def test_a_phase_ends_with_its_exception() -> None:
    observer = Observer()
    with pytest.raises(RuntimeError, match="inside"), observer.phase("optimizer"):
        raise RuntimeError("inside")
    with observer:
        torch.mm(a, b)
    assert observer.summary().ops[0].phase == "forward"


def test_observing_changes_no_bit() -> None:
    def run(observed: bool) -> list[torch.Tensor]:
        torch.manual_seed(7)
        net = model()
        optimizer = torch.optim.AdamW(net.parameters())
        x = torch.randn(4, 16)
        if observed:
            with Observer(), SavedActivations(net.parameters()):
                train_once(net, x)
                optimizer.step()
        else:
            train_once(net, x)
            optimizer.step()
        return [parameter.detach() for parameter in net.parameters()]

    assert all(torch.equal(one, other) for one, other in zip(run(True), run(False), strict=True))


# What has no formula


def test_a_fused_recurrent_layer_is_listed_as_uncounted() -> None:
    layer = nn.LSTM(3, 4)
    summary = audit(lambda: layer(torch.zeros(5, 2, 3))[0].sum().backward())
    assert summary.uncounted == ("aten::mkldnn_rnn_layer", "aten::mkldnn_rnn_layer_backward")
    assert summary.effective == "unknown"


def test_a_formula_that_fails_does_not_stop_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> int:
        raise AssertionError("shapes that it does not foresee")

    monkeypatch.setitem(flop_registry, aten.relu, fails)
    summary = audit(lambda: torch.relu(a))
    assert (summary.uncounted, summary.flops) == (("aten::relu",), 0)


def test_a_formula_for_what_has_no_operands_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(flop_registry, aten.relu, lambda *_, **__: 42)
    summary = audit(lambda: torch.relu(a))
    assert (summary.uncounted, summary.flops, summary.effective) == (("aten::relu",), 0, "unknown")


def test_a_registered_formula_of_a_plugin_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(flop_registry, aten.maximum, lambda *_, **__: 42)
    summary = audit(lambda: torch.maximum(a, a))
    assert (summary.effective, summary.flops) == ("fp32", 42)


@pytest.mark.parametrize(
    "name", ["mkldnn_rnn_layer", "fusion_attention", "_sparse_mm", "_mkldnn_linear", "convolution_transpose", "weight_quant_matmul", "grouped_gemm"]
)
def test_names_that_hide_products(name: str) -> None:
    assert HIDES_PRODUCTS.search(name)


@pytest.mark.parametrize(
    "name", ["upsample_linear1d", "upsample_bilinear2d", "_softmax", "native_layer_norm", "convert_element_type", "_thnn_fused_lstm_cell", "comm"]
)
def test_names_that_do_not(name: str) -> None:
    assert not HIDES_PRODUCTS.search(name)


def test_no_ordinary_operation_is_taken_for_a_hidden_product() -> None:
    x = torch.randn(2, 4, 6, 6, requires_grad=True)
    net = nn.Sequential(
        nn.BatchNorm2d(4), nn.GELU(), nn.Upsample(scale_factor=2.0, mode="bilinear"), nn.MaxPool2d(2), nn.GroupNorm(2, 4), nn.Softmax(1), nn.Dropout()
    )
    assert audit(lambda: net(x).sum().backward()).uncounted == ()


def test_an_operation_is_named_without_its_overload() -> None:
    assert Operation(aten.add.Tensor).name == "aten::add"
    assert re.fullmatch(r"\w+", Operation(torch.ops.higher_order.cond).base)


# Saved activations


def stack(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width_in, width_out in pairwise(widths):
        layers += [nn.Linear(width_in, width_out), nn.ReLU()]
    return nn.Sequential(*layers)


def saved(net: nn.Module, work: Callable[[], object]) -> dict[str, int]:
    activations = SavedActivations([*net.parameters(), *net.buffers()])
    with activations:
        work()
    assert activations.unmeasured == 0
    return activations.bytes


def test_saved_bytes_of_linear_and_relu_equal_the_analytic_count() -> None:
    net, batch, widths = stack(16, 64, 32, 8), 10, (16, 64, 32, 8)
    kept: list[torch.Tensor] = []
    found = saved(net, lambda: kept.append(net(torch.randn(batch, 16))))
    # The input of each layer; a ReLU saves its result, which is the input of the next.
    assert found == {"fp32": 4 * batch * sum(widths)}


def test_saved_bytes_under_autocast_hold_the_weight_copies() -> None:
    net, batch, widths = stack(16, 64, 32, 8), 10, (16, 64, 32, 8)
    kept: list[torch.Tensor] = []

    def work() -> None:
        with torch.autocast("cpu", dtype=BF16):
            kept.append(net(torch.randn(batch, 16)))

    # The input needs no gradient, so the copy of the first weight is not saved.
    assert saved(net, work) == {"bf16": 2 * (batch * sum(widths) + 64 * 32 + 32 * 8)}


def test_a_storage_is_counted_once_and_whole() -> None:
    x = torch.randn(100, requires_grad=True)
    y = x * 2
    assert saved(nn.Identity(), lambda: (y[:10] * y[10:20], y * y)) == {"fp32": 400}


def test_an_expanded_tensor_counts_what_it_holds() -> None:
    x = torch.randn(4, requires_grad=True)
    y = (x * 1.0).expand(1000, 4)
    assert saved(nn.Identity(), lambda: y * y) == {"fp32": 16}


def test_parameters_and_views_of_them_are_not_activations() -> None:
    layer = nn.Linear(16, 8, bias=False)
    x = torch.randn(2, 16, requires_grad=True)
    assert saved(layer, lambda: layer(x)) == {"fp32": 2 * 16 * 4}


def test_micro_batches_do_not_add_up_once_backward_has_let_go() -> None:
    net, batch = stack(16, 64, 8), 10
    activations = SavedActivations(net.parameters())
    for rows in (batch, 2 * batch, batch):
        with activations:
            output = net(torch.randn(rows, 16))
        output.sum().backward()
    assert activations.bytes == {"fp32": 4 * 2 * batch * (16 + 64 + 8)}


def test_passes_before_one_backward_add_up() -> None:
    net, batch = stack(16, 64, 8), 10
    activations = SavedActivations(net.parameters())
    outputs = []
    for _ in range(3):
        with activations:
            outputs.append(net(torch.randn(batch, 16)))
    assert activations.bytes == {"fp32": 3 * 4 * batch * (16 + 64 + 8)}


def test_a_graph_that_is_dropped_is_let_go_of() -> None:
    def work() -> None:
        for size in (1000, 3000, 2000):
            x = torch.ones(size, requires_grad=True)
            ghost = weakref.ref(x * x)
            assert ghost() is None

    assert saved(nn.Identity(), work) == {"fp32": 3 * 4000}


def test_a_storage_saved_twice_is_kept_until_both_let_go() -> None:
    shared, weights = torch.ones(100), [torch.ones(1, requires_grad=True) for _ in range(4)]
    activations = SavedActivations([])
    with activations:
        outputs = [shared * weights[0], shared * weights[1]]
    outputs[0].sum().backward()
    with activations:
        outputs.append(torch.ones(500) * weights[2])
    assert activations.bytes == {"fp32": 400 + 2000}
    outputs[1].sum().backward()
    outputs[2].sum().backward()
    with activations:
        outputs.append(torch.ones(550) * weights[3])
    assert activations.bytes == {"fp32": 2400}


def test_sparse_tensors_are_counted_as_unmeasured() -> None:
    sparse = torch.eye(4).to_sparse()
    dense = torch.randn(4, 4, requires_grad=True)
    activations = SavedActivations([])
    with activations:
        torch.sparse.mm(sparse, dense)
    assert activations.unmeasured == 1


def test_nothing_is_saved_without_gradients() -> None:
    net = stack(4, 4)
    with torch.no_grad():
        assert saved(net, lambda: net(torch.randn(2, 4))) == {}


# The five classes


def test_classes_of_adamw() -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.randn(4, 16)).sum().backward()
    before = observed_classes(net, optimizer, {})
    optimizer.step()
    count = sum(parameter.numel() for parameter in net.parameters())
    assert before["optimizer state"] == {}
    assert observed_classes(net, optimizer, {"bf16": 7}) == {
        "parameters": {"fp32": 4 * count},
        "activations": {"bf16": 7},
        "gradients": {"fp32": 4 * count},
        "optimizer state": {"fp32": 8 * count},
        "communication": {},
    }
    optimizer.zero_grad()
    assert observed_classes(net, optimizer, {})["gradients"] == {}


def test_classes_of_mixed_parameters() -> None:
    net = nn.Sequential(nn.Linear(4, 4, bias=False).to(BF16), nn.LayerNorm(4))
    assert observed_classes(net, [], {})["parameters"] == {"bf16": 32, "fp32": 32}


def test_tied_parameters_count_once() -> None:
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    net[1].weight = net[0].weight
    assert observed_classes(net, [], {})["parameters"] == {"fp32": 64}


def test_an_fp32_copy_is_optimizer_state() -> None:
    net = nn.Linear(4, 4, bias=False).to(BF16)
    master = net.weight.detach().float().requires_grad_()
    master.grad = torch.ones_like(master)
    net.weight.grad = torch.ones_like(net.weight)
    optimizer = torch.optim.AdamW([master])
    optimizer.step()
    classes = observed_classes(net, optimizer, {})
    assert classes["parameters"] == {"bf16": 32}
    assert classes["gradients"] == {"bf16": 32, "fp32": 64}
    assert classes["optimizer state"] == {"fp32": 64 + 128}


def test_several_optimizers_and_what_is_held_elsewhere() -> None:
    net = nn.Linear(4, 4)
    optimizers = [torch.optim.SGD([net.weight], momentum=0.9), torch.optim.SGD([net.bias])]
    net(torch.randn(2, 4)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    sums, compensation = torch.zeros(20, dtype=torch.float64), torch.zeros(16, dtype=BF16)
    classes = observed_classes(net, optimizers, {}, gradients=[sums], state=[compensation])
    assert classes["optimizer state"] == {"bf16": 32, "fp32": 64}
    assert classes["gradients"] == {"fp32": 80, "fp64": 160}


def test_communication_of_a_group_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert observed_classes(nn.Linear(1, 1), [], {})["communication"] == {"unknown": 0}
