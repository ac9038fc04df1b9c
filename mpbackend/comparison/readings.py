"""Reading the conditions of a run from its record: one function a condition, None where the record does not say."""

from __future__ import annotations

from collections.abc import Callable

from mpbackend.comparison.runs import ComparedRun, digits

ONE_PROCESS = "none, one process"
"""What a session records as communication where there is none."""


def fingerprint(run: ComparedRun, name: str) -> str | None:
    """Return a fingerprint, None where there is none."""
    return run.record.fingerprints.get(name) or None


def recipe_text(run: ComparedRun) -> str | None:
    """Return text and hash of the recipe."""
    recipe = run.record.recipe
    return f"{recipe.text} ({recipe.hash})" if recipe.hash else None


def device_text(run: ComparedRun) -> str | None:
    """Return the device with its kind where it is no hardware; None where no matrix knows it and the runtime named none."""
    device, kind = run.record.device, run.record.run.kind
    name = f"{device.key} ({device.name})" if device.key in ("", "unknown", device.arch) else device.key
    return (name if kind == "hardware" else f"{name}, {kind}") if device.key or device.name else None


def batch_text(run: ComparedRun) -> str | None:
    """Return the effective batch: samples a step of one process, and the number of processes where it is known."""
    ranks = run.record.settings.get("ranks") or ("1" if run.record.settings.get("communication") == ONE_PROCESS else None)
    counts = {row.samples for row in run.rows if row.samples}
    if ranks is None or not counts:
        return None
    low, high = min(counts), max(counts)
    samples = digits(low) if low == high else f"{digits(low)} to {digits(high)}"
    return f"{samples} samples a step" + ("" if ranks == "1" else f" on each of {ranks} ranks")


def tokens_text(run: ComparedRun) -> str | None:
    """Return tokens a step, None where none were counted."""
    counts = {row.tokens for row in run.rows if row.tokens}
    low, high = min(counts, default=0), max(counts, default=0)
    return None if not counts else f"{digits(low)} a step" if low == high else f"{digits(low)} to {digits(high)} a step"


def start_text(run: ComparedRun) -> str | None:
    """Return where the record begins: a resumed run has a record of its own for each segment."""
    return f"step {digits(run.rows[0].step)}, segment {digits(run.record.run.segment)}" if run.rows else None


def setting(name: str) -> Callable[[ComparedRun], str | None]:
    """Return the reader of one setting of the session."""
    return lambda run: run.record.settings.get(name)


def settings(*names: str) -> Callable[[ComparedRun], str | None]:
    """Return the reader of several settings, None where one is missing."""

    def read(run: ComparedRun) -> str | None:
        values = [run.record.settings.get(name) for name in names]
        return None if None in values else ", ".join(f"{name} {value}" for name, value in zip(names, values, strict=True))

    return read


def torch_version(run: ComparedRun) -> str | None:
    """Return the version of torch without its build, which names a vendor's libraries."""
    version = run.record.environment.get("torch")
    return version.partition("+")[0] if version else None


def environment_text(run: ComparedRun) -> str | None:
    """Return everything else that the backend says about versions and variables."""
    known = {**run.record.device.versions, **run.record.environment}
    return ", ".join(f"{name} {value}" for name, value in sorted(known.items())) or None


def scale_mode(run: ComparedRun) -> str | None:
    """Return the granted mode of loss scaling."""
    return next((decision.granted for decision in run.record.plan if decision.role == "loss_scale.mode"), None)


def text_of(seed: int | None) -> str | None:
    """Return a seed as text."""
    return None if seed is None else digits(seed)
