"""Ranks for tests: a few processes with a gloo group on this machine, and what each of them returned.

One warm parent has imported torch and runs nothing; it forks a rank in milliseconds (``multiprocessing``'s fork server). A function that runs on ranks stands
at the top level of its module, so that its name finds it there.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

PRELOADED = ["torch", "torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo", "torch.testing", "pytest", "mpbackend.target", __name__]
"""What the warm parent imports."""

LIMIT_S = 60.0
"""Seconds after which ranks that have not answered are killed."""

LAST_WORDS_S = 2.0
"""Seconds that the other ranks get after one has failed: they only wait for it, or say why themselves."""


def run_ranks(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run ``function(rank, *args)`` on ranks of one process group and return what each returned.

    Args:
        size: number of ranks.
        function: runs on every rank, one thread each, warnings as errors; found by its name, and its result is pickled.
        args: further arguments, pickled.

    Raises:
        AssertionError: a rank raised, gave no answer in time, or did not end cleanly; the text holds the trace of each.
    """
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(PRELOADED)
    failures: dict[int, str] = {}
    results: dict[int, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        pipes = [processes.Pipe(duplex=False) for _ in range(size)]
        children = [
            processes.Process(target=be_rank, args=(rank, size, str(Path(folder, "store")), pipes[rank][1], function, args), daemon=True)
            for rank in range(size)
        ]
        try:
            for child, (_, sender) in zip(children, pipes, strict=True):
                child.start()
                sender.close()
            waiting = {receiver: rank for rank, (receiver, _) in enumerate(pipes)}
            deadline = time.monotonic() + LIMIT_S
            while waiting and (ready := connection.wait(list(waiting), max(deadline - time.monotonic(), 0))):
                for receiver in ready:
                    assert isinstance(receiver, connection.Connection)
                    rank = waiting.pop(receiver)
                    good, value = answer(receiver)
                    (results if good else failures)[rank] = value
                    if not good:
                        deadline = min(deadline, time.monotonic() + LAST_WORDS_S)
            failures |= {} if failures else dict.fromkeys(waiting.values(), f"no answer after {LIMIT_S:g} s")
            for rank, child in enumerate(children):
                child.join(0 if failures else LIMIT_S)
                if not failures and child.exitcode != 0:
                    failures[rank] = f"ended with exit code {child.exitcode}"
        finally:
            for child in children:
                if child.is_alive():
                    child.kill()
                    child.join()
    assert not failures, "\n".join(f"rank {rank}: {text}" for rank, text in failures.items())
    return [results[rank] for rank in range(size)]


def answer(receiver: connection.Connection) -> tuple[bool, Any]:
    """Return whether a rank's function returned, and its result or what went wrong."""
    try:
        good, value = pickle.loads(receiver.recv_bytes())
    except EOFError:
        return False, "ended without an answer"
    return bool(good), value


def be_rank(rank: int, size: int, store: str, sender: connection.Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Be one rank: join the group, run the function, answer, and leave the group."""
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    try:
        dist.init_process_group("gloo", store=FileStore(store, size), rank=rank, world_size=size, timeout=timedelta(seconds=LIMIT_S / 2))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = function(rank, *args)
        report = pickle.dumps((True, result))  # by value: torch's own pickling between processes lends memory of a process that is about to end
    except BaseException:  # noqa: BLE001 # whatever ended the function is shown by the parent
        sender.send_bytes(pickle.dumps((False, traceback.format_exc())))
        sender.close()
        os._exit(1)  # the group is broken: leaving it in order would wait for ranks that wait for this one
    gc.collect()
    dist.barrier()  # a rank that ends while others still hold connections to it can abort them
    dist.destroy_process_group()
    sender.send_bytes(report)
    sender.close()
