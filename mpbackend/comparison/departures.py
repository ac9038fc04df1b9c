"""What a run did that its own plan does not say: switches that mean another format, and products observed in another format.

A plan's downgrades are no departures: they are decisions with a reason. A departure is what nobody decided.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import msgspec

from mpbackend.capability import SwitchDefault
from mpbackend.comparison.runs import ComparedRun
from mpbackend.decisions import Decision
from mpbackend.formats import DEVICE_RESOLVED, FORMATS
from mpbackend.matrix import Matrix
from mpbackend.observe.record import SwitchReading

MAIN_SHARE = 0.5
"""Share of the matrix-product FLOPs above which a format is the one that a run computed in."""

PAIR = re.compile(r" [x×] ")  # noqa: RUF001 - the multiplication sign is what an audit joins two operand formats with
"""What stands between the operand formats of an observed product."""


class Departure(msgspec.Struct, frozen=True, kw_only=True):
    """One departure of a run from its plan.

    Attributes:
        what: what departed: a switch by name, or ``matrix products``.
        planned: what the plan says.
        ran: what ran.
        reason: one clause that tells it, the switch named.
    """

    what: str
    planned: str
    ran: str
    reason: str


def departures(run: ComparedRun, matrix: Matrix) -> list[Departure]:
    """Return the departures of a run from its plan.

    Args:
        run: the run.
        matrix: says what the settings of switches mean on the run's architecture; of one that it does not know, only what the plan set is judged.
    """
    found = [*switch_departures(run, matrix), *observed_departure(run)]
    return list({departure.what: departure for departure in reversed(found)}.values())[::-1]


def switch_departures(run: ComparedRun, matrix: Matrix) -> Iterator[Departure]:
    """Yield a departure for each switch that does not stand as the plan needs it."""
    meanings = switch_meanings(run, matrix)
    for name, reading in run.record.switches.items():
        meaning = next((switch for key, switch in meanings.items() if key[0] == name), None)
        planned = planned_format(run, meaning) if meaning is not None else ""
        for value in dict.fromkeys([effective(reading), reading.after or effective(reading)]):
            means = computes(meaning, value)
            if planned and means and not same_format(planned, means):
                op = meaning.op if meaning is not None else ""
                yield Departure(what=name, planned=planned, ran=means, reason=f"{name} stood at {value}: {op} ran in {means}, and the plan says {planned}")
        if reading.set and reading.read_back and lowered(reading.read_back) != lowered(reading.set):
            reason = f"{name} was set to {reading.set} and read back as {reading.read_back}"
            yield Departure(what=name, planned=reading.set, ran=reading.read_back, reason=reason)
        elif reading.set and reading.after and lowered(reading.after) != lowered(effective(reading)):
            reason = f"{name} changed during the run, from {effective(reading)} to {reading.after}"
            yield Departure(what=name, planned=effective(reading), ran=reading.after, reason=reason)


def switch_meanings(run: ComparedRun, matrix: Matrix) -> Mapping[tuple[str, str], SwitchDefault]:
    """Return what the matrix says about the switches of the run's architecture that bear on the formats that it runs in, by name and format."""
    arch = run.record.device.arch
    known = matrix.switches(arch) if arch in matrix.archs else []
    return {(switch.name, switch.format): switch for switch in known if planned_format(run, switch)}


def planned_format(run: ComparedRun, switch: SwitchDefault) -> str:
    """Return the format that the plan grants for what a switch changes, empty where the switch does not bear on it.

    A switch about fp32 changes the format that operands are computed in; one about a narrower format changes the sum of its products.
    """
    compute = granted(run, "compute.forward", switch.op)
    if compute is None:
        return ""
    if switch.format == "fp32":
        return compute.granted if is_stored_as(compute.granted, "fp32") else ""
    accumulate = granted(run, "accumulate.forward", switch.op)
    return accumulate.granted.partition(" ")[0] if accumulate is not None and compute.granted == switch.format and accumulate.granted in FORMATS else ""


def granted(run: ComparedRun, role: str, op: str) -> Decision | None:
    """Return the decision about a role of an operation, None where the plan has none."""
    return next((decision for decision in run.record.plan if decision.role == role and decision.op == op), None)


def is_stored_as(name: str, storage: str) -> bool:
    """Tell whether a format is computed from operands of a storage format; a format that the device resolves is one of fp32 operands."""
    return name in DEVICE_RESOLVED or (name in FORMATS and FORMATS[name].storage == storage)


def same_format(one: str, other: str) -> bool:
    """Tell whether two names mean one format: equal, or one the device's resolution of the other."""
    return one == other or other in DEVICE_RESOLVED.get(one, ()) or one in DEVICE_RESOLVED.get(other, ())


def effective(reading: SwitchReading) -> str:
    """Return the value that a switch had during the run."""
    return reading.read_back or reading.set or reading.before


def computes(switch: SwitchDefault | None, value: str) -> str:
    """Return the format that a setting gives, empty where the matrix does not say."""
    if switch is None:
        return ""
    return next((format_ for setting, format_ in switch.computes.items() if lowered(setting) == lowered(value)), "")


def lowered(value: str) -> str:
    """Return the value of a switch as it is compared: Python and others write true in different cases."""
    return value.strip().lower()


def observed_departure(run: ComparedRun) -> Iterator[Departure]:
    """Yield a departure where most products were observed in a format that the plan grants to none; nothing where products cannot be counted."""
    compute = run.record.compute
    if compute.uncounted or not compute.shares:
        return
    planned = [decision for decision in run.record.plan if decision.role.startswith("compute.") and decision.granted in FORMATS]
    stored = {FORMATS[decision.granted].storage for decision in planned} | {decision.granted for decision in planned}
    name, share = max(compute.shares.items(), key=lambda item: item[1])
    if planned and share > MAIN_SHARE and not any(part in stored for part in PAIR.split(name)):
        wanted = planned[0].granted
        reason = f"{share:.0%} of the products were observed in {name}, and the plan says {wanted}"
        yield Departure(what="matrix products", planned=wanted, ran=name, reason=reason)
