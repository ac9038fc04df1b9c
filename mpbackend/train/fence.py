"""The fence: global precision switches, set from the plan, read back, restored, and reported.

A switch belongs to the process, not to a session. So a live fence holds the value of each switch it sets; a second fence that wants the same value shares
the hold, one that wants another is refused, and the last to leave restores what was there before the first.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Self

from mpbackend.backend import Switch
from mpbackend.errors import BackendError, UnknownNameError

Mode = Literal["set", "report"]


@dataclass
class Hold:
    """A switch that live fences hold at a value.

    Attributes:
        switch: the switch.
        value: the value it is held at.
        before: the value to restore.
        owners: who holds it, in the order of entering.
    """

    switch: Switch
    value: str
    before: str
    owners: list[str]


@dataclass
class FenceRegistry:
    """The switches held by live fences, by backend and switch name.

    The settings live in the vendor's libraries, one for the process; this bookkeeping of them is process-wide for the same reason, in ``FENCES``.
    """

    holds: dict[tuple[str, str], Hold] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def acquire(self, backend: str, switch: Switch, value: str, owner: str) -> None:
        """Hold ``switch`` at ``value``: set it and read it back, or join the fences that hold it there already.

        Raises:
            BackendError: a live fence holds it at another value, or the read-back differs from ``value``; nothing is held or changed then.
        """
        with self.lock:
            hold = self.holds.get((backend, switch.name))
            if hold is not None and hold.value != value:
                raise BackendError(
                    f"switch {switch.name} = {value!r} for {owner}",
                    found=f"it is held at {hold.value!r} by {hold.owners[0]}, which is live, and there is one switch for the process",
                    remedy="close the other session first, or run it in its own process",
                )
            if hold is None:
                self.holds[backend, switch.name] = Hold(switch=switch, value=value, before=set_checked(switch, value), owners=[owner])
                return
            found = switch.get()
            if found != value:
                raise BackendError(
                    f"switch {switch.name} = {value!r} for {owner}",
                    found=f"{hold.owners[0]} set it to that, but now it reads {found!r}: something else changed it",
                    remedy="find what sets it while a session is live",
                )
            hold.owners.append(owner)

    def release(self, backend: str, name: str, owner: str) -> None:
        """Let go of a switch; the last to do so restores it.

        Raises:
            BackendError: the restored value does not read back.
        """
        with self.lock:
            hold = self.holds[backend, name]
            hold.owners.remove(owner)
            if not hold.owners:
                del self.holds[backend, name]
                set_checked(hold.switch, hold.before)


FENCES = FenceRegistry()
"""The registry of this process."""


def set_checked(switch: Switch, value: str) -> str:
    """Set a switch, read it back, and return its setting from before.

    Raises:
        BackendError: setting it raised, or the read-back differs; the setting from before is put back then.
    """
    before = switch.get()
    try:
        switch.set(value)
        found = switch.get()
    except Exception as error:
        switch.set(before)
        raise BackendError(f"switch {switch.name} = {value!r}", found=f"setting it raised {type(error).__name__}: {error}") from error
    if found != value:
        switch.set(before)
        raise BackendError(
            f"switch {switch.name} = {value!r}",
            found=f"it reads back {found!r}",
            remedy="the installed software ignores the setting; `mpbackend doctor` shows the versions",
        )
    return before


class Fence:
    """Sets the switches of one session while it is entered, and reports all of them.

    Args:
        switches: every switch of the backend.
        wanted: name to setting, from ``Plan.switches``.
        mode: ``set``, or ``report`` to observe without setting anything.
        backend: name of the backend, which keeps equal names of two backends apart.
        owner: what a message calls this fence.
        registry: the bookkeeping; that of this process when omitted.

    Raises:
        UnknownNameError: the backend has no switch of a wanted name.
        BackendError: a wanted setting is not one that its switch takes.
    """

    def __init__(
        self,
        switches: Sequence[Switch],
        wanted: Mapping[str, str],
        mode: Mode = "set",
        *,
        backend: str = "",
        owner: str = "a session",
        registry: FenceRegistry = FENCES,
    ) -> None:
        self.switches = {switch.name: switch for switch in switches}
        for name, value in wanted.items():
            if name not in self.switches:
                raise UnknownNameError("switch", name, self.switches)
            if value not in self.switches[name].allowed:
                raise BackendError(f"switch {name} = {value!r}", found="not a setting of that switch", allowed=self.switches[name].allowed)
        self.mode = mode
        self.backend = backend
        self.owner = owner
        self._wanted = dict(wanted) if mode == "set" else {}
        self._registry = registry
        self._live = False
        self._held: list[str] = []
        self._rows: dict[str, dict[str, str]] = {}

    def enter(self) -> Self:
        """Set the wanted switches in the order of the backend's list. If one fails, those before it are restored, in reverse order.

        Raises:
            BackendError: the fence is live already, another live fence holds a switch at another value, or a read-back differs.
        """
        if self._live:
            raise BackendError(f"the fence of {self.owner}", found="it is live already", remedy="leave it first")
        self._rows = {name: {"before": switch.get(), "set": self._wanted.get(name, ""), "read_back": "", "after": ""} for name, switch in self.switches.items()}
        try:
            for name, switch in self.switches.items():
                if name in self._wanted:
                    self._registry.acquire(self.backend, switch, self._wanted[name], self.owner)
                    self._held.append(name)
            for name, row in self._rows.items():
                row["read_back"] = self.switches[name].get()
                if row["read_back"] != self._wanted.get(name, row["read_back"]):
                    found = f"it reads {row['read_back']!r} once all switches are set"
                    raise BackendError(f"switch {name} = {self._wanted[name]!r}", found=found, remedy="another wanted setting changes it too; drop one of them")
        except BaseException as error:
            self._release_all(error)
            raise
        self._live = True
        return self

    def exit(self) -> None:
        """Read every switch once more, then restore in reverse order what no other fence holds. Does nothing when the fence is not live.

        Raises:
            BackendError: a switch could not be restored; the others are.
        """
        if not self._live:
            return
        self._observe()
        self._live = False
        self._release_all(None)

    def report(self) -> dict[str, dict[str, str]]:
        """Return what happened to each switch, in the order of the backend's list; empty before the fence was first entered.

        Returns:
            Name to ``before`` (setting when the fence was entered), ``set`` (by the fence; empty when it only observes the switch), ``read_back`` (after
            every switch was set) and ``after`` (when the fence was left, before restoring; the present setting while it is live).
        """
        if self._live:
            self._observe()
        return {name: dict(row) for name, row in self._rows.items()}

    def changed(self) -> tuple[str, ...]:
        """Return the switches that something else changed while the fence was live: ``after`` differs from ``read_back``."""
        return tuple(name for name, row in self.report().items() if row["after"] != row["read_back"])

    def _observe(self) -> None:
        for name, row in self._rows.items():
            row["after"] = self.switches[name].get()

    def _release_all(self, error: BaseException | None) -> None:
        """Let go of every held switch, last first. What fails is raised at the end, or noted on the error that is already on its way."""
        failures: list[BackendError] = []
        while self._held:
            try:
                self._registry.release(self.backend, self._held.pop(), self.owner)
            except BackendError as failure:
                failures.append(failure)
        if not failures:
            return
        text = "; ".join(str(failure) for failure in failures)
        if error is None:
            raise BackendError(f"restoring the switches of {self.owner}", found=text)
        error.add_note(f"restoring the switches of {self.owner}: {text}")

    def __enter__(self) -> Self:
        return self.enter()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.exit()
        except BackendError as failure:
            if error is None:
                raise
            error.add_note(str(failure))
