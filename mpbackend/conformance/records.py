"""A check of the record: it says where a run really ran, and with which settings."""

from __future__ import annotations

import tempfile
from pathlib import Path

from mpbackend.conformance.answer import Answer, fault, fine
from mpbackend.conformance.subject import Subject
from mpbackend.conformance.training import Run, each_recipe
from mpbackend.observe.record import load_record

STEPS = 2


def check_record_tells_what_ran(subject: Subject) -> Answer:
    """The record of a run names the device and its kind, torch and the plugin, the switches as they were set, and the bytes of each class."""

    def judge(recipe: str) -> Answer:
        plan = subject.plan(recipe)
        assert not isinstance(plan, str)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "record"
            run = Run(subject)
            with subject.session(run.model, run.optimizer, recipe, record=path, seed=1) as session:
                for number in range(STEPS):
                    run.step(session, number)
            found = load_record(path)
        record = found.record
        if (record.device.key, record.device.kind, record.run.kind) != (subject.device.key, subject.device.kind, subject.device.kind):
            return fault(f"it says {record.device.key}, {record.device.kind} and {record.run.kind}, not {subject.device.key} and {subject.device.kind}")
        missing = [name for name in subject.backend.environment(subject.device) if name not in record.environment]
        if missing:
            return fault(f"it leaves {missing[0]} of the environment out")
        wrong = [name for name, value in plan.switches.items() if name not in record.switches or record.switches[name].read_back != value]
        if wrong:
            return fault(f"it does not say that {wrong[0]} was {plan.switches[wrong[0]]}")
        unseen = [name for name in ("parameters", "gradients", "optimizer state") if not record.classes[name].observed]
        if unseen:
            return fault(f"it has no bytes of {unseen[0]}")
        return fine() if len(found.steps) == STEPS else fault(f"it has {len(found.steps)} lines of {STEPS} steps")

    return each_recipe(subject, judge)
