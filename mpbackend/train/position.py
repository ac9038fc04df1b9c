"""The position in a pass over the data: how many batches were drawn, and the random state that their order came from.

A loader with a state of its own (``state_dict`` and ``load_state_dict``, as torchdata's ``StatefulDataLoader`` has) is asked for it. Any other is iterated
again from the random state at the start of the pass, and the batches that were drawn are drawn once more and dropped; then the random state is the one that was
saved. The random state is that of the host's generators and of the generators that a ``DataLoader`` and its samplers hold; a sampler with an epoch gets its
epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch

from mpbackend.errors import SessionError
from mpbackend.train.content import PositionContent
from mpbackend.train.random_state import HostState, host_state, restore_host

BatchT = TypeVar("BatchT")


class Resume(NamedTuple):
    """Where a pass goes on.

    Attributes:
        position: the position that was saved.
        host: the host's generators when it was saved.
    """

    position: PositionContent
    host: HostState


class Pass:
    """One pass over a loader.

    Args:
        loader: any iterable of batches.

    Attributes:
        drawn: batches drawn so far, those before a resumption included.
        open: whether the pass is neither finished nor left.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.drawn = 0
        self.open = True
        self._loader: Any = loader
        self._generators = generators_of(loader)
        self._start: HostState | None = None
        self._started: list[torch.Tensor] = []
        self._sampler = sampler_with_epoch(loader)
        self._epoch: int | None = None

    def batches(self, resume: Resume | None) -> Iterator[Any]:
        """Yield the batches, from the position on where one is given."""
        if resume is None:
            self._begin()
            iterator = iter(self._loader)
        else:
            iterator = self._go_on(*resume)
        for batch in iterator:
            self.drawn += 1
            yield batch

    def _begin(self) -> None:
        self._start = host_state()
        self._started = [generator.get_state() for generator in self._generators]
        self._epoch = None if self._sampler is None else self._sampler.epoch

    def _go_on(self, position: PositionContent, host: HostState) -> Iterator[Any]:
        if len(position.generators) != len(self._generators):
            found = f"the loader has {len(self._generators)} generators of its own, the one of the checkpoint had {len(position.generators)}"
            raise SessionError("watch()", found=found, remedy="give the loader of the saved run, or resume=False to begin a pass anew")
        self.drawn, self._start, self._epoch = position.drawn, position.start, position.epoch
        self._started = [start for start, _ in position.generators]
        if self._sampler is not None and position.epoch is not None:
            self._sampler.set_epoch(position.epoch)
        if position.loader is not None and has_state(self._loader):
            self._loader.load_state_dict(position.loader)
            iterator: Iterator[Any] = iter(self._loader)
        else:
            restore_host(position.start)
            for generator, state in zip(self._generators, self._started, strict=True):
                generator.set_state(state)
            iterator = iter(self._loader)
            drop(iterator, position.drawn)
        restore_host(host)
        for generator, (_, state) in zip(self._generators, position.generators, strict=True):
            generator.set_state(state)
        return iterator

    def position(self) -> PositionContent | None:
        """Return the position, None before the pass began."""
        if self._start is None:
            return None
        generators = [(start, generator.get_state()) for start, generator in zip(self._started, self._generators, strict=True)]
        state = self._loader.state_dict() if has_state(self._loader) else None
        return PositionContent(drawn=self.drawn, start=self._start, generators=generators, epoch=self._epoch, loader=state)


def drop(iterator: Iterator[object], count: int) -> None:
    """Draw and drop batches; ``SessionError`` when there are not so many."""
    for number in range(count):
        try:
            next(iterator)
        except StopIteration:
            found = f"the checkpoint was taken after {count} batches of a pass, this loader has {number}"
            raise SessionError("watch()", found=found, remedy="give the loader of the saved run, or resume=False to begin a pass anew") from None


def has_state(loader: Any) -> bool:
    """Tell whether a loader keeps a state of its own."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def parts_of(loader: Any) -> list[Any]:
    """Return a loader and its samplers, outermost first, as far as it has any."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    return [part for part in (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)) if part is not None]


def generators_of(loader: Any) -> list[torch.Generator]:
    """Return the generators that a loader and its samplers hold, each once; the default generator is the host's and not among them."""
    held = [getattr(part, "generator", None) for part in parts_of(loader)]
    unique = {id(generator): generator for generator in held if isinstance(generator, torch.Generator) and generator is not torch.default_generator}
    return list(unique.values())


def sampler_with_epoch(loader: Any) -> Any | None:
    """Return the sampler that orders by epoch, as ``DistributedSampler`` does; None when there is none."""
    return next((part for part in parts_of(loader) if isinstance(getattr(part, "epoch", None), int) and hasattr(part, "set_epoch")), None)
