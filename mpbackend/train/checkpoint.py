"""The files of a checkpoint: whole or not there, whenever the process is killed.

A checkpoint is a folder. Its ``checkpoint.json`` names, by a token, the state files that belong to it; a save writes files of a new token beside the old
ones, syncs them to the disk, and only then replaces ``checkpoint.json`` in one rename. Until that rename the old checkpoint is the checkpoint, and from then on
the new one is; what the pointer does not name is removed afterwards, and at the next save when that was cut short.

The format: ``state-<token>.pt`` holds what all ranks share, ``state-<token>-rank<n>.pt`` what a rank has of its own, ``state-<token>.dcp`` the parts of a
sharded model.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from mpbackend.errors import DocumentError, SessionError

SCHEMA = 2
INFO_FILE = "checkpoint.json"
PARTIAL_INFO_FILE = f".{INFO_FILE}.tmp"
FIRST_STATE_FILE = "state.pt"
"""The only state file of schema 1."""
OURS = re.compile(r"state-[0-9a-f]{12}(-rank[0-9]+)?\.pt|state-[0-9a-f]{12}\.dcp|\.checkpoint\.json\.tmp")

TOKEN = re.compile(r"[0-9a-f]{12}")


class CheckpointInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a checkpoint holds, and which files are its own.

    Attributes:
        schema: version of the layout.
        mpbackend: version that wrote it.
        recipe: canonical text of the recipe that was asked.
        recipe_hash: its hash.
        device_type: torch device type that the random state belongs to.
        step: steps so far.
        loss_scale: present loss scale.
        token: 12 hexadecimal digits in the names of its files; empty under schema 1.
        ranks: ranks that wrote it.
        sharded: whether model and optimizer state are in a folder of ``torch.distributed.checkpoint``.
    """

    schema: int
    mpbackend: str
    recipe: str
    recipe_hash: str
    device_type: str
    step: int
    loss_scale: float
    token: str = ""
    ranks: int = 1
    sharded: bool = False

    def shared_file(self) -> str:
        """Return the name of the file that all ranks share."""
        return f"state-{self.token}.pt" if self.token else FIRST_STATE_FILE

    def rank_file(self, rank: int) -> str:
        """Return the name of the file of one rank."""
        return f"state-{self.token}-rank{rank}.pt"

    def sharded_folder(self) -> str:
        """Return the name of the folder of a sharded model."""
        return f"state-{self.token}.dcp"

    def names(self) -> frozenset[str]:
        """Return the names of all state files."""
        if not self.token:
            return frozenset([FIRST_STATE_FILE])
        return frozenset([self.shared_file(), *map(self.rank_file, range(self.ranks)), *([self.sharded_folder()] if self.sharded else [])])


def checked_folder(path: str | os.PathLike[str]) -> Path:
    """Return the folder to write; ``SessionError`` for what is there and is neither a checkpoint nor the beginning of one."""
    folder = Path(path)
    try:
        taken = folder.is_symlink() or (folder.exists() and not (folder / INFO_FILE).is_file() and not only_ours(folder))
    except OSError as error:
        raise SessionError(f"save({str(path)!r})", found=first_line(error)) from error
    if taken or folder.name in ("", ".."):
        raise SessionError(f"save({str(path)!r})", found="something is there that is no checkpoint", remedy="name a new folder")
    return folder


def only_ours(folder: Path) -> bool:
    """Tell whether a folder holds nothing but what a save that was cut short leaves."""
    return folder.is_dir() and all(OURS.fullmatch(item.name) for item in folder.iterdir())


def next_token(previous: CheckpointInfo | None, step: int) -> str:
    """Return the token of the next save; every rank derives the same one from the checkpoint that is there."""
    return hashlib.blake2b(f"{'' if previous is None else previous.token}/{step}".encode(), digest_size=6).hexdigest()


def write_state(path: Path, content: Mapping[str, Any]) -> None:
    """Write a state file and sync it to the disk.

    Raises:
        SessionError: it holds what a safe reader refuses; found now and not at the next start.
    """
    try:
        with path.open("wb") as file:
            torch.save(dict(content), file)
            file.flush()
            os.fsync(file.fileno())
        torch.load(path, map_location="meta", weights_only=True, mmap=True)
    except OSError:
        raise
    except Exception as error:  # pickling and unpickling raise several classes; each means the same here
        raise SessionError("save()", found=f"the state cannot be read back safely: {first_line(error)}", remedy="keep tensors and plain values") from error


def read_state(path: Path) -> Any:
    """Return the content of a state file, its tensors on the host.

    Raises:
        DocumentError: it is missing, damaged, or holds more than tensors and plain values.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler raises several classes; each means the same here
        raise DocumentError(f"checkpoint {path}", found=first_line(error), remedy="it is damaged or not a checkpoint") from error


def publish(folder: Path, info: CheckpointInfo) -> None:
    """Make the files of ``info`` the checkpoint, then remove those of the one before.

    Raises:
        SessionError: a file that belongs to it is not there: the ranks do not share the folder, or did not see the same checkpoint in it.
    """
    missing = sorted(name for name in info.names() if not (folder / name).exists())
    if missing:
        raise SessionError(f"save({str(folder)!r})", found=f"{missing[0]} is not there", remedy="give every rank the same folder on one file system")
    before = present_info(folder)
    partial = folder / PARTIAL_INFO_FILE
    with partial.open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(info), indent=2) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)
    os.replace(partial, folder / INFO_FILE)
    sync_folder(folder)
    remove_unnamed(folder)
    if before is not None and not before.token:
        (folder / FIRST_STATE_FILE).unlink(missing_ok=True)


def remove_unnamed(folder: Path) -> None:
    """Remove what saves left in a folder and its checkpoint does not name; nothing of other programs, and nothing at all when the pointer is unreadable."""
    try:
        named = read_info(folder).names() if (folder / INFO_FILE).exists() else frozenset()
    except DocumentError:
        return
    for item in [item for item in folder.iterdir() if OURS.fullmatch(item.name) and item.name not in named]:
        if item.is_dir() and not item.is_symlink():
            shutil.rmtree(item)
        else:
            item.unlink()


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, and sync the name of each that was new."""
    for new in [parent for parent in (folder, *folder.parents) if not parent.exists()][::-1]:
        new.mkdir(exist_ok=True)
        sync_folder(new.parent)


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to the disk, where the system can."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def present_info(folder: Path) -> CheckpointInfo | None:
    """Return what the checkpoint in a folder says about itself, None when there is none that this version reads."""
    try:
        return read_info(folder)
    except DocumentError:
        return None


def read_info(folder: Path) -> CheckpointInfo:
    """Return what a checkpoint says about itself; ``DocumentError`` when it is none of this version."""
    try:
        info = msgspec.json.decode((folder / INFO_FILE).read_bytes(), type=CheckpointInfo)
    except OSError as error:
        found = f"no {INFO_FILE}: no save was completed" if folder.is_dir() and only_ours(folder) else error.strerror or str(error)
        raise DocumentError(f"checkpoint {folder}", found=found, remedy="a checkpoint is a folder that save() wrote") from error
    except msgspec.DecodeError as error:
        raise DocumentError(f"checkpoint {folder / INFO_FILE}", found=str(error)) from error
    if info.schema not in (1, SCHEMA):
        raise DocumentError(f"checkpoint {folder}", found=f"schema {info.schema}", allowed=["1", str(SCHEMA)])
    if info.ranks < 1 or (info.token != "" if info.schema == 1 else not TOKEN.fullmatch(info.token)):
        found = f"token {info.token!r} and {info.ranks} ranks under schema {info.schema}"
        raise DocumentError(f"checkpoint {folder / INFO_FILE}", found=found, remedy="it is damaged")
    return info


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message."""
    return (str(error).splitlines() or [type(error).__name__])[0]
