"""Saving and restoring a session.

A checkpoint is a folder: ``state.pt`` holds tensors and plain containers only (it is read with ``weights_only``, so nothing in it is executed), and
``checkpoint.json`` says for people and programs what is in it. It is written under a temporary name and renamed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from mpbackend import __version__
from mpbackend.errors import DocumentError, SessionError

if TYPE_CHECKING:
    from mpbackend.train.session import Session

SCHEMA = 1
STATE_FILE = "state.pt"
INFO_FILE = "checkpoint.json"


class CheckpointInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a checkpoint holds.

    Attributes:
        schema: version of the layout.
        mpbackend: version that wrote it.
        recipe: canonical text of the recipe that was asked.
        recipe_hash: its hash.
        device_type: torch device type that the random state belongs to.
        step: steps so far.
        loss_scale: present loss scale.
    """

    schema: int
    mpbackend: str
    recipe: str
    recipe_hash: str
    device_type: str
    step: int
    loss_scale: float


def save(session: Session, path: str | os.PathLike[str], extra: Mapping[str, Any]) -> None:
    """Write a checkpoint; an older one of the same name is replaced when the new one is complete.

    Args:
        session: the session, at a step boundary.
        path: folder to write.
        extra: plain values or tensors of the user's own.

    Raises:
        SessionError: ``extra`` or a state holds an object that cannot be read back safely.
    """
    folder = checked_folder(path)
    plan = session.plan
    info = CheckpointInfo(
        schema=SCHEMA,
        mpbackend=__version__,
        recipe=plan.recipe,
        recipe_hash=plan.recipe_hash,
        device_type=plan.device.type,
        step=session.steps,
        loss_scale=session.loss_scale.value,
    )
    content = {
        "model": session.model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in session.optimizers],
        "schedulers": [scheduler.state_dict() for scheduler in session.schedulers],
        "loss_scale": session.loss_scale.state_dict(),
        "steps": session.steps,
        "random": random_state(plan.device.type),
        "segment": session.segment,
        "extra": dict(extra),
    }
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        torch.save(content, temporary / STATE_FILE)
        check_readable(temporary / STATE_FILE)
        (temporary / INFO_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(info), indent=2) + b"\n")
        replace_folder(temporary, folder)
    except (OSError, RuntimeError) as error:
        raise SessionError(f"save({str(path)!r})", found=first_line(error), remedy="the checkpoint that was there is untouched") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def checked_folder(path: str | os.PathLike[str]) -> Path:
    """Return the folder to write; ``SessionError`` for what is there and is no checkpoint, so that saving never removes anything else."""
    folder = Path(path)
    try:
        taken = folder.is_symlink() or (folder.exists() and not (folder / INFO_FILE).is_file())
    except OSError as error:
        raise SessionError(f"save({str(path)!r})", found=first_line(error)) from error
    if taken or folder.name in ("", ".."):
        raise SessionError(f"save({str(path)!r})", found="something is there that is no checkpoint", remedy="name a new folder")
    return folder


def check_readable(path: Path) -> None:
    """Raise ``SessionError`` when a state file holds what a safe reader refuses, so that it is found now and not at the next start."""
    try:
        torch.load(path, map_location="meta", weights_only=True, mmap=True)
    except Exception as error:  # the unpickler raises several classes; each means the same here
        raise SessionError("save()", found=f"the state cannot be read back safely: {first_line(error)}", remedy="keep tensors and plain values") from error


def replace_folder(new: Path, folder: Path) -> None:
    """Rename ``new`` to ``folder``, putting an existing folder aside until the new one is in place."""
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    try:
        new.rename(folder)
    except OSError:
        if old.exists():
            old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def load(session: Session, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Restore a checkpoint into a session whose model, optimizers and schedulers were built the same way.

    The random state is restored only on the device type that wrote it: generators of different devices give different numbers anyway.

    Returns:
        The ``extra`` that was saved.

    Raises:
        DocumentError: the folder is not a checkpoint of this version, or belongs to another recipe or model.
    """
    folder = Path(path)
    info = read_info(folder)
    if info.recipe_hash != session.plan.recipe_hash:
        raise DocumentError(f"checkpoint {folder}", found=f"it was made with recipe {info.recipe!r}, the session's is {session.plan.recipe!r}")
    try:
        content = torch.load(folder / STATE_FILE, map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler raises several classes; each means the same here
        raise DocumentError(f"checkpoint {folder / STATE_FILE}", found=first_line(error), remedy="it is damaged or not a checkpoint") from error
    check_content(folder, content, session)
    for name, mine in (("optimizers", session.optimizers), ("schedulers", session.schedulers)):
        if len(content[name]) != len(mine):
            raise DocumentError(f"checkpoint {folder}", found=f"it holds {len(content[name])} {name}, the session has {len(mine)}")
    try:
        session.model.load_state_dict(content["model"])
        for optimizer, saved in zip(session.optimizers, content["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        for scheduler, saved in zip(session.schedulers, content["schedulers"], strict=True):
            scheduler.load_state_dict(saved)
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DocumentError(f"checkpoint {folder}", found=first_line(error), remedy="build the same model and optimizers before load()") from error
    session.loss_scale.load_state_dict(content["loss_scale"])
    session.resume(steps=content["steps"], segment=content["segment"] + 1)
    if info.device_type == session.plan.device.type:
        restore_random_state(info.device_type, content["random"])
    extra: dict[str, Any] = content["extra"]
    return extra


def check_content(folder: Path, content: Any, session: Session) -> None:
    """Raise ``DocumentError`` for a state that does not fit, before anything of the session is changed."""
    counts = ("steps", "segment")
    parts = {"model": dict, "optimizers": list, "schedulers": list, "loss_scale": dict, "random": dict, "extra": dict} | dict.fromkeys(counts, int)
    for name, kind in parts.items():
        if not isinstance(content, dict) or not isinstance(content.get(name), kind) or (name in counts and content[name] < 0):
            raise DocumentError(f"checkpoint {folder / STATE_FILE}", found=f"{name} is missing or no {kind.__name__} that fits", remedy="it is damaged")
    mine = {name: tuple(value.shape) for name, value in session.model.state_dict().items() if isinstance(value, torch.Tensor)}
    theirs = {name: tuple(value.shape) for name, value in content["model"].items() if isinstance(value, torch.Tensor)}
    if mine != theirs:
        name = next(name for name in [*mine, *theirs] if mine.get(name) != theirs.get(name))
        found = f"{name} in the model's state_dict is {theirs.get(name, 'missing')}, the session's model has {mine.get(name, 'none of that name')}"
        raise DocumentError(f"checkpoint {folder}", found=found, remedy="build the same model before load()")


def random_state(device_type: str) -> dict[str, torch.Tensor]:
    """Return the state of the host's generator, and of the device's own."""
    states = {"cpu": torch.get_rng_state()}
    if device_type != "cpu":
        states[device_type] = torch.get_device_module(device_type).get_rng_state()
    return states


def restore_random_state(device_type: str, states: dict[str, torch.Tensor]) -> None:
    """Restore what ``random_state`` returned on the same device type."""
    torch.set_rng_state(states["cpu"])
    if device_type != "cpu" and device_type in states:
        torch.get_device_module(device_type).set_rng_state(states[device_type])


def read_info(folder: Path) -> CheckpointInfo:
    """Return what a checkpoint says about itself; ``DocumentError`` when it is none of this version."""
    try:
        info = msgspec.json.decode((folder / INFO_FILE).read_bytes(), type=CheckpointInfo)
    except OSError as error:
        raise DocumentError(f"checkpoint {folder}", found=error.strerror or str(error), remedy="a checkpoint is a folder that save() wrote") from error
    except msgspec.DecodeError as error:
        raise DocumentError(f"checkpoint {folder / INFO_FILE}", found=str(error)) from error
    if info.schema != SCHEMA:
        raise DocumentError(f"checkpoint {folder}", found=f"schema {info.schema}", allowed=[str(SCHEMA)])
    return info


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message."""
    return (str(error).splitlines() or [type(error).__name__])[0]
