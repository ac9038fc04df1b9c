"""A checkpoint as scripts in plain torch write it: one file with every part's state."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist


class PlainCheckpoint:
    """Saves and restores parts of a run; rank 0 writes.

    Args:
        parts: what has a ``state_dict``, by name.
    """

    def __init__(self, **parts: Any) -> None:
        self._parts = parts

    def save(self, path: Path, extra: dict[str, Any]) -> None:
        """Write every part's state and ``extra``; the file appears when it is complete."""
        if not dist.is_initialized() or dist.get_rank() == 0:
            temporary = path.with_suffix(".tmp")
            torch.save({"extra": extra} | {name: part.state_dict() for name, part in self._parts.items()}, temporary)
            temporary.replace(path)
        if dist.is_initialized():
            dist.barrier()

    def load(self, path: Path) -> dict[str, Any]:
        """Restore every part and return ``extra``."""
        content = torch.load(path, map_location="cpu", weights_only=True)
        for name, part in self._parts.items():
            part.load_state_dict(content[name])
        extra: dict[str, Any] = content["extra"]
        return extra

    def __enter__(self) -> PlainCheckpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return
