"""Tests of the open round: frames to workers, reports to callbacks."""

from __future__ import annotations

from typing import Any

import msgspec

from spotfit.agent.checkpoint_cleanup import CheckpointGarbageCollector
from spotfit.agent.hang_detector import STACK_DUMP_TIMEOUT_S, HangDetector
from spotfit.agent.report_matching import MatchedReport, ReportSink
from spotfit.agent.round_coordinator import BackendHookGates, RoundCoordinator
from spotfit.agent.round_lifecycle import OpenRound
from spotfit.control.background_calls import SynchronousCalls
from spotfit.core.codec import encode
from spotfit.core.ids import AgentId
from spotfit.ledger import keys
from spotfit.ledger.journal import Ledger
from spotfit.model.events import RankFailure
from spotfit.model.leader_state import Failing, Returned, Training
from spotfit.model.spec import HangDetectionConfig
from spotfit.protocol.agent_leader import FromLeader, LeaderToWorker, WorkerToLeader
from spotfit.protocol.worker_agent import (
    AtGate,
    AwaitReports,
    CheckpointNamed,
    FilesReport,
    FromWorker,
    FunctionStarted,
    MetricsReport,
    OpenGate,
    PreemptionUpdate,
    RankZeroBroadcast,
    ReportsSettled,
    SaveCompleted,
    SuggestSave,
)
from spotfit.store.local import MemoryStore
from spotfit.testing.builders import (
    RUN_ID,
    a_leader_state,
    a_notice,
    a_round,
    a_spec,
    a_view,
    an_agent_id,
)
from tests.unit.agent.simulated_cluster import FakeBackendHookRunner
from tests.unit.control.fake_provisioner import DeferredCalls

NOTHING = msgspec.Raw(b"{}")


class SentFrames:
    """An `AgentTransport` that only sends."""

    def __init__(self) -> None:
        self.sent: list[tuple[AgentId, FromLeader]] = []

    def send_to_agent(self, agent: AgentId, message: FromLeader) -> None:
        self.sent.append((agent, message))

    def frames_of(self, kind: type) -> list[tuple[AgentId, Any]]:
        """Return the frames of that kind with their receivers, since the last call."""
        sent, self.sent = self.sent, []
        messages = [(agent, one.frame) for agent, one in sent if isinstance(one, LeaderToWorker)]
        return [(agent, frame) for agent, frame in messages if isinstance(frame, kind)]


class FakeCallbacks:
    """A `CallbackDelivery` that records its calls."""

    def __init__(self) -> None:
        self.reports: list[str | None] = []

    def send_report(self, round_number: int, report: MatchedReport) -> None:
        assert round_number == 3
        self.reports.append(report.checkpoint)


class Harness:
    """Round 3, one worker on each of two machines."""

    def __init__(self, **options: Any) -> None:
        self.sent, self.callbacks, self.hooks, self.slow_calls = (
            SentFrames(),
            FakeCallbacks(),
            FakeBackendHookRunner(),
            DeferredCalls(),
        )
        ledger = Ledger(MemoryStore(), RUN_ID, an_agent_id(0))
        coordinator = RoundCoordinator(3, 2, default_checkpoint_name=lambda n: f"made-{n}")
        self.checkpoint_gc = CheckpointGarbageCollector(ledger.store, self.slow_calls)
        self.round = OpenRound(
            a_round(3),
            coordinator,
            hang_detector=HangDetector(
                coordinator,
                HangDetectionConfig(**options),
                request_stacks=lambda _: None,
                ledger=ledger,
                background_calls=SynchronousCalls(),
            ),
            hook_gates=BackendHookGates(coordinator, self.hooks, {}),
            transport=self.sent,  # type: ignore[arg-type]  # it only sends
            checkpoint_gc=self.checkpoint_gc,
            report_sink=ReportSink(ledger, SynchronousCalls()),
            callbacks=self.callbacks,  # type: ignore[arg-type]  # it only records
        )

    def send_frame(self, frame: FromWorker, *ranks: int) -> None:
        for rank in ranks or (0, 1):
            up = WorkerToLeader(round=3, rank=rank, frames=[msgspec.Raw(encode(frame))])
            assert self.round.on_worker_message(an_agent_id(rank), up, 0.0) is None


def test_frames_go_to_one_rank_or_to_all() -> None:
    harness = Harness()
    harness.send_frame(MetricsReport(report_index=0, metrics=NOTHING), 0)
    harness.send_frame(FilesReport(report_index=0, metrics=NOTHING), 1)
    assert [
        (agent, one.checkpoint_name) for agent, one in harness.sent.frames_of(CheckpointNamed)
    ] == [(an_agent_id(1), "made-0")]
    harness.round.send_to_workers([(None, OpenGate(phase="setup"))])
    assert [agent for agent, _ in harness.sent.frames_of(OpenGate)] == [
        an_agent_id(0),
        an_agent_id(1),
    ]


def test_a_waiting_rank_is_answered_when_its_reports_are_delivered() -> None:
    harness = Harness()
    harness.send_frame(MetricsReport(report_index=0, metrics=NOTHING))
    harness.send_frame(AwaitReports(report_count=1), 1)
    harness.round.deliver_matched_reports()
    assert harness.sent.frames_of(ReportsSettled) == [
        (an_agent_id(1), ReportsSettled(report_count=1))
    ]


def test_frames_for_ranks_of_other_agents_are_ignored() -> None:
    harness = Harness()
    up = WorkerToLeader(round=3, rank=1, frames=[msgspec.Raw(encode(FunctionStarted()))])
    assert harness.round.on_worker_message(an_agent_id(0), up, 0.0) is None
    assert harness.round.on_worker_message(AgentId("unknown"), up, 0.0) is None
    assert harness.round.coordinator.running_ranks == set()


def test_an_invalid_frame_is_a_failure_and_valid_ones_count() -> None:
    harness = Harness()
    frames = [msgspec.Raw(b'{"type": "nonsense"}'), msgspec.Raw(encode(FunctionStarted()))]
    failure = harness.round.on_worker_message(
        an_agent_id(1), WorkerToLeader(round=3, rank=1, frames=frames), 0.0
    )
    assert failure is not None
    assert (failure.rank, failure.kind) == (1, "died")
    assert "an invalid message" in failure.message
    assert harness.round.coordinator.running_ranks == {1}


def test_reports_wait_for_the_commit_of_earlier_checkpoints() -> None:
    harness = Harness()
    harness.send_frame(FilesReport(report_index=0, metrics=NOTHING))
    harness.send_frame(SaveCompleted(report_index=0, checkpoint_name="made-0", size_bytes=1))
    harness.send_frame(MetricsReport(report_index=1, metrics=NOTHING))
    harness.round.deliver_matched_reports()
    assert harness.callbacks.reports == []
    harness.round.coordinator.reports.ready_checkpoints = []  # its entry is written
    harness.round.deliver_matched_reports()
    assert harness.callbacks.reports == ["made-0", None]


def test_a_preemption_is_announced_and_excludes_ranks_if_relaxed() -> None:
    harness = Harness()
    notices = {an_agent_id(1): a_notice()}
    harness.round.announce_preemption(a_view(round=a_round(3)), a_leader_state(), 0.0)
    assert harness.sent.sent == []
    view = a_view(round=a_round(3), notices=notices, spec=a_spec(relax_collectives=True))
    harness.round.announce_preemption(view, a_leader_state(), 0.0)
    updates = harness.sent.frames_of(PreemptionUpdate)
    assert [agent for agent, _ in updates] == [an_agent_id(0), an_agent_id(1)]
    assert [ranks for _, one in updates for ranks in one.node_to_ranks.values()] == [(1,), (1,)]
    harness.send_frame(FilesReport(report_index=0, metrics=NOTHING), 0)
    assert [one.ranks for _, one in harness.sent.frames_of(CheckpointNamed)] == [(0,)], (
        "rank 1 is not waited for"
    )


def test_a_hang_is_reported_unless_a_validation_is_pending() -> None:
    harness = Harness(no_progress_timeout_s=60.0)
    harness.send_frame(FunctionStarted())
    assert harness.round.check_for_hangs(a_view(), 0.0) is None
    assert harness.round.next_wake(0.0) == 60.0
    assert harness.round.check_for_hangs(a_view(), 60.0) is None, "stacks are requested first"
    found = harness.round.check_for_hangs(a_view(), 60.0 + STACK_DUMP_TIMEOUT_S)
    assert found is not None
    assert found.hang.ranks == (0, 1)


def test_closing_a_round_fails_waiting_hooks() -> None:
    harness = Harness()
    harness.send_frame(AtGate(phase="setup"))
    harness.round.advance_hooks()
    assert harness.hooks.requested == [("on_start", 3, 2)]
    harness.hooks.unfinished = []
    harness.round.advance_hooks()
    assert [agent for agent, _ in harness.sent.frames_of(OpenGate)] == [
        an_agent_id(0),
        an_agent_id(1),
    ]
    harness.round.abandon_workers()
    harness.round.close()
    assert harness.hooks.requested[-1] == ("on_shutdown", 3, 2), "a started backend is shut down"


# --- phases --------------------------------------------------------------------------------------


def test_a_round_trains_until_a_failure_is_observed() -> None:
    harness = Harness()
    training = harness.round.phase(None, workers_stopped=False)
    assert isinstance(training, Training)
    failure = RankFailure(rank=1, kind="died", message="killed")
    harness.round.rank_failures[1] = failure
    assert harness.round.phase(5.0, workers_stopped=False) == Failing(
        round=a_round(3),
        since=5.0,
        opened_at=training.since,
        rank_failures={1: failure},
        workers_stopped=False,
    )


def test_a_failure_does_not_matter_once_all_ranks_have_returned() -> None:
    harness = Harness()
    harness.round.coordinator.returned_ranks.update({0, 1})
    harness.round.returned_at = 7.0
    phase = harness.round.phase(5.0, workers_stopped=True)
    assert isinstance(phase, Returned)
    assert (phase.since, phase.result_key) == (7.0, keys.result(3, 0))


def test_a_save_is_suggested_once_and_counts_with_a_checkpointer() -> None:
    harness = Harness()
    harness.round.suggest_save("machines are ready", 5.0)
    harness.round.suggest_save("machines are ready", 6.0)
    frames = harness.sent.frames_of(SuggestSave)
    assert {frame for _, frame in frames} == {SuggestSave(reason="machines are ready")}
    assert len(frames) == 2, "one per machine"
    without = harness.round.phase(None, workers_stopped=False)
    assert isinstance(without, Training)
    assert without.save_suggested_at is None
    harness.send_frame(RankZeroBroadcast(kind="Checkpointer", seq=0))
    suggested = harness.round.phase(None, workers_stopped=False)
    assert isinstance(suggested, Training)
    assert suggested.save_suggested_at == 5.0
