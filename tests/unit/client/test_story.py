"""The story: every event in a plain sentence."""

from __future__ import annotations

import typing
from pathlib import Path

import pytest
from msgspec.structs import replace

from spotfit.client.story import tell
from spotfit.core.codec import decoder
from spotfit.model.events import Entry, Event, FitEnded, FitStarted, RoundOpened, ValidationEnded
from spotfit.testing.builders import a_round, a_spec

GOLDEN = sorted((Path(__file__).parents[2] / "golden" / "ledger" / "v1").glob("*.json"))


def golden(kind: str) -> list[Event]:
    files = [file for file in GOLDEN if file.stem[3:] == kind]
    return [decoder(Entry).decode(file.read_bytes()).event for file in files]


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("fit_started", "run 'digits' starts: 2 to 4 workers on 'local'"),
        ("leader_elected", "a-1 leads: nobody leads who lives on a machine"),
        (
            "intended",
            "asking for 2 machines with 2 workers each: 4 of 4 workers have no machine",
        ),
        ("submitted", "machines granted: group-1"),
        ("refused", "refused: no capacity in this zone"),
        ("node_lost", "machine t-1/1 is lost: the backend says it is gone"),
        ("released", "let go: t-1"),
        ("noticed", "the machine of a-2 will be taken away in 120 s: spot reclaim"),
        ("round_opened", "round 1: 4 workers on 2 machines"),
        ("round_closed", "round 1 is over: lost 1 machine (t-1/1)"),
        ("checkpoint_committed", "checkpoint epoch-1 committed (1.2 KiB)"),
        (
            "checkpoint_committed_why",
            "checkpoint epoch-6 committed (10 B): 500 steps since the last save",
        ),
        ("checkpoint_dropped", "checkpoint epoch-1 dropped: only the last 1 stay"),
        ("validation_begun", "checkpoint epoch-3 is being validated on a machine of its own"),
        ("validation_ended", "checkpoint epoch-3: validated"),
        (
            "training_ended",
            "training is finished; the last checkpoints are being validated",
        ),
        ("cancel_requested", "cancel requested: cancel() was called"),
        ("fit_ended", "the run is cancelled: cancel() was called"),
    ],
)
def test_an_event_is_told(kind: str, sentence: str) -> None:
    assert tell(golden(kind)[0]) == sentence


def test_a_last_save_that_was_lost_is_told_at_the_end() -> None:
    ended = FitEnded("finished", unsaved="rank 1: Traceback\n  …\nthe bucket is gone\n")
    assert tell(ended) == "the run is finished; its last save is no checkpoint: the bucket is gone"


def test_no_event_is_left_untold() -> None:
    kinds = {type(event) for file in GOLDEN for event in golden(file.stem[3:])}
    assert kinds == set(typing.get_args(Event))


def test_of_a_validation_that_failed_the_last_line_is_told() -> None:
    ended = ValidationEnded("epoch-3", "2-0", "failed", why="Traceback\n  ...\nValueError: no\n")
    assert tell(ended) == "checkpoint epoch-3: its validation failed: ValueError: no"


def test_what_is_not_known_is_not_told() -> None:
    assert tell(FitStarted(a_spec())) == "run 'digits' starts: 2 workers on 'local'"
    (noticed,) = golden("noticed")
    unknown = replace(noticed, notice=replace(noticed.notice, seconds_left=None))  # type: ignore[union-attr]
    assert tell(unknown) == "the machine of a-2 will be taken away: spot reclaim"


def test_a_round_tells_from_where_it_starts() -> None:
    assert tell(RoundOpened(a_round(2, checkpoint="c1"), "why")) == "round 2: why, from c1"
