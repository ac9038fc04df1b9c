"""The catalog of faults: silent mistakes of mixed-precision training, each as an edit of the code that a test must notice."""

from __future__ import annotations

from pathlib import Path

import msgspec

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One silent fault.

    Attributes:
        id: ``case-45`` for the fault of a field case, else a short slug; unique.
        title: what its user would meet, in one clause.
        file: the file to edit, from the root of the repository.
        old: text that stands there exactly once.
        new: text to put in its place.
        test: node ids of tests, each of which must fail then.
    """

    id: str
    title: str
    file: str
    old: str
    new: str
    test: list[str]

    def applied(self, text: str) -> str:
        """Return the text of the file with the fault.

        Raises:
            ValueError: ``old`` does not stand there exactly once.
        """
        if text.count(self.old) != 1:
            raise ValueError(f"{self.id}: `old` stands {text.count(self.old)} times in {self.file}")
        return text.replace(self.old, self.new)


class Catalog(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of faults.

    Attributes:
        fault: the faults.
    """

    fault: list[Fault]


def load_faults(folder: Path = HERE) -> list[Fault]:
    """Return the faults of every TOML file in a folder, by file name, in their order; ``msgspec.ValidationError`` when a field is missing or unknown."""
    return [fault for path in sorted(folder.glob("*.toml")) for fault in msgspec.toml.decode(path.read_bytes(), type=Catalog).fault]
