from __future__ import annotations

import functools
import math
import random
import statistics

import pytest

from mpbackend.comparison.distributions import t_quantile
from mpbackend.comparison.statistics import chi_density, needed_runs, paired, power, repeats, two_sample
from mpbackend.errors import BackendError

SEED = 20261130


def test_the_interval_is_the_textbook_one() -> None:
    differences = [0.1, -0.2, 0.05, 0.15]
    found = paired(differences, 0.3)
    reach = 2.3533634348018264 * statistics.stdev(differences) / 2  # t(0.95, 3)
    assert found.low == pytest.approx(0.025 - reach)
    assert found.high == pytest.approx(0.025 + reach)
    assert (found.df, found.runs, found.place) == (3, (4, 4), "inside")
    assert paired(differences, 0.1).place == "across"
    assert paired([value + 5 for value in differences], 0.3).place == "outside"
    assert paired([value - 5 for value in differences], 0.3).place == "outside"


def test_a_significant_difference_within_the_margin_is_equivalent() -> None:
    assert paired([0.010, 0.011, 0.0105, 0.0102], 0.1).place == "inside"


def test_welch_has_the_degrees_of_freedom_of_satterthwaite() -> None:
    baseline, candidate = [10.0, 11.0, 12.0], [10.5, 13.5, 9.0, 12.0]
    found = two_sample(baseline, candidate, 5.0)
    vb, vc = statistics.variance(baseline) / 3, statistics.variance(candidate) / 4
    assert found.df == pytest.approx((vb + vc) ** 2 / (vb**2 / 2 + vc**2 / 3))
    reach = t_quantile(0.95, found.df) * math.sqrt(vb + vc)
    assert found.high - found.low == pytest.approx(2 * reach)
    assert found.difference == pytest.approx(0.25)


def test_repeats_pool_what_was_repeated() -> None:
    found = repeats([1.0, 1.2], [1.1], 10.0)
    assert found.df == 1
    assert found.deviation == pytest.approx(statistics.stdev([1.0, 1.2]))
    assert found.high - found.low == pytest.approx(2 * 6.313751514675 * found.deviation * math.sqrt(1.5))


def test_two_values_that_scatter_show_nothing() -> None:
    assert paired([0.001, -0.002], 0.002).place == "across"


def test_equal_differences_have_an_interval_without_width() -> None:
    found = paired([0.0, 0.0], 0.1)
    assert (found.low, found.high, found.place, found.power, found.needed) == (0.0, 0.0, "inside", 1.0, 2)
    assert paired([0.0, 0.0], 0.0).place == "across"


@pytest.mark.parametrize(("n", "margin"), [(2, 20.0), (5, 1.5), (10, 0.8), (40, 0.5)])
def test_power_is_the_share_of_trials_that_show_an_equality(n: int, margin: float) -> None:
    generator, trials = random.Random(SEED), 4000
    shown = sum(paired_place([generator.gauss(0, 1) for _ in range(n)], margin) for _ in range(trials))
    expected = power(margin, 1.0, 1 / math.sqrt(n), n - 1)
    error = math.sqrt(max(expected * (1 - expected), 1 / trials) / trials)
    assert abs(shown / trials - expected) <= 4 * error, f"seed {SEED}"  # four standard errors of a share


def paired_place(differences: list[float], margin: float) -> bool:
    n = len(differences)
    center = sum(differences) / n
    reach = t_quantile_of(n - 1) * math.sqrt(sum((value - center) ** 2 for value in differences) / (n - 1) / n)
    return -margin < center - reach and center + reach < margin


@functools.cache
def t_quantile_of(df: int) -> float:
    return t_quantile(0.95, df)


def test_the_error_of_calling_a_difference_of_the_margin_equal_is_at_most_alpha() -> None:
    generator, trials, margin = random.Random(SEED), 4000, 1.0
    wrong = sum(paired_place([generator.gauss(margin, 1.0) for _ in range(20)], margin) for _ in range(trials))
    assert wrong / trials <= 0.05 + 4 * math.sqrt(0.05 * 0.95 / trials), f"seed {SEED}"


def test_the_needed_number_is_the_smallest_that_reaches_the_power() -> None:
    pairs, each = needed_runs("paired", 1.0, 1.5), needed_runs("two-sample", 1.0, 1.5)
    assert pairs is not None
    assert each is not None
    assert power(1.0, 1.5, 1 / math.sqrt(pairs), pairs - 1) >= 0.8 > power(1.0, 1.5, 1 / math.sqrt(pairs - 1), pairs - 2)
    assert power(1.0, 1.5, math.sqrt(2 / each), 2 * each - 2) >= 0.8 > power(1.0, 1.5, math.sqrt(2 / (each - 1)), 2 * each - 4)
    assert needed_runs("paired", 1.0, 1000.0) is None
    assert needed_runs("paired", 0.0, 1.0) is None


def test_the_integral_of_the_density_is_one() -> None:
    for df in (1, 2, 9, 300):
        step = 1e-3
        assert math.fsum(chi_density(index * step, df) * step for index in range(6000)) == pytest.approx(1.0, abs=1e-3)


def test_more_points_change_nothing_that_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [(1.0, 0.5, 0.7, 1), (1.0, 0.5, 0.3, 9), (0.3, 1.0, 0.1, 200), (1.0, 5.0, 0.02, 5000)]
    before = [power(*case) for case in cases]
    monkeypatch.setattr("mpbackend.comparison.statistics.POINTS", 2000)
    assert before == [pytest.approx(power(*case), abs=5e-4) for case in cases]


def test_too_few_runs_are_refused() -> None:
    with pytest.raises(BackendError, match="1 pairs; add runs"):
        paired([1.0], 1)
    with pytest.raises(BackendError, match="1 and 2 runs; add runs"):
        two_sample([1.0], [1.0, 2.0], 1)
    with pytest.raises(BackendError, match="1 and 1 runs; add runs"):
        repeats([1.0], [1.0], 1)


def test_infinite_values_give_no_power() -> None:
    assert power(1.0, math.inf, 1.0, 3) == 0.0
    assert paired([1e308, -1e308, 1e308], 1.0).place == "across"


def test_values_whose_squares_overflow_show_nothing() -> None:
    huge = [1e308, -1e308, 1e200]
    for found in (two_sample(huge, huge, 1.0), repeats(huge, [0.0], 1.0), two_sample([0.0, 0.0], huge, 1.0), paired(huge, 1.0)):
        assert (found.place, found.power, found.needed) == ("across", 0.0, None)
