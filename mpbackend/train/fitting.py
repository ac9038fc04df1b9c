"""Whether a checkpoint fits a session: everything that can be known is checked before anything of the session is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mpbackend.errors import DocumentError
from mpbackend.train.content import OptimizerNote, RankContent, SharedContent

PARTS_OF_WEIGHTS = ("masters", "compensation")
"""What of the working weights' state is as large as the model."""

BUILD_THE_SAME = "build the same model and optimizers before load()"


def note_of(optimizer: torch.optim.Optimizer) -> OptimizerNote:
    """Return what an optimizer's state belongs to."""
    shapes = [[list(parameter.shape) for parameter in group["params"]] for group in optimizer.param_groups]
    return OptimizerNote(kind=type(optimizer).__name__, shapes=shapes)


def check_counts(asked: str, content: SharedContent, optimizers: Sequence[object], schedulers: Sequence[object]) -> None:
    """Raise ``DocumentError`` when a checkpoint holds another number of optimizers or schedulers."""
    for name, saved, mine in (("optimizers", content.optimizers, optimizers), ("schedulers", content.schedulers, schedulers)):
        if len(saved) != len(mine):
            raise DocumentError(asked, found=f"it holds {len(saved)} {name}, the session has {len(mine)}", remedy=BUILD_THE_SAME)


def check_kinds(asked: str, content: SharedContent, schedulers: Sequence[object]) -> None:
    """Raise ``DocumentError`` when a checkpoint holds schedulers of other classes: their states have other entries."""
    kinds = [type(scheduler).__name__ for scheduler in schedulers]
    if content.scheduler_kinds and content.scheduler_kinds != kinds:
        raise DocumentError(asked, found=f"its schedulers are {', '.join(content.scheduler_kinds)}, the session's {', '.join(kinds)}", remedy=BUILD_THE_SAME)


def check_model(asked: str, saved: Mapping[str, Any], model: torch.nn.Module) -> None:
    """Raise ``DocumentError`` when a model's state has other names or shapes than the session's model."""
    mine, theirs = described(model.state_dict()), described(saved)
    if mine != theirs:
        name = next(name for name in [*mine, *theirs] if mine.get(name) != theirs.get(name))
        found = f"{name} in the model's state_dict is {theirs.get(name, 'missing')}, the session's model has {mine.get(name, 'none of that name')}"
        raise DocumentError(asked, found=found, remedy="build the same model before load()")


def described(state: Mapping[str, Any]) -> dict[str, object]:
    """Return the shape of each tensor of a state, and for whatever else a module keeps only that it is there."""
    return {name: tuple(value.shape) if isinstance(value, torch.Tensor) else "no tensor" for name, value in state.items()}


def check_optimizer(asked: str, number: int, saved: Mapping[str, Any], note: OptimizerNote | None, optimizer: torch.optim.Optimizer) -> None:
    """Raise ``DocumentError`` when an optimizer's state has other groups, parameters or options than the session's optimizer.

    Args:
        asked: names the checkpoint.
        number: number of the optimizer, from 0.
        saved: its state.
        note: what the state belongs to; None under schema 1, where only counts are compared.
        optimizer: the session's.
    """
    groups = saved.get("param_groups")
    state = saved.get("state")
    if not isinstance(groups, list) or not isinstance(state, dict) or not all(isinstance(group, dict) and "params" in group for group in groups):
        raise DocumentError(asked, found=f"the state of optimizer {number} has no parameter groups", remedy="it is damaged")
    mine, theirs = ([len(group["params"]) for group in each] for each in (optimizer.param_groups, groups))
    if mine != theirs:
        found = f"optimizer {number} has groups of {theirs} parameters, the session's has {mine}"
        raise DocumentError(asked, found=found, remedy=BUILD_THE_SAME)
    if not state.keys() <= set(range(sum(mine))):
        raise DocumentError(asked, found=f"the state of optimizer {number} names parameters that it does not have", remedy="it is damaged")
    if note is None:
        return
    here = note_of(optimizer)
    for group, (saved_shapes, my_shapes) in enumerate(zip(note.shapes, here.shapes, strict=True)):
        if saved_shapes != my_shapes:
            at = next(index for index, (one, other) in enumerate(zip(saved_shapes, my_shapes, strict=True)) if one != other)
            found = f"parameter {at} of group {group} of optimizer {number} is {tuple(saved_shapes[at])}, the session's {tuple(my_shapes[at])}"
            raise DocumentError(asked, found=found, remedy=BUILD_THE_SAME)
    lacking = sorted({key for group in optimizer.param_groups for key in group} - {key for group in groups for key in group})
    if note.kind != here.kind and lacking:
        found = f"optimizer {number} was {note.kind}, the session's {here.kind} also needs {', '.join(lacking)}"
        raise DocumentError(asked, found=found, remedy=BUILD_THE_SAME)


def check_weights(asked: str, saved: Mapping[str, Any] | None, mine: Mapping[str, Any] | None, *, sharded: bool) -> None:
    """Raise ``DocumentError`` when the state of working weights has other parts, names or shapes than the session's.

    Args:
        asked: names the checkpoint.
        saved: the state; None without working weights.
        mine: the session's.
        sharded: whether the parts that are as large as the model are elsewhere.
    """
    if (saved is None) != (mine is None):
        raise DocumentError(asked, found=f"it holds {'no ' if saved is None else ''}working weights, unlike the session", remedy="it is damaged")
    for part, held in (mine or {}).items():
        if part not in PARTS_OF_WEIGHTS or sharded:
            continue
        theirs = (saved or {}).get(part)
        if not isinstance(theirs, dict) or described(theirs) != described(held):
            raise DocumentError(asked, found=f"{part} of the working weights have other names or shapes than the session's", remedy="it is damaged")


def check_names(asked: str, what: str, saved: Mapping[str, object], mine: Mapping[str, object]) -> None:
    """Raise ``DocumentError`` when a checkpoint has other names than the session, for example of the user's stateful objects."""
    missing, extra = sorted(mine.keys() - saved.keys()), sorted(saved.keys() - mine.keys())
    if missing or extra:
        differences = [f"{text} {', '.join(names)}" for text, names in (("it lacks", missing), ("the session lacks", extra)) if names]
        raise DocumentError(asked, found=f"{what}: {' and '.join(differences)}", remedy="prepare with the same names")


def check_random(asked: str, content: RankContent) -> None:
    """Raise ``DocumentError`` when the state of the host's generator is none that this torch takes; no generator is changed."""
    for state in (content.host.torch, *(() if content.data.position is None else (content.data.position.start.torch,))):
        try:
            torch.Generator().set_state(state)
        except (RuntimeError, TypeError) as error:
            raise DocumentError(asked, found=f"the random state does not fit this torch: {error}", remedy="it is damaged") from error
