"""The conformance kit passes the plain lowering and fails every lowering that is wrong on purpose, by the check that is meant for it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from mpbackend.conformance.lowering import Reference, Step
from mpbackend.conformance.scales import CHECKS, CheckResult, check_scale_stream, run_check
from mpbackend.errors import UnknownNameError
from mpbackend.formats import FORMATS
from mpbackend.lowbit import LowBit, Operand
from mpbackend.train.quantize import group_amax, scale_of, two_level_scale
from mpbackend.train.reference import AmaxWindow


class Planted(Reference):
    """The plain lowering, open to faults in its parts."""

    name = "planted"

    def window(self, low_bit: LowBit) -> AmaxWindow:
        return AmaxWindow(1, low_bit.window, low_bit.algorithm)

    def scale(self, amax: Tensor, operand: Operand, low_bit: LowBit) -> Tensor:
        return two_level_scale(amax, operand.top)[0] if low_bit.scale_format == "ue4m3" else scale_of(amax, operand.top, low_bit)

    def groups(self, tensor: Tensor, operand: Operand) -> Tensor:
        return group_amax(tensor, operand.granularity)

    def writes(self, step: Step) -> bool:
        return step.training

    def scales(self, low_bit: LowBit, operand: Operand, steps: Sequence[Step]) -> Sequence[Tensor]:
        window = self.window(low_bit)
        found = []
        for step in steps:
            own = self.groups(step.tensor, operand)
            amax = window.present.reshape(1, 1).clone() if low_bit.mode == "delayed" else own
            found.append(self.scale(amax, operand, low_bit).reshape(-1))
            if self.writes(step):
                window.push(own.amax().reshape(1))
        return found


class NeverExpires(Planted):
    """Rolls its history along the axis of length one, so that a full window only ever replaces its last entry."""

    class Window(AmaxWindow):
        @torch.no_grad()
        def push(self, amaxes: Tensor) -> None:
            last = min(int(self.steps), self.length - 1)
            self.window[:, last] = amaxes
            self.steps += 1
            latest = self.window.amax(1) if self.algorithm == "max" else amaxes
            self.present.copy_(torch.where((latest > 0) & latest.isfinite(), latest, self.present))

    def window(self, low_bit: LowBit) -> AmaxWindow:
        return self.Window(1, low_bit.window, low_bit.algorithm)


class UsesPresentStep(Planted):
    """Scales a tensor by its own amax under delayed scaling: the update comes before the use."""

    def scales(self, low_bit: LowBit, operand: Operand, steps: Sequence[Step]) -> Sequence[Tensor]:
        window = self.window(low_bit)
        found = []
        for step in steps:
            own = self.groups(step.tensor, operand)
            if self.writes(step):
                window.push(own.amax().reshape(1))
            found.append(self.scale(window.present.reshape(1, 1) if low_bit.mode == "delayed" else own, operand, low_bit).reshape(-1))
        return found


class PresentStepWhenMostRecent(UsesPresentStep):
    """Does so with ``most_recent`` only."""

    def scales(self, low_bit: LowBit, operand: Operand, steps: Sequence[Step]) -> Sequence[Tensor]:
        return super().scales(low_bit, operand, steps) if low_bit.algorithm == "most_recent" else Planted.scales(self, low_bit, operand, steps)


class ShortWindow(Planted):
    """Keeps one step less than it is asked to."""

    def window(self, low_bit: LowBit) -> AmaxWindow:
        return AmaxWindow(1, max(1, low_bit.window - 1), low_bit.algorithm)


class LongWindow(Planted):
    """Keeps one step more."""

    def window(self, low_bit: LowBit) -> AmaxWindow:
        return AmaxWindow(1, low_bit.window + 1, low_bit.algorithm)


class AlwaysMostRecent(Planted):
    """Knows one algorithm."""

    def window(self, low_bit: LowBit) -> AmaxWindow:
        return AmaxWindow(1, low_bit.window, "most_recent")


class NoZeroGuard(Planted):
    """Divides by an amax of zero."""

    def scale(self, amax: Tensor, operand: Operand, low_bit: LowBit) -> Tensor:
        scale = super().scale(amax, operand, low_bit)
        return torch.where(amax == 0, torch.inf, scale) if low_bit.scale_format != "ue4m3" else scale


class ForgetsOnZero(Planted):
    """Starts again at 1 when an amax is zero, instead of keeping the present scale."""

    class Window(AmaxWindow):
        @torch.no_grad()
        def push(self, amaxes: Tensor) -> None:
            super().push(amaxes)
            latest = self.window.amax(1) if self.algorithm == "max" else amaxes
            self.present.mul_(latest != 0)

    def window(self, low_bit: LowBit) -> AmaxWindow:
        return self.Window(1, low_bit.window, low_bit.algorithm)


class NoInfGuard(Planted):
    """Divides by an amax of inf."""

    def scale(self, amax: Tensor, operand: Operand, low_bit: LowBit) -> Tensor:
        return torch.where(amax.isfinite(), super().scale(amax, operand, low_bit), 0.0)


class Inverse(Planted):
    """Returns what gives the value back."""

    def scale(self, amax: Tensor, operand: Operand, low_bit: LowBit) -> Tensor:
        return super().scale(amax, operand, low_bit).reciprocal()


class PowerRoundedUp(Planted):
    """Rounds a power-of-two scale up, so that the largest values saturate."""

    def scale(self, amax: Tensor, operand: Operand, low_bit: LowBit) -> Tensor:
        down = super().scale(amax, operand, low_bit)
        return torch.where(down * amax < operand.top, down * 2, down) if low_bit.power_of_two else down


class ExponentOfAmax(Planted):
    """Takes the exponent of the amax less that of the format's largest value, which ignores their fractions."""

    def scale(self, amax: Tensor, operand: Operand, low_bit: LowBit) -> Tensor:
        if not low_bit.power_of_two:
            return super().scale(amax, operand, low_bit)
        exponent = torch.frexp(torch.tensor(operand.top)).exponent - torch.frexp(amax).exponent
        return torch.where(amax > 0, torch.ldexp(torch.ones_like(amax), exponent), 1.0)


class NeverPowerOfTwo(Planted):
    """Ignores what format a scale has."""

    def scale(self, amax: Tensor, operand: Operand, low_bit: LowBit) -> Tensor:
        return two_level_scale(amax, operand.top)[0] if low_bit.scale_format == "ue4m3" else operand.top * 2.0**-low_bit.margin / amax


class NoMargin(Planted):
    """Ignores the margin."""

    def scale(self, amax: Tensor, operand: Operand, low_bit: LowBit) -> Tensor:
        return super().scale(amax, operand, low_bit) * float(2**low_bit.margin)


class MarginUpwards(Planted):
    """Applies the margin in the wrong direction."""

    def scale(self, amax: Tensor, operand: Operand, low_bit: LowBit) -> Tensor:
        return super().scale(amax, operand, low_bit) * float(4**low_bit.margin)


class Overflows(Planted):
    """Lets a scale overflow."""

    def scale(self, amax: Tensor, operand: Operand, low_bit: LowBit) -> Tensor:
        scale = super().scale(amax, operand, low_bit)
        return torch.where((scale == FORMATS["fp32"].max) & (amax > 0), torch.inf, scale) if low_bit.scale_format != "ue4m3" else scale


class WritesInEvaluation(Planted):
    """Writes the window in evaluation mode."""

    def writes(self, step: Step) -> bool:
        return True


class Stale(Planted):
    """Makes current scales from the tensor before."""

    def scales(self, low_bit: LowBit, operand: Operand, steps: Sequence[Step]) -> Sequence[Tensor]:
        found = list(super().scales(low_bit, operand, steps))
        return [found[0], *found[:-1]] if low_bit.mode == "current" else found


class OneScale(Planted):
    """Scales every group by the amax of the tensor."""

    def groups(self, tensor: Tensor, operand: Operand) -> Tensor:
        groups = super().groups(tensor, operand)
        return groups.amax().expand_as(groups)


class OtherSide(Planted):
    """Lets groups run along the other dimension."""

    def groups(self, tensor: Tensor, operand: Operand) -> Tensor:
        return group_amax(tensor.t(), operand.granularity)


class FormatMaximum(Planted):
    """Scales to the largest value of a format, whatever the recipe says."""

    def scale(self, amax: Tensor, operand: Operand, low_bit: LowBit) -> Tensor:
        return super().scale(amax, Operand(format=operand.format, granularity=operand.granularity), low_bit)


class GivesUp(Planted):
    """Loses a step."""

    def scales(self, low_bit: LowBit, operand: Operand, steps: Sequence[Step]) -> Sequence[Tensor]:
        return super().scales(low_bit, operand, steps)[:-1]


class Raises(Planted):
    """Raises."""

    def scale(self, amax: Tensor, operand: Operand, low_bit: LowBit) -> Tensor:
        raise KeyError("no kernel")


class Alias(Planted):
    """Computes in bf16 what it calls fp8."""

    def values(self, low_bit: LowBit, operand: Operand, tensor: Tensor) -> Tensor:
        return tensor.bfloat16().float()


class Truncates(Planted):
    """Rounds toward zero."""

    def values(self, low_bit: LowBit, operand: Operand, tensor: Tensor) -> Tensor:
        return super().values(low_bit, operand, tensor * (1 - 2.0**-10))


class EvenHif8(Planted):
    """Rounds ties of hif8 to even."""

    def values(self, low_bit: LowBit, operand: Operand, tensor: Tensor) -> Tensor:
        return super().values(low_bit, operand, tensor * (1 - 2.0**-22) if operand.format == "hif8" else tensor)


class DoesNotSaturate(Planted):
    """Leaves overflow to a cast that gives NaN or inf."""

    def values(self, low_bit: LowBit, operand: Operand, tensor: Tensor) -> Tensor:
        found = super().values(low_bit, operand, tensor)
        return torch.where(tensor.abs() > FORMATS[operand.format].max, torch.nan, found)


class HidesInf(Planted):
    """Saturates inf like any other value."""

    def values(self, low_bit: LowBit, operand: Operand, tensor: Tensor) -> Tensor:
        return super().values(low_bit, operand, tensor.nan_to_num())


FAULTS: list[tuple[Planted, set[str]]] = [
    (NeverExpires(), {"delayed_expiry"}),
    (UsesPresentStep(), {"delayed_first", "most_recent", "delayed_max"}),
    (PresentStepWhenMostRecent(), {"most_recent"}),
    (ShortWindow(), {"delayed_expiry"}),
    (LongWindow(), {"delayed_expiry"}),
    (AlwaysMostRecent(), {"delayed_max"}),
    (NoZeroGuard(), {"zero_amax"}),
    (ForgetsOnZero(), {"zero_amax"}),
    (NoInfGuard(), {"inf_amax"}),
    (Inverse(), {"direction"}),
    (PowerRoundedUp(), {"power_of_two", "current_mx"}),
    (ExponentOfAmax(), {"power_of_two", "current_mx"}),
    (NeverPowerOfTwo(), {"power_of_two"}),
    (NoMargin(), {"margin"}),
    (MarginUpwards(), {"margin"}),
    (Overflows(), {"tiny_amax"}),
    (WritesInEvaluation(), {"evaluation"}),
    (Stale(), {"current_tensor"}),
    (OneScale(), {"current_row", "current_block", "current_mx", "current_two_level"}),
    (OtherSide(), {"current_row", "current_mx", "current_two_level"}),
    (FormatMaximum(), {"current_hif8"}),
    (GivesUp(), {"current_tensor"}),
    (Raises(), set(CHECKS) - {"values", "saturation", "nonfinite"}),
    (Alias(), {"values", "saturation"}),
    (Truncates(), {"values"}),
    (EvenHif8(), {"values"}),
    (DoesNotSaturate(), {"saturation"}),
    (HidesInf(), {"nonfinite"}),
]


def failed(results: Sequence[CheckResult]) -> dict[str, str]:
    return {result.check: result.detail for result in results if result.outcome == "failed"}


@pytest.mark.parametrize("lowering", [Reference(), Planted()], ids=lambda lowering: lowering.name)
def test_a_right_lowering_passes_every_check(lowering: Reference) -> None:
    results = check_scale_stream(lowering)
    assert [(result.check, result.outcome) for result in results] == [(name, "passed") for name in CHECKS]
    assert {result.lowering for result in results} == {lowering.name}


@pytest.mark.parametrize(("lowering", "by"), FAULTS, ids=lambda value: type(value).__name__ if isinstance(value, Planted) else "")
def test_a_planted_fault_is_caught_by_its_check(lowering: Planted, by: set[str]) -> None:
    assert by <= set(failed(check_scale_stream(lowering)))


def test_every_check_catches_something() -> None:
    assert set().union(*(by for _, by in FAULTS)) == set(CHECKS)


def test_a_fault_in_one_property_fails_one_check() -> None:
    single = {name for lowering, _ in FAULTS if len(found := failed(check_scale_stream(lowering))) == 1 for name in found}
    assert single >= {"current_hif8", "evaluation", "margin", "most_recent", "nonfinite", "saturation", "tiny_amax", "values"}


def test_a_failure_says_where() -> None:
    result = run_check("delayed_expiry", NeverExpires())
    assert result.outcome == "failed"
    assert result.detail.startswith("fp8-delayed:scaling.history=4,scaling.algorithm=max, input: step 7: scale 0.448, not 448 (group 0, amax 1)")
    assert run_check("direction", Inverse()).detail.startswith("fp8, input: step 1: amax times scale is 0.00223")
    assert run_check("current_tensor", Raises()).detail == "fp8, input: KeyError: 'no kernel'"
    assert run_check("current_tensor", GivesUp()).detail == "fp8, input: 9 scales for 10 steps"


class NoDelayed(Planted):
    """Runs current scaling only."""

    def refuses(self, low_bit: LowBit) -> str:
        return "no delayed scaling" if low_bit.mode == "delayed" else ""


def test_a_recipe_that_a_lowering_refuses_is_skipped_with_its_reason() -> None:
    results = {result.check: result for result in check_scale_stream(NoDelayed())}
    assert results["delayed_max"].outcome == "skipped"
    assert results["delayed_max"].detail.endswith("no delayed scaling")
    assert results["zero_amax"].outcome == "passed"
    assert "no delayed scaling" in results["zero_amax"].detail


def test_expected_failures_are_strict() -> None:
    results = {result.check: result for result in check_scale_stream(NoMargin(), {"margin": "it has none", "direction": "it is inverse"})}
    assert results["margin"].outcome == "expected"
    assert results["margin"].detail.startswith("it has none (fp8:scaling.margin=3")
    assert (results["direction"].outcome, results["direction"].detail) == ("failed", "it passes, but was expected to fail: it is inverse")
    with pytest.raises(UnknownNameError, match="unknown conformance check 'margins'"):
        check_scale_stream(Planted(), {"margins": "misspelt"})
