from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from mpbackend.errors import DocumentError, SessionError
from mpbackend.train import checkpoint
from mpbackend.train.session import Session
from tests.support.training import Batch, Prepare, make_batches


def build(prepare: Prepare, recipe: str) -> tuple[nn.Module, Session]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    return model, prepare(model, optimizer, recipe, scheduler=scheduler, clip_norm=0.5)


def train(model: nn.Module, session: Session, batches: list[Batch]) -> None:
    for x, y in batches:
        with session.autocast():
            loss = functional.mse_loss(model(x), y)
        session.backward(loss)
        session.step()


def tensors(model: nn.Module) -> list[torch.Tensor]:
    return [value.clone() for value in model.state_dict().values()]


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "fp16:loss_scale.init=1024,loss_scale.interval=3"])
def test_a_resumed_run_is_bit_identical(prepare: Prepare, tmp_path: Path, recipe: str) -> None:
    batches = make_batches(10)
    model, session = build(prepare, recipe)
    train(model, session, batches[:5])
    session.save(tmp_path / "ckpt", extra={"epoch": 3})
    train(model, session, batches[5:])
    wanted, scale = tensors(model), session.loss_scale.state_dict()
    torch.manual_seed(99)
    model, session = build(prepare, recipe)
    train(model, session, make_batches(2, seed=7))
    assert session.load(tmp_path / "ckpt") == {"epoch": 3}
    assert session.steps == 5
    train(model, session, batches[5:])
    assert all(torch.equal(a, b) for a, b in zip(wanted, tensors(model), strict=True))
    assert session.loss_scale.state_dict() == scale


def test_saving_again_replaces_the_checkpoint_and_leaves_nothing_else(prepare: Prepare, tmp_path: Path) -> None:
    model, session = build(prepare, "fp32")
    session.save(tmp_path / "ckpt")
    train(model, session, make_batches(1))
    session.save(tmp_path / "ckpt")
    assert [item.name for item in tmp_path.iterdir()] == ["ckpt"]
    session.steps = 0
    session.load(tmp_path / "ckpt")
    assert session.steps == 1


def test_another_recipe_is_refused(prepare: Prepare, tmp_path: Path) -> None:
    build(prepare, "fp32")[1].save(tmp_path / "ckpt")
    with pytest.raises(DocumentError, match=r"recipe 'fp32'.*'fp16'"):
        build(prepare, "fp16")[1].load(tmp_path / "ckpt")


def test_another_model_is_refused(prepare: Prepare, tmp_path: Path) -> None:
    build(prepare, "fp32")[1].save(tmp_path / "ckpt")
    model = nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    session = prepare(model, optimizer, "fp32", scheduler=torch.optim.lr_scheduler.ConstantLR(optimizer))
    with pytest.raises(DocumentError, match="state_dict"):
        session.load(tmp_path / "ckpt")


def test_open_micro_batches_cannot_be_saved(prepare: Prepare, tmp_path: Path) -> None:
    model = nn.Linear(8, 4)
    session = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", micro_batches=2)
    train(model, session, make_batches(1))
    with pytest.raises(SessionError, match="1 of 2 micro-batches"):
        session.save(tmp_path / "ckpt")


class Sampler:
    """A user's own object with a state."""

    def __init__(self, position: int = 0) -> None:
        self.position = position

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Failing(Sampler):
    """An object that changes itself and then does not take the state."""

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]
        if state["position"] == 9:
            raise KeyError("epoch")


def two(prepare: Prepare, seed: int, second: Any = torch.optim.SGD, stateful: Mapping[str, Any] | None = None) -> Session:
    """Return a session of two optimizers and two schedulers that made two steps."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    optimizers = [torch.optim.AdamW(model[0].parameters(), lr=0.01), second(model[1].parameters(), lr=0.1)]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in optimizers]
    session = prepare(model, optimizers, "fp16:loss_scale.init=64", scheduler=schedulers, stateful=stateful)
    train(model, session, make_batches(2, seed=seed))
    return session


def everything(session: Session) -> dict[str, object]:
    """Return all that a load may change, its tensors as lists."""
    states = [item.state_dict() for item in (session.model, *session.optimizers, *session.schedulers, session.loss_scale, *session.stateful.values())]
    return {
        "states": as_lists(states),
        "counters": (session.steps, session.segment, dict(session.counters)),
        "random": (torch.get_rng_state().tolist(), random.getstate()),
        "data": session.data.state(),
    }


def as_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: as_lists(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_lists(item) for item in value]
    return value.tolist() if isinstance(value, torch.Tensor) else value


def shared_file(folder: Path) -> Path:
    return folder / checkpoint.read_info(folder).shared_file()


Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda content: content["optimizers"].pop(), "it holds 1 optimizers, the session has 2; build the same"),
        (lambda content: content["schedulers"].pop(), "it holds 1 schedulers, the session has 2; build the same"),
        (lambda content: [content[name].reverse() for name in ("optimizers", "optimizer_notes")], r"parameter 0 of group 0 of optimizer 0 is \(4, 8\)"),
        (lambda content: content["optimizers"][1]["param_groups"][0]["params"].pop(), r"optimizer 1 has groups of \[1\] parameters, the session's has \[2\]"),
        (lambda content: content["optimizers"][1]["state"].update({7: {}}), "names parameters that it does not have"),
        (
            lambda content: content["optimizer_notes"][1].update(shapes=[[[4, 8], [5]]]),
            r"parameter 1 of group 0 of optimizer 1 is \(5,\), the session's \(4,\)",
        ),
        (lambda content: content["model"].pop("1.bias"), "1.bias in the model's state_dict is missing"),
        (lambda content: content["model"].update({"1.bias": torch.zeros(5)}), r"1.bias .* is \(5,\), the session's model has \(4,\)"),
        (lambda content: content["loss_scale"].update(value=3.0), "not a power of two"),
        (lambda content: content.update(scheduler_kinds=["StepLR", "StepLR"]), "its schedulers are StepLR, StepLR, the session's ExponentialLR"),
    ],
)
def test_a_state_that_does_not_fit_is_one_line_and_changes_nothing(prepare: Prepare, tmp_path: Path, change: Change, found: str) -> None:
    two(prepare, 0).save(tmp_path / "ckpt")
    content = torch.load(shared_file(tmp_path / "ckpt"), weights_only=True)
    change(content)
    torch.save(content, shared_file(tmp_path / "ckpt"))
    session = two(prepare, 1)
    before = everything(session)
    with pytest.raises(DocumentError, match=found) as caught:
        session.load(tmp_path / "ckpt")
    assert len(str(caught.value).splitlines()) == 1
    assert everything(session) == before


def test_what_fails_when_all_checks_passed_is_taken_back(prepare: Prepare, tmp_path: Path) -> None:
    two(prepare, 0, stateful={"a": Sampler(5), "b": Sampler(9)}).save(tmp_path / "ckpt")
    session = two(prepare, 1, stateful={"a": Sampler(1), "b": Failing(2)})
    before = everything(session)
    with pytest.raises(DocumentError, match="epoch"):
        session.load(tmp_path / "ckpt")
    assert everything(session) == before

    session = two(prepare, 1, stateful={"a": Sampler(1), "b": Sampler(2)})
    session.optimizers[1].register_load_state_dict_pre_hook(lambda _, state: state["missing"])
    before = everything(session)
    with pytest.raises(DocumentError, match="missing"):
        session.load(tmp_path / "ckpt")
    assert everything(session) == before


class OwnSGD(torch.optim.SGD):
    """A user's own subclass."""


@pytest.mark.parametrize(("saved", "mine"), [("SGD", "Adam"), ("Adamax", "RAdam"), ("Adam", "Adamax"), ("Adam", "RAdam")])
def test_another_optimizer_is_refused(prepare: Prepare, tmp_path: Path, saved: str, mine: str) -> None:
    two(prepare, 0, second=getattr(torch.optim, saved)).save(tmp_path / "ckpt")
    session = two(prepare, 0, second=getattr(torch.optim, mine))
    with pytest.raises(DocumentError, match=f"optimizer 1 was {saved}, the session's is {mine}; build the same"):
        session.load(tmp_path / "ckpt")


@pytest.mark.parametrize(("saved", "mine"), [(torch.optim.SGD, OwnSGD), (OwnSGD, torch.optim.SGD)])
def test_an_optimizer_of_the_same_family_is_taken(prepare: Prepare, tmp_path: Path, saved: Any, mine: Any) -> None:
    two(prepare, 0, second=saved).save(tmp_path / "ckpt")
    two(prepare, 0, second=mine).load(tmp_path / "ckpt")


@pytest.mark.parametrize(
    ("saved", "mine", "found"),
    [
        (partial(torch.optim.Adam, weight_decay=0.5), partial(torch.optim.AdamW, weight_decay=0.5), "decoupled_weight_decay=False, the session's True"),
        (partial(torch.optim.AdamW, amsgrad=True), torch.optim.AdamW, "amsgrad=True, the session's False"),
        (torch.optim.SGD, partial(torch.optim.SGD, maximize=True), "maximize=False, the session's True"),
    ],
)
def test_an_optimizer_that_computes_something_else_is_refused(prepare: Prepare, tmp_path: Path, saved: Any, mine: Any, found: str) -> None:
    two(prepare, 0, second=saved).save(tmp_path / "ckpt")
    session = two(prepare, 0, second=mine)
    before = everything(session)
    with pytest.raises(DocumentError, match=f"group 0 of optimizer 1 has {found}"):
        session.load(tmp_path / "ckpt")
    assert everything(session) == before


def squares(prepare: Prepare, recipe: str, order: tuple[int, int], wrapped: bool = False) -> Session:
    """Return a session over two equal layers that made a step, each weight in a group of its own, in the order given."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    groups = [{"params": [model[index].weight], "lr": 0.1 * (index + 1)} for index in order]
    session = prepare(Wrapped(model) if wrapped else model, torch.optim.SGD(groups, momentum=0.9), recipe)
    for x, _ in make_batches(1):
        with session.autocast():
            loss = session.model(x.to(next(model.parameters()).dtype)).float().square().mean()
        session.backward(loss)
        session.step()
    return session


class Wrapped(nn.Module):
    """Adds a prefix to names, as a compiled model does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._orig_mod = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._orig_mod(x)
        return out


@pytest.mark.parametrize("recipe", ["fp32", "bf16-master", "bf16-kahan"])
def test_parameters_in_another_order_are_refused(prepare: Prepare, tmp_path: Path, recipe: str) -> None:
    squares(prepare, recipe, (0, 1)).save(tmp_path / "ckpt")
    squares(prepare, recipe, (0, 1), wrapped=True).load(tmp_path / "ckpt")
    session = squares(prepare, recipe, (1, 0))
    before = everything(session)
    with pytest.raises(DocumentError, match=r"parameter 0 of group 0 of optimizer 0 is 0\.weight, the session's 1\.weight; .*same order"):
        session.load(tmp_path / "ckpt")
    assert everything(session) == before


def one_group(prepare: Prepare, recipe: str, kind: Any, seed: int = 0, **options: Any) -> Session:
    torch.manual_seed(seed)
    model = nn.Linear(8, 4)
    session = prepare(model, kind([{"params": list(model.parameters()), **options}]), recipe)
    train(model, session, make_batches(2, seed=seed))
    return session


@pytest.mark.parametrize("saved", [{"fused": True}, {"foreach": True}, {"capturable": False}, {}])
@pytest.mark.parametrize("mine", [{"fused": True}, {"foreach": False}, {}])
def test_how_an_optimizer_computes_stays_the_sessions_own(prepare: Prepare, tmp_path: Path, saved: dict[str, Any], mine: dict[str, Any]) -> None:
    one_group(prepare, "fp16", partial(torch.optim.AdamW, lr=0.25, **saved)).save(tmp_path / "ckpt")
    session = one_group(prepare, "fp16", partial(torch.optim.AdamW, lr=0.5, **mine), seed=1)
    (before,) = [dict(group) for group in session.optimizers[0].param_groups]
    session.load(tmp_path / "ckpt")
    (group,) = session.optimizers[0].param_groups
    assert {name: group[name] for name in ("fused", "foreach", "capturable")} == {name: before[name] for name in ("fused", "foreach", "capturable")}
    assert group["lr"] == 0.25, "numbers are the checkpoint's, as torch has it"
    train(session.model, session, make_batches(1))


@pytest.mark.parametrize("saved", [{"clip_norm": 1e-3}, {"clip_value": 1e-3}, {}])
@pytest.mark.parametrize("mine", [{"clip_norm": 1e-2}, {"clip_value": 1e-2}, {}])
def test_the_limits_of_a_group_stay_the_sessions_own(prepare: Prepare, tmp_path: Path, saved: dict[str, Any], mine: dict[str, Any]) -> None:
    one_group(prepare, "fp32", partial(torch.optim.SGD, lr=1.0), **saved).save(tmp_path / "ckpt")
    session = one_group(prepare, "fp32", partial(torch.optim.SGD, lr=1.0), **mine)
    session.load(tmp_path / "ckpt")
    (group,) = session.optimizers[0].param_groups
    assert {name: group[name] for name in ("clip_norm", "clip_value") if name in group} == mine


@pytest.mark.parametrize(("saved", "mine"), [(torch.tensor(0.25), 0.5), (0.25, torch.tensor(0.5)), (torch.tensor(0.25), torch.tensor(0.5))])
def test_a_number_comes_back_as_what_the_session_holds(prepare: Prepare, tmp_path: Path, saved: Any, mine: Any) -> None:
    one_group(prepare, "fp32", partial(torch.optim.SGD, lr=saved)).save(tmp_path / "ckpt")
    session = one_group(prepare, "fp32", partial(torch.optim.SGD, lr=mine))
    session.load(tmp_path / "ckpt")
    (group,) = session.optimizers[0].param_groups
    assert type(group["lr"]) is type(mine)
    assert group["lr"] == 0.25
    assert float(mine) == 0.5


def test_an_option_that_the_checkpoint_lacks_stays(prepare: Prepare, tmp_path: Path) -> None:
    one_group(prepare, "fp32", partial(torch.optim.SGD, lr=1.0)).save(tmp_path / "ckpt")
    session = one_group(prepare, "fp32", partial(torch.optim.SGD, lr=1.0), mine=3)
    session.load(tmp_path / "ckpt")
    assert session.optimizers[0].param_groups[0]["mine"] == 3


def test_objects_with_a_state_are_saved_by_name(prepare: Prepare, tmp_path: Path) -> None:
    two(prepare, 0, stateful={"sampler": Sampler(5)}).save(tmp_path / "ckpt")
    mine = Sampler()
    two(prepare, 0, stateful={"sampler": mine}).load(tmp_path / "ckpt")
    assert mine.position == 5
    with pytest.raises(DocumentError, match="stateful objects: the session lacks sampler"):
        two(prepare, 0).load(tmp_path / "ckpt")
    with pytest.raises(DocumentError, match="stateful objects: it lacks ema and the session lacks sampler"):
        two(prepare, 0, stateful={"ema": mine}).load(tmp_path / "ckpt")


def test_what_torch_keeps_beside_the_names_of_a_model_reaches_it(prepare: Prepare, tmp_path: Path) -> None:
    build(prepare, "fp32")[1].save(tmp_path / "ckpt", extra={"by number": {1: 2}})
    model, session = build(prepare, "fp32")
    versions = []
    model.get_submodule("1")._register_load_state_dict_pre_hook(lambda state, prefix, metadata, *_: versions.append(metadata["version"]))
    assert session.load(tmp_path / "ckpt") == {"by number": {1: 2}}
    assert versions == [2]


def test_counters_go_on(prepare: Prepare, tmp_path: Path) -> None:
    session = two(prepare, 0)
    session.count("noticed")
    session.save(tmp_path / "ckpt")
    session = two(prepare, 0)
    session.load(tmp_path / "ckpt")
    assert (session.steps, session.segment, session.counters["noticed"]) == (2, 1, 1)


def test_case_08_a_state_without_a_loss_scale_warns_with_the_remedy(prepare: Prepare, tmp_path: Path) -> None:
    two(prepare, 0).save(tmp_path / "ckpt")
    content = torch.load(shared_file(tmp_path / "ckpt"), weights_only=True)
    del content["loss_scale"]
    torch.save(content, shared_file(tmp_path / "ckpt"))
    session = two(prepare, 1)
    with pytest.warns(UserWarning, match=r"has no loss scale: it starts at 64 again and steps may be skipped; save with session\.save\(\)"):
        session.load(tmp_path / "ckpt")
    assert session.steps == 2


def test_all_generators_of_the_host_are_restored(prepare: Prepare, tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy.random")
    session = two(prepare, 0)
    session.save(tmp_path / "ckpt")
    wanted = [torch.rand(2).tolist(), random.random(), random.gauss(0, 1), numpy.rand(), numpy.normal()]
    session.load(tmp_path / "ckpt")
    assert [torch.rand(2).tolist(), random.random(), random.gauss(0, 1), numpy.rand(), numpy.normal()] == wanted


def test_on_another_device_type_the_loss_of_its_random_state_is_said(prepare: Prepare, tmp_path: Path) -> None:
    session = two(prepare, 0)
    session.save(tmp_path / "ckpt")
    pointer = tmp_path / "ckpt" / "checkpoint.json"
    pointer.write_text(json.dumps(json.loads(pointer.read_bytes()) | {"device_type": "other"}))
    wanted = torch.rand(2)
    with pytest.warns(UserWarning, match="random state of other is not restored on cpu: dropout masks and stochastic rounding differ from here on"):
        session.load(tmp_path / "ckpt")
    assert torch.equal(torch.rand(2), wanted), "the order of the data comes from the host's generators, which every machine has"


def test_a_checkpoint_of_a_wrapped_model_loads_without_the_wrapper(prepare: Prepare, tmp_path: Path) -> None:
    class Compiled(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self._orig_mod = model

    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    prepare(Compiled(model), torch.optim.SGD(model.parameters(), lr=0.1), "fp32").save(tmp_path / "ckpt")
    other = nn.Linear(4, 4)
    prepare(other, torch.optim.SGD(other.parameters(), lr=0.1), "fp32").load(tmp_path / "ckpt")
    assert torch.equal(model.weight, other.weight)


@pytest.mark.parametrize("recipe", ["fp8-delayed:scaling.history=4"])
def test_the_windows_of_delayed_scaling_go_on(prepare: Prepare, tmp_path: Path, recipe: str) -> None:
    def run(session: Session) -> list[torch.Tensor]:
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(session.steps))
        with session.autocast():
            loss = session.model(x).float().square().mean()
        session.backward(loss)
        session.step()
        return tensors(session.model)

    def make(seed: int) -> Session:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))
        return prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), recipe)

    first = make(0)
    run(first)
    first.save(tmp_path / "ckpt")
    wanted = [run(first) for _ in range(6)]
    second = make(1)
    second.load(tmp_path / "ckpt")
    assert all(torch.equal(a, b) for one in wanted for a, b in zip(one, run(second), strict=True))
