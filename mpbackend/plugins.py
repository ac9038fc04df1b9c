"""Loading plugins: every entry point of the group ``mpbackend``, in-house or a stranger's, by the same rules.

What goes wrong with one plugin is kept as an ``Unavailable`` with its cause; the rest work.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pluggy

from mpbackend import hookspecs
from mpbackend.backend import MEMBERS, Backend
from mpbackend.device import Device
from mpbackend.documents import shipped_files
from mpbackend.errors import BackendError, DocumentError, MpbackendError, UnknownNameError
from mpbackend.errors import describe as describe
from mpbackend.inquiry import REMEDY, Answer, ask_devices
from mpbackend.matrix import Matrix, load_matrix
from mpbackend.recipe import PRESETS, Recipe, validate

ENTRY_POINT_GROUP = hookspecs.PROJECT
CORE = "mpbackend"

AUTO = "auto"
"""The spec that picks a device, which no backend may be called."""

NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*")
"""What backends, device types and presets may be called: neither a spec nor the text of a recipe could hold more."""


@dataclass(frozen=True)
class Unavailable:
    """Something a plugin offers that cannot be used.

    Attributes:
        name: the plugin, backend, matrix file, preset or device.
        distribution: where it comes from, name and version.
        cause: what went wrong.
        remedy: what to do about it.
    """

    name: str
    distribution: str
    cause: str
    remedy: str = ""


@dataclass
class Plugins:
    """What the installed plugins offer.

    Attributes:
        distributions: distribution of each loaded plugin to its version.
        backends: usable backends by name.
        matrices: matrix files, the shipped ones first.
        presets: presets by name.
        unavailable: what could not be used, with causes.
        owners: distribution of what has a name, by kind and name.
        hung: what the backends answered that did not come to an end.
    """

    distributions: dict[str, str] = field(default_factory=dict)
    backends: dict[str, Backend] = field(default_factory=dict)
    matrices: list[Path] = field(default_factory=shipped_files)
    presets: dict[str, Recipe] = field(default_factory=lambda: dict(PRESETS))
    unavailable: list[Unavailable] = field(default_factory=list)
    owners: dict[str, str] = field(default_factory=dict)
    hung: dict[str, Answer] = field(default_factory=dict)

    def refuse(self, entry: Unavailable) -> None:
        """Record something as unavailable, once."""
        if entry not in self.unavailable:
            self.unavailable.append(entry)

    def matrix(self) -> Matrix:
        """Return the union of all matrix files that fit together; one that does not is recorded as unavailable."""
        accepted = shipped_files()
        matrix = load_matrix(accepted)
        for path in (path for path in self.matrices if path not in accepted):
            try:
                matrix = load_matrix([*accepted, path])
                accepted.append(path)
            except DocumentError as error:
                self.refuse(Unavailable(path.name, self.owners.get(f"matrix {path}", ""), str(error), "correct the file or remove the plugin"))
        return matrix

    def backend(self, name: str) -> Backend:
        """Return the backend with this name or device type.

        Raises:
            BackendError: a plugin offers it but cannot be used; the cause is given.
            UnknownNameError: no installed plugin offers it.
        """
        for backend in self.backends.values():
            if name == backend.name or name in backend.device_types:
                return backend
        for entry in self.unavailable:
            if entry.name == name:
                raise BackendError(f"backend {name!r}", found=f"unavailable: {entry.cause} ({entry.distribution})", remedy=entry.remedy)
        names = sorted({n for backend in self.backends.values() for n in (backend.name, *backend.device_types)})
        raise UnknownNameError("backend", name, names, remedy="install the plugin that offers it; `mpbackend doctor` lists what is installed")

    def devices(self) -> list[Device]:
        """Return the devices of every backend, in the order of the backends; makes no device context."""
        return [device for backend in self.backends.values() for device in self.devices_of(backend)]

    def devices_of(self, backend: Backend) -> tuple[Device, ...]:
        """Return the devices of one backend; what goes wrong is recorded as unavailable. A backend that hung once is not asked again."""
        answer = self.hung.get(backend.name) or ask_devices(backend)
        if answer.hung:
            self.hung[backend.name] = answer
        for cause in answer.causes:
            self.refuse(Unavailable(backend.name, self.owners.get(f"backend {backend.name}", ""), cause, REMEDY))
        return answer.devices

    def causes(self, name: str) -> list[str]:
        """Return why a backend, or what else has this name, is unavailable."""
        return [entry.cause for entry in self.unavailable if entry.name == name]


def load_plugins(entry_points: Iterable[importlib.metadata.EntryPoint] | None = None) -> Plugins:
    """Load every plugin.

    Args:
        entry_points: entry points to load instead of the installed ones.
    """
    found = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP) if entry_points is None else entry_points
    plugins = Plugins()
    for entry_point in sorted(found, key=lambda entry: entry.name):
        distribution = entry_point.dist.name if entry_point.dist is not None else entry_point.value
        version = entry_point.dist.version if entry_point.dist is not None else ""
        load_one(plugins, entry_point.name, f"{distribution} {version}".strip(), entry_point.load, (distribution, version))
    return plugins


def load_one(plugins: Plugins, name: str, owner: str, load: Callable[[], Any], distribution: tuple[str, str]) -> None:
    """Load one plugin into ``plugins``; every failure becomes an ``Unavailable``."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    try:
        module = load()
        manager.register(module, name=name)
        manager.check_pending()
        check_marks(module)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - importing a stranger may raise anything
        plugins.refuse(Unavailable(name, owner, describe(error), REMEDY))
        return
    plugins.distributions[distribution[0]] = distribution[1]
    for hook, add in (
        (manager.hook.mpbackend_backends, add_backend),
        (manager.hook.mpbackend_matrices, add_matrix),
        (manager.hook.mpbackend_recipes, add_recipe),
    ):
        try:
            items = [item for result in hook() for item in items_of(result)]
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a hook of a stranger may raise anything
            plugins.refuse(Unavailable(name, owner, f"{hook.name} raised {describe(error)}", REMEDY))
            continue
        for item in items:
            try:
                add(plugins, owner, item)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - so may what it returns; the other items are no worse for it
                label = item[0] if isinstance(item, tuple) and isinstance(item[0], str) else name
                plugins.refuse(Unavailable(label, owner, f"{hook.name} raised {describe(error)}", REMEDY))


def items_of(result: Any) -> list[Any]:
    """Return what a hook returned as a list, the items of a mapping in pairs; ``TypeError`` when it is text or nothing that can be listed."""
    if isinstance(result, str | bytes):
        raise TypeError(f"it returned a {type(result).__name__}")
    return list(result.items() if isinstance(result, Mapping) else result)


def check_marks(module: Any) -> None:
    """Raise ``BackendError`` when a function has a hook's name and lacks the mark, so that pluggy would pass it over."""
    hooks = [name for name in vars(hookspecs) if name.startswith(f"{hookspecs.PROJECT}_")]
    unmarked = [name for name in hooks if hasattr(module, name) and not hasattr(getattr(module, name), f"{hookspecs.PROJECT}_impl")]
    if unmarked:
        raise BackendError(f"function {unmarked[0]}", found="it lacks the mark of a hook", remedy="write @mpbackend.hookimpl above it")


def claim(plugins: Plugins, owner: str, kind: str, *names: str) -> bool:
    """Take names for ``owner``; False, with both owners recorded and nothing taken, when one of them is taken."""
    for name in names:
        taken_by = plugins.owners.get(f"{kind} {name}")
        if taken_by is not None:
            remedy = f"uninstall {owner} or {taken_by}" if owner != taken_by else f"give them different names in {owner}"
            plugins.refuse(Unavailable(names[0], owner, f"the {kind} name {name!r} is already taken by {taken_by}", remedy))
            return False
    plugins.owners |= {f"{kind} {name}": owner for name in names}
    return True


def name_fault(kind: str, name: Any) -> str:
    """Return why something cannot be a name; empty when it can."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        return f"the {kind} {name!r} is not a name: a-z or 0-9, then also _ . -"
    return f"the {kind} 'auto' is the spec that picks a device" if name == AUTO and kind != "preset name" else ""


def add_backend(plugins: Plugins, owner: str, backend: Backend) -> None:
    """Add a backend that has every member of the contract."""
    name: Any = getattr(backend, "name", type(backend).__name__)
    missing = [member for member in MEMBERS if not hasattr(backend, member)]
    types: Any = getattr(backend, "device_types", ())
    listed = isinstance(types, Iterable) and not isinstance(types, str | bytes)
    faults = [name_fault("backend name", name)]
    faults += [name_fault("device type", item) for item in types] if listed else [f"device_types is a {type(types).__name__} and no sequence of names"]
    cause = f"the backend lacks {', '.join(missing)}" if missing else next(filter(None, faults), "")
    if cause:
        plugins.refuse(Unavailable(str(name), owner, cause, "see mpbackend.backend.Backend"))
    elif claim(plugins, owner, "backend", *dict.fromkeys((name, *types))):
        plugins.backends[name] = backend


def add_matrix(plugins: Plugins, owner: str, path: Path) -> None:
    """Add a matrix file; its content is checked when matrices are loaded."""
    if not isinstance(path, Path):
        raise TypeError(f"it returned a {type(path).__name__}, which is no pathlib.Path")
    plugins.owners[f"matrix {path}"] = owner
    plugins.matrices.append(path)


def add_recipe(plugins: Plugins, owner: str, item: tuple[str, Recipe]) -> None:
    """Add a preset under its own name."""
    name, recipe = item
    fault = name_fault("preset name", name)
    if fault:
        raise ValueError(fault)
    if name in PRESETS:
        plugins.owners.setdefault(f"preset {name}", CORE)
    if not isinstance(recipe, Recipe):
        raise TypeError(f"preset {name!r} is a {type(recipe).__name__}, which is no Recipe")
    if recipe.preset != name:
        raise MpbackendError(f"preset {name!r}", found=f"its recipe says preset={recipe.preset!r}", remedy="make the two equal")
    validate(recipe)
    if claim(plugins, owner, "preset", name):
        plugins.presets[name] = recipe
