from __future__ import annotations

import math

import pytest

from mpbackend.comparison.distributions import incomplete_beta, t_cdf, t_quantile

# Abramowitz and Stegun, Handbook of Mathematical Functions, table 26.10, and the Cauchy and df=2 distributions in closed form for more digits.
TABLE = [(0.95, 3, 2.353), (0.975, 5, 2.571), (0.995, 10, 3.169), (0.95, 30, 1.697), (0.975, 60, 2.000), (0.9995, 4, 8.610), (0.95, 120, 1.658)]


@pytest.mark.parametrize(("p", "df", "value"), TABLE)
def test_quantiles_are_those_of_the_table(p: float, df: float, value: float) -> None:
    assert t_quantile(p, df) == pytest.approx(value, abs=6e-4)


@pytest.mark.parametrize("p", [0.51, 0.75, 0.95, 0.999, 0.05])
def test_one_and_two_degrees_of_freedom_have_closed_forms(p: float) -> None:
    assert t_quantile(p, 1) == pytest.approx(math.tan(math.pi * (p - 0.5)), rel=1e-11)
    assert t_quantile(p, 2) == pytest.approx((2 * p - 1) * math.sqrt(2 / (4 * p * (1 - p))), rel=1e-11)


def test_many_degrees_of_freedom_are_normal() -> None:
    assert t_quantile(0.975, 1e8) == pytest.approx(1.959963984540054, rel=1e-7)
    assert t_quantile(0.975, 1e12) == pytest.approx(1.959963984540054, rel=1e-12)
    assert t_cdf(1.959963984540054, 1e12) == pytest.approx(0.975, rel=1e-12)


@pytest.mark.parametrize("df", [0.5, 1, 2.5, 7, 40, 1e5])
def test_a_quantile_is_the_inverse_of_the_distribution(df: float) -> None:
    for p in (0.6, 0.9, 0.99):
        assert t_cdf(t_quantile(p, df), df) == pytest.approx(p, rel=1e-10)
    assert t_quantile(0.5, df) == 0.0
    assert t_cdf(-1.0, df) == pytest.approx(1 - t_cdf(1.0, df), rel=1e-12)


def test_the_incomplete_beta_function_is_a_sum_of_binomials() -> None:
    # DLMF 8.17.5: I_x(m, n - m + 1) is the probability of at least m successes in n.
    n, m, x = 12, 4, 0.3
    expected = math.fsum(math.comb(n, k) * x**k * (1 - x) ** (n - k) for k in range(m, n + 1))
    assert incomplete_beta(m, n - m + 1, x) == pytest.approx(expected, rel=1e-13)
    assert (incomplete_beta(2, 3, 0.0), incomplete_beta(2, 3, 1.0)) == (0.0, 1.0)


def test_infinite_t() -> None:
    assert (t_cdf(math.inf, 3), t_cdf(-math.inf, 3)) == (1.0, 0.0)
