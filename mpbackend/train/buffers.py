"""Putting buffers back when a step is skipped.

A forward pass that overflowed has already written its statistics into BatchNorm's running mean; skipping the optimizer does not undo that. Under dynamic
scaling the session copies buffers at the start of a step and restores them on a skip.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
from torch.nn.modules.batchnorm import _NormBase

from mpbackend.errors import SessionError
from mpbackend.train.host_copy import HostCopy

BUDGET_BYTES = 64 * 2**20


class BufferGuard:
    """Copies of the buffers that a forward pass may change.

    In the first window every buffer is copied. Afterwards: those of normalization modules, those whose values the first window changed, and those whose
    version counter ever moves. The counter alone is not enough: ``native_batch_norm`` writes its running statistics without moving it. A buffer whose first
    change ever comes in a skipped step, after windows in which it stood still, is not restored in that step.

    Args:
        model: the model.
        budget: bytes of copies at most.

    Attributes:
        left_out: names of buffers that the budget leaves out.
    """

    def __init__(self, model: torch.nn.Module, budget: int = BUDGET_BYTES) -> None:
        modules = dict(model.named_modules())
        self._places = {
            name: Place(modules[name.rpartition(".")[0]], name.rpartition(".")[2])
            for name, buffer in model.named_buffers()
            if buffer is not None and buffer.numel()
        }
        self._marks = {name: place.mark() for name, place in self._places.items()}
        self._always = {name for name, place in self._places.items() if isinstance(place.module, _NormBase)}
        self._budget = budget
        self._copies: dict[str, torch.Tensor] = {}
        self._learning = True
        self._coming: Coming | None = None
        self._watched: list[str] = []
        self.left_out: list[str] = []
        self._watch(list(self._places))

    def _watch(self, names: list[str]) -> None:
        """Watch the named buffers, those of normalization modules first, as far as the budget goes."""
        wanted = sorted(self._always) + [name for name in self._places if name in names and name not in self._always]
        self._watched, self.left_out, used = [], [], 0
        for name in wanted:
            size = self._places[name].tensor.nbytes
            fits = used + size <= self._budget
            used += size if fits else 0
            (self._watched if fits else self.left_out).append(name)

    @torch.no_grad()
    def open_window(self) -> None:
        """Copy the watched buffers; called before the first forward pass of a step."""
        if self._coming is not None and self._coming.copy.ready:
            self._adopt(self._coming)
        self._copies = {name: self._places[name].tensor.detach().clone() for name in self._watched}

    def close_window(self) -> None:
        """Learn which buffers the step changed; called after a step that was taken. The first call reads the device once."""
        moved = self._moved()
        if self._learning and self._copies:
            differs = self._differs()
            values = torch.stack(list(differs.values())).tolist() if differs else []
            self._learn([*(name for name, value in zip(differs, values, strict=True) if value), *moved])
        elif moved:
            self._watch([*self._watched, *moved])
        self._marks = {name: place.mark() for name, place in self._places.items()}

    def _moved(self) -> list[str]:
        return [name for name, place in self._places.items() if place.mark() != self._marks[name]]

    def _differs(self) -> dict[str, torch.Tensor]:
        return {name: differ(copy, self._places[name].tensor) for name, copy in self._copies.items()}

    def _learn(self, changed: list[str]) -> None:
        self._learning = False
        self._watch(changed)
        if self.left_out:
            warnings.warn(f"buffers over the {self._budget:,} B budget are not restored on a skipped step: {', '.join(self.left_out)}", stacklevel=5)

    def _adopt(self, coming: Coming) -> None:
        """Learn from a step whose verdict was on the device, when it has come to the host; one that was skipped teaches nothing."""
        self._coming = None
        found, *values = coming.copy.read()
        if not found:
            self._learn([*(name for name, value in zip(coming.names, values, strict=True) if value), *coming.moved])

    @torch.no_grad()
    def restore_where(self, found: torch.Tensor) -> None:
        """Put the copies back where the device says that the step is skipped; reads nothing.

        Args:
            found: scalar bool tensor on the device.
        """
        moved = self._moved()
        if self._learning and self._copies and self._coming is None:
            differs = self._differs()
            self._coming = Coming(list(differs), moved, HostCopy([found, *differs.values()]))
        elif moved and not self._learning:
            self._watch([*self._watched, *moved])
        for name, copy in self._copies.items():
            place = self._places[name]
            if place.tensor.shape == copy.shape and place.tensor.dtype == copy.dtype:
                place.tensor.copy_(torch.where(found, copy, place.tensor))
        self._marks = {name: place.mark() for name, place in self._places.items()}

    @torch.no_grad()
    def restore(self) -> list[str]:
        """Put the copies back; returns the names of the restored buffers."""
        for name, copy in self._copies.items():
            place = self._places[name]
            if place.tensor.shape == copy.shape and place.tensor.dtype == copy.dtype:
                place.tensor.copy_(copy)
            else:
                place.module._buffers[place.name] = copy
            self._marks[name] = place.mark()
        return list(self._copies)


class Coming(NamedTuple):
    """What a step changed, on its way to the host: the compared buffers, those whose counter moved, and the verdict with a flag for each compared one."""

    names: list[str]
    moved: list[str]
    copy: HostCopy


class Place(NamedTuple):
    """Where a buffer is held: a forward pass may put another tensor there."""

    module: torch.nn.Module
    name: str

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor that is there now."""
        tensor = self.module._buffers.get(self.name)
        if tensor is None:
            raise SessionError(f"buffer {self.name}", found="it was removed or became None while training", remedy="keep it a tensor")
        return tensor

    def mark(self) -> tuple[int, int]:
        """Return what changes when the tensor is replaced or written in place."""
        tensor = self.tensor
        return id(tensor), tensor._version


def differ(copy: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    """Return a scalar bool tensor: whether two tensors differ in a value, NaN equal to NaN."""
    if copy.shape != present.shape or copy.dtype != present.dtype:
        return torch.ones((), dtype=torch.bool, device=copy.device)
    return ((copy != present) & ~((copy != copy) & (present != present))).any()
