"""What the state files of a checkpoint hold, decoded strictly."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import torch

from mpbackend.errors import DocumentError
from mpbackend.train.random_state import HostState

T = TypeVar("T")
Count = Annotated[int, msgspec.Meta(ge=0)]


class OptimizerNote(msgspec.Struct, frozen=True, kw_only=True):
    """What an optimizer's state belongs to.

    Attributes:
        kind: name of its class.
        family: that name, and those of the classes that it derives from.
        shapes: for each parameter group the shapes of its parameters.
        names: for each parameter group their names in the model; an empty one for a tensor outside it.
    """

    kind: str
    family: list[str]
    shapes: list[list[list[int]]]
    names: list[list[str]]


class SharedContent(msgspec.Struct, kw_only=True):
    """What all ranks share.

    Attributes:
        model: the model's state; in a sharded checkpoint what of it is no tensor.
        optimizers: a state for each optimizer; in a sharded checkpoint its tensors are only described.
        schedulers: a state for each scheduler.
        optimizer_notes: what the optimizers' states belong to; empty under schema 1.
        scheduler_kinds: names of the schedulers' classes; empty under schema 1.
        loss_scale: state of loss scaling; None when whoever wrote it had none.
        weights: masters, compensations and generators of working weights; None without them.
        steps: steps so far.
        segment: how often the run was resumed.
        counters: further counters of the session, by name.
        extra: the user's own.
    """

    model: Any
    optimizers: list[dict[str, Any]]
    schedulers: list[dict[str, Any]]
    optimizer_notes: list[OptimizerNote] = []
    scheduler_kinds: list[str] = []
    loss_scale: dict[str, Any] | None = None
    weights: dict[str, Any] | None = None
    steps: Count
    segment: Count
    counters: dict[str, int] = {}
    extra: dict[Any, Any]


class PositionContent(msgspec.Struct, kw_only=True):
    """Where a pass over the data stood.

    Attributes:
        name: name that the pass was watched under.
        drawn: batches drawn in the pass.
        first: fingerprint of the first of them, empty before it.
        length: batches of the loader, None where it does not say.
        continued: whether it began with worker processes of an earlier pass.
        start: the host's generators before the first of them.
        generators: state of each generator of the loader: before the first batch, and now.
        epoch: epoch of the loader's sampler, None where it has none.
        loader: the loader's own state, None where it has none.
    """

    name: str = "data"
    drawn: Count
    first: str = ""
    length: int | None = None
    continued: bool = False
    start: HostState
    generators: list[tuple[torch.Tensor, torch.Tensor]] = []
    epoch: int | None = None
    loader: Any = None


class DataContent(msgspec.Struct, kw_only=True):
    """What a rank has seen of the data.

    Attributes:
        batches: batches in all.
        fingerprint: their hash; empty before the first.
        positions: the passes that the training was in, in the order in which they had begun.
    """

    batches: Count = 0
    fingerprint: str = ""
    positions: list[PositionContent] = []


class RankContent(msgspec.Struct, kw_only=True):
    """What a rank has of its own.

    Attributes:
        host: the host's generators.
        device: state of the device's generator; None where the host is the device.
        data: what it has seen of the data.
        stateful: states of the user's objects, by name.
    """

    host: HostState
    device: torch.Tensor | None = None
    data: DataContent = msgspec.field(default_factory=DataContent)
    stateful: dict[str, Any] = {}


def decode_shared(path: Path, content: Any) -> SharedContent:
    """Return what a shared file holds, schema 1 included, whose further parts are ignored here; ``DocumentError`` when it does not fit."""
    shared = decode(path, content, SharedContent)
    if not isinstance(shared.model, dict):  # not converted: a copy would lose the versions that torch keeps beside the names
        raise DocumentError(f"checkpoint {path}", found="Expected `object` - at `$.model`", remedy="it is damaged")
    return shared


def decode_rank(path: Path, content: Any) -> RankContent:
    """Return what a rank's file holds; ``DocumentError`` when it does not fit."""
    return decode(path, content, RankContent)


def decode_first(path: Path, content: Any, device_type: str) -> RankContent:
    """Return what the only state file of schema 1 holds of its rank: the state of torch's generators."""
    states = content.get("random") if isinstance(content, dict) else None
    if not isinstance(states, dict):
        raise DocumentError(f"checkpoint {path}", found="random is missing", remedy="it is damaged")
    device = None if device_type == "cpu" else states.get(device_type)
    return decode(path, {"host": {"torch": states.get("cpu")}, "device": device}, RankContent)


def decode(path: Path, content: Any, kind: type[T]) -> T:
    """Return ``content`` as ``kind``; ``DocumentError`` names the file and the field."""
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise DocumentError(f"checkpoint {path}", found=str(error), remedy="it is damaged") from error


def packed(value: Any) -> Any:
    """Return a content as the dicts and lists that a state file holds; what is below its named fields stays as it is."""
    if isinstance(value, msgspec.Struct):
        return {name: packed(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, list) and value and isinstance(value[0], msgspec.Struct):
        return [packed(item) for item in value]
    return value
