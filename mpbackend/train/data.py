"""Watching the data: samples, tokens, a fingerprint, and the position in a pass, from which a resumed run goes on with the very next batch."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from mpbackend.train.content import DataContent
from mpbackend.train.position import Pass, Resume
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
        self._pass: Pass | None = None
        self._resume: Resume | None = None

    def watch(self, loader: Iterable[BatchT], *, resume: bool = True) -> Iterator[BatchT]:
        """Yield the batches of ``loader`` unchanged, counting them.

        The first pass after ``load_state_dict`` goes on where the saved one stood; see ``mpbackend.train.position``. A pass that is left early keeps its
        position until another one begins; one that came to its end has none.

        Args:
            loader: any iterable of batches.
            resume: False begins a pass anew although a checkpoint was taken in the middle of one.

        Raises:
            SessionError: the loader has fewer batches than the saved pass had drawn.
        """
        resumed, self._resume = self._resume, None
        outer = self._pass
        present = Pass(loader)
        self._pass = present
        try:
            for batch in present.batches(resumed if resume else None):
                self._count(batch)
                yield batch
            self._pass = outer if outer is not None and outer.open else None
        finally:
            present.open = False

    def _count(self, batch: object) -> None:
        first = first_tensor(batch)
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
        """Return samples and tokens since the last call."""
        counted = (self.samples, self.tokens)
        self.samples = self.tokens = 0
        return counted

    @property
    def fingerprint(self) -> str:
        """Hash of the sampled batches so far, 32 hexadecimal digits; empty before the first. After a resumption it begins with the hash before it."""
        return self._hash.hexdigest() if self.batches else ""

    def state(self) -> DataContent:
        """Return what a checkpoint keeps: counts, fingerprint, and the position in the pass that is open; a batch that was drawn counts as used."""
        position = None if self._pass is None else self._pass.position()
        if self._resume is not None:
            position = self._resume.position
        return DataContent(batches=self.batches, fingerprint=self.fingerprint, position=position)

    def load(self, state: DataContent, host: HostState) -> None:
        """Go on from what ``state`` returned.

        Args:
            state: the state.
            host: the host's generators as they were then.
        """
        self.samples = self.tokens = 0
        self.batches = state.batches
        self._hash = hashlib.blake2b(state.fingerprint.encode(), digest_size=16)  # a hash under way cannot be saved: the next begins with its digest
        self._pass = None
        self._resume = None if state.position is None else Resume(state.position, host)


def first_tensor(batch: Any) -> torch.Tensor | None:
    """Return the first tensor in a batch: a tensor, or a nesting of tuples, lists and mappings."""
    return next(tensors_in(batch), None)


def tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor of a nesting of tuples, lists and mappings, in order."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_in(value)
    elif isinstance(batch, (tuple, list)):
        for value in batch:
            yield from tensors_in(value)


def hash_tensor(digest: Any, tensor: torch.Tensor, limit: int | None = None) -> None:
    """Add a tensor to a hash: format, shape and bytes.

    Args:
        digest: a hashlib object.
        tensor: a tensor on any device; one that is not on the host is copied there. Of a sparse, nested or meta tensor only the description is hashed.
        limit: elements to hash at most; all of them when omitted.
    """
    digest.update(f"{tensor.dtype}{'' if tensor.is_nested else tuple(tensor.shape)}".encode())
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
        return
    flat = tensor.detach().reshape(-1)
    host = (flat if limit is None else flat[:limit]).cpu().contiguous()
    if host.numel():
        digest.update(ctypes.string_at(host.data_ptr(), host.numel() * host.element_size()))


def weights_fingerprint(model: torch.nn.Module, elements: int = 1024) -> str:
    """Return a hash of names, formats, shapes and the first elements of every parameter, 32 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode())
        hash_tensor(digest, parameter, elements)
    return digest.hexdigest()
