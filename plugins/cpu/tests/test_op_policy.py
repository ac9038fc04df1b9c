"""The observed policy of CPU autocast, checked against what operators return."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own documentation calls it F

from mpbackend.train.policy import PinnedPolicy, sensitive_ops
from mpbackend_cpu.backend import CpuBackend
from mpbackend_cpu.op_policy import AUTOCAST_KEY, classify, observe


def test_every_operator_with_an_autocast_kernel_is_classified() -> None:
    policy, unclassified = classify()
    assert unclassified == ()
    names = {n.removeprefix("aten::") for n in torch._C._dispatch_get_all_op_names() if torch._C._dispatch_has_kernel_for_dispatch_key(n, AUTOCAST_KEY)}
    assert set(policy) == names
    assert set(policy.values()) == {"lower", "fp32", "promote"}


def test_the_policy_is_what_operators_do() -> None:
    policy = classify().policy
    fp32 = torch.ones(4, 4)
    bf16 = fp32.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lower = {
            "mm": torch.mm(fp32, fp32),
            "linear": F.linear(fp32, fp32),
            "conv1d": F.conv1d(fp32[None], fp32[..., None]),
            "baddbmm": torch.baddbmm(fp32[None], fp32[None], fp32[None]),
            "scaled_dot_product_attention": F.scaled_dot_product_attention(fp32, fp32, fp32),
        }
        wide = {
            "mse_loss": F.mse_loss(bf16, bf16),
            "prod": torch.prod(bf16),
            "cross_entropy_loss": F.cross_entropy(bf16, torch.arange(4)),
            "cdist": torch.cdist(bf16, bf16),
            "trace": torch.trace(bf16),
            "grid_sampler": F.grid_sample(bf16[None, None], torch.zeros(1, 2, 2, 2).bfloat16(), align_corners=False),
        }
        promote = {"cat": torch.cat([bf16, fp32]), "stack": torch.stack([bf16, fp32])}
    for name, result in lower.items():
        assert (policy[name], result.dtype) == ("lower", torch.bfloat16), name
    for name, result in wide.items():
        assert (policy[name], result.dtype) == ("fp32", torch.float32), name
    for name, result in promote.items():
        assert (policy[name], result.dtype) == ("promote", torch.float32), name


def test_the_list_is_not_that_of_accelerators() -> None:
    policy = classify().policy
    assert not {"softmax.int", "layer_norm", "rms_norm", "exp", "sum"} & set(policy), "the reason to pin"
    assert policy["grid_sampler"] == "fp32", "promoted on accelerators"


@pytest.mark.parametrize("name", [name for name, how in sensitive_ops().items() if how == "cast"])
def test_under_the_pinned_policy_every_sensitive_operator_is_cast_to_fp32(name: str) -> None:
    backend = CpuBackend()
    (device,) = backend.discover()
    with PinnedPolicy(backend.autocast_key, backend.op_policy(device)):
        assert observe(name) == "fp32"
    if name not in classify().policy:
        assert observe(name) is None, "gone with the pin"


def test_observing_computes_nothing_and_warns_of_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in classify().policy:
            observe(name)
    assert capfd.readouterr().err == ""
