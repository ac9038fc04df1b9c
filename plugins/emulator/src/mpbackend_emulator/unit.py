"""The matrix unit of one emulated device: which arithmetic a product has, given its operation, its formats and the present settings. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from mpbackend.capability import Row, SwitchDefault
from mpbackend.errors import BackendError, UnknownNameError
from mpbackend.formats import FORMATS
from mpbackend.matrix import Matrix
from mpbackend.numerics.accumulate import arithmetic_for
from mpbackend.numerics.arithmetic import Arithmetic
from mpbackend_emulator.settings import SETTINGS, Settings

FP16_SUMS = "matmul.fp16_accumulation"
"""The switch that makes products of fp16 sum in fp16."""

ASSUMED_INTERVAL = 128
"""Products between promotions where a library promotes and no source states the interval: that of the libraries that do (CUTLASS, DeepGEMM)."""

REACHED = ("library", "framework")
"""Layers of paths whose sizes a training script has to keep: a kernel pads what an instruction needs."""


class Unit:
    """The matrix unit of a device.

    Args:
        matrix: the facts.
        key: device key, for messages.
        arch: architecture key.
        settings: the switches; those of this process when omitted.

    Attributes:
        key: device key.
        arch: architecture key.
        matrix: the facts.
        saturates: whether overflow gives the largest finite value, and NaN becomes 0.
        register: whether a status register tells of an overflow.
    """

    def __init__(self, matrix: Matrix, key: str, arch: str, settings: Settings = SETTINGS) -> None:
        self.matrix = matrix
        self.key = key
        self.arch = arch
        overflow = matrix.overflow(arch)
        self.saturates = overflow is not None and overflow.mode == "saturating"
        self.register = overflow is not None and overflow.status_register is True
        self._settings = settings
        self._switches: Sequence[SwitchDefault] = matrix.switches(arch)
        self._known: dict[tuple[str, ...], Arithmetic] = {}

    def __deepcopy__(self, memo: dict[int, object]) -> Unit:
        """Return itself: a copy of a model runs on the same device."""
        return self

    def computed(self, op: str, name: str) -> str:
        """Return the format that operands stored in a format are multiplied in, under the present settings.

        Args:
            op: ``matmul`` or ``conv``.
            name: format of the tensors.
        """
        if name != "fp32":
            return name
        for switch in self._switches:
            if (switch.op, switch.format) == (op, "fp32"):
                return switch.computes[self._settings.get(switch)]
        return name

    def sums(self, name: str) -> str:
        """Return the format that products of a format are summed in, under the present settings."""
        if name == "fp64":
            return "fp64"
        for switch in self._switches:
            if (switch.name, switch.format) == (FP16_SUMS, name):
                return switch.computes[self._settings.get(switch)]
        return "fp32"

    def plain(self, op: str, name: str) -> Arithmetic:
        """Return the arithmetic of a product of plain operands; its output is the register.

        Args:
            op: ``matmul`` or ``conv``. A convolution is taken to multiply as a matrix product of its windows does.
            name: format of both tensors.

        Raises:
            BackendError: the device has no such product, or no source says.
        """
        computed = self.computed(op, name)
        return self.find(computed, computed)

    def scaled(self, a: str, b: str, scaling: str, *, split: bool) -> Arithmetic:
        """Return the arithmetic of a product of scaled operands, before scales are applied.

        Args:
            a: format of the left operand.
            b: format of the right operand.
            scaling: scale layout of the vocabulary.
            split: whether partial sums are added in fp32, where the unit's own register keeps fewer bits.

        Raises:
            BackendError: the device has no such product, or no source says.
        """
        found = self.find(a, b, scaling)
        if not split or found.model != "aligned" or found.effective_bits >= FORMATS["fp32"].mantissa_bits or found.promotion_interval is not None:
            return found
        stated = [row.accumulator.promotion_interval for row in self.matrix.rows(self.arch, op="matmul", a=a, b=b) if row.accumulator is not None]
        interval = next((length for length in stated if isinstance(length, int)), ASSUMED_INTERVAL)
        assumed = (*found.assumed, f"partial sums join an fp32 sum after every {interval} products: no source states the interval of {found.source}")
        return msgspec.structs.replace(found, promotion_interval=interval, assumed=assumed)

    def find(self, a: str, b: str, scaling: str = "none") -> Arithmetic:
        """Return the arithmetic of a product of two formats, whatever the settings say about their operation.

        Raises:
            BackendError: the device has no such product, or no source says.
        """
        asked = (a, b, scaling, self.sums(a))
        if asked not in self._known:
            try:
                self._known[asked] = arithmetic_for(self.matrix, self.arch, a, b, scaling=scaling, accumulate=asked[3])
            except UnknownNameError as error:
                raise BackendError(f"a product of {a} x {b} on {self.key}", found=self.why_not(a, b), remedy="`mpbackend plan` shows what runs") from error
        return self._known[asked]

    def why_not(self, a: str, b: str) -> str:
        """Return why the device has no product of two formats, with the source that says so."""
        rows = [row for row in self.matrix.rows(self.arch, op="matmul", a=a, b=b) if row.level in ("absent", "storage")]
        if not rows:
            return f"no source says how {self.arch} multiplies them, and nothing is guessed"
        return f"{rows[0].level} ({rows[0].path}): {self.matrix.citation(rows[0], self.arch)}"

    def alignment(self, a: str, b: str, layouts: Sequence[str]) -> Row | None:
        """Return the row whose sizes a product has to keep: that of the library operator in front of the unit; None where none states any.

        Args:
            a: format of the left operand.
            b: format of the right operand.
            layouts: scale layouts that serve it, best first.
        """
        for layout in layouts:
            for row in self.matrix.rows(self.arch, op="matmul", a=a, b=b, scaling=layout):
                if row.align is not None and row.level in ("native", "library") and self.matrix.paths[row.path].layer in REACHED:
                    return row
        return None

    def check_sizes(self, row: Row | None, m: int, n: int, k: int) -> None:
        """Check the sizes of a product against a row.

        Args:
            row: as ``alignment`` returns it.
            m: rows of the left operand.
            n: columns of the right operand.
            k: products of one sum.

        Raises:
            BackendError: one is not a multiple of what the row needs.
        """
        if row is None or row.align is None:
            return
        sizes = {"M": (m, row.align.m), "N": (n, row.align.n), "K": (k, row.align.k)}
        misfits = [f"{name} = {size} is not a multiple of {need}" for name, (size, need) in sizes.items() if isinstance(need, int) and size % need]
        if misfits:
            label = f"{row.a} x {row.b}" + (f", {row.scaling} scales," if row.scaling != "none" else "")
            found = f"{'; '.join(misfits)}, which {row.path} needs ({self.matrix.citation(row, self.arch)})"
            raise BackendError(f"a product of {label} on {self.key}", found=found, remedy="pad the operands, or keep the layer in bf16")
