"""Live audits on the CPU."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

import mpbackend
from mpbackend.errors import BackendError, DocumentError, UnknownNameError
from mpbackend.observe.audit import PAIR
from mpbackend.observe.audit_assert import assert_audit
from mpbackend.observe.audit_diff import audit_differences
from mpbackend.observe.audit_document import AuditDocument, OpRow, load_audit
from mpbackend.observe.audit_run import audit_workload
from mpbackend.observe.audit_summary import multiplied
from mpbackend.observe.audit_workload import Build, Workload, build_workload, find_build
from tests.support import audited

IN, OUT, ROWS = 16, 8, 4


class Net(nn.Module):
    """Linear, norm, linear, in a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(IN, IN)
        self.norm = nn.LayerNorm(IN)
        self.blocks = nn.ModuleList([nn.Linear(IN, OUT, bias=False)])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks[0](self.norm(self.first(x)))
        return out


def net(device: torch.device) -> Workload:
    torch.manual_seed(0)
    model = Net().to(device)
    x = torch.randn(ROWS, IN, device=device)
    return Workload(model, lambda: model(x).float().pow(2).mean(), torch.optim.SGD(model.parameters(), lr=0.1), tokens=ROWS)


def run(build: Build = net, recipe: str = "bf16", *, steps: int = 0, fp32: bool = False) -> AuditDocument:
    target = mpbackend.select("cpu")
    return audit_workload(build, target, target.plan(recipe, on_unsupported="emulate"), steps=steps, fp32=fp32)


def table(audit: AuditDocument, phase: str) -> Mapping[tuple[str, str], OpRow]:
    return {(row.module, row.op.removeprefix("aten::")): row for row in audit.ops if row.phase == phase}


def test_the_table_of_a_live_audit_is_the_expected_one() -> None:
    audit = run()
    forward = table(audit, "forward")
    first, second = forward["first", "addmm"], forward["blocks.0", "mm"]
    assert (first.inputs, first.compute, first.outputs, first.calls) == (("bf16", "bf16", "bf16"), "bf16", ("bf16",), 1)
    assert (first.flops, second.flops) == (2 * ROWS * IN * IN, 2 * ROWS * IN * OUT)
    norm = forward["norm", "native_layer_norm"]
    assert (norm.inputs[0], norm.compute, set(norm.outputs)) == ("fp32", "fp32", {"fp32"})
    backward = table(audit, "backward")
    assert backward["blocks.0", "mm"].flops == 2 * 2 * ROWS * IN * OUT
    assert backward["first", "mm"].flops == 2 * ROWS * IN * IN  # the input needs no gradient
    assert backward["norm", "native_layer_norm_backward"].compute == "fp32"
    assert audit.flops == 3 * 2 * ROWS * IN * OUT + 2 * 2 * ROWS * IN * IN
    assert sum(row.share for row in audit.ops) == pytest.approx(1)
    optimizer = [row for row in audit.ops if row.phase == "optimizer" and "add" in row.op]
    assert optimizer and all((row.module, row.compute) == ("", "fp32") for row in optimizer)


def test_casts_are_those_of_autocast() -> None:
    casts = {(row.phase, row.module, row.source, row.target): (row.count, row.bytes) for row in run().casts}
    assert casts["forward", "first", "fp32", "bf16"] == (3, 2 * (ROWS * IN + IN * IN + IN))
    assert casts["forward", "norm", "bf16", "fp32"] == (1, 4 * ROWS * IN)
    assert casts["forward", "blocks.0", "fp32", "bf16"] == (2, 2 * (ROWS * IN + IN * OUT))
    assert casts["backward", "blocks.0", "bf16", "fp32"] == (2, 4 * (ROWS * IN + IN * OUT))


def test_fp32_has_no_casts() -> None:
    audit = run(recipe="fp32")
    assert audit.casts == ()
    assert audit.effective == "fp32"
    assert {row.role: row.same for row in audit.requests}["compute.wgrad"] is True


def test_the_ledger_is_predicted_and_beside_it_stands_fp32() -> None:
    audit = run(fp32=True)
    count = audit.parameters
    assert [row for row in audit.memory if row.predicted != row.measured and row.klass != "communication"] == []
    rows = {(row.klass, row.format): row for row in audit.memory}
    assert rows["parameters", "fp32"].measured == rows["gradients", "fp32"].measured == 4 * count
    assert ("optimizer state", "fp32") not in rows  # SGD without momentum
    assert rows["activations", "bf16"].measured == 2 * (2 * ROWS * IN + IN * OUT)  # inputs of both products, and the second weight
    assert sum(row.fp32 or 0 for row in audit.memory if row.klass == "activations") > audit.bytes_of("activations") - 2 * IN * OUT


def test_masters_and_moments() -> None:
    def build(device: torch.device) -> Workload:
        made = net(device)
        return Workload(made.model, made.loss, torch.optim.AdamW(made.model.parameters()))

    audit = run(build, "bf16-master")
    rows = {row.role: row for row in audit.requests}
    assert (rows["params"].ran, rows["params"].same) == (f"bf16 {2 * audit.parameters:,} B", True)
    assert rows["master"].same is True
    assert audit.bytes_of("optimizer state") == 12 * audit.parameters
    assert [row for row in audit.memory if row.predicted is not None and row.predicted != row.measured] == []


def test_timed_steps_give_a_rate_and_an_unknown_peak_no_utilization() -> None:
    audit = run(steps=3)
    assert audit.seconds > 0
    assert audit.tokens_per_s == pytest.approx(ROWS / audit.seconds)
    assert audit.mfu is None
    assert "no source states a dense peak" in audit.mfu_basis
    assert run().tokens_per_s is None


def test_an_emulated_device_has_no_utilization_although_its_peak_is_known() -> None:
    target = mpbackend.select("emu:h100")
    audit = audit_workload(net, target, target.plan("bf16"), steps=1, fp32=False)
    assert (audit.device, audit.kind, audit.effective) == ("h100", "emulated", "bf16")
    assert audit.mfu is None and "the device is emulated" in audit.mfu_basis
    assert table(audit, "backward")["blocks.0", "mm"].compute == "bf16"  # as the model asked, not as the emulation computes


def test_the_audit_leaves_the_training_as_it_is() -> None:
    losses = []
    for audits in (False, True):
        made = net(torch.device("cpu"))
        assert made.optimizer is not None
        target = mpbackend.select("cpu")
        if audits:
            audit_workload(lambda _, made=made: made, target, target.plan("bf16"), fp32=False)  # type: ignore[misc] # the workload that was made
        else:
            with target.prepare(made.model, made.optimizer, "bf16") as session:
                with session.autocast():
                    loss = made.loss()
                session.backward(loss)
                session.step()
        losses.append(made.loss().item())
        assert not made.model._forward_hooks and all(not module._forward_pre_hooks for module in made.model.modules())
    assert losses[0] == losses[1]


def test_a_loop_of_ones_own_is_audited_as_it_is() -> None:
    made = net(torch.device("cpu"))

    def step() -> None:
        made.loss().backward()
        assert made.optimizer is not None
        made.optimizer.step()
        made.optimizer.zero_grad()

    audit = run(lambda _: Workload(made.model, made.loss, made.optimizer, step=step))
    assert audit.effective == "fp32"
    assert {row.role: row.same for row in audit.requests}["compute.forward"] is False  # asked for bf16
    assert {row.phase for row in audit.ops} == {"forward", "backward", "optimizer"}
    assert audit.bytes_of("gradients") == 4 * audit.parameters


def test_two_audits_differ_in_what_was_changed() -> None:
    first, second = run(), run()
    assert audit_differences(first, second) == ()

    class Changed(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                hidden = self.first(x)
            out: Tensor = self.blocks[0](self.norm(hidden))
            return out

    def build(device: torch.device) -> Workload:
        torch.manual_seed(0)
        model = Changed().to(device)
        return Workload(model, lambda: model(torch.ones(ROWS, IN)).float().pow(2).mean(), torch.optim.SGD(model.parameters(), lr=0.1), tokens=ROWS)

    found = {(item.kind, item.what): item for item in audit_differences(first, run(build)) if item.what != "workload"}
    product = found["operation", "forward first aten::addmm"]
    assert product.first.endswith("-> bf16 -> bf16") and product.second.endswith("-> fp32 -> fp32")
    assert ("request", "compute.forward") in found and ("memory", "activations bf16") in found


def test_assert_audit() -> None:
    audit = run()
    assert_audit(audit, compute={"forward * aten::*mm": "bf16", "* norm aten::native_layer_norm*": "fp32"}, casts=sum(row.count for row in audit.casts))
    with pytest.raises(AssertionError, match="native_layer_norm computes in fp32, not in bf16"):
        assert_audit(audit, compute={"* aten::native_layer_norm": "bf16"})
    with pytest.raises(AssertionError, match="no operation matches 'forward x'"):
        assert_audit(audit, compute={"forward x": "bf16"})
    with pytest.raises(AssertionError, match=r"conversions, at most 1 may be"):
        assert_audit(audit, casts=1)
    with pytest.raises(AssertionError, match="did not find banned-op"):
        assert_audit(audit, findings=["banned-op"])
    lost = run(audited.image_in_plain_order)
    assert_audit(lost, findings=["channels-last-lost"])
    with pytest.raises(AssertionError, match="found channels-last-lost"):
        assert_audit(lost)
    with pytest.raises(AssertionError, match=r"compute.wgrad: granted bf16, ran fp32 100.0%"):
        assert_audit(run(audited.in_a_thread), findings=["other-thread"])


def test_an_audit_is_read_back(tmp_path_factory: pytest.TempPathFactory) -> None:
    from mpbackend.cli.options import json_text

    path = tmp_path_factory.mktemp("audit") / "a.json"
    audit = run()
    path.write_text(json_text(audit), encoding="utf-8")
    assert load_audit(path) == audit
    path.write_text(path.read_text(encoding="utf-8").replace('"flops"', '"flop"', 1), encoding="utf-8")
    with pytest.raises(DocumentError, match="is not an audit of schema 1"):
        load_audit(path)
    with pytest.raises(DocumentError, match="cannot read"):
        load_audit(path.with_name("none.json"))


def test_a_pass_that_needs_values_is_noted() -> None:
    def build(device: torch.device) -> audited.Pair:
        model = nn.Linear(8, 8).to(device)

        def loss() -> Tensor:
            out: Tensor = model(torch.ones(4, 8, device=device)).float().sum()
            return out if bool(torch.isfinite(out)) else out * 0

        return model, loss

    audit = run(build)
    assert any(note.startswith("its activations were not predicted: DataDependentOutputException") for note in audit.notes)
    assert audit.effective == "bf16" and not audit.findings
    assert {row.predicted for row in audit.memory if row.klass == "activations"} == {None}


def test_a_workload_that_raises_is_named() -> None:
    def broken(device: torch.device) -> audited.Pair:
        raise RuntimeError(f"no data on {device}")

    with pytest.raises(BackendError, match=r"broken\(cpu\): RuntimeError: no data on cpu"):
        run(broken)


def test_workloads_that_are_none() -> None:
    for spec in ("no_colon", "module:", ":function", "module:not a name"):
        with pytest.raises(DocumentError, match="not a module and a function"):
            find_build(spec)
    with pytest.raises(UnknownNameError, match="tinny"):
        find_build("tests.support.audited:tinny")
    with pytest.raises(BackendError, match="ModuleNotFoundError"):
        find_build("tests.support.no_such_module:f")
    with pytest.raises(DocumentError, match="a int"):
        build_workload(lambda _: 3, torch.device("cpu"))  # type: ignore[arg-type, return-value] # what is refused
    assert find_build("tests.support.audited:tiny") is audited.tiny


def quantized(device: torch.device) -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).to(device)
    x = torch.randn(32, 64, device=device)
    return Workload(model, lambda: model(x).float().square().mean(), torch.optim.AdamW(model.parameters()))


def test_low_bit_products_of_an_emulated_device_are_what_was_asked() -> None:
    """The gradients of a backward product are fp8_e5m2, its other operand is that of the forward pass; a constant that a quantizer makes is no finding."""
    target = mpbackend.select("emu:h100")
    found = audit_workload(quantized, target, target.plan("fp8"), fp32=False)
    requests = {row.role: row for row in found.requests}
    assert requests["compute.forward"].ran == "fp8_e4m3 100.0%"
    assert requests["compute.dgrad"].ran == f"fp8_e5m2{PAIR}fp8_e4m3 100.0%"
    assert [requests[role].same for role in ("compute.forward", "compute.dgrad", "compute.wgrad")] == [True] * 3
    assert found.findings == ()
    casts = [row for row in found.casts if row.phase == "forward" and row.target == "fp8_e4m3"]
    assert sum(row.bytes for row in casts) == 2 * (32 * 64 + 64 * 64)
    saved = [row for row in found.memory if row.klass == "activations"]
    assert saved and {row.predicted for row in saved} == {None}
    assert "the activations of 2 converted layers were not predicted" in found.notes


@pytest.mark.parametrize(
    ("shares", "same"),
    [
        ({f"fp8_e5m2{PAIR}fp8_e4m3": 1.0}, True),
        ({"fp8_e5m2": 1.0}, True),
        ({"fp8_e4m3": 1.0}, False),
        ({f"fp8_e5m2{PAIR}bf16": 1.0}, False),
        ({f"fp8_e5m2{PAIR}fp8_e4m3": 0.9, "bf16": 0.1}, False),
    ],
)
def test_a_backward_product_has_gradients_in_the_granted_format(shares: dict[str, float], same: bool) -> None:
    assert multiplied(shares, "fp8_e5m2", "fp8_e4m3") is same
