"""Writing the record of a session: what was planned, and what is observed on sampled steps."""

from __future__ import annotations

import os
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Literal

import msgspec
import torch

from mpbackend import __version__
from mpbackend.formats import FORMATS
from mpbackend.observe.audit import Observer, SavedActivations
from mpbackend.observe.classes import observed_classes
from mpbackend.observe.record import ClassReading, ComputeReading, RecipeName, Run, RunRecord, StepRow, SwitchReading, Totals, asked_classes
from mpbackend.observe.record_writer import RecordWriter, count_totals
from mpbackend.train.data import weights_fingerprint

if TYPE_CHECKING:
    from mpbackend.backend import Backend
    from mpbackend.planning import Plan
    from mpbackend.train.distributed import Ranks
    from mpbackend.train.weights import WorkingWeights

OBSERVE_EVERY = 1000
"""Steps between observations of dispatched operations, saved activations and held formats; the first step is always observed."""

SwitchReport = Callable[[], Mapping[str, Mapping[str, str]]]


class Recording:
    """The record of one session while it is being written.

    Args:
        folder: where to write.
        plan: the plan of the session.
        backend: the backend, for environment and memory.
        model: the model, whose parameters and buffers are no activations.
        conversion: one row per converted layer.
        switches: reports the state of the fence.
        seed: seed of the run, or None.
        settings: how the session was prepared.
        start: fingerprint of the weights before anything changed their formats.
        weights: what stands between the parameters and the optimizers, or None.
        ranks: the ranks of the run, or None for one process.

    Attributes:
        observing: whether the present step is observed.
        segment: how often the run was resumed.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        plan: Plan,
        backend: Backend,
        model: torch.nn.Module,
        conversion: Sequence[Mapping[str, str]],
        switches: SwitchReport,
        seed: int | None,
        settings: Mapping[str, str],
        *,
        start: str,
        weights: WorkingWeights | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self._plan = plan
        self._switches = switches
        self._meter = backend.memory(plan.device)
        self._meter.reset_peak()
        self._conversion = tuple(dict(row) for row in conversion)
        self._run = Run(id=uuid.uuid4().hex[:12], seed=seed, kind=plan.device.kind)
        self._environment = {"mpbackend": __version__, "torch": torch.__version__, **backend.environment(plan.device)}
        self._weights = start
        self._totals = Totals()
        self._classes: dict[str, ClassReading] = {name: ClassReading(asked=asked) for name, asked in asked_classes(plan.effective.flat()).items()}
        self._level = next((decision.level for decision in plan.decisions if decision.role == "compute.forward"), "")
        self._compute = ComputeReading(level=self._level)
        self._settings = {**settings, "communication": "none, one process" if ranks is None else ranks.communication}
        self._settings["ranks"] = "1" if ranks is None else str(ranks.size)
        self._working = weights
        self._lost = {"lost_updates": 0, "sampled_updates": 0}
        self._steps = 0
        self._held = [*model.parameters(), *model.buffers()]
        self._observe()
        self.observing = True
        self.segment = 0
        self._writer = RecordWriter(folder)  # last: nothing is written when anything above fails

    def _observe(self) -> None:
        if self._working is not None:
            self._working.sample = True
        self._observer = Observer()
        self._activations = SavedActivations(self._held)

    def enter(self, phase: Literal["forward", "backward"], stack: ExitStack) -> None:
        """Observe a pass of an observed step: its dispatched operations and, forward, the activations it saves."""
        if phase == "forward":
            stack.enter_context(self._activations)
        stack.enter_context(self._observer)

    def finish_step(self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], *, stepped: bool) -> None:
        """Read what an observed step held, before its gradients are cleared; a skipped step is observed again."""
        self._steps += 1
        if self.observing and stepped:
            weights = self._working
            observed = observed_classes(model, optimizers, self._activations.bytes, state=() if weights is None else weights.held())
            self._count_lost(None if weights is None else weights.take_lost())
            self._classes = {name: ClassReading(asked=reading.asked, observed=observed.get(name, {})) for name, reading in self._classes.items()}
            seen = self._observer.summary()
            self._warn_of_other_formats(seen.shares)
            uncounted = (*seen.uncounted, *self._unseen_layers(seen.shares))
            self._compute = ComputeReading(
                shares=seen.shares,
                flops=seen.flops,
                casts=seen.casts,
                cast_bytes=seen.cast_bytes,
                uncounted=uncounted,
                level=self._level,
                products=seen.products,
                conversions=seen.conversions,
            )
        self.observing = self._steps % OBSERVE_EVERY == 0 or (self.observing and not stepped)
        if self.observing:
            self._observe()

    def _count_lost(self, taken: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """Add the lost updates of an observed step, and say when most of them are."""
        if taken is None:
            return
        lost, considered = torch.stack(taken).tolist()
        self._lost["lost_updates"] += lost
        self._lost["sampled_updates"] += considered

    def _unseen_layers(self, shares: Mapping[str, float]) -> tuple[str, ...]:
        """Return what to name as uncounted: converted layers whose products go past torch's dispatcher, so that no operation was seen in their format."""
        planned = self._plan.effective.compute.forward
        converted = sum(1 for row in self._conversion if row.get("action") in ("converted", "padded"))
        return (f"{converted} converted layers",) if converted and not any(planned in name for name in shares) else ()

    def _warn_of_other_formats(self, shares: Mapping[str, float]) -> None:
        """Warn when an observed step multiplied, and nothing of it in the planned format: a forward pass in another thread or context, say."""
        planned = self._plan.effective.compute.forward
        if planned in FORMATS and FORMATS[planned].bits > 8 and shares and FORMATS[planned].storage not in shares:
            seen = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
            warnings.warn(f"the plan computes in {planned}; step {self._steps} was observed in {seen}", stacklevel=5)

    def write(self, rows: Iterable[StepRow], data_fingerprint: str, counters: Mapping[str, int]) -> None:
        """Append finished rows and replace ``record.json``."""
        finished = list(rows)
        self._writer.append(finished)
        self._totals = count_totals(finished, self._totals)
        memory = self._meter.read()
        self._writer.write(
            RunRecord(
                run=msgspec.structs.replace(self._run, segment=self.segment),
                environment=self._environment,
                device=self._plan.device,
                recipe=RecipeName(text=self._plan.recipe, hash=self._plan.recipe_hash, granted=self._plan.granted),
                plan=self._plan.decisions,
                switches={name: SwitchReading(**reading) for name, reading in self._switches().items()},
                classes=self._classes,
                compute=self._compute,
                settings=self._settings,
                conversion=self._conversion,
                fingerprints={"data": data_fingerprint, "weights": self._weights},
                memory={"allocated": memory.allocated, "peak": memory.peak},
                memory_basis=memory.basis,
                totals=self._totals,
                counters={**counters, **(self._lost if self._lost["sampled_updates"] else {})},
                notes=self._plan.notes,
            )
        )

    def account(self) -> str:
        """Return the five classes, asked and observed, and the effective compute format, as aligned text."""
        lines = [f"{'class':<16} {'asked':<28} observed"]
        for name, reading in self._classes.items():
            seen = ", ".join(f"{fmt} {size:,} B" for fmt, size in sorted(reading.observed.items())) or "none"
            lines.append(f"{name:<16} {reading.asked:<28} {seen}")
        shares = ", ".join(f"{fmt} {share:.1%}" for fmt, share in self._compute.shares.items()) or "no matrix product seen"
        if self._compute.uncounted:
            shares = f"unknown: {', '.join(self._compute.uncounted)} cannot be counted"
        level = "" if self._level in ("native", "library") else f" ({self._level})"
        lines[-1] = f"{'communication':<16} {self._classes['communication'].asked:<28} {self._settings['communication']}"
        lines.append(f"{'compute':<16} {self._plan.effective.compute.forward + level:<28} {shares}")
        return "\n".join(lines)

    def resume(self, segment: int, model: torch.nn.Module) -> None:
        """Count on in a new segment, whose first weights are the ones that were loaded."""
        self.segment = segment
        self._weights = weights_fingerprint(model)

    @property
    def open(self) -> bool:
        """Whether it can be written to."""
        return self._writer.open

    def close(self) -> None:
        """Close the files."""
        self._writer.close()

    def discard(self) -> None:
        """Close the files and remove them: the session was not made."""
        self._writer.discard()
