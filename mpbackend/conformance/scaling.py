"""Checks of loss scaling on the device: overflow skips a step, powers of two change no bit, and small gradients survive."""

from __future__ import annotations

import torch
from torch import nn

from mpbackend.conformance.answer import Answer, fault, fine, judged, skip
from mpbackend.conformance.operands import normal, placed
from mpbackend.conformance.subject import Subject
from mpbackend.conformance.tolerances import claim_for, distance_bound, gap_of
from mpbackend.conformance.training import Run, difference

HUGE = "fp16:loss_scale.init=16777216"
"""Starts at 2^24, where every gradient of the small model overflows fp16."""

BACKOFF = 0.5
TRIES = 20
BEYOND = 1e6
"""What a loss is multiplied by so that its gradients overflow fp16 under a scale of 2^10."""

SMALL = 2.0**-24
"""Half the smallest subnormal of fp16 times two: a gradient of this size has one bit there, and 11 after scaling by 2^16."""


def check_overflow_skips_the_step(subject: Subject) -> Answer:
    """A gradient that overflows skips the step: no parameter, moment or buffer changes, and the scale is halved until a step is taken."""
    if isinstance(refused := subject.plan(HUGE), str):
        return skip(refused)
    run = Run(subject)
    before, skipped = run.state(), 0
    with subject.session(run.model, run.optimizer, HUGE) as session:
        scale = float(session.loss_scale.value)
        for number in range(TRIES):
            result = run.step(session, number)
            if result.stepped:
                break
            skipped += 1
            if changed := difference(before, run.state()):
                return fault(f"a skipped step changes {changed}")
            scale = scale * BACKOFF
            if float(session.loss_scale.value) != scale:
                return fault(f"after {skipped} skipped steps the scale is {float(session.loss_scale.value):g}, not {scale:g}")
    if not skipped:
        return fault("a scale of 2^24 in fp16 skips no step")
    if skipped == TRIES:
        return fault(f"no step is taken in {TRIES}, at a scale of {scale:g}")
    return fine(skipped=skipped, scale=scale)


def check_scale_changes_no_bit(subject: Subject) -> Answer:
    """In bf16, whose range is that of fp32, a constant loss scale of 2^12 changes no bit of parameters and moments."""
    plain, scaled = "bf16", "bf16:loss_scale.mode=static,loss_scale.init=4096"
    if isinstance(refused := subject.plan(scaled), str):
        return skip(refused)
    states = []
    for recipe in (plain, scaled):
        run = Run(subject)
        with subject.session(run.model, run.optimizer, recipe) as session:
            for number in range(2):
                if not run.step(session, number).stepped:
                    return fault(f"a step under {recipe} is skipped")
        states.append(run.state())
    changed = difference(*states)
    return fault(f"{changed} differs") if changed else fine()


def check_small_gradients_survive(subject: Subject) -> Answer:
    """Gradients of 2^-24, of which fp16 keeps one bit, come through a loss scale of 2^16 as exactly as large ones."""
    recipe = "fp16:loss_scale.init=65536"
    plan = subject.plan(recipe)
    if isinstance(plan, str):
        return skip(plan)
    rows, features, width = 16, 24, 8
    x, c = normal((rows, features), "fp16", 1), normal((rows, width), "fp16", 2)
    layer = nn.Linear(features, width, bias=False)
    layer.load_state_dict({"weight": normal((width, features), "fp16", 3).float()})
    layer.to(subject.place)
    with subject.session(layer, torch.optim.SGD(layer.parameters(), lr=0.0), recipe) as session:
        with session.autocast():
            loss = (layer(x.float().to(subject.place)).float() * placed(c, "fp32", subject.place)).sum() * SMALL
        session.backward(loss)
        (gradient,) = session.unscale()
        found = gradient.detach().cpu().double() if gradient.grad is None else gradient.grad.detach().cpu().double()
        session.step()
    exact, size = c.T @ x, c.T.abs() @ x.abs()
    # The product runs on gradients scaled to 2^-24 * 2^16 = 2^-8, exactly; dividing by a power of two rounds nothing in fp32.
    factor = SMALL * 65536
    distance = distance_bound(exact * factor, size * factor, claim_for(subject, plan), rows, "fp16") / factor
    return judged(gap_of(found / SMALL, exact, distance), "the gradient")


def check_skip_restores_buffers(subject: Subject) -> Answer:
    """A step that is skipped leaves nothing in running statistics, which its forward pass had written."""
    if isinstance(refused := subject.plan("fp16"), str):
        return skip(refused)
    run = Run(subject)
    with subject.session(run.model, run.optimizer, "fp16:loss_scale.init=1024") as session:
        if not run.step(session, 0).stepped:
            return fault("an ordinary step is skipped")
        before = run.state()
        if run.step(session, 1, factor=BEYOND).stepped:
            return fault("a step whose gradients overflow is taken")
    after = run.state()
    changed = [
        name
        for name in ("statistics.running_mean", "statistics.running_var", "statistics.num_batches_tracked")
        if difference({name: before[name]}, {name: after[name]})
    ]
    return fault(f"{changed[0]} keeps what the skipped step wrote") if changed else fine()
