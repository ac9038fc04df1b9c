"""Which of the two questions a comparison answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, get_args

from mpbackend.comparison.conditions import Question
from mpbackend.comparison.readings import device_text, recipe_text
from mpbackend.comparison.runs import ComparedRun
from mpbackend.decisions import Decision
from mpbackend.errors import DocumentError

QUESTIONS: tuple[Question, ...] = get_args(Question)


class Chosen(NamedTuple):
    """A question and why it is asked."""

    question: Question
    basis: str


def choose_question(baseline: Sequence[ComparedRun], candidate: Sequence[ComparedRun], asked: str | None) -> Chosen:
    """Return the question that two sides answer.

    Args:
        baseline: at least one run.
        candidate: at least one run.
        asked: the question, or None to take the one that the records fit.

    Raises:
        DocumentError: there is no such question.
    """
    if asked is not None:
        for question in QUESTIONS:
            if question == asked:
                return Chosen(question, "as asked")
        raise DocumentError(f"question {asked!r}", found="no such question", allowed=QUESTIONS)
    recipes, devices = (len({read(run) for run in (*baseline, *candidate)}) for read in (recipe_text, device_text))
    if recipes == 1:
        return Chosen("vendor", "one recipe on one device" if devices == 1 else "one recipe on several devices")
    if devices == 1:
        return Chosen("recipe", "several recipes on one device")
    return Chosen("vendor", "recipes and devices both differ, so that neither question fits; name one with --question")


def baseline_remark(baseline: Sequence[ComparedRun], question: Question) -> str:
    """Return what to say about a baseline of the question ``recipe`` that does not compute in fp32; empty where there is nothing to say."""
    if question != "recipe":
        return ""
    other = next((decision for run in baseline for decision in run.record.plan if computes_otherwise(decision)), None)
    if other is None:
        return ""
    return f"the baseline computes {other.role} in {other.granted}, not in fp32: an answer is relative to that; a baseline for a recipe is an fp32 run"


def computes_otherwise(decision: Decision) -> bool:
    """Tell whether a decision grants operands of a product another format than fp32."""
    return decision.role.startswith("compute.") and decision.granted != "fp32"
