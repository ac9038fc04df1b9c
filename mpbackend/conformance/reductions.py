"""Checks of gradient sums between ranks, two of them in threads of this process where the library can."""

from __future__ import annotations

import datetime
import threading
from typing import Any

import torch
from torch import Tensor

from mpbackend.conformance.answer import Answer, fault, fine, skip, together
from mpbackend.conformance.subject import Subject
from mpbackend.errors import describe
from mpbackend.formats import FORMATS
from mpbackend.numerics.rounding_rules import round_value

RANKS = 2
LIMIT = datetime.timedelta(seconds=60)
IN_THREADS = "gloo"
"""The library whose ranks can be threads; every other one wants a device for each rank."""

LEFT = (1.0, 0.5, -3.0, 100.0, 0.0, 7.0)
RIGHT = (2.0, 0.25, 3.0, -99.0, 0.0, -8.0)


def check_reduces_claimed_formats(subject: Subject) -> Answer:
    """Two ranks sum every claimed format: the exact sum, rounded once to the format, the same bits on both."""
    found = subject.backend.collectives(subject.device)
    if not torch.distributed.is_available():
        return skip("this torch is built without torch.distributed")
    if found.name != IN_THREADS:
        return skip(f"{found.name} needs a process and a device for each rank")
    answers = {name: summed(name) for name in found.reduces}
    return together(answers) if answers else fault("it sums no format")


def summed(name: str) -> Answer:
    """Return the answer about one format."""
    spec = FORMATS[name]
    dtype: torch.dtype = getattr(torch, str(spec.carrier_dtype))
    whole = spec.kind != "float"
    values = [[abs(int(x)) if spec.kind == "uint" else int(x) if whole else x for x in side] for side in (LEFT, RIGHT)]
    tensors = [torch.tensor(side).to(dtype) for side in values]
    failures = reduce(tensors)
    if failures:
        return fault(f"the sum raises {failures[0]}")
    exact = [a + b for a, b in zip(*values, strict=True)]
    wanted = exact if whole else [round_value(value, name) for value in exact]
    for rank, tensor in enumerate(tensors):
        if tensor.tolist() != wanted:
            return fault(f"rank {rank} has {tensor.tolist()}, not {wanted}")
    return fine()


def reduce(tensors: list[Tensor]) -> list[str]:
    """Sum tensors of several ranks in place, each by a thread of its own; return what went wrong."""
    distributed: Any = torch.distributed  # its collectives are not annotated
    store = distributed.HashStore()
    failures: list[str] = []

    def run(rank: int) -> None:
        try:
            distributed.ProcessGroupGloo(store, rank, RANKS, LIMIT).allreduce([tensors[rank]]).wait()
        except Exception as error:  # noqa: BLE001 - handed to the thread that asked
            failures.append(describe(error))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures
