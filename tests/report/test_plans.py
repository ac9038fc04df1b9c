from __future__ import annotations

import msgspec

from mpbackend.decisions import Decision
from mpbackend.device import device_from_matrix
from mpbackend.matrix import Matrix
from mpbackend.planning import NO_PLUGIN, Plan, plan_recipe
from mpbackend.recipe import parse_recipe
from mpbackend.report import markdown, terminal
from mpbackend.report.plans import fold, plan_document, plan_report


def decision(role: str, **fields: str) -> Decision:
    plain = {"asked": "bf16", "granted": "bf16", "level": "native", "reason": "because", "source": "here"}
    return Decision(role=role, **{**plain, **fields})  # type: ignore[arg-type] # a test's shorthand


def planned(matrix: Matrix, text: str, key: str) -> Plan:
    return plan_recipe(parse_recipe(text), device_from_matrix(matrix, key), matrix, on_unsupported="nearest")


def test_identical_passes_become_one() -> None:
    passes = [decision(f"compute.{name}", op="matmul") for name in ("forward", "dgrad", "wgrad")]
    assert fold(passes) == [decision("compute", op="matmul")]


def test_passes_that_differ_stay_apart() -> None:
    passes = [decision("compute.forward"), decision("compute.dgrad", granted="fp16"), decision("compute.wgrad", granted="fp16")]
    assert [entry.role for entry in fold(passes)] == ["compute.forward", "compute.{dgrad,wgrad}"]
    for name in ("asked", "granted", "reason", "source", "level", "grant"):
        value = {"level": "emulated", "grant": "warned"}.get(name, "other")
        assert len(fold([decision("compute.dgrad"), decision("compute.wgrad", **{name: value})])) == 2, name


def test_roles_of_other_groups_and_operations_are_not_joined() -> None:
    decisions = [decision("compute.forward", op="matmul"), decision("compute.forward", op="conv"), decision("accumulate.forward", op="matmul")]
    assert fold(decisions) == decisions
    assert fold([decision("params"), decision("grads")]) == [decision("params"), decision("grads")]


def test_every_decision_of_a_plan_is_shown_once(shipped: Matrix) -> None:
    plan = planned(shipped, "bf16-params", next(model.key for model in shipped.devices.values() if shipped.rows(model.arch, a="bf16", level="native")))
    text = terminal.render(plan_report(plan), 120)
    for role in ("compute ", "compute.forward (conv)", "accumulate ", "params ", "optimizer.exp_avg_sq ", "reduce.format ", "loss_scale.mode "):
        assert sum(line.startswith(role) for line in text.splitlines()) == 1, role
    assert "warning: no master copy" in text
    assert NO_PLUGIN in text
    assert "Waits for the device" in text
    assert markdown.render(plan_report(plan)).startswith("# bf16-params on ")


def test_notes_of_the_backend_are_shown(shipped: Matrix) -> None:
    plan = msgspec.structs.replace(planned(shipped, "bf16", next(iter(shipped.devices))), notes=("attention is the host's",))
    assert "attention is the host's" in terminal.render(plan_report(plan), 120)
    assert plan_document(plan)["notes"] == ("attention is the host's",)


def test_the_document_keeps_every_decision(shipped: Matrix) -> None:
    plan = planned(shipped, "bf16", next(iter(shipped.devices)))
    document = plan_document(plan)
    assert len(document["decisions"]) == len(plan.decisions)
    assert document["hash"] == plan.hash
    assert document["runnable"] is False
    assert set(msgspec.json.decode(msgspec.json.encode(plan))) < set(document)
