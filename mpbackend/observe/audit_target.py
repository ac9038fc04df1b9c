"""Auditing for a device that is not there, in a process of its own: torch lets a process define one device type, once. Imports no torch."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from mpbackend.errors import BackendError
from mpbackend.granting import OnUnsupported
from mpbackend.observe.audit_document import AuditDocument

PROGRAM = "import gc; gc.disable(); from mpbackend.observe.fake_run import main; main()"
"""What the process runs. It lives for seconds and mostly imports; without looking for garbage that takes a fifth less."""


ALONE = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
"""Keeps torch from loading the packages of other devices, one of which may have taken the device type that a process can define."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What the process is asked."""

    workload: str
    device: str
    recipe: str
    on_unsupported: OnUnsupported = "error"


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What it answers: an audit, or an error in words."""

    audit: AuditDocument | None = None
    error: str = ""


def audit_target(workload: str, device: str, recipe: str = "bf16", *, on_unsupported: OnUnsupported = "error") -> AuditDocument:
    """Audit a workload for a device that is not there, with its operator policy, in a process of its own.

    Args:
        workload: ``package.module:function``, importable from the working directory; see ``mpbackend.observe.audit_workload``.
        device: key of a device that a matrix declares.
        recipe: recipe, as ``mpbackend.plan`` takes it.
        on_unsupported: see ``mpbackend.plan``.

    Raises:
        BackendError: the process failed; says what it said.
    """
    request = Request(workload=workload, device=device, recipe=recipe, on_unsupported=on_unsupported)
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder, "request.json"), Path(folder, "answer.json")
        asked.write_bytes(msgspec.json.encode(request))
        command = [sys.executable, "-c", PROGRAM, str(asked), str(answered)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **ALONE})
        if not answered.exists():
            last = (ended.stderr.strip().splitlines() or ["it wrote nothing"])[-1]
            raise BackendError(
                f"audit of {workload} for {device}", found=f"the process ended with {ended.returncode}: {last}", remedy="run the workload on the CPU"
            )
        answer = msgspec.json.decode(answered.read_bytes(), type=Answer)
    if answer.audit is None:
        raise BackendError(f"audit of {workload} for {device}", found=answer.error)
    return answer.audit
