"""The pinned policy: listed operators in fp32 under autocast, all others untouched, undone on exit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own documentation calls it F

from mpbackend.backend import PolicyKind
from mpbackend.errors import BackendError, UnknownNameError
from mpbackend.train import policy
from mpbackend.train.policy import PINS, PinnedPolicy, PinRegistry, find_op, sensitive_ops

KEY = "AutocastCPU"
Op = Callable[[torch.Tensor], torch.Tensor]


def has_kernel(name: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", KEY)


NATIVE: dict[str, PolicyKind] = {name: "fp32" for name in sensitive_ops() if has_kernel(name)}
"""On a CPU every listed operator with an autocast kernel runs in fp32; a test of the CPU plugin observes that."""

SENSITIVE: dict[str, Op] = {
    "softmax": lambda x: torch.softmax(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "layer_norm": lambda x: F.layer_norm(x, (16,), x[0], x[1]),
    "rms_norm": lambda x: F.rms_norm(x, (16,), x[0]),
    "group_norm": lambda x: F.group_norm(x, 4),
    "exp": torch.exp,
    "rsqrt": lambda x: torch.rsqrt(x.abs()),
    "pow scalar": lambda x: x**2,
    "pow tensor": lambda x: x.abs() ** x,
    "pow of scalar": lambda x: 2**x,
    "softplus": F.softplus,
    "cosine_similarity": lambda x: F.cosine_similarity(x, x.flip(0)),
    "logsumexp": lambda x: x.logsumexp(-1),
    "interpolate": lambda x: F.interpolate(x[None, None], scale_factor=2),
    "sum": torch.sum,
    "sum of rows": lambda x: x.sum(0),
    "prod": lambda x: x.prod(-1),
    "cumsum": lambda x: x.cumsum(0),
    "vector_norm": torch.linalg.vector_norm,
    "matrix_norm": torch.linalg.matrix_norm,
    "norm": lambda x: torch.ops.aten.norm.Scalar(x, 2),
    "norm of rows": lambda x: torch.ops.aten.norm.ScalarOpt_dim(x, 2, [0]),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.arange(8)),
    "mse_loss": lambda x: F.mse_loss(x, x.flip(0)),
}

UNTOUCHED: dict[str, Op] = {
    "linear": lambda x: F.linear(x, x),
    "relu": torch.relu,
    "gelu": F.gelu,
    "mean": torch.mean,
    "add": lambda x: x + x,
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "cat": lambda x: torch.cat([x, x]),
    "softmax that says bf16": lambda x: torch.softmax(x, -1, dtype=torch.bfloat16),
    "sum that says bf16": lambda x: x.sum(0, dtype=torch.bfloat16),
    "cumsum that says bf16": lambda x: x.cumsum(0, dtype=torch.bfloat16),
}


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(0)).bfloat16()


@pytest.fixture(autouse=True)
def nothing_stays_pinned() -> Iterator[None]:
    yield
    assert not PINS.counts
    assert not PINS.libraries


@pytest.mark.parametrize("name", SENSITIVE)
def test_listed_operators_compute_in_fp32(name: str, x: torch.Tensor) -> None:
    with PinnedPolicy(KEY, NATIVE), torch.autocast("cpu", dtype=torch.bfloat16):
        result = SENSITIVE[name](x)
    assert result.dtype is torch.float32
    expected = SENSITIVE[name](x.float())
    assert torch.equal(result, expected), "the same operator on the same operands, so the same bits"


@pytest.mark.parametrize("name", UNTOUCHED)
def test_other_operators_and_explicit_formats_are_untouched(name: str, x: torch.Tensor) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        native = UNTOUCHED[name](x)
        with PinnedPolicy(KEY, NATIVE):
            pinned = UNTOUCHED[name](x)
    assert pinned.dtype is native.dtype is torch.bfloat16
    assert torch.equal(pinned, native)


def test_explicit_wide_formats_and_integers_are_respected(x: torch.Tensor) -> None:
    with PinnedPolicy(KEY, NATIVE), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.softmax(x, -1, torch.float64).dtype is torch.float64
        assert torch.ops.aten.softmax.int(x, -1, None).dtype is torch.float32
        assert torch.arange(4).sum().dtype is torch.int64
        assert x.double().sum().dtype is torch.float64
        assert torch.exp(x.double()).dtype is torch.float64


def test_fp16_is_pinned_like_bf16(x: torch.Tensor) -> None:
    with PinnedPolicy(KEY, NATIVE), torch.autocast("cpu", dtype=torch.float16):
        assert torch.softmax(x.half(), -1).dtype is torch.float32
        assert x.half().sum().dtype is torch.float32


def test_lists_of_tensors_are_cast() -> None:
    assert [t.dtype for t in policy.upcast([torch.ones(1).half(), torch.ones(1, dtype=torch.int32)])] == [torch.float32, torch.int32]
    assert policy.upcast([1, 2]) == [1, 2]
    assert policy.upcast(None) is None


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: (torch.softmax(x, -1) * torch.linspace(-1, 1, 16)).sum(),
        lambda x: F.layer_norm(x, (16,)).pow(3).sum(),
        lambda x: F.cross_entropy(x, torch.arange(8)),
        torch.linalg.vector_norm,
    ],
    ids=["softmax", "layer_norm and pow", "cross_entropy", "vector_norm"],
)
def test_gradients_are_those_of_fp32_rounded_once(loss: Op, x: torch.Tensor) -> None:
    leaf = x.clone().requires_grad_()
    with PinnedPolicy(KEY, NATIVE):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = loss(leaf)
        (gradient,) = torch.autograd.grad(value, leaf)
    reference = x.float().requires_grad_()
    (expected,) = torch.autograd.grad(loss(reference), reference)
    assert value.dtype is torch.float32
    assert torch.equal(gradient, expected.bfloat16())


def test_nothing_changes_outside_autocast(x: torch.Tensor) -> None:
    with PinnedPolicy(KEY, NATIVE):
        assert torch.softmax(x, -1).dtype is torch.bfloat16
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
            assert torch.softmax(x, -1).dtype is torch.bfloat16


def test_leaving_brings_the_native_policy_back(x: torch.Tensor) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        native = {name: run(x) for name, run in SENSITIVE.items()}
        assert native["softmax"].dtype is native["sum"].dtype is torch.bfloat16, "or there would be nothing to pin"
        with pytest.raises(ZeroDivisionError), PinnedPolicy(KEY, NATIVE):
            raise ZeroDivisionError
        for name, run in SENSITIVE.items():
            again = run(x)
            assert again.dtype is native[name].dtype, name
            assert torch.equal(again, native[name]), name


def test_pins_nest(x: torch.Tensor) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outer = PinnedPolicy(KEY, NATIVE)
        with outer:
            with PinnedPolicy(KEY, NATIVE), outer:
                assert torch.softmax(x, -1).dtype is torch.float32
                assert PINS.counts[KEY, "softmax.int"] == 3
            assert torch.softmax(x, -1).dtype is torch.float32
        assert torch.softmax(x, -1).dtype is torch.bfloat16


def test_pins_may_be_left_in_any_order(x: torch.Tensor) -> None:
    first, second = PinnedPolicy(KEY, NATIVE), PinnedPolicy(KEY, NATIVE)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.softmax(x, -1).dtype is torch.float32
        second.__exit__(None, None, None)
        assert torch.softmax(x, -1).dtype is torch.bfloat16


def test_a_kernel_of_another_policy_is_overridden_without_a_warning(x: torch.Tensor) -> None:
    with PinnedPolicy(KEY, {}) as pinned, torch.autocast("cpu", dtype=torch.bfloat16):
        assert set(pinned.pinned) == set(sensitive_ops())
        assert torch.equal(F.cross_entropy(x, torch.arange(8)), F.cross_entropy(x.float(), torch.arange(8)))
        assert F.mse_loss(x, x).dtype is torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert F.mse_loss(x, x).dtype is torch.float32, "the backend's own kernel is back"


def test_only_what_the_backend_does_not_do_itself_is_pinned() -> None:
    pinned = PinnedPolicy(KEY, NATIVE).pinned
    assert "softmax.int" in pinned
    assert "mse_loss" not in pinned
    assert set(pinned) | set(NATIVE) == set(sensitive_ops())
    with PinnedPolicy(KEY, NATIVE):
        assert all(has_kernel(name) for name in sensitive_ops())
    assert not any(has_kernel(name) for name in pinned)


def test_the_list_is_that_of_the_installed_torch() -> None:
    ops = sensitive_ops()
    assert {"softmax.int", "log_softmax.int", "layer_norm", "rms_norm", "exp", "pow.Tensor_Scalar", "norm.ScalarOpt_dim", "sum.dim_IntList"} <= set(ops)
    assert "cross_entropy_loss" in ops
    assert ops["sum"] == ops["softmax.int"] == "set_dtype"
    assert ops["exp"] == ops["norm.Scalar"] == "cast"
    assert not {"mm", "linear", "cat", "addcmul"} & set(ops)
    for name in ops:
        find_op(name)


def test_a_header_that_is_missing_or_other_is_an_error(tmp_path: Path) -> None:
    header = tmp_path / "autocast_mode.h"
    with pytest.raises(BackendError, match=r"cannot be read.*sensitive=native"):
        sensitive_ops(header)
    header.write_text("#define AT_FORALL_FP32(_) \\\n  _(acos) \\\n  _(pow, Scalar)\n", encoding="utf-8")
    with pytest.raises(BackendError, match="has no list AT_FORALL_FP32_SET_OPT_DTYPE"):
        sensitive_ops(header)


def test_an_unknown_key_is_an_error() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown autocast key 'AutocastCPX'.*AutocastCPU"):
        PinnedPolicy("AutocastCPX", {})


def test_a_failure_half_way_removes_what_was_pinned(x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> object:
        if name == "sum":
            raise BackendError("operator aten::sum", found="gone")
        return find_op(name)

    monkeypatch.setattr(policy, "find_op", fail)
    registry = PinRegistry()
    with pytest.raises(BackendError, match="gone"), PinnedPolicy(KEY, NATIVE, registry):
        raise AssertionError("not reached")
    assert not registry.counts
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.softmax(x, -1).dtype is torch.bfloat16
