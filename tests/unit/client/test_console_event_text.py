"""Every journal event has a sentence."""

from __future__ import annotations

import typing
from pathlib import Path

import pytest
from msgspec.structs import replace

from spotfit.client.console import format_event, format_summary
from spotfit.core.codec import decoder
from spotfit.core.ids import AgentId
from spotfit.model.events import (
    FailureCause,
    FitEnded,
    FitStarted,
    GroupPlanned,
    JournalEntry,
    JournalEvent,
    LeaderElected,
    RoundOpened,
    ValidationEnded,
)
from spotfit.model.offer import Market, Offer, Price
from spotfit.testing.builders import a_committed_checkpoint, a_round, a_spec, a_view

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
        ("group_waiting", "machines of t-9 wait: {reason}"),
        ("node_lost", "machine t-1/1 lost: {reason}"),
        ("node_lost_unused", "machine t-9/1 released unused: {reason}"),
        ("groups_released", "released machines t-1"),
        ("preemption_noticed", "preemption notice for node a-2: spot reclaim, 120 s left"),
        ("round_opened", "round 1 started: {reason}"),
        (
            "training_function_started",
            "round 5: training function called on all ranks after 2.50 s",
        ),
        ("round_closed", "round 1 ended: {reason}"),
        ("checkpoint_committed", "checkpoint epoch-1 committed (1.2 KiB)"),
        ("checkpoint_committed_why", "checkpoint epoch-6 committed (10 B): {reason}"),
        ("checkpoint_dropped", "checkpoint epoch-1 deleted: {reason}"),
        ("validation_started", "validation of checkpoint epoch-3 started {reason}"),
        ("validation_ended", "validation of checkpoint epoch-3 succeeded"),
        ("training_ended", "training finished; validations of the last checkpoints are pending"),
        (
            "feeders_stopped",
            "no further machines for feeders are requested, workers do without: {reason}",
        ),
        (
            "deadline_at_risk",
            "{reason}. Cancel it and use more workers if it must end earlier.",
        ),
        ("cancel_requested", "cancellation requested: {reason}"),
        ("fit_ended", "run cancelled: {reason}"),
        ("machines_observed", "observed machines: 2 started, 2 ended"),
        ("machines_observed_unseen", "observed machines: 1 may have run unobserved"),
        ("prices_changed", "prices changed: eu-1a/spot"),
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


def test_missing_reports_are_part_of_the_last_sentence() -> None:
    ended = FitEnded(outcome="finished", missing_reports="only 0 of 3 reports were made")
    assert format_event(ended) == "run finished; only 0 of 3 reports were made"


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


def test_a_driver_that_leads_is_no_elected_machine() -> None:
    driver = LeaderElected(leader=AgentId("da-1"), epoch=1, reason="why")
    assert format_event(driver) == "da-1, a driver without workers, requests the machines: why"


def test_single_machines_and_workers_are_singular() -> None:
    planned = golden("group_planned")[0]
    assert isinstance(planned, GroupPlanned)
    one = replace(planned, plan=replace(planned.plan, num_nodes=1, slots_per_node=1), reason="why")
    assert format_event(one) == "requesting 1 machine with 1 worker each: why"


def test_the_summary_has_duration_interruptions_and_the_latest_checkpoint() -> None:
    view = a_view(
        fit_end=FitEnded(outcome="finished"),
        fit_started_at_ms=1_000,
        fit_ended_at_ms=601_000,
        failure_counts={FailureCause.PREEMPTION: 2, FailureCause.WORKER: 1},
        checkpoints=(a_committed_checkpoint("c1", step=120, size_bytes=2048),),
    )
    assert format_summary(view, "s3://b/digits") == (
        "run 'digits' finished after 10.0 min; 3 interrupted rounds (preemption: 2, worker: 1); "
        "1 checkpoint, latest c1 (at step 120, 2.0 KiB); "
        "export the model with `spotfit checkpoints export s3://b/digits model.pt`"
    )


def test_the_summary_of_a_run_without_checkpoints_is_short() -> None:
    view = a_view(fit_end=FitEnded(outcome="failed"))
    assert format_summary(view, "u") == "run 'digits' failed; no interruption; 0 checkpoints"


def test_a_request_shows_its_offer_and_price() -> None:
    planned = golden("group_planned")[0]
    assert isinstance(planned, GroupPlanned)
    price = Price(usd_per_hour=1.2, source="given", as_of_s=0.0)
    offer = Offer(name="aws_batch/q/spot", provisioner="aws_batch", market=Market.SPOT, price=price)
    event = replace(planned, request=replace(planned.request, offer=offer), reason="why")
    assert format_event(event) == (
        "requesting 2 machines with 2 workers each (aws_batch/q/spot, $1.20 an hour): why"
    )


def test_a_round_shows_its_checkpoint() -> None:
    assert (
        format_event(RoundOpened(round=a_round(2, checkpoint_name="c1"), reason="why"))
        == "round 2 started: why, from c1"
    )
