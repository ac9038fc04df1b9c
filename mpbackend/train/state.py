"""Saving and restoring a session: what a checkpoint holds, and in which order it goes back.

What all ranks share is written once: model, optimizers, schedulers, loss scale, masters and compensations of working weights, counters, the user's ``extra``.
Every rank writes what is its own: generators, the position in the data, the user's stateful objects. Tensors are read back on the host, whatever device they
came from, and everything that can be known to fail is checked before anything of the session changes; see ``mpbackend.train.checkpoint`` for the files.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpbackend import __version__
from mpbackend.errors import DocumentError, MpbackendError, SessionError, describe
from mpbackend.train import checkpoint, fitting, sharded_state
from mpbackend.train.bare import bare, prefix_of
from mpbackend.train.checkpoint import CheckpointInfo, first_line
from mpbackend.train.content import OptimizerNote, RankContent, SharedContent, decode_first, decode_rank, decode_shared, packed
from mpbackend.train.loss_scale import checked_state
from mpbackend.train.random_state import device_state, host_state, restore_device, restore_host

if TYPE_CHECKING:
    from mpbackend.train.session import Session

SOME_CLASSES = (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError)
"""What the ``load_state_dict`` of models, optimizers, schedulers and the user's objects raises."""


def save(session: Session, path: str | os.PathLike[str], extra: Mapping[str, Any]) -> None:
    """Write a checkpoint; an older one in the same folder is the checkpoint until the new one is whole. Called on every rank.

    Args:
        session: the session, at a step boundary.
        path: folder to write, the same one for all ranks.
        extra: plain values or tensors of the user's own; rank 0's are kept.

    Raises:
        SessionError: ``extra`` or a state holds an object that cannot be read back safely, or the files cannot be written; on every rank when on any.
    """
    asked = f"save({str(path)!r})"
    rank = 0 if session.ranks is None else session.ranks.rank
    new = False
    with together(session, asked), written(asked):
        folder = checkpoint.checked_folder(path)
        info = info_of(session, checkpoint.present_info(folder))
    try:
        with together(session, asked), written(asked):
            if rank == 0:
                new = not folder.exists()
                checkpoint.make_folder(folder)
                checkpoint.remove_unnamed(folder)
        with together(session, asked), written(asked):
            checkpoint.write_state(folder / info.rank_file(rank), packed(own_content(session)))
            if rank == 0:
                checkpoint.write_state(folder / info.shared_file(), packed(shared_content(session, extra)))
        if info.sharded:
            with together(session, asked), written(asked):
                sharded_state.write(folder / info.sharded_folder(), bare(session.model), session)
        with together(session, asked), written(asked):
            if rank == 0:
                checkpoint.publish(folder, info)
    except Exception:
        if rank == 0 and folder.exists():  # the others have finished writing: all ranks agreed that it failed
            checkpoint.remove_unnamed(folder)
            if new and not any(folder.iterdir()):
                folder.rmdir()
        raise


def info_of(session: Session, before: CheckpointInfo | None) -> CheckpointInfo:
    """Return what a checkpoint of a session says about itself."""
    plan = session.plan
    return CheckpointInfo(
        schema=checkpoint.SCHEMA,
        mpbackend=__version__,
        recipe=plan.recipe,
        recipe_hash=plan.recipe_hash,
        device_type=plan.device.type,
        step=session.steps,
        loss_scale=session.loss_scale.value,
        token=checkpoint.next_token(before, session.steps),
        ranks=1 if session.ranks is None else session.ranks.size,
        sharded=session.ranks is not None and session.ranks.sharded,
    )


def shared_content(session: Session, extra: Mapping[str, Any]) -> SharedContent:
    """Return what all ranks share."""
    is_sharded = session.ranks is not None and session.ranks.sharded
    model = bare(session.model).state_dict()
    return SharedContent(
        model=sharded_state.without_tensors(model) if is_sharded else model,
        optimizers=[sharded_state.described(item) if is_sharded else item.state_dict() for item in session.optimizers],
        schedulers=[scheduler.state_dict() for scheduler in session.schedulers],
        optimizer_notes=notes_of(session),
        scheduler_kinds=[type(scheduler).__name__ for scheduler in session.schedulers],
        loss_scale=session.loss_scale.state_dict(),
        weights=sharded_state.rest_of_weights(session) if is_sharded else whole_weights(session),
        steps=session.steps,
        segment=session.segment,
        counters=dict(session.counters),
        extra=dict(extra),
    )


def notes_of(session: Session) -> list[OptimizerNote]:
    """Return for each optimizer what its state belongs to."""
    names = {id(parameter): name for name, parameter in bare(session.model).named_parameters()}
    if session.weights is not None:  # the optimizers hold shadows in the place of parameters
        names |= {id(tensor): names.get(id(parameter), "") for tensor, parameter in session.weights.stand_ins()}
    return [fitting.note_of(optimizer, names) for optimizer in session.optimizers]


def whole_weights(session: Session) -> dict[str, Any] | None:
    """Return the state of the working weights, by names of the bare model; None without them."""
    if session.weights is None:
        return None
    prefix = prefix_of(session.model)
    return fitting.renamed(session.weights.state_dict(), lambda name: name.removeprefix(prefix))


def own_content(session: Session) -> RankContent:
    """Return what this rank has of its own."""
    return RankContent(
        host=host_state(),
        device=device_state(session.plan.device),
        data=session.data.state(),
        stateful={name: item.state_dict() for name, item in session.stateful.items()},
    )


def load(session: Session, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Restore a checkpoint into a session that was prepared the same way, on any vendor's device. Called on every rank.

    The generators of the host are restored everywhere, those of the device on the device type that wrote them: generators of different devices give different
    numbers anyway. With another number of ranks what belongs to a rank is not restored. Each loss is a warning.

    Returns:
        The ``extra`` that was saved.

    Raises:
        DocumentError: the folder is not a checkpoint of this version, or belongs to another recipe, model or set of optimizers; on every rank when on any. The
            session is then as it was before.
    """
    folder = Path(path)
    asked = f"checkpoint {folder}"
    with together(session, asked, DocumentError):
        info = checkpoint.read_info(folder)
        if info.recipe_hash != session.plan.recipe_hash:
            raise DocumentError(asked, found=f"it was made with recipe {info.recipe!r}, the session's is {session.plan.recipe!r}")
        shared, own = read(session, folder, info)
        check(session, asked, info, shared, own)
    losses = lost(session, asked, info, shared, own)
    if info.sharded:
        with together(session, asked, DocumentError):
            sharded_state.read(folder / info.sharded_folder(), bare(session.model), session, shared)
    with unchanged_on_error(session), together(session, asked, DocumentError), restored(asked):
        restore_states(session, shared, own, sharded=info.sharded)
    if shared.loss_scale is not None:
        session.loss_scale.load_state_dict(shared.loss_scale)
    session.counters.clear()
    session.counters.update(shared.counters)
    session.resume(steps=shared.steps, segment=shared.segment + 1)
    if own is not None:
        if own.device is not None and info.device_type == session.plan.device.type:
            restore_device(session.plan.device, own.device)
        restore_host(own.host)
        session.data.load(own.data, own.host)
    for loss in losses:
        warnings.warn(loss, stacklevel=3)
    return shared.extra


def read(session: Session, folder: Path, info: CheckpointInfo) -> tuple[SharedContent, RankContent | None]:
    """Return what the state files hold; of the ranks' own this rank's, None when another number of ranks wrote them."""
    path = folder / info.shared_file()
    content = checkpoint.read_state(path)
    shared = decode_shared(path, content)
    rank, size = (0, 1) if session.ranks is None else (session.ranks.rank, session.ranks.size)
    if info.ranks != size:
        return shared, None
    if not info.token:
        return shared, decode_first(path, content, info.device_type)
    path = folder / info.rank_file(rank)
    return shared, decode_rank(path, checkpoint.read_state(path))


def check(session: Session, asked: str, info: CheckpointInfo, shared: SharedContent, own: RankContent | None) -> None:
    """Raise ``DocumentError`` when a checkpoint does not fit the session; changes nothing."""
    fitting.check_counts(asked, shared, session.optimizers, session.schedulers)
    if info.sharded != (session.ranks is not None and session.ranks.sharded):
        found = "it holds a sharded model, the session's is not" if info.sharded else "it holds a whole model, the session's is sharded"
        raise DocumentError(asked, found=found, remedy="load it into a session of the same kind")
    if not info.sharded:
        fitting.check_model(asked, shared.model, bare(session.model))
    fitting.check_kinds(asked, shared, session.schedulers)
    notes: Sequence[tuple[OptimizerNote, OptimizerNote] | None] = [None] * len(shared.optimizers)
    if shared.optimizer_notes:
        notes = list(zip(shared.optimizer_notes, notes_of(session), strict=True))
    for number, (saved, both, optimizer) in enumerate(zip(shared.optimizers, notes, session.optimizers, strict=True)):
        fitting.check_optimizer(asked, number, saved, both, optimizer.param_groups)
    if shared.loss_scale is not None:
        checked_state(shared.loss_scale, session.loss_scale.settings)
    fitting.check_weights(asked, shared.weights, whole_weights(session), sharded=info.sharded)
    if own is not None:
        fitting.check_random(asked, own)
        if info.token:
            fitting.check_names(asked, "stateful objects", own.stateful, session.stateful)


def lost(session: Session, asked: str, info: CheckpointInfo, shared: SharedContent, own: RankContent | None) -> list[str]:
    """Return what of a checkpoint cannot be restored here, a warning each."""
    found = []
    here = session.plan.device.type
    if own is None:
        names = ", ".join(["random state", "data position", *(f"stateful {name!r}" for name in sorted(session.stateful))])
        now = 1 if session.ranks is None else session.ranks.size
        found.append(f"{asked} was written by {info.ranks} ranks, now {now} load it: not restored are {names}")
    elif info.device_type != here:
        found.append(f"random state of {info.device_type} is not restored on {here}: dropout masks and stochastic rounding differ from here on")
    if shared.loss_scale is None and session.loss_scale.dynamic:
        value = f"{session.loss_scale.value:g}"
        found.append(f"{asked} has no loss scale: it starts at {value} again and steps may be skipped; save with session.save(), which keeps it")
    return found


def restore_states(session: Session, shared: SharedContent, own: RankContent | None, *, sharded: bool) -> None:
    """Give every object its state, the model and its working weights last: they are copied in place."""
    if own is not None:
        for name, item in session.stateful.items():
            if name in own.stateful:
                item.load_state_dict(own.stateful[name])
    for scheduler, saved in zip(session.schedulers, shared.schedulers, strict=True):
        scheduler.load_state_dict(saved)
    for optimizer, saved in zip(session.optimizers, shared.optimizers, strict=True):
        optimizer.load_state_dict(fitting.fitted(saved, optimizer))
    bare(session.model).load_state_dict(shared.model)
    if session.weights is not None and shared.weights is not None:  # after the parameters: what rounding lost belongs to their values
        session.weights.load_state_dict(shared.weights if sharded else fitting.renamed(shared.weights, prefix_of(session.model).__add__))


@contextmanager
def unchanged_on_error(session: Session) -> Iterator[None]:
    """Take optimizers, schedulers and stateful objects back to what they were when the body raises."""
    optimizers = [(optimizer, optimizer.state, optimizer.param_groups) for optimizer in session.optimizers]  # loading binds new ones
    others = [(item, copy.deepcopy(item.state_dict())) for item in (*session.schedulers, *session.stateful.values())]
    try:
        yield
    except BaseException:
        for optimizer, state, groups in optimizers:
            optimizer.state, optimizer.param_groups = state, groups
        for item, before in others:
            item.load_state_dict(before)
        raise


@contextmanager
def restored(asked: str) -> Iterator[None]:
    """Say what went wrong when an object does not take its state."""
    try:
        yield
    except MpbackendError:
        raise
    except SOME_CLASSES as error:
        raise DocumentError(asked, found=first_line(error), remedy=fitting.BUILD_THE_SAME) from error


@contextmanager
def written(asked: str) -> Iterator[None]:
    """Say what went wrong when files cannot be written."""
    try:
        yield
    except MpbackendError:
        raise
    except (OSError, RuntimeError) as error:
        raise SessionError(asked, found=first_line(error), remedy="the checkpoint that was there is untouched") from error


@contextmanager
def together(session: Session, asked: str, kind: type[MpbackendError] = SessionError) -> Iterator[None]:
    """Run the body on every rank; when it raises on one, it raises on all, so that no rank waits for one that has given up."""
    ranks = session.ranks
    try:
        yield
    except Exception as error:
        if ranks is not None:
            ranks.agree_error(first_line(error) if isinstance(error, MpbackendError) else describe(error))
        raise
    if ranks is not None and (elsewhere := ranks.agree_error(None)) is not None:
        raise kind(asked, found=f"it failed on {elsewhere}", remedy="mend it there")
