"""A record of a training loop that is not ours: what the loop tells, and what can be read from its model and optimizers without touching either."""

from __future__ import annotations

import math
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import NamedTuple

import msgspec
import torch

from mpbackend import __version__
from mpbackend.device import Kind
from mpbackend.errors import SessionError
from mpbackend.observe.classes import observed_classes
from mpbackend.observe.record import CLASSES, ClassReading, Number, Run, RunRecord, StepRow, Totals, to_number
from mpbackend.observe.record_writer import RecordWriter, count_totals
from mpbackend.observe.stated import LARGEST, parse_settings, stated_device, stated_recipe
from mpbackend.plugins import load_plugins
from mpbackend.train.data import DataWatch, weights_fingerprint
from mpbackend.train.journal import FLUSH_SECONDS, FLUSH_STEPS, learning_rate, notes_on
from mpbackend.train.step import read_scalars

Scalar = float | torch.Tensor
NOTES = (
    "written by a loop that is not ours: recipe, device and kind are as stated, and of the arithmetic nothing was observed but the formats that are held",
    "step times are the host's, from one call of step() to the next",
)
NOT_PLANNED = "not planned"


class Pending(NamedTuple):
    """A step whose tensors have not been read: a row, and its scalars by field or, after a dot, by metric."""

    row: StepRow
    scalars: dict[str, Scalar]


class Recorder:
    """Writes a record that ``mpbackend compare`` takes like that of a session, from any loop.

    Nothing of the model, the optimizers or the device's state is changed, and a step reads nothing from the device: its scalars stay there and are read in one
    transfer after the first step and then after every 50, or 5 seconds. What is not given is unknown to a comparison. Of several ranks one records.

    Args:
        folder: folder of the new record.
        recipe: the recipe that the loop is said to follow, such as ``bf16``.
        device: key of the device, of those that ``mpbackend devices --known`` lists; empty for unknown.
        kind: whether that device is hardware.
        seed: seed of the run, 0 to 2^63 - 1, or None.
        model: for the fingerprint of the weights as they are now, and the formats that are held after the first step.
        optimizers: one or several, for their names and the learning rate.
        settings: what else a comparison asks for; see ``mpbackend.observe.stated.parse_settings``. Stated values replace those that are read.

    Raises:
        UnknownNameError: no such recipe or device.
        DocumentError: a setting is refused, or the folder holds a record.
        SessionError: the seed is no seed.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        recipe: str,
        *,
        device: str = "",
        kind: Kind = "hardware",
        seed: int | None = None,
        model: torch.nn.Module | None = None,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
        settings: Mapping[str, object] | None = None,
    ) -> None:
        if seed is not None and not (isinstance(seed, int) and 0 <= seed <= LARGEST):
            raise SessionError(f"Recorder(seed={seed!r:.40})", found="no seed", remedy="give a whole number from 0 to 2**63 - 1, or None")
        plugins = load_plugins()
        self._stated = parse_settings(settings or {})
        self._model = model
        self._optimizers = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
        self._record = RunRecord(
            run=Run(id=uuid.uuid4().hex[:12], seed=seed, kind=kind),
            environment={"mpbackend": __version__, "torch": str(torch.__version__)},
            device=stated_device(device, kind, plugins),
            recipe=stated_recipe(recipe, plugins),
            plan=(),
            notes=NOTES,
        )
        self._weights = {} if model is None else {"weights": weights_fingerprint(model)}
        self._classes: dict[str, ClassReading] = {}
        self._data = DataWatch()
        self._totals = Totals()
        self._pending: list[Pending] = []
        self._steps = 0
        self._marked: float | None = None
        self._flushed = time.monotonic()
        self._writer = RecordWriter(folder)  # last: nothing is written when anything above fails
        try:
            self._write([])
        except BaseException:
            self._writer.discard()
            raise

    def __enter__(self) -> Recorder:
        """Return the recorder."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Write what is pending, also after an error of the loop, and close."""
        if error is None:
            self.close()
        else:
            with notes_on(error):
                self.close()

    def batch(self, batch: object) -> None:
        """Count and fingerprint a batch of the step under way, as ``Session.watch`` does: the first 8 and then one in 50 are hashed.

        Args:
            batch: any nesting of tuples, lists and mappings; the first tensor has the samples in its first dimension.
        """
        self._check_open("batch()")
        self._data.count(batch)

    def step(
        self,
        loss: Scalar | None,
        *,
        grad_norm: Scalar | None = None,
        scale: Scalar = 1.0,
        stepped: bool | torch.Tensor = True,
        reason: str = "",
        lr: Scalar | None = None,
        ms: float | None = None,
        metrics: Mapping[str, Scalar] | None = None,
    ) -> None:
        """Add one optimizer step. Call it after the optimizer has stepped and before gradients are cleared and schedulers step.

        Args:
            loss: mean over the step's micro-batches, not scaled: a number or a tensor with one element.
            grad_norm: L2 norm of the unscaled gradients before clipping.
            scale: loss scale that the step used, positive.
            stepped: whether the optimizer stepped; a tensor is read with the others.
            reason: why it did not.
            lr: learning rate of the step; None takes that of the first parameter group.
            ms: milliseconds since the step before; None takes the host's time between the calls.
            metrics: numbers of your own by name, such as a validation loss.

        Raises:
            SessionError: a value is not one number, or the recorder is closed.
        """
        self._check_open("step()")
        now = time.perf_counter()
        given: dict[str, Scalar | None] = {"loss": loss, "grad_norm": grad_norm, "scale": scale, "stepped": stepped, "ms": ms}
        given["lr"] = learning_rate(self._optimizers) if lr is None and self._optimizers else lr
        given.update({f"metrics.{name}": value for name, value in (metrics or {}).items()})
        scalars = {name: checked(name, value) for name, value in given.items() if value is not None}
        if ms is None and self._marked is not None:
            scalars["ms"] = (now - self._marked) * 1000
        self._marked = now
        self._steps += 1
        samples, tokens = self._data.take()
        row = StepRow(step=self._steps, stepped=True, reason=str(reason), samples=self._stated.samples or samples, tokens=tokens)
        self._pending.append(Pending(row, scalars))
        if self._steps == 1:
            self._look()
        if self._steps == 1 or len(self._pending) >= FLUSH_STEPS or time.monotonic() - self._flushed >= FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Read the pending steps from the device and write them; ``DocumentError`` when they cannot be written."""
        pending, self._pending = self._pending, []
        self._flushed = time.monotonic()
        self._write(read_rows(pending))

    def close(self) -> None:
        """Write what is pending and close the record; a second call does nothing."""
        if self._writer.open:
            try:
                self.flush()
            finally:
                self._writer.close()

    def _check_open(self, asked: str) -> None:
        if not self._writer.open:
            raise SessionError(asked, found="the recorder is closed", remedy="make a new one in a new folder")

    def _look(self) -> None:
        """Note the formats that the model and the optimizers hold; reads no values."""
        if self._model is not None:
            seen = observed_classes(self._model, self._optimizers, {})
            self._classes = {name: ClassReading(asked=NOT_PLANNED, observed=seen.get(name, {})) for name in CLASSES}

    def _write(self, rows: list[StepRow]) -> None:
        self._writer.append(rows)
        self._totals = count_totals(rows, self._totals)
        data = {"data": self._data.fingerprint} if self._data.batches else {}
        read = {"ranks": str(ranks())}
        if self._optimizers:
            read["optimizers"] = ", ".join(type(item).__name__ for item in self._optimizers)
        self._writer.write(
            msgspec.structs.replace(
                self._record,
                classes=self._classes,
                settings={**read, **self._stated.settings},
                fingerprints={**data, **self._weights, **self._stated.fingerprints},
                totals=self._totals,
            )
        )


def ranks() -> int:
    """Return the processes of the default group of ``torch.distributed``; 1 where there is none."""
    return torch.distributed.get_world_size() if torch.distributed.is_available() and torch.distributed.is_initialized() else 1


def checked(name: str, value: object) -> Scalar:
    """Return a number, or a copy of a tensor with one element where it is, so that a loop may go on adding to its own.

    Raises:
        SessionError: anything else.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex() and not value.is_meta:
        scalar = value.detach().reshape(())
        return scalar.clone() if scalar.is_floating_point() else scalar.to(torch.float32)
    if not isinstance(value, (torch.Tensor, str)):
        try:
            return float(value)  # type: ignore[arg-type] # whatever float() takes
        except (TypeError, ValueError, OverflowError):
            pass
    found = f"a tensor of shape {tuple(value.shape)} and {value.dtype}" if isinstance(value, torch.Tensor) else f"{value!r:.40}"
    raise SessionError(f"step({name.removeprefix('metrics.')})", found=f"{found}, which is not one number", remedy="give a number or a tensor with one element")


def read_rows(pending: Sequence[Pending]) -> list[StepRow]:
    """Return finished rows, with one transfer from each device that holds scalars.

    Raises:
        SessionError: a loss scale is not positive.
    """
    waiting: dict[torch.device, list[tuple[int, str, torch.Tensor]]] = {}
    numbers: list[dict[str, float]] = [{} for _ in pending]
    for index, (_, scalars) in enumerate(pending):
        for name, value in scalars.items():
            if isinstance(value, torch.Tensor):
                waiting.setdefault(value.device, []).append((index, name, value))
            else:
                numbers[index][name] = value
    for entries in waiting.values():
        for (index, name, _), number in zip(entries, read_scalars([value for *_, value in entries]), strict=True):
            numbers[index][name] = number
    return [finished(row, scalars) for (row, _), scalars in zip(pending, numbers, strict=True)]


def finished(row: StepRow, scalars: Mapping[str, float]) -> StepRow:
    """Return a row with its numbers."""
    if not (math.isfinite(scalars["scale"]) and scalars["scale"] > 0):
        raise SessionError(f"step {row.step}", found=f"a loss scale of {scalars['scale']:g}", remedy="a loss scale is a positive number")
    named: dict[str, Number] = {name: to_number(scalars[name]) for name in ("loss", "grad_norm", "lr", "ms") if name in scalars}
    stepped = bool(scalars["stepped"])
    return StepRow(
        step=row.step,
        loss=named.get("loss"),
        grad_norm=named.get("grad_norm"),
        lr=named.get("lr"),
        ms=named.get("ms"),
        scale=scalars["scale"],
        stepped=stepped,
        reason="" if stepped else row.reason or "skipped, says the loop",
        nonfinite=any(not math.isfinite(scalars[name]) for name in ("loss", "grad_norm") if name in scalars),
        samples=row.samples,
        tokens=row.tokens,
        metrics={name.removeprefix("metrics."): to_number(value) for name, value in scalars.items() if name.startswith("metrics.")},
    )
