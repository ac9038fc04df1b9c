"""Ownership: which live session updates a parameter. Two that update one would each undo what the other keeps of it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from mpbackend.errors import SessionError


class Claim(NamedTuple):
    """What one session holds.

    Attributes:
        held: the parameter or optimizer; held strongly, so that its id stays its own.
        owner: what a message calls the session.
    """

    held: object
    owner: str


@dataclass
class ClaimRegistry:
    """What live sessions hold, by id.

    A model is seen by every session of the process, whoever made it; so this bookkeeping is process-wide, in ``CLAIMS``. A mark on the parameters instead would
    be pickled with the model.
    """

    claims: dict[int, Claim] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)


CLAIMS = ClaimRegistry()
"""The registry of this process."""


def claim(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], owner: str, registry: ClaimRegistry = CLAIMS) -> Callable[[], None]:
    """Claim the optimizers, and the parameters of a model that they update, for a session.

    Frozen parameters may belong to several sessions, and a model too whose sessions update different parameters. To be called before anything looks at the
    model: sessions that nobody can reach any more are collected where they hold something of it, which closes them and gives the model back.

    Args:
        model: the model.
        optimizers: the optimizers, as the user built them.
        owner: what a message calls the session, such as ``the session of bf16``.
        registry: the bookkeeping; that of this process when omitted.

    Returns:
        Releases the claim; may be called twice.

    Raises:
        SessionError: a live session holds one of them; names it and its session. Nothing is claimed then.
    """
    wanted = dict(claimed(model, optimizers))
    with registry.lock:
        if any(key in registry.claims for key in wanted):
            gc.collect()
        for key, (name, _) in wanted.items():
            if key in registry.claims:
                found = f"{name} is held by {registry.claims[key].owner}, which is live"
                raise SessionError(f"prepare() for {owner}", found=found, remedy="close() that session first, or use it in a with statement")
        made = {key: Claim(held, owner) for key, (_, held) in wanted.items()}
        registry.claims.update(made)

    def release() -> None:
        with registry.lock:
            for key, mine in made.items():
                if registry.claims.get(key) is mine:
                    del registry.claims[key]

    return release


def claimed(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[tuple[int, tuple[str, object]]]:
    """Yield id, name and object of what a session claims: parameters first, which a message should rather name."""
    updated = {id(tensor) for optimizer in optimizers for group in optimizer.param_groups for tensor in group["params"]}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) in updated:
            yield id(parameter), (f"parameter {name}", parameter)
    for optimizer in optimizers:
        yield id(optimizer), (f"the optimizer {type(optimizer).__name__}", optimizer)
