"""Watching the data: samples, tokens, a fingerprint, and the position in a pass, from which a resumed run goes on with the very next batch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch

from mpbackend.train.content import DataContent
from mpbackend.train.fingerprint import hash_tensor, tensors_in
from mpbackend.train.passes import Passes
from mpbackend.train.random_state import HostState

BatchT = TypeVar("BatchT")

HASHED_AT_START = 8
HASHED_EVERY = 50
INTEGER_DTYPES = frozenset({torch.int32, torch.int64, torch.uint8, torch.int16})


class DataWatch:
    """Counts samples and tokens, fingerprints batches, and knows where the present pass stands.

    The first 8 batches and then one in 50 are hashed, in order, with their position; hashing a batch that is on a device reads it.

    Attributes:
        samples: samples since ``take``: the length of the first tensor of each batch.
        tokens: tokens since ``take``: elements of the first tensor where it holds integers in two dimensions or more.
        batches: batches seen in all, those before a resumption included.
    """

    def __init__(self) -> None:
        self.samples = 0
        self.tokens = 0
        self.batches = 0
        self._hash = hashlib.blake2b(digest_size=16)
        self._passes = Passes()

    def watch(self, loader: Iterable[BatchT], *, resume: bool | None = None, name: str = "data") -> Iterator[BatchT]:
        """Yield the batches of ``loader`` unchanged, counting them.

        After ``load`` the passes that the training was in when the checkpoint was taken go on with the next batch; see ``mpbackend.train.passes`` for which
        passes these are, and ``mpbackend.train.position`` for how they go on.

        Args:
            loader: any iterable of batches. The loader itself rather than an iterator over it, which cannot be begun again.
            resume: None goes on where the saved pass stood and makes sure that the loader is that of the saved run: its first batch must be the same one. True
                goes on whatever that batch holds, with a warning when it is another one, and in a pass without gradients too. False begins anew, and nothing
                of that name goes on later.
            name: tells apart what is watched at the same time or in turns. A saved position goes to the first pass of its name; of several to each in the
                order in which they had begun.

        Raises:
            SessionError: the loader is not that of the saved run; or ``load`` was called while the pass was open, which then has no next batch.
        """
        present = self._passes.begin(loader, name=name, resume=resume)
        try:
            for batch in present.batches():
                self.count(batch)
                yield batch
            self._passes.finish(present)
        finally:
            self._passes.leave(present)

    def count(self, batch: object) -> None:
        """Count and fingerprint one batch."""
        first = next(tensors_in(batch), None)
        if first is not None and not first.is_nested and first.dim():
            self.samples += first.shape[0]
            if first.dtype in INTEGER_DTYPES and first.dim() > 1:
                self.tokens += first.numel()
        if self.batches < HASHED_AT_START or self.batches % HASHED_EVERY == 0:
            self._hash.update(str(self.batches).encode())
            for tensor in tensors_in(batch):
                hash_tensor(self._hash, tensor)
        self.batches += 1

    def take(self) -> tuple[int, int]:
        """Return samples and tokens since the last call, at the end of a step: passes that were drawn from since are those of the training."""
        self._passes.feed()
        counted = (self.samples, self.tokens)
        self.samples = self.tokens = 0
        return counted

    @property
    def fingerprint(self) -> str:
        """Hash of the sampled batches so far, 32 hexadecimal digits; empty before the first. After a resumption it begins with the hash before it."""
        return self._hash.hexdigest() if self.batches else ""

    def state(self) -> DataContent:
        """Return what a checkpoint keeps: counts, fingerprint, and positions; a batch that was drawn counts as used."""
        return DataContent(batches=self.batches, fingerprint=self.fingerprint, positions=self._passes.positions())

    def load(self, state: DataContent, host: HostState) -> None:
        """Go on from what ``state`` returned.

        Args:
            state: the state.
            host: the host's generators as they were then.
        """
        self.samples = self.tokens = 0
        self.batches = state.batches
        self._hash = hashlib.blake2b(state.fingerprint.encode(), digest_size=16)  # a hash under way cannot be saved: the next begins with its digest
        self._passes.load(state.positions, host)


def weights_fingerprint(model: torch.nn.Module, elements: int = 1024) -> str:
    """Return a hash of names, formats, shapes and the first elements of every parameter, 32 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode())
        hash_tensor(digest, parameter, elements)
    return digest.hexdigest()
