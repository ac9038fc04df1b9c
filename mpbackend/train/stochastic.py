"""Stochastic rounding: to one of the two neighbors by chance, so that the expectation is the number itself.

A number between two neighbors goes to the upper one with the probability of its distance from the lower one, in units of their spacing: the mean of many
roundings is exact, where rounding to nearest loses every update below half a spacing (arXiv 1502.02551, section 3; arXiv 2010.06192, section 4.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from mpbackend.errors import DocumentError
from mpbackend.formats import FORMATS, Format

FP32 = FORMATS["fp32"]
CHANCE_BITS = 23
"""Bits of chance for subnormal results of a format whose exponent range is shorter than that of fp32."""


SLICE = 1 << 20
"""Elements that are rounded at once: rounding needs some 24 B for each."""


def chance_below(fmt: Format) -> int:
    """Return the bound of the whole numbers that ``stochastic_round`` takes for a format: a power of two."""
    dropped: int = FP32.mantissa_bits - fmt.mantissa_bits
    return 1 << (dropped if fmt.exponent_bits == FP32.exponent_bits else CHANCE_BITS)


def stochastic_round(values: Tensor, fmt: Format, chance: Tensor) -> Tensor:
    """Round fp32 numbers to a 16-bit format stochastically.

    A number that the format holds never moves. Beyond its largest finite value, and for infinities and NaN, rounding is to nearest, ties to even: an overflow
    is no matter of chance.

    Args:
        values: fp32, any shape.
        fmt: ``bf16`` or ``fp16``.
        chance: int32 of the same shape and device, uniform in [0, ``chance_below(fmt)``). All bits that are dropped are decided by as many bits of chance, so
            the expectation is exact; below the smallest normal number of fp16 it is exact to 2^-24 of a spacing.

    Returns:
        A tensor of the format's dtype.
    """
    dropped = FP32.mantissa_bits - fmt.mantissa_bits
    dtype = getattr(torch, str(fmt.torch_dtype))
    below = (1 << dropped) - 1
    # Sign and magnitude: adding to the bits of the magnitude carries into the exponent exactly where the next value lies beyond a power of two.
    rounded = ((values.view(torch.int32) + (chance & below)) & ~below).view(torch.float32)
    magnitude = values.abs()
    if fmt.exponent_bits < FP32.exponent_bits:
        units = magnitude / fmt.smallest_subnormal  # exact: a power of two
        floor = units.floor()
        threshold = (2 * chance + 1).float() * 0.5 ** (CHANCE_BITS + 1)
        small = (floor + (threshold < units - floor)) * fmt.smallest_subnormal
        rounded = torch.where(magnitude < fmt.smallest_normal, small.copysign(values), rounded)
    return torch.where(magnitude <= fmt.max, rounded, values).to(dtype)


def slices(value: Tensor, result: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a tensor and where it goes in slices along the first dimension of at most ``SLICE`` elements, or of one row."""
    if value.numel() <= SLICE or value.dim() == 0:
        yield value, result
        return
    rows = max(1, SLICE * value.shape[0] // value.numel())
    yield from zip(value.split(rows), result.split(rows), strict=True)


class StochasticRounding:
    """Rounds with generators of its own, one for each device, so that dropout or data loading does not change how weights are rounded.

    Args:
        name: canonical name of a 16-bit format.
        seed: seed of every generator.
    """

    def __init__(self, name: str, seed: int) -> None:
        self._format = FORMATS[name]
        self._seed = seed
        self._generators: dict[str, torch.Generator] = {}
        self._saved: dict[str, Tensor] = {}

    def round(self, values: Tensor) -> Tensor:
        """Return fp32 numbers rounded to the format; advances the generator of their device."""
        chance = torch.empty(values.shape, dtype=torch.int32, device=values.device)
        return stochastic_round(values.contiguous(), self._format, chance.random_(0, chance_below(self._format), generator=self._generator(values.device)))

    def round_into(self, values: list[Tensor], results: list[Tensor]) -> None:
        """Round fp32 tensors into tensors of the format, at most ``SLICE`` elements at a time: small tensors together, large ones in slices.

        Args:
            values: fp32.
            results: of the format's dtype, each of the shape of its value.
        """
        batch: list[tuple[Tensor, Tensor]] = []
        for pair in (pair for value, result in zip(values, results, strict=True) for pair in slices(value.detach(), result.detach())):
            full = sum(value.numel() for value, _ in batch) + pair[0].numel() > SLICE
            if batch and (full or batch[0][0].device != pair[0].device):
                self._round_batch(batch)
                batch = []
            batch.append(pair)
        if batch:
            self._round_batch(batch)

    def _round_batch(self, batch: list[tuple[Tensor, Tensor]]) -> None:
        """Round several tensors of one device as one."""
        flat = torch.cat([value.reshape(-1) for value, _ in batch])
        rounded = self.round(flat).split([value.numel() for value, _ in batch])
        torch._foreach_copy_([result for _, result in batch], [part.view(result.shape) for part, (_, result) in zip(rounded, batch, strict=True)])

    def _generator(self, device: torch.device) -> torch.Generator:
        """Return the generator of a device, made at its first use: from the state that was loaded for it, else from the seed."""
        key = str(device)
        if key not in self._generators:
            generator = torch.Generator(device)
            generator.manual_seed(self._seed)
            if key in self._saved:
                generator.set_state(self._saved.pop(key))
            self._generators[key] = generator
        return self._generators[key]

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of every generator by the name of its device: uint8 tensors on the host."""
        return self._saved | {key: generator.get_state() for key, generator in self._generators.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from what ``state_dict`` returned; on a device that it does not name, rounding starts from the seed.

        Raises:
            DocumentError: an entry is no state of a generator.
        """
        for key, value in state.items():
            if not isinstance(value, Tensor) or value.dtype != torch.uint8:
                raise DocumentError(f"state of stochastic rounding on {key}", found="not the bytes of a generator")
        self._generators.clear()
        self._saved = {key: value.cpu().clone() for key, value in state.items()}
