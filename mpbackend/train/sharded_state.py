"""The state of a sharded model: tensors of which each rank holds a part, written and read by ``torch.distributed.checkpoint`` on any number of ranks.

Only tensors go there; options, counters and everything else stay in the files that a safe reader reads. The state of optimizers is filed by the number of the
parameter: torch's own collection of it would make a step with zero gradients where there is no state yet.

``torch.distributed.checkpoint`` keeps its table of contents as a pickle: a sharded checkpoint is for those who trust whoever wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mpbackend.errors import DocumentError, SessionError
from mpbackend.train import fitting
from mpbackend.train.checkpoint import first_line

if TYPE_CHECKING:
    from mpbackend.train.content import SharedContent
    from mpbackend.train.session import Session

DESCRIBED = "sharded tensor"


def without_tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a model's state is no tensor."""
    return {name: value for name, value in state.items() if not isinstance(value, torch.Tensor)}


def tensors_of(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a model's state."""
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def described(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of an optimizer with its tensors described: their format, and their shape where it is not the parameter's.

    Raises:
        SessionError: a tensor is sharded and has another shape than its parameter, so that nothing says how it was sharded.
    """
    state = optimizer.state_dict()
    parameters = parameters_of(optimizer)
    return {**state, "state": {index: {key: describe(value, parameters[index]) for key, value in held.items()} for index, held in state["state"].items()}}


def describe(value: object, parameter: torch.Tensor) -> object:
    """Return the description of one entry of an optimizer's state; what is no tensor stays as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    sharded = hasattr(value, "placements")
    if sharded and value.shape != parameter.shape:
        found = f"an optimizer state of shape {tuple(value.shape)} is sharded, its parameter is {tuple(parameter.shape)}"
        raise SessionError("save()", found=found, remedy="use an optimizer whose state has the shape of its parameters")
    shape = None if value.shape == parameter.shape else list(value.shape)
    return {DESCRIBED: [str(value.dtype).removeprefix("torch."), shape]}


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of an optimizer in the order in which its state counts them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def rest_of_weights(session: Session) -> dict[str, Any] | None:
    """Return what of the working weights' state is not sharded; None without working weights."""
    if session.weights is None:
        return None
    return {name: part for name, part in session.weights.state_dict().items() if name not in fitting.PARTS_OF_WEIGHTS}


def parts_of_weights(session: Session) -> dict[str, dict[str, torch.Tensor]]:
    """Return the sharded parts of the working weights' state; empty without working weights."""
    if session.weights is None:
        return {}
    return {name: dict(part) for name, part in session.weights.state_dict().items() if name in fitting.PARTS_OF_WEIGHTS}


def write(folder: Path, model: torch.nn.Module, session: Session) -> None:
    """Write the tensors of model, optimizers and working weights; every rank writes its part and syncs it to the disk.

    Args:
        folder: a new folder.
        model: the model.
        session: the session, for its optimizers and working weights.
    """
    from torch.distributed.checkpoint.state_dict_saver import save

    states = [optimizer.state_dict()["state"] for optimizer in session.optimizers]
    save({"model": tensors_of(model.state_dict()), "optimizers": by_name(states), **parts_of_weights(session)}, checkpoint_id=folder)


def by_name(states: list[dict[int, dict[str, Any]]]) -> dict[str, Any]:
    """Return the tensors of optimizer states, filed under ``optimizer.parameter.entry``."""
    return {
        f"{number}.{index}.{key}": value
        for number, state in enumerate(states)
        for index, held in state.items()
        for key, value in held.items()
        if isinstance(value, torch.Tensor)
    }


def read(folder: Path, model: torch.nn.Module, session: Session, shared: SharedContent) -> None:
    """Read the tensors of model, optimizers and working weights into ``shared``, sharded as the session's model is now; changes nothing of the session.

    Args:
        folder: what ``write`` wrote.
        model: the model.
        session: the session, for its optimizers and working weights.
        shared: the shared content; its descriptions are replaced by tensors.

    Raises:
        DocumentError: names or shapes are not those of the session, or the files are damaged.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    wanted: dict[str, Any] = {name: torch.empty_like(value) for name, value in tensors_of(model.state_dict()).items()}
    parts = {part: {name: torch.empty_like(value) for name, value in held.items()} for part, held in parts_of_weights(session).items()}
    states: list[dict[int, dict[str, Any]]] = []
    for saved, optimizer in zip(shared.optimizers, session.optimizers, strict=True):
        parameters = parameters_of(optimizer)
        states.append({index: {key: template(value, parameters[index]) for key, value in held.items()} for index, held in saved["state"].items()})
    asked = f"checkpoint {folder}"
    try:
        sizes = {name: tuple(item.size) for name, item in FileSystemReader(folder).read_metadata().state_dict_metadata.items() if hasattr(item, "size")}
        mine = {f"model.{name}": tuple(value.shape) for name, value in wanted.items()}
        theirs = {name: size for name, size in sizes.items() if name.startswith("model.")}
        if mine != theirs:
            name = next(name for name in [*mine, *theirs] if mine.get(name) != theirs.get(name))
            found = f"{name} is {theirs.get(name, 'missing')}, the session's model has {mine.get(name, 'none of that name')}"
            raise DocumentError(asked, found=found, remedy="build the same model before load()")
        load({"model": wanted, "optimizers": by_name(states), **parts}, checkpoint_id=folder)
    except DocumentError:
        raise
    except Exception as error:  # the reader raises many classes; each means the same here
        raise DocumentError(asked, found=first_line(error), remedy="it is damaged or not a checkpoint") from error
    shared.model = {**shared.model, **wanted}
    shared.weights = None if shared.weights is None else {**shared.weights, **parts}
    shared.optimizers = [{**saved, "state": state} for saved, state in zip(shared.optimizers, states, strict=True)]


def template(value: Any, parameter: torch.Tensor) -> Any:
    """Return an empty tensor for a description, sharded as its parameter where it has its shape; anything else as it is."""
    if not isinstance(value, dict) or DESCRIBED not in value:
        return value
    name, shape = value[DESCRIBED]
    dtype = getattr(torch, name)
    return torch.empty_like(parameter, dtype=dtype) if shape is None else torch.empty(shape, dtype=dtype)
