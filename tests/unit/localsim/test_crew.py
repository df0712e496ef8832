"""Pretend workers say the real words, and lose nothing that the real ones would keep."""

import msgspec
import pytest

from spotfit.agent.ports import Exited, Said
from spotfit.checkpoint.manifest import Manifest
from spotfit.core.codec import decoder, encode
from spotfit.ledger import keys
from spotfit.model.wire import (
    Files,
    FromWorker,
    Gather,
    Gathered,
    Named,
    Preempted,
    Raised,
    Report,
    Returned,
    Running,
    Saved,
    Start,
)
from spotfit.store.transfer import FileRecord
from spotfit_localsim.bucket import Bucket
from spotfit_localsim.crew import SimCrew, Theatre, restored
from spotfit_localsim.net import Fabric
from spotfit_localsim.saves import Kept
from spotfit_localsim.workload import Crash, Training, Workload
from tests.unit.localsim.ground import Ground

FRAMES: msgspec.json.Decoder[FromWorker] = decoder(FromWorker)  # type: ignore[arg-type]


class Stage:
    """A theatre with crews, one a machine."""

    def __init__(self, load: Workload, machines: int = 1) -> None:
        self.ground = Ground()
        self.bucket = Bucket()
        self.complaints: list[str] = []
        self.training = Training(load)
        self.fabric = Fabric(self.ground.engine, self.ground.dice.stream("wire"))
        self.theatre = Theatre(
            self.ground.engine,
            self.fabric,
            self.bucket,
            self.training,
            self.ground.dice.stream("workers"),
            self.complaints.append,
            self.ground.say,
            lambda _: True,
            lambda: None,
        )
        names = [f"a{n}" for n in range(machines)]
        self.crews = [SimCrew(self.theatre, self.ground.idle(name)) for name in names]

    def start(self, world_size: int, *, round_: int = 1, checkpoint: Kept | None = None) -> None:
        """One worker a machine."""
        for rank, crew in enumerate(self.crews):
            crew.start([a_start(rank, world_size, round_, checkpoint)])

    def rest(self, seconds: float) -> None:
        self.ground.engine.at(self.ground.engine.now + seconds, lambda: None)
        self.ground.engine.run(until=self.ground.engine.now + seconds)

    def said(self, rank: int = 0) -> list[FromWorker]:
        events = self.crews[rank].events()
        raw = [frame for event in events if isinstance(event, Said) for frame in event.frames]
        self.exits = [event for event in events if isinstance(event, Exited)]
        return [FRAMES.decode(frame) for frame in raw]


def a_start(rank: int, world_size: int, round_: int, checkpoint: Kept | None) -> Start:
    return Start(
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
        luggage={},
        checkpoint="kept" if checkpoint else None,
        checkpoint_metrics={"step": checkpoint.step} if checkpoint else None,
    )


def keep(bucket: Bucket, state: Kept, *, ranks: tuple[int, ...] = (0,)) -> None:
    for rank in ranks:
        body = encode(state)
        file = FileRecord(f"state-{rank}.json", len(body), "")
        part = Manifest("kept", 1, 0, rank, ranks, {"step": state.step}, (file,))
        bucket.write("test", f"kept/{file.name}", body)
        bucket.write("test", keys.manifest("kept", 1, rank), encode(part))


def test_a_worker_runs_reports_returns_and_exits() -> None:
    stage = Stage(Workload(steps=4, report_every=2, save_every=0))
    stage.start(1)
    stage.rest(60.0)
    said = stage.said()
    assert [type(frame) for frame in said] == [Running, Report, Report, Returned]
    assert said[-1] == Returned(2, stage.training.result.link.encode())
    assert stage.exits == [Exited(1, 0, "exited with code 0", clean=True)]
    assert not stage.crews[0].busy


def test_a_checkpoint_is_named_then_written_then_said_to_be_saved() -> None:
    stage = Stage(Workload(steps=2, report_every=0, save_every=1, barriers=True))
    stage.start(1)
    stage.rest(30.0)
    assert [type(frame) for frame in stage.said()] == [Running, Gather]
    stage.crews[0].send(0, Gathered("barrier", 0))
    stage.rest(30.0)
    (files,) = stage.said()
    assert isinstance(files, Files)
    stage.crews[0].send(0, Named(0, "first", (0,), files.metrics))
    stage.rest(30.0)
    said = stage.said()
    assert isinstance(said[0], Saved)
    found = restored(stage.bucket.objects, "first")
    assert found == Kept(1, stage.training.chain.at(1).link)


def test_workers_go_on_from_their_checkpoint() -> None:
    stage = Stage(Workload(steps=4, save_every=0))
    state = stage.training.chain.at(3)
    keep(stage.bucket, Kept(state.step, state.link))
    stage.start(1, checkpoint=Kept(3, state.link))
    stage.rest(60.0)
    assert stage.said()[-1] == Returned(1, stage.training.result.link.encode())
    assert stage.training.steps_done == 1


@pytest.mark.parametrize("gone", ["kept/state-1.json", keys.manifest("kept", 1, 1)])
def test_a_lost_part_of_a_checkpoint_does_not_go_unnoticed(gone: str) -> None:
    stage = Stage(Workload(steps=4))
    keep(stage.bucket, Kept(3, "link"), ranks=(0, 1))
    stage.bucket.remove("somebody", gone)
    stage.start(1, checkpoint=Kept(3, "link"))
    stage.rest(60.0)
    assert stage.complaints


def test_ranks_step_together_and_one_that_fails_takes_the_others_along() -> None:
    load = Workload(steps=9, save_every=0, report_every=0, peers_raise=1.0, crashes=(Crash(3, 1),))
    stage = Stage(load, machines=2)
    stage.start(2)
    stage.rest(60.0)
    assert [type(frame) for frame in stage.said(1)] == [Running, Raised]
    echo = stage.said(0)[-1]
    assert isinstance(echo, Raised)
    assert "peer" in echo.told
    assert stage.training.furthest == 2 or stage.training.furthest == 3


def test_a_worker_that_dies_says_nothing() -> None:
    stage = Stage(Workload(steps=9, save_every=0, crashes=(Crash(3, 0, how="dies"),)))
    stage.start(1)
    stage.rest(60.0)
    assert not any(isinstance(frame, Raised) for frame in stage.said())
    assert [event.how for event in stage.exits] == ["was killed by SIGSEGV"]
    assert not stage.exits[0].ordered


def test_who_is_halted_ends_by_order() -> None:
    stage = Stage(Workload(steps=1000))
    stage.start(1)
    stage.rest(5.0)
    stage.crews[0].halt()
    stage.crews[0].halt()
    stage.rest(5.0)
    stage.said()
    assert [(event.clean, event.ordered) for event in stage.exits] == [(False, True)]


def test_all_ranks_save_in_the_same_step_after_a_notice_one_of_them_heard() -> None:
    stage = Stage(Workload(steps=50, save_every=0, report_every=0), machines=2)
    stage.start(2)
    stage.rest(5.0)
    stage.crews[1].send(1, Preempted(0, {"t/1": (1,)}))
    stage.rest(5.0)
    files = [stage.said(rank)[-1] for rank in (0, 1)]
    assert all(isinstance(frame, Files) for frame in files)
    assert files[0] == files[1]


def test_on_a_machine_that_is_gone_nobody_says_anything_more() -> None:
    stage = Stage(Workload(steps=50, peers_raise=1.0), machines=2)
    stage.start(2)
    stage.rest(5.0)
    stage.crews[1].close(told=False)
    stage.said(1)
    stage.rest(60.0)
    assert stage.said(1) == []
    assert not any(isinstance(frame, Raised) for frame in stage.said(0))
