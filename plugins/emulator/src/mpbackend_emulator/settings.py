"""The emulated devices' global switches: those of the matrices, with the defaults that the device's software starts with.

On the device a switch is one for the process, so it is here: two emulated devices that have a switch of the same name share its setting, as two GPUs do.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpbackend.backend import Switch
from mpbackend.capability import SwitchDefault
from mpbackend.errors import BackendError


class Settings:
    """The settings that somebody made; a switch without one stands at its default."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def get(self, switch: SwitchDefault) -> str:
        """Return the present setting of a switch: its default where the setting that was made is another device's and unknown to this one."""
        value = self._values.get(switch.name, switch.default)
        return value if value in switch.computes else switch.default

    def set(self, switch: SwitchDefault, value: str) -> None:
        """Make a setting.

        Raises:
            BackendError: the switch has no such setting.
        """
        if value not in switch.computes:
            raise BackendError(f"switch {switch.name} = {value!r}", found=f"not a setting of it on {switch.arch}", allowed=sorted(switch.computes))
        if value == switch.default:
            self._values.pop(switch.name, None)
        else:
            self._values[switch.name] = value


SETTINGS = Settings()
"""The settings of this process."""


def emulated_switches(records: Sequence[SwitchDefault], settings: Settings = SETTINGS) -> list[Switch]:
    """Return the switches of an architecture.

    Args:
        records: ``Matrix.switches`` of the architecture.
        settings: where settings are kept; those of this process when omitted.
    """

    def made(record: SwitchDefault) -> Switch:
        meaning = ", ".join(f"{setting} computes {format_}" for setting, format_ in record.computes.items())
        return Switch(
            name=record.name,
            get=lambda: settings.get(record),
            set=lambda value: settings.set(record, value),
            allowed=tuple(record.computes),
            meaning=f"{record.op} of {record.format}: {meaning}",
        )

    return [made(record) for record in records]
