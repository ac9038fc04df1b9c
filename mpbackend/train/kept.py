"""What working weights keep beside the parameters: masters and Kahan terms by name, checked before a session takes them over."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from mpbackend.errors import DocumentError

Kept = Mapping[str, Mapping[str, Tensor]]
"""``masters`` and ``compensation``, by the name of the parameter."""

PARTS = ("masters", "compensation")


def check_kept(mine: Kept, theirs: Kept) -> None:
    """Check that a state has the names and shapes that a session keeps.

    Args:
        mine: what the session keeps.
        theirs: what a checkpoint holds.

    Raises:
        DocumentError: a name is on one side only, or a shape differs.
    """
    for part in PARTS:
        held = theirs.get(part)
        if not isinstance(held, Mapping) or set(held) != set(mine[part]):
            odd = sorted(set(mine[part]) ^ set(held if isinstance(held, Mapping) else ()))
            found = f"{', '.join(odd[:3]) or part} is on one side only"
            raise DocumentError(f"{part} of the working weights", found=found, remedy="load into the same model")
        for name, value in held.items():
            if not isinstance(value, Tensor) or value.shape != mine[part][name].shape:
                raise DocumentError(f"{part} of the working weights", found=f"{name} has another shape", remedy="load into the same model")
