"""What a session tells about itself: rows, record and account."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch

from mpbackend.errors import SessionError
from mpbackend.observe.record import StepRow
from mpbackend.train.data import DataWatch
from mpbackend.train.journal import Journal, LearningRate, Pending
from mpbackend.train.step import StepResult

if TYPE_CHECKING:
    from mpbackend.backend import Clock
    from mpbackend.train.device_scale import DeviceScale
    from mpbackend.train.loss_scale import LossScale
    from mpbackend.train.recording import Recording
    from mpbackend.train.window import Window


BatchT = TypeVar("BatchT")


class SessionRecord:
    """The part of a session that reports.

    Args:
        model: the model.
        optimizers: the optimizers.
        clock: the device's clock.
        recording: writes the record, or None.

    Attributes:
        model: the model.
        optimizers: the optimizers.
        steps: steps so far, skipped ones included.
        segment: how often the run was resumed.
        counters: what the session put right or noticed, by name.
        data: counts and fingerprints the batches.
        loss_scale: the state of loss scaling.
    """

    loss_scale: LossScale | DeviceScale

    def __init__(self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], clock: Clock, recording: Recording | None) -> None:
        self.model = model
        self.optimizers = tuple(optimizers)
        self.steps = 0
        self.segment = 0
        self.counters: dict[str, int] = {}
        self._closed = False
        self._recording = recording
        self._clock = clock
        self.data = DataWatch()
        self._journal = Journal(clock)

    def _check_open(self, asked: str) -> None:
        if self._closed:
            raise SessionError(asked, found="the session is closed", remedy="prepare a new one")

    def count(self, name: str) -> None:
        """Count one event; the record holds the counters."""
        self.counters[name] = self.counters.get(name, 0) + 1

    def watch(self, loader: Iterable[BatchT], *, resume: bool | None = None, name: str = "data") -> Iterator[BatchT]:
        """Yield the batches of ``loader`` unchanged; count samples and tokens, and fingerprint the data. See ``mpbackend.train.data``.

        Args:
            loader: what yields batches.
            resume: None goes on where a checkpoint was taken, with the loader of the saved run only; True with any; False begins anew, for example when the
                loader stands there already.
            name: tells apart what is watched at the same time or in turns.
        """
        return self.data.watch(loader, resume=resume, name=name)

    def finish_step(self, result: StepResult, window: Window, lr: LearningRate) -> StepResult:
        """Count a step and keep its row; returns the result."""
        self.steps += 1
        samples, tokens = self.data.take()
        recording = self._recording
        if recording is not None:
            recording.finish_step(self.model, self.optimizers, stepped=not recording.observing or result.stepped)
        due = self._journal.add(Pending.of(self.steps, window, result, lr, self._clock.mark(), samples, tokens))
        if recording is not None and (due or self.steps == 1 or (result.verdict is None and result.nonfinite)):
            self.write_record()
        return result

    def resume(self, *, steps: int, segment: int) -> None:
        """Count on from a checkpoint, in a new segment of the record."""
        self.steps, self.segment = steps, segment
        if self._recording is not None:
            self._recording.resume(segment, self.model)

    def log(self, **metrics: float) -> None:
        """Add metrics by name to the row of the step that is being built; a tensor is read at once. ``SessionError`` when one is no number."""
        self._journal.log(self.steps + 1, metrics)

    def drain(self) -> Iterator[StepRow]:
        """Yield a row of plain numbers for every finished step that was not drained yet; reads the device once.

        Without a record the last 4,096 rows are kept.
        """
        self.write_record()
        return self._journal.drain()

    def write_record(self) -> None:
        """Read the pending rows in one transfer and, when recording, write them."""
        rows = self._journal.read()
        if self._recording is not None and self._recording.open:
            self._recording.write(rows, self.data.fingerprint, self._told())

    def _told(self) -> dict[str, int]:
        """Return the counters, and those of loss scaling: the search for a first scale apart from the steady state. Reads a scale that lives on the device."""
        if not self.loss_scale.dynamic:
            return self.counters
        state = self.loss_scale.state_dict()
        return {**self.counters, "startup_skips": state["startup_skips"], "skips": state["skips"]}

    def account(self) -> str:
        """Return the five classes, asked and observed, as a table.

        Raises:
            SessionError: nothing was observed: no record was asked for, or no step was made.
        """
        if self._recording is not None and self.steps:
            return self._recording.account()
        raise SessionError("account()", found="no step was observed", remedy="prepare with record=..., then make one step")
