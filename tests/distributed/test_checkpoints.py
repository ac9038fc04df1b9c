"""Checkpoints that several ranks write and read together."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import mpbackend
from mpbackend.errors import DocumentError, MpbackendError, SessionError
from mpbackend.train import checkpoint
from mpbackend.train.session import Session
from tests.support.ranks import run_ranks


class Item:
    """A user's own object with a state."""

    def __init__(self, value: object) -> None:
        self.value = value

    def state_dict(self) -> dict[str, object]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.value = state["value"]


def make(rank: int, size: int, *, seed: int = 0, sharded: bool = False, width: int = 9, steps: int = 2) -> Session:
    """Return a session whose optimizer has made some steps; each rank's generator stands elsewhere."""
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(nn.Linear(6, width), nn.Linear(width, 3))
    if sharded:
        for layer in model.children():
            fully_shard(layer)
        fully_shard(model)
    elif size > 1:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for number in range(steps):
        model(torch.full((2, 6), number + 1.0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    session = mpbackend.select("cpu").prepare(model, optimizer, "fp32")
    session.stateful = {"item": Item(rank)}
    assert (1 if session.ranks is None else session.ranks.size) == size
    torch.manual_seed(100 + rank)
    return session


def content(session: Session) -> list[Any]:
    """Return model and optimizer state as whole tensors, in order, as lists."""
    (optimizer,) = session.optimizers
    states = [dict(session.model.state_dict()), *optimizer.state_dict()["state"].values()]
    return [whole(value).tolist() for state in states for value in state.values()]


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def save_and_load(rank: int, size: int, folder: str, sharded: bool) -> tuple[list[Any], list[Any], bool, object]:
    session = make(rank, size, sharded=sharded)
    session.save(folder, extra={"from": rank})
    draws = torch.rand(3)
    other = make(rank, size, seed=5, sharded=sharded, steps=1)
    other.stateful = {"item": Item(None)}
    assert other.load(folder) == {"from": 0}
    return content(session), content(other), torch.equal(torch.rand(3), draws), other.stateful["item"].value


@pytest.mark.parametrize("sharded", [False, True])
def test_every_rank_gets_its_own_generators_and_objects_back(tmp_path: Path, sharded: bool) -> None:
    results = run_ranks(2, save_and_load, 2, str(tmp_path / "ckpt"), sharded)
    for rank, (saved, loaded, same_draws, item) in enumerate(results):
        assert saved == loaded
        assert same_draws
        assert item == rank
    info = checkpoint.read_info(tmp_path / "ckpt")
    assert (info.ranks, info.sharded) == (2, sharded)
    assert {path.name for path in (tmp_path / "ckpt").iterdir()} == {"checkpoint.json", *info.names()}


def only_save(rank: int, size: int, folder: str, sharded: bool) -> list[Any]:
    session = make(rank, size, sharded=sharded)
    session.save(folder)
    session.save(folder)
    return content(session)


def only_load(rank: int, size: int, folder: str, sharded: bool) -> list[Any]:
    session = make(rank, size, seed=5, sharded=sharded, steps=0)
    state = torch.get_rng_state()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        session.load(folder)
    (said,) = [str(item.message) for item in caught if "ranks" in str(item.message)]
    assert f"was written by 2 ranks, now {size} load it: not restored are random state, data position, stateful 'item'" in said
    assert torch.equal(state, torch.get_rng_state())
    return content(session)


@pytest.mark.parametrize(("size", "sharded"), [(3, False), (3, True), (1, True)])
def test_another_number_of_ranks_loads_what_ranks_share_and_says_what_is_lost(tmp_path: Path, size: int, sharded: bool) -> None:
    saved = run_ranks(2, only_save, 2, str(tmp_path / "ckpt"), sharded)[0]
    assert run_ranks(size, only_load, size, str(tmp_path / "ckpt"), sharded) == [saved] * size


def test_one_process_loads_what_two_ranks_wrote(tmp_path: Path) -> None:
    saved = run_ranks(2, only_save, 2, str(tmp_path / "ckpt"), False)[0]
    assert only_load(0, 1, str(tmp_path / "ckpt"), False) == saved


def failing_save(rank: int, size: int, folder: str) -> str:
    session = make(rank, size)
    session.save(folder)
    before = sorted(path.name for path in Path(folder).iterdir())
    if rank == 1:
        session.stateful = {"item": Item(object())}
    try:
        session.save(folder)
    except SessionError as error:
        assert sorted(path.name for path in Path(folder).iterdir()) == before or rank == 1
        return str(error)
    return ""


def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_the_one_before(tmp_path: Path) -> None:
    first, second = run_ranks(2, failing_save, 2, str(tmp_path / "ckpt"))
    assert "it failed on rank 1: save(): the state cannot be read back safely" in first
    assert second.startswith("save(): the state cannot be read back safely")
    info = checkpoint.read_info(tmp_path / "ckpt")
    assert {path.name for path in (tmp_path / "ckpt").iterdir()} == {"checkpoint.json", *info.names()}


def failing_load(rank: int, size: int, folder: str, sharded: bool, damage: str) -> tuple[str, bool]:
    session = make(rank, size, sharded=sharded)
    session.save(folder)
    if rank == 0 and damage == "rank file":
        (Path(folder) / checkpoint.read_info(Path(folder)).rank_file(1)).write_bytes(b"")
    other = make(rank, size, seed=5, sharded=sharded, width=8 if damage == "other model" else 9)
    before = content(other), other.steps, other.stateful["item"].value, torch.get_rng_state().tolist()
    other.ranks.barrier()  # type: ignore[union-attr] # the damage is done
    try:
        other.load(folder)
    except MpbackendError as error:
        assert isinstance(error, DocumentError)
        return str(error), before == (content(other), other.steps, other.stateful["item"].value, torch.get_rng_state().tolist())
    return "", False


@pytest.mark.parametrize(
    ("sharded", "damage", "found"),
    [(False, "rank file", "rank1.pt"), (False, "other model", "0.weight in the model's"), (True, "rank file", "rank1.pt"), (True, "other model", "(9, 6)")],
)
def test_a_load_that_fails_on_one_rank_fails_on_all_and_changes_none(tmp_path: Path, sharded: bool, damage: str, found: str) -> None:
    for text, unchanged in run_ranks(2, failing_load, 2, str(tmp_path / "ckpt"), sharded, damage):
        assert found in text
        assert unchanged


def mixed_load(rank: int, size: int, folder: str, sharded: bool) -> str:
    make(rank, size, sharded=sharded).save(folder)
    try:
        make(rank, size, sharded=not sharded).load(folder)
    except DocumentError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("sharded", "found"), [(True, "it holds a sharded model, the session's is not"), (False, "it holds a whole model, the session's is sharded")]
)
def test_a_sharded_and_a_whole_checkpoint_are_told_apart(tmp_path: Path, sharded: bool, found: str) -> None:
    for text in run_ranks(2, mixed_load, 2, str(tmp_path / "ckpt"), sharded):
        assert found in text


def fresh_sharded(rank: int, size: int, folder: str) -> tuple[list[Any], list[Any], int]:
    session = make(rank, size, sharded=True, steps=0)
    session.save(folder)
    other = make(rank, size, seed=5, sharded=True, steps=1)
    other.load(folder)
    return content(session), content(other), len(other.optimizers[0].state)


def test_saving_a_sharded_optimizer_before_its_first_step_makes_no_step(tmp_path: Path) -> None:
    for saved, loaded, states in run_ranks(2, fresh_sharded, 2, str(tmp_path / "ckpt")):
        assert saved == loaded
        assert states == 0


class Weights:
    """Working weights of a sharded model: what saving and loading ask of them."""

    def __init__(self, model: nn.Module, factor: float) -> None:
        self.masters = {name: parameter.detach() * factor for name, parameter in model.named_parameters()}
        self.generator = torch.tensor([int(factor)], dtype=torch.uint8)

    def stand_ins(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return []  # the optimizers hold the parameters themselves

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        return {"masters": self.masters, "compensation": {}, "stochastic": {"cpu:0": self.generator}}

    def load_state_dict(self, state: dict[str, dict[str, torch.Tensor]]) -> None:
        self.masters, self.generator = state["masters"], state["stochastic"]["cpu:0"]


def with_weights(rank: int, size: int, folder: str) -> tuple[list[Any], list[Any], int]:
    session, other = make(rank, size, sharded=True), make(rank, size, seed=5, sharded=True)
    weights = [Weights(session.model, 3.0), Weights(other.model, 1.0)]
    session.weights, other.weights = weights  # type: ignore[assignment] # the part of them that is used
    session.save(folder)
    other.load(folder)
    one, two = ([whole(value).tolist() for value in item.masters.values()] for item in weights)
    return one, two, int(weights[1].generator)


def test_the_working_weights_of_a_sharded_model_go_with_it(tmp_path: Path) -> None:
    for saved, loaded, generator in run_ranks(2, with_weights, 2, str(tmp_path / "ckpt")):
        assert saved == loaded
        assert generator == 3
