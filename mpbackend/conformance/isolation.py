"""Checks in a fresh process: what loading a plugin and listing its devices costs, and that neither touches a device."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from mpbackend.conformance.answer import Answer, fault, fine, skip
from mpbackend.conformance.subject import Subject
from mpbackend.errors import printable

LIMIT = 120.0
"""Seconds for a process: importing torch and a vendor's package on a busy machine takes 20."""

LIGHT = frozenset(["mpbackend", "msgspec", "packaging", "pluggy", "tomli"])
"""What an entry-point module may import besides its own package and the standard library: what the core has loaded anyway."""

PROGRAM = """
import importlib.metadata, json, sys
name, distribution = {name!r}, {distribution!r}
import mpbackend.plugins
from mpbackend.inquiry import ask_devices, ask_implementations
before = set(sys.modules)
points = [p for p in importlib.metadata.entry_points(group="mpbackend") if p.dist is not None and p.dist.name == distribution]
for point in points:
    point.load()
loaded = sorted({{module.partition(".")[0] for module in set(sys.modules) - before}})
own = sorted({{point.value.partition(":")[0].partition(".")[0] for point in points}})
plugins = mpbackend.plugins.load_plugins()
backend = plugins.backends.get(name)
told = {{"loaded": loaded, "own": own, "missing": backend is None}}
if backend is not None:
    answer = ask_devices(backend)
    for device in answer.devices:
        ask_implementations(backend, device)
    told |= {{"devices": len(answer.devices), "causes": list(answer.causes), "torch": "torch" in sys.modules}}
    import torch
    ask_devices(backend)
    kinds = [kind for kind in backend.device_types if kind != "cpu"]
    told["contexts"] = [kind for kind in kinds if getattr(getattr(torch, kind, None), "is_initialized", bool)()]
print(json.dumps(told))
"""


def check_discovery_imports_no_torch(subject: Subject) -> Answer:
    """In a fresh process the devices and implementations are listed without importing torch."""
    told = ask(subject)
    if isinstance(told, Answer):
        return told
    if told["causes"]:
        return fault(printable(str(told["causes"][0])))
    return fault("torch was imported") if told["torch"] else fine(devices=int(told["devices"]))


def check_discovery_makes_no_context(subject: Subject) -> Answer:
    """With torch imported, listing the devices initializes none of them, so that a process can still fork."""
    told = ask(subject)
    if isinstance(told, Answer):
        return told
    return fault(f"torch.{told['contexts'][0]} is initialized") if told["contexts"] else fine()


def check_plugin_imports_are_light(subject: Subject) -> Answer:
    """The entry-point module imports nothing but its own package, the core and the standard library."""
    told = ask(subject)
    if isinstance(told, Answer):
        return told
    known = LIGHT | sys.stdlib_module_names | set(told["own"])
    foreign = [module for module in told["loaded"] if module not in known and not module.startswith("__editable__")]
    return fault(f"it imports {', '.join(foreign)}") if foreign else fine()


def ask(subject: Subject) -> dict[str, Any] | Answer:
    """Return what a fresh process tells about the backend, or a skip where no distribution brings it and a fault where it fails."""
    owner = subject.plugins.owners.get(f"backend {subject.backend.name}", "")
    if not owner:
        return skip("no installed distribution brings the backend, so a fresh process does not know it")
    if not subject.told:
        subject.told.append(run(subject.backend.name, owner.partition(" ")[0]))
    status, text = subject.told[0]
    if status:
        return fault(f"a fresh process ends with {status}: {printable(text)}")
    told: dict[str, Any] = json.loads(text)
    return fault("a fresh process does not find the backend") if told["missing"] else told


def run(name: str, distribution: str) -> tuple[int, str]:
    """Return the status of a fresh process that lists the devices of a backend, and its last line."""
    program = PROGRAM.format(name=name, distribution=distribution)
    try:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return 1, f"no answer within {LIMIT:g} s"
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines() or [""]
    return done.returncode, lines[-1]
