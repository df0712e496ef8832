"""Every journal event has a sentence."""

from __future__ import annotations

import typing
from pathlib import Path

import pytest
from msgspec.structs import replace

from spotfit.client.console import format_event
from spotfit.core.codec import decoder
from spotfit.model.events import (
    FitEnded,
    FitStarted,
    JournalEntry,
    JournalEvent,
    RoundOpened,
    ValidationEnded,
)
from spotfit.testing.builders import a_round, a_spec

GOLDEN = sorted((Path(__file__).parents[2] / "golden" / "ledger" / "v1").glob("*.json"))


def golden(kind: str) -> list[JournalEvent]:
    files = [file for file in GOLDEN if file.stem[3:] == kind]
    return [decoder(JournalEntry).decode(file.read_bytes()).event for file in files]


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("fit_started", "run 'digits' started: 2 to 4 workers, provisioner 'local'"),
        ("leader_elected", "a-1 elected leader: {reason}"),
        ("group_planned", "requesting 2 machines with 2 workers each: {reason}"),
        ("group_submitted", "machine request accepted: group-1"),
        ("group_refused", "machine request refused: {reason}"),
        ("node_lost", "machine t-1/1 lost: {reason}"),
        ("groups_released", "released machines t-1"),
        ("preemption_noticed", "preemption notice for node a-2: spot reclaim, 120 s left"),
        ("round_opened", "round 1 started: {reason}"),
        ("round_closed", "round 1 ended: {reason}"),
        ("checkpoint_committed", "checkpoint epoch-1 committed (1.2 KiB)"),
        ("checkpoint_committed_why", "checkpoint epoch-6 committed (10 B): {reason}"),
        ("checkpoint_dropped", "checkpoint epoch-1 deleted: {reason}"),
        ("validation_started", "validation of checkpoint epoch-3 started {reason}"),
        ("validation_ended", "validation of checkpoint epoch-3 succeeded"),
        ("training_ended", "training finished; validations of the last checkpoints are pending"),
        ("cancel_requested", "cancellation requested: {reason}"),
        ("fit_ended", "run cancelled: {reason}"),
    ],
)
def test_each_event_has_a_sentence(kind: str, sentence: str) -> None:
    event = golden(kind)[0]
    assert format_event(event) == sentence.format(reason=getattr(event, "reason", ""))


def test_a_failed_last_save_is_part_of_the_last_sentence() -> None:
    ended = FitEnded(
        outcome="finished", last_save_error="rank 1: Traceback\n  …\nthe bucket is gone\n"
    )
    assert format_event(ended) == "run finished; its last save failed: the bucket is gone"


def test_the_golden_journal_contains_every_event() -> None:
    kinds = {type(event) for file in GOLDEN for event in golden(file.stem[3:])}
    assert kinds == set(typing.get_args(JournalEvent))


def test_a_failed_validation_shows_the_last_line_of_its_traceback() -> None:
    ended = ValidationEnded(
        checkpoint_name="epoch-3",
        checkpoint_uid="2-0",
        status="failed",
        reason="Traceback\n  ...\nValueError: no\n",
    )
    assert format_event(ended) == "validation of checkpoint epoch-3 failed: ValueError: no"


def test_unknown_values_are_omitted() -> None:
    assert (
        format_event(FitStarted(spec=a_spec()))
        == "run 'digits' started: 2 workers, provisioner 'local'"
    )
    (noticed,) = golden("preemption_noticed")
    unknown = replace(noticed, notice=replace(noticed.notice, seconds_left=None))  # type: ignore[union-attr]
    assert format_event(unknown) == "preemption notice for node a-2: spot reclaim"


def test_a_round_shows_its_checkpoint() -> None:
    assert (
        format_event(RoundOpened(round=a_round(2, checkpoint_name="c1"), reason="why"))
        == "round 2 started: why, from c1"
    )
