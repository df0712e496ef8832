"""Pretend workers that speak the real frames, step together, save, fail and are killed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from spotfit.agent.carrier import Order
from spotfit.agent.ports import CopyKept, CrewEvent, Examined, Exited, Said, Unheard
from spotfit.checkpoint.manifest import Manifest, newest_complete
from spotfit.checkpoint.segment import Segment
from spotfit.core.codec import decoder, encode
from spotfit.core.errors import IntegrityError
from spotfit.ledger import keys
from spotfit.model.events import CheckpointCommitted
from spotfit.model.holding import Part
from spotfit.model.spec import RunSpec
from spotfit.model.wire import (
    Carried,
    Committed,
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
    Snapshot,
    Start,
    ToWorker,
    Uncarried,
    Unsaved,
)
from spotfit.store.transfer import FileRecord
from spotfit_localsim.bucket import Bucket
from spotfit_localsim.dice import Stream
from spotfit_localsim.engine import Engine, Process, Timer
from spotfit_localsim.net import Fabric
from spotfit_localsim.saves import (
    Kept,
    Life,
    Memory,
    bring,
    fill,
    in_bucket,
    remembered,
    what_is_in,
)
from spotfit_localsim.workload import State, Training

_REAP_S = 0.003


_kept = decoder(Kept)
_manifests = decoder(Manifest)
_told = decoder(dict[str, Any])


def restored(objects: Mapping[str, bytes], name: str) -> Kept | str:
    """What a reader of that checkpoint finds, or in words why there is nothing to be found."""
    folder = f"{keys.MANIFESTS}{name}/"
    found = [key for key in objects if key.startswith(folder) and key.endswith(".json")]
    parts = newest_complete([_manifests.decode(objects[key]) for key in found])
    if parts and parts[0].is_snapshot:
        return in_bucket(objects, name)
    files = [f"{part.folder}/{file.name}" for part in parts for file in part.files]
    missing = [key for key in files if key not in objects]
    if not files or missing:
        return f"files are missing: {missing}" if missing else "no complete set of manifests"
    states = {_kept.decode(objects[key]) for key in files}
    return states.pop() if len(states) == 1 else f"its ranks saved different models: {states}"


class FunctionRaised(Exception):  # noqa: N818  # told as the user's own exception, never handled
    """The user's function ends with an exception."""


@dataclass
class Theatre:
    """What all pretend workers of one world share."""

    engine: Engine
    fabric: Fabric
    bucket: Bucket
    training: Training
    stream: Stream
    complain: Callable[[str], None]
    """Told when something happened to a worker that must never happen."""
    say: Callable[[str, str], None]
    is_pending: Callable[[CheckpointCommitted], bool]
    """Whether that checkpoint is still to be validated, as the journal tells it."""
    latest: Callable[[], str | None]
    """The last checkpoint that is committed."""
    teams: dict[int, Team] = field(default_factory=dict)
    memories: dict[str, Memory] = field(default_factory=dict)
    """By the address of its vault, what lies in each machine's memory."""

    def now(self) -> float:
        return self.engine.now

    def after(self, seconds: float, then: Callable[[], None]) -> object:
        return self.engine.after(seconds, then)

    def copy_s(self) -> float:
        return self.stream.between(self.training.load.copy_s)

    def reaches(self, sender: str, receiver: str) -> bool:
        """Both ways: a vault answers."""
        cut = self.fabric.blocked(sender, receiver) or self.fabric.blocked(receiver, sender)
        return not cut

    def is_over(self, number: int) -> bool:
        """Whether another round has begun after that one."""
        return any(later > number for later in self.teams)

    def committed(self, number: int) -> State:
        """What that round finds who goes back to the latest checkpoint."""
        name = self.latest()
        kept = Kept(0, State().link) if name is None else restored(self.bucket.objects, name)
        if isinstance(kept, str):
            self.complain(f"round {number} goes back to {name}, but {kept}")
            return State()
        return State(kept.step, kept.link)

    def team(self, start: Start) -> Team:
        """Those who train together in that round."""
        return self.teams.setdefault(start.round, Team(self, start.round, start.world_size))


class Team:
    """The ranks of one round as their framework joins them: a step is done by all, or by none."""

    def __init__(self, theatre: Theatre, number: int, world_size: int) -> None:
        self.leaving = False
        """Whether a rank had heard of a notice when the last step began; all see the same."""
        self._theatre = theatre
        self._number = number
        self._world_size = world_size
        self._workers: dict[int, SimWorker] = {}
        self._arrived: dict[int, State] = {}
        self.agreed: dict[int, str | None] = {}
        """By rank, what is broken of the state in memory that the round begins from."""
        self._going_back: set[int] = set()
        self.went_back = 0
        """How often all ranks have gone back to a checkpoint."""
        self.back_at = State()
        """The state they went back to last."""

    @property
    def all_agreed(self) -> bool:
        return len(self.agreed) == self._world_size

    def agree(self, worker: SimWorker, broken: str | None) -> None:
        """That rank has read the state in memory, or could not."""
        self.agreed[worker.rank] = broken
        for one in self._workers.values() if self.all_agreed else ():
            one.go_on()

    def enter(self, worker: SimWorker) -> None:
        """A rank begins; each does so once a round."""
        if worker.rank in self._workers:
            self._theatre.complain(f"rank {worker.rank} was started twice in round {self._number}")
        self._workers[worker.rank] = worker

    def meet(self, worker: SimWorker) -> None:
        """That rank is ready for its next step; the last one lets all go on."""
        self._arrived[worker.rank] = worker.state
        if len(self._arrived) < self._world_size:
            return
        if len(set(self._arrived.values())) > 1:
            self._theatre.complain(f"the ranks of round {self._number} train different models")
        self._arrived = {}
        self.leaving = any(one.warned for one in self._workers.values())
        for one in self._workers.values():
            one.met = True
            one.go_on()

    def go_back(self, worker: SimWorker) -> None:
        """That rank has left behind what it saved; the last one finds what all go on from."""
        self._going_back.add(worker.rank)
        if len(self._going_back) < self._world_size:
            return
        self._going_back.clear()
        self.went_back += 1
        self.back_at = self._theatre.committed(self._number)
        self._theatre.training.went_back(self._number)
        for one in self._workers.values():
            one.go_on()

    def lose(self, worker: SimWorker) -> None:
        """A rank broke off: its peers may notice, each in its own time, if the way is open."""
        load, stream = self._theatre.training.load, self._theatre.stream
        for one in self._workers.values() if load.peers_raise else ():
            cut_off = self._theatre.fabric.blocked(worker.host, one.host)
            if one is not worker and not cut_off and stream.chance(load.peers_raise):
                self._theatre.engine.after(stream.between(load.peers_raise_s), one.miss_a_peer)


class SimWorker:
    """One process of the user's."""

    def __init__(self, theatre: Theatre, crew: SimCrew, start: Start) -> None:
        self.rank = start.rank
        self.host = crew.host
        self.round = start.round
        self.state = State()
        self.alive = True
        self.warned = False
        self.met = False
        self._returned = False
        self._ending = False
        self._peer_missing = False
        self._theatre = theatre
        self._crew = crew
        self._start = start
        self._inbox: list[ToWorker] = []
        self._given_away: set[int] = set()
        self._reports = 0
        self._slots: list[tuple[Segment, int | None]] = []
        """Segments, and the report each went with last."""
        self._saves = 0
        self._given: set[int] = set()
        """Snapshots that are with the agent."""
        self._on_their_way: set[int] = set()
        """Those that may still become checkpoints."""
        self._waits = False
        self._timer: Timer | None = None
        self._life = self._live()
        self._team = theatre.team(start)
        self._team.enter(self)
        self._take_up(0.0)

    # --- what comes from outside -------------------------------------------------------------

    def tell(self, frame: ToWorker) -> None:
        """A frame from the agent."""
        if isinstance(frame, Preempted):
            self.warned = True
        elif isinstance(frame, Named | Gathered):
            self._inbox.append(frame)
            self.go_on()
        elif isinstance(frame, Carried):
            self._given_away.discard(frame.n)
        done = _snapshot_done(frame)
        if done is not None:
            self._given.discard(done)
            self.go_on()
        self._note_end(frame, done)

    def _note_end(self, frame: ToWorker, done: int | None) -> None:
        """Of a snapshot, which is a checkpoint now or never will be."""
        if isinstance(frame, Committed):
            named = [one for one in self._inbox if isinstance(one, Named)]
            self._on_their_way -= {one.n for one in named if one.name == frame.name}
            self.go_on()
        elif done is not None and not isinstance(frame, Carried):
            self._on_their_way.discard(done)

    def go_on(self) -> None:
        """What it waited for has happened."""
        if self.alive and self._waits:
            self._waits = False
            self._take_up(0.0)

    def miss_a_peer(self) -> None:
        """The framework's wire to a peer broke: the next step raises."""
        self._peer_missing = True
        self.go_on()

    def kill(self) -> None:
        """SIGKILL; it takes a moment to be gone."""
        if not self._ending:
            self._ending = True
            end_s = self._theatre.stream.between(self._theatre.training.load.end_s)
            how = "was killed by SIGKILL"
            self._theatre.engine.after(end_s, lambda: self._end(how, clean=False, ordered=True))

    def vanish(self, *, told: bool) -> None:
        """Its machine is gone."""
        if self.alive:
            self._stop()
            if told and not self._returned:
                self._team.lose(self)

    # --- what it does ------------------------------------------------------------------------

    def _live(self) -> Life:
        load = self._theatre.training.load
        yield self._theatre.stream.between(load.start_s)
        self._say(Running())
        yield from self._restore()
        while self.state.step < load.steps:
            yield from self._train_a_step()
            if self._due(load.save_every) or (self._team.leaving and load.saves_on_notice):
                yield from self._save()
                if self._theatre.training.goes_back(self.round, self._reports):
                    yield from self._go_back()
            elif self._due(load.report_every):
                self._say(Report(self._next_report(), self._metrics()))
        while self._given_away or self._given:
            yield None
        self._returned = True
        self._say(Returned(self._reports, self.state.link.encode()))
        yield _REAP_S

    def _restore(self) -> Life:
        if self._start.memory is not None:
            found = self._remembered()
            yield self._theatre.stream.between(self._theatre.training.load.copy_s)
            self._team.agree(self, found if isinstance(found, str) else None)
            while not self._team.all_agreed:
                yield None
            if isinstance(found, Kept) and not any(self._team.agreed.values()):
                self.state = State(found.step, found.link)
                return
        self._restore_from_the_bucket()

    def _remembered(self) -> Kept | str:
        """The state in memory, or what is broken of it."""
        memory, others = self._crew.memory, self._theatre.memories
        assert memory is not None
        assert self._start.memory is not None
        try:
            saved = remembered(self._start, memory, others, self._reaches)
        except IntegrityError as broken:
            return broken.what
        found = what_is_in(saved)
        told = self._start.memory.step
        if isinstance(found, str):
            self._theatre.complain(f"in memory is a state that nobody had: {found}")
        elif found.step != told:
            return f"it is of step {found.step}, and not of {told}"
        elif self._theatre.training.chain.at(found.step).link != found.link:
            self._theatre.complain(
                f"step {found.step} in memory is not that of the undisturbed run"
            )
        return found

    def _reaches(self, vault: str) -> bool:
        return self._theatre.reaches(self.host, vault)

    def _restore_from_the_bucket(self) -> None:
        name = self._start.checkpoint
        if name is None:
            return
        kept = restored(self._theatre.bucket.objects, name)
        if isinstance(kept, str) and self._theatre.is_over(self.round):
            raise FunctionRaised("the checkpoint is gone")  # its agent slept, and does not know
        if isinstance(kept, str):
            self._theatre.complain(f"round {self.round} starts from {name}, but {kept}")
            return
        self.state = State(kept.step, kept.link)
        metrics = self._start.checkpoint_metrics or {}
        if metrics.get("step") != kept.step:
            self._theatre.complain(f"{name} holds step {kept.step}, its metrics say {metrics}")

    def _train_a_step(self) -> Life:
        self.met = False
        self._team.meet(self)
        while not self.met:
            yield None
            self._raise_for_peers()
        training = self._theatre.training
        yield self._theatre.stream.between(training.load.step_s)
        self._raise_for_peers()
        crash = training.crash(self.state.step + 1, self.rank)
        if crash is not None:
            self._theatre.say(
                f"rank {self.rank}", f"{crash.how} in step {crash.step} (its own fault)"
            )
            if crash.how == "raises":
                raise FunctionRaised(f"a mistake in step {crash.step}")
            if crash.how == "hangs":
                yield from self._hang()
            self._end("was killed by SIGSEGV", clean=False)
            yield None
        self.state = self.state.next()
        if self.rank == 0:
            training.done(self.state.step)

    def _go_back(self) -> Life:
        """As `Checkpointer.restore` does after saves."""
        memory, times = self._crew.memory, self._team.went_back
        assert memory is not None
        while self._on_their_way:
            yield None
            self._raise_for_peers()
        for segment, _ in self._slots:
            segment.path.unlink(missing_ok=True)
            segment.close()
        self._slots.clear()
        self._saves = 0
        memory.snapshots.take_back(self._reports)
        self._team.go_back(self)
        while self._team.went_back == times:
            yield None
            self._raise_for_peers()
        self.state = self._team.back_at

    def _hang(self) -> Life:
        self._crew.miss(self)
        while True:
            yield None

    def _save(self) -> Life:
        n = self._next_report()
        load = self._theatre.training.load
        if load.barriers:
            yield from self._meet_at_the_hub(n)
        self.warned = False
        if load.snapshots:
            yield from self._snapshot(n)
            return
        chosen = {"made": None, "by step": f"step-{self.state.step}", "one": "last"}
        name = chosen[load.names]
        if self.rank and not load.everyone_saves:
            self._say(Report(n, self._metrics(), name))
            return
        asked = self._theatre.training.asks(self.state.step)
        self._say(Files(n, self._metrics(), name, validation=asked))
        while (named := self._named(n)) is None:
            yield None
        if _kept.decode(named.metrics) != Kept(self.state.step, self.state.link):
            self._theatre.complain(f"report {n} of round {self.round} mixes different steps")
        body = encode(Kept(self.state.step, self.state.link))
        part = Manifest(
            named.name,
            self.round,
            n,
            self.rank,
            named.ranks,
            _told.decode(named.metrics),
            (FileRecord(f"state-{self.rank}.json", len(body), ""),),
            validation=self._theatre.training.asks(self.state.step),
        )
        if load.background:
            self._given_away.add(n)
            self._crew.carry(part, body)
        else:
            yield from upload(self._theatre, self._crew.name, part, body)
            self._say(Saved(n, part.name, len(body)))

    def _snapshot(self, n: int) -> Life:
        """Into the segment that is not needed, while the agent may still bring the other one."""
        memory = self._crew.memory
        assert memory is not None
        at = self._saves % 2
        if len(self._slots) <= at:
            name = f"{self.round}-{self.rank}-{at + 1}"
            self._slots.append((memory.segment(name), None))
        segment, report = self._slots[at]
        while report in self._given:
            yield None
        segment.begin()
        yield self._theatre.stream.between(self._theatre.training.load.stall_s)
        fill(segment, self._start, Kept(self.state.step, self.state.link))
        self._theatre.training.saved.setdefault(self.round, set()).add(self.state.step)
        self._saves += 1
        self._slots[at] = (segment, n)
        self._given.add(n)
        self._on_their_way.add(n)
        self._crew.keep(self, Snapshot(n, self._metrics(), str(segment.path)))

    def _meet_at_the_hub(self, n: int) -> Life:
        self._say(Gather("barrier", n))
        while not any(isinstance(one, Gathered) and one.seq == n for one in self._inbox):
            yield None

    def _named(self, n: int) -> Named | None:
        return next((one for one in self._inbox if isinstance(one, Named) and one.n == n), None)

    def _raise_for_peers(self) -> None:
        if self._peer_missing:
            raise FunctionRaised("connection closed by peer")

    def _due(self, every: int) -> bool:
        return every > 0 and self.state.step % every == 0

    def _next_report(self) -> int:
        self._reports += 1
        return self._reports - 1

    def _metrics(self) -> msgspec.Raw:
        return msgspec.Raw(encode(Kept(self.state.step, self.state.link)))

    def _say(self, frame: FromWorker) -> None:
        self._crew.told(Said(self.round, self.rank, [msgspec.Raw(encode(frame))]))

    # --- how it goes on, and ends ------------------------------------------------------------

    def _take_up(self, wait_s: float) -> None:
        self._timer = self._theatre.engine.after(wait_s, self._advance)

    def _advance(self) -> None:
        try:
            busy_s = next(self._life)
        except StopIteration:
            self._end("exited with code 0", clean=True)
        except FunctionRaised as raised:
            self._say(Raised(f"Traceback: {raised}", str(raised).encode()))
            self._theatre.engine.after(
                _REAP_S, lambda: self._end("exited with code 1", clean=False)
            )
        else:
            self._waits = busy_s is None
            if busy_s is not None and self.alive:
                self._take_up(busy_s)

    def _end(self, how: str, *, clean: bool, ordered: bool = False) -> None:
        if self.alive:
            self._stop()
            self._crew.reap(self, Exited(self.round, self.rank, how, clean, ordered))
            if not self._returned:
                self._team.lose(self)

    def _stop(self) -> None:
        self.alive = False
        for segment, _ in self._slots:
            segment.close()
        if self._timer is not None:
            self._timer.call_off()


def upload(theatre: Theatre, who: str, part: Manifest, body: bytes) -> Life:
    """Bring one rank's only file into the bucket, then its manifest."""
    half_s = theatre.stream.between(theatre.training.load.save_s) / 2
    yield half_s
    theatre.bucket.write(who, f"{part.folder}/{part.files[0].name}", body)
    yield half_s
    theatre.bucket.write(who, part.key, encode(part))


class _File(NamedTuple):
    """A rank's file of a checkpoint, for the carrier to bring."""

    part: Manifest
    body: bytes

    @property
    def round(self) -> int:
        return self.part.round

    @property
    def rank(self) -> int:
        return self.part.rank

    def life(self, theatre: Theatre, who: str) -> Life:
        yield from upload(theatre, who, self.part, self.body)

    def told(self, crew: SimCrew) -> None:
        crew.note_carried(self.part, len(self.body))


class _Parcel:
    """A rank's snapshot, for the carrier to bring."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.round = order.round
        self.rank = order.rank
        self._came_of_it: list[Manifest | str] = []

    def life(self, theatre: Theatre, who: str) -> Life:
        takes_s = theatre.stream.between(theatre.training.load.save_s)
        yield from bring(theatre.bucket, who, self.order, takes_s, self._came_of_it)

    def told(self, crew: SimCrew) -> None:
        crew.note_brought(self.order, self._came_of_it[-1])


class SimCarrier:
    """What uploads for the workers of a machine, and outlives them: a lane a rank."""

    def __init__(self, crew: SimCrew, theatre: Theatre) -> None:
        self._crew = crew
        self._theatre = theatre
        self._lanes: dict[int, list[_File | _Parcel]] = {}
        self._timers: dict[int, Timer] = {}

    @property
    def round(self) -> int | None:
        """The round whose uploads are not all done."""
        return next((lane[0].round for lane in self._lanes.values() if lane), None)

    def take(self, cargo: _File | _Parcel) -> None:
        """Upload it when all before it from the same rank are done."""
        lane = self._lanes.setdefault(cargo.rank, [])
        lane.append(cargo)
        if len(lane) == 1:
            self._begin(cargo.rank)

    def give_up(self) -> None:
        """Bring nothing more."""
        for timer in self._timers.values():
            timer.call_off()
        self._lanes, self._timers = {}, {}

    def _begin(self, rank: int) -> None:
        self._advance(rank, self._lanes[rank][0].life(self._theatre, self._crew.name))

    def _advance(self, rank: int, life: Life) -> None:
        busy_s = next(life, None)
        if busy_s is not None:
            self._timers[rank] = self._theatre.engine.after(
                busy_s, lambda: self._advance(rank, life)
            )
            return
        self._lanes[rank].pop(0).told(self._crew)
        if self._lanes.get(rank):
            self._begin(rank)


class SimCrew:
    """The `Crew` of one agent."""

    def __init__(self, theatre: Theatre, process: Process) -> None:
        self._theatre = theatre
        self._process = process
        self._workers: dict[int, SimWorker] = {}
        self._carrier = SimCarrier(self, theatre)
        self._events: list[CrewEvent] = []
        self._silent_s = 0.0
        saves = theatre.training.load.snapshots
        memories = theatre.memories
        self.memory = Memory(process.name, theatre, memories, self._note_copy) if saves else None

    @property
    def vault(self) -> str:
        """Where copies for this machine are taken; empty where none are made."""
        return self.memory.name if self.memory is not None else ""

    @property
    def host(self) -> str:
        """Where these workers live."""
        return self._process.name

    @property
    def name(self) -> str:
        """Who writes what these workers write."""
        return f"{self._process.name} workers"

    def prepare(self, spec: RunSpec) -> None:
        self._process.touch()
        self._silent_s = spec.vigil.silent_s

    def start(self, starts: Sequence[Start]) -> None:
        self._process.touch()
        if self._workers:
            self._theatre.complain(f"{self._process.name} starts workers beside others of its own")
        for start in starts:
            entered = self.memory.snapshots.enter(start) if self.memory else start
            self._workers[start.rank] = SimWorker(self._theatre, self, entered)

    def send(self, rank: int, frame: ToWorker) -> None:
        if self.memory is not None:
            self._name_snapshot(self.memory, rank, frame)
        if rank in self._workers:
            self._workers[rank].tell(frame)

    def _name_snapshot(self, memory: Memory, rank: int, frame: ToWorker) -> None:
        match frame:
            case Named():
                order = memory.snapshots.named(rank, frame)
                if order is not None:
                    self._carrier.take(_Parcel(order))
            case Gathered(kind="report", seq=n):
                memory.snapshots.forget(rank, n)
            case _:
                return

    def copy_to(self, vault: str) -> None:
        if self.memory is not None:
            self.memory.snapshots.copy_to(vault)

    def _note_copy(self, round_number: int, rank: int, step: int, vault: str) -> None:
        self.told(CopyKept(round_number, rank, step, vault))

    def keep(self, worker: SimWorker, snapshot: Snapshot) -> None:
        """A worker hands a snapshot over."""
        assert self.memory is not None
        self.memory.snapshots.keep(worker.rank, snapshot)
        files = encode(Files(snapshot.n, snapshot.metrics, shares=True))
        self.told(Said(worker.round, worker.rank, [msgspec.Raw(files)]))

    def note_brought(self, order: Order, how: Manifest | str) -> None:
        """A snapshot is in the bucket, or never will be."""
        n, name = order.carry.n, order.carry.name
        said: FromWorker = Unsaved(n, how) if isinstance(how, str) else _saved(n, how)
        self.told(Said(order.round, order.rank, [msgspec.Raw(encode(said))]))
        self.send(order.rank, Uncarried(n, how) if isinstance(how, str) else Carried(n, name))

    def examine(self, examination: int) -> None:
        self._process.touch()
        for worker in self._workers.values():
            told = f"in step {worker.state.step}"
            self.told(Examined(worker.round, examination, worker.rank, told))

    def miss(self, worker: SimWorker) -> None:
        """That worker answers no more; it is noticed in time."""

        def noticed() -> None:
            if worker.alive:
                self.told(Unheard(worker.round, worker.rank, self._silent_s))

        self._theatre.engine.after(self._silent_s, noticed)

    def halt(self) -> None:
        self._process.touch()
        for worker in self._workers.values():
            worker.kill()

    @property
    def warm(self) -> bool:
        """Nothing is imported here."""
        return True

    @property
    def busy(self) -> bool:
        return bool(self._workers)

    @property
    def carrying(self) -> int | None:
        return self._carrier.round

    @property
    def held(self) -> tuple[Part, ...]:
        return self.memory.snapshots.held() if self.memory is not None else ()

    def give_up(self) -> None:
        self._process.touch()
        self._carrier.give_up()

    def events(self) -> list[CrewEvent]:
        events, self._events = self._events, []
        return events

    def carry(self, part: Manifest, body: bytes) -> None:
        """A worker gives its file away."""
        self._carrier.take(_File(part, body))

    def note_carried(self, part: Manifest, size_bytes: int) -> None:
        """What a worker gave away is in the bucket."""
        saved = encode(Saved(part.report, part.name, size_bytes))
        self.told(Said(part.round, part.rank, [msgspec.Raw(saved)]))
        self.send(part.rank, Carried(part.report, part.name))

    def told(self, event: CrewEvent) -> None:
        """A worker said something, or is reaped."""
        if self._process.alive:
            self._events.append(event)
            self._process.wake()

    def reap(self, worker: SimWorker, exited: Exited) -> None:
        """A worker's process is gone."""
        self._workers.pop(worker.rank, None)
        self.told(exited)

    def close(self, *, told: bool) -> None:
        """The machine is gone, and with it everybody on it."""
        self._carrier.give_up()
        for worker in self._workers.values():
            worker.vanish(told=told)
        self._workers = {}
        if self.memory is not None:
            self.memory.close()


def _saved(n: int, part: Manifest) -> Saved:
    return Saved(n, part.name, part.size_bytes, part.step)


def _snapshot_done(frame: ToWorker) -> int | None:
    """Which report's snapshot is not with the agent any more, if the frame says so."""
    match frame:
        case Carried(n=n) | Uncarried(n=n) | Named(n=n, name=""):
            return n
        case Gathered(kind="report", seq=n, missing=missing, why=why) if missing or why:
            return n
        case _:
            return None
