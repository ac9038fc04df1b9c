"""The position in a pass over the data: how many batches were drawn, and the random state that their order came from.

A loader with a state of its own (``state_dict`` and ``load_state_dict``, as torchdata's ``StatefulDataLoader`` has) is asked for it. Any other is iterated
again from the random state at the start of the pass, and the batches that were drawn are drawn once more and dropped; then the random state is the one that was
saved. The random state is that of the host's generators and of the generators that a ``DataLoader`` and its samplers hold; a sampler with an epoch gets its
epoch, and workers that outlive a pass are started or ended as they were.

Whether a loader is that of the saved run shows in the first batch of the pass, whose fingerprint is saved; of one with a state of its own only the length is
compared. An iterator is drawn from the start again as well, with a warning: it may go on differently where its order comes from random numbers that it draws
in the middle of a pass, as one that cycles through epochs does.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch

from mpbackend.errors import SessionError
from mpbackend.train.content import PositionContent
from mpbackend.train.fingerprint import batch_fingerprint
from mpbackend.train.random_state import HostState, host_state, restore_host

BatchT = TypeVar("BatchT")

REMEDY = "give another loader its own name= or watch it under torch.no_grad(); resume=False begins anew"
USER = 5
"""Frames from a warning in here to the loop over ``watch``."""


class Pass:
    """One pass over a loader.

    Args:
        loader: any iterable of batches.
        name: what the user calls it.
        learns: whether it began where gradients are recorded.

    Attributes:
        drawn: batches drawn so far, those before a resumption included.
        open: whether the pass is neither finished nor left.
        fresh: whether a batch was drawn since the last step.
        trained: whether a step was made with it.
        over: whether the pass that it went along with has ended.
        stale: whether ``load`` moved the session elsewhere meanwhile.
        anew: whether it began at its start although nobody asked for that.
    """

    def __init__(self, loader: Iterable[Any], name: str, *, learns: bool) -> None:
        self.name = name
        self.learns = learns
        self.drawn = 0
        self.open = True
        self.fresh = self.trained = self.over = self.stale = self.anew = False
        self._loader: Any = loader
        self._iterator: Iterator[Any] = iter(())
        self._generators = generators_of(loader)
        self._start: HostState | None = None
        self._started: list[torch.Tensor] = []
        self._sampler = sampler_with_epoch(loader)
        self._epoch: int | None = None
        self._first = ""
        self._continued = False

    def batches(self) -> Iterator[Any]:
        """Yield the batches, after ``begin`` or ``go_on``.

        Raises:
            SessionError: ``load`` was called since the last batch.
        """
        for batch in self._iterator:
            self.drawn += 1
            self.fresh, self.over = True, False
            if self.drawn == 1:
                self._first = batch_fingerprint(batch)
            yield batch
            if self.stale:
                found = "load() took the session elsewhere while this pass was open"
                raise SessionError("watch()", found=found, remedy="leave the loop after load(), and watch the loader again")

    def begin(self) -> None:
        """Begin at the first batch."""
        self._start = host_state()
        self._started = [generator.get_state() for generator in self._generators]
        self._epoch = None if self._sampler is None else self._sampler.epoch
        self._continued = has_live_workers(self._loader)
        self._iterator = iter(self._loader)

    def go_on(self, position: PositionContent, host: HostState | None, settled: list[torch.Generator], *, insist: bool) -> None:
        """Begin at the batch after a position.

        Args:
            position: the position that was saved.
            host: the host's generators when it was saved; None leaves them as they are, for another pass has gone on already.
            settled: generators of loaders that stand where they should; this loader's are added.
            insist: take another loader, with a warning.

        Raises:
            SessionError: the loader is not that of the saved run. The generators are as they were.
        """
        before, own = host_state(), [generator.get_state() for generator in self._generators]
        epoch = None if self._sampler is None else self._sampler.epoch
        try:
            self._find(position, insist=insist)
        except BaseException:
            self._put_back(before, own)
            if self._sampler is not None:
                self._sampler.set_epoch(epoch)
            raise
        known = [any(generator is other for other in settled) for generator in self._generators]
        saved = [state for _, state in position.generators]
        self._put_back(host or before, [mine if is_known else state for mine, is_known, state in zip(own, known, saved, strict=True)])
        settled.extend(self._generators)
        self.trained = True

    def _put_back(self, host: HostState, own: list[torch.Tensor]) -> None:
        restore_host(host)
        for generator, state in zip(self._generators, own, strict=True):
            generator.set_state(state)

    def _find(self, position: PositionContent, *, insist: bool) -> None:
        if len(position.generators) != len(self._generators):
            found = f"the loader has {len(self._generators)} generators of its own, the one of the checkpoint had {len(position.generators)}"
            raise SessionError("watch()", found=found, remedy=REMEDY)
        self.drawn, self._start, self._epoch, self._first = position.drawn, position.start, position.epoch, position.first
        self._started = [start for start, _ in position.generators]
        self._continued = position.continued
        if self._sampler is not None and position.epoch is not None:
            self._sampler.set_epoch(position.epoch)
        if position.loader is not None and has_state(self._loader):
            length = length_of(self._loader)
            if length != position.length:
                doubt(f"the loader has {length} batches, the one of the checkpoint had {position.length}", insist=insist)
            self._loader.load_state_dict(position.loader)
            self._iterator = iter(self._loader)
            return
        settle_workers(self._loader, alive=position.continued)
        restore_host(position.start)
        for generator, state in zip(self._generators, self._started, strict=True):
            generator.set_state(state)
        self._iterator = iter(self._loader)
        first = drop(self._iterator, position.drawn)
        if first != position.first:
            doubt("the first batch is not the one that the saved pass began with", insist=insist)
        if isinstance(self._loader, Iterator) and not insist:
            kind = type(self._loader).__name__
            text = f"watch() resumes a {kind}, which is drawn from its start once more and may go on in another order: watch the loader itself"
            warnings.warn(text, stacklevel=USER)

    def position(self) -> PositionContent | None:
        """Return the position, None before the pass began."""
        if self._start is None:
            return None
        generators = [(start, generator.get_state()) for start, generator in zip(self._started, self._generators, strict=True)]
        return PositionContent(
            name=self.name,
            drawn=self.drawn,
            first=self._first,
            length=length_of(self._loader),
            continued=self._continued,
            start=self._start,
            generators=generators,
            epoch=self._epoch,
            loader=self._loader.state_dict() if has_state(self._loader) else None,
        )


def doubt(found: str, *, insist: bool) -> None:
    """Refuse a loader that is not that of the saved run; warn where the user insists."""
    if not insist:
        raise SessionError("watch()", found=found, remedy=f"{REMEDY}, resume=True goes on all the same")
    warnings.warn(f"watch(resume=True): {found}; the pass goes on all the same", stacklevel=USER + 1)


def drop(iterator: Iterator[object], count: int) -> str:
    """Draw and drop batches; return the fingerprint of the first, and raise ``SessionError`` when there are not so many."""
    first = ""
    for number in range(count):
        try:
            batch = next(iterator)
        except StopIteration:
            found = f"the checkpoint was taken after {count} batches of a pass, this loader has {number}"
            raise SessionError("watch()", found=found, remedy=REMEDY) from None
        if number == 0:
            first = batch_fingerprint(batch)
    return first


def length_of(loader: Any) -> int | None:
    """Return the number of batches that a loader says it has, None where it does not say."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def has_live_workers(loader: Any) -> bool:
    """Tell whether a loader has worker processes of an earlier pass: torch draws no seed for them at the start of the next one, which changes the order."""
    return bool(getattr(loader, "persistent_workers", False)) and getattr(loader, "_iterator", None) is not None


def settle_workers(loader: Any, *, alive: bool) -> None:
    """Start the workers of a loader that are to outlive a pass, or forget them, so that the next pass begins as the saved one did."""
    if alive and getattr(loader, "persistent_workers", False) and not has_live_workers(loader):
        iter(loader)
    elif not alive and has_live_workers(loader):
        loader._iterator = None


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
