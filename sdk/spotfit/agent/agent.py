"""The agent of one node: a step machine over its ports. It dies of none of the user's sins.

`tick(now)` takes in what happened, does what is due and returns when it wants to be woken. It
never blocks for long, holds no clock and starts no thread: real time drives it in `driver`, a
virtual clock drives this same code in the simulator.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, assert_never

import msgspec
from msgspec.structs import replace

from spotfit.agent.leader import Leader
from spotfit.agent.ports import (
    AgentLost,
    Audience,
    Crew,
    CrewEvent,
    Exited,
    FromAgent,
    FromHub,
    HubLost,
    Net,
    NetEvent,
    NoticeSource,
    Said,
)
from spotfit.control.conductor import Conductor
from spotfit.control.errands import Errands
from spotfit.core.codec import decoder, encode
from spotfit.core.errors import TransientStoreError
from spotfit.core.ids import AgentId
from spotfit.ledger import keys
from spotfit.ledger.run import Ledger
from spotfit.model.events import Entry, LeaderElected, RankFailure
from spotfit.model.spec import RunSpec, Tempo
from spotfit.model.view import View
from spotfit.model.wire import (
    Alarm,
    Beat,
    Down,
    Ended,
    FromLeader,
    Halt,
    Join,
    News,
    Raised,
    Rejected,
    Returned,
    Start,
    Stopped,
    ToWorker,
    Up,
)
from spotfit.model.world import Member, Notice, Place, Round
from spotfit.policy.election import Sighting, claim
from spotfit.provision.api import Provisioner
from spotfit.provision.launch import Launch

_EAGER_POLL_S = 0.05
_EAGER_FOR_S = 3.0
_STORE_TROUBLE_S = 0.5
_REDIAL_S = 0.5
_raised = decoder(Raised)
_returned = decoder(Returned)


class Workplace(Protocol):
    """What an agent asks of its machine beyond the wire and the workers."""

    def provisioner(self, spec: RunSpec) -> Provisioner:
        """The backend of that run, for the one who leads."""
        ...

    def audience(self, spec: RunSpec) -> Audience | None:
        """A process for the run's callbacks, if it has any."""
        ...

    def errands(self) -> Errands:
        """Somebody for slow calls."""
        ...

    def sign(self, payload: bytes, purpose: str) -> bytes:
        """An envelope only the run's key can make."""
        ...

    def new_token(self) -> str: ...

    def name_for(self, report: int) -> str:
        """A directory name for a checkpoint that was given none."""
        ...


class Agent:
    """One life of one agent."""

    def __init__(
        self,
        *,
        member: Member,
        ledger: Ledger,
        net: Net,
        crew: Crew,
        notices: Sequence[NoticeSource],
        launch: Launch,
        workplace: Workplace,
        scratch: str = "",
    ) -> None:
        self._member = member
        self._ledger = ledger
        self._net = net
        self._crew = crew
        self._notices = notices
        self._launch = launch
        self._workplace = workplace
        self._scratch = scratch
        ledger.listen(self._heard)
        self._leader: Leader | None = None
        self._crew_events: deque[CrewEvent] = deque()
        self._net_events: deque[NetEvent] = deque()
        self._wakes: list[float] = []
        self._notice: Notice | None = None
        self._prepared = False
        self._offered = False
        self._round: int | None = None
        """The round whose workers were started here."""
        self._last_round = -1
        self._raised: dict[int, Raised] = {}
        self._returned: set[int] = set()
        self._hub: str | None = None
        """Where our uplink goes, while it stands."""
        self._heard_hub_at = 0.0
        self._watched: AgentId | None = None
        self._lease = b""
        self._sighting: Sighting | None = None
        self._redialled: str | None = None
        self._dial_at = float("-inf")
        self._eager_until = 0.0
        self._polled_at = float("-inf")
        self._beat_at = 0.0
        self._now = 0.0
        self.given_up = False
        """Whether the run gave this machine up; then nobody waits for it."""

    # --- one tick ----------------------------------------------------------------------------

    def tick(self, now: float) -> float | None:
        """Take in, act, and say when to be woken; None when this agent has nothing left to do."""
        self._now = now
        self._wakes = [now + 1.0]
        self._hear_crew(now)
        self._hear_net(now)
        self._poll_notices(now)
        self._attempt(self._poll_journal, now)
        if self._ledger.view.spec is None:
            return now + _EAGER_POLL_S
        self._prepare()
        self._take_my_part()
        if self._is_over():
            return self._leave(now)
        self._attempt(self._seek_the_lead, now)
        self._keep_in_touch(now)
        if self._leader is not None:
            self._attempt(self._lead, now)
            self._take_my_part()
        return max(now, min(*self._wakes, self._next_poll(now), self._beat_at))

    def _attempt(self, part: Callable[[float], None], now: float) -> None:
        """Do one part of a tick. A store that fails for a while must not stop the other parts."""
        try:
            part(now)
        except TransientStoreError:
            self._wakes.append(now + _STORE_TROUBLE_S)

    def _lead(self, now: float) -> None:
        assert self._leader is not None
        self._wakes.append(self._leader.tick(now))

    def _heard(self, slot: int, body: bytes, entry: Entry) -> None:
        """The ledger folded an entry."""
        if self._leader is not None:
            self._leader.learn(slot, body, entry, self._now)

    # --- the journal -------------------------------------------------------------------------

    @property
    def _tempo(self) -> Tempo:
        spec = self._ledger.view.spec
        return spec.tempo if spec else Tempo()

    def _poll_journal(self, now: float) -> None:
        if now >= self._next_poll(now):
            self._polled_at = now
            self._ledger.catch_up()

    def _next_poll(self, now: float) -> float:
        """Whom a hub tells of news reads rarely; whom nobody tells reads often."""
        if self._ledger.view.spec is None or now < self._eager_until:
            return self._polled_at + _EAGER_POLL_S
        if self._hub is not None and self._leader is None:
            return self._polled_at + self._tempo.lease_patience_s
        return self._polled_at + self._tempo.poll_s

    def _prepare(self) -> None:
        """Once the run is known: warm up what its workers need, and write down who we are."""
        spec = self._ledger.view.spec
        if not self._prepared and spec is not None:
            self._prepared = True
            self._crew.prepare(spec)
        if not self._offered:
            self._offered = self._workplace_errand(
                "offer", lambda: self._ledger.offer(self._member)
            )

    def _workplace_errand(self, name: str, job: Callable[[], object]) -> bool:
        done = self._workplace.errands().run(name, job)
        return done is not None and done.error is None

    # --- workers -----------------------------------------------------------------------------

    def _take_my_part(self) -> None:
        """Be where the journal says: start what it opened, end what it closed."""
        view = self._ledger.view
        opened = view.round
        if self._round is not None and (opened is None or opened.number != self._round):
            self._crew.halt()
        if opened is None or self._round is not None or self._crew.busy:
            return
        place = opened.place_of(self._ledger.me)
        if place is not None and self._may_start(view, opened):
            self._begin(view, opened, place)

    def _may_start(self, view: View, opened: Round) -> bool:
        """A round is entered once, and only under the eyes of the hub that opened it."""
        return (
            opened.number > self._last_round
            and view.ended is None
            and view.leader is not None
            and self._hub == view.leader.hub
        )

    def _begin(self, view: View, opened: Round, place: Place) -> None:
        self._round = self._last_round = opened.number
        self._raised, self._returned = {}, set()
        self._crew.start([self._start(view, opened, place, rank) for rank in place.ranks])

    def _start(self, view: View, opened: Round, place: Place, rank: int) -> Start:
        spec = view.spec
        assert spec is not None
        metrics = view.metrics_of(opened.checkpoint) if opened.checkpoint else None
        return Start(
            run_id=spec.run_id,
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
            devices=self._member.devices,
            scratch=self._scratch,
            collective_timeout_s=spec.collective_timeout_s,
            relax_collectives=spec.relax_collectives,
            log_level=spec.log_level,
            secret=self._launch.secret,
            spec=msgspec.Raw(encode(spec)),
        )

    def _hear_crew(self, now: float) -> None:
        self._crew_events.extend(self._crew.events())
        self._attempt(self._take_crew_events, now)
        if self._round is not None and not self._crew.busy and not self._crew_events:
            stopped, self._round = self._round, None
            self._net.send_up(Stopped(stopped))

    def _take_crew_events(self, now: float) -> None:
        """One by one: an event is only forgotten once it was dealt with."""
        while self._crew_events:
            event = self._crew_events[0]
            match event:
                case Said(round=number, rank=rank, frames=frames):
                    self._forward(number, rank, frames)
                case Exited(round=number, rank=rank, how=how, clean=clean):
                    self._note_exit(number, rank, how, clean=clean)
                case _:
                    assert_never(event)
            self._crew_events.popleft()

    def _forward(self, number: int, rank: int, frames: list[msgspec.Raw]) -> None:
        """Pass a worker's frames up; those that end it also concern us."""
        onward = frames
        last = bytes(frames[-1]) if frames else b""
        if last.startswith(b'{"type":"raised"'):
            self._note_raised(number, rank, _raised.decode(last))
            onward = frames[:-1]
        elif last.startswith(b'{"type":"returned"'):
            onward = [*frames[:-1], self._keep_result(number, rank, _returned.decode(last))]
        if onward and number == self._round:
            self._net.send_up(Up(number, rank, onward))

    def _note_raised(self, number: int, rank: int, raised: Raised) -> None:
        key = keys.failure(number, rank) if raised.value else None
        failure = RankFailure(rank, "raised", raised.told, key)
        self._raised[rank] = raised
        self._net.send_up(Ended(number, rank, failure))
        if key is not None:
            body = self._workplace.sign(raised.value, "failure")
            self._workplace.errands().send(f"keep {key}", lambda: self._ledger.store.put(key, body))

    def _keep_result(self, number: int, rank: int, returned: Returned) -> msgspec.Raw:
        """What rank 0 returned must be in the bucket before anybody says the run is finished."""
        self._returned.add(rank)
        if rank == 0 and returned.value:
            body = self._workplace.sign(returned.value, "result")
            self._ledger.store.put(keys.result(number, rank), body)
        return msgspec.Raw(encode(replace(returned, value=b"")))

    def _note_exit(self, number: int, rank: int, how: str, *, clean: bool) -> None:
        if number != self._round or rank in self._raised or rank in self._returned:
            return
        early = " before its function had returned" if clean else ""
        told = f"The worker of rank {rank} {how}{early}."
        self._net.send_up(Ended(number, rank, RankFailure(rank, "died", told)))

    # --- the wire ----------------------------------------------------------------------------

    def _hear_net(self, now: float) -> None:
        self._net_events.extend(self._net.events())
        self._attempt(self._take_net_events, now)

    def _take_net_events(self, now: float) -> None:
        while self._net_events:
            event = self._net_events[0]
            match event:
                case FromHub(message=message):
                    self._obey(message, now)
                case HubLost():
                    self._lose_hub(event, now)
                case FromAgent(agent=agent):
                    if self._leader is not None:
                        self._leader.hear(event, now)
                    else:
                        self._net.send_down(agent, Rejected("not_leading"))
                        self._net.dismiss(agent)
                case AgentLost():
                    if self._leader is not None:
                        self._leader.hear(event, now)
                case _:
                    assert_never(event)
            self._net_events.popleft()

    def _obey(self, message: FromLeader, now: float) -> None:
        self._heard_hub_at = now
        self._redialled = None
        match message:
            case News(slot=slot, body=body):
                self._ledger.told(slot, body)
            case Halt(round=number):
                self._halt(number)
            case Down(round=number, rank=rank, frame=frame):
                if number == self._round:
                    self._send_down(rank, frame)
            case Beat():
                pass
            case Rejected():
                self._net.hang_up()
                self._hub = None
                self._dial_at = now + _REDIAL_S
                self._look_sharp(now)

    def _halt(self, number: int) -> None:
        """End that round's workers; a round not entered yet is never entered any more."""
        self._last_round = max(self._last_round, number)
        if number == self._round:
            self._crew.halt()
        else:
            self._net.send_up(Stopped(number))

    def _send_down(self, rank: int | None, frame: ToWorker) -> None:
        view = self._ledger.view
        place = view.round.place_of(self._ledger.me) if view.round else None
        for one in place.ranks if place else ():
            if rank is None or rank == one:
                self._crew.send(one, frame)

    def _lose_hub(self, lost: HubLost, now: float) -> None:
        """Without its hub a round is over here; whether the leader is gone, a second call tells."""
        if lost.address != self._hub:
            return
        self._hub = None
        self._crew.halt()
        self._look_sharp(now)
        sighting = self._sighted(now)
        if lost.vanished and self._redialled == lost.address:
            self._sighting = replace(sighting, vanished_at=now, in_touch=False)
        else:
            self._sighting = replace(sighting, in_touch=False)
        if lost.vanished:
            self._redialled = lost.address
        else:
            self._dial_at = now + _REDIAL_S

    def _look_sharp(self, now: float) -> None:
        self._eager_until = now + _EAGER_FOR_S
        self._polled_at = float("-inf")

    def _keep_in_touch(self, now: float) -> None:
        """Dial whoever leads; greet it; give it up when it is silent."""
        view = self._ledger.view
        hub = view.leader.hub if view.leader else None
        if (
            hub is not None
            and self._hub != hub
            and now >= self._dial_at
            and not self._gave_up_on(hub)
        ):
            self._hub = hub
            self._heard_hub_at = now
            self._beat_at = now + self._tempo.beat_s
            running = self._round if self._crew.busy else None
            join = Join(self._ledger.run_id, self._member, view.next_slot, running, self._notice)
            self._net.dial(hub, join)
        if now >= self._beat_at:
            self._beat_at = now + self._tempo.beat_s
            if self._hub is not None:
                self._net.send_up(Beat())
                self._check_silence(now)

    def _gave_up_on(self, hub: str) -> bool:
        """Once the second call found nobody listening, only an election helps."""
        return (
            self._sighting is not None
            and self._sighting.vanished_at is not None
            and self._redialled == hub
        )

    def _check_silence(self, now: float) -> None:
        assert self._hub is not None
        if now - self._heard_hub_at > self._tempo.silent_s and self._leader is None:
            silent, self._hub = self._hub, None
            self._net.hang_up()
            self._crew.halt()
            self._look_sharp(now)
            self._sighting = replace(self._sighted(now), in_touch=False)
            self._redialled = None if self._redialled == silent else self._redialled

    # --- leading -----------------------------------------------------------------------------

    def _sighted(self, now: float) -> Sighting:
        return self._sighting or Sighting(lease_changed_at=now)

    def _seek_the_lead(self, now: float) -> None:
        view = self._ledger.view
        if view.leads(self._ledger.me):
            if self._leader is None:
                self._take_office(now)
            return
        self._leader = None
        self._watch_the_leader(view, now)
        claimed = claim(view, self._ledger.me, self._sighted(now))
        if claimed is not None and now >= claimed.at:
            elected = LeaderElected(
                self._ledger.me, view.epoch + 1, self._net.hub, claimed.why, claimed.lost
            )
            after = self._ledger.append(elected, after=view)
            self._sighting, self._redialled = None, None
            if after.leads(self._ledger.me):
                self._take_office(now)

    def _watch_the_leader(self, view: View, now: float) -> None:
        """Look at the leader's lease, unless the wire already says that it is well."""
        leader = view.leader
        if leader is None:
            return
        if leader.leader != self._watched:
            self._watched, self._lease = leader.leader, b""
            self._sighting, self._redialled = Sighting(lease_changed_at=now), None
        sighting = self._sighted(now)
        in_touch = self._hub == leader.hub and self._hub is not None
        if in_touch and now - self._heard_hub_at < self._tempo.silent_s:
            self._sighting = Sighting(lease_changed_at=now, in_touch=True)
        elif self._polled_at == now:
            lease = self._ledger.lease_of(leader.leader)
            changed_at = now if lease != self._lease else sighting.lease_changed_at
            self._lease = lease
            self._sighting = replace(sighting, lease_changed_at=changed_at, in_touch=False)

    def _take_office(self, now: float) -> None:
        view = self._ledger.view
        spec = view.spec
        assert spec is not None
        errands = self._workplace.errands()
        provisioner = self._workplace.provisioner(spec)
        conductor = Conductor(
            self._ledger,
            provisioner,
            self._launch,
            errands,
            self._workplace.new_token,
        )
        self._leader = Leader(
            ledger=self._ledger,
            net=self._net,
            conductor=conductor,
            errands=errands,
            audience=self._workplace.audience(spec),
            name_for=self._workplace.name_for,
            ends_itself=provisioner.traits.ends_itself,
            now=now,
        )

    # --- notices and the end -----------------------------------------------------------------

    def _poll_notices(self, now: float) -> None:
        if self._notice is not None:
            return
        for source in self._notices:
            notice = source.poll(now)
            if notice is not None:
                self._notice = notice
                self._net.send_up(Alarm(notice))
                return

    def _is_over(self) -> bool:
        view = self._ledger.view
        if self._ledger.me in view.lost_agents:
            self.given_up = True
            return True
        if view.ended is None:
            return False
        return self._leader is None or self._leader.resting

    def _leave(self, now: float) -> float | None:
        """Nothing is left to do here once no worker lives and nobody is owed anything."""
        if self._crew.busy:
            self._crew.halt()
            return now + 0.1
        self._net.hang_up()
        return None
