"""The cost of the authentication from paired values."""

import pytest

from benchmarks.authentication import FIGURES, cost, table_row


def test_the_ratio_is_the_median_of_pairs_with_its_interval() -> None:
    found = cost([3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0], [1.0] * 7, higher_is_better=False)
    assert found == (6.0, 4.0, 8.0)
    assert not found.is_noise


def test_a_lower_rate_is_a_cost() -> None:
    assert cost([50.0], [100.0], higher_is_better=True).ratio == pytest.approx(2.0)


def test_an_interval_around_1_is_noise() -> None:
    assert cost([0.9, 1.1, 1.0], [1.0, 1.0, 1.0], higher_is_better=False).is_noise


def test_a_row_has_the_medians_of_both_sides() -> None:
    values = [dict.fromkeys(FIGURES, value) for value in (1.0, 2.0, 3.0)]
    row = table_row("append_us", values, [dict.fromkeys(FIGURES, 1.0)] * 3)
    assert row == "| append, memory store, CPU (us) | 1 | 2 | 2.00 (1.00 to 3.00) | within noise |"
