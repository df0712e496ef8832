"""What workers find, and what is told when their luggage cannot be opened."""

import json
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from spotfit.agent.carrier import Order
from spotfit.agent.crew import LiveCrew
from spotfit.agent.logs import LogShipper
from spotfit.agent.loop import Loop
from spotfit.agent.ports import CrewEvent, Exited, Said, Spoiled, Unheard
from spotfit.agent.zygote import Breed, ZygoteKeeper, variables_for
from spotfit.core.codec import decoder, encode
from spotfit.core.errors import MachineError, TransientStoreError
from spotfit.core.ids import AgentId, RunId
from spotfit.model.carrier import Lost
from spotfit.model.events import Blame
from spotfit.model.spec import RunSpec, Vigil
from spotfit.model.wire import Alive, Carry, Committed, Raised, Running, Start, TakenBack
from spotfit.ship.environment import RuntimeEnv
from spotfit.ship.luggage import Luggage, pack
from spotfit.ship.sign import RunKey
from spotfit.store.memory import MemoryStore
from spotfit.store.url import RootUrl
from spotfit.testing.builders import RUN
from tests.unit.agent.wires import Skipping, turns_until

KEY = RunKey(b"s" * 32, RUN)
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


class Sulking(MemoryStore):
    """Counts who asks, and answers nobody while it sulks."""

    def __init__(self) -> None:
        super().__init__(RootUrl.parse("memory://crew"))
        self.sulks = False
        self.asked = 0

    def get(self, key: str) -> bytes:
        self.asked += 1
        if self.sulks:
            raise TransientStoreError("it sulks")
        return super().get(key)


@pytest.fixture
def store() -> Sulking:
    return Sulking()


def test_workers_find_the_credentials_of_their_own_run_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPOTFIT_STORAGE_KEYS", "of this run")
    breed = Breed.of("none", sys.executable, variables_for(1, {}))
    monkeypatch.setenv("SPOTFIT_STORAGE_KEYS", "of the next")
    assert breed.environment()["SPOTFIT_STORAGE_KEYS"] == "of this run"
    other = Breed.of("none", sys.executable, {})
    assert "SPOTFIT_STORAGE_KEYS" not in other.environment()
    assert breed != Breed.of("none", sys.executable, variables_for(1, {})), "no zygote for both"


@pytest.fixture
def crew(tmp_path: Path, store: Sulking, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveCrew]:
    monkeypatch.setenv("SPOTFIT_FORK", "never")
    with a_crew(store, tmp_path) as crew:
        yield crew


@contextmanager
def a_crew(store: Sulking, scratch: Path) -> Iterator[LiveCrew]:
    loop, keeper = Loop(Skipping()), ZygoteKeeper()
    logs = LogShipper(store, AgentId("a"), wall_ms=lambda: 0, clock=loop.clock, pause_s=0)
    crew = LiveCrew(loop, keeper, store=store, key=KEY, logs=logs, scratch=str(scratch), slots=1)
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


def spec(luggage: Luggage | None = None) -> RunSpec:
    plain = NO_LUGGAGE if luggage is None else msgspec.to_builtins(luggage)
    return RunSpec(RunId("r"), "n", "f", 2, 2, luggage=plain, storage_url="memory://crew")


def events_of(crew: LiveCrew, count: int) -> list[CrewEvent]:
    came: list[CrewEvent] = []
    turns_until(crew._loop, lambda: len(came.__iadd__(crew.events())) >= count)
    return came


def test_luggage_that_cannot_be_had_is_told_by_every_rank(crew: LiveCrew) -> None:
    crew.prepare(spec())
    crew.start([a_start(0), a_start(1)])
    assert crew.busy
    events = events_of(crew, 5)
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


# --- how they are --------------------------------------------------------------------------------


def test_a_sign_of_life_is_for_the_crew_alone(crew: LiveCrew) -> None:
    crew._hear(3, 0, [encode(Alive()), encode(Running())])
    crew._hear(3, 0, [encode(Alive())])
    assert crew.events() == [Said(3, 0, [msgspec.Raw(encode(Running()))])]


def test_what_is_taken_back_is_for_the_crew_alone(
    crew: LiveCrew, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[int] = []
    monkeypatch.setattr(crew._snapshots, "take_back", heard.append)
    crew._hear(3, 0, [encode(TakenBack(6))])
    assert heard == [6]
    assert crew.events() == []


def test_a_worker_that_falls_silent_is_missed_until_it_is_heard_again(crew: LiveCrew) -> None:
    crew.prepare(msgspec.structs.replace(spec(), vigil=Vigil(silent_s=40.0)))
    crew._round = 3
    crew._hear(3, 1, [encode(Alive())])
    clock = crew._loop.clock
    assert isinstance(clock, Skipping)
    missed: list[Unheard] = []

    def look() -> bool:
        clock.skipped += 5.0
        missed.extend(event for event in crew.events() if isinstance(event, Unheard))
        return bool(missed)

    turns_until(crew._loop, look)
    assert (missed[0].round, missed[0].rank) == (3, 1)
    assert missed[0].silent_s > 40.0
    crew._hear(3, 1, [encode(Alive())])
    assert [one for one in crew.events() if isinstance(one, Unheard)] == [Unheard(3, 1, 0.0)]


@pytest.mark.parametrize("is_snapshot", [True, False])
def test_what_is_lost_of_a_worker_that_is_gone_is_told_to_who_watches_the_run(
    crew: LiveCrew, monkeypatch: pytest.MonkeyPatch, *, is_snapshot: bool
) -> None:
    lines: list[tuple[Any, ...]] = []
    monkeypatch.setattr(crew._logs, "line", lambda *line: lines.append(line))
    order = Order(3, 1, Carry(0, "c7", b""), is_snapshot)
    crew._note_carried(order, Lost(1, "Traceback\n  …\nthe bucket is gone\n"))
    ((*whose, text),) = lines
    assert whose == [3, 1, "err"]
    assert text.startswith("[spotfit] c7 is no checkpoint")
    assert text.endswith("the bucket is gone")


def test_without_workers_there_is_nothing_to_examine(crew: LiveCrew) -> None:
    crew.examine(7)
    assert crew.events() == []


# --- whose fault it is ---------------------------------------------------------------------------


def failure_in(crew: LiveCrew, rank: int = 0) -> Raised:
    """What is told of a worker that could not even be started."""
    crew.start([a_start(rank)])
    events: list[CrewEvent] = []
    turns_until(crew._loop, lambda: not crew.busy and bool(events.__iadd__(crew.events())))
    (said,) = [event for event in events if isinstance(event, Said)]
    return decoder(Raised).decode(said.frames[0])


def test_a_machine_on_which_nothing_can_ever_start_says_so_before_anything_is_started(
    crew: LiveCrew, store: Sulking
) -> None:
    store.sulks = True
    crew.prepare(spec())
    turns_until(crew._loop, lambda: not crew._unpacking)
    assert crew.events() == [], "that may pass"
    store.sulks = False
    crew.prepare(spec())
    (spoiled,) = events_of(crew, 1)
    assert isinstance(spoiled, Spoiled)
    assert (spoiled.raised.blame, spoiled.raised.final) == (Blame.WORKER, True)
    assert spoiled.raised == failure_in(crew), "as each worker would say"


def test_a_bucket_that_does_not_answer_is_asked_again_with_the_next_round(
    crew: LiveCrew, store: Sulking
) -> None:
    store.sulks = True
    crew.prepare(spec())
    first = failure_in(crew)
    assert (first.blame, first.final) == (Blame.PLATFORM, False)
    assert "it sulks" in first.told
    assert failure_in(crew).blame is Blame.PLATFORM
    store.sulks = False
    assert (failure_in(crew).blame, store.asked >= 3) == (Blame.WORKER, True), "it has none"


def test_luggage_that_is_not_there_is_not_asked_for_again(crew: LiveCrew, store: Sulking) -> None:
    crew.prepare(spec())
    first = failure_in(crew)
    assert (first.blame, first.final) == (Blame.WORKER, True)
    asked = store.asked
    assert failure_in(crew) == first
    assert store.asked == asked


def packed(store: Sulking) -> Luggage:
    return pack(lambda: 7, None, runtime_env=RuntimeEnv(), key=KEY, store=store)


def test_a_disk_without_room_is_the_machines_fault(
    tmp_path: Path, store: Sulking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOTFIT_FORK", "never")
    in_the_way = tmp_path / "scratch"
    in_the_way.write_text("")  # as good as full: nothing can be written below it
    with a_crew(store, in_the_way) as crew:
        crew.prepare(spec(packed(store)))
        told = failure_in(crew)
        assert (told.blame, told.final) == (Blame.PLATFORM, False)
        assert "could not unpack the run's luggage" in told.told
        assert "disk has room" in told.told
        in_the_way.unlink()
        crew.start([a_start(0)])
        turns_until(crew._loop, lambda: crew._breed is not None)


def test_so_is_a_process_that_cannot_be_started(crew: LiveCrew) -> None:
    crew._breed = Breed("none", "/no/such/python")
    told = failure_in(crew)
    assert (told.blame, told.final) == (Blame.PLATFORM, False)
    assert "This node could not start a process" in told.told
    assert isinstance(pickle.loads(told.value), MachineError)


def test_callbacks_that_cannot_be_started_are_told_why(crew: LiveCrew) -> None:
    crew._breed = Breed("none", "/no/such/python")
    ends: list[str] = []
    crew.beside("audience", lambda _frames: None, lambda how, _clean: ends.append(how))
    turns_until(crew._loop, lambda: bool(ends))
    assert ends[0].startswith("could not be started: This node could not start a process")
