"""The table that goes into the README."""

from typing import Any

from benchmarks import tables


def side(median: float, ok: int = 7, runs: int = 7) -> dict[str, Any]:
    return {
        "median": median,
        "least": median,
        "most": median,
        "cpu_s": 1.0,
        "ok": ok,
        "runs": runs,
        "more": [],
    }


def race(rival: str, theirs: dict[str, Any], lower: float, asked: float | None) -> dict[str, Any]:
    return {
        "rival": rival,
        "asked": asked,
        "ratio": lower + 1,
        "lower": lower,
        "cpu_ratio": 2.0,
        "cpu_lower": 1.5,
        "also": [],
        "ours": side(0.5),
        "theirs": theirs,
    }


def kept(races: list[dict[str, Any]], alone: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"title": "recovery", "unit": "s", "at_most": 3.0, "races": races, "alone": alone}


DEFAULT = race("torchrun-default", side(90.0, ok=3), lower=150.0, asked=None)
TUNED = race("torchrun-tuned", side(5.0), lower=9.0, asked=10.0)


def test_the_claim_is_against_the_better_of_the_peers_settings() -> None:
    row = tables.summary([kept([DEFAULT, TUNED])]).splitlines()[2]
    assert "10x (9)" in row
    assert "160" not in row
    assert "≥ 10x: missed" in row


def test_what_did_not_end_well_is_said() -> None:
    row = tables.summary([kept([DEFAULT, TUNED])]).splitlines()[2]
    assert "90 s (3 of 7 ended well)" in row
    assert "| 5 s |" in row


def test_each_family_of_peers_has_its_row() -> None:
    other = race("ray-tuned", side(15.0), lower=25.0, asked=20.0)
    rows = tables.summary([kept([TUNED, other])]).splitlines()[2:]
    assert [row.split("|")[1].strip() for row in rows] == [
        "recovery, against torchrun",
        "recovery, against ray",
    ]


def test_ours_alone_counts_the_kills_it_survived_and_the_runs_that_never_came_so_far() -> None:
    survived = [{"kills": 25, "recovered": 25}, {"kills": 25, "recovered": 24}, {}]
    alone = side(0.3, ok=2, runs=3) | {"more": survived}
    row = tables.summary([kept([], alone)]).splitlines()[2]
    assert "2 of 3, 49 of 50 kills" in row
    assert "≤ 3 s: reached" in row


def test_a_figure_shows_both_sides_and_what_else_was_compared() -> None:
    also = {"words": "first step", "pairs": 7, "ratio": 2.0, "lower": 1.8, "ours": 2, "theirs": 4}
    text = tables.of_figure(kept([TUNED | {"also": [also]}]))
    assert "torchrun-tuned" in text
    assert "| torchrun-tuned | first step | 2 | 4 | 2x (1.8) |" in text


def test_what_is_counted_in_a_simulation_is_said_as_it_was() -> None:
    said = {"said": "no invariant broken", "held": True}
    row = tables.summary([kept([]) | said]).splitlines()[2]
    assert "| no invariant broken |" in row
    assert "no invariant broken: reached" in row


def test_each_claim_about_checkpoints_has_its_row() -> None:
    claim = {
        "words": "theirs / ours",
        "ours": 1.0,
        "theirs": 0.8,
        "ratio": 0.8,
        "lower": 0.6,
        "asked": 0.7,
    }
    rows = tables.summary([{"title": "2 ranks", "claims": [claim, claim]}, kept([TUNED])])
    assert (
        rows.splitlines()[2:4]
        == ["| 2 ranks: theirs / ours | 1 s | - | 0.8 s | 0.8x (0.6) | ≥ 0.7x: missed |"] * 2
    )
    assert "recovery" in rows
