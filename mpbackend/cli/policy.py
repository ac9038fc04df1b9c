"""``mpbackend policy``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from mpbackend.backend import Backend, PolicyKind
from mpbackend.cli.options import emit, format_option, out_option, say, split_names, warn_unavailable
from mpbackend.device import Device
from mpbackend.errors import BackendError, DocumentError, MpbackendError, UnknownNameError, describe, printable
from mpbackend.inquiry import ask_devices
from mpbackend.plugins import Plugins, load_plugins
from mpbackend.report.policies import KINDS, BackendPolicy, Survey, policies_document, policies_report

NAMESPACE = "aten::"
FP32: PolicyKind = "fp32"


@click.command()
@click.argument("backends", nargs=-1, metavar="[BACKEND]...")
@click.option("--diff", is_flag=True, help="Compare two or more backends.")
@click.option("--op", "ops", multiple=True, metavar="OP", help="List this operator only, all its overloads unless one is named; repeatable.")
@click.option("--pinned", is_flag=True, help="With the sensitive operators pinned to fp32, as recipes with sensitive=fp32 run.")
@format_option("text", "md", "json")
@out_option
def command(backends: tuple[str, ...], diff: bool, ops: tuple[str, ...], pinned: bool, output: str, out: Path | None) -> None:
    """Show what autocast does with each operator, by the installed torch: its policy, and the formats that come out where it can be run here.

    Of every installed backend when none is named. What a backend lists is compared with the kernels that torch's dispatcher has for it.
    """
    plugins = load_plugins()
    chosen = choose_backends(plugins, backends, diff)
    survey = take_survey(chosen, split_names(ops), pinned=pinned)
    if diff and len(survey.backends) < 2:
        raise BackendError(f"--diff {' '.join(chosen)}", found=f"fewer than two policies; {join_errors(survey.errors)}", remedy="`mpbackend doctor` says more")
    if not survey.backends:
        raise BackendError(f"policy of {', '.join(chosen)}", found=join_errors(survey.errors), remedy="`mpbackend doctor` says more")
    emit(policies_report(survey), output, policies_document(survey) if output == "json" else None, out)
    for name, cause in survey.errors.items():
        say(f"warning: policy of {name}: {cause}", err=True)
    warn_unavailable(plugins)


def join_errors(errors: Mapping[str, str]) -> str:
    """Return the errors of several backends on one line."""
    return "; ".join(f"{name}: {cause}" for name, cause in errors.items())


def choose_backends(plugins: Plugins, names: Sequence[str], diff: bool) -> dict[str, Backend]:
    """Return the named backends, all when none is named.

    Raises:
        UnknownNameError: no installed plugin offers a name.
        BackendError: no backend is installed.
        DocumentError: one backend is named twice, several without ``--diff``, or fewer than two with it.
    """
    found = [plugins.backend(name) for name in names] or list(plugins.backends.values())
    chosen = {backend.name: backend for backend in found}
    remedy = "write `mpbackend policy --diff BACKEND BACKEND`"
    if not chosen:
        raise BackendError("policy", found="no backend is installed", remedy="`mpbackend doctor` lists what is installed")
    if len(chosen) < len(found):
        raise DocumentError(f"policy {' '.join(names)}", found="one backend twice", remedy=remedy)
    if diff and len(chosen) < 2:
        raise DocumentError(f"--diff {' '.join(names)}".strip(), found="fewer than two backends", allowed=sorted(plugins.backends), remedy=remedy)
    if len(names) > 1 and not diff:
        raise DocumentError(f"policy {' '.join(names)}", found=f"{len(names)} backends without --diff", remedy=remedy)
    return chosen


def take_survey(backends: Mapping[str, Backend], ops: Sequence[str], *, pinned: bool) -> Survey:
    """Read the policies of backends and run the operators where that is possible; what fails for one backend is kept as its error.

    Args:
        backends: backends by name.
        ops: operators to list; all when empty.
        pinned: pin the sensitive operators first.

    Raises:
        UnknownNameError: neither a backend nor torch has an operator of ``ops``.
        BackendError: the fp32 list of the installed torch cannot be read.
    """
    import torch

    from mpbackend.train.outcomes import find_grounds, run_operators
    from mpbackend.train.policy import PinnedPolicy, sensitive_ops
    from mpbackend.train.samples import sample

    sensitive = frozenset(sensitive_ops())
    errors: dict[str, str] = {}
    found: dict[str, BackendPolicy] = {}
    with ExitStack() as pins:
        for name, backend in backends.items():
            with keep_error(errors, name):
                found[name] = read_policy(backend)
        if pinned:
            for name, policy in list(found.items()):  # after all were read: backends may share a key
                with keep_error(errors, name):
                    pin = pins.enter_context(PinnedPolicy(policy.autocast_key, policy.policy))
                    found[name] = replace(policy, policy={**policy.policy, **dict.fromkeys(pin.pinned, FP32)}, pinned=pin.pinned)
        found = {name: policy for name, policy in found.items() if name not in errors}
        listed = sorted({op for policy in found.values() for op in policy.policy})
        known = sorted({*listed, *sensitive})
        shown = choose_ops(ops, known) if ops else listed
        overloads = {op: overload for op in (shown if ops else known) if (overload := overload_of(op)) is not None}
        for name, policy in found.items():
            grounds = find_grounds(find_device(backends[name]), policy.autocast_key)
            found[name] = replace(policy, method=grounds.method, reason=grounds.reason, outcomes=run_operators(overloads, grounds, sample))
    return Survey(torch=str(torch.__version__), pinned=pinned, sensitive=sensitive, backends=tuple(found.values()), errors=errors, ops=tuple(shown))


@contextmanager
def keep_error(errors: dict[str, str], name: str) -> Iterator[None]:
    """Put an error raised inside into ``errors`` as one line, under ``name``."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - a stranger's backend may raise anything; it must not hide the others
        errors[name] = str(error) if isinstance(error, MpbackendError) else printable(describe(error))


def find_device(backend: Backend) -> Device:
    """Return a device of a backend: the first usable one, else any that it names, else one that stands for those that are not here."""
    answer = ask_devices(backend)
    kind = next(iter(backend.device_types), backend.name)
    cause = printable(next(iter(answer.causes), "no device was found"))
    absent = Device(key=backend.name, arch="unknown", name=backend.name, backend=backend.name, type=kind, usable=False, cause=cause)
    return next((device for device in answer.devices if device.usable), next(iter(answer.devices), absent))


def read_policy(backend: Backend) -> BackendPolicy:
    """Return a backend's own policy, and what the dispatcher has under its key.

    Raises:
        BackendError: it names an autocast key that torch does not have, or a policy that is none.
    """
    policy = dict(backend.op_policy(find_device(backend)))
    wrong = {op: kind for op, kind in policy.items() if kind not in KINDS}
    if wrong:
        op, kind = next(iter(wrong.items()))
        raise BackendError(f"policy of {backend.name}", found=f"{op} is {kind!r}", allowed=KINDS, remedy="update or uninstall the plugin")
    kernels = dispatcher_ops(backend.autocast_key)
    return BackendPolicy(backend=backend.name, autocast_key=backend.autocast_key, policy=policy, native=frozenset(policy), dispatcher=kernels)


def dispatcher_ops(autocast_key: str) -> frozenset[str]:
    """Return torch's own operators with a kernel under an autocast key, without their namespace.

    Raises:
        UnknownNameError: torch has no such autocast key.
    """
    import torch

    known = [key for key in dir(torch._C.DispatchKey) if key.startswith("Autocast")]
    if autocast_key not in known:
        raise UnknownNameError("autocast key", autocast_key, known)
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith(NAMESPACE))
    return frozenset(name.removeprefix(NAMESPACE) for name in names if torch._C._dispatch_has_kernel_for_dispatch_key(name, autocast_key))


def choose_ops(names: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return the operators that names mean: all overloads that are known, or one that torch has and no list names.

    Raises:
        UnknownNameError: there is none.
    """
    chosen: set[str] = set()
    for name in names:
        found = [op for op in known if name in (op, op.partition(".")[0])] or ([name] if overload_of(name) is not None else [])
        if not found:
            raise UnknownNameError("operator", name, known, remedy="name it as torch.ops.aten does, with or without an overload: softmax.int")
        chosen.update(found)
    return sorted(chosen)


def overload_of(name: str) -> Any:
    """Return the overload of an operator, None when torch does not have it."""
    from mpbackend.train.policy import find_op

    try:
        return find_op(name)
    except (BackendError, RuntimeError):
        return None
