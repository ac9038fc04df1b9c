"""A plan for people: one line for each decision, the reasons below, and whether it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from mpbackend.decisions import Decision
from mpbackend.planning import Plan
from mpbackend.report.view import Block, Citations, Column, Facts, Listing, Report, Table, level_text
from mpbackend.roles import PASSES

GRANT_TEXT = {"granted": "", "warned": "warning: ", "refused": "refused: "}


def fold(decisions: Sequence[Decision]) -> list[Decision]:
    """Join decisions about the passes of one role that say the same: ``compute.{forward,dgrad,wgrad}`` becomes ``compute``.

    Returns:
        The decisions in order, the joined one in the place of its first member. The role names the passes that were joined unless it is all three.
    """
    groups: dict[tuple[Any, ...], list[Decision]] = {}
    for number, decision in enumerate(decisions):
        group, _, name = decision.role.rpartition(".")
        key = (number,) if name not in PASSES else (group, *msgspec.structs.astuple(msgspec.structs.replace(decision, role="")))
        groups.setdefault(key, []).append(decision)
    return [joined(members) for members in groups.values()]


def joined(members: Sequence[Decision]) -> Decision:
    """Return one decision for members that differ only in their pass."""
    if len(members) == 1:
        return members[0]
    group, _, _ = members[0].role.rpartition(".")
    names = [member.role.rpartition(".")[2] for member in members]
    role = group if tuple(names) == PASSES else f"{group}.{{{','.join(names)}}}"
    return msgspec.structs.replace(members[0], role=role)


def plan_document(plan: Plan) -> dict[str, Any]:
    """Return a plan as plain data, every field present, with its hash and warnings."""
    document: dict[str, Any] = msgspec.to_builtins(plan)
    return {**document, "hash": plan.hash, "warnings": plan.warnings}


def plan_report(plan: Plan) -> Report:
    """Return a plan as a report."""
    citations = Citations()
    blocks: list[Block] = [
        Facts("", plan_facts(plan)),
        decision_table("Decisions", plan.decisions, citations),
        Facts("Switches", sorted(plan.switches.items()) or [("none", "no global precision switch changes what was granted")]),
        Listing("Waits for the device", plan.synchronizations),
        Listing("Notes", plan.notes),
        citations.listing(),
    ]
    return Report(f"{plan.recipe} on {plan.device.key}", blocks)


def plan_facts(plan: Plan) -> list[tuple[str, str]]:
    """Return what a reader needs before the decisions."""
    facts = [("recipe", f"{plan.recipe} (hash {plan.recipe_hash})")]
    if plan.granted != plan.recipe:
        facts.append(("granted", plan.granted))
    facts += [
        ("device", f"{plan.device.name}, architecture {plan.device.arch}" + ("" if plan.device.kind == "hardware" else f", {plan.device.kind}")),
        ("unsupported", f"--on-unsupported {plan.on_unsupported}"),
        ("micro-batches", str(plan.micro_batches)),
        ("runs", "yes" if plan.runnable else "no: " + "; ".join(plan.blockers)),
    ]
    return facts


def decision_table(title: str, decisions: Sequence[Decision], citations: Citations) -> Table:
    """Return decisions as a table, identical passes joined."""
    columns = (Column("role"), Column("asked"), Column("granted"), Column("level", keep=True), Column("sources"), Column("reason", detail=True))
    rows = []
    for decision in fold(decisions):
        role = f"{decision.role} ({decision.op})" if decision.op not in ("", "matmul") else decision.role
        reason = GRANT_TEXT[decision.grant] + decision.reason
        rows.append((role, decision.asked, decision.granted, level_text(decision.level), citations.cite([decision.source]), reason))
    return Table(title, columns, rows)
