"""Tests of the round participant: start, frames, failures and stop of workers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from spotfit.agent.ports import AgentMessageReceived, WorkerFramesReceived
from spotfit.agent.round_participant import RoundParticipant
from spotfit.core.codec import decoder, encode
from spotfit.core.ids import AgentId
from spotfit.ledger import keys
from spotfit.model.events import FailureCause, LeaderElected, RankFailure
from spotfit.model.failure_model import FailureModel, LifetimeHistogram, MarketPrior
from spotfit.model.reporting import SaveAtEnd
from spotfit.model.topology import SnapshotId, SnapshotShard
from spotfit.model.view import View
from spotfit.protocol.agent_leader import (
    Join,
    NodeUnusable,
    SnapshotReplicated,
    StackDump,
    UploadsDrained,
    WorkersStopped,
    WorkerTerminated,
    WorkerToLeader,
    WorkerUnresponsive,
)
from spotfit.protocol.worker_agent import (
    CheckpointNamed,
    CommitConfirmed,
    DiscardSnapshotAtEnd,
    FromWorker,
    FunctionStarted,
    MetricsReport,
    OpenGate,
    SaveCompleted,
    WorkerRaised,
    WorkerReturned,
)
from spotfit.testing.builders import (
    RUN_ID,
    ManualClock,
    a_committed_checkpoint,
    a_member,
    a_notice,
    a_round,
    a_spec,
    a_view,
    an_agent_id,
)
from tests.unit.agent.simulated_cluster import (
    FakeNodeServices,
    FakeWorkerPool,
    FlakyStore,
    Infrastructure,
    fake_seal,
)
from tests.unit.control.fake_provisioner import LAUNCH

LEADER_ADDRESS = a_member(0).coordinator_address
WIDE = [a_member(0, slots=2), a_member(1, slots=2)]
OPEN = a_view(round=a_round(3, members=WIDE))
HEADLESS = LeaderElected(leader=AgentId("driver"), epoch=2)
CLOSED = a_view(last_round=a_round(3, members=WIDE))
A_REPORT = MetricsReport(report_index=0, metrics=msgspec.Raw(b"{}"))
_frames: msgspec.json.Decoder[FromWorker] = decoder(FromWorker)  # type: ignore[arg-type]


class Node:
    """Agent a1 with two workers, connected to the leader a0."""

    def __init__(self) -> None:
        infrastructure = Infrastructure()
        self.leader_net = infrastructure.open_transport(a_member(0))
        self.transport = infrastructure.open_transport(a_member(1))
        self.transport.connect(LEADER_ADDRESS, Join(run_id=RUN_ID, member=a_member(1), next_slot=0))
        self.leader_net.drain_events()
        self.worker_pool, self.store = FakeWorkerPool(infrastructure), FlakyStore()
        self.clock = ManualClock(100.0)
        self.participant = RoundParticipant(
            agent_id=an_agent_id(1),
            worker_pool=self.worker_pool,
            transport=self.transport,
            store=self.store,
            node_services=FakeNodeServices(infrastructure),
            launch=LAUNCH,
            devices=("cuda:0", "cuda:1"),
            scratch="/scratch",
        )

    def follow(self, view: View, leader_address: str | None = LEADER_ADDRESS) -> None:
        self.participant.apply_view(view, leader_address)

    def poll_messages(self) -> list[Any]:
        """Return the messages sent to the leader after polling the worker pool."""
        self.clock.wait(1.0)
        self.participant.poll_worker_events(self.clock.now())
        return self.sent_messages()

    def sent_messages(self) -> list[Any]:
        return [
            one.message
            for one in self.leader_net.drain_events()
            if isinstance(one, AgentMessageReceived)
        ]


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
def working(node: Node) -> Node:
    """A node in round 3, with ranks 2 and 3."""
    node.follow(OPEN)
    return node


def decode_frames(message: Any) -> list[FromWorker]:
    assert isinstance(message, WorkerToLeader)
    return [_frames.decode(frame) for frame in message.frames]


def test_worker_liveness_is_sent_to_the_leader(working: Node) -> None:
    working.worker_pool.mark_unresponsive(3, 601.0)
    working.participant.dump_stacks(3, 7)
    messages = working.poll_messages()
    assert messages[0] == WorkerUnresponsive(round=3, rank=3, silent_s=601.0)
    assert messages[1:] == [
        StackDump(round=3, dump_id=7, rank=rank, stack_text=f"at work ({rank})") for rank in (2, 3)
    ]


def test_stacks_of_another_round_are_not_requested(working: Node) -> None:
    working.participant.dump_stacks(2, 7)
    assert working.poll_messages() == []


def node_with_returned_worker(hooks: bool) -> Node:
    """A node in round 3 of a run with or without hooks; the function of rank 2 has returned."""
    node = Node()
    node.follow(replace(OPEN, spec=a_spec(has_backend_hooks=hooks)))
    node.worker_pool.send_from_worker(2, WorkerReturned(report_count=0))
    node.poll_messages()
    return node


@pytest.mark.parametrize("hooks", [True, False])
def test_an_exit_before_the_shutdown_hook_is_a_failure(hooks: bool) -> None:
    node = node_with_returned_worker(hooks)
    node.worker_pool.end_worker(2, "was killed by SIGKILL")
    assert [type(one) for one in node.poll_messages()] == [WorkerTerminated] * hooks


def test_an_exit_after_the_last_gate_is_not_a_failure() -> None:
    node = node_with_returned_worker(True)
    node.participant.forward_to_workers(3, None, OpenGate(phase="leave"), OPEN)
    assert node.worker_pool.received[2] == [OpenGate(phase="leave")]
    node.worker_pool.end_worker(2, "was killed by SIGKILL")
    assert node.poll_messages() == []


# --- journal entries -----------------------------------------------------------------------------


def test_a_round_is_entered_with_everything_its_workers_need(node: Node) -> None:
    spec = a_spec(framework="torch", framework_options={"backend": "gloo"}, log_level="DEBUG")
    commit = a_committed_checkpoint("c1", metrics={"loss": 0.5})
    round_ = a_round(3, members=WIDE, checkpoint_name="c1")
    node.follow(a_view(spec=spec, round=round_, checkpoints=(commit,)))
    assert node.worker_pool.rounds == [3]
    start = node.worker_pool.workers[3]
    assert (start.rank, start.local_rank, start.node_rank) == (3, 1, 1)
    assert (start.world_size, start.local_world_size) == (4, 2)
    assert (start.checkpoint, start.checkpoint_metrics) == ("c1", {"loss": 0.5})
    assert not start.has_snapshots, "the checkpoint has user files"
    assert (start.framework, start.framework_options) == ("torch", {"backend": "gloo"})
    assert (start.devices, start.scratch_dir, start.secret) == (
        ("cuda:0", "cuda:1"),
        "/scratch",
        "secret",
    )
    assert msgspec.json.decode(bytes(start.spec)) == msgspec.json.decode(encode(spec))


def test_a_start_message_states_whether_snapshots_exist(node: Node) -> None:
    commits = (a_committed_checkpoint("c1", is_snapshot=True), a_committed_checkpoint("c2"))
    node.follow(a_view(round=a_round(3, members=WIDE, checkpoint_name="c2"), checkpoints=commits))
    assert node.worker_pool.workers[3].has_snapshots


def test_a_start_message_has_the_digest_of_the_checkpoint_to_resume_from(node: Node) -> None:
    commits = (
        a_committed_checkpoint("c1", manifests_digest="1" * 64),
        a_committed_checkpoint("c2", manifests_digest="2" * 64),
    )
    node.follow(a_view(round=a_round(3, members=WIDE, checkpoint_name="c1"), checkpoints=commits))
    assert node.worker_pool.workers[3].checkpoint_digest == "1" * 64


def test_a_start_message_has_the_step_of_its_checkpoint(node: Node) -> None:
    checkpoint = replace(a_committed_checkpoint("c1"), is_snapshot=True, step=40)
    opened = replace(a_round(3, members=WIDE), checkpoint_name="c1")
    node.follow(a_view(round=opened, checkpoints=(checkpoint,)))
    assert {start.checkpoint_step for start in node.worker_pool.workers.values()} == {40}


def test_a_start_message_holds_the_failure_model(node: Node) -> None:
    market = MarketPrior(mean_lifetime_s=7200.0, notice_s=30.0)
    endings = LifetimeHistogram().with_end(600.0, saved_in_time=True)
    spec, round_ = a_spec(market_prior=market), a_round(3, members=WIDE)
    node.follow(a_view(spec=spec, round=round_, lifetimes=endings, group_age_s=50.0))
    assert node.worker_pool.workers[3].failure_model == FailureModel(
        market_prior=market, num_nodes=2, lifetimes=endings, group_age_s=50.0
    )


def test_snapshot_shards_are_sent_with_workers_stopped(
    working: Node,
) -> None:
    state = SnapshotId(round=3, step=9)
    working.worker_pool.snapshot_shards = (SnapshotShard(snapshot_id=state, rank=2, world_size=4),)
    working.worker_pool.kill_workers()
    assert working.poll_messages() == [
        WorkersStopped(round=3, snapshot_shards=working.worker_pool.snapshot_shards)
    ]
    assert working.participant.snapshot_shards == working.worker_pool.snapshot_shards
    both = [replace(one, peer_store_address=f"{one.host}:9") for one in WIDE]
    holders = ((an_agent_id(0),), (an_agent_id(1),))
    working.follow(
        a_view(round=a_round(4, members=both, memory_snapshot=state, shard_holders=holders))
    )
    start = working.worker_pool.workers[3]
    assert (start.memory_snapshot, start.peer_store_addresses) == (state, ("10.0.0.0:9", ""))
    assert start.replica_target == "10.0.0.0:9", "the next node of the ring stores replicas"


def test_replicas_go_to_another_peer_after_a_notice(node: Node) -> None:
    three = [replace(a_member(n), peer_store_address=f"v{n}:9") for n in (1, 0, 2)]
    round_ = a_round(4, members=three)
    node.follow(a_view(round=round_))
    (start,) = node.worker_pool.workers.values()
    assert (start.replica_target, node.worker_pool.replica_targets) == ("v0:9", [])
    leaving = {an_agent_id(0): a_notice()}
    node.follow(a_view(round=round_, notices=leaving))
    node.follow(a_view(round=round_, notices=leaving))
    assert node.worker_pool.replica_targets == ["v2:9"]
    node.follow(a_view(round=round_, notices={**leaving, an_agent_id(2): a_notice()}))
    assert node.worker_pool.replica_targets == ["v2:9", ""]


def test_a_confirmed_replica_is_sent_to_the_leader(working: Node) -> None:
    working.worker_pool.confirm_replica(2, 9, "10.0.0.0:9")
    assert working.poll_messages() == [
        SnapshotReplicated(round=3, rank=2, step=9, peer_store_address="10.0.0.0:9")
    ]


def test_a_round_is_entered_once(working: Node) -> None:
    working.follow(OPEN)
    for rank in (2, 3):
        working.worker_pool.end_worker(rank)
    working.poll_messages()
    working.follow(OPEN)
    assert working.worker_pool.rounds == [3]


@pytest.mark.parametrize(
    ("view", "leader_address"),
    [
        (CLOSED, LEADER_ADDRESS),
        (a_view(round=a_round(3, members=[a_member(0), a_member(2)])), LEADER_ADDRESS),
        (OPEN, None),
        (OPEN, "10.9.9.9:7000"),
        (replace(OPEN, leader=None), LEADER_ADDRESS),
        (replace(OPEN, leader=HEADLESS), None),
    ],
    ids=[
        "no open round",
        "not a member",
        "not connected",
        "another leader",
        "no leader",
        "headless leader",
    ],
)
def test_some_rounds_are_not_entered(node: Node, view: View, leader_address: str | None) -> None:
    node.follow(view, leader_address)
    assert node.worker_pool.rounds == []


def test_a_closed_round_stops_its_workers(working: Node) -> None:
    working.follow(CLOSED)
    assert not working.participant.has_workers
    assert working.poll_messages() == [WorkersStopped(round=3)]


def test_the_next_round_waits_for_the_workers_of_the_last(working: Node) -> None:
    working.worker_pool.survives_kill = True
    following = a_view(round=a_round(4, members=WIDE))
    working.follow(following)
    assert working.worker_pool.rounds == [3]
    working.worker_pool.survives_kill = False
    working.follow(following)
    assert working.poll_messages() == [WorkersStopped(round=3)]
    working.follow(following)
    assert working.worker_pool.rounds == [3, 4]


# --- uploads after the stop ----------------------------------------------------------------------


def test_uploads_after_the_stop_are_reported_until_drained(working: Node) -> None:
    working.worker_pool.uploading_round = 3
    working.follow(CLOSED)
    states = [working.poll_messages(), working.participant.uploading_round, working.poll_messages()]
    assert states == [[WorkersStopped(round=3, is_uploading=True)], 3, []]
    working.worker_pool.uploading_round = None
    states = [working.poll_messages(), working.participant.uploading_round, working.poll_messages()]
    assert states == [[UploadsDrained(round=3)], None, []]


def test_uploads_of_a_replaced_round_are_cancelled(working: Node) -> None:
    without_us = a_view(round=a_round(4, members=[a_member(0), a_member(2)]))
    working.worker_pool.uploading_round = 3
    seen = []
    for view in (OPEN, CLOSED, without_us):
        working.follow(view)
        seen.append(working.worker_pool.uploading_round)
    assert seen == [3, 3, None]


# --- messages of the leader ----------------------------------------------------------------------


def test_an_abort_stops_the_workers_before_the_journal_entry(working: Node) -> None:
    working.participant.abort_round(3)
    assert working.poll_messages() == [WorkersStopped(round=3)], (
        "exits of killed workers are not failures"
    )


def test_an_abort_after_the_stop_repeats_the_snapshot_shards(
    working: Node,
) -> None:
    working.worker_pool.snapshot_shards = (
        SnapshotShard(snapshot_id=SnapshotId(round=3, step=9), rank=2, world_size=4),
    )
    working.worker_pool.kill_workers()
    first = working.poll_messages()
    working.participant.abort_round(3)
    assert (
        working.sent_messages()
        == first
        == [WorkersStopped(round=3, snapshot_shards=working.worker_pool.snapshot_shards)]
    )


def test_an_aborted_round_is_never_entered(node: Node) -> None:
    node.participant.abort_round(3)
    assert node.sent_messages() == [WorkersStopped(round=3)]
    node.follow(OPEN)
    assert node.worker_pool.rounds == []


def test_frames_go_to_one_or_all_workers_of_their_round(working: Node) -> None:
    update = CommitConfirmed(checkpoint_name="c1", metrics={})
    working.participant.forward_to_workers(3, 2, update, OPEN)
    assert working.worker_pool.received == {2: [update], 3: []}
    working.participant.forward_to_workers(3, None, update, OPEN)
    assert working.worker_pool.received == {2: [update, update], 3: [update]}
    working.participant.forward_to_workers(2, None, update, OPEN)
    working.participant.forward_to_workers(3, 0, update, OPEN)
    assert working.worker_pool.received == {2: [update, update], 3: [update]}


# --- events of the workers -----------------------------------------------------------------------


def test_frames_are_forwarded_unchanged(working: Node) -> None:
    working.worker_pool.send_from_worker(2, FunctionStarted(), A_REPORT)
    (up,) = working.poll_messages()
    assert (up.round, up.rank) == (3, 2)
    assert decode_frames(up) == [FunctionStarted(), A_REPORT]


def test_an_exception_is_reported_and_stored(working: Node) -> None:
    working.worker_pool.send_from_worker(
        2, A_REPORT, WorkerRaised(traceback_text="Traceback", pickled_exception=b"pickle")
    )
    working.worker_pool.end_worker(2, "exited with code 1")
    messages = working.poll_messages()
    assert RankFailure(
        rank=2, kind="raised", message="Traceback", pickle_key=keys.failure(3, 2)
    ) in [one.failure for one in messages if isinstance(one, WorkerTerminated)]
    assert len([one for one in messages if isinstance(one, WorkerTerminated)]) == 1
    assert [decode_frames(one) for one in messages if isinstance(one, WorkerToLeader)] == [
        [A_REPORT]
    ]
    assert working.store.get(keys.failure(3, 2)) == fake_seal(keys.failure(3, 2), b"pickle")


def test_an_exception_that_could_not_be_pickled_has_no_key(working: Node) -> None:
    working.worker_pool.send_from_worker(2, WorkerRaised(traceback_text="Traceback"))
    assert working.poll_messages() == [
        WorkerTerminated(
            round=3, rank=2, failure=RankFailure(rank=2, kind="raised", message="Traceback")
        )
    ]


def test_a_setup_failure_is_reported_with_its_cause(working: Node) -> None:
    working.worker_pool.send_from_worker(
        2,
        WorkerRaised(traceback_text="no room", pickled_exception=b"", cause=FailureCause.PLATFORM),
    )
    working.worker_pool.send_from_worker(
        3,
        WorkerRaised(
            traceback_text="no such package",
            pickled_exception=b"",
            cause=FailureCause.WORKER,
            is_permanent=True,
        ),
    )
    assert [one.failure for one in working.poll_messages()] == [
        RankFailure(rank=2, kind="raised", message="no room", cause=FailureCause.PLATFORM),
        RankFailure(
            rank=3,
            kind="raised",
            message="no such package",
            cause=FailureCause.WORKER,
            is_permanent=True,
        ),
    ]


def test_a_broken_environment_is_stored_then_reported(node: Node) -> None:
    node.worker_pool.break_environment(
        WorkerRaised(
            traceback_text="no such package",
            pickled_exception=b"pickle",
            cause=FailureCause.WORKER,
            is_permanent=True,
        )
    )
    node.store.should_fail = lambda: True
    assert (node.poll_messages(), node.participant.node_failure) == ([], None)
    node.store.should_fail = lambda: False
    key = keys.agent_failure(an_agent_id(1))
    failure = RankFailure(
        rank=0,
        kind="raised",
        message="no such package",
        pickle_key=key,
        cause=FailureCause.WORKER,
        is_permanent=True,
    )
    assert node.poll_messages() == [NodeUnusable(failure=failure)]
    assert node.participant.node_failure == failure
    assert node.store.get(key) == fake_seal(key, b"pickle")


def test_the_result_of_rank_0_is_stored_before_it_is_reported() -> None:
    node = Node()
    node.follow(a_view(round=a_round(3, members=[a_member(1), a_member(0)])))
    node.worker_pool.send_from_worker(
        0, A_REPORT, WorkerReturned(report_count=1, pickled_value=b"result")
    )
    node.worker_pool.end_worker(0, clean=True)
    node.store.should_fail = lambda: True
    (up,) = node.poll_messages()
    assert decode_frames(up) == [A_REPORT]
    assert node.poll_messages() == []
    node.store.should_fail = lambda: False
    up, stopped = node.poll_messages()
    assert decode_frames(up) == [WorkerReturned(report_count=1)], (
        "the value is not sent in the message"
    )
    assert stopped == WorkersStopped(round=3)
    assert node.store.get(keys.result(3, 0)) == fake_seal(keys.result(3, 0), b"result")


def test_a_result_before_other_frames_is_stored_before_it_is_reported() -> None:
    node = Node()
    node.follow(a_view(round=a_round(3, members=[a_member(1), a_member(0)])))
    node.store.should_fail = lambda: True
    node.worker_pool.send_from_worker(
        0, WorkerReturned(report_count=0, pickled_value=b"result"), FunctionStarted()
    )
    (up,) = node.poll_messages()
    assert decode_frames(up) == [FunctionStarted()]


def test_a_long_traceback_is_shortened_in_the_middle(working: Node) -> None:
    text = "Traceback" + "x" * 1_000_000 + "ValueError: bad"
    working.worker_pool.send_from_worker(2, WorkerRaised(traceback_text=text))
    (terminated,) = working.poll_messages()
    message = terminated.failure.message
    assert len(message) < 51_000
    assert message.startswith("Traceback")
    assert message.endswith("ValueError: bad")
    assert "characters omitted" in message


def test_results_of_other_ranks_are_not_stored(working: Node) -> None:
    working.worker_pool.send_from_worker(2, WorkerReturned(report_count=0, pickled_value=b"value"))
    (up,) = working.poll_messages()
    assert decode_frames(up) == [WorkerReturned(report_count=0)]
    assert list(working.store.list()) == []


@pytest.mark.parametrize(
    ("how", "clean", "expected"),
    [
        ("was killed by SIGSEGV", False, "The worker of rank 2 was killed by SIGSEGV."),
        (
            "exited with code 0",
            True,
            "The worker of rank 2 exited with code 0 before its function had returned.",
        ),
    ],
)
def test_an_exit_without_message_is_a_failure(
    working: Node, how: str, clean: bool, expected: str
) -> None:
    working.worker_pool.end_worker(2, how, clean=clean)
    assert working.poll_messages() == [
        WorkerTerminated(
            round=3, rank=2, failure=RankFailure(rank=2, kind="died", message=expected)
        )
    ]


def test_an_exit_after_the_return_is_not_a_failure(working: Node) -> None:
    working.worker_pool.send_from_worker(2, WorkerReturned(report_count=0))
    working.worker_pool.end_worker(2, "was killed by SIGSEGV")
    (up,) = working.poll_messages()
    assert decode_frames(up) == [WorkerReturned(report_count=0)]


def test_a_killed_worker_is_not_a_failure(working: Node) -> None:
    working.participant.stop_workers()
    assert working.poll_messages() == [WorkersStopped(round=3)]


def test_an_exit_just_before_the_kill_is_a_failure(working: Node) -> None:
    working.worker_pool.end_worker(2, "was killed by SIGSEGV")
    working.participant.stop_workers()
    ended, stopped = working.poll_messages()
    assert ended.failure.message == "The worker of rank 2 was killed by SIGSEGV."
    assert stopped == WorkersStopped(round=3)


def test_workers_stopped_is_sent_after_the_last_exit(working: Node) -> None:
    working.worker_pool.send_from_worker(2, WorkerReturned(report_count=0))
    working.worker_pool.end_worker(2, clean=True)
    working.worker_pool.send_from_worker(3, WorkerReturned(report_count=0))
    assert WorkersStopped(round=3) not in working.poll_messages()
    working.worker_pool.end_worker(3, clean=True)
    assert working.poll_messages() == [WorkersStopped(round=3)]
    assert working.poll_messages() == []


A_RETURN = WorkerReturned(
    report_count=0, save_at_end=SaveAtEnd(step=7, saved_step=0, has_snapshot=True)
)
NAMED = CheckpointNamed(
    report_index=0, checkpoint_name="c", ranks=(2, 3), metrics=msgspec.Raw(b"{}"), at_end=True
)


def node_with_exited_workers() -> Node:
    """A node in round 3 whose workers have returned with a snapshot, and have exited."""
    node = Node()
    node.follow(OPEN)
    for rank in (2, 3):
        node.worker_pool.send_from_worker(rank, A_RETURN)
        node.worker_pool.end_worker(rank, clean=True)
    assert WorkersStopped(round=3) not in node.poll_messages()
    return node


def test_a_node_keeps_the_round_until_its_snapshots_at_the_end_are_uploaded() -> None:
    node = node_with_exited_workers()
    assert node.participant.has_workers
    node.participant.forward_to_workers(3, None, NAMED, OPEN)
    done = SaveCompleted(report_index=0, checkpoint_name="c")
    for rank in (2, 3):
        node.worker_pool.emit(WorkerFramesReceived(3, rank, [msgspec.Raw(encode(done))]))
    *frames, stopped = node.poll_messages()
    assert [decode_frames(one) for one in frames] == [[done], [done]]
    assert stopped == WorkersStopped(round=3)


def test_a_node_leaves_the_round_when_its_snapshots_at_the_end_are_discarded() -> None:
    node = node_with_exited_workers()
    node.participant.forward_to_workers(3, 2, DiscardSnapshotAtEnd(), OPEN)
    assert node.poll_messages() == []
    node.participant.forward_to_workers(3, 3, DiscardSnapshotAtEnd(), OPEN)
    assert node.poll_messages() == [WorkersStopped(round=3)]


def test_an_abort_does_not_wait_for_snapshots_at_the_end() -> None:
    node = node_with_exited_workers()
    node.participant.abort_round(3)
    assert node.poll_messages() == [WorkersStopped(round=3)]
