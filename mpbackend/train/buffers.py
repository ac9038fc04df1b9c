"""Putting buffers back when a step is skipped.

A forward pass that overflowed has already written its statistics into BatchNorm's running mean; skipping the optimizer does not undo that. Under dynamic
scaling the session copies buffers at the start of a step and restores them on a skip.
"""

from __future__ import annotations

import torch
from torch.nn.modules.batchnorm import _NormBase

BUDGET_BYTES = 64 * 2**20

Named = tuple[str, torch.Tensor]


class BufferGuard:
    """Copies of the buffers that a forward pass may change.

    In the first window every buffer is copied. Afterwards: those of normalization modules, those whose values the first window changed, and those whose
    version counter ever moves. The counter alone is not enough: ``native_batch_norm`` writes its running statistics without moving it.
    A buffer whose first change ever comes in a skipped step, after windows
    in which it stood still, is not restored in that step.

    Args:
        model: the model.
        budget: bytes of copies at most.

    Attributes:
        left_out: names of buffers that the budget leaves out.
    """

    def __init__(self, model: torch.nn.Module, budget: int = BUDGET_BYTES) -> None:
        self._all = [(name, buffer) for name, buffer in model.named_buffers() if buffer.numel()]
        self._versions = {name: buffer._version for name, buffer in self._all}
        self._always = {
            f"{path}.{name}" if path else name
            for path, module in model.named_modules()
            if isinstance(module, _NormBase)
            for name, _ in module.named_buffers(recurse=False)
        }
        self._budget = budget
        self._copies: list[torch.Tensor] = []
        self._learning = True
        self._watched: list[Named] = []
        self.left_out: list[str] = []
        self._watch([name for name, _ in self._all])

    def _watch(self, names: list[str]) -> None:
        """Watch the named buffers, those of normalization modules first, as far as the budget goes."""
        wanted = [item for item in self._all if item[0] in self._always] + [item for item in self._all if item[0] in names and item[0] not in self._always]
        self._watched, self.left_out, used = [], [], 0
        for name, buffer in wanted:
            size = buffer.numel() * buffer.element_size()
            if used + size <= self._budget:
                used += size
                self._watched.append((name, buffer))
            else:
                self.left_out.append(name)

    @torch.no_grad()
    def open_window(self) -> None:
        """Copy the watched buffers; called before the first forward pass of a step."""
        if self._watched:
            self._copies = [buffer.detach().clone() for _, buffer in self._watched]

    def close_window(self) -> None:
        """Learn which buffers the step changed; called after a step that was taken. The first call reads the device once."""
        moved = [name for name, buffer in self._all if buffer._version != self._versions[name]]
        if self._learning:
            self._learning = False
            differs = [(copy != buffer).any() for (_, buffer), copy in zip(self._watched, self._copies, strict=True)]
            changed = [name for (name, _), differ in zip(self._watched, torch.stack(differs).tolist(), strict=True) if differ] if differs else []
            self._watch([*changed, *moved])
        elif moved:
            self._watch([*(name for name, _ in self._watched), *moved])
        for name, buffer in self._all:
            self._versions[name] = buffer._version

    @torch.no_grad()
    def restore(self) -> list[str]:
        """Put the copies back; returns the names of the restored buffers."""
        for (name, buffer), copy in zip(self._watched, self._copies, strict=True):
            buffer.copy_(copy)
            self._versions[name] = buffer._version
        return [name for name, _ in self._watched]
