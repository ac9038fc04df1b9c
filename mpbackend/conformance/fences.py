"""Checks of the global switches: they read back, a plan's settings are theirs, and a session leaves them as they were."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from mpbackend.backend import Switch
from mpbackend.capability import SwitchDefault
from mpbackend.conformance.answer import Answer, FigureValue, fault, fine, skip
from mpbackend.conformance.subject import Subject
from mpbackend.errors import BackendError
from mpbackend.formats import FORMATS
from mpbackend.recipe import PRESETS
from mpbackend.train.fence import set_checked

NONSENSE = "no-such-setting"


def check_switches_read_back(subject: Subject) -> Answer:
    """Every switch reads as one of its settings, and what is set is read; asking for the list again changes nothing."""
    switches = subject.backend.switches(subject.device)
    names = [switch.name for switch in switches]
    if len(set(names)) < len(names):
        return fault("two switches have one name")
    for switch in switches:
        before = switch.get()
        if before not in switch.allowed:
            return fault(f"{switch.name} reads {before!r}, which is none of {', '.join(switch.allowed)}")
        try:
            set_checked(switch, before)
        except BackendError as error:
            return fault(str(error))
    return fine(switches=len(switches))


def check_switch_refuses_nonsense(subject: Subject) -> Answer:
    """A switch that is given a word that is none of its settings raises, or still reads one of its settings; it never reads back the word."""
    for switch in subject.backend.switches(subject.device):
        before = switch.get()
        try:
            switch.set(NONSENSE)
        except Exception:  # noqa: BLE001 - to refuse is right, with whatever class the library has
            continue
        finally:
            found = switch.get()
            switch.set(before)
        if found not in switch.allowed:
            return fault(f"{switch.name} takes {NONSENSE!r} and reads {found!r}")
    return fine()


def check_plans_set_known_switches(subject: Subject) -> Answer:
    """Every switch that a plan of a preset sets is one of the backend's, with a setting that it allows and that reads back."""
    known: dict[str, Switch] = {switch.name: switch for switch in subject.backend.switches(subject.device)}
    planned = 0
    for recipe in PRESETS:
        plan = subject.plan(recipe)
        if isinstance(plan, str):
            continue
        planned += 1
        for name, value in plan.switches.items():
            if name not in known:
                return fault(f"{recipe} sets {name}, which the backend does not have")
            if value not in known[name].allowed:
                return fault(f"{recipe} sets {name} to {value!r}, which it does not take")
            try:
                before = set_checked(known[name], value)
            except BackendError as error:
                return fault(f"{recipe}: {error}")
            known[name].set(before)
    return fine(recipes=planned) if planned else fault("no preset runs here")


def check_session_restores_switches(subject: Subject) -> Answer:
    """After a session every switch reads what it read before it, and while it is live what its plan says."""
    for recipe in ("fp32", "bf16", "fp16"):
        plan = subject.plan(recipe)
        if isinstance(plan, str):
            continue
        switches = subject.backend.switches(subject.device)
        before = {switch.name: switch.get() for switch in switches}
        model = nn.Linear(2, 2).to(subject.place)
        with subject.session(model, torch.optim.SGD(model.parameters(), lr=0.1), recipe):
            live = {switch.name: switch.get() for switch in subject.backend.switches(subject.device)}
        wrong = [name for name, value in plan.switches.items() if live.get(name) != value]
        if wrong:
            return fault(f"under {recipe} {wrong[0]} reads {live.get(wrong[0])!r}, not {plan.switches[wrong[0]]!r}")
        after = {switch.name: switch.get() for switch in subject.backend.switches(subject.device)}
        changed = [name for name, value in before.items() if after.get(name) != value]
        if changed:
            return fault(f"after {recipe} {changed[0]} reads {after.get(changed[0])!r}, and before it read {before[changed[0]]!r}")
    return fine()


def check_fp32_products_keep_their_bits(subject: Subject) -> Answer:
    """Under the recipe fp32 products and convolutions use every bit of their operands, in both passes: no switch leaves them in a shorter format."""
    plan = subject.plan("fp32")
    if isinstance(plan, str):
        return skip(plan)
    converted = [decision for decision in plan.decisions if decision.role == "compute.forward" and decision.level == "converted"]
    if converted:
        return skip(f"the plan says that it is converted: {converted[0].reason}")
    with subject.running(plan) as running:
        for op in ("matmul", "conv"):
            with running.forward():
                bits = kept_bits(subject, op)
            if bits < FORMATS["fp32"].mantissa_bits:
                return fault(f"{op} keeps {bits} fraction bits of fp32 operands")
    return fine()


def kept_bits(subject: Subject, op: str) -> int:
    """Return how many fraction bits of fp32 operands reach a product: the largest p at which ``1 + 2^-p`` minus 1 is not lost.

    Args:
        subject: the backend and device.
        op: ``matmul`` or ``conv``.
    """
    bits = FORMATS["fp32"].mantissa_bits
    operand = torch.zeros(32, 32)
    for p in range(1, bits + 1):
        operand[p, :2] = torch.tensor([1 + 2.0**-p, -1.0])
    other = torch.zeros(32, 32)
    other[:2] = 1.0
    left, right = operand.to(subject.place), other.to(subject.place)
    if op == "matmul":
        found = (left @ right)[:, 0]
    else:
        found = functional.conv2d(left[None].permute(2, 0, 1).reshape(1, 32, 32, 1), right.T.reshape(32, 32, 1, 1))[0, 0, :, 0]
    kept = [p for p in range(1, bits + 1) if float(found[p]) == 2.0**-p]
    return max(kept, default=0)


def check_switches_do_what_the_matrix_says(subject: Subject) -> Answer:
    """Under every setting of a switch of fp32 products they keep the fraction bits of the format that the matrix names for it, or more of the operands' own."""
    known = {switch.name: switch for switch in subject.backend.switches(subject.device)}
    records = subject.matrix.switches(subject.device.arch) if subject.device.arch in subject.matrix.archs else []
    tried: dict[str, FigureValue] = {}
    for record in records:
        if record.format != "fp32" or record.op not in ("matmul", "conv") or record.name not in known:
            continue
        for setting in record.computes:
            problem, bits = effect(subject, known[record.name], record, setting)
            if problem:
                return fault(problem)
            tried[f"{record.name} {setting}"] = bits
    return Answer(figures=tried) if tried else skip("the matrix names no switch of fp32 products")


def effect(subject: Subject, switch: Switch, record: SwitchDefault, setting: str) -> tuple[str, str]:
    """Return what is wrong with one setting of a switch, empty when nothing is, and the fraction bits that products keep under it."""
    plan = subject.plan("fp32")
    if isinstance(plan, str) or setting not in switch.allowed:
        return "", "not run"
    with subject.running(plan) as running:
        try:
            before = set_checked(switch, setting)
        except BackendError:
            return "", "not taken here"
        try:
            with running.forward():
                bits = kept_bits(subject, record.op)
        finally:
            switch.set(before)
    wanted = FORMATS[record.computes[setting]].mantissa_bits
    problem = f"{record.name} = {setting} computes in {record.computes[setting]}, and {record.op} keeps {bits} fraction bits"
    return (problem if bits < wanted else ""), str(bits)
