"""The workers of this node: forked by a zygote where that is safe, started one by one elsewhere."""

from __future__ import annotations

import pickle
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from spotfit.agent.carrier import LiveCarrier, Order
from spotfit.agent.child import Child
from spotfit.agent.examine import examine, folder_of
from spotfit.agent.logs import LogShipper
from spotfit.agent.loop import READ, Loop
from spotfit.agent.ports import (
    ORPHANED,
    UNBORN,
    CopyKept,
    CrewEvent,
    Examined,
    Exited,
    Said,
    Spoiled,
    Unheard,
)
from spotfit.agent.pulse import Pulse
from spotfit.agent.snapshots import Snapshots
from spotfit.agent.spawn import Spawner
from spotfit.agent.zygote import Breed, Zygote, ZygoteKeeper, variables_for
from spotfit.core.codec import decoder, encode
from spotfit.core.errors import MachineError
from spotfit.host import log
from spotfit.model import output
from spotfit.model.carrier import Brought, Lost
from spotfit.model.cradle import Awake, Born, Gone, Kind, Unfit
from spotfit.model.holding import Part
from spotfit.model.spec import RunSpec
from spotfit.model.wire import (
    Alive,
    Carried,
    Carry,
    Files,
    Gathered,
    Named,
    Raised,
    Saved,
    Snapshot,
    Start,
    TakenBack,
    ToWorker,
    Uncarried,
    Unsaved,
)
from spotfit.policy.failure import while_preparing
from spotfit.ship.luggage import Luggage, Payload, check_environment, fetch
from spotfit.ship.prepare import Prepared, prepare
from spotfit.ship.sign import RunKey
from spotfit.store.api import Store

_ALIVE = encode(Alive())
_carries = decoder(Carry)
_snapshots = decoder(Snapshot)
_taken_back = decoder(TakenBack)

Heard = Callable[[list[bytes]], None]
Ended = Callable[[str, bool], None]


class _Birth(NamedTuple):
    what: Kind
    child: Child
    start: Start | None = None


class LiveCrew:
    """`Crew` of real processes."""

    def __init__(
        self,
        loop: Loop,
        keeper: ZygoteKeeper,
        *,
        store: Store,
        key: RunKey,
        logs: LogShipper,
        scratch: str,
        slots: int,
        snapshots: Snapshots | None = None,
    ) -> None:
        self._loop = loop
        self._keeper = keeper
        self._store = store
        self._key = key
        self._logs = logs
        self._scratch = Path(scratch)
        self._snapshots = snapshots or Snapshots("")
        self._slots = slots
        self._spawner = Spawner(loop)
        self._breed: Breed | None = None
        """What workers are made from; None until the luggage was opened."""
        self._broken: Exception | None = None
        """Why the luggage could not be opened here."""
        self._spec: RunSpec | None = None
        self._unpacking = False
        self._zygote: Zygote | None = None
        self._unborn: list[_Birth] = []
        """To be borne once the luggage is open."""
        self._nursed: dict[int, _Birth] = {}
        """With the zygote, by serial number."""
        self._workers: dict[int, Child] = {}
        self._round = -1
        """Theirs."""
        self._pulse: Pulse | None = None
        """For how long workers have not been heard; None where nobody asks."""
        self._carrier: LiveCarrier | None = None
        """Who uploads what workers gave away; None until the run is known."""
        self._children: set[Child] = set()
        """Workers, who uploads for them, and whom the leader may have beside them."""
        self._events: list[CrewEvent] = []

    # --- the port ----------------------------------------------------------------------------

    def prepare(self, spec: RunSpec) -> None:
        """Import the framework while the luggage is fetched: most runs bring no variables."""
        log.at_least(spec.log_level)
        self._adopt(Breed.of(spec.framework, sys.executable, variables_for(self._slots, {})))
        self._carrier = LiveCarrier(
            spec.storage_url, partial(self._helper, "carrier"), self._note_carried
        )
        self._spec = spec
        self._begin_unpacking(spec)
        if spec.vigil.silent_s:
            self._pulse = Pulse(spec.vigil.silent_s)
            self._look_for_silent()

    def start(self, starts: Sequence[Start]) -> None:
        for start in starts:
            self._start(start)

    def send(self, rank: int, frame: ToWorker) -> None:
        match frame:
            case Named():
                self._name_snapshot(rank, frame)
            case Gathered(kind="report", seq=n):
                self._snapshots.forget(rank, n)
            case _:
                pass
        if rank in self._workers:
            self._workers[rank].send(encode(frame))

    def examine(self, examination: int) -> None:
        pids = {rank: child.pid for rank, child in self._workers.items() if child.pid is not None}
        if not pids:
            return
        threading.Thread(
            target=self._examine, args=(examination, pids), name="spotfit-examine", daemon=True
        ).start()

    def halt(self) -> None:
        for child in list(self._workers.values()):
            child.kill()
        self._drop_unborn(_is_worker)

    @property
    def busy(self) -> bool:
        return bool(self._workers)

    @property
    def carrying(self) -> int | None:
        return self._carrier.round if self._carrier is not None else None

    @property
    def held(self) -> tuple[Part, ...]:
        return self._snapshots.held()

    def copy_to(self, vault: str) -> None:
        self._snapshots.copy_to(vault)

    def give_up(self) -> None:
        if self._carrier is not None:
            self._carrier.give_up()

    @property
    def warm(self) -> bool:
        return self._zygote is None or self._zygote.ripe

    def events(self) -> list[CrewEvent]:
        events, self._events = self._events, []
        return events

    # --- beyond the port -----------------------------------------------------------------------

    def note_copy(self, round_number: int, rank: int, step: int, vault: str) -> None:
        """Another machine keeps a copy; may be told by any thread."""
        kept = CopyKept(round_number, rank, step, vault)
        self._loop.post(partial(self._events.append, kept))

    def beside(self, what: Kind, heard: Heard, ended: Ended) -> Child:
        """A process for the run's callbacks, hooks or validations, made as workers are."""
        return self._helper(what, heard, ended)

    def _helper(self, what: Kind, heard: Heard, ended: Ended) -> Child:
        speaker = output.VALIDATION if what == "validation" else output.BESIDE
        printed = partial(self._logs.line, -1, speaker)
        child: Child

        def over(how: str, clean: bool) -> None:  # noqa: FBT001 - as `Child.ended` wants it
            self._children.discard(child)
            ended(how, clean)

        child = Child(self._loop, heard=heard, printed=printed, ended=over)
        self._children.add(child)
        self._bear(_Birth(what, child))
        return child

    @property
    def left(self) -> int:
        """How many processes of any kind have not been seen to their end."""
        return len(self._children) + self._spawner.left

    def close(self) -> None:
        """Kill what is left; the ends are told as ever."""
        self.give_up()
        for child in list(self._children):
            child.kill()
        self._drop_unborn(lambda _: True)

    def detach(self) -> None:
        """Listen no more. Zygotes stay with their keeper."""
        if self._zygote is not None:
            self._loop.forget(self._zygote.control)
            self._zygote = None

    # --- what workers are made from ------------------------------------------------------------

    def _begin_unpacking(self, spec: RunSpec) -> None:
        self._unpacking = True
        threading.Thread(
            target=self._unpack, args=(spec,), name="spotfit-luggage", daemon=True
        ).start()

    def _unpack(self, spec: RunSpec) -> None:
        """In a thread: the bucket and pip take their time."""
        try:
            prepared = self._prepared(spec)
        except OSError as error:
            spoiled = MachineError(
                f"This node could not unpack the run's luggage: {error}",
                do="See that its disk has room, or give machines with more.",
            )
            self._loop.post(partial(self._give_up, spoiled))
        except Exception as error:  # noqa: BLE001 - the user's luggage, and pip, may raise anything
            self._loop.post(partial(self._give_up, error))
        else:
            self._loop.post(partial(self._unpacked, spec, prepared))

    def _prepared(self, spec: RunSpec) -> Prepared:
        luggage = msgspec.convert(spec.luggage, Luggage)
        envelope = fetch(luggage, store=self._store)
        payload = Payload.open(envelope, key=self._key)
        check_environment(luggage, payload.env)
        self._leave_copy(luggage.sha256, envelope)
        return prepare(payload.env, store=self._store, scratch=self._scratch)

    def _leave_copy(self, name: str, envelope: bytes) -> None:
        """For our workers, whole or not at all."""
        folder = self._scratch / "luggage"
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / f"{name}.draft"
        draft.write_bytes(envelope)
        draft.rename(folder / name)

    def _unpacked(self, spec: RunSpec, prepared: Prepared) -> None:
        self._unpacking = False
        variables = variables_for(self._slots, prepared.env_vars)
        self._breed = Breed.of(spec.framework, prepared.python, variables)
        self._adopt(self._breed)
        self._bear_unborn()

    def _give_up(self, why: Exception) -> None:
        """Whoever waits for the luggage fails; what may pass is tried again with the next round."""
        log.error("crew.luggage", why=str(why))
        self._unpacking = False
        self._broken = why
        self._bear_unborn()
        raised = _as_raised(why)
        if raised.final:
            self._events.append(Spoiled(raised))
        else:
            self._broken = None

    def _bear_unborn(self) -> None:
        unborn, self._unborn = self._unborn, []
        for birth in unborn:
            self._bear(birth)

    def _drop_unborn(self, which: Callable[[_Birth], bool]) -> None:
        dropped = [birth for birth in self._unborn if which(birth)]
        self._unborn = [birth for birth in self._unborn if not which(birth)]
        for birth in dropped:
            birth.child.kill()
            birth.child.reaped(signal.SIGKILL)

    # --- zygotes -------------------------------------------------------------------------------

    def _adopt(self, breed: Breed) -> None:
        """Listen to the zygote of that breed from now on, and to no other."""
        zygote = self._keeper.warm(breed)
        if zygote is self._zygote:
            return
        if self._zygote is not None:
            self._loop.forget(self._zygote.control)
        self._zygote = zygote
        self._keeper.spare(breed)
        if zygote is not None:
            self._loop.watch(zygote.control, READ, partial(self._on_zygote, zygote))

    def _on_zygote(self, zygote: Zygote, _mask: int) -> None:
        messages = zygote.hear()
        if messages is None:
            self._lose_zygote(zygote)
            return
        for message in messages:
            match message:
                case Born(serial=serial, pid=pid):
                    if serial in self._nursed:
                        self._nursed[serial].child.born(pid)
                case Gone(serial=serial, status=status):
                    if serial in self._nursed:
                        self._nursed.pop(serial).child.reaped(status)
                case Unfit(why=why):
                    log.info("zygote.unfit", framework=zygote.breed.framework, why=why)
                case Awake():
                    log.debug("zygote.awake", framework=zygote.breed.framework)

    def _lose_zygote(self, zygote: Zygote) -> None:
        """Its children die with it; those it had not borne yet are borne elsewhere."""
        self._loop.forget(zygote.control)
        self._zygote = None
        orphans, self._nursed = self._nursed, {}
        self._adopt(self._breed or zygote.breed)
        for birth in orphans.values():
            if birth.child.pid is not None or birth.child.doomed:
                birth.child.reaped(signal.SIGKILL, how=ORPHANED)
            elif birth.start is None:
                self._bear(birth)
            else:
                birth.child.abandon()  # half a birth may have read its first frame already
                self._children.discard(birth.child)
                self._start(birth.start)

    # --- workers -------------------------------------------------------------------------------

    def _start(self, start: Start) -> None:
        start = self._snapshots.enter(start)
        child = Child(
            self._loop,
            heard=partial(self._hear, start.round, start.rank),
            printed=partial(self._logs.line, start.round, start.rank),
            ended=partial(self._end, start.round, start.rank),
        )
        self._workers[start.rank] = child
        self._round = start.round
        self._children.add(child)
        child.send(encode(start))
        self._bear(_Birth("worker", child, start))

    def _bear(self, birth: _Birth) -> None:
        if self._broken is not None:
            self._fail(birth, self._broken)
        elif self._breed is None:
            self._unborn.append(birth)
            if self._spec is not None and not self._unpacking:
                self._begin_unpacking(self._spec)
        else:
            self._bear_now(birth, self._breed)

    def _bear_now(self, birth: _Birth, breed: Breed) -> None:
        self._adopt(breed)
        try:
            if self._zygote is not None:
                serial = self._zygote.bear(birth.what, birth.child.descriptors)
                self._nursed[serial] = birth
            else:
                self._spawner.bear(birth.what, breed, birth.child)
        except OSError as error:
            do = "See how many processes and open files the node allows."
            self._fail(birth, MachineError(f"This node could not start a process: {error}", do=do))

    def _fail(self, birth: _Birth, why: Exception) -> None:
        """As if it had lived to say so."""
        log.error("crew.birth", what=birth.what, why=str(why))
        if birth.start is not None:
            self._hear(birth.start.round, birth.start.rank, [encode(_as_raised(why))])
        birth.child.reaped(signal.SIGKILL, how=f"{UNBORN}: {why}")

    def _hear(self, round_number: int, rank: int, frames: list[bytes]) -> None:
        if self._pulse is not None and round_number == self._round and self._pulse.heard(rank):
            self._events.append(Unheard(round_number, rank, 0.0))
        passed = [self._passed(round_number, rank, frame) for frame in frames]
        onward = [msgspec.Raw(frame) for frame in passed if frame is not None]
        if onward:
            self._events.append(Said(round_number, rank, onward))

    def _passed(self, round_number: int, rank: int, frame: bytes) -> bytes | None:
        """What the hub is told; None of what goes no further than this node: a sign of life, a
        parcel, or what its memory is to forget."""
        if frame == _ALIVE:
            return None
        if frame.startswith(b'{"type":"carry"'):
            assert self._carrier is not None
            self._carrier.take(Order(round_number, rank, _carries.decode(frame)))
            return None
        if frame.startswith(b'{"type":"snapshot"'):
            snapshot = _snapshots.decode(frame)
            self._snapshots.keep(rank, snapshot)
            return encode(Files(snapshot.n, snapshot.metrics, shares=True, why=snapshot.why))
        if frame.startswith(b'{"type":"taken_back"'):
            self._snapshots.take_back(_taken_back.decode(frame).before)
            return None
        return frame

    def _name_snapshot(self, rank: int, named: Named) -> None:
        """A snapshot that has a name can go its way."""
        order = self._snapshots.named(rank, named)
        if order is not None:
            assert self._carrier is not None
            self._carrier.take(order)

    def _note_carried(self, order: Order, how: Brought | Lost) -> None:
        """The worker, if it still lives, and the leader are told as if it had done it itself."""
        carry, worker = order.carry, self._workers.get(order.rank)
        if isinstance(how, Brought):
            told = encode(Saved(carry.n, carry.name, how.size_bytes, how.step))
            self._hear(order.round, order.rank, [told])
            if worker is not None:
                worker.send(encode(Carried(carry.n, carry.name)))
        elif order.is_snapshot:
            self._tell_lost(order, how)
            self._hear(order.round, order.rank, [encode(Unsaved(carry.n, how.told))])
            if worker is not None:
                worker.send(encode(Uncarried(carry.n, how.told)))
        elif worker is not None:
            self._hear(order.round, order.rank, [encode(Raised(how.told, how.value))])
            worker.kill()
        else:
            self._tell_lost(order, how)

    def _tell_lost(self, order: Order, how: Lost) -> None:
        """To who looks at this machine; for a worker that is gone, to who looks at the run, too."""
        name, rank = order.carry.name, order.rank
        log.warning("checkpoint.lost", name=name, rank=rank, why=how.told)
        if rank not in self._workers:
            why = how.told.strip().splitlines()[-1]
            told = f"[spotfit] {name} is no checkpoint: what this rank gave for it is lost: {why}"
            self._logs.line(order.round, rank, "err", told)

    def _end(self, round_number: int, rank: int, how: str, clean: bool) -> None:  # noqa: FBT001 - as `Child.ended` wants it
        child = self._workers.pop(rank)
        if self._pulse is not None:
            self._pulse.gone(rank)
        self._children.discard(child)
        self._events.append(Exited(round_number, rank, how, clean, child.ordered))

    # --- how they are ------------------------------------------------------------------------

    def _look_for_silent(self) -> None:
        assert self._pulse is not None
        for rank, silent_s in self._pulse.look(self._loop.clock.now()).items():
            self._events.append(Unheard(self._round, rank, silent_s))
        self._loop.after(self._pulse.look_s, self._look_for_silent)

    def _examine(self, examination: int, pids: dict[int, int]) -> None:
        """In a thread: some answer late, or not at all."""
        told = examine(pids, folder_of(self._scratch), self._loop.clock)
        self._loop.post(partial(self._note_examined, examination, told))

    def _note_examined(self, examination: int, told: dict[int, str]) -> None:
        for rank, doing in told.items():
            self._events.append(Examined(self._round, examination, rank, doing))


def _as_raised(why: Exception) -> Raised:
    fault = while_preparing(why)
    return Raised(str(why), pickle.dumps(why), fault.blame, fault.final)


def _is_worker(birth: _Birth) -> bool:
    return birth.start is not None
