"""The verdict: first whether two sides are comparable, then whether they are equal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from mpbackend.comparison.conditions import Condition, Question, judge_conditions
from mpbackend.comparison.curves import CUSTOM, Curve, compare_curves
from mpbackend.comparison.deciding import decide, skipped
from mpbackend.comparison.differences import Difference, find_differences
from mpbackend.comparison.equality import Verdict, judge_equality
from mpbackend.comparison.floor import Floor, noise_floor, qualities
from mpbackend.comparison.margin import DEFAULT, parse_margin
from mpbackend.comparison.quality import Better, choose_quality
from mpbackend.comparison.question import choose_question
from mpbackend.comparison.remarks import remarks, scope_of, strayed
from mpbackend.comparison.runs import ComparedRun, Design, Matched, Source, average, match, read_runs
from mpbackend.comparison.skips import Skips, count_skips
from mpbackend.comparison.speed import Speed, compare_speed
from mpbackend.comparison.statistics import Equivalence
from mpbackend.matrix import Matrix, load_matrix
from mpbackend.observe.record import CLASSES, ClassReading


class SideReading(msgspec.Struct, frozen=True, kw_only=True):
    """One run as a comparison names it."""

    name: str
    id: str
    seed: int | None
    recipe: str
    device: str
    kind: str
    quality: float | None


class QualityReading(msgspec.Struct, frozen=True, kw_only=True):
    """What was compared, and within which margin.

    Attributes:
        metric: name of the metric, or ``training loss``.
        basis: how one number a run is made of it, and why this metric.
        better: which of two values is the better one.
        step: last step that all runs have, where it is read.
        margin: in the unit of the metric.
        margin_text: as asked.
    """

    metric: str
    basis: str
    better: Better
    step: int
    margin: float
    margin_text: str


class ClassPair(msgspec.Struct, frozen=True, kw_only=True):
    """One of the five classes in the first run of each side: the format asked for, and the bytes of each format observed."""

    name: str
    baseline: ClassReading
    candidate: ClassReading


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """A comparison of two sides.

    Attributes:
        verdict: ``equivalent``, ``different``, ``inconclusive`` or ``not comparable``.
        reasons: why, the deciding ones first, a clause each.
        question: what was asked.
        question_basis: why that.
        design: how the runs were laid against each other.
        scope: what the verdict is about: seeds, steps and kinds of device.
        limits: what the design can and cannot show.
        baseline: its runs.
        candidate: its runs.
        quality: what was compared.
        conditions: what was the same and what was not, those that matter first.
        differences: between the arithmetic of the two sides, those that decide first.
        classes: the five classes, asked and observed, of the first pair.
        equivalence: the tests; None where none were made.
        floor: the noise floor; None without repeats.
        curves: of every pair.
        skips: of every run.
        speed: of both sides.
        custom_gap: mean relative gap of the losses, the largest of the pairs; None where no losses can be compared.
        within_custom: whether that is below 2 %, a custom that decides nothing here; None where there is no gap.
        notes: what else a reader must know.
    """

    verdict: Verdict
    reasons: tuple[str, ...]
    question: Question
    question_basis: str
    design: Design
    scope: str
    limits: tuple[str, ...]
    baseline: tuple[SideReading, ...]
    candidate: tuple[SideReading, ...]
    quality: QualityReading
    conditions: tuple[Condition, ...]
    differences: tuple[Difference, ...]
    classes: tuple[ClassPair, ...]
    equivalence: Equivalence | None
    floor: Floor | None
    curves: tuple[Curve, ...]
    skips: tuple[Skips, ...]
    speed: Speed
    custom_gap: float | None
    within_custom: bool | None
    notes: tuple[str, ...]


def compare(
    baseline: Source | Iterable[Source],
    candidate: Source | Iterable[Source],
    *,
    question: str | None = None,
    margin: str | float = DEFAULT,
    metric: str | None = None,
    matrix: Matrix | None = None,
) -> Comparison:
    """Compare recorded runs at equal quality.

    Args:
        baseline: folders of records, or records; several for several seeds, or for repeats of one seed.
        candidate: the same for what is compared with it.
        question: ``vendor`` (one recipe, devices may differ) or ``recipe`` (one device, recipes may differ, the baseline is fp32); None for the one that fits.
        margin: difference of quality that counts as equal: ``0.1%`` of the baseline's, or a number in its unit.
        metric: metric that is the quality; None for the validation metric of the records, else the training loss at the end.
        matrix: says what switches of an architecture mean; the shipped one if omitted.

    Raises:
        DocumentError: a record cannot be read, or an argument is none of the allowed values.
    """
    asked = parse_margin(margin)
    notes: list[str] = []
    sides = [without_doubles(read_runs(side, given), side, notes) for side, given in (("baseline", baseline), ("candidate", candidate))]
    chosen = choose_question(sides[0], sides[1], question)
    matched = match(sides[0], sides[1])
    taking = (*matched.baseline, *matched.candidate)
    last = min(run.last_step for run in taking)
    quality = choose_quality(taking, metric, last)
    values = qualities(matched.baseline, quality, last)
    reference = average(values) if values else None
    size = asked.of(reference)
    known = load_matrix() if matrix is None else matrix
    conditions = judge_conditions(matched, chosen.question)
    differences = all_differences(matched, chosen.question, known)
    curves = tuple(compare_curves(*pair) for pair in matched.pairs)
    floor = noise_floor(matched, quality, last)
    skips = tuple(count_skips(run) for run in taking)
    answer = judge_equality(matched, quality, last, size, curves, floor)
    off_plan = [] if chosen.question == "vendor" else strayed(taking, known)
    verdict, reasons = decide(conditions, differences, off_plan, answer, skipped(skips, matched, answer, curves))
    gaps = [curve.mean_gap for curve in curves if curve.mean_gap is not None]
    return Comparison(
        verdict=verdict,
        reasons=tuple(reasons),
        question=chosen.question,
        question_basis=chosen.basis,
        design=matched.design,
        scope=scope_of(matched, last),
        limits=answer.limits,
        baseline=tuple(side_reading(run, quality.at_the_end(run, last)) for run in matched.baseline),
        candidate=tuple(side_reading(run, quality.at_the_end(run, last)) for run in matched.candidate),
        quality=QualityReading(metric=quality.metric, basis=quality.basis, better=quality.better, step=last, margin=size, margin_text=asked.text),
        conditions=tuple(conditions),
        differences=tuple(differences),
        classes=class_pairs(*matched.pairs[0]),
        equivalence=answer.equivalence,
        floor=floor,
        curves=curves,
        skips=skips,
        speed=compare_speed(matched.baseline, matched.candidate, quality, reference, size),
        custom_gap=max(gaps) if gaps else None,
        within_custom=max(gaps) < CUSTOM if gaps else None,
        notes=(*notes, *remarks(matched, chosen.question, known)),
    )


def all_differences(matched: Matched, question: Question, matrix: Matrix) -> list[Difference]:
    """Return the differences of every pair, each once, those that decide first."""
    found = [difference for pair in matched.pairs for difference in find_differences(*pair, question, matrix)]
    unique = list({(difference.kind, difference.name, difference.baseline, difference.candidate): difference for difference in found}.values())
    return sorted(unique, key=lambda difference: not difference.decides)


def class_pairs(one: ComparedRun, other: ComparedRun) -> tuple[ClassPair, ...]:
    """Return the five classes of two runs side by side; a class that a record lacks was neither asked nor observed."""
    none = ClassReading(asked="not recorded")
    sides = [run.record.classes for run in (one, other)]
    return tuple(
        ClassPair(name=name, baseline=sides[0].get(name, none), candidate=sides[1].get(name, none)) for name in CLASSES if name in {**sides[0], **sides[1]}
    )


def side_reading(run: ComparedRun, value: float | None) -> SideReading:
    """Return a run as a comparison names it."""
    record = run.record
    identity = {"name": run.name, "id": record.run.id, "recipe": record.recipe.text, "device": record.device.key, "kind": str(record.run.kind)}
    return SideReading(**identity, seed=run.seed, quality=value)


def without_doubles(runs: Sequence[ComparedRun], side: str, notes: list[str]) -> tuple[ComparedRun, ...]:
    """Return runs each once: a record that is given twice is no repeat."""
    kept: dict[tuple[str, int], ComparedRun] = {}
    for run in runs:
        kept.setdefault((run.name, id(run.record) if run.name == run.record.run.id else 0), run)
    if len(kept) < len(runs):
        notes.append(f"a run of the {side} was given more than once and counts once")
    return tuple(kept.values())
