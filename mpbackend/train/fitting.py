"""Whether a checkpoint fits a session: everything that can be known is checked before anything of the session is changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mpbackend.errors import DocumentError
from mpbackend.train.content import OptimizerNote, RankContent, SharedContent

PARTS_OF_WEIGHTS = ("masters", "compensation")
"""What of the working weights' state is as large as the model."""

BUILD_THE_SAME = "build the same model and optimizers before load()"


OWN_OPTIONS = ("fused", "foreach", "capturable", "differentiable", "clip_norm", "clip_value", "param_names")
"""Options of a parameter group that stay the session's own: how the optimizer computes, and what belongs to the session's settings."""


def note_of(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> OptimizerNote:
    """Return what an optimizer's state belongs to; ``names`` has those of the model's parameters, by the id of what the optimizer holds for them."""
    kinds = [kind.__name__ for kind in type(optimizer).__mro__ if issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer]
    return OptimizerNote(
        kind=type(optimizer).__name__,
        family=kinds,
        shapes=[[list(parameter.shape) for parameter in group["params"]] for group in optimizer.param_groups],
        names=[[names.get(id(parameter), "") for parameter in group["params"]] for group in optimizer.param_groups],
    )


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


def check_optimizer(asked: str, number: int, saved: Mapping[str, Any], notes: tuple[OptimizerNote, OptimizerNote] | None, mine: list[dict[str, Any]]) -> None:
    """Raise ``DocumentError`` when an optimizer's state has other groups, parameters or options than the session's optimizer.

    Args:
        asked: names the checkpoint.
        number: number of the optimizer, from 0.
        saved: its state.
        notes: what the state belongs to, and the session's; None under schema 1, where only counts and options are compared.
        mine: the parameter groups of the session's optimizer.
    """
    groups = saved.get("param_groups")
    state = saved.get("state")
    if not isinstance(groups, list) or not isinstance(state, dict) or not all(isinstance(group, dict) and "params" in group for group in groups):
        raise DocumentError(asked, found=f"the state of optimizer {number} has no parameter groups", remedy="it is damaged")
    counts, theirs = ([len(group["params"]) for group in each] for each in (mine, groups))
    if counts != theirs:
        found = f"optimizer {number} has groups of {theirs} parameters, the session's has {counts}"
        raise DocumentError(asked, found=found, remedy=BUILD_THE_SAME)
    if not state.keys() <= set(range(sum(counts))):
        raise DocumentError(asked, found=f"the state of optimizer {number} names parameters that it does not have", remedy="it is damaged")
    if notes is not None:
        check_notes(asked, number, *notes)
    for index, (group, own) in enumerate(zip(groups, mine, strict=True)):
        for name in sorted((group.keys() & own.keys()) - {"params", *OWN_OPTIONS}):
            if any(isinstance(value, (bool, str)) for value in (group[name], own[name])) and group[name] != own[name]:
                found = f"group {index} of optimizer {number} has {name}={group[name]}, the session's {own[name]}"
                raise DocumentError(asked, found=found, remedy=BUILD_THE_SAME)


def check_notes(asked: str, number: int, saved: OptimizerNote, mine: OptimizerNote) -> None:
    """Raise ``DocumentError`` when an optimizer's state belongs to other parameters, or to an optimizer of another family.

    Two classes are of one family when one derives from the other. Of parameters the shapes and the names in the model are compared, each in its place.
    """
    shapes = (texts(saved.shapes), texts(mine.shapes), BUILD_THE_SAME)
    names = (texts(saved.names), texts(mine.names), f"{BUILD_THE_SAME}, the parameters in the same order")
    for theirs, own, remedy in (shapes, names):
        at = next((place for place in theirs if theirs[place] != own[place]), None)
        if at is not None:
            found = f"parameter {at[1]} of group {at[0]} of optimizer {number} is {theirs[at]}, the session's {own[at]}"
            raise DocumentError(asked, found=found, remedy=remedy)
    if saved.kind not in mine.family and mine.kind not in saved.family:
        raise DocumentError(asked, found=f"optimizer {number} was {saved.kind}, the session's is {mine.kind}", remedy=BUILD_THE_SAME)


def texts(groups: Sequence[Sequence[Any]]) -> dict[tuple[int, int], str]:
    """Return by group and place how a parameter's shape or name reads."""
    told = {(group, at): item for group, held in enumerate(groups) for at, item in enumerate(held)}
    return {place: (item or "no parameter of the model") if isinstance(item, str) else str(tuple(item)) for place, item in told.items()}


def fitted(saved: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's state with the options that are the session's own.

    ``torch.optim.Optimizer.load_state_dict`` takes every option from the state. That is right for numbers (learning rate, betas, weight decay), which schedules
    change. It is wrong for how the session's optimizer computes and for what the state does not know.
    """
    groups = []
    for theirs, mine in zip(saved["param_groups"], optimizer.param_groups, strict=True):
        numbers = {name: like(value, mine.get(name)) for name, value in theirs.items() if name not in OWN_OPTIONS}
        groups.append({**mine, **numbers})
    return {**saved, "param_groups": groups}


def like(value: Any, mine: Any) -> Any:
    """Return a number as what the session has in its place: a number, or a tensor on its device."""
    if isinstance(mine, torch.Tensor) and isinstance(value, (int, float, torch.Tensor)):
        return mine.detach().clone().copy_(torch.as_tensor(value))
    if isinstance(value, torch.Tensor) and isinstance(mine, (int, float)):
        return value.item()
    if isinstance(value, tuple) and isinstance(mine, tuple) and len(value) == len(mine):
        return tuple(map(like, value, mine))
    return value


def renamed(weights: Mapping[str, Mapping[str, Any]], rename: Callable[[str], str]) -> dict[str, Any]:
    """Return the state of working weights with other names of parameters."""
    return {part: {rename(name): value for name, value in held.items()} if part in PARTS_OF_WEIGHTS else held for part, held in weights.items()}


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
    for state in (content.host.torch, *(position.start.torch for position in content.data.positions)):
        try:
            torch.Generator().set_state(state)
        except (RuntimeError, TypeError) as error:
            raise DocumentError(asked, found=f"the random state does not fit this torch: {error}", remedy="it is damaged") from error
