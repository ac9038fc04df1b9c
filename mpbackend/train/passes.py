"""Which passes over the data a checkpoint keeps, and which pass goes on from it.

Kept are the passes of the training: those that are open and that a step was made with. A pass under ``torch.no_grad()`` counts when nothing else was drawn from
for the step, so a validation does not, whether it comes to its end, is left early or stays open beside the training. An open pass that no step was made
with yet counts where gradients are recorded. A pass of the training that was left early (``break``) keeps its position until a step is made with another
one, unless another pass is open; one that came to its end has none, and neither have those that went along with it, as in ``zip``.

A position goes to the first pass of its name that begins after ``load`` where gradients are recorded; several of one name in the order in which they had begun.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from mpbackend.train.content import PositionContent
from mpbackend.train.position import Pass
from mpbackend.train.random_state import HostState

USER = 7
"""Frames from a warning in here to the call of ``step``."""


class Passes:
    """The passes of one session, in the order in which they began, and the positions that wait for theirs."""

    def __init__(self) -> None:
        self._passes: list[Pass] = []
        self._waiting: list[PositionContent] = []
        self._host: HostState | None = None
        self._settled: list[torch.Generator] = []

    def begin(self, loader: Iterable[Any], *, name: str, resume: bool | None) -> Pass:
        """Return a pass that stands before its next batch; see ``mpbackend.train.data.DataWatch.watch``.

        Raises:
            SessionError: a position waits for this pass, and the loader is not that of the saved run. The position goes on waiting.
        """
        present = Pass(loader, name, learns=torch.is_grad_enabled())
        position = self._position_for(present, resume)
        if position is None or resume is False:
            present.anew = resume is not False
            present.begin()
        else:
            present.go_on(position, self._host, self._settled, insist=resume is True)
            self._host = None
        self._waiting = [other for other in self._waiting if other is not position]
        self._passes = [other for other in self._passes if other.open or other.trained or other.name != name]
        self._passes.append(present)
        return present

    def _position_for(self, present: Pass, resume: bool | None) -> PositionContent | None:
        if not present.learns and resume is None:
            return None
        return next((position for position in self._waiting if position.name == present.name), None)

    def finish(self, ended: Pass) -> None:
        """Forget a pass that came to its end; what went along with it is over: what began after it, and what has drawn a batch that no step was made with."""
        index = self._passes.index(ended)
        del self._passes[index]
        ended.open = False
        for number, other in enumerate(self._passes if ended.trained else ()):
            other.over |= number >= index or other.fresh

    def leave(self, left: Pass) -> None:
        """Take a pass for one that was left, unless it is finished."""
        if left.open:
            left.open = False
            if left.over or left.stale or not (left.learns or left.trained):
                self._passes = [other for other in self._passes if other is not left]

    def feed(self) -> None:
        """Take the passes that were drawn from since the last step for those of the training."""
        fresh = [present for present in self._passes if present.fresh]
        if not fresh:
            return
        fed = [present for present in fresh if present.learns] or fresh
        for present in fresh:
            present.fresh = False
        for present in fed:
            present.trained = True
        if len(fed) != len(self._passes):
            self._passes = [present for present in self._passes if present.open or present in fed]
        if self._waiting:
            self._check_taken(fed)

    def _check_taken(self, fed: Sequence[Pass]) -> None:
        """Warn when the training begins a pass anew although a position waits, and let it wait no longer."""
        name = next((present.name for present in fed if present.anew), None)
        if name is not None:
            saved = ", ".join(repr(position.name) for position in self._waiting)
            text = f"a step was made with a pass {name!r} from its beginning, and the checkpoint was taken in the middle of a pass {saved}: "
            self._waiting = []
            warnings.warn(f"{text}its data begins anew; give the same name= and resume=True to watch() for going on", stacklevel=USER)

    def positions(self) -> list[PositionContent]:
        """Return the positions that a checkpoint keeps, in the order in which their passes began; those that still wait are among them."""
        current = [present for present in self._passes if present.open and (present.trained or present.learns)]
        kept = current or [present for present in self._passes if not present.open and present.trained]
        return [position for present in kept if (position := present.position()) is not None] + self._waiting

    def load(self, positions: Sequence[PositionContent], host: HostState) -> None:
        """Let the positions of a checkpoint wait for their passes; a pass of the training that is open has no next batch.

        Args:
            positions: the positions.
            host: the host's generators when they were saved.
        """
        for present in self._passes:
            present.stale = present.open and (present.trained or present.learns)
        self._passes = [present for present in self._passes if present.open and not present.stale]
        self._waiting, self._host, self._settled = list(positions), host, []
