"""Simulated workers send the messages of production workers and keep the same state."""

import msgspec
import pytest

from spotfit.agent.ports import WorkerExited, WorkerFramesReceived
from spotfit.checkpoint.manifest import Manifest
from spotfit.core.codec import decoder, encode
from spotfit.ledger import keys
from spotfit.protocol.worker_agent import (
    CheckpointNamed,
    FilesReport,
    FromWorker,
    FunctionStarted,
    MetricsReport,
    PreemptionUpdate,
    RankZeroBroadcast,
    RankZeroBroadcastResult,
    SaveCompleted,
    StartWorker,
    WorkerRaised,
    WorkerReturned,
)
from spotfit.store.transfer import FileRecord
from spotfit_localsim.virtual.sim_network import SimNetwork
from spotfit_localsim.virtual.sim_snapshots import SimSavedState
from spotfit_localsim.virtual.sim_store import SimBucket
from spotfit_localsim.virtual.sim_workers import (
    SimWorkerPool,
    read_checkpoint_state,
)
from spotfit_localsim.virtual.workload import UserCrash, Workload
from tests.unit.localsim.sim_harness import SimHarness

FRAMES: msgspec.json.Decoder[FromWorker] = decoder(FromWorker)  # type: ignore[arg-type]


class WorkerHarness:
    """A worker context with one worker pool per machine."""

    def __init__(self, workload: Workload, machines: int = 1) -> None:
        self.sim = SimHarness()
        self.bucket = SimBucket()
        self.violations = self.sim.violations
        self.network = SimNetwork(self.sim.engine, self.sim.rng.stream("network"))
        self.context = self.sim.create_worker_context(self.network, self.bucket, workload)
        self.training = self.context.training
        names = [f"a{n}" for n in range(machines)]
        self.pools = [SimWorkerPool(self.context, self.sim.idle(name)) for name in names]

    def start(
        self, world_size: int, *, round_: int = 1, checkpoint: SimSavedState | None = None
    ) -> None:
        """Start one worker per machine."""
        for rank, pool in enumerate(self.pools):
            pool.start([make_start(rank, world_size, round_, checkpoint)])

    def advance(self, seconds: float) -> None:
        self.sim.engine.schedule_at(self.sim.engine.now + seconds, lambda: None)
        self.sim.engine.run(until=self.sim.engine.now + seconds)

    def drain_messages(self, rank: int = 0) -> list[FromWorker]:
        events = self.pools[rank].drain_events()
        raw = [
            frame
            for event in events
            if isinstance(event, WorkerFramesReceived)
            for frame in event.frames
        ]
        self.exits = [event for event in events if isinstance(event, WorkerExited)]
        return [FRAMES.decode(frame) for frame in raw]


def make_start(
    rank: int, world_size: int, round_: int, checkpoint: SimSavedState | None
) -> StartWorker:
    return StartWorker(
        run_id="r",
        run_name="run",
        round=round_,
        rank=rank,
        local_rank=0,
        world_size=world_size,
        local_world_size=1,
        node_rank=rank,
        host="",
        storage_url="",
        framework="none",
        framework_options={},
        code_bundle={},
        checkpoint="kept" if checkpoint else None,
        checkpoint_metrics={"step": checkpoint.step} if checkpoint else None,
    )


def write_checkpoint(
    bucket: SimBucket, state: SimSavedState, *, ranks: tuple[int, ...] = (0,)
) -> None:
    for rank in ranks:
        body = encode(state)
        file = FileRecord(f"state-{rank}.json", len(body), "")
        part = Manifest(
            name="kept",
            round=1,
            report_index=0,
            rank=rank,
            ranks=ranks,
            metrics={"step": state.step},
            files=(file,),
        )
        bucket.write("test", f"kept/{file.name}", body)
        bucket.write("test", keys.manifest("kept", 1, rank), encode(part))


def test_worker_runs_reports_returns_and_exits() -> None:
    harness = WorkerHarness(Workload(steps=4, report_every=2, save_every=0))
    harness.start(1)
    harness.advance(60.0)
    messages = harness.drain_messages()
    assert [type(frame) for frame in messages] == [
        FunctionStarted,
        MetricsReport,
        MetricsReport,
        WorkerReturned,
    ]
    assert messages[-1] == WorkerReturned(
        report_count=2, pickled_value=harness.training.reference.state_at(4).link.encode()
    )
    assert harness.exits == [WorkerExited(1, 0, "exited with code 0", is_clean=True)]
    assert not harness.pools[0].has_workers
    assert harness.training.reported_progress == {(1, 0): 0.5, (1, 1): 1.0}


def test_checkpoint_is_named_written_and_reported_as_saved() -> None:
    harness = WorkerHarness(Workload(steps=2, report_every=0, save_every=1, uses_barriers=True))
    harness.start(1)
    harness.advance(30.0)
    assert [type(frame) for frame in harness.drain_messages()] == [
        FunctionStarted,
        RankZeroBroadcast,
    ]
    harness.pools[0].send(0, RankZeroBroadcastResult(kind="barrier", seq=0))
    harness.advance(30.0)
    (files,) = harness.drain_messages()
    assert isinstance(files, FilesReport)
    harness.pools[0].send(
        0,
        CheckpointNamed(report_index=0, checkpoint_name="first", ranks=(0,), metrics=files.metrics),
    )
    harness.advance(30.0)
    messages = harness.drain_messages()
    assert isinstance(messages[0], SaveCompleted)
    found = read_checkpoint_state(harness.bucket.objects, "first")
    assert found == SimSavedState(1, harness.training.reference.state_at(1).link)


def test_workers_resume_from_their_checkpoint() -> None:
    harness = WorkerHarness(Workload(steps=4, save_every=0))
    state = harness.training.reference.state_at(3)
    write_checkpoint(harness.bucket, SimSavedState(state.step, state.link))
    harness.start(1, checkpoint=SimSavedState(3, state.link))
    harness.advance(60.0)
    assert harness.drain_messages()[-1] == WorkerReturned(
        report_count=1, pickled_value=harness.training.reference.state_at(4).link.encode()
    )
    assert harness.training.executed_steps == 1


@pytest.mark.parametrize("missing_key", ["kept/state-1.json", keys.manifest("kept", 1, 1)])
def test_missing_object_of_a_checkpoint_is_a_violation(missing_key: str) -> None:
    harness = WorkerHarness(Workload(steps=4))
    write_checkpoint(harness.bucket, SimSavedState(3, "link"), ranks=(0, 1))
    harness.bucket.remove("other", missing_key)
    harness.start(1, checkpoint=SimSavedState(3, "link"))
    harness.advance(60.0)
    assert harness.violations


def test_ranks_step_together_and_a_failed_rank_causes_errors_of_its_peers() -> None:
    workload = Workload(
        steps=9,
        save_every=0,
        report_every=0,
        peer_error_probability=1.0,
        crashes=(UserCrash(3, 1),),
    )
    harness = WorkerHarness(workload, machines=2)
    harness.start(2)
    harness.advance(60.0)
    assert [type(frame) for frame in harness.drain_messages(1)] == [FunctionStarted, WorkerRaised]
    peer_error = harness.drain_messages(0)[-1]
    assert isinstance(peer_error, WorkerRaised)
    assert "peer" in peer_error.traceback_text
    assert harness.training.max_step == 2 or harness.training.max_step == 3


def test_worker_that_is_killed_by_a_signal_sends_no_exception() -> None:
    harness = WorkerHarness(
        Workload(steps=9, save_every=0, crashes=(UserCrash(3, 0, kind="dies"),))
    )
    harness.start(1)
    harness.advance(60.0)
    assert not any(isinstance(frame, WorkerRaised) for frame in harness.drain_messages())
    assert [event.description for event in harness.exits] == ["was killed by SIGSEGV"]
    assert not harness.exits[0].killed_by_agent


def test_killed_worker_exits_as_requested() -> None:
    harness = WorkerHarness(Workload(steps=1000))
    harness.start(1)
    harness.advance(5.0)
    harness.pools[0].kill_workers()
    harness.pools[0].kill_workers()
    harness.advance(5.0)
    harness.drain_messages()
    assert [(event.is_clean, event.killed_by_agent) for event in harness.exits] == [(False, True)]


def test_all_ranks_save_the_same_step_after_a_notice_to_one_rank() -> None:
    harness = WorkerHarness(Workload(steps=50, save_every=0, report_every=0), machines=2)
    harness.start(2)
    harness.advance(5.0)
    harness.pools[1].send(1, PreemptionUpdate(deadline_ms=0, node_to_ranks={"t/1": (1,)}))
    harness.advance(5.0)
    files = [harness.drain_messages(rank)[-1] for rank in (0, 1)]
    assert all(isinstance(frame, FilesReport) for frame in files)
    assert files[0] == files[1]


def test_terminated_machine_emits_no_events() -> None:
    harness = WorkerHarness(Workload(steps=50, peer_error_probability=1.0), machines=2)
    harness.start(2)
    harness.advance(5.0)
    harness.pools[1].close(closes_connections=False)
    harness.drain_messages(1)
    harness.advance(60.0)
    assert harness.drain_messages(1) == []
    assert not any(isinstance(frame, WorkerRaised) for frame in harness.drain_messages(0))
