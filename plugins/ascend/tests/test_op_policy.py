"""The cited table of autocast policies; the simulated lane compares it with the wheel."""

from __future__ import annotations

from collections import Counter

import torch

from mpbackend.device import Device
from mpbackend.train.policy import find_op, sensitive_ops
from mpbackend_ascend.backend import AscendBackend
from mpbackend_ascend.op_policy import AUTOCAST_KEY, KINDS, POLICY


def test_counts_are_those_of_the_wheel() -> None:
    assert Counter(POLICY.values()) == {"lower": 34, "fp32": 59, "promote": 10, "banned": 1}
    assert sum(len(names) for names, _ in KINDS) == len(POLICY) == 104, "no operator stands twice"


def test_the_backend_gives_the_table() -> None:
    device = Device(key="ascend-910b1", arch="ascend-a2", name="Ascend910B1", backend="ascend", type="npu")
    assert AscendBackend().op_policy(device) == POLICY
    assert AscendBackend.autocast_key == AUTOCAST_KEY


def test_every_operator_exists_in_torch() -> None:
    assert all(find_op(name) is not None for name in POLICY)


def test_what_torchs_own_fp32_list_has_more() -> None:
    missing = {name for name in sensitive_ops() if name not in POLICY}
    assert missing == {
        "rms_norm",
        "cross_entropy_loss",
        "upsample_nearest1d",
        "upsample_nearest2d",
        "upsample_nearest3d",
        "upsample_linear1d",
        "upsample_bilinear2d",
        "upsample_trilinear3d",
        "upsample_bicubic2d",
        "_upsample_nearest_exact1d",
        "_upsample_nearest_exact2d",
        "_upsample_nearest_exact3d",
        "_upsample_bilinear2d_aa",
        "_upsample_bicubic2d_aa",
    }


def test_nothing_that_torch_keeps_in_fp32_is_lowered() -> None:
    assert not {name for name in sensitive_ops() if POLICY.get(name) not in (None, "fp32")}
    assert not [name for name in POLICY if not hasattr(torch.ops.aten, name.partition(".")[0])]
