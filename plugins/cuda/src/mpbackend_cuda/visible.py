"""Which GPUs a CUDA program sees, in which order: the rules of ``CUDA_VISIBLE_DEVICES``, ``CUDA_DEVICE_ORDER`` and MIG.

CUDA Programming Guide, section CUDA Environment Variables, and NVIDIA MIG User Guide, section CUDA Device Enumeration. Where the two are silent (numbers
with a tail, repetitions, lists of two kinds) the rule is the one by which torch counts devices.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from mpbackend_cuda.smi import Answer, Gpu, Instance

VARIABLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
BY_BUS = "PCI_BUS_ID"

NUMBER = re.compile(r"[+-]?\d+")
GPU = "GPU-"
MIG = "MIG-"

Entry = Gpu | Instance
EntryT = TypeVar("EntryT", Gpu, Instance)
ItemT = TypeVar("ItemT")


class View(NamedTuple):
    """What a CUDA program sees.

    Attributes:
        entries: devices in the order of their indices.
        cause: why there is no device, or why an index does not tell which device it means; empty otherwise.
        remedy: what to do about it.
    """

    entries: tuple[Entry, ...]
    cause: str = ""
    remedy: str = ""


def view(answer: Answer, environ: Mapping[str, str]) -> View:
    """Return what a CUDA program would see.

    Args:
        answer: the GPUs and instances of the machine.
        environ: its environment.
    """
    value = environ.get(VARIABLE)
    entries = tuple(choose(value, answer))
    if not entries:
        return View((), *hidden(value, answer))
    return View(entries, *ambiguity(value, answer, environ))


def choose(value: str | None, answer: Answer) -> Sequence[Entry]:
    """Return the visible devices: whole GPUs, or one MIG instance and then no whole GPU.

    Args:
        value: ``CUDA_VISIBLE_DEVICES``; None when it is not set.
        answer: the GPUs and instances of the machine.
    """
    if value is None:
        return narrow(answer.gpus, answer)
    if value.startswith(MIG):
        return pick(names(value, MIG), answer.instances)[:1]
    if value.startswith(GPU):
        return narrow(pick(names(value, GPU), answer.gpus), answer)
    return narrow([answer.gpus[number] for number in itertools.takewhile(lambda number: number < len(answer.gpus), numbers(value))], answer)


def narrow(gpus: Sequence[Gpu], answer: Answer) -> list[Entry]:
    """Return what is enumerated of chosen GPUs: the first MIG instance that any of them has, else those that are not divided."""
    instances = [instance for gpu in gpus for instance in answer.instances if instance.gpu == gpu]
    return [*instances[:1]] or [gpu for gpu in gpus if not gpu.mig]


def hidden(value: str | None, answer: Answer) -> tuple[str, str]:
    """Return cause and remedy when no device is visible."""
    if value is not None:
        return f"{VARIABLE}={value!r} leaves none of {len(answer.gpus)} GPUs visible", f"unset {VARIABLE}, or name GPUs by index or UUID"
    return "every GPU is in MIG mode and none has an instance", "create one (`nvidia-smi mig -cgi PROFILE -C`), or turn MIG mode off"


def ambiguity(value: str | None, answer: Answer, environ: Mapping[str, str]) -> tuple[str, str]:
    """Return cause and remedy when indices do not say which devices they mean; empty texts when they do, as UUIDs always do."""
    if len(answer.gpus) == 1 or (value is not None and value.startswith((GPU, MIG))):
        return "", ""
    if value is not None and any(gpu.mig for gpu in answer.gpus):
        cause = f"{VARIABLE}={value} counts GPUs of which one is divided by MIG, and what a number then means is not documented"
        return cause, f"name one: export {VARIABLE}={(answer.instances or answer.gpus)[0].uuid}"
    if len({(gpu.name, gpu.capability) for gpu in answer.gpus}) > 1 and environ.get(ORDER) != BY_BUS:
        return "GPUs of several models, which CUDA counts in an order of its own: an index names no model", f"export {ORDER}={BY_BUS}"
    return "", ""


def numbers(value: str) -> list[int]:
    """Return the indices in a list, up to the first that is none or negative; nothing when one stands there twice."""
    matches = [NUMBER.match(element.strip()) for element in value.split(",")]
    return once(itertools.takewhile(lambda number: number >= 0, (int(match[0]) if match else -1 for match in matches)))


def names(value: str, prefix: str) -> list[str]:
    """Return the names in a list, up to the first without the prefix; nothing when one stands there twice."""
    return once(itertools.takewhile(lambda name: name.startswith(prefix), value.split(",")))


def pick(wanted: Sequence[str], entries: Sequence[EntryT]) -> list[EntryT]:
    """Return the entries that UUIDs or beginnings of UUIDs stand for, up to the first that stands for none or for several; nothing when one is named twice."""
    matches = [[index for index, entry in enumerate(entries) if entry.uuid.startswith(name)] for name in wanted]
    return [entries[index] for index in once(match[0] for match in itertools.takewhile(lambda match: len(match) == 1, matches))]


def once(items: Iterable[ItemT]) -> list[ItemT]:
    """Return the items, or nothing when one of them stands there twice."""
    kept = [*items]
    return kept if len(set(kept)) == len(kept) else []
