"""Exponential backoff."""

from __future__ import annotations


def exponential_backoff_s(doublings: int, *, shortest_s: float, longest_s: float) -> float:
    """Return the seconds to wait: `shortest_s`, doubled that many times, at most `longest_s`."""
    # The exponent is limited so that the power cannot overflow after a week of failures.
    return min(longest_s, shortest_s * 2.0 ** min(doublings, 64))
