"""A run that is resumed in the middle of a pass over its data goes on with the very next batch, and with the same bits."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler, TensorDataset

from mpbackend.errors import SessionError
from mpbackend.train.content import DataContent
from mpbackend.train.data import DataWatch
from mpbackend.train.random_state import host_state
from mpbackend.train.session import Session
from tests.support.training import Prepare

ROWS, BATCH = 24, 4
Loader = DataLoader[torch.Tensor]


class Noisy(Dataset[torch.Tensor]):
    """Rows that are augmented at random: by torch's generator and by Python's."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), float(index)) + torch.rand(8) + random.random()


def shuffled(workers: int) -> Loader:
    return DataLoader(Noisy(), BATCH, shuffle=True, num_workers=workers)


def own_generator(workers: int) -> Loader:
    return DataLoader(Noisy(), BATCH, shuffle=True, num_workers=workers, generator=torch.Generator().manual_seed(3))


def own_sampler(workers: int) -> Loader:
    sampler = RandomSampler(Noisy(), replacement=True, num_samples=ROWS, generator=torch.Generator().manual_seed(4))
    return DataLoader(Noisy(), BATCH, sampler=sampler, num_workers=workers)


def by_epoch(workers: int) -> Loader:
    sampler: DistributedSampler[torch.Tensor] = DistributedSampler(Noisy(), num_replicas=1, rank=0)
    sampler.set_epoch(7)
    return DataLoader(Noisy(), BATCH, sampler=sampler, num_workers=workers)


def make_session(prepare: Prepare, seed: int) -> Session:
    torch.manual_seed(seed)
    random.seed(seed)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    return prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), "bf16")


def train(session: Session, loader: Any, passes: int, save_at: int | None = None, path: Path | None = None) -> Iterator[list[float]]:
    """Train over ``loader`` and yield the weights after each step; save within the loop after step ``save_at``."""
    for _ in range(passes):
        for x in session.watch(loader):
            with session.autocast():
                loss = functional.mse_loss(session.model(x), x.mean(1, keepdim=True))
            session.backward(loss)
            session.step()
            if session.steps == save_at and path is not None:
                session.save(path)
            yield nn.utils.parameters_to_vector(session.model.parameters()).tolist()


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # says how many cores a machine has
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [shuffled, own_generator, own_sampler, by_epoch])
def test_a_run_resumed_in_the_middle_of_a_pass_is_bit_identical(prepare: Prepare, tmp_path: Path, make: Callable[[int], Loader], workers: int) -> None:
    first = make_session(prepare, 0)
    straight = list(train(first, make(workers), 2, save_at=8, path=tmp_path / "ckpt"))
    assert len(straight) == 2 * ROWS // BATCH
    second = make_session(prepare, 1)
    list(train(second, make(workers), 1))
    second.load(tmp_path / "ckpt")
    random.random()
    torch.rand(3)
    loader = make(workers)
    if make is by_epoch:
        loader.sampler.set_epoch(0)  # type: ignore[attr-defined] # a DistributedSampler
    assert list(train(second, loader, 1)) == straight[8:]


def test_a_checkpoint_between_two_passes_begins_the_next_one(prepare: Prepare, tmp_path: Path) -> None:
    first = make_session(prepare, 0)
    straight = list(train(first, shuffled(0), 1))
    first.save(tmp_path / "ckpt")
    straight += train(first, shuffled(0), 1)
    second = make_session(prepare, 1)
    second.load(tmp_path / "ckpt")
    assert list(train(second, shuffled(0), 1)) == straight[6:]


def test_a_pass_that_was_left_early_goes_on_where_it_was_left(prepare: Prepare, tmp_path: Path) -> None:
    first = make_session(prepare, 0)
    for number, _ in enumerate(train(first, range_loader(), 1)):
        if number == 1:
            break
    first.save(tmp_path / "ckpt")
    second = make_session(prepare, 1)
    second.load(tmp_path / "ckpt")
    assert [int(x[0, 0]) for x in second.watch(range_loader())] == [2, 3, 4, 5]
    assert [int(x[0, 0]) for x in second.watch(range_loader())] == [0, 1, 2, 3, 4, 5]


def range_loader(count: int = 6) -> list[torch.Tensor]:
    return [torch.full((2, 8), float(number)) for number in range(count)]


@pytest.fixture
def saved(prepare: Prepare, tmp_path: Path) -> Path:
    """A checkpoint after 3 of 6 batches."""
    session = make_session(prepare, 0)
    list(train(session, range_loader(), 1, save_at=3, path=tmp_path / "saved"))
    return tmp_path / "saved"


def test_resume_false_begins_anew(prepare: Prepare, saved: Path) -> None:
    session = make_session(prepare, 1)
    session.load(saved)
    assert len(list(session.watch(range_loader(), resume=False))) == 6
    assert len(list(session.watch(range_loader()))) == 6


def test_a_checkpoint_right_after_loading_keeps_the_position(prepare: Prepare, saved: Path, tmp_path: Path) -> None:
    first = make_session(prepare, 1)
    first.load(saved)
    first.save(tmp_path / "again")
    second = make_session(prepare, 2)
    second.load(tmp_path / "again")
    assert [int(x[0, 0]) for x in second.watch(range_loader())] == [3, 4, 5]


def test_a_checkpoint_of_a_resumed_pass_counts_from_its_start(prepare: Prepare, saved: Path, tmp_path: Path) -> None:
    first = make_session(prepare, 1)
    first.load(saved)
    list(train(first, range_loader(), 1, save_at=5, path=tmp_path / "again"))
    second = make_session(prepare, 2)
    second.load(tmp_path / "again")
    assert [int(x[0, 0]) for x in second.watch(range_loader())] == [5]


def test_a_pass_inside_a_pass_leaves_the_outer_position(prepare: Prepare, tmp_path: Path) -> None:
    first = make_session(prepare, 0)
    outer = first.watch(range_loader())
    assert [int(next(outer)[0, 0]) for _ in range(2)] == [0, 1]
    assert len(list(first.watch(range_loader(4)))) == 4
    first.save(tmp_path / "ckpt")
    outer.close()  # type: ignore[attr-defined] # a generator
    second = make_session(prepare, 1)
    second.load(tmp_path / "ckpt")
    assert [int(x[0, 0]) for x in second.watch(range_loader())] == [2, 3, 4, 5]


def test_a_loader_that_is_too_short_or_of_another_kind_is_refused(prepare: Prepare, saved: Path) -> None:
    session = make_session(prepare, 1)
    session.load(saved)
    with pytest.raises(SessionError, match=r"after 3 batches of a pass, this loader has 2; .* resume=False begins anew"):
        list(session.watch(range_loader(2)))
    session.load(saved)
    with pytest.raises(SessionError, match=r"the loader has 1 generators of its own, the one of the checkpoint had 0; .* resume=False"):
        list(session.watch(own_generator(0)))


class Stateful:
    """A loader with a state of its own, which draws each batch only once."""

    def __init__(self) -> None:
        self.position = 0
        self.drawn: list[int] = []

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.position < 6:
            self.position += 1
            self.drawn.append(self.position)
            yield torch.full((2, 8), float(self.position))
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def test_a_loader_with_a_state_of_its_own_is_asked_for_it(prepare: Prepare, tmp_path: Path) -> None:
    first = make_session(prepare, 0)
    straight = list(train(first, Stateful(), 1, save_at=4, path=tmp_path / "ckpt"))
    second = make_session(prepare, 1)
    second.load(tmp_path / "ckpt")
    loader = Stateful()
    assert list(train(second, loader, 1)) == straight[4:]
    assert loader.drawn == [5, 6]


class Drawing:
    """A loader that draws its batches from a generator of its own, which the training loop uses as well."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(2)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(6):
            yield torch.rand(2, generator=self.generator)


def test_a_generator_of_the_loader_that_others_use_too_goes_on(prepare: Prepare, tmp_path: Path) -> None:
    def drawn(session: Session, save_at: int) -> Iterator[list[float]]:
        loader = Drawing()
        for number, x in enumerate(session.watch(loader)):
            noise = torch.rand(2, generator=loader.generator)
            if number == save_at:
                session.save(tmp_path / "ckpt")
            yield (x + noise).tolist()

    straight = list(drawn(make_session(prepare, 0), 2))
    second = make_session(prepare, 1)
    second.load(tmp_path / "ckpt")
    assert list(drawn(second, -1)) == straight[3:]


def test_the_fingerprint_goes_on_from_the_one_that_was_saved(prepare: Prepare, saved: Path) -> None:
    def resumed() -> tuple[int, str]:
        session = make_session(prepare, 1)
        session.load(saved)
        list(session.watch(range_loader()))
        return session.data.batches, session.data.fingerprint

    straight = make_session(prepare, 0)
    list(straight.watch(range_loader()))
    assert resumed() == resumed()
    assert resumed()[0] == straight.data.batches == 6
    assert resumed()[1] != straight.data.fingerprint
    prints = set()
    for before in ("", "0123", "4567"):
        data = DataWatch()
        data.load(DataContent(batches=3, fingerprint=before), host_state())
        list(data.watch(range_loader()))
        prints.add(data.fingerprint)
    assert len(prints) == 3


def test_watching_draws_nothing_from_the_generators(prepare: Prepare) -> None:
    session = make_session(prepare, 0)
    before = torch.get_rng_state(), random.getstate()
    list(session.watch(range_loader()))
    session.data.state()
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()


def rows(first: int) -> Loader:
    """Return a shuffled loader over 24 rows that hold their number, the first of them ``first``; 6 batches."""
    return DataLoader(TensorDataset(torch.arange(first, first + 24.0).reshape(24, 1).expand(24, 8)), BATCH, shuffle=True)  # type: ignore[arg-type] # tuples


def numbers(batch: Any) -> list[int]:
    x = batch[0] if isinstance(batch, (list, tuple)) else batch
    return [int(value) for value in x[:, 0]]


def make_step(session: Session) -> None:
    with session.autocast():
        loss = session.model(torch.ones(2, 8)).square().mean()
    session.backward(loss)
    session.step()


def resumed_session(prepare: Prepare, path: Path) -> Session:
    session = make_session(prepare, 7)
    session.load(path)
    torch.rand(5)
    return session


def test_a_validation_that_is_left_early_within_a_training_pass_has_no_position(prepare: Prepare, tmp_path: Path) -> None:
    def run(session: Session, save: bool) -> Iterator[list[int]]:
        for batch in session.watch(rows(0)):
            yield numbers(batch)
            make_step(session)
            if save and session.steps == 4:
                for _ in session.watch(rows(1000)):
                    break
                session.save(tmp_path / "ckpt")

    straight = list(run(make_session(prepare, 0), True))
    assert list(run(resumed_session(prepare, tmp_path / "ckpt"), False)) == straight[4:]


def test_two_passes_at_once_both_go_on(prepare: Prepare, tmp_path: Path) -> None:
    def run(session: Session, save_at: int) -> Iterator[tuple[list[int], list[int], float]]:
        for one, other in zip(session.watch(noisy_rows(0)), session.watch(noisy_rows(100)), strict=True):
            make_step(session)
            if session.steps == save_at:
                session.save(tmp_path / "ckpt")
            yield numbers(one), numbers(other), float(one[0, 1] + other[0, 1])

    straight = list(run(make_session(prepare, 0), 3))
    assert len(straight) == 6
    assert list(run(resumed_session(prepare, tmp_path / "ckpt"), 0)) == straight[3:]


class NoisyRows(Dataset[torch.Tensor]):
    """Rows that hold their number, then noise of torch's generator."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.cat([torch.tensor([float(self.first + index)]), torch.rand(7)])


def noisy_rows(first: int) -> Loader:
    return DataLoader(NoisyRows(first), BATCH, shuffle=True)


@pytest.mark.parametrize("shorter", [0, 1])
def test_between_two_rounds_over_pairs_there_is_no_position(prepare: Prepare, tmp_path: Path, shorter: int) -> None:
    def run(session: Session) -> list[tuple[list[int], list[int]]]:
        loaders = [session.watch(range_loader(6 - 2 * (number == shorter))) for number in range(2)]
        pairs = []
        for one, other in zip(*loaders, strict=False):
            make_step(session)
            pairs.append((numbers(one), numbers(other)))
        return pairs

    first = make_session(prepare, 0)
    straight = run(first)
    assert len(straight) == 4
    del straight[4:]
    first.save(tmp_path / "ckpt")
    assert run(resumed_session(prepare, tmp_path / "ckpt")) == straight


def test_a_round_over_pairs_that_is_left_early_goes_on_in_both(prepare: Prepare, tmp_path: Path) -> None:
    first = make_session(prepare, 0)
    for _ in zip(first.watch(range_loader()), first.watch(range_loader()), strict=True):
        make_step(first)
        break
    first.save(tmp_path / "ckpt")
    second = resumed_session(prepare, tmp_path / "ckpt")
    pairs = zip(second.watch(range_loader()), second.watch(range_loader()), strict=True)
    assert [(numbers(one)[0], numbers(other)[0]) for one, other in pairs] == [(number, number) for number in range(1, 6)]


@pytest.fixture
def shuffled_save(prepare: Prepare, tmp_path: Path) -> tuple[Path, list[list[int]]]:
    """A checkpoint after 4 of 6 shuffled batches, and the two that are left."""
    session = make_session(prepare, 0)
    seen = []
    for batch in session.watch(rows(0)):
        seen.append(numbers(batch))
        make_step(session)
        if session.steps == 4:
            session.save(tmp_path / "shuffled")
    return tmp_path / "shuffled", seen[4:]


def test_a_validation_without_gradients_or_of_another_name_leaves_the_position_to_the_training(
    prepare: Prepare, shuffled_save: tuple[Path, list[list[int]]], tmp_path: Path
) -> None:
    path, rest = shuffled_save
    session = resumed_session(prepare, path)
    with torch.no_grad():
        assert len(list(session.watch(rows(1000)))) == 6
    assert len(list(session.watch(rows(1000), name="validation"))) == 6
    session.save(tmp_path / "again")
    assert [numbers(batch) for batch in session.watch(rows(0))] == rest
    assert len(list(session.watch(rows(0)))) == 6
    again = resumed_session(prepare, tmp_path / "again")
    assert [numbers(batch) for batch in again.watch(rows(0))] == rest


def test_another_loader_is_refused_and_leaves_the_position_and_the_generators(prepare: Prepare, shuffled_save: tuple[Path, list[list[int]]]) -> None:
    path, rest = shuffled_save
    session = resumed_session(prepare, path)
    before = torch.get_rng_state()
    with pytest.raises(SessionError, match=r"the first batch is not the one that the saved pass began with; .*name=.*resume=True"):
        next(iter(session.watch(rows(1000))))
    assert torch.equal(before, torch.get_rng_state())
    assert [numbers(batch) for batch in session.watch(rows(0))] == rest


def test_who_insists_gets_other_values_with_a_warning(prepare: Prepare, shuffled_save: tuple[Path, list[list[int]]]) -> None:
    path, rest = shuffled_save
    session = resumed_session(prepare, path)
    with pytest.warns(UserWarning, match="the first batch is not the one that the saved pass began with"):
        batches = list(session.watch(rows(1000), resume=True))
    assert [[number - 1000 for number in numbers(batch)] for batch in batches] == rest


def test_batches_without_tensors_are_told_apart(prepare: Prepare, tmp_path: Path) -> None:
    first = make_session(prepare, 0)
    for batch in first.watch(["a", "b", "c"]):
        make_step(first)
        if batch == "b":
            first.save(tmp_path / "ckpt")
    second = resumed_session(prepare, tmp_path / "ckpt")
    with pytest.raises(SessionError, match="the first batch is not"):
        list(second.watch(["x", "b", "c"]))
    assert list(second.watch(["a", "b", "c"])) == ["c"]


def test_a_training_pass_under_another_name_than_the_saved_one_is_told(prepare: Prepare, shuffled_save: tuple[Path, list[list[int]]]) -> None:
    session = resumed_session(prepare, shuffled_save[0])
    with pytest.warns(UserWarning, match=r"a step was made with a pass 'training' from its beginning.*middle of a pass 'data'.*resume=True"):
        for batch in session.watch(rows(0), name="training"):
            assert len(numbers(batch)) == BATCH
            make_step(session)
    assert len(list(session.watch(rows(0)))) == 6


@torch.no_grad()
def fetched(iterator: Iterator[Any]) -> list[int] | None:
    batch = next(iterator, None)
    return None if batch is None else numbers(batch)


def test_a_training_pass_that_is_drawn_without_gradients_has_a_position(prepare: Prepare, tmp_path: Path) -> None:
    def run(session: Session, resume: bool | None = None, save_at: int = 0) -> Iterator[list[int]]:
        iterator = session.watch(rows(0), resume=resume)
        while (batch := fetched(iterator)) is not None:
            make_step(session)
            if session.steps == save_at:
                session.save(tmp_path / "ckpt")
            yield batch

    straight = list(run(make_session(prepare, 0), save_at=4))
    assert list(run(resumed_session(prepare, tmp_path / "ckpt"), resume=True)) == straight[4:]
    with pytest.warns(UserWarning, match=r"a step was made with a pass 'data' from its beginning.*resume=True"):
        assert len(list(run(resumed_session(prepare, tmp_path / "ckpt")))) == 6


def test_a_pass_that_stays_open_beside_the_training_without_gradients_is_not_its_position(prepare: Prepare, tmp_path: Path) -> None:
    first = make_session(prepare, 0)
    validation = first.watch(range_loader())
    for _ in first.watch(range_loader()):
        fetched(validation)
        make_step(first)
        if first.steps == 2:
            first.save(tmp_path / "ckpt")
    second = resumed_session(prepare, tmp_path / "ckpt")
    validation = second.watch(range_loader(5))
    assert fetched(validation) == [0, 0]
    assert [numbers(batch)[0] for batch in second.watch(range_loader())] == [2, 3, 4, 5]
    assert len(list(second.watch(range_loader()))) == 6


def test_a_pass_that_a_load_overtakes_ends_with_an_error(prepare: Prepare, tmp_path: Path) -> None:
    session = make_session(prepare, 0)
    straight = []
    with pytest.raises(SessionError, match=r"load\(\) .* while this pass was open; leave the loop after load\(\), and watch the loader again"):
        for batch in session.watch(rows(0)):
            straight.append(numbers(batch))
            make_step(session)
            if len(straight) == 2:
                session.save(tmp_path / "ckpt")
            if len(straight) == 4:
                session.load(tmp_path / "ckpt")
    again = [numbers(batch) for batch in session.watch(rows(0))]
    assert again[:2] == straight[2:]
    assert len(again) == 4
    assert len(list(session.watch(rows(0)))) == 6


def test_a_rollback_that_leaves_the_loop_draws_the_batches_again(prepare: Prepare, tmp_path: Path) -> None:
    session = make_session(prepare, 0)
    straight = []
    for batch in session.watch(rows(0)):
        straight.append(numbers(batch))
        make_step(session)
        if len(straight) == 2:
            session.save(tmp_path / "ckpt")
        if len(straight) == 4:
            session.load(tmp_path / "ckpt")
            break
    again = [numbers(batch) for batch in session.watch(rows(0))]
    assert again[:2] == straight[2:]
    assert len(again) == 4


def test_an_iterator_is_resumed_with_a_warning_that_names_it_or_refused(prepare: Prepare, tmp_path: Path) -> None:
    def batches() -> Iterator[Any]:
        yield from rows(0)

    first = make_session(prepare, 0)
    straight = []
    for batch in first.watch(batches()):
        straight.append(numbers(batch))
        make_step(first)
        if first.steps == 2:
            first.save(tmp_path / "ckpt")
    second = resumed_session(prepare, tmp_path / "ckpt")
    with pytest.warns(UserWarning, match=r"watch\(\) resumes a generator, .* watch the loader itself"):
        assert [numbers(batch) for batch in second.watch(batches())] == straight[2:]
    third = resumed_session(prepare, tmp_path / "ckpt")
    assert [numbers(batch) for batch in third.watch(batches(), resume=True)] == straight[2:]
    fourth = resumed_session(prepare, tmp_path / "ckpt")
    advanced = batches()
    next(advanced)
    with pytest.raises(SessionError, match="the first batch is not the one"):
        list(fourth.watch(advanced))


def test_a_stateful_loader_of_another_length_is_refused(prepare: Prepare, tmp_path: Path) -> None:
    class Sized(Stateful):
        def __init__(self, length: int) -> None:
            super().__init__()
            self.length = length

        def __len__(self) -> int:
            return self.length

    first = make_session(prepare, 0)
    list(train(first, Sized(6), 1, save_at=4, path=tmp_path / "ckpt"))
    second = resumed_session(prepare, tmp_path / "ckpt")
    with pytest.raises(SessionError, match="the loader has 5 batches, the one of the checkpoint had 6"):
        list(second.watch(Sized(5)))
    assert len(list(second.watch(Sized(6)))) == 2


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # says how many cores a machine has
@pytest.mark.parametrize(("saved_in", "loaded_in"), [(1, 0), (2, 0), (1, 2), (2, 2)])
def test_workers_that_outlive_a_pass_get_the_saved_order(prepare: Prepare, tmp_path: Path, saved_in: int, loaded_in: int) -> None:
    def run(session: Session, loader: Loader, save_at: int = 0) -> Iterator[list[int]]:
        for batch in session.watch(loader):
            yield numbers(batch)
            make_step(session)
            if session.steps == save_at:
                session.save(tmp_path / "ckpt")

    first, loader = make_session(prepare, 0), lasting()
    straight = [batch for _ in range(saved_in) for batch in run(first, loader, 6 * saved_in - 2)]
    second, loader = make_session(prepare, 7), lasting()
    for _ in range(loaded_in):
        assert len(list(run(second, loader))) == 6
    second.load(tmp_path / "ckpt")
    assert list(run(second, loader)) == straight[-2:]


def lasting() -> Loader:
    data = TensorDataset(torch.arange(24.0).reshape(24, 1).expand(24, 8))
    return DataLoader(data, BATCH, shuffle=True, num_workers=1, persistent_workers=True)  # type: ignore[arg-type] # tuples
