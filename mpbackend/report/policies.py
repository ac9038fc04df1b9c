"""What each backend's autocast does with every operator, side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_args

from mpbackend.backend import PolicyKind
from mpbackend.report.view import Block, Column, Facts, Listing, Report, Table

if TYPE_CHECKING:
    from mpbackend.train.outcomes import Outcome

NOT_LISTED = "not listed"
"""What stands for the policy of an operator that a backend's autocast leaves alone: it runs in the format of its operands."""

KINDS: tuple[str, ...] = get_args(PolicyKind)

SIXTEEN_BIT = ("bf16", "fp16")
"""Formats of operands that tell whether an operator works in fp32."""

SHOWN_REFUSALS = 12
"""Most refusals that are listed with their reasons outside of JSON."""


@dataclass(frozen=True, kw_only=True)
class BackendPolicy:
    """The policy of one backend.

    Attributes:
        backend: its name.
        autocast_key: name of its autocast key.
        policy: operator to policy: the backend's own, and fp32 for those that were pinned.
        native: operators that the backend lists by itself.
        dispatcher: operators with a kernel under the key in this process, before anything was pinned.
        pinned: operators that were given a kernel, so that they run in fp32.
        method: how ``outcomes`` were seen: ``run``, ``fake``, ``not run``.
        reason: what a reader must know about that.
        outcomes: operator, to format of its operands, to what came of it.
    """

    backend: str
    autocast_key: str
    policy: Mapping[str, PolicyKind]
    native: frozenset[str]
    dispatcher: frozenset[str]
    pinned: tuple[str, ...] = ()
    method: str = "not run"
    reason: str = ""
    outcomes: Mapping[str, Mapping[str, Outcome]] = field(default_factory=dict)

    def kind(self, op: str) -> str:
        """Return the policy of an operator, ``not listed`` without one."""
        return self.policy.get(op, NOT_LISTED)

    @property
    def fits_dispatcher(self) -> bool | None:
        """Whether the backend lists the operators that the dispatcher has kernels for; None where it has none in this process."""
        return self.native == self.dispatcher if self.dispatcher else None

    def wide(self, ops: Iterable[str]) -> dict[str, bool]:
        """Return whether operators are seen to work in fp32 on 16-bit operands, results and every step inside; those that ran only."""
        seen = {op: [outcome for inputs, outcome in self.outcomes.get(op, {}).items() if inputs in SIXTEEN_BIT and not outcome.refused] for op in ops}
        return {op: all({*outcome.out, *outcome.inside} == {"fp32"} for outcome in outcomes) for op, outcomes in seen.items() if outcomes}


@dataclass(frozen=True, kw_only=True)
class Survey:
    """The policies of several backends, or of one.

    Attributes:
        torch: version of the installed torch.
        pinned: whether the sensitive operators are pinned to fp32.
        sensitive: the operators that are pinned then.
        backends: what was found, in the order asked for.
        errors: backend to why its policy could not be had.
        ops: the operators to list, sorted; those of every backend unless fewer were asked for.
    """

    torch: str
    pinned: bool
    sensitive: frozenset[str]
    backends: tuple[BackendPolicy, ...]
    errors: Mapping[str, str]
    ops: tuple[str, ...]

    @property
    def listed(self) -> frozenset[str]:
        """The operators that any backend lists."""
        return frozenset().union(*(found.policy for found in self.backends))

    def differs(self, op: str) -> bool:
        """Tell whether backends have different policies for an operator."""
        return len({found.kind(op) for found in self.backends}) > 1

    def results_differ(self, op: str) -> bool | None:
        """Tell whether an operator returns different formats for the same operands; None where fewer than two backends ran it."""
        seen: dict[str, set[tuple[str, ...]]] = {}
        counts: dict[str, int] = {}
        for found in self.backends:
            for inputs, outcome in found.outcomes.get(op, {}).items():
                if not outcome.refused:
                    seen.setdefault(inputs, set()).add(outcome.out)
                    counts[inputs] = counts.get(inputs, 0) + 1
        compared = [inputs for inputs, count in counts.items() if count > 1]
        return any(len(seen[inputs]) > 1 for inputs in compared) if compared else None


def count_kinds(found: BackendPolicy) -> dict[str, int]:
    """Count the operators of each policy, zero included."""
    return {kind: sum(1 for value in found.policy.values() if value == kind) for kind in KINDS}


def policies_document(survey: Survey) -> dict[str, Any]:
    """Return a survey as plain data: a summary over all operators, and one entry for each that is to be listed."""
    checked = [found for found in survey.backends if found.dispatcher]
    dispatcher = frozenset().union(*(found.dispatcher for found in checked))
    differing = [op for op in sorted(survey.listed) if survey.differs(op)]
    summary: dict[str, Any] = {
        "torch": survey.torch,
        "pinned": survey.pinned,
        "ops": len(survey.listed),
        "dispatcher": {"ops": len(dispatcher), "equal": frozenset().union(*(found.native for found in checked)) == dispatcher if checked else None},
        "backends": {found.backend: backend_summary(survey, found) for found in survey.backends},
        "sensitive": {
            "ops": len(survey.sensitive),
            "differ": [op for op in differing if op in survey.sensitive],
            "backends": {found.backend: wide_summary(found.wide(sorted(survey.sensitive))) for found in survey.backends if found.method != "not run"},
        },
        "errors": dict(survey.errors),
    }
    document: dict[str, Any] = {"summary": summary, "ops": [op_document(survey, op) for op in survey.ops]}
    if len(survey.backends) > 1:
        compared = [differs for op in survey.ops if (differs := survey.results_differ(op)) is not None]
        summary |= {"same": len(survey.listed) - len(differing), "differ": len(differing)}
        summary |= {"results_compared": len(compared), "results_differ": sum(compared)}
        document["differ"] = differing
    return document


def wide_summary(wide: Mapping[str, bool]) -> dict[str, Any]:
    """Return how many operators ran on 16-bit operands, and which of them were not in fp32 throughout."""
    return {"ran": len(wide), "not_fp32": [op for op, is_wide in wide.items() if not is_wide]}


def backend_summary(survey: Survey, found: BackendPolicy) -> dict[str, Any]:
    """Return the counts of one backend, and how its own list compares with the dispatcher's."""
    return {
        "autocast_key": found.autocast_key,
        "ops": len(found.native),
        "pinned": list(found.pinned),
        "policies": count_kinds(found),
        "dispatcher": {
            "ops": len(found.dispatcher),
            "equal": found.fits_dispatcher,
            "only_listed": sorted(found.native - found.dispatcher) if found.dispatcher else [],
            "only_dispatcher": sorted(found.dispatcher - found.native),
        },
        "method": found.method,
        "reason": found.reason,
        "ran": sum(1 for op in survey.ops if any(not outcome.refused for outcome in found.outcomes.get(op, {}).values())),
    }


def op_document(survey: Survey, op: str) -> dict[str, Any]:
    """Return one operator on every backend."""
    entry: dict[str, Any] = {"op": op, "sensitive": op in survey.sensitive}
    if len(survey.backends) > 1:
        entry |= {"differs": survey.differs(op), "results_differ": survey.results_differ(op)}
    entry["backends"] = {
        found.backend: {
            "policy": found.kind(op),
            "outcomes": {inputs: outcome_document(outcome) for inputs, outcome in found.outcomes.get(op, {}).items()},
        }
        for found in survey.backends
    }
    return entry


def outcome_document(outcome: Outcome) -> dict[str, Any]:
    """Return what came of an operator."""
    return {"refused": outcome.refused} if outcome.refused else {"out": list(outcome.out), "inside": list(outcome.inside)}


def policies_report(survey: Survey) -> Report:
    """Return a survey as a report: operators whose policies differ before those whose do not, the summary first."""
    document = policies_document(survey)
    blocks: list[Block] = [Facts("", summary_facts(survey, document["summary"]))]
    groups = {"Policies differ": True, "Policies agree": False} if len(survey.backends) > 1 else {"": False}
    for title, differs in groups.items():
        ops = [op for op in survey.ops if survey.differs(op) is differs]
        if ops:
            blocks.append(ops_table(survey, f"{title} ({len(ops)})" if title else "", ops))
    blocks.append(Listing("Did not run", refusals(survey)))
    blocks.append(Listing("Unavailable", [f"{name}: {cause}" for name, cause in survey.errors.items()]))
    blocks.append(Listing("Legend", legend(survey)))
    names = ", ".join(found.backend for found in survey.backends)
    return Report(f"Autocast policy of {names}" + (", sensitive operators pinned to fp32" if survey.pinned else ""), blocks)


def summary_facts(survey: Survey, summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the counts of a survey in words."""
    facts = [("torch", survey.torch), ("operators", f"{summary['ops']}; {dispatcher_text(summary['dispatcher'])}")]
    for name, entry in summary["backends"].items():
        pins = f", {len(entry['pinned'])} pinned" if survey.pinned else ""
        kinds = ", ".join(f"{count} {kind}" for kind, count in entry["policies"].items() if count)
        how = ", ".join(part for part in (entry["method"], entry["reason"]) if part)
        facts.append((name, f"{entry['ops']} listed{pins}: {kinds or 'none'}; {dispatcher_text(entry['dispatcher'])}; results: {how}"))
    if "differ" in summary:
        facts.append(("policies", f"{summary['differ']} differ, {summary['same']} agree"))
        facts.append(("results", f"formats differ for {summary['results_differ']} of {summary['results_compared']} operators that more than one backend ran"))
    sensitive = summary["sensitive"]
    texts = [f"{sensitive['ops']} operators" + (f", policies of {len(sensitive['differ'])} differ" if "differ" in summary else "")]
    texts += [f"on {name} {len(seen['not_fp32'])} of {seen['ran']} that ran are not fp32 throughout" for name, seen in sensitive["backends"].items()]
    return [*facts, ("sensitive", "; ".join(texts))]


def dispatcher_text(entry: Mapping[str, Any]) -> str:
    """Return how lists compare with the dispatcher's, in words."""
    if not entry["ops"]:
        return "no kernels in this process to check with"
    return f"the dispatcher has the same {entry['ops']}" if entry["equal"] else f"not the {entry['ops']} that the dispatcher has"


def ops_table(survey: Survey, title: str, ops: Sequence[str]) -> Table:
    """Return operators as a table: policy and formats of the results on each backend."""
    columns = [Column("operator", keep=True), Column("sensitive", wide=True)]
    for found in survey.backends:
        columns.append(Column(found.backend))
        if found.method != "not run":
            columns.append(Column("returns"))
    rows = []
    for op in ops:
        row = [op, "yes" if op in survey.sensitive else ""]
        for found in survey.backends:
            row += [found.kind(op)] if found.method == "not run" else [found.kind(op), outcomes_text(found.outcomes.get(op, {}))]
        rows.append(row)
    return Table(title, columns, rows)


def outcomes_text(outcomes: Mapping[str, Outcome]) -> str:
    """Return the formats of an operator's results, one for each format of its operands, or one where all are the same."""
    if not outcomes:
        return "not run"
    texts = ["+".join(outcome.out) or "refused" for outcome in outcomes.values()]
    hidden = sorted({name for outcome in outcomes.values() for name in set(outcome.inside) - set(outcome.out)})
    shown = texts[0] if len(set(texts)) == 1 else " ".join(texts)
    return shown + (f" ({', '.join(hidden)} inside)" if hidden else "")


def refusals(survey: Survey) -> list[str]:
    """Return what did not run and why, or how much when it is much."""
    found = [
        f"{entry.backend}: {op} on {', '.join(inputs for inputs, outcome in outcomes.items() if outcome.refused)}: {reasons[0]}"
        for entry in survey.backends
        for op, outcomes in entry.outcomes.items()
        if op in survey.ops and (reasons := [outcome.refused for outcome in outcomes.values() if outcome.refused])
    ]
    if len(found) <= SHOWN_REFUSALS:
        return found
    counts = {entry.backend: sum(line.startswith(f"{entry.backend}: ") for line in found) for entry in survey.backends}
    return [f"{count} operators on {name}" for name, count in counts.items() if count] + ["--format json says why"]


def legend(survey: Survey) -> list[str]:
    """Return what the words of the tables mean."""
    lines = [
        "lower: runs in autocast's 16-bit format; promote: in the widest format of its operands; banned: raises; not listed: in the format of its operands",
        "returns: formats of the results for operands in bf16, fp16 and fp32 under autocast of bf16, fp16 and bf16; one where all are the same",
    ]
    if any(found.method == "fake" for found in survey.backends):
        lines.append("fake: through torch's own autocast kernels on tensors without memory; a device may still refuse a format")
    return lines
