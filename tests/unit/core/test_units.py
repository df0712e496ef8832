"""Parsing of durations, formatting of durations and sizes."""

import pytest

from spotfit.core.errors import ConfigError
from spotfit.core.units import (
    format_bytes,
    format_count,
    format_ranks,
    format_seconds,
    format_usd,
    parse_seconds,
    strip_control_characters,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("1.5h", 5400), ("250ms", 0.25), (" 2 min ", 120), ("7", 7), (3, 3), (0.5, 0.5)],
)
def test_durations(text: str | float, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "fast", "-3s", "3 parsecs", "1,5h", "s"])
def test_an_invalid_duration_is_refused_with_the_known_units(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a valid duration") as refused:
        parse_seconds(text)
    assert "ms, s, m, min, h, d" in refused.value.do


@pytest.mark.parametrize(
    ("amount", "text"),
    [(0.1274, "0.13 s"), (95.2, "95 s"), (600, "10.0 min"), (9000, "2.5 h"), (7199, "120.0 min")],
)
def test_formatted_durations(amount: float, text: str) -> None:
    assert format_seconds(amount) == text


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (3.2 * 2**20, "3.2 MiB"),
        (2**40, "1.0 TiB"),
        (2**50, "1024.0 TiB"),
    ],
)
def test_formatted_sizes(amount: float, text: str) -> None:
    assert format_bytes(amount) == text


@pytest.mark.parametrize(
    ("amount_usd", "text"),
    [
        (0.0, "$0"),
        (1e-9, "less than $0.0001"),
        (0.0001, "$0.0001"),
        (0.00417, "$0.0042"),
        (0.00999, "$0.01"),
        (0.014, "$0.01"),
        (12.4, "$12.40"),
        (1234.5, "$1,234.50"),
    ],
)
def test_amounts_of_money_do_not_look_like_zero(amount_usd: float, text: str) -> None:
    assert format_usd(amount_usd) == text


def test_ranks_are_sorted_and_long_lists_are_cut() -> None:
    assert format_ranks([3]) == "rank 3"
    assert format_ranks({2, 0}) == "ranks 0, 2"
    assert format_ranks(range(11)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 3 more"


def test_counts_agree_with_their_noun() -> None:
    assert [format_count(n, "machine") for n in (0, 1, 2)] == [
        "0 machines",
        "1 machine",
        "2 machines",
    ]


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("loss\t0.5 é", "loss\t0.5 é"),
        ("a\x1b[2J\x1b[Hb", "ab"),
        ("\x1b]0;title\x07x\x1b]52;c;AAAA\x1b\\y", "xy"),
        ("\x9b2Jx\x9d0;t\x9cy\x85z", "xyz"),
        ("\x1bPq\x1b\\x\x1b(By\x1bc", "xy"),
        ("a\rb\x08c\x07\x7f\x00", "abc"),
        ("\x1b[1\x1b[31mred", "1red"),
        ("\x1b[31mred\x1b[0m\nnext", "red\nnext"),
        ("\ufdd0[2J\x1b", "[2J"),
    ],
)
def test_control_characters_are_removed(text: str, plain: str) -> None:
    assert strip_control_characters(text) == plain


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\nplain", "\x1b[31mred\x1b[0m\nplain"),
        ("\x1b[38:5:1mred\x1b[2J", "\x1b[38:5:1mred\x1b[0m"),
        ("\ufdd0[2J\x1b[1mbold", "[2J\x1b[1mbold\x1b[0m"),
    ],
)
def test_colours_are_kept_for_a_terminal_and_end_with_the_line(text: str, shown: str) -> None:
    assert strip_control_characters(text, keep_colors=True) == shown
