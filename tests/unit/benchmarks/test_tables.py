"""The table of the README."""

from typing import Any

from benchmarks import tables


def side(median: float, ok: int = 7, runs: int = 7) -> dict[str, Any]:
    return {
        "median": median,
        "min": median,
        "max": median,
        "cpu_s": 1.0,
        "ok": ok,
        "runs": runs,
        "more": [],
    }


def comparison(
    peer: str, theirs: dict[str, Any], lower: float, target: float | None
) -> dict[str, Any]:
    return {
        "peer": peer,
        "target": target,
        "ratio": lower + 1,
        "lower": lower,
        "cpu_ratio": 2.0,
        "cpu_lower": 1.5,
        "also": [],
        "ours": side(0.5),
        "theirs": theirs,
    }


def result(
    comparisons: list[dict[str, Any]], alone: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {
        "title": "recovery",
        "unit": "s",
        "at_most": 3.0,
        "comparisons": comparisons,
        "alone": alone,
    }


DEFAULT = comparison("torchrun-default", side(90.0, ok=3), lower=150.0, target=None)
TUNED = comparison("torchrun-tuned", side(5.0), lower=9.0, target=10.0)


def test_claim_is_against_the_better_setting_of_the_peer() -> None:
    row = tables.summary([result([DEFAULT, TUNED])]).splitlines()[2]
    assert "10x (9)" in row
    assert "160" not in row
    assert "≥ 10x: missed" in row


def test_failed_runs_are_shown() -> None:
    row = tables.summary([result([DEFAULT, TUNED])]).splitlines()[2]
    assert "90 s (3 of 7 succeeded)" in row
    assert "| 5 s |" in row


def test_each_peer_has_a_row() -> None:
    other = comparison("ray-tuned", side(15.0), lower=25.0, target=20.0)
    rows = tables.summary([result([TUNED, other])]).splitlines()[2:]
    assert [row.split("|")[1].strip() for row in rows] == [
        "recovery, against torchrun",
        "recovery, against ray",
    ]


def test_single_side_counts_survived_kills_and_failed_runs() -> None:
    survived = [{"kills": 25, "recovered": 25}, {"kills": 25, "recovered": 24}, {}]
    alone = side(0.3, ok=2, runs=3) | {"more": survived}
    row = tables.summary([result([], alone)]).splitlines()[2]
    assert "2 of 3, 49 of 50 kills" in row
    assert "≤ 3 s: reached" in row


def test_figure_shows_both_sides_and_additional_comparisons() -> None:
    also = {"title": "first step", "pairs": 7, "ratio": 2.0, "lower": 1.8, "ours": 2, "theirs": 4}
    text = tables.of_figure(result([TUNED | {"also": [also]}]))
    assert "torchrun-tuned" in text
    assert "| torchrun-tuned | first step | 2 | 4 | 2x (1.8) |" in text


def test_output_of_a_simulation_is_shown_unchanged() -> None:
    outcome = {"output": "no invariant broken", "passed": True}
    row = tables.summary([result([]) | outcome]).splitlines()[2]
    assert "| no invariant broken |" in row
    assert "no invariant broken: reached" in row


def test_each_checkpointer_claim_has_a_row() -> None:
    claim = {
        "title": "theirs / ours",
        "ours": 1.0,
        "theirs": 0.8,
        "ratio": 0.8,
        "lower": 0.6,
        "target": 0.7,
    }
    rows = tables.summary([{"title": "2 ranks", "claims": [claim, claim]}, result([TUNED])])
    assert (
        rows.splitlines()[2:4]
        == ["| 2 ranks: theirs / ours | 1 s | - | 0.8 s | 0.8x (0.6) | ≥ 0.7x: missed |"] * 2
    )
    assert "recovery" in rows
