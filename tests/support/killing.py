"""Kill training runs with SIGKILL and look at what is left of their checkpoints and records.

Run as a program, it is a warm parent: it imports torch once, forks one run after another, kills each, and prints what was wrong as JSON.

    python -m tests.support.killing random FOLDER --runs 50 --seed 1     kills after a random number of reported events
    python -m tests.support.killing every FOLDER                         a run for each system call that changes files, killed just before it
    python -m tests.support.killing every FOLDER --fault gone            the same with a planted fault
"""

from __future__ import annotations

import argparse
import builtins
import io
import itertools
import json
import os
import random
import shutil
import signal
import struct
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import mpbackend
from mpbackend.errors import MpbackendError
from mpbackend.observe.record import load_record
from mpbackend.train import checkpoint
from mpbackend.train.data import weights_fingerprint
from mpbackend.train.session import Session

MESSAGE = struct.Struct("<ci")
SAVES, STEPS_A_SAVE = 2, 2
SPIN_S = 5e-4
FILE_CALLS = ("replace", "rename", "fsync", "unlink", "mkdir", "rmdir", "open")

Tick = Callable[[bytes, int], None]


class Told(NamedTuple):
    """What a run told before it was killed: events, the steps of its last completed save and of its last flush (0: none), and whether it came to its end."""

    events: int
    saved: int
    flushed: int
    finished: bool


def make_session(target: mpbackend.Target, plan: mpbackend.Plan, record: Path | None) -> Session:
    """Return a session of the run; the parent has planned it already, so that forks are quick."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 2))
    return target.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), plan=plan, record=record)


def train(target: mpbackend.Target, plan: mpbackend.Plan, folder: Path, tell: Tick) -> None:
    """Train, flush the record after every step, save after every second one, and tell each."""
    session = make_session(target, plan, folder / "record")
    for number in range(SAVES * STEPS_A_SAVE):
        with session.autocast():
            loss = session.model(torch.full((4, 8), number + 1.0)).square().mean()
        session.backward(loss)
        session.step()
        session.write_record()
        tell(b"F", session.steps)
        if session.steps % STEPS_A_SAVE == 0:
            session.save(folder / "ckpt", extra={"step": session.steps, "digest": digest(session)})
            tell(b"S", session.steps)
    session.close()


def digest(session: Session) -> str:
    """Return a hash of the weights and of the momenta that belong to them."""
    momenta = nn.ParameterList([state["momentum_buffer"].clone() for state in session.optimizers[0].state.values()])
    return weights_fingerprint(session.model) + weights_fingerprint(momenta)


def watch_files(call: Callable[[], None]) -> None:
    """Have ``call`` run before every call that changes files or their names, in this process, for good."""

    def wrapped(inner: Callable[..., Any]) -> Callable[..., Any]:
        def outer(*args: Any, **kwargs: Any) -> Any:
            call()
            return inner(*args, **kwargs)

        return outer

    for name in FILE_CALLS:
        setattr(os, name, wrapped(getattr(os, name)))
    builtins.open = io.open = wrapped(io.open)


def run(work: Callable[[Tick], None], kill_after: int | None, spin_s: float) -> Told:
    """Fork a run, kill it some time after an event (None: leave it), and return what it told."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reader)
            work(lambda kind, step: void(os.write(writer, MESSAGE.pack(kind, step))))
            status = 0
        except BaseException:  # noqa: BLE001 - the child ends here, whatever happened
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writer)
    told = Told(0, 0, 0, False)
    with os.fdopen(reader, "rb", MESSAGE.size) as pipe:
        while message := pipe.read(MESSAGE.size):
            kind, step = MESSAGE.unpack(message)
            told = Told(told.events + 1, step if kind == b"S" else told.saved, step if kind == b"F" else told.flushed, False)
            if told.events == kill_after:
                end = time.perf_counter() + spin_s
                while time.perf_counter() < end:
                    pass
                os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise RuntimeError("a run failed; its trace is above")
    return told._replace(finished=os.WIFEXITED(status))


def void(_: object) -> None:
    """Drop a value."""


def faults(reader: Session, folder: Path, told: Told) -> list[str]:
    """Return what is wrong with what a killed run has left."""
    found = []
    if told.saved or (folder / "ckpt" / checkpoint.INFO_FILE).exists():
        try:
            extra = reader.load(folder / "ckpt")
            if extra != {"step": reader.steps, "digest": digest(reader)} or reader.steps < told.saved:
                found.append(f"step {reader.steps} was loaded, {told.saved} had been saved")
        except MpbackendError as error:
            found.append(f"after the save of step {told.saved}: {error}")
    try:
        reader.save(folder / "ckpt")
        info = checkpoint.read_info(folder / "ckpt")
        if {item.name for item in (folder / "ckpt").iterdir()} != {checkpoint.INFO_FILE, *info.names()}:
            found.append(f"saving again leaves {sorted(item.name for item in (folder / 'ckpt').iterdir())}")
    except MpbackendError as error:
        found.append(f"saving again: {error}")
    if told.flushed:
        try:
            steps = [row.step for row in load_record(folder / "record").steps]
            if steps != list(range(1, len(steps) + 1)) or len(steps) < told.flushed:
                found.append(f"steps {steps} are recorded, {told.flushed} had been flushed")
        except MpbackendError as error:
            found.append(f"after the flush of step {told.flushed}: {error}")
    return found


def plant(fault: str) -> None:
    """Plant a fault in this process: ``gone`` puts the checkpoint aside before the new one is named, ``early`` removes the old files first."""
    publish = checkpoint.publish

    def planted(folder: Path, info: checkpoint.CheckpointInfo) -> None:
        if fault == "gone" and (folder / checkpoint.INFO_FILE).exists():
            (folder / checkpoint.INFO_FILE).rename(folder / "state-000000000000.pt")
        elif fault == "early":
            for name in checkpoint.read_info(folder).names() if (folder / checkpoint.INFO_FILE).exists() else ():
                (folder / name).unlink()
        publish(folder, info)

    checkpoint.publish = planted


def main() -> None:
    """Kill runs as the command line says; print a JSON object: how many were killed, and what was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=["random", "every"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="with `every`: the first call that is killed")
    parser.add_argument("--fault", default="", help="plant a fault, and stop when it is found")
    options = parser.parse_args()
    torch.set_num_threads(1)
    target = mpbackend.select("cpu")
    plan = target.plan("fp32")
    reader = make_session(target, plan, None)
    plant(options.fault)
    rng = random.Random(options.seed)

    def reporting(tell: Tick) -> None:
        watch_files(lambda: tell(b".", 0))
        train(target, plan, options.folder, tell)

    def dying(call: int) -> Callable[[Tick], None]:
        def work(tell: Tick) -> None:
            left = iter(range(call))

            def die_in_turn() -> None:
                if next(left, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)

            watch_files(die_in_turn)
            train(target, plan, options.folder, tell)

        return work

    found: list[str] = []
    killed = 0
    numbers: Iterable[int] = itertools.count(options.first)
    if options.mode == "random":
        numbers = range(options.runs)
        events = run(reporting, None, 0.0).events
    shutil.rmtree(options.folder, ignore_errors=True)
    for number in numbers:
        told = run(reporting, rng.randint(1, events), rng.random() * SPIN_S) if options.mode == "random" else run(dying(number), None, 0.0)
        found += [f"run {number}: {fault}" for fault in faults(reader, options.folder, told)]
        killed += not told.finished
        shutil.rmtree(options.folder, ignore_errors=True)
        if (options.mode == "every" and told.finished) or (options.fault and found):
            break
    print(json.dumps({"killed": killed, "faults": found}))


if __name__ == "__main__":
    main()
