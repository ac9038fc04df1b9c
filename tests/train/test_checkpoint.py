"""The files of a checkpoint; ``test_kill`` kills runs while they write them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mpbackend.errors import DocumentError, SessionError
from mpbackend.train import checkpoint
from mpbackend.train.session import Session
from tests.support.training import Prepare


@pytest.fixture
def session(prepare: Prepare) -> Session:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    return prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def own_names(folder: Path) -> list[str]:
    return sorted([checkpoint.INFO_FILE, *checkpoint.read_info(folder).names()])


def test_a_folder_holds_a_pointer_and_the_files_that_it_names(session: Session, tmp_path: Path) -> None:
    session.save(tmp_path / "deep" / "ckpt")
    info = json.loads((tmp_path / "deep" / "ckpt" / "checkpoint.json").read_bytes())
    assert (info["schema"], info["recipe"], info["ranks"], info["sharded"]) == (2, "fp32", 1, False)
    token = info["token"]
    assert names(tmp_path / "deep" / "ckpt") == ["checkpoint.json", f"state-{token}-rank0.pt", f"state-{token}.pt"]


def test_saving_again_names_new_files_and_removes_only_its_own(session: Session, tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    session.save(folder)
    before = own_names(folder)
    for name in ("notes.txt", "state-mine.pt", "state.pt", "state-0123456789ab.txt"):
        (folder / name).write_text("the user's")
    (folder / "state-0123456789ab-rank7.pt").write_text("left by a killed save")
    session.save(folder)
    assert own_names(folder)[1:] != before[1:]
    assert names(folder) == sorted([*own_names(folder), "notes.txt", "state-mine.pt", "state.pt", "state-0123456789ab.txt"])


def test_a_first_save_that_was_killed_is_no_checkpoint_and_can_be_repeated(session: Session, tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    session.save(folder)
    (folder / "checkpoint.json").rename(folder / ".checkpoint.json.tmp")
    with pytest.raises(DocumentError, match="no save was completed"):
        session.load(folder)
    session.save(folder)
    assert names(folder) == own_names(folder)
    session.load(folder)


def test_an_empty_folder_may_be_saved_to(session: Session, tmp_path: Path) -> None:
    (tmp_path / "ckpt").mkdir()
    session.save(tmp_path / "ckpt")
    session.load(tmp_path / "ckpt")


def test_every_file_is_on_the_disk_before_the_pointer_names_it(session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, str]] = []

    def noted(name: str, target: Callable[..., str]) -> None:
        inner = getattr(os, name)

        def outer(*args: Any, **kwargs: Any) -> Any:
            calls.append((name, target(*args)))
            return inner(*args, **kwargs)

        monkeypatch.setattr(os, name, outer)

    noted("fsync", lambda descriptor: Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
    noted("replace", lambda _, new: Path(new).name)
    noted("unlink", lambda path, *_: Path(path).name)
    if not Path("/proc/self/fd").exists():
        pytest.skip("nothing tells the name of a descriptor here")
    session.save(tmp_path / "ckpt")
    (first,) = [name for name in names(tmp_path / "ckpt") if name.endswith("-rank0.pt")]
    calls.clear()
    session.save(tmp_path / "ckpt")
    shared, own = sorted(checkpoint.read_info(tmp_path / "ckpt").names(), key=len)
    assert calls[:6] == [
        ("fsync", own),
        ("fsync", shared),
        ("fsync", ".checkpoint.json.tmp"),
        ("fsync", "ckpt"),
        ("replace", "checkpoint.json"),
        ("fsync", "ckpt"),
    ]
    assert sorted(calls[6:]) == [("unlink", first), ("unlink", first.replace("-rank0", ""))]


@pytest.mark.parametrize("name", ["replace", "fsync"])
def test_a_save_that_fails_leaves_the_checkpoint_before_it_and_nothing_else(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    session.save(tmp_path / "ckpt", extra={"number": 1})
    before = {path: path.read_bytes() for path in (tmp_path / "ckpt").iterdir()}

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, name, fail)
        with pytest.raises(SessionError, match=r"No space left on device; the checkpoint that was there is untouched"):
            session.save(tmp_path / "ckpt", extra={"number": 2})
        with pytest.raises(SessionError, match="No space left"):
            session.save(tmp_path / "other")
    assert {path: path.read_bytes() for path in (tmp_path / "ckpt").iterdir()} == before
    assert names(tmp_path) == ["ckpt"]
    assert session.load(tmp_path / "ckpt") == {"number": 1}


@pytest.mark.parametrize("thing", [Path("x"), lambda: None, object()])
def test_what_cannot_be_read_back_safely_is_refused_and_nothing_is_written(session: Session, tmp_path: Path, thing: Any) -> None:
    with pytest.raises(SessionError, match="cannot be read back safely"):
        session.save(tmp_path / "ckpt", extra={"object": thing})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"{}", b'{"schema": 2}', b"\xff"])
def test_a_damaged_checkpoint_is_one_error(session: Session, tmp_path: Path, content: bytes) -> None:
    folder = tmp_path / "ckpt"
    with pytest.raises(DocumentError, match="a checkpoint is a folder"):
        session.load(tmp_path / "missing")
    session.save(folder)
    for name in own_names(folder):
        good = (folder / name).read_bytes()
        (folder / name).write_bytes(content)
        with pytest.raises(DocumentError, match="checkpoint"):
            session.load(folder)
        (folder / name).unlink()
        with pytest.raises(DocumentError, match="checkpoint"):
            session.load(folder)
        (folder / name).write_bytes(good)
    session.load(folder)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"schema": 3}, "schema 3; allowed: 1, 2"),
        ({"schema": 1}, "under schema 1"),
        ({"token": ""}, "under schema 2"),
        ({"token": "../../../../x"}, "token"),
        ({"ranks": 0}, "ranks"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_a_pointer_that_is_none_of_this_version_is_refused(session: Session, tmp_path: Path, change: dict[str, object], found: str) -> None:
    session.save(tmp_path / "ckpt")
    path = tmp_path / "ckpt" / "checkpoint.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | change))
    with pytest.raises(DocumentError, match=found):
        session.load(tmp_path / "ckpt")


def changed(path: Path, part: str, value: object) -> None:
    content = torch.load(path, weights_only=True)
    torch.save(content | {part: value}, path)


@pytest.mark.parametrize(
    ("part", "value"),
    [("model", []), ("optimizers", {}), ("steps", -1), ("steps", "x"), ("segment", None), ("extra", 1), ("optimizers", [{"state": {}}]), ("optimizers", [{}])],
)
def test_a_shared_file_with_a_part_of_another_kind_is_refused(session: Session, tmp_path: Path, part: str, value: object) -> None:
    session.save(tmp_path / "ckpt")
    changed(tmp_path / "ckpt" / checkpoint.read_info(tmp_path / "ckpt").shared_file(), part, value)
    with pytest.raises(DocumentError, match="it is damaged"):
        session.load(tmp_path / "ckpt")


@pytest.mark.parametrize(
    ("part", "value"),
    [("host", {"torch": 1}), ("host", {"torch": torch.zeros(3)}), ("data", {"positions": 3}), ("stateful", [])],
)
def test_a_rank_file_with_a_part_of_another_kind_is_refused(session: Session, tmp_path: Path, part: str, value: object) -> None:
    session.save(tmp_path / "ckpt")
    changed(tmp_path / "ckpt" / checkpoint.read_info(tmp_path / "ckpt").rank_file(0), part, value)
    with pytest.raises(DocumentError, match="it is damaged"):
        session.load(tmp_path / "ckpt")


@pytest.fixture
def first_schema(session: Session, tmp_path: Path) -> Iterator[Path]:
    """A checkpoint as the first version of the layout wrote it."""
    folder = tmp_path / "old"
    session.save(folder)
    info = checkpoint.read_info(folder)
    content = torch.load(folder / info.shared_file(), weights_only=True)
    for name in ("optimizer_notes", "scheduler_kinds", "weights", "counters"):
        del content[name]
    content["random"] = {"cpu": torch.get_rng_state()}
    for name in info.names():
        (folder / name).unlink()
    torch.save(content, folder / "state.pt")
    old = {"schema": 1} | {name: getattr(info, name) for name in ("mpbackend", "recipe", "recipe_hash", "device_type", "step", "loss_scale")}
    (folder / "checkpoint.json").write_text(json.dumps(old))
    yield folder
    shutil.rmtree(folder)


def test_a_checkpoint_of_the_first_schema_loads_and_is_replaced_by_one_of_this(session: Session, first_schema: Path) -> None:
    state = torch.get_rng_state()
    (weight, _) = session.model.parameters()
    wanted = weight.detach().clone()
    torch.manual_seed(7)
    nn.init.zeros_(weight)
    session.load(first_schema)
    assert torch.equal(weight, wanted)
    assert torch.equal(torch.get_rng_state(), state)
    session.save(first_schema)
    assert names(first_schema) == own_names(first_schema)
