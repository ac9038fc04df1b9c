"""Audits without hardware."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from functools import cache

import pytest

from mpbackend.errors import BackendError
from mpbackend.observe.audit_document import AuditDocument
from mpbackend.observe.audit_target import audit_target
from tests.support.audited import GPT2

TARGETS = ["h100", "ascend-910b3"]


@cache
def audit(name: str, device: str, recipe: str = "bf16") -> AuditDocument:
    return audit_target(f"tests.support.audited:{name}", device, recipe)


def parameters_of_gpt2() -> int:
    d, layers = GPT2.width, GPT2.layers
    block = 2 * 2 * d + (3 * d * d + 3 * d) + (d * d + d) + (4 * d * d + 4 * d) + (4 * d * d + d)
    return GPT2.vocabulary * d + GPT2.context * d + layers * block + 2 * d


def saved_bytes_of_gpt2() -> dict[str, int]:
    """What forward keeps for backward under bf16, by format: the operands of products in bf16, those of norms and of the loss in fp32.

    A layer: its two norms keep their inputs (8 N d) and two statistics each (16 N); queries, keys, values (6 N d), the result of attention (2 N d), the norms'
    results (4 N d), the input and the result of the activation (16 N d) and the four weights (24 d^2) stand in bf16;
    the log-sum-exp of attention is fp32.
    """
    n, d, layers, vocabulary = GPT2.batch * GPT2.context, GPT2.width, GPT2.layers, GPT2.vocabulary
    heads = 4 * GPT2.heads * n
    return {
        "bf16": layers * (28 * n * d + 24 * d * d) + 2 * n * d + 2 * vocabulary * d,
        "fp32": layers * (8 * n * d + 16 * n + heads) + 4 * n * d + 8 * n + 4 * n * vocabulary,
    }


@pytest.mark.parametrize("device", TARGETS)
def test_memory_classes_of_gpt2_equal_the_analytic_count(device: str) -> None:
    found = audit("gpt2", device)
    count = parameters_of_gpt2()
    assert count == found.parameters == 124_439_808
    assert found.bytes_of("parameters") == 4 * count
    assert found.bytes_of("gradients") == 4 * count
    assert found.bytes_of("optimizer state") == 8 * count
    expected = saved_bytes_of_gpt2()
    for row in found.memory:
        if row.klass == "activations" and row.format in expected:
            assert row.measured == pytest.approx(expected[row.format], rel=0.02)
    assert found.bytes_of("activations") == pytest.approx(sum(expected.values()), rel=0.001)


@pytest.mark.parametrize("device", TARGETS)
def test_flops_of_gpt2_equal_the_analytic_count(device: str) -> None:
    n, d, layers, vocabulary, context = GPT2.batch * GPT2.context, GPT2.width, GPT2.layers, GPT2.vocabulary, GPT2.context
    products = layers * 12 * d * d + vocabulary * d
    attention = layers * 2 * 2 * n * context * d  # two products forward, five backward
    assert audit("gpt2", device).flops == 3 * 2 * n * products + attention + attention * 5 // 2


@pytest.mark.parametrize("device", TARGETS)
def test_formats_of_a_target_are_those_of_its_policy(device: str) -> None:
    rows = {(row.phase, row.op): row for row in audit("gpt2", device).ops}
    fused = rows["forward", "aten::_scaled_dot_product_flash_attention"]
    assert (fused.compute, fused.calls) == ("bf16", 1)
    assert rows["forward", "aten::native_layer_norm"].outputs == ("fp32",)
    assert rows["forward", "aten::_log_softmax"].compute == "fp32"  # pinned: the backend's own policy runs it in bf16
    assert not any("attention_math" in row.op or row.op == "aten::_softmax" for row in audit("gpt2", device).ops)
    assert audit("gpt2", device).shares == {"bf16": 1.0}
    assert {row.role: row.same for row in audit("gpt2", device).requests} == dict.fromkeys(
        ["compute.forward", "compute.dgrad", "compute.wgrad", "params", "grads", "optimizer.exp_avg", "master"], True
    )


@pytest.mark.parametrize("device", TARGETS)
def test_scalars_that_are_moved_or_made_on_the_device_are_audited(device: str) -> None:
    found = audit("counting", device)
    rows = {(row.phase, row.module, row.op): row for row in found.ops}
    assert rows["forward", "head", "aten::addmm"].compute == "bf16"
    assert any(phase == "forward" and module == "norm" and "batch_norm" in op for phase, module, op in rows)
    assert found.findings == ()
    assert found.bytes_of("parameters") == 4 * found.parameters


@pytest.mark.slow
def test_the_native_policy_runs_the_loss_in_bf16() -> None:
    rows = {(row.phase, row.op): row for row in audit("tiny", "h100", "bf16:sensitive=native").ops}
    assert rows["forward", "aten::_log_softmax"].compute == "bf16"
    assert rows["forward", "aten::native_layer_norm"].compute == "fp32"


def test_weights_are_cast_once_under_one_autocast() -> None:
    forward = [row for row in audit("twice", "h100").casts if row.phase == "forward"]
    # Input, weight and bias; the second call finds its input in bf16, and the casts of weight and bias made.
    assert [(row.source, row.target, row.count, row.bytes) for row in forward if row.target == "bf16"] == [("fp32", "bf16", 3, 2 * (4 * 8 + 8 * 8 + 8))]


@pytest.mark.slow
def test_fp32_operands_are_computed_in_what_the_plan_granted() -> None:
    products = {row.compute for row in audit("twice", "h100", "fp32-fast").ops if row.flops}
    assert products == {"tf32"}


def test_the_path_of_an_overflow() -> None:
    found = audit("tiny", "h100", "fp16")
    assert audit("gpt2", "h100").overflow == ""
    assert found.overflow.startswith("skipped, gradient_overflow; loss scale 65536 -> 32768; ")
    assert any(row.phase == "optimizer" and row.op == "aten::addcdiv_" for row in found.ops)


@pytest.mark.slow
def test_a_saturating_target_reads_its_register() -> None:
    found = audit("tiny", "ascend-910a", "fp16")
    assert found.overflow.startswith("skipped, gradient_overflow")
    assert found.effective == "fp16"


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["bf16-master", "bf16-params", "bf16-kahan", "bf16-sr", "fp32"])
def test_recipes_hold_what_they_say(recipe: str) -> None:
    found = audit("tiny", "ascend-910b3", recipe)
    assert [row for row in found.requests if row.same is not True] == []
    assert [(row.klass, row.format) for row in found.memory if row.predicted is not None and row.predicted != row.measured] == []


def test_shapes_that_miss_the_alignment_are_listed_with_their_share() -> None:
    found = audit("gpt2", "ascend-910b3")
    missing = {(row.phase, name): row.share for row in found.products for name in row.misses}
    n, d, vocabulary = GPT2.batch * GPT2.context, GPT2.width, GPT2.vocabulary
    share = pytest.approx(2 * n * d * vocabulary / found.flops)
    places = [("forward", "n"), ("backward", "m"), ("backward", "k")]
    assert missing == {(phase, f"{name}={vocabulary} not a multiple of 16"): share for phase, name in places}
    assert found.notes == ()
    [note] = audit("gpt2", "h100").notes
    assert note.startswith("No source states the sizes that products in bf16 need on sm_90")


@pytest.mark.slow
def test_a_refused_recipe_is_told() -> None:
    with pytest.raises(BackendError, match="bf16 is refused on ascend-910a"):
        audit_target("tests.support.audited:tiny", "ascend-910a", "bf16")


MIRROR = """
    import sys
    import torch
    from mpbackend.observe.fake_device import AutocastPolicy, define_device
    from mpbackend.train.outcomes import Grounds, run_operators
    from mpbackend.train.policy import find_op
    from mpbackend.train.samples import sample
    from mpbackend_cuda.op_policy import AUTOCAST_KEY, op_policy

    policy = op_policy()
    key = define_device("target")
    banned = []
    held = AutocastPolicy("target", key, policy, banned.append)
    ops = {name: find_op(name) for name in policy}
    mirror = run_operators(ops, Grounds(torch.device("target"), "fake"), sample)
    real = run_operators(ops, Grounds(torch.device("cuda"), "fake"), sample)
    ran = 0
    for name in ops:
        for inputs, seen in real[name].items():
            if policy[name] == "banned" or seen.refused or mirror[name][inputs].refused:
                continue
            ran += 1
            if seen.out != mirror[name][inputs].out:
                print(name, inputs, policy[name], seen, mirror[name][inputs])
    print("ran", ran, "of", len(ops), "banned", sorted(set(banned)), "missing", held.missing)
"""


@pytest.mark.slow
def test_the_mirrored_policy_gives_the_formats_of_torchs_own_kernels() -> None:
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(MIRROR)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    *different, last = ended.stdout.splitlines()
    assert different == []
    assert int(last.split()[1]) > 200, last
    assert "banned ['binary_cross_entropy'] missing []" in last
