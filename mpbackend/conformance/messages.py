"""Checks of what a backend says to people: reasons, notes, and refusals that name what was asked."""

from __future__ import annotations

from collections.abc import Iterator

from mpbackend.conformance.answer import Answer, fault, fine, skip
from mpbackend.conformance.subject import Subject
from mpbackend.errors import PlanError, UnknownNameError, shows
from mpbackend.inquiry import ask_implementations, ask_notes
from mpbackend.recipe import PRESETS

LONGEST = 600
"""Characters of a reason: longer ones are not read."""

NOT_A_FORMAT = "fp7_e3m3"


def check_reasons_are_sentences(subject: Subject) -> Answer:
    """Every reason, meaning of a switch and remedy stands on one line, in characters that only show."""
    for where, text in texts(subject):
        problem = fault_of(text)
        if problem:
            return fault(f"{where} {problem}: {text[:80]!r}")
    return fine()


def texts(subject: Subject) -> Iterator[tuple[str, str]]:
    """Yield where it stands, and every text that the backend shows to people."""
    for row in ask_implementations(subject.backend, subject.device):
        yield f"the reason of {row.op} {row.a} x {row.b}", row.reason
    for switch in subject.backend.switches(subject.device):
        yield f"the meaning of {switch.name}", switch.meaning
    yield "the cause", subject.device.cause
    yield "the remedy", subject.device.remedy
    yield "the name", subject.device.name


def fault_of(text: object) -> str:
    """Return what is wrong with a text; empty when nothing is."""
    if not isinstance(text, str):
        return "is no text"
    if "\n" in text or not all(shows(character) for character in text):
        return "has more than one line, or characters that do more than show"
    return f"is longer than {LONGEST} characters" if len(text) > LONGEST else ""


def check_refusals_name_the_device(subject: Subject) -> Answer:
    """A preset that is refused says on one line what was asked, on which device and why; one without an implementation says what is missing."""
    refused = blocked = 0
    for recipe in PRESETS:
        try:
            plan = subject.target.plan(recipe)
        except PlanError as error:
            refused += 1
            if subject.device.key not in str(error) or not error.found:
                return fault(f"{recipe} is refused without device or reason: {error}")
            continue
        if plan.runnable:
            continue
        blocked += 1
        short = [text for text in plan.blockers if ": " not in text or not text.rpartition(": ")[2].strip()]
        if short or not plan.blockers:
            return fault(f"{recipe} does not run, without a reason: {'; '.join(short) or 'no blocker'}")
    return fine(refused=refused, blocked=blocked)


def check_notes(subject: Subject) -> Answer:
    """Notes about a plan are sentences on one line each, no two alike, the same when they are asked for again, and stand in the plan."""
    if not hasattr(subject.backend, "notes"):
        return skip("the backend has no notes")
    counts: dict[str, float | str] = {}
    for recipe in ("fp32", "bf16", "fp16"):
        plan = subject.plan(recipe)
        if isinstance(plan, str):
            continue
        found = ask_notes(subject.backend, plan)
        if found != ask_notes(subject.backend, plan) or plan.notes != found:
            return fault(f"the notes on {recipe} are others when they are asked for again")
        problems = [problem for text in found if (problem := fault_of(text) or ("" if text.strip() else "is empty"))]
        if problems or len(set(found)) < len(found):
            return fault(f"a note on {recipe} {problems[0] if problems else 'stands twice'}")
        counts[recipe] = len(found)
    return Answer(figures=counts)


def check_unknown_product_is_refused(subject: Subject) -> Answer:
    """A product for probes in a format that the device does not multiply is an ``UnknownNameError`` with the name and what there is."""
    product = getattr(subject.backend, "product", None)
    if product is None:
        return skip("the backend has no product for probes")
    try:
        product(subject.device, NOT_A_FORMAT)
    except UnknownNameError as error:
        if NOT_A_FORMAT in str(error) and error.allowed:
            return fine(products=", ".join(error.allowed))
        return fault(f"the refusal names neither the format nor what there is: {error}")
    return fault(f"there is a product of {NOT_A_FORMAT}")
