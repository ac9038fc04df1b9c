"""What ``nvidia-smi`` says about the GPUs of this machine, asked in a process of its own and with a time limit. Makes no context and imports no torch."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from contextlib import suppress
from typing import NamedTuple

COMMAND = "nvidia-smi"
TIME_LIMIT_S = 20.0
"""Without persistence mode the driver starts every GPU for the question, which takes a second or two each."""

FIELDS = ("index", "name", "uuid", "compute_cap", "memory.total", "driver_version", "mig.mode.current")
QUERY = (f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits")

MIB = 1 << 20
LISTED_GPU = re.compile(r"GPU \d+: .* \(UUID: (?P<uuid>[^)\s]+)\)")
LISTED_INSTANCE = re.compile(r"\s+MIG (?P<profile>\S+)\s+Device\s+\d+: \(UUID: (?P<uuid>[^)\s]+)\)")

BY_HAND = f"run {COMMAND} by hand: its message names the fault"
REMEDIES = (
    ("couldn't communicate with the nvidia driver", "load the kernel module (`modprobe nvidia`), or install the driver again for the running kernel"),
    ("driver/library version mismatch", "reboot, or reload the kernel module: the driver was updated while it was loaded"),
    ("is not a valid field", "update the NVIDIA driver: it is older than compute capability queries"),
    ("no devices were found", "pass a GPU to this machine or container"),
    ("gpu is lost", "reset the GPU or reboot"),
    ("insufficient permissions", "give this user access to the files /dev/nvidia*"),
)
"""Part of a message, in lower case, to what to do about it."""


class Gpu(NamedTuple):
    """One physical GPU.

    Attributes:
        ordinal: index in PCI bus order.
        name: reported name.
        uuid: ``GPU-...``.
        capability: compute capability, ``9.0``; empty where it is not told.
        memory_bytes: total memory; None where it is not told.
        driver: driver version.
        mig: whether it is in MIG mode.
    """

    ordinal: int
    name: str
    uuid: str
    capability: str
    memory_bytes: int | None
    driver: str
    mig: bool


class Instance(NamedTuple):
    """One MIG compute instance.

    Attributes:
        gpu: the GPU that it is a part of.
        profile: its size, ``1g.10gb``.
        uuid: ``MIG-...``.
    """

    gpu: Gpu
    profile: str
    uuid: str


class Answer(NamedTuple):
    """What was found, or why nothing was.

    Attributes:
        gpus: physical GPUs in PCI bus order.
        instances: MIG instances, in the order of their GPUs.
        cause: why there are no GPUs; empty when there are.
        remedy: what to do about it.
        installed: whether the command is on the path at all.
    """

    gpus: tuple[Gpu, ...] = ()
    instances: tuple[Instance, ...] = ()
    cause: str = ""
    remedy: str = ""
    installed: bool = True


class Output(NamedTuple):
    """The text of a command, or the fault that it ended with."""

    text: str = ""
    cause: str = ""
    remedy: str = ""


def ask() -> Answer:
    """Ask for the GPUs and, where one is in MIG mode, for the instances. Raises nothing."""
    path = shutil.which(COMMAND)
    if path is None:
        return Answer(cause=f"{COMMAND} is not on the path", remedy="install the NVIDIA driver, or start the container with its GPUs", installed=False)
    output = run(path, *QUERY)
    if output.cause:
        return Answer(cause=output.cause, remedy=output.remedy)
    gpus = parse_gpus(output.text)
    if not gpus:
        return Answer(cause=f"{COMMAND} answered {shown(output.text)!r}, which is no list of GPUs", remedy=BY_HAND)
    if not any(gpu.mig for gpu in gpus):
        return Answer(gpus)
    output = run(path, "-L")
    if output.cause:
        return Answer(cause=f"its list of MIG instances: {output.cause}", remedy=output.remedy)
    return Answer(gpus, parse_instances(output.text, gpus))


def run(*command: str) -> Output:
    """Run a command for at most ``TIME_LIMIT_S`` seconds.

    A driver that hangs can hold a process so that it cannot be killed; such a process is left behind instead of being waited for.
    """
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True
        )
    except OSError as error:
        return Output(cause=f"{COMMAND} cannot be started: {error.strerror}", remedy="install the NVIDIA driver again")
    try:
        text, _ = process.communicate(timeout=TIME_LIMIT_S)
    except subprocess.TimeoutExpired:
        abandon(process)
        return Output(cause=f"{COMMAND} did not answer within {TIME_LIMIT_S:g} s", remedy="the driver hangs: look at dmesg, reset the GPU or reboot")
    if process.returncode != 0:
        lowered = text.lower()
        remedy = next((remedy for part, remedy in REMEDIES if part in lowered), BY_HAND)
        return Output(cause=f"{COMMAND} failed with status {process.returncode}: {shown(text)}", remedy=remedy)
    return Output(text)


def abandon(process: subprocess.Popen[str]) -> None:
    """Kill a process and what it started, and wait for it one second."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.stdout is not None:
        process.stdout.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=1.0)


def shown(text: str) -> str:
    """Return the first line of an answer that is not empty, at most 120 characters of it."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "nothing")
    return line if len(line) <= 120 else f"{line[:117]}..."


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Return the GPUs in the answer to ``QUERY``; none when a line of it is something else. ``[N/A]`` and the like are unknown values."""
    gpus: list[Gpu] = []
    for line in text.splitlines():
        if not line.strip():
            continue
        values = [value.strip() for value in line.split(",")]
        if len(values) != len(FIELDS) or not values[0].isdecimal() or not values[2].startswith("GPU-"):
            return ()
        index, name, uuid, capability, memory, driver, mig = ("" if value.startswith("[") else value for value in values)
        memory_bytes = int(memory) * MIB if memory.isdecimal() else None
        gpus.append(Gpu(int(index), name, uuid, capability if re.fullmatch(r"\d+\.\d+", capability) else "", memory_bytes, driver, mig == "Enabled"))
    return tuple(sorted(gpus, key=lambda gpu: gpu.ordinal))


def parse_instances(text: str, gpus: tuple[Gpu, ...]) -> tuple[Instance, ...]:
    """Return the MIG instances in the answer to ``nvidia-smi -L``; each stands below its GPU."""
    by_uuid = {gpu.uuid: gpu for gpu in gpus}
    owner: Gpu | None = None
    found: list[Instance] = []
    for line in text.splitlines():
        if listed := LISTED_GPU.fullmatch(line.rstrip()):
            owner = by_uuid.get(listed["uuid"])
        elif owner is not None and (instance := LISTED_INSTANCE.fullmatch(line.rstrip())):
            found.append(Instance(owner, instance["profile"], instance["uuid"]))
    return tuple(found)
