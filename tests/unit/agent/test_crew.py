"""What workers find, and what is told when their luggage cannot be opened."""

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from spotfit.agent.crew import LiveCrew
from spotfit.agent.logs import LogShipper
from spotfit.agent.loop import Loop
from spotfit.agent.ports import CrewEvent, Exited, Said
from spotfit.agent.zygote import ZygoteKeeper, variables_for
from spotfit.core.ids import AgentId, RunId
from spotfit.model.spec import RunSpec
from spotfit.model.wire import Committed, Start
from spotfit.ship.sign import RunKey
from spotfit.store.memory import MemoryStore
from spotfit.store.url import RootUrl
from tests.unit.agent.wires import Skipping, turns_until

SECRET = RunKey(b"s" * 32).to_text()
NO_LUGGAGE = {"sha256": "0" * 64, "size_bytes": 1, "function": "train"}


def test_several_workers_share_the_processors_and_one_takes_them_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert variables_for(1, {}) == {}
    assert variables_for(4, {"A": "b"}) == {"OMP_NUM_THREADS": "1", "A": "b"}
    assert variables_for(4, {"OMP_NUM_THREADS": "3"}) == {"OMP_NUM_THREADS": "3"}
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert variables_for(4, {}) == {}


@pytest.fixture
def crew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveCrew]:
    monkeypatch.setenv("SPOTFIT_FORK", "never")
    loop, keeper = Loop(Skipping()), ZygoteKeeper()
    store = MemoryStore(RootUrl.parse("memory://crew"))
    logs = LogShipper(store, AgentId("a"), wall_ms=lambda: 0, clock=loop.clock, pause_s=0)
    crew = LiveCrew(
        loop, keeper, store=store, secret=SECRET, logs=logs, scratch=str(tmp_path), slots=1
    )
    yield crew
    crew.close()
    turns_until(loop, lambda: crew.left == 0)
    logs.close()
    loop.close()


def a_start(rank: int) -> Start:
    plain = {
        "run_id": "r",
        "run_name": "n",
        "round": 3,
        "rank": rank,
        "local_rank": rank,
        "world_size": 2,
        "local_world_size": 2,
        "node_rank": 0,
        "host": "127.0.0.1",
        "storage_url": "memory://crew",
        "framework": "none",
        "framework_options": {},
        "luggage": NO_LUGGAGE,
    }
    return msgspec.convert(plain, Start)


def spec() -> RunSpec:
    return RunSpec(RunId("r"), "n", "f", 2, 2, luggage=NO_LUGGAGE, storage_url="memory://crew")


def events_of(crew: LiveCrew, count: int) -> list[CrewEvent]:
    came: list[CrewEvent] = []
    turns_until(crew._loop, lambda: len(came.__iadd__(crew.events())) >= count)
    return came


def test_luggage_that_cannot_be_had_is_told_by_every_rank(crew: LiveCrew) -> None:
    crew.prepare(spec())
    crew.start([a_start(0), a_start(1)])
    assert crew.busy
    events = events_of(crew, 4)
    said = [event for event in events if isinstance(event, Said)]
    assert [event.rank for event in said] == [0, 1]
    assert all(json.loads(bytes(event.frames[0]))["type"] == "raised" for event in said)
    assert [event.rank for event in events if isinstance(event, Exited)] == [0, 1]
    assert not crew.busy


def test_who_is_halted_before_birth_is_told_as_gone(crew: LiveCrew) -> None:
    crew.start([a_start(0)])
    crew.send(0, Committed("c", {}))
    crew.send(7, Committed("c", {}))
    crew.halt()
    assert crew.events() == [Exited(3, 0, "was killed by SIGKILL", clean=False, ordered=True)]
    assert not crew.busy
