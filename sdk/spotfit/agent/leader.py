"""What an agent does while it leads: it seats the others, serves the round's hub, and conducts.

All of it is soft. Should this agent die, its successor has the journal and the bucket, and the
others dial in anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from msgspec.structs import replace

from spotfit.agent.hub import Answer, Hub, Told
from spotfit.agent.ports import AgentLost, Audience, FromAgent, Net
from spotfit.checkpoint.drop import drop
from spotfit.checkpoint.manifest import ready_in
from spotfit.control.conductor import Conductor
from spotfit.control.errands import Errands
from spotfit.core.codec import UNREADABLE
from spotfit.core.errors import TransientStoreError
from spotfit.core.ids import AgentId, Token
from spotfit.ledger import keys, snapshot
from spotfit.ledger.run import Ledger
from spotfit.model.events import (
    CheckpointCommitted,
    CheckpointDropped,
    Entry,
    FitEnded,
    Noticed,
    RankFailure,
    RoundClosed,
    RoundOpened,
)
from spotfit.model.view import View
from spotfit.model.watch import Ready, Seat, Watch
from spotfit.model.wire import (
    Alarm,
    Beat,
    Committed,
    Down,
    Ended,
    Halt,
    Join,
    News,
    Preempted,
    Rejected,
    Stopped,
    ToLeader,
    Up,
)
from spotfit.policy.election import LEFTOVERS_S

_REPORTS_EVERY_S = 1.0
_REPORTS_BYTES = 1 << 20


class Leader:
    """One term of leadership. `hear` takes what agents say, `tick` acts on it."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        net: Net,
        conductor: Conductor,
        errands: Errands,
        audience: Audience | None,
        name_for: Callable[[int], str],
        ends_itself: bool,
        now: float,
    ) -> None:
        self._ledger = ledger
        self._net = net
        self._conductor = conductor
        self._errands = errands
        self._audience = audience
        self._name_for = name_for
        self._last_news: News | None = None
        self._watch = Watch(
            me=ledger.me, ends_itself=ends_itself, led_since=now, turned_at=now, surveyed=False
        )
        self._hub: Hub | None = None
        self._adopted: tuple[Ready, ...] = ()
        self._to_drop: list[str] = []
        self._reports = _ReportSink()
        self._beat_at = now
        self._lease_at = now
        self._dirty = True
        self._wait_until = now
        if ledger.view.round is not None:
            self._doom(now)  # somebody else opened it; its hub is gone

    # --- what agents say ---------------------------------------------------------------------

    def hear(self, event: FromAgent | AgentLost, now: float) -> None:
        """Take in one event of the wire."""
        match event:
            case AgentLost(agent=agent):
                self._lose(agent, now)
            case FromAgent(agent=agent, message=message):
                self._take(agent, message, now)

    def _take(self, agent: AgentId, message: ToLeader, now: float) -> None:
        if isinstance(message, Join):
            self._seat(agent, message, now)
            return
        seat = self._watch.seats.get(agent)
        if seat is None:
            self._net.dismiss(agent)
            return
        self._update(agent, replace(seat, heard=now))
        match message:
            case Up(round=number, rank=rank, frames=frames):
                self._pass_on(agent, number, rank, frames, now)
            case Ended(round=number, rank=rank, failure=failure):
                self._note_end(agent, number, rank, failure, now)
            case Stopped(round=number):
                if seat.running is not None and number >= seat.running:
                    self._update(agent, replace(seat, heard=now, running=None))
                self._dirty = True
            case Alarm(notice=notice):
                self._update(agent, replace(seat, heard=now, notice=notice, noticed=now))
                self._dirty = True
            case Beat():
                pass

    def _seat(self, agent: AgentId, join: Join, now: float) -> None:
        if join.run_id != self._ledger.run_id:
            self._net.send_down(agent, Rejected("other_run"))
            self._net.dismiss(agent)
            return
        if agent in self._watch.seats:
            self._lose(agent, now)  # a second connection: what was on the first may be lost
        noticed = now if join.notice else None
        seat = Seat(join.member, now, now, join.running, join.notice, noticed)
        gone = {lost: since for lost, since in self._watch.gone.items() if lost != agent}
        self._watch = replace(self._watch, gone=gone)
        self._update(agent, seat)
        if self._last_news is not None and join.next_slot < self._ledger.view.next_slot:
            self._net.send_down(agent, self._last_news)
        if join.running is not None and self._hub is not None and join.running == self._hub.round:
            self._doom(now)
        self._dirty = True

    def _lose(self, agent: AgentId, now: float) -> None:
        if agent not in self._watch.seats:
            return
        seats = {other: seat for other, seat in self._watch.seats.items() if other != agent}
        self._watch = replace(self._watch, seats=seats, gone={**self._watch.gone, agent: now})
        self._conductor.observe_soon()
        self._dirty = True
        if self._hub and self._ledger.view.round and self._ledger.view.round.place_of(agent):
            self._doom(now)

    def _update(self, agent: AgentId, seat: Seat) -> None:
        # The dictionary is replaced only when its keys change: a beat must not cost O(agents).
        if agent in self._watch.seats:
            self._watch.seats[agent] = seat
        else:
            self._watch = replace(self._watch, seats={**self._watch.seats, agent: seat})

    def _pass_on(
        self, agent: AgentId, number: int, rank: int, frames: Sequence[msgspec.Raw], now: float
    ) -> None:
        hub = self._hub
        round_ = self._ledger.view.round
        if hub is None or round_ is None or number != hub.round:
            return
        place = round_.place_of(agent)
        if place is None or rank not in place.ranks:
            return
        returned = len(hub.returned)
        for frame in frames:
            try:
                self._answer(hub.take(rank, frame, now))
            except UNREADABLE as error:
                told = f"The worker of rank {rank} sent something unreadable: {error}"
                self._note_end(agent, number, rank, RankFailure(rank, "died", told), now)
        if hub.ready or len(hub.returned) > returned:
            self._dirty = True

    def _answer(self, answers: Sequence[Answer]) -> None:
        round_ = self._ledger.view.round
        if round_ is None:
            return
        for rank, frame in answers:
            if rank is None:
                for place in round_.places:
                    self._net.send_down(place.agent, Down(round_.number, None, frame))
            else:
                holder = round_.holder_of(rank).agent
                self._net.send_down(holder, Down(round_.number, rank, frame))

    def _note_end(
        self, agent: AgentId, number: int, rank: int, failure: RankFailure | None, now: float
    ) -> None:
        if self._hub is None or number != self._hub.round or failure is None:
            return
        if rank not in self._watch.failures:
            self._watch = replace(self._watch, failures={**self._watch.failures, rank: failure})
        self._doom(now)

    def _doom(self, now: float) -> None:
        """The round cannot go on: everybody stops at once; the journal says so in a moment."""
        self._dirty = True
        if self._watch.doomed_since is not None:
            return
        self._watch = replace(self._watch, doomed_since=now)
        round_ = self._ledger.view.round
        for place in round_.places if round_ else ():
            self._net.send_down(place.agent, Halt(round_.number if round_ else 0))

    # --- what the journal says ---------------------------------------------------------------

    def learn(self, slot: int, body: bytes, entry: Entry, now: float) -> None:
        """An entry was folded (ours or not): tell everybody, and turn with it."""
        self._last_news = News(slot, body)
        self._dirty = True
        for agent in self._watch.seats:
            self._net.send_down(agent, self._last_news)
        view = self._ledger.view
        if snapshot.due(view):
            self._errands.send("snapshot", lambda: snapshot.write(self._ledger.store, view))
        match entry.event:
            case RoundOpened(round=opened):
                self._open(opened.number, opened.world_size, now)
            case RoundClosed():
                self._close(entry.event, now)
            case FitEnded():
                self._watch = replace(self._watch, turned_at=now)
                self._lease_at = now
            case CheckpointCommitted():
                self._committed(entry.event, now)
            case CheckpointDropped(name=name):
                self._to_drop.append(name)
            case Noticed():
                self._announce(now)
            case _:
                pass

    def _open(self, number: int, world_size: int, now: float) -> None:
        spec = self._ledger.view.spec
        assert spec is not None
        self._hub = Hub(
            number,
            world_size,
            name_for=self._name_for,
            collective_timeout_s=spec.collective_timeout_s,
            keep_all=spec.callbacks,
        )
        self._adopted = ()
        self._occupy(number)
        self._watch = replace(
            self._watch,
            turned_at=now,
            doomed_since=None,
            failures={},
            committed_at=None,
            surveyed=True,
        )

    def _occupy(self, number: int) -> None:
        """Whoever has a place is busy until it says `Stopped`."""
        round_ = self._ledger.view.round
        for place in round_.places if round_ else ():
            seat = self._watch.seats.get(place.agent)
            if seat is not None:
                self._update(place.agent, replace(seat, running=number))

    def _close(self, closed: RoundClosed, now: float) -> None:
        if self._hub is not None:
            self._tell_of(self._hub)
        if self._audience is not None and closed.failures:
            pickles = {one.rank: one.pickle_key for one in closed.failures if one.pickle_key}
            self._audience.failed(pickles, {one.rank: one.told for one in closed.failures})
        self._keep_metrics()
        if self._watch.doomed_since is None:
            for agent in self._watch.seats:
                self._net.send_down(agent, Halt(closed.number))
        self._adopted = tuple(self._hub.ready) if self._hub else ()
        self._hub = None
        self._watch = replace(
            self._watch, turned_at=now, doomed_since=None, failures={}, surveyed=False
        )

    def _committed(self, event: CheckpointCommitted, now: float) -> None:
        self._adopted = tuple(one for one in self._adopted if one.name != event.name)
        self._watch = replace(self._watch, committed_at=now)
        if self._hub is not None and event.round == self._hub.round:
            self._hub.ready = [one for one in self._hub.ready if one.report != event.report]
            self._answer([(None, Committed(event.name, event.metrics))])

    def _announce(self, now: float) -> None:
        """Tell every worker which nodes will go; the collective makes the ranks agree."""
        view = self._ledger.view
        if view.round is None or self._hub is None:
            return
        nodes = {
            f"{place.token}/{place.node}": tuple(place.ranks)
            for place in view.round.places
            if place.agent in view.notices
        }
        deadlines = [
            view.notices[place.agent].deadline_ms
            for place in view.round.places
            if place.agent in view.notices
        ]
        if nodes:
            self._answer([(None, Preempted(min(deadlines), nodes))])
        if view.spec and view.spec.relax_collectives:
            self._hub.excused = frozenset(rank for ranks in nodes.values() for rank in ranks) - {0}

    # --- one tick ----------------------------------------------------------------------------

    def tick(self, now: float) -> float:
        """Act on whatever is due. Returns when to be woken."""
        view = self._ledger.view
        tempo = view.spec.tempo if view.spec else None
        assert tempo is not None
        lease_s = min(tempo.lease_s, LEFTOVERS_S / 4) if view.ended else tempo.lease_s
        self._breathe(now, tempo.beat_s, tempo.silent_s, lease_s)
        self._survey(view)
        self._delete_dropped()
        self._tell(view, now)
        if self._hub is not None and (late := self._hub.late(now)):
            self._answer(late)
        self._conductor.observe(now, every_s=self._observe_every(view, tempo.observe_s))
        if self._conductor.statuses is not self._watch.statuses:
            self._watch = replace(self._watch, statuses=self._conductor.statuses)
            self._dirty = True
        if self._dirty or now >= self._wait_until:
            self._conduct(now)
        return self._next_wake(now, tempo.beat_s)

    @property
    def resting(self) -> bool:
        """Whether the fit has ended and nothing of it is left to let go."""
        return self._conductor.resting

    def _conduct(self, now: float) -> None:
        again = True
        while again and self._ledger.view.leads(self._ledger.me):
            again, wait = self._conductor.step(self._present(now), now)
            self._wait_until = wait.until
        self._dirty = False  # not before: where the store fails, all of this is judged once more

    def _present(self, now: float) -> Watch:
        hub = self._hub
        self._watch = replace(
            self._watch,
            returned=frozenset(hub.returned) if hub else frozenset(),
            settled=hub is None or (hub.settled and self._told_all()),
            ready=(*self._adopted, *(hub.ready if hub else ())),
            refused_at=self._conductor.refused_at,
            granted=self._granted(now),
            metrics=(hub.metrics if hub else None) or self._watch.metrics,
            result_key=keys.result(hub.round, 0) if hub and 0 in hub.returned else None,
            callback_failure=self._audience.trouble() if self._audience else None,
        )
        return self._watch

    def _keep_metrics(self) -> None:
        if self._hub is not None and self._hub.metrics is not None:
            self._watch = replace(self._watch, metrics=self._hub.metrics)

    def _told_all(self) -> bool:
        return self._audience is None or self._audience.caught_up

    def _granted(self, now: float) -> dict[Token, float]:
        granted = self._watch.granted
        new = [
            token
            for token, status in self._conductor.statuses.items()
            if token not in granted and any(node.state == "running" for node in status.nodes)
        ]
        return {**granted, **dict.fromkeys(new, now)} if new else granted

    def _breathe(self, now: float, beat_s: float, silent_s: float, lease_s: float) -> None:
        if now >= self._lease_at:
            self._lease_at = now + lease_s
            self._errands.send("lease", self._ledger.renew_lease)
        if now >= self._beat_at:
            self._beat_at = now + beat_s
            for agent, seat in list(self._watch.seats.items()):
                if now - seat.heard > silent_s and agent != self._ledger.me:
                    self._net.dismiss(agent)
                    self._lose(agent, now)
                else:
                    self._net.send_down(agent, Beat())

    def _survey(self, view: View) -> None:
        """Look for complete checkpoints nobody committed, before the next round starts from one."""
        if self._watch.surveyed or view.round is not None or view.ended is not None:
            return
        known = {kept.name for kept in view.checkpoints} | view.dropped
        done = self._errands.run("survey", lambda: ready_in(self._ledger.store, known))
        if done is not None and done.error is None:
            self._adopted = tuple(one for one in done.value if _is_news(view, one))
            self._watch = replace(self._watch, surveyed=True)
            self._dirty = True

    def _delete_dropped(self) -> None:
        if self._to_drop:
            name = self._to_drop[0]
            done = self._errands.run(f"drop {name}", lambda: drop(self._ledger.store, name))
            if done is not None and not isinstance(done.error, TransientStoreError):
                self._to_drop.pop(0)

    def _tell(self, view: View, now: float) -> None:
        """Pass matched reports on: to the callbacks, and to the metrics file in the bucket."""
        if self._hub is not None:
            self._tell_of(self._hub)
            if self._hub.returned:
                self._dirty = True
        if self._audience is not None and self._audience.trouble() is not None:
            self._dirty = True
        ended = view.ended is not None
        body = self._reports.due(now, at_once=ended)
        if body is not None:
            key = keys.reports(self._ledger.me, body[0])
            done = self._errands.run(
                f"reports {body[0]}", lambda: self._ledger.store.put(key, body[1])
            )
            if done is not None and done.error is None:
                self._reports.kept(body[0])

    def _tell_of(self, hub: Hub) -> None:
        uncommitted = {one.name for one in hub.ready}
        while hub.told and hub.told[0].checkpoint not in uncommitted:
            told = hub.told.popleft()
            self._reports.add(hub.round, told)
            if self._audience is not None:
                self._audience.reported(told.metrics, told.checkpoint)

    def _observe_every(self, view: View, observe_s: float) -> float:
        """Often while somebody is missing, rarely while all is well."""
        everybody_here = view.round is not None and not self._watch.gone
        return observe_s * 10 if everybody_here else observe_s

    def _next_wake(self, now: float, beat_s: float) -> float:
        wakes = [self._wait_until, self._beat_at, self._lease_at]
        if self._hub is not None and (timeout := self._hub.next_timeout()) is not None:
            wakes.append(timeout)
        if not self._watch.surveyed or self._to_drop or self._reports.waiting:
            wakes.append(now + 0.1)
        return min(wakes)


def _is_news(view: View, found: Ready) -> bool:
    """Whether it was saved after all that is committed: else it would take the run back."""
    latest = view.latest_checkpoint
    return latest is None or (found.round, found.report) > (latest.round, latest.report)


class _ReportSink:
    """Matched reports on their way to the bucket, in numbered chunks."""

    def __init__(self) -> None:
        self._lines: list[bytes] = []
        self._size = 0
        self._chunk: tuple[int, bytes] | None = None
        self._next = 0
        self._due_at = 0.0

    @property
    def waiting(self) -> bool:
        return bool(self._lines) or self._chunk is not None

    def add(self, round_number: int, told: Told) -> None:
        name = msgspec.json.encode(told.checkpoint)
        line = b'{"round":%d,"n":%d,"checkpoint":%s,"metrics":%s}' % (
            round_number,
            told.n,
            name,
            bytes(told.metrics[0]),
        )
        self._lines.append(line)
        self._size += len(line)

    def due(self, now: float, *, at_once: bool) -> tuple[int, bytes] | None:
        """The chunk to be written now, if one is due."""
        if (
            self._chunk is None
            and self._lines
            and (at_once or now >= self._due_at or self._size > _REPORTS_BYTES)
        ):
            self._chunk = (self._next, b"\n".join(self._lines) + b"\n")
            self._next += 1
            self._lines, self._size = [], 0
            self._due_at = now + _REPORTS_EVERY_S
        return self._chunk

    def kept(self, n: int) -> None:
        if self._chunk is not None and self._chunk[0] == n:
            self._chunk = None
