"""What an agent does while it leads: it seats the others, serves the round's hub, and conducts.

All of it is soft. Should this agent die, its successor has the journal and the bucket, and the
others dial in anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from spotfit.agent.hub import Hub
from spotfit.agent.lease import Lease
from spotfit.agent.legacy import Legacy
from spotfit.agent.open_round import OpenRound
from spotfit.agent.ports import AgentLost, Audience, FromAgent, Hooks, Net
from spotfit.agent.reports import ReportSink
from spotfit.agent.seating import Seating
from spotfit.agent.staging import Staging
from spotfit.agent.tidying import Tidying
from spotfit.agent.warden import Warden
from spotfit.control.conductor import Conductor
from spotfit.control.errands import Errands
from spotfit.control.scribe import Scribe
from spotfit.core.ids import AgentId, Token
from spotfit.ledger import keys, snapshot
from spotfit.model.events import (
    CheckpointCommitted,
    CheckpointDropped,
    Entry,
    FitEnded,
    NodeLost,
    Noticed,
    RankFailure,
    Released,
    RoundClosed,
    RoundOpened,
    TrainingEnded,
    ValidationBegun,
    ValidationEnded,
)
from spotfit.model.spec import Tempo
from spotfit.model.view import View
from spotfit.model.watch import Copy, Trouble, Watch
from spotfit.model.wire import (
    Advise,
    Alarm,
    Assessed,
    Beat,
    Committed,
    Copied,
    Delivered,
    Ended,
    FromLeader,
    Halt,
    Join,
    Judged,
    News,
    Rejected,
    SaveSoon,
    Stacks,
    Stopped,
    ToLeader,
    Unable,
    Unwell,
    Up,
    Warm,
)
from spotfit.model.world import Round
from spotfit.policy import uploads
from spotfit.policy.drain import may_outlive, replaced
from spotfit.policy.election import LEFTOVERS_S

_SOON_S = 0.1


class Leader:
    """One term of leadership. `hear` takes what agents say, `learn` what the journal says, and
    `tick` acts on both."""

    def __init__(
        self,
        *,
        scribe: Scribe,
        net: Net,
        conductor: Conductor,
        errands: Errands,
        journal_errands: Errands,
        reports: ReportSink,
        audience: Audience | None,
        hooks: Hooks | None,
        name_for: Callable[[int], str],
        say: Callable[[str], None],
        ends_itself: bool,
        now: float,
    ) -> None:
        ledger = scribe.ledger
        self.epoch = ledger.view.epoch
        self._scribe = scribe
        self._ledger = ledger
        self._net = net
        self._conductor = conductor
        self._errands = errands
        self._reports = reports
        self._audience = audience
        self._hooks = hooks
        self._name_for = name_for
        self._say = say
        self._seating = Seating(ledger.me, net)
        self._watch = Watch(
            me=ledger.me,
            ends_itself=ends_itself,
            led_since=now,
            turned_at=now,
            surveyed=False,
            validation_at=now,
        )
        self._round: OpenRound | None = None
        """That this leader has opened, while it lasts."""
        self._legacy = Legacy(ledger, errands)
        self._lease = Lease(ledger, journal_errands, now)
        self._early: list[tuple[AgentId, Up | Ended | Stopped]] = []
        """Said in a round that our own store has not told us of yet."""
        self._tidying = Tidying(ledger.store, errands, lambda: ledger.view.leads(ledger.me))
        self._last_news: News | None = None
        self._beat_at = now
        self._dirty = True
        self._wait_until = now
        if ledger.view.round is not None:
            self._doom(now)  # somebody else opened it; its hub is gone

    @property
    def resting(self) -> bool:
        """Whether the fit has ended and nothing of it is left to let go."""
        left = self._reports.waiting or self._tidying.busy
        return self._conductor.resting and not left

    # --- what agents say ---------------------------------------------------------------------

    def hear(self, event: FromAgent | AgentLost, now: float) -> None:
        """Take in one event of the wire."""
        match event:
            case AgentLost(agent=agent):
                self._lose(agent, now)
            case FromAgent(agent=agent, message=Join() as join):
                self._seat(agent, join, now)
            case FromAgent(agent=agent, message=message):
                if self._seating.heard(agent, now) is None:
                    self._net.dismiss(agent)
                else:
                    self._take(agent, message, now)

    def _take(self, agent: AgentId, message: ToLeader, now: float) -> None:
        if isinstance(message, Up | Ended | Stopped) and self._is_ahead(message.round):
            self._early.append((agent, message))
            return
        match message:
            case Up() as up:
                self._pass_on(agent, up, now)
            case Ended(round=number, rank=rank, failure=failure):
                self._note_end(number, rank, failure, now)
            case Stopped() as stopped:
                self._note_stop(agent, stopped, now)
            case Copied() as copied:
                self._note_copy(copied, now)
            case Delivered(round=number):
                self._seating.delivered(agent, number)
                self._dirty = True
            case Unwell(round=number, rank=rank, silent_s=silent_s):
                if (round_ := self._if_open(number)) is not None:
                    round_.warden.unwell(rank, silent_s)
            case Stacks(round=number) as stacks:
                if (round_ := self._if_open(number)) is not None:
                    round_.warden.hear(stacks)
            case Alarm(notice=notice):
                self._seating.warned(agent, notice, now)
                self._dirty = True
            case Advise(reason=reason):
                if self._round is not None:
                    self._round.answer([(None, SaveSoon(reason))])
            case Warm():
                self._seating.warmed(agent)
                self._dirty = True
            case Unable(failure=failure):
                self._seating.spoiled(agent, failure)
                self._dirty = True
            case Assessed():
                self._take_assessed(message)
            case Beat() | Join():
                return

    def _take_assessed(self, told: Assessed) -> None:
        """How an attempt went. A machine whose connection broke tells it again, and may not know
        that this is old news: it must not hide what was told of a later attempt."""
        known = self._watch.assessed
        if known is None or told.attempt >= known.attempt:
            self._watch = replace(self._watch, assessed=told)
            self._dirty = True

    def _seat(self, agent: AgentId, join: Join, now: float) -> None:
        if join.run_id != self._ledger.run_id:
            self._net.send_down(agent, Rejected("other_run"))
            self._net.dismiss(agent)
            return
        self._lose(agent, now)  # a second connection: what was on the first may be lost
        self._seating.join(agent, join, now)
        if self._last_news is not None and join.next_slot < self._ledger.view.next_slot:
            self._net.send_down(agent, self._last_news)
        if self._if_open(join.running) is not None:
            self._doom(now)  # it was on the way when its connection broke
        round_ = self._ledger.view.round
        if self._watch.doomed_since is not None and round_ is not None and round_.place_of(agent):
            self._net.send_down(agent, Halt(round_.number))  # it was not here when all were told
        self._dirty = True

    def _lose(self, agent: AgentId, now: float) -> None:
        if not self._seating.lose(agent, now):
            return
        self._conductor.observe_soon()
        self._dirty = True
        view = self._ledger.view
        place = view.round.place_of(agent) if view.round else None
        if place is None or self._round is None:
            return
        self._round.answer(self._round.hub.cut_off(place.ranks))
        if not may_outlive(view, place):
            self._doom(now)

    def _if_open(self, number: int | None) -> OpenRound | None:
        """The round of that number, if that is the one we have opened."""
        return self._round if self._round and self._round.hub.round == number else None

    def _note_end(self, number: int, rank: int, failure: RankFailure | None, now: float) -> None:
        if failure is None or self._if_open(number) is None:
            return
        if rank not in self._watch.failures:
            self._watch = replace(self._watch, failures={**self._watch.failures, rank: failure})
        self._doom(now)

    def _note_stop(self, agent: AgentId, stopped: Stopped, now: float) -> None:
        """All is well if all its workers had returned; else the round lost them unseen."""
        number = stopped.round
        self._seating.stopped(agent, number, carrying=stopped.carrying, held=stopped.held)
        self._dirty = True
        view, round_ = self._ledger.view, self._if_open(number)
        place = view.round.place_of(agent) if view.round and round_ else None
        if place is not None and round_ and not round_.hub.returned.issuperset(place.ranks):
            self._doom(now)

    def _note_copy(self, copied: Copied, now: float) -> None:
        if self._if_open(copied.round) is not None:
            copy = Copy(copied.step, copied.vault, now)
            self._watch = replace(self._watch, copies={**self._watch.copies, copied.rank: copy})
            self._dirty = True

    def _pass_on(self, agent: AgentId, up: Up, now: float) -> None:
        round_ = self._if_open(up.round)
        if round_ is None:
            return
        hub = round_.hub
        returned = len(hub.returned)
        self._note_end(up.round, up.rank, round_.take(agent, up, now), now)
        if len(hub.returned) > returned:
            self._watch = replace(self._watch, returned_at=now)
        if hub.ready or len(hub.returned) > returned:
            self._dirty = True

    def _ask_places(self, round_: Round, message: FromLeader) -> None:
        for place in round_.places:
            self._net.send_down(place.agent, message)

    def _doom(self, now: float) -> None:
        """The round cannot go on: everybody stops at once; the journal says so in a moment."""
        self._dirty = True
        if self._watch.doomed_since is not None:
            return
        self._watch = replace(self._watch, doomed_since=now)
        if self._round is not None:
            self._round.lose_workers()
        round_ = self._ledger.view.round
        if round_ is not None:
            self._ask_places(round_, Halt(round_.number))

    # --- what the journal says ---------------------------------------------------------------

    def learn(self, slot: int, body: bytes, entry: Entry, now: float) -> None:
        """An entry was folded (ours or not): tell everybody, and turn with it."""
        self._last_news = News(slot, body)
        self._dirty = True
        self._seating.tell_all(self._last_news)
        view = self._ledger.view
        if snapshot.due(view):
            self._errands.send("snapshot", lambda: snapshot.write(self._ledger.store, view))
        match entry.event:
            case RoundOpened(round=opened):
                self._begin_round(opened, now)
            case RoundClosed() as closed:
                self._end_round(closed, now)
            case TrainingEnded():
                self._end_training(now)
            case FitEnded():
                self._watch = replace(self._watch, turned_at=now)
                self._lease.hasten(now)
            case CheckpointCommitted() as committed:
                self._committed(committed, now)
            case CheckpointDropped(name=name):
                self._tidying.drop(name)
            case Noticed():
                if self._round is not None:
                    self._round.announce(view, self._watch, now)
            case NodeLost(token=token, node=node, agent=agent):
                self._seating.forget(token, node, agent)
                self._turn_validation((token,), now)
            case Released(token=token, others=others):
                self._turn_validation((token, *others), now)
            case ValidationBegun():
                self._watch = replace(self._watch, validation_at=now)
            case ValidationEnded(name=name):
                self._watch = replace(self._watch, validation_at=now)
                if self._round is not None:
                    self._round.answer([(None, Judged(name))])
            case _:
                return

    def _is_ahead(self, number: int) -> bool:
        """Whether an agent has read of a round that we opened before our own store told us so."""
        last = self._ledger.view.last_round
        return number > (last.number if last else 0)

    def _hear_early(self, opened: Round, now: float) -> None:
        """What agents said in that round while our entry was under way."""
        early, self._early = self._early, []
        for agent, message in early:
            if message.round == opened.number and agent in self._seating.seats:
                self._take(agent, message, now)

    def _begin_round(self, opened: Round, now: float) -> None:
        self._legacy.open(opened.number)
        self._round = self._opened(opened, now)
        self._tidying.search(self._ledger.view, before=opened.number)
        self._seating.occupy(opened.places, opened.number)
        self._watch = replace(
            self._watch,
            turned_at=now,
            doomed_since=None,
            failures={},
            returned_at=None,
            saving=frozenset(),
            committed_at=None,
            taken_at=None,
            copies={},
            surveyed=True,
        )
        for place in opened.places:
            if not self._seating.can_enter(place, opened.number):
                self._round.answer(self._round.hub.cut_off(place.ranks))
                self._doom(now)  # it left between the decision and its entry
        self._hear_early(opened, now)

    def _opened(self, opened: Round, now: float) -> OpenRound:
        spec = self._ledger.view.spec
        assert spec is not None
        hub = Hub(
            opened.number,
            opened.world_size,
            name_for=self._name_for,
            base_for=lambda: self._legacy.base(self._ledger.view, hub),
            last_called=self._legacy.last_called,
            collective_timeout_s=spec.collective_timeout_s,
            collective_warn_s=spec.collective_warn_s,
            keep_all=spec.callbacks,
            now=now,
        )
        return OpenRound(
            opened,
            hub,
            Warden(
                hub,
                spec.vigil,
                ask=partial(self._ask_places, opened),
                ledger=self._ledger,
                errands=self._errands,
            ),
            Staging(hub, self._hooks, spec.resources_per_worker) if self._hooks else None,
            net=self._net,
            tidying=self._tidying,
            reports=self._reports,
            audience=self._audience,
        )

    def _end_round(self, closed: RoundClosed, now: float) -> None:
        if self._round is not None:
            self._round.tell_matched()  # what was committed a moment ago is told, too
            self._round.note_names()
            self._legacy.adopt(self._round.hub)
        if self._audience is not None and closed.failures:
            pickles = {one.rank: one.pickle_key for one in closed.failures if one.pickle_key}
            self._audience.failed(pickles, {one.rank: one.told for one in closed.failures})
        if self._watch.doomed_since is None:
            self._seating.tell_all(Halt(closed.number))
        self._watch = replace(
            self._watch,
            unsaved_s=self._unsaved_s(now),
            turned_at=now,
            doomed_since=None,
            failures={},
            surveyed=False,
            metrics=self._latest_metrics(),
        )
        self._forget_the_round()

    def _forget_the_round(self) -> None:
        if self._round is not None:
            self._legacy.take(self._round.hub)
            self._round.close()
            self._round = None

    def _unsaved_s(self, now: float) -> float:
        """How long the round that ends has worked since it saved; only who opened it can say."""
        if self._round is None:
            return math.inf
        saved_at = self._watch.committed_at
        return now - (self._watch.turned_at if saved_at is None else saved_at)

    def _end_training(self, now: float) -> None:
        """No round follows; what the last one said is told, and its metrics stay."""
        if self._round is not None:
            self._round.tell_matched()
        self._watch = replace(
            self._watch,
            turned_at=now,
            doomed_since=None,
            failures={},
            metrics=self._latest_metrics(),
        )
        self._forget_the_round()

    def _turn_validation(self, lost: Sequence[Token], now: float) -> None:
        """Machines are gone: one that validated may take its time again to be replaced."""
        groups = self._ledger.view.groups
        if any(token in groups and groups[token].role == "validate" for token in lost):
            self._watch = replace(self._watch, validation_at=now)

    def _committed(self, event: CheckpointCommitted, now: float) -> None:
        self._legacy.committed(event.name)
        known = self._watch.ready if event.snapshot else ()
        taken_at = next((one.taken_at for one in known if one.name == event.name), None)
        self._watch = replace(self._watch, committed_at=now, taken_at=taken_at)
        if event.validation is not None and len(self._ledger.view.unvalidated) == 1:
            self._watch = replace(self._watch, validation_at=now)
        if (round_ := self._if_open(event.round)) is not None:
            round_.hub.ready = [one for one in round_.hub.ready if one.report != event.report]
            round_.answer([(None, Committed(event.name, event.metrics))])

    # --- one tick ----------------------------------------------------------------------------

    def tick(self, now: float) -> float:
        """Act on whatever is due. Returns when to be woken."""
        view = self._ledger.view
        assert view.spec is not None
        self._breathe(view, view.spec.tempo, now)
        self._survey(view, now)
        self._tidy(view, now)
        self._tell(view, now)
        if self._round is not None:
            self._round.answer(self._round.hub.late(now))
        self._look_for_hangs(now)
        self._conductor.observe(now, every_s=self._observe_every(view, view.spec.tempo))
        if self._conductor.statuses is not self._watch.statuses or now >= self._wait_until:
            self._dirty = True
        if self._watch.doomed_since is not None and self._conductor.seen is not self._watch.seen:
            self._dirty = True  # that a machine runs on is news, too, where somebody is missing
        if self._dirty:
            self._conduct(now)
        return self._next_wake(now)

    def _conduct(self, now: float) -> None:
        """Judge until there is nothing to do; while an entry is on its way, nothing is judged."""
        self._hasten_saves(now)
        again = True
        while again and self._scribe.settled and self._ledger.view.leads(self._ledger.me):
            again, wait = self._conductor.step(self._present(), now)
            self._wait_until = wait.until
        self._dirty = not self._scribe.settled

    def _hasten_saves(self, now: float) -> None:
        """Workers save at once where nothing else is waited for."""
        view, round_ = self._ledger.view, self._round
        if not view.notices or round_ is None or round_.replaced_at is not None:
            return
        if replaced(view, self._present()):
            round_.announce(view, self._watch, now)

    def _present(self) -> Watch:
        """The picture judgement is passed on."""
        hub, view, seating = self._hub, self._ledger.view, self._seating
        self._watch = replace(
            self._watch,
            seats=seating.seats,
            gone=seating.gone,
            broken=seating.broken,
            noticed_at=seating.noticed_at,
            replaced_at=self._round.replaced_at if self._round is not None else None,
            known=seating.known,
            stopped=view.round is None or seating.stopped_all(view.round.places),
            running=hub.running if hub else set(),
            returned=hub.returned if hub else set(),
            saving=hub.uploading if hub else frozenset(),
            unsaved=hub.unsaved if hub else "",
            settled=(hub is None or hub.settled) and self._told_all() and self._all_performed(),
            ready=self._legacy.uncommitted(view, hub),
            statuses=self._conductor.statuses,
            seen=self._conductor.seen,
            granted=self._conductor.granted,
            refused_at=self._conductor.refused_at,
            validator_refused_at=self._conductor.validator_refused_at,
            metrics=self._latest_metrics(),
            result_key=keys.result(hub.round, 0) if hub and 0 in hub.returned else None,
            trouble=self._trouble(),
        )
        return self._watch

    @property
    def _hub(self) -> Hub | None:
        return self._round.hub if self._round else None

    def _latest_metrics(self) -> dict[str, Any] | None:
        latest = self._hub.metrics if self._hub else None
        return latest if latest is not None else self._watch.metrics

    def _trouble(self) -> Trouble | None:
        """The first of the user's callbacks and hooks that raised."""
        troubles = (one.trouble() for one in (self._audience, self._hooks) if one is not None)
        return next(filter(None, troubles), None)

    def _all_performed(self) -> bool:
        """Whether no hook is left: those of an open round come to their end with it."""
        if self._round is not None and self._round.staging is not None:
            return self._round.staging.done
        return self._hooks is None or self._hooks.caught_up

    def _told_all(self) -> bool:
        return self._audience is None or self._audience.caught_up

    def _breathe(self, view: View, tempo: Tempo, now: float) -> None:
        self._lease.keep(LEFTOVERS_S / 4 if view.ended else tempo.lease_s, now)
        if now >= self._beat_at:
            self._beat_at = now + tempo.beat_s
            for agent in self._seating.silent(tempo.silent_s, now):
                self._net.dismiss(agent)
                self._lose(agent, now)
            self._seating.greet_all()

    def _survey(self, view: View, now: float) -> None:
        """Look for complete checkpoints nobody committed, before the next round starts from one."""
        if self._watch.surveyed or view.round is not None or view.ended is not None:
            return
        if uploads.awaited(view, self._present(), now) is not None:
            return
        if self._legacy.search(view, now):
            self._watch = replace(self._watch, surveyed=True)
            self._dirty = True

    def _tidy(self, view: View, now: float) -> None:
        if self._round is not None:
            self._round.note_names()
        if view.training_ended is not None or view.ended is not None:
            self._tidying.inherit(view)
        hub = self._hub
        bases = hub.bases if hub else self._legacy.bases
        self._tidying.go_on(view, hub.saving if hub else (), now, bases)

    def _tell(self, view: View, now: float) -> None:
        """Pass on what workers have reported, and what is asked of them."""
        if self._round is not None:
            self._round.tell_matched()
            self._dirty |= bool(self._round.hub.returned)
            self._round.proceed()
        self._dirty |= self._trouble() is not None
        self._reports.flush(now, at_once=view.ended is not None)

    def _look_for_hangs(self, now: float) -> None:
        if self._round is None or self._watch.doomed_since is not None:
            return
        found = self._round.look_for_hangs(self._ledger.view, now)
        if found is None:
            return
        self._say(found.told)
        for rank in found.hang.ranks if found.hang.ends_it else ():
            told = f"The worker of rank {rank} hung: {found.told}"
            self._note_end(self._round.hub.round, rank, RankFailure(rank, "timeout", told), now)

    def _observe_every(self, view: View, tempo: Tempo) -> float:
        """Often while somebody is missing, rarely while all is well."""
        everybody_here = view.round is not None and not self._seating.gone
        return tempo.observe_s * 10 if everybody_here else tempo.observe_s

    def _next_wake(self, now: float) -> float:
        wakes = [self._beat_at, self._lease.next_wake()]
        if self._scribe.settled:
            wakes.append(self._wait_until)
        if self._round is not None:
            wakes.append(self._round.next_wake(now))
        if not self._watch.surveyed or self._tidying.busy or self._reports.waiting:
            wakes.append(now + _SOON_S)
        return min(wakes)
