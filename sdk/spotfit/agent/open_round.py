"""The round that a leader has opened: its hub, and all who speak and listen there."""

from __future__ import annotations

import math
from collections.abc import Sequence

from spotfit.agent.collectives import Answer
from spotfit.agent.hub import Hub
from spotfit.agent.ports import Audience, Net
from spotfit.agent.reports import ReportSink
from spotfit.agent.staging import Staging
from spotfit.agent.tidying import Tidying
from spotfit.agent.warden import Finding, Warden
from spotfit.core.codec import UNREADABLE
from spotfit.core.ids import AgentId
from spotfit.model.events import RankFailure
from spotfit.model.view import View
from spotfit.model.watch import Watch
from spotfit.model.wire import Down, Preempted, Up
from spotfit.model.world import Round
from spotfit.policy.drain import replaced
from spotfit.policy.failure import taken
from spotfit.policy.validation import outstanding

_SOON_S = 0.1


class OpenRound:
    """Carries frames between agents and the hub, and what the hub finds out to whom it concerns.

    Its end is the end of this object; what must outlive it is taken from its `hub` before.
    """

    def __init__(
        self,
        round_: Round,
        hub: Hub,
        warden: Warden,
        staging: Staging | None,
        *,
        net: Net,
        tidying: Tidying,
        reports: ReportSink,
        audience: Audience | None,
    ) -> None:
        self.hub = hub
        self.warden = warden
        self.staging = staging
        self._round = round_
        self._net = net
        self._tidying = tidying
        self._reports = reports
        self._audience = audience
        self.replaced_at: float | None = None
        """Since when workers know that only their save is waited for."""

    # --- frames ------------------------------------------------------------------------------

    def take(self, agent: AgentId, up: Up, now: float) -> RankFailure | None:
        """What a worker says. The failure it is where nobody can read that."""
        place = self._round.place_of(agent)
        if place is None or up.rank not in place.ranks:
            return None
        failure: RankFailure | None = None
        for frame in up.frames:
            try:
                self.answer(self.hub.take(up.rank, frame, now))
            except UNREADABLE as error:
                told = f"The worker of rank {up.rank} sent something unreadable: {error}"
                failure = failure or RankFailure(up.rank, "died", told)
        return failure

    def answer(self, answers: Sequence[Answer]) -> None:
        """Tell workers what the hub says; None means all of them."""
        for rank, frame in answers:
            if rank is None:
                for place in self._round.places:
                    self._net.send_down(place.agent, Down(self._round.number, None, frame))
            else:
                holder = self._round.holder_of(rank).agent
                self._net.send_down(holder, Down(self._round.number, rank, frame))

    def announce(self, view: View, watch: Watch, now: float) -> None:
        """Tell every worker which nodes will go; the collective makes the ranks agree."""
        leaving = [place for place in self._round.places if place.agent in view.notices]
        if not leaving:
            return
        going = taken(leaving, view)
        stand_ready = replaced(view, watch)
        self.replaced_at = now if stand_ready else None
        self.answer([(None, Preempted(going.deadline_ms, going.nodes, stand_ready))])
        if view.spec and view.spec.relax_collectives:
            ranks = frozenset(rank for ranks in going.nodes.values() for rank in ranks)
            self.answer(self.hub.excuse(ranks))

    # --- what the hub finds out --------------------------------------------------------------

    def note_names(self) -> None:
        """Leave a note in the bucket of every name that was given."""
        while self.hub.given:
            given = self.hub.given.popleft()
            self._tidying.given(given.name, self.hub.round, made=given.made)

    def tell_matched(self) -> None:
        """Pass reports of all ranks on: to the callbacks, and to the metrics file in the bucket.

        In order; one whose checkpoint is not committed yet holds up those behind it.
        """
        uncommitted = {one.name for one in self.hub.ready}
        while self.hub.told and self.hub.told[0].checkpoint not in uncommitted:
            told = self.hub.told.popleft()
            self._reports.add(self.hub.round, told)
            if self._audience is not None:
                self._audience.reported(told.metrics, told.checkpoint)

    def proceed(self) -> None:
        """Perform the backend's hooks that are due."""
        if self.staging is not None:
            self.answer(self.staging.step())

    def look_for_hangs(self, view: View, now: float) -> Finding | None:
        """One that was looked into."""
        self.hub.validate(pending=bool(outstanding(view)), now=now)
        return self.warden.step(now)

    def next_wake(self, now: float) -> float:
        """When the hub or the warden has something to look at."""
        late = self.hub.next_late()
        look = max(self.warden.next_look(), now + _SOON_S)
        return min(look, math.inf if late is None else late)

    # --- its end -----------------------------------------------------------------------------

    def lose_workers(self) -> None:
        """It cannot go on: no hook shall wait for its workers."""
        if self.staging is not None:
            self.staging.lose_workers()

    def close(self) -> None:
        """It is over."""
        if self.staging is not None:
            self.staging.close()
