"""Checks that nothing is lost on the way: between host and device, and through a checkpoint."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from mpbackend.conformance.answer import Answer, fault, fine
from mpbackend.conformance.operands import SEED
from mpbackend.conformance.subject import DTYPES, Subject
from mpbackend.conformance.training import Run, difference, each_recipe, same_bits

STORED = ("fp32", "bf16", "fp16")
INTEGERS = (torch.int64, torch.int32, torch.uint8)
BEFORE, AFTER = 2, 2
"""Steps before the checkpoint and after it."""


def check_copies(subject: Subject) -> Answer:
    """Tensors go to the device and back with every bit: all 16-bit codes, random fp32 ones, and integers."""
    generator = torch.Generator().manual_seed(SEED)
    sources = {name: torch.randint(0, 256, (2**16,), generator=generator, dtype=torch.int64).to(torch.uint8).view(DTYPES[name]) for name in STORED}
    sources |= {name: torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(DTYPES[name]) for name in STORED[1:]}
    sources |= {str(dtype): torch.randint(0, 256, (2**12,), generator=generator, dtype=torch.int64).to(torch.uint8).view(dtype) for dtype in INTEGERS}
    plan = next((plan for name in STORED if not isinstance(plan := subject.plan(name), str)), None)
    if plan is None:
        return fault("no plain recipe runs here")
    with subject.running(plan) as running, running.backward():
        for name, tensor in sources.items():
            for there in (tensor.to(subject.place), tensor.to(subject.place).clone()):
                if there.dtype is not tensor.dtype or there.device.type != subject.device.type:
                    return fault(f"a tensor of {name} becomes {there.dtype} on {there.device}")
                if not same_bits(there.cpu(), tensor):
                    return fault(f"a tensor of {name} comes back with other bits")
    return fine(formats=len(sources))


def check_resume(subject: Subject) -> Answer:
    """A run that is saved and resumed goes on with the bits of one that was not interrupted: parameters, buffers, moments, loss scale."""

    def judge(recipe: str) -> Answer:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "checkpoint"
            straight = Run(subject)
            with subject.session(straight.model, straight.optimizer, recipe) as session:
                for number in range(BEFORE):
                    straight.step(session, number)
                session.save(path)
                for number in range(BEFORE, BEFORE + AFTER):
                    straight.step(session, number)
                scale = float(session.loss_scale.value)
            resumed = Run(subject)
            with subject.session(resumed.model, resumed.optimizer, recipe) as session:
                session.load(path)
                for number in range(BEFORE, BEFORE + AFTER):
                    resumed.step(session, number)
                if float(session.loss_scale.value) != scale:
                    return fault(f"the loss scale is {float(session.loss_scale.value):g}, not {scale:g}")
        changed = difference(straight.state(), resumed.state())
        return fault(f"{changed} differs after resuming") if changed else fine()

    return each_recipe(subject, judge)
