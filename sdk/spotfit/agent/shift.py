"""This node's part in the run: it enters a round once, passes its workers' words on, and stops."""

from __future__ import annotations

from functools import partial
from typing import Generic, Literal, NamedTuple, TypeVar, assert_never

import msgspec
from msgspec.structs import replace

from spotfit.agent.ports import (
    ORPHANED,
    CopyKept,
    Crew,
    CrewEvent,
    Examined,
    Exited,
    Net,
    Said,
    Spoiled,
    Unheard,
)
from spotfit.agent.pulse import beat_s
from spotfit.agent.workplace import Workplace
from spotfit.control.errands import Insistent
from spotfit.core.codec import decoder, encode
from spotfit.core.ids import AgentId
from spotfit.ledger import keys
from spotfit.model.cadence import Odds
from spotfit.model.events import RankFailure
from spotfit.model.holding import Part
from spotfit.model.view import View
from spotfit.model.wire import (
    Copied,
    Delivered,
    Ended,
    Proceed,
    Raised,
    Returned,
    Stacks,
    Start,
    Stopped,
    ToWorker,
    Unable,
    Unwell,
    Up,
)
from spotfit.model.world import Place, Round
from spotfit.policy.recovery import keepers, sources
from spotfit.provision.launch import Launch
from spotfit.store.api import Store

Told = TypeVar("Told")
_raised = decoder(Raised)
_returned = decoder(Returned)


class _Owed(NamedTuple, Generic[Told]):
    """What must be in the bucket before the leader is told of it."""

    key: str
    body: bytes
    told: Told


class Shift:
    """Whom the workers of this node work for, round after round."""

    def __init__(
        self,
        *,
        me: AgentId,
        crew: Crew,
        net: Net,
        store: Store,
        workplace: Workplace,
        launch: Launch,
        devices: tuple[str, ...],
        scratch: str,
    ) -> None:
        self._me = me
        self._crew = crew
        self._net = net
        self._store = store
        self._workplace = workplace
        self._errands = Insistent(workplace.errands())
        self._launch = launch
        self._devices = devices
        self._scratch = scratch
        self.round: int | None = None
        """The round whose workers were started here and are not all gone."""
        self.entered = -1
        """The last round entered here, or halted before it was; none is entered twice."""
        self.carrying: int | None = None
        """The round we told the leader we still upload for, though its workers are gone."""
        self.held: tuple[Part, ...] = ()
        """What lay in this node's memory when the last worker was gone."""
        self.unable: RankFailure | None = None
        """Why no worker can ever be started here."""
        self._halted = False
        self._copies_to = ""
        """The vault that keeps copies of what is saved here."""
        self._raised: set[int] = set()
        self._returned: set[int] = set()
        self._kept = False
        """Whether workers whose function returned are still to be called by a backend's hooks."""
        self._exceptions: dict[str, bytes] = {}
        """By key, what is on its way into the bucket."""
        self._result: _Owed[msgspec.Raw] | None = None
        """What rank 0 returned: nobody may say before that the run is finished."""
        self._verdict: _Owed[RankFailure] | None = None
        """Why this machine is of no use: the run may end with it before any round is opened."""

    @property
    def busy(self) -> bool:
        """Whether any worker lives here."""
        return self._crew.busy

    @property
    def owes(self) -> bool:
        """Whether the bucket does not hold yet what workers left for others to read."""
        return bool(self._exceptions)

    # --- what the journal and the leader order -----------------------------------------------

    def follow(self, view: View, hub: str | None) -> None:
        """Be where the journal says: start what it opened, end what it closed.

        A round is entered once, and only under the eyes of the hub that opened it.
        """
        opened = view.round
        carrying = self._crew.carrying
        if opened is not None and carrying is not None and carrying < opened.number:
            self._crew.give_up()  # nobody waits for it any more, and its names may be used again
        if self.round is not None and (opened is None or opened.number != self.round):
            self.stop()
        if opened is not None and opened.number == self.round and not self._halted:
            self._route_copies(view, opened)
        if opened is None or self.round is not None or self._crew.busy:
            return
        place = opened.place_of(self._me)
        watched = view.leader is not None and hub is not None and hub == view.leader.hub
        if place is not None and watched and opened.number > self.entered:
            self._begin(view, opened, place)

    def stop(self) -> None:
        """End all workers: what they say and how they end from now on is our doing."""
        self._halted = True
        self._result = None  # of a round that was not finished
        self._crew.halt()

    def halt(self, number: int) -> None:
        """End that round's workers; a round not entered yet is never entered any more."""
        self.entered = max(self.entered, number)
        if number == self.round:
            self.stop()
        else:
            self._net.send_up(Stopped(number, held=self.held))

    def examine(self, number: int, examination: int) -> None:
        """Find out what the workers of that round are doing."""
        if number == self.round:
            self._crew.examine(examination)

    def pass_down(self, number: int, rank: int | None, frame: ToWorker, view: View) -> None:
        """To one worker of that round, or to all of them here."""
        self._kept = self._kept and frame != Proceed("leave")
        place = view.round.place_of(self._me) if view.round and number == self.round else None
        for one in place.ranks if place else ():
            if rank is None or rank == one:
                self._crew.send(one, frame)

    def _begin(self, view: View, opened: Round, place: Place) -> None:
        self.round = self.entered = opened.number
        self._halted = False
        self._raised, self._returned = set(), set()
        self._kept = view.spec is not None and view.spec.hooks
        self._copies_to = self._keeper(view, opened)
        self._crew.start([self._start(view, opened, place, rank) for rank in place.ranks])

    def _start(self, view: View, opened: Round, place: Place, rank: int) -> Start:
        spec = view.spec
        assert spec is not None
        metrics = view.metrics_of(opened.checkpoint) if opened.checkpoint else None
        return Start(
            run_id=self._launch.run_id,
            run_name=spec.name,
            round=opened.number,
            rank=rank,
            local_rank=rank - place.first_rank,
            world_size=opened.world_size,
            local_world_size=place.workers,
            node_rank=place.node_rank,
            host=place.host,
            storage_url=spec.storage_url,
            framework=spec.framework,
            framework_options=spec.framework_options,
            luggage=spec.luggage,
            checkpoint=opened.checkpoint,
            checkpoint_metrics=metrics,
            snapshots=any(one.snapshot for one in view.checkpoints),
            memory=opened.memory if opened.holders else None,
            elsewhere=sources(opened, self._me) if opened.holders else (),
            copies_to=self._copies_to,
            devices=self._devices,
            scratch=self._scratch,
            collective_timeout_s=spec.collective_timeout_s,
            relax_collectives=spec.relax_collectives,
            hooks=spec.hooks,
            share_devices=spec.share_devices,
            pulse_s=beat_s(spec.vigil.silent_s),
            log_level=spec.log_level,
            secret=self._launch.secret,
            odds=Odds(spec.market, len(opened.places), view.endings, view.group_age_s),
            spec=msgspec.Raw(encode(spec)),
        )

    def _route_copies(self, view: View, opened: Round) -> None:
        """Who keeps them may have had a notice since."""
        keeper = self._keeper(view, opened)
        if keeper != self._copies_to:
            self._copies_to = keeper
            self._crew.copy_to(keeper)

    def _keeper(self, view: View, opened: Round) -> str:
        """The vault that keeps copies of what is saved here; empty where no other machine stays."""
        keeper = keepers(opened.places, leaving=view.notices).get(self._me)
        place = opened.place_of(keeper) if keeper is not None else None
        return place.vault if place is not None else ""

    # --- what the workers say ----------------------------------------------------------------

    def hear(self, now: float) -> None:
        """Pass on what the workers said, and tell when the last of them is gone."""
        # Looked at first: whatever the last of them said is in the events.
        busy, carrying = self._crew.busy, self._crew.carrying
        for event in self._crew.events():
            self._take(event)
        self._keep(now)
        if self.round is not None and not busy and self._result is None:
            stopped, self.round = self.round, None
            self.carrying = stopped if carrying == stopped else None
            self.held = self._crew.held
            self._net.send_up(Stopped(stopped, self.carrying is not None, self.held))
        elif self.carrying is not None and carrying != self.carrying:
            delivered, self.carrying = self.carrying, None
            self._net.send_up(Delivered(delivered))

    def _take(self, event: CrewEvent) -> None:
        match event:
            case Said(round=number, rank=rank, frames=frames):
                self._forward(number, rank, frames)
            case Exited():
                self._note_exit(event)
            case Unheard(round=number, rank=rank, silent_s=silent_s):
                self._net.send_up(Unwell(number, rank, silent_s))
            case Examined(round=number, examination=examination, rank=rank, told=told):
                self._net.send_up(Stacks(number, examination, rank, told))
            case Spoiled(raised=raised):
                self._note_spoiled(raised)
            case CopyKept(round=number, rank=rank, step=step, vault=vault):
                self._net.send_up(Copied(number, rank, step, vault))
            case _:
                assert_never(event)

    def _forward(self, number: int, rank: int, frames: list[msgspec.Raw]) -> None:
        """Pass a worker's frames up; those that end it also concern us."""
        if number != self.round or not frames:
            return
        onward = frames
        last = bytes(frames[-1])
        if last.startswith(b'{"type":"raised"'):
            onward = frames[:-1]
            self._note_raised(number, rank, _raised.decode(last))
        elif last.startswith(b'{"type":"returned"'):
            onward = [*frames[:-1], *self._note_returned(number, rank, _returned.decode(last))]
        if onward:
            self._net.send_up(Up(number, rank, onward))

    def _note_raised(self, number: int, rank: int, raised: Raised) -> None:
        self._raised.add(rank)
        if self._halted:
            return
        key = keys.failure(number, rank) if raised.value else None
        failure = RankFailure(rank, "raised", raised.told, key, raised.blame, raised.final)
        self._net.send_up(Ended(number, rank, failure))
        if key is not None:
            self._exceptions[key] = self._workplace.seal(raised.value, key)

    def _note_spoiled(self, raised: Raised) -> None:
        key = keys.machine_failure(self._me)
        failure = RankFailure(0, "raised", raised.told, key, raised.blame, raised.final)
        self._verdict = _Owed(key, self._workplace.seal(raised.value, key), failure)

    def _note_returned(self, number: int, rank: int, returned: Returned) -> list[msgspec.Raw]:
        """The frame for the leader; none yet for what must be in the bucket before."""
        self._returned.add(rank)
        frame = msgspec.Raw(encode(replace(returned, value=b"")))
        if rank > 0 or not returned.value:
            return [frame]
        if self._halted:
            return []
        key = keys.result(number, rank)
        self._result = _Owed(key, self._workplace.seal(returned.value, key), frame)
        return []

    def _keep(self, now: float) -> None:
        """Write what others will read; of an exception they may hear before it is there."""
        for key, body in list(self._exceptions.items()):
            if self._written(key, body, now):
                del self._exceptions[key]
        result, verdict = self._result, self._verdict
        if result is not None and self._written(result.key, result.body, now):
            self._result = None
            assert self.round is not None
            self._net.send_up(Up(self.round, 0, [result.told]))
        if verdict is not None and self._written(verdict.key, verdict.body, now):
            self.unable, self._verdict = verdict.told, None
            self._net.send_up(Unable(verdict.told))

    def _written(self, key: str, body: bytes, now: float) -> bool:
        return self._errands.run(key, partial(self._store.put, key, body), now) is not None

    def _is_done(self, rank: int) -> bool:
        return rank in self._raised or (rank in self._returned and not self._kept)

    def _note_exit(self, event: Exited) -> None:
        ours = event.ordered or (self._halted and event.clean)
        if event.round != self.round or ours or self._is_done(event.rank):
            return
        early = " before its function had returned" if event.clean else ""
        told = f"The worker of rank {event.rank} {event.how}{early}."
        kind: Literal["died", "lost"] = "lost" if event.how == ORPHANED else "died"
        failure = RankFailure(event.rank, kind, told)
        self._net.send_up(Ended(event.round, event.rank, failure))
