"""Pretend workers say the real words, and lose nothing that the real ones would keep."""

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


class Stage:
    """A context with crews, one a machine."""

    def __init__(self, load: Workload, machines: int = 1) -> None:
        self.ground = SimHarness()
        self.bucket = SimBucket()
        self.complaints = self.ground.violations
        self.fabric = SimNetwork(self.ground.engine, self.ground.rng.stream("wire"))
        self.context = self.ground.create_worker_context(self.fabric, self.bucket, load)
        self.training = self.context.training
        names = [f"a{n}" for n in range(machines)]
        self.crews = [SimWorkerPool(self.context, self.ground.idle(name)) for name in names]

    def start(
        self, world_size: int, *, round_: int = 1, checkpoint: SimSavedState | None = None
    ) -> None:
        """One worker a machine."""
        for rank, crew in enumerate(self.crews):
            crew.start([a_start(rank, world_size, round_, checkpoint)])

    def rest(self, seconds: float) -> None:
        self.ground.engine.schedule_at(self.ground.engine.now + seconds, lambda: None)
        self.ground.engine.run(until=self.ground.engine.now + seconds)

    def said(self, rank: int = 0) -> list[FromWorker]:
        events = self.crews[rank].drain_events()
        raw = [
            frame
            for event in events
            if isinstance(event, WorkerFramesReceived)
            for frame in event.frames
        ]
        self.exits = [event for event in events if isinstance(event, WorkerExited)]
        return [FRAMES.decode(frame) for frame in raw]


def a_start(
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


def keep(bucket: SimBucket, state: SimSavedState, *, ranks: tuple[int, ...] = (0,)) -> None:
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


def test_a_worker_runs_reports_returns_and_exits() -> None:
    stage = Stage(Workload(steps=4, report_every=2, save_every=0))
    stage.start(1)
    stage.rest(60.0)
    said = stage.said()
    assert [type(frame) for frame in said] == [
        FunctionStarted,
        MetricsReport,
        MetricsReport,
        WorkerReturned,
    ]
    assert said[-1] == WorkerReturned(
        report_count=2, pickled_value=stage.training.expected_result.link.encode()
    )
    assert stage.exits == [WorkerExited(1, 0, "exited with code 0", is_clean=True)]
    assert not stage.crews[0].has_workers


def test_a_checkpoint_is_named_then_written_then_said_to_be_saved() -> None:
    stage = Stage(Workload(steps=2, report_every=0, save_every=1, uses_barriers=True))
    stage.start(1)
    stage.rest(30.0)
    assert [type(frame) for frame in stage.said()] == [FunctionStarted, RankZeroBroadcast]
    stage.crews[0].send(0, RankZeroBroadcastResult(kind="barrier", seq=0))
    stage.rest(30.0)
    (files,) = stage.said()
    assert isinstance(files, FilesReport)
    stage.crews[0].send(
        0,
        CheckpointNamed(report_index=0, checkpoint_name="first", ranks=(0,), metrics=files.metrics),
    )
    stage.rest(30.0)
    said = stage.said()
    assert isinstance(said[0], SaveCompleted)
    found = read_checkpoint_state(stage.bucket.objects, "first")
    assert found == SimSavedState(1, stage.training.reference.state_at(1).link)


def test_workers_go_on_from_their_checkpoint() -> None:
    stage = Stage(Workload(steps=4, save_every=0))
    state = stage.training.reference.state_at(3)
    keep(stage.bucket, SimSavedState(state.step, state.link))
    stage.start(1, checkpoint=SimSavedState(3, state.link))
    stage.rest(60.0)
    assert stage.said()[-1] == WorkerReturned(
        report_count=1, pickled_value=stage.training.expected_result.link.encode()
    )
    assert stage.training.executed_steps == 1


@pytest.mark.parametrize("gone", ["kept/state-1.json", keys.manifest("kept", 1, 1)])
def test_a_lost_part_of_a_checkpoint_does_not_go_unnoticed(gone: str) -> None:
    stage = Stage(Workload(steps=4))
    keep(stage.bucket, SimSavedState(3, "link"), ranks=(0, 1))
    stage.bucket.remove("somebody", gone)
    stage.start(1, checkpoint=SimSavedState(3, "link"))
    stage.rest(60.0)
    assert stage.complaints


def test_ranks_step_together_and_one_that_fails_takes_the_others_along() -> None:
    load = Workload(
        steps=9,
        save_every=0,
        report_every=0,
        peer_error_probability=1.0,
        crashes=(UserCrash(3, 1),),
    )
    stage = Stage(load, machines=2)
    stage.start(2)
    stage.rest(60.0)
    assert [type(frame) for frame in stage.said(1)] == [FunctionStarted, WorkerRaised]
    echo = stage.said(0)[-1]
    assert isinstance(echo, WorkerRaised)
    assert "peer" in echo.traceback_text
    assert stage.training.max_step == 2 or stage.training.max_step == 3


def test_a_worker_that_dies_says_nothing() -> None:
    stage = Stage(Workload(steps=9, save_every=0, crashes=(UserCrash(3, 0, kind="dies"),)))
    stage.start(1)
    stage.rest(60.0)
    assert not any(isinstance(frame, WorkerRaised) for frame in stage.said())
    assert [event.description for event in stage.exits] == ["was killed by SIGSEGV"]
    assert not stage.exits[0].killed_by_agent


def test_killed_worker_exits_as_requested() -> None:
    stage = Stage(Workload(steps=1000))
    stage.start(1)
    stage.rest(5.0)
    stage.crews[0].kill_workers()
    stage.crews[0].kill_workers()
    stage.rest(5.0)
    stage.said()
    assert [(event.is_clean, event.killed_by_agent) for event in stage.exits] == [(False, True)]


def test_all_ranks_save_in_the_same_step_after_a_notice_one_of_them_heard() -> None:
    stage = Stage(Workload(steps=50, save_every=0, report_every=0), machines=2)
    stage.start(2)
    stage.rest(5.0)
    stage.crews[1].send(1, PreemptionUpdate(deadline_ms=0, node_to_ranks={"t/1": (1,)}))
    stage.rest(5.0)
    files = [stage.said(rank)[-1] for rank in (0, 1)]
    assert all(isinstance(frame, FilesReport) for frame in files)
    assert files[0] == files[1]


def test_terminated_machine_emits_no_events() -> None:
    stage = Stage(Workload(steps=50, peer_error_probability=1.0), machines=2)
    stage.start(2)
    stage.rest(5.0)
    stage.crews[1].close(closes_connections=False)
    stage.said(1)
    stage.rest(60.0)
    assert stage.said(1) == []
    assert not any(isinstance(frame, WorkerRaised) for frame in stage.said(0))
