"""The NPUs of this machine, found without a device context and without importing torch or torch_npu in this process.

Where neither an NPU nor torch_npu is found nothing is listed: this is another kind of machine. Where one of them is, there is a device, usable or with
cause and remedy.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mpbackend.device import Device
from mpbackend.documents import shipped_files
from mpbackend.matrix import Matrix, load_matrix
from mpbackend_ascend import software
from mpbackend_ascend.probe import MARK
from mpbackend_ascend.software import AUTOLOAD, LET_TORCH_IMPORT, TORCH, TORCH_NPU, VISIBLE, Problem

BACKEND = "ascend"
DEVICE_TYPE = "npu"
MATRIX = "ascend.toml"
UNKNOWN = "unknown"
VENDOR_NAME = "Ascend"

NODES = "/dev/davinci[0-9]*"
"""Device nodes that the driver makes, one a chip."""

SMI = "npu-smi"
SMI_LIMIT_S = 15.0
SMI_ROW = re.compile(r"^\|\s*\d+\s+(?P<name>[\w-]+)\s*\|\s*(?:OK|Warning|Alarm|Critical|UNKNOWN)\b", re.MULTILINE)
"""A chip in the table of ``npu-smi info``: number and name, then its health."""

PROBE_LIMIT_S = 120.0
"""torch_npu's first import on a cold disk takes the better part of a minute."""

NO_DEVICE = f"check the driver with `npu-smi info`, and {VISIBLE}"


def matrix_files() -> list[Path]:
    """Return the shipped capability matrix of this vendor."""
    return [path for path in shipped_files() if path.name == MATRIX]


class Answer(NamedTuple):
    """What the probe said: data, or the line that tells why there is none."""

    data: Mapping[str, Any]
    failure: str


def chips() -> list[str]:
    """Return the names of the chips as ``npu-smi info`` gives them (``910B3``); one ``unknown`` a device node where it does not answer."""
    nodes = len(glob.glob(NODES))
    tool = shutil.which(SMI)
    if tool is not None:
        try:
            table = subprocess.run([tool, "info"], capture_output=True, text=True, timeout=SMI_LIMIT_S, check=False).stdout
        except (OSError, subprocess.TimeoutExpired):
            table = ""
        if names := [match["name"] for match in SMI_ROW.finditer(table)]:
            return names
    return [UNKNOWN] * nodes


def run_probe() -> Answer:
    """Ask torch_npu in a process of its own."""
    command = [sys.executable, "-m", "mpbackend_ascend.probe"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_LIMIT_S, check=False, env=environment)
    except subprocess.TimeoutExpired:
        return Answer({}, f"torch_npu did not answer within {PROBE_LIMIT_S:.0f} s")
    except OSError as error:
        return Answer({}, f"{sys.executable} did not start: {error.strerror}")
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            return Answer(json.loads(line.removeprefix(MARK)), "")
    return Answer({}, failure_line(done.stderr) or f"the probe ended with status {done.returncode}")


def failure_line(stderr: str) -> str:
    """Return the line of a traceback that names the first cause: the first exception's, since later ones only wrap it."""
    lines = [line.strip() for line in stderr.splitlines()]
    return next((line for line in lines if re.match(r"^(?:[A-Za-z_][\w.]*)?(?:Error|Exception)\b", line)), next(filter(None, reversed(lines)), ""))


def find_devices(
    environ: Mapping[str, str],
    modules: Mapping[str, object],
    *,
    matrix: Callable[[], Matrix] = lambda: load_matrix(matrix_files()),
    probe: Callable[[], Answer] = run_probe,
    chips: Callable[[], list[str]] = chips,
) -> list[Device]:
    """Return the NPUs of this machine.

    Args:
        environ: the environment of this process.
        modules: the modules that this process has imported.
        matrix: loads the capability matrix that knows the SoC names.
        probe: asks torch_npu.
        chips: asks the driver.
    """
    present = chips()
    if not present and not software.installed(TORCH_NPU):
        return []
    versions = {name: version for name in (TORCH, TORCH_NPU) if (version := software.installed(name))}
    found = software.problem(environ)
    if found is not None:
        return [unusable(matrix(), index, chip, versions, found) for index, chip in enumerate(present or [UNKNOWN])]
    answer = probe()
    if answer.failure:
        return [unusable(matrix(), index, chip, versions, load_failure(answer.failure)) for index, chip in enumerate(present or [UNKNOWN])]
    return probed(answer.data, environ, modules, matrix(), versions)


def load_failure(failure: str) -> Problem:
    """Return cause and remedy where torch_npu could not be loaded."""
    torch, torch_npu, cuda = software.installed(TORCH), software.installed(TORCH_NPU), software.cuda_build()
    if cuda:
        cause = f"torch {torch} is a build for CUDA {cuda} and torch_npu {torch_npu} is installed beside it: {failure}"
        return Problem(cause, f"install the CPU build of torch for the NPU; for the GPU, {LET_TORCH_IMPORT}")
    return Problem(f"torch_npu {torch_npu} does not load under torch {torch}: {failure}", f"{software.SOURCE_CANN}; {LET_TORCH_IMPORT}")


def probed(data: Mapping[str, Any], environ: Mapping[str, str], modules: Mapping[str, object], matrix: Matrix, versions: dict[str, str]) -> list[Device]:
    """Return the devices that torch_npu told of."""
    software_versions = dict(versions)
    for name, field in (("cann", "cann"), ("driver", "driver"), ("simulator", "simulator")):
        if data[field]:
            software_versions[name] = data[field]
    if software.transfers(environ, modules):
        software_versions["transfer_to_npu"] = "active"
    count = int(data["count"])
    if count == 0:
        hidden = f" ({VISIBLE}={environ[VISIBLE]!r})" if VISIBLE in environ else ""
        found = Problem(data["error"] or f"torch_npu loads and sees no NPU{hidden}", NO_DEVICE)
        return [unusable(matrix, 0, UNKNOWN, software_versions, found, simulated=bool(data["simulator"]))]
    blocked = refusal(data, environ, modules)
    return [identified(matrix, index, data["name"], software_versions, blocked, simulated=bool(data["simulator"])) for index in range(count)]


def refusal(data: Mapping[str, Any], environ: Mapping[str, str], modules: Mapping[str, object]) -> Problem | None:
    """Return why devices that torch_npu sees cannot be used; None when they can."""
    if data["error"]:
        remedy = "update torch_npu, or unset INF_NAN_MODE_ENABLE" if "INF_NAN" in data["error"] else "update torch_npu to a release that knows the device"
        return Problem(f"torch_npu refuses the device {data['name']}: {data['error']}", remedy)
    if software.autoload_off(environ, modules):
        cause = f"{AUTOLOAD}={environ[AUTOLOAD]} keeps torch from loading torch_npu, so it does not know the device type {DEVICE_TYPE!r}"
        return Problem(cause, f"unset {AUTOLOAD}, or import torch_npu before")
    return None


def unusable(matrix: Matrix, index: int, chip: str, versions: dict[str, str], found: Problem, *, simulated: bool = False) -> Device:
    """Return a device that cannot be used, identified as far as the driver's tool names it."""
    return identified(matrix, index, f"{VENDOR_NAME}{chip}" if chip != UNKNOWN else "", versions, found, simulated=simulated)


def identified(matrix: Matrix, index: int, name: str, versions: dict[str, str], found: Problem | None, *, simulated: bool) -> Device:
    """Return the device with a reported SoC name: the model of exactly that name, else its architecture, else ``unknown``."""
    model, arch = matrix.identify(name) if name else (None, None)
    arch_key = arch.key if arch is not None else UNKNOWN
    return Device(
        key=model.key if model is not None else arch_key,
        arch=arch_key,
        name=name or f"{VENDOR_NAME} NPU",
        backend=BACKEND,
        type=DEVICE_TYPE,
        index=index,
        kind="simulated" if simulated else "hardware",
        versions=dict(versions),
        memory_bytes=model.memory_bytes[0] if model is not None and len(model.memory_bytes) == 1 else None,
        usable=found is None,
        cause=found.cause if found is not None else "",
        remedy=found.remedy if found is not None else "",
    )
