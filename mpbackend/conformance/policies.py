"""Checks of autocast: what the backend lists is what torch dispatches, and what a recipe lowers or pins is lowered or pinned."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from mpbackend.backend import PolicyKind
from mpbackend.conformance.answer import Answer, fault, fine, skip, together
from mpbackend.conformance.operands import normal, placed
from mpbackend.conformance.subject import DTYPES, Running, Subject
from mpbackend.errors import BackendError
from mpbackend.train.outcomes import Grounds, run_operators
from mpbackend.train.policy import PinnedPolicy, find_op, sensitive_ops
from mpbackend.train.samples import sample

LOWERED = ("bf16", "fp16")
KINDS: tuple[str, ...] = get_args(PolicyKind)
NAMESPACE = "aten::"


def check_policy_names(subject: Subject) -> Answer:
    """The policy names operators that the installed torch has, each with a known kind, and lowers matrix products."""
    policy = subject.backend.op_policy(subject.device)
    for name, kind in policy.items():
        if kind not in KINDS:
            return fault(f"{name} is {kind!r}, which is no kind of a policy")
        if not has_op(name):
            return fault(f"torch {torch.__version__} has no operator {name}")
    wrong = [name for name in ("mm", "bmm", "addmm", "linear", "conv2d") if policy.get(name, "lower") != "lower"]
    if wrong:
        return fault(f"{wrong[0]} is {policy[wrong[0]]}: a recipe's compute format would not reach it")
    return fine(operators=len(policy)) if policy else fault("it names no operator")


def has_op(name: str) -> bool:
    """Tell whether torch has an operator that a policy names; one of another namespace counts where torch has the base name."""
    try:
        return find_op(name) is not None
    except (BackendError, RuntimeError):
        return any(qualified.partition("::")[2] in (name, name.partition(".")[0]) for qualified in torch._C._dispatch_get_all_op_names())


def check_policy_is_dispatched(subject: Subject) -> Answer:
    """The operators that the policy names are those that torch's dispatcher has autocast kernels for under the backend's key."""
    key: Any = getattr(torch._C.DispatchKey, subject.backend.autocast_key)
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith(NAMESPACE)]
    kernels = {name.removeprefix(NAMESPACE) for name in names if torch._C._dispatch_has_kernel_for_dispatch_key(name, subject.backend.autocast_key)}
    if not kernels:
        return skip(f"the dispatcher has no kernels under {key} in this process")
    listed = set(subject.backend.op_policy(subject.device))
    only = sorted(listed - kernels), sorted(kernels - listed)
    texts = [f"{len(names)} {what}, {names[0]} for one" for names, what in zip(only, ("only listed", "only in the dispatcher"), strict=True) if names]
    return fault("; ".join(texts), operators=len(listed)) if texts else fine(operators=len(listed))


def check_products_are_lowered(subject: Subject) -> Answer:
    """Under a 16-bit recipe matrix products, linear layers, convolutions and attention of fp32 operands return that format."""
    x = normal((4, 8, 8), "fp32", 1)
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "mm": lambda x: x[0] @ x[1],
        "bmm": lambda x: torch.bmm(x, x),
        "addmm": lambda x: torch.addmm(x[0], x[1], x[2]),
        "linear": lambda x: functional.linear(x[0], x[1]),
        "conv2d": lambda x: functional.conv2d(x[None], x[:, :, None, :1].expand(4, 8, 1, 1)[:, :4]),
        "attention": lambda x: functional.scaled_dot_product_attention(x[None], x[None], x[None]),
    }

    def judge(running: Running, name: str) -> Answer:
        for label, call in calls.items():
            with running.forward():
                found = call(placed(x, "fp32", subject.place))
            if found.dtype is not DTYPES[name]:
                return fault(f"{label} returns {found.dtype}")
        return fine(operators=len(calls))

    return subject.each_format(judge, LOWERED)


def check_sensitive_operators(subject: Subject) -> Answer:
    """Under sensitive=fp32 every pinned operator that runs here returns fp32 from 16-bit operands, every step inside it too."""
    ops = {name: find_op(name) for name in sorted(sensitive_ops())}
    with PinnedPolicy(subject.backend.autocast_key, subject.backend.op_policy(subject.device)) as policy:
        outcomes = run_operators(ops, Grounds(subject.place, "run"), sample)
        pinned = len(policy.pinned)
    wrong, ran = [], 0
    for name, found in outcomes.items():
        seen = [outcome for inputs, outcome in found.items() if inputs in LOWERED and not outcome.refused]
        ran += bool(seen)
        formats = sorted({form for outcome in seen for form in (*outcome.out, *outcome.inside)} - {"fp32"})
        wrong += [f"{name} works in {', '.join(formats)}"] if formats else []
    if not ran:
        return fault("none of them runs here")
    return fault(f"{len(wrong)} of {ran}: {wrong[0]}", ran=ran, pinned=pinned) if wrong else fine(ran=ran, pinned=pinned)


def check_fp32_turns_autocast_off(subject: Subject) -> Answer:
    """Under the recipe fp32 a session computes in fp32 even inside somebody else's autocast."""
    if isinstance(refused := subject.plan("fp32"), str):
        return skip(refused)
    with torch.autocast(subject.device.type, dtype=torch.bfloat16):
        found = output_of(subject, "fp32", threads=False)
    return fine() if found is torch.float32 else fault(f"a linear layer returns {found}")


def check_autocast_in_threads(subject: Subject) -> Answer:
    """A forward pass in another thread of the process has the recipe's format too."""
    answers: dict[str, Answer] = {}
    for name in LOWERED:
        if isinstance(refused := subject.plan(name), str):
            answers[name] = skip(refused)
            continue
        found = output_of(subject, name, threads=True)
        answers[name] = fine() if found is DTYPES[name] else fault(f"a linear layer in another thread returns {found}")
    return together(answers)


def output_of(subject: Subject, recipe: str, *, threads: bool) -> torch.dtype | None:
    """Return the dtype that a linear layer gives in a session, in a thread of its own if asked; None where it raised."""
    model = nn.Linear(8, 8).to(subject.place)
    x = torch.ones(2, 8).to(subject.place)
    found: list[torch.dtype] = []
    with subject.session(model, torch.optim.SGD(model.parameters(), lr=0.1), recipe) as session:

        def run() -> None:
            with session.autocast():
                found.append(model(x).dtype)

        if threads:
            worker = threading.Thread(target=run)
            worker.start()
            worker.join()
        else:
            run()
    return found[0] if found else None
