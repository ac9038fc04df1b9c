"""What the ranks of a run tell each other on the host: numbers, texts, and what went wrong on one of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist

from mpbackend.errors import MpbackendError, SessionError

HOST_LIBRARY = "gloo"
"""The library of torch that exchanges host memory; a group of it is made where the run's own reaches devices only."""

ValueT = TypeVar("ValueT")

NAMED_RANKS = 8
"""Ranks that a message lists before it counts."""


class Agreement:
    """Exchanges small values between all ranks on the host, so that nothing waits for a device. Made, used and closed on every rank in the same order.

    Attributes:
        rank: this process's rank in the default group.
        size: ranks of the default group.
    """

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._own = None if "cpu" in libraries() else dist.new_group(backend=HOST_LIBRARY)

    def numbers(self, value: float) -> list[float]:
        """Return the number of every rank, in fp64, by rank."""
        gathered = list(torch.empty(self.size, 1, dtype=torch.float64).unbind())
        dist.all_gather(gathered, torch.tensor([value], dtype=torch.float64), group=self._own)
        return [part.item() for part in gathered]

    def objects(self, value: ValueT) -> list[ValueT]:
        """Return the value of every rank, by rank; small plain values only."""
        gathered: list[ValueT] = [value] * self.size
        dist.all_gather_object(gathered, value, group=self._own)
        return gathered

    def barrier(self) -> None:
        """Wait on the host until every rank is here."""
        dist.barrier(group=self._own)

    def error(self, message: str | None) -> str | None:
        """Return what went wrong on any rank, the same text on all; None when nothing did.

        Args:
            message: what went wrong on this rank, or None.
        """
        found = by_text(self.objects(message))
        found.pop(None, None)
        return "; ".join(f"{name_ranks(where)}: {text}" for text, where in found.items()) or None

    @contextmanager
    def together(self, asked: str) -> Iterator[None]:
        """Run the body on every rank; when it raises on one, it raises on all, so that no rank waits for one that has given up.

        Args:
            asked: what was asked, for the ranks on which nothing went wrong.

        Raises:
            SessionError: another rank's error; this rank's own is raised as it is.
        """
        try:
            yield
        except Exception as error:
            first = (str(error).splitlines() or [""])[0]
            self.error(first if isinstance(error, MpbackendError) else f"{type(error).__name__}: {first}")
            raise
        if (elsewhere := self.error(None)) is not None:
            raise SessionError(asked, found=f"it failed on {elsewhere}", remedy="mend it there")

    def same(self, asked: str, facts: Mapping[str, str], remedy: str) -> None:
        """Compare what every rank says; see ``differences``.

        Args:
            asked: what was asked.
            facts: what this rank says, by name.
            remedy: what to do about a difference.

        Raises:
            SessionError: two ranks differ, on every rank; names the ranks and what each says.
        """
        if (found := differences(self.objects(dict(facts)))) is not None:
            raise SessionError(asked, found=found, remedy=remedy)

    def close(self) -> None:
        """Give up the group that was made for the host, if one was."""
        if self._own is not None and dist.is_initialized():
            dist.destroy_process_group(self._own)
            self._own = None


def libraries(group: dist.ProcessGroup | None = None) -> dict[str, str]:
    """Return the collective library of a process group for each device type that it reaches: ``{"cpu": "gloo"}``."""
    pairs = (part.partition(":") for part in dist.get_backend_config(group).split(","))
    return {device: name for device, _, name in pairs}


def by_text(texts: Sequence[ValueT]) -> dict[ValueT, list[int]]:
    """Return the ranks that say each text, the text of the lowest rank first."""
    found: dict[ValueT, list[int]] = {}
    for rank, text in enumerate(texts):
        found.setdefault(text, []).append(rank)
    return found


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ranks in words: ``rank 1``, ``ranks 0, 2 and 3``, ``ranks 0, ... and 12 more``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > NAMED_RANKS:
        return f"ranks {', '.join(map(str, ranks[:NAMED_RANKS]))} and {len(ranks) - NAMED_RANKS} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def differences(facts: Sequence[Mapping[str, str]]) -> str | None:
    """Return in which facts ranks differ and who says what, None when all say the same. The fact that stands last is named only when no other one differs.

    Args:
        facts: what each rank says, by name; in order of rank.
    """
    names = list(dict.fromkeys(name for each in facts for name in each))
    differing = [name for name in names if len({each.get(name) for each in facts}) > 1]
    if not differing:
        return None
    shown = [name for name in differing if name != names[-1]] or differing
    texts = by_text([", ".join(f"{name}={each.get(name, 'none')}" for name in shown) for each in facts])
    return "; ".join(f"{name_ranks(where)}: {text}" for text, where in texts.items())


def total_count(counts: Sequence[float]) -> float:
    """Return the sum of per-rank counts, rounded once.

    Raises:
        SessionError: a count is negative or not finite, or all are 0; names the ranks.
    """
    wrong = [rank for rank, count in enumerate(counts) if not 0 <= count < math.inf]
    if wrong:
        found = f"{counts[wrong[0]]!r} on {name_ranks(wrong)}"
        raise SessionError("step(denominator=...)", found=found, remedy="give each rank's own count of what its losses sum over")
    if not any(counts):
        raise SessionError("step(denominator=...)", found="0 on every rank", remedy="give each rank's own count of what its losses sum over")
    return math.fsum(counts)
