"""The agent of one node: a step machine over its ports. It dies of none of the user's sins.

`tick(now)` takes in what happened, does what is due and returns when it wants to be woken. It
never blocks, holds no clock and starts no thread: what calls the bucket or the cloud goes as an
errand. Real time drives it in `driver`, a virtual clock drives this same code in the simulator.

Its parts: `shift` is what this node does in a round, `uplink` its tie to whoever leads, `leader`
what it does while it leads itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import assert_never

from spotfit.agent.leader import Leader
from spotfit.agent.ports import (
    AgentLost,
    Crew,
    FromAgent,
    FromHub,
    HubLost,
    Net,
    NetEvent,
    NoticeSource,
)
from spotfit.agent.reports import ReportSink
from spotfit.agent.shift import Shift
from spotfit.agent.uplink import Uplink
from spotfit.agent.validation import Validation
from spotfit.agent.workplace import Workplace
from spotfit.control.conductor import Conductor
from spotfit.control.errands import Insistent
from spotfit.control.scribe import Scribe
from spotfit.core.errors import StoreError
from spotfit.host import log
from spotfit.ledger.run import Ledger
from spotfit.model.events import Entry, LeaderElected
from spotfit.model.spec import RunSpec, Tempo
from spotfit.model.view import View
from spotfit.model.wire import (
    Advise,
    Alarm,
    Beat,
    Down,
    Examine,
    FromLeader,
    Halt,
    Join,
    News,
    Rejected,
    Warm,
)
from spotfit.model.world import Advice, Member, Notice
from spotfit.policy.election import Claim, claim
from spotfit.provision.launch import Launch

_EAGER_POLL_S = 0.05
_EAGER_FOR_S = 3.0
_LEADER_POLL_S = 0.1
_NEARER_BY_S = 1.0


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
        self._scribe = Scribe(ledger, workplace.journal_errands())
        self._insistent = Insistent(workplace.errands())
        self._net = net
        self._crew = crew
        self._notices = notices
        self._launch = launch
        self._workplace = workplace
        self._shift = Shift(
            me=ledger.me,
            crew=crew,
            net=net,
            store=ledger.store,
            workplace=workplace,
            launch=launch,
            devices=member.devices,
            scratch=scratch,
        )
        self._validation = Validation(ledger.me, net, workplace.assessor())
        self._uplink = Uplink(net, ledger, workplace.journal_errands())
        self._leader: Leader | None = None
        self._reports = ReportSink(ledger, workplace.errands())
        self._notice: Notice | None = None
        self._advised: list[Advice] = []
        self._prepared = False
        self._told_warm = False
        self._offered = False
        self._eager_until = 0.0
        self._polled_at = float("-inf")
        self._born_at = float("inf")
        self._wakes: list[float] = []
        self._trouble: str | None = None
        """What the store last complained of, until it answers again."""
        self._now = 0.0
        self.given_up = False
        """Whether the run gave this machine up; then nobody waits for it."""
        self.drained = False
        """Whether this machine is about to be taken away while the run still counts on it."""
        self._drained_at = float("inf")
        ledger.listen(self._heard)

    # --- one tick ----------------------------------------------------------------------------

    def tick(self, now: float) -> float | None:
        """Take in, act, and say when to be woken; None when this agent has nothing left to do."""
        self._now = now
        self._born_at = min(self._born_at, now)
        self._wakes = [now + 1.0]
        self._shift.hear(now)
        self._validation.hear(now)
        for event in self._net.events():
            self._take(event)
        self._poll_notices(now)
        self._poll_journal(now)
        spec = self._ledger.view.spec
        if spec is None:
            return self._leave(now) if self._is_cut_off() else now + _EAGER_POLL_S
        self._prepare(spec)
        self._follow()
        if self._is_over():
            return self._leave(now)
        self._seek_the_lead()
        self._keep_in_touch(now)
        if self._leader is not None:
            self._wakes.append(self._leader.tick(now))
            self._follow()
        if self._drained_at > now:
            self._wakes.append(self._drained_at)
        self._wakes += [self._next_poll(now), self._scribe.wake_at, self._uplink.wake_at]
        return max(now, min(*self._wakes, self._validation.wake_at))

    def _follow(self) -> None:
        """Be where the journal says."""
        self._shift.follow(self._ledger.view, self._uplink.hub)
        self._validation.follow(self._ledger.view, self._now)

    def _prepare(self, spec: RunSpec) -> None:
        """Once the run is known: warm up what its workers need, and write down who we are."""
        if not self._prepared:
            self._prepared = True
            self._crew.prepare(spec)
        if not self._offered:
            offer = partial(self._ledger.offer, self._member)
            self._offered = self._insistent.run("offer", offer, self._now) is not None

    # --- the journal -------------------------------------------------------------------------

    @property
    def _tempo(self) -> Tempo:
        spec = self._ledger.view.spec
        return spec.tempo if spec else Tempo()

    def _poll_journal(self, now: float) -> None:
        """Whatever a store complains of, the agent lives on: only being cut off for very long ends
        it."""
        if now >= self._next_poll(now):
            self._polled_at = now
            self._scribe.ask()
        try:
            self._scribe.go_on(now)
            self._trouble = None if self._scribe.read_at == now else self._trouble
        except StoreError as trouble:
            if self._trouble != trouble.what:
                self._trouble = trouble.what
                log.warning("store.trouble", why=trouble.what)

    def _next_poll(self, now: float) -> float:
        """Whom a hub tells of news reads rarely; whom nobody tells reads often."""
        if self._ledger.view.spec is None:
            return self._polled_at + _EAGER_POLL_S
        if now < self._eager_until:  # but a thousand agents must not storm the bucket
            return self._polled_at + max(_EAGER_POLL_S, self._tempo.poll_s / 5)
        if self._leader is not None:  # others write only to cancel the run, or to depose it
            return self._polled_at + max(_LEADER_POLL_S, self._tempo.poll_s)
        if self._uplink.hub is not None:
            return self._polled_at + self._tempo.lease_patience_s
        return self._polled_at + self._tempo.poll_s

    def _look_sharp(self) -> None:
        """Something is going on: read the journal at once, and often for a while."""
        self._eager_until = self._now + _EAGER_FOR_S
        self._polled_at = float("-inf")

    def _heard(self, slot: int, body: bytes, entry: Entry) -> None:
        """The ledger folded an entry."""
        if self._leader is not None:
            self._leader.learn(slot, body, entry, self._now)

    # --- the wire ----------------------------------------------------------------------------

    def _take(self, event: NetEvent) -> None:
        match event:
            case FromHub(message=message):
                self._obey(message)
            case HubLost():
                if self._uplink.lose(event, self._now):
                    self._shift.stop()  # without its hub a round is over here
                    self._look_sharp()
            case FromAgent() | AgentLost():
                self._receive(event)
            case _:
                assert_never(event)

    def _receive(self, event: FromAgent | AgentLost) -> None:
        """Somebody takes us for the leader."""
        if self._leader is not None:
            self._leader.hear(event, self._now)
        elif isinstance(event, FromAgent):
            self._net.send_down(event.agent, Rejected("not_leading"))
            self._net.dismiss(event.agent)

    def _obey(self, message: FromLeader) -> None:
        self._uplink.heard(self._now)
        match message:
            case News(slot=slot, body=body):
                self._scribe.told(slot, body)
            case Halt(round=number):
                self._shift.halt(number)
            case Examine(round=number, examination=examination):
                self._shift.examine(number, examination)
            case Down(round=number, rank=rank, frame=frame):
                self._shift.pass_down(number, rank, frame, self._ledger.view)
            case Beat():
                return
            case Rejected():
                self._uplink.rejected(self._now)
                self._look_sharp()

    def _keep_in_touch(self, now: float) -> None:
        view = self._ledger.view
        running = self._shift.round if self._shift.busy else None
        warm = self._crew.warm
        join = Join(
            self._ledger.run_id,
            self._member,
            view.next_slot,
            running,
            self._notice,
            warm,
            self._shift.entered,
            self._shift.carrying,
            self._shift.unable,
            self._shift.held,
        )
        dialled = self._uplink.reach(view, join, self._tempo, now)
        if dialled:
            self._told_warm = warm
        if self._uplink.hub is not None:
            self._validation.tell(anew=dialled)
        if warm and not self._told_warm and self._uplink.hub is not None:
            self._told_warm = True
            self._net.send_up(Warm())
        if self._uplink.breathe(self._tempo, now, leading=self._leader is not None):
            self._shift.stop()
            self._look_sharp()

    # --- leading -----------------------------------------------------------------------------

    def _seek_the_lead(self) -> None:
        now, view = self._now, self._ledger.view
        if view.leads(self._ledger.me):
            if self._leader is None or self._leader.epoch != view.epoch:
                self._take_office()
            return
        self._resign()
        self._uplink.watch(view, self._tempo, now, read_lease=self._polled_at == now)
        claimed = claim(view, self._ledger.me, self._uplink.sighting(now))
        if claimed is not None and claimed.due(now) and self._scribe.settled:
            self._stand_for_election(claimed)
        elif claimed is not None and now < claimed.at:
            self._wakes.append(claimed.at)

    def _stand_for_election(self, claimed: Claim) -> None:
        me, epoch = self._ledger.me, self._ledger.view.epoch + 1
        elected = LeaderElected(me, epoch, self._net.hub, claimed.why, claimed.lost)
        self._scribe.write(elected, self._now)
        self._uplink.forget()
        if self._ledger.view.leads(me):
            self._take_office()

    def _resign(self) -> None:
        """Somebody else leads: what was kept beside a leader is his to keep now."""
        if self._leader is not None:
            self._leader = None
            self._workplace.resign()

    def _take_office(self) -> None:
        spec = self._ledger.view.spec
        assert spec is not None
        errands = self._workplace.errands()
        provisioner = self._workplace.provisioner(spec)
        conductor = Conductor(
            self._scribe, provisioner, self._launch, errands, self._workplace.new_token
        )
        self._uplink.drop()  # whatever hub it went to: ours is the one now
        self._leader = Leader(
            scribe=self._scribe,
            net=self._net,
            conductor=conductor,
            errands=errands,
            journal_errands=self._workplace.journal_errands(),
            reports=self._reports,
            audience=self._workplace.audience(spec),
            hooks=self._workplace.hooks(spec),
            name_for=self._workplace.name_for,
            say=self._workplace.say,
            ends_itself=provisioner.traits.ends_itself,
            now=self._now,
        )

    # --- notices and the end -----------------------------------------------------------------

    def _poll_notices(self, now: float) -> None:
        for source in self._notices:
            notice = source.poll(now)
            if isinstance(notice, Advice):
                self._pass_on(notice)
            elif notice is not None and (self._notice is None or self._is_nearer(notice, now)):
                self._notice = notice
                if notice.seconds_left is not None:
                    self._drained_at = now + notice.seconds_left
                self._net.send_up(Alarm(notice))

    def _pass_on(self, advice: Advice) -> None:
        """Once, to whoever leads now: it changes nothing but when the workers save."""
        if self._uplink.hub is not None and advice not in self._advised:
            self._advised.append(advice)
            log.info("notice.advice", why=advice.reason)
            self._net.send_up(Advise(advice.reason))

    def _is_nearer(self, notice: Notice, now: float) -> bool:
        """Whether the end comes well before what was known: a drain is told, then a SIGTERM."""
        ends = float("inf") if notice.seconds_left is None else now + notice.seconds_left
        return ends < self._drained_at - _NEARER_BY_S

    def _is_over(self) -> bool:
        view = self._ledger.view
        given_up = self._ledger.me in view.lost_agents or self._is_unwanted(view)
        if given_up or self._is_cut_off():
            self.given_up = True
            return True
        if self._now >= self._drained_at and view.ended is None and not self._shift.busy:
            self.drained = True
            return True
        if view.ended is not None:
            return self._leader is None or self._leader.resting
        return self._is_spare(view)

    def _is_spare(self, view: View) -> bool:
        """Whether the training is over, and others do what is left."""
        if view.training_ended is None or view.leads(self._ledger.me):
            return False
        group = view.groups.get(self._member.token)
        at_work = view.validation is not None and view.validation.agent == self._ledger.me
        return group is not None and group.role == "train" and not at_work

    def _is_unwanted(self, view: View) -> bool:
        """Whether the run does not count on this machine: somebody deposed rented it late, or the
        backend brought it back after it was replaced. Nobody else would ever let it go."""
        if view.ended is not None or self._leader is not None:
            return False
        group = view.groups.get(self._member.token)
        if group is None:
            return self._scribe.settled
        return not group.stands(self._member.node)

    def _is_cut_off(self) -> bool:
        """Whether neither a hub nor the bucket was reached for so long that nobody waits for us."""
        reached_at = max(self._born_at, self._scribe.read_at)
        return self._uplink.hub is None and self._now - reached_at > self._tempo.orphan_s

    def _leave(self, now: float) -> float | None:
        """Nothing is left to do here once no worker lives and nobody is owed anything."""
        if self._shift.busy or self._validation.busy:
            self._shift.stop()
            self._validation.stop()
            return now + 0.1
        if self._reports.waiting and not self.given_up:
            self._reports.flush(now, at_once=True)  # of a term that ended before the run did
            return now + 0.1
        if self._shift.owes and not self.given_up:
            return now + 0.1
        self._net.hang_up()
        return None
