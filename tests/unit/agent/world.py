"""Several agents in one process, with a wire, workers, a cloud and a clock that are all in memory.

A test tells the story: it boots machines, lets workers speak and die, breaks what it wants to
break, and lets time pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from spotfit.agent.agent import Agent
from spotfit.agent.ports import (
    AgentLost,
    Audience,
    CopyKept,
    CrewEvent,
    Examined,
    Exited,
    FromAgent,
    FromHub,
    Hooks,
    HubLost,
    NetEvent,
    Said,
    Spoiled,
    Unheard,
)
from spotfit.control.errands import Done, Errands, Inline
from spotfit.core.codec import decoder, encode
from spotfit.core.errors import StoreError, TransientStoreError
from spotfit.core.ids import AgentId, Token
from spotfit.ledger.run import Ledger
from spotfit.model.assessment import Verdict
from spotfit.model.events import (
    CancelRequested,
    CheckpointCommitted,
    Entry,
    Event,
    FitStarted,
    Intended,
    LeaderElected,
    Submitted,
    ValidationAsked,
)
from spotfit.model.group import GroupHandle, GroupRequest, NodeState
from spotfit.model.holding import Part
from spotfit.model.hooks import Ask, Hook
from spotfit.model.spec import RunSpec, Tempo
from spotfit.model.view import View
from spotfit.model.watch import Trouble
from spotfit.model.wire import (
    Files,
    FromLeader,
    FromWorker,
    Join,
    Named,
    Outcome,
    Raised,
    Report,
    Returned,
    Saved,
    Start,
    ToLeader,
    ToWorker,
)
from spotfit.model.world import Advice, Member, Notice
from spotfit.provision.api import Provisioner
from spotfit.store.memory import MemoryStore
from spotfit.testing.builders import RUN, a_spec
from spotfit.testing.clock import ManualClock
from tests.unit.control.paper import LAUNCH, PaperCloud, tokens

STEP_S = 0.05
TEMPO = Tempo(
    observe_s=0.5, poll_s=0.2, rejoin_s=1.0, silent_s=6.0, lease_patience_s=8.0, lease_s=2.0
)


class MoodyStore(MemoryStore):
    """Calls fail while `moody` says so, half of them after they were carried out."""

    def __init__(self) -> None:
        super().__init__()
        self.moody: Callable[[], bool] = lambda: False
        self.trouble: type[StoreError] = TransientStoreError
        self.failed = 0

    def get(self, key: str) -> bytes:
        self._fail()
        return super().get(key)

    def put(self, key: str, body: bytes | memoryview) -> None:
        self._fail()
        super().put(key, body)
        self._fail()

    def create(self, key: str, body: bytes) -> None:
        self._fail()
        super().create(key, body)
        self._fail()

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[Any]:
        self._fail()
        return super().list(prefix, after=after)

    def delete(self, key: str) -> None:
        self._fail()
        super().delete(key)

    def _fail(self) -> None:
        if self.moody():
            self.failed += 1
            raise self.trouble("the store is moody")


class Stalling:
    """Errands that are done at once; those sent while the bucket hangs, when the test says how."""

    def __init__(self) -> None:
        self.hangs = False
        self._under_way: dict[str, Callable[[], Any]] = {}
        self._done: dict[str, Done] = {}

    def run(self, name: str, job: Callable[[], Any]) -> Done | None:
        if name in self._done:
            return self._done.pop(name)
        if self.hangs:
            self._under_way.setdefault(name, job)
            return None
        return Inline().run(name, job)

    def send(self, name: str, job: Callable[[], Any]) -> None:
        if self.hangs:
            self._under_way.setdefault(name, job)
        else:
            Inline().send(name, job)

    def give_up(self, *, deeds: bool) -> None:
        """Whoever waits is told that no answer came; what was asked may be done all the same."""
        for name, job in self._under_way.items():
            if deeds:
                Inline().run(name, job)
            self._done[name] = Done(error=TransientStoreError("no answer"))
        self._under_way = {}

    def answer(self) -> None:
        """What hung is done now."""
        for name, job in self._under_way.items():
            done = Inline().run(name, job)
            assert done is not None
            self._done[name] = done
        self._under_way = {}


def signed(key: str, payload: bytes) -> bytes:
    """What a `FakeWorkplace` makes of a payload that is kept under that key."""
    return key.encode() + b":" + payload


class Wire:
    """Who listens where. A broken address answers nobody; a dead one refuses at once."""

    def __init__(self) -> None:
        self.nets: dict[str, FakeNet] = {}
        self.broken: set[str] = set()

    def listening(self, address: str) -> FakeNet | None:
        net = self.nets.get(address)
        return net if net is not None and net.alive else None


class FakeNet:
    """A `Net` whose messages arrive at once, in order."""

    def __init__(self, wire: Wire, member: Member) -> None:
        self.alive = True
        self.dialled: list[str] = []
        self._wire = wire
        self._me = member.agent
        self._address = member.hub
        self._uplink: FakeNet | None = None
        self._agents: dict[AgentId, FakeNet] = {}
        self._events: list[NetEvent] = []
        wire.nets[member.hub] = self

    @property
    def hub(self) -> str:
        return self._address

    @property
    def pending(self) -> bool:
        return bool(self._events)

    def dial(self, address: str, join: Join) -> None:
        self.dialled.append(address)
        self.hang_up()
        hub = self._wire.listening(address)
        if address in self._wire.broken:
            self._events.append(HubLost(address, "no answer", vanished=False))
        elif hub is None:
            self._events.append(HubLost(address, "refused", vanished=True))
        else:
            self._uplink = hub
            hub._agents[self._me] = self
            hub._events.append(FromAgent(self._me, join))

    def hang_up(self) -> None:
        hub, self._uplink = self._uplink, None
        if hub is not None and hub._agents.pop(self._me, None) is not None:
            hub._events.append(AgentLost(self._me, "closed"))

    def send_up(self, message: ToLeader) -> None:
        if self._uplink is not None and self._address_of_uplink not in self._wire.broken:
            self._uplink._events.append(FromAgent(self._me, message))

    def send_down(self, agent: AgentId, message: FromLeader) -> None:
        peer = self._agents.get(agent)
        if peer is not None and self._address not in self._wire.broken:
            peer._events.append(FromHub(message))

    def dismiss(self, agent: AgentId) -> None:
        peer = self._agents.pop(agent, None)
        if peer is not None:
            peer._lose_uplink()

    def events(self) -> list[NetEvent]:
        events, self._events = self._events, []
        return events

    def cut(self) -> None:
        """Every connection of ours breaks; both ends are told."""
        if self._uplink is not None:
            hub = self._uplink
            hub.dismiss(self._me)
            hub._events.append(AgentLost(self._me, "reset"))
        for agent in list(self._agents):
            self.dismiss(agent)

    def die(self) -> None:
        """The machine is gone, its kernel tells the others."""
        self.alive = False
        self.cut()

    def _lose_uplink(self) -> None:
        if self._uplink is not None:
            address, self._uplink = self._address_of_uplink, None
            self._events.append(HubLost(address, "reset", vanished=True))

    @property
    def _address_of_uplink(self) -> str:
        return self._uplink._address if self._uplink else ""


class FakeCrew:
    """A `Crew` whose workers do what the test lets them do."""

    def __init__(self) -> None:
        self.spec: RunSpec | None = None
        self.workers: dict[int, Start] = {}
        self.received: dict[int, list[ToWorker]] = {}
        self.rounds: list[int] = []
        self.tells = True
        """Whether it can find out what its workers are doing."""
        self.immortal = False
        """Whether SIGKILL is not enough."""
        self.warm = True
        self.carrying: int | None = None
        """The round some of whose uploads go on; set by the test."""
        self.copies_to: list[str] = []
        """Where copies were rerouted to."""
        self.held: tuple[Part, ...] = ()
        """What lies in its node's memory; set by the test."""
        self._events: list[CrewEvent] = []

    def prepare(self, spec: RunSpec) -> None:
        self.spec = spec

    def start(self, starts: Sequence[Start]) -> None:
        assert not self.workers, "nobody of another round is left"
        self.workers = {start.rank: start for start in starts}
        self.received = {start.rank: [] for start in starts}
        self.rounds.append(starts[0].round)

    def send(self, rank: int, frame: ToWorker) -> None:
        if rank in self.workers:
            self.received[rank].append(frame)

    def examine(self, examination: int) -> None:
        for start in self.workers.values() if self.tells else ():
            told = f"at work ({start.rank})"
            self._events.append(Examined(start.round, examination, start.rank, told))

    def miss(self, rank: int, silent_s: float) -> None:
        """That worker does not answer; 0: it does again."""
        self._events.append(Unheard(self.workers[rank].round, rank, silent_s))

    def halt(self) -> None:
        for rank in [] if self.immortal else list(self.workers):
            self.exit(rank, "was killed by SIGKILL", ordered=True)

    @property
    def busy(self) -> bool:
        return bool(self.workers)

    @property
    def pending(self) -> bool:
        return bool(self._events)

    def give_up(self) -> None:
        self.carrying = None

    def copy_to(self, vault: str) -> None:
        self.copies_to.append(vault)

    def keeps_a_copy(self, rank: int, step: int, vault: str) -> None:
        """Another machine has what that worker saved."""
        self._events.append(CopyKept(self.workers[rank].round, rank, step, vault))

    def events(self) -> list[CrewEvent]:
        events, self._events = self._events, []
        return events

    def say(self, rank: int, *frames: FromWorker) -> None:
        """That worker writes those frames."""
        told = [msgspec.Raw(encode(frame)) for frame in frames]
        self._events.append(Said(self.workers[rank].round, rank, told))

    def spoil(self, raised: Raised) -> None:
        """No worker can ever be started here."""
        self._events.append(Spoiled(raised))

    def exit(
        self,
        rank: int,
        how: str = "exited with code 0",
        *,
        clean: bool = False,
        ordered: bool = False,
    ) -> None:
        """That worker's process ends."""
        start = self.workers.pop(rank)
        self._events.append(Exited(start.round, rank, how, clean, ordered))


class Told:
    """An `Audience` that remembers what it was told."""

    def __init__(self) -> None:
        self.reports: list[tuple[list[Any], str | None]] = []
        self.failures: list[dict[int, str]] = []
        self.raised: str | None = None
        self.caught_up = True

    def reported(self, metrics: Sequence[msgspec.Raw], checkpoint: str | None) -> None:
        self.reports.append(([msgspec.json.decode(one) for one in metrics], checkpoint))

    def failed(self, pickles: dict[int, str], told: dict[int, str]) -> None:
        self.failures.append(told)

    def trouble(self) -> Trouble | None:
        return Trouble("a callback raised", self.raised) if self.raised else None


class FakeHooks:
    """`Hooks` that come back when the test lets them."""

    def __init__(self) -> None:
        self.ordered: list[tuple[str, int, int]] = []
        self.left: list[tuple[str, int]] = []
        """Ordered, and not performed yet."""
        self.lost: list[int] = []
        """Rounds that are over."""
        self.wants: list[Ask] = []
        self.answers: list[tuple[int, int, Outcome]] = []
        self.raised: Trouble | None = None

    def perform(
        self, hook: Hook, round_number: int, world_size: int, resources: Mapping[str, float]
    ) -> None:
        self.ordered.append((hook, round_number, world_size))
        self.left.append((hook, round_number))

    def performed(self, hook: Hook, round_number: int) -> bool:
        return (hook, round_number) not in self.left

    def asks(self) -> list[Ask]:
        asks, self.wants = self.wants, []
        return asks

    def answered(self, round_number: int, rank: int, outcome: Outcome) -> None:
        self.answers.append((round_number, rank, outcome))

    def over(self, round_number: int) -> None:
        self.lost.append(round_number)

    def trouble(self) -> Trouble | None:
        return self.raised

    @property
    def caught_up(self) -> bool:
        return not self.left


class FakeAssessor:
    """An `Assessor` whose validations end when the test says so."""

    def __init__(self) -> None:
        self.kept: CheckpointCommitted | None = None
        self.begun: list[str] = []
        self._verdict: Verdict | None = None

    def begin(self, spec: RunSpec, kept: CheckpointCommitted) -> None:
        assert self.kept is None, "one at a time"
        self.kept = kept
        self.begun.append(kept.name)

    def stop(self) -> None:
        self.kept = self._verdict = None

    @property
    def busy(self) -> bool:
        return self.kept is not None

    @property
    def pending(self) -> bool:
        return self._verdict is not None

    def verdict(self) -> Verdict | None:
        verdict, self._verdict = self._verdict, None
        return verdict

    def find(self, told: str = "", **metrics: Any) -> None:
        """The validation ends with those metrics, or with that text."""
        self.kept, self._verdict = None, Verdict(None if told else metrics, told)


class Fate:
    """A `NoticeSource` that the test speaks through."""

    def __init__(self) -> None:
        self.notice: Notice | Advice | None = None

    def poll(self, now: float) -> Notice | Advice | None:
        return self.notice


class FakeWorkplace:
    """What an agent asks of its machine."""

    def __init__(self, world: World, assessor: FakeAssessor | None = None) -> None:
        self._world = world
        self._assessor = assessor or FakeAssessor()
        self.stalling = Stalling()
        self.resigned = 0
        """How often what was kept beside a leader was sent away."""

    def provisioner(self, spec: RunSpec) -> Provisioner:
        return self._world.cloud

    def audience(self, spec: RunSpec) -> Audience | None:
        return self._world.audience if spec.callbacks else None

    def hooks(self, spec: RunSpec) -> Hooks | None:
        return self._world.hooks if spec.hooks else None

    def resign(self) -> None:
        self.resigned += 1

    def say(self, text: str) -> None:
        self._world.said.append(text)

    def assessor(self) -> FakeAssessor:
        return self._assessor

    def errands(self) -> Errands:
        return self.stalling

    def journal_errands(self) -> Errands:
        return self.stalling

    def seal(self, payload: bytes, purpose: str) -> bytes:
        return signed(purpose, payload)

    def new_token(self) -> str:
        return self._world.new_token()

    def name_for(self, report: int) -> str:
        return f"made-{report}"


class Node:
    """A machine and the agent that lives on it."""

    def __init__(self, world: World, token: Token, node: int) -> None:
        self.name = f"{token}/{node}"
        host = f"{token}-{node}"
        again = "-again" if self.name in world.nodes else ""
        me = AgentId(f"a-{host}{again}")
        self.member = Member(me, host, f"{host}:7000", 1, token, node, vault=f"{host}:7001")
        self.net = FakeNet(world.wire, self.member)
        self.crew = FakeCrew()
        self.assessor = FakeAssessor()
        self.fate = Fate()
        self.over = False
        self.asleep = False
        """Whether its process is frozen: alive, and silent."""
        self.ledger = Ledger(world.store, RUN, self.member.agent)
        self.workplace = FakeWorkplace(world, self.assessor)
        self.errands = self.workplace.stalling
        self.agent = Agent(
            member=self.member,
            ledger=self.ledger,
            net=self.net,
            crew=self.crew,
            notices=[self.fate],
            launch=LAUNCH,
            workplace=self.workplace,
            scratch="/scratch",
        )

    @property
    def me(self) -> AgentId:
        return self.member.agent

    @property
    def ranks(self) -> list[int]:
        return sorted(self.crew.workers)

    @property
    def awake(self) -> bool:
        return not self.over and not self.asleep

    @property
    def has_news(self) -> bool:
        return self.awake and (self.net.pending or self.crew.pending or self.assessor.pending)

    def tick(self, now: float) -> None:
        if self.agent.tick(now) is None:
            self.over = True
            self.net.die()


class World:
    """A cloud, a bucket, a wire and a clock; machines boot when the cloud grants them."""

    def __init__(self, *, told_late_s: float = 60.0, **given: Any) -> None:
        self.store = MoodyStore()
        self.cloud = PaperCloud(observe_s=0.5, told_late_s=told_late_s)
        self.wire = Wire()
        self.clock = ManualClock(100.0)
        self.audience = Told()
        self.hooks = FakeHooks()
        self.said: list[str] = []
        """The run's own words."""
        self.new_token = tokens()
        self.nodes: dict[str, Node] = {}
        self.boots = True
        """Whether machines that are granted come up by themselves."""
        self._me = Ledger(self.store, RUN, AgentId("driver"))
        self._begin(a_spec(**{"tempo": TEMPO, **given}))

    def _begin(self, spec: RunSpec) -> None:
        """As `fit()` does: the run is written down, and its first machines are asked for."""
        request = GroupRequest(Token(self.new_token()), spec.workers_max, spec.workers_max)
        plan = self.cloud.plan(request)
        self.write(FitStarted(spec))
        self.write(LeaderElected(self._me.me, 1, None))
        self.write(Intended(request, plan))
        handle = self.cloud.submit(plan, LAUNCH)
        assert isinstance(handle, GroupHandle)
        self.write(Submitted(plan.token, handle))

    # --- what happens outside ----------------------------------------------------------------

    def write(self, event: Event) -> None:
        """As the driver."""
        self._me.append(event, after=self._me.catch_up())

    def cancel(self) -> None:
        self.write(CancelRequested("enough"))

    def boot(self, token: Token, node: int) -> Node:
        """That machine comes up."""
        booted = Node(self, token, node)
        self.nodes[booted.name] = booted
        return booted

    def hang(self, *nodes: Node) -> None:
        """From now on the bucket answers none of these (or nobody), and refuses nobody."""
        for node in nodes or self.nodes.values():
            node.errands.hangs = True

    def come_back(self) -> None:
        """The bucket does what it was asked, late, and answers again."""
        for node in self.nodes.values():
            node.errands.hangs = False
            node.errands.answer()

    def give_up(self, *, deeds: bool) -> None:
        """The agents' calls to the bucket time out, carried out or not."""
        for node in self.nodes.values():
            node.errands.give_up(deeds=deeds)

    def kill(self, node: Node) -> None:
        """Reclaimed without a word."""
        node.over = True
        node.net.die()
        if node.member.token in self.cloud.groups:
            self.cloud.lose(node.member.token, node.member.node)

    # --- time --------------------------------------------------------------------------------

    def run(self, for_s: float) -> None:
        """Let that much time pass."""
        end = self.clock.now() + for_s
        while self.clock.now() < end:
            self.clock.wait(STEP_S)
            self.settle()

    def until(self, happened: Callable[[], object], *, within_s: float = 30.0) -> float:
        """Let time pass until something is so; how long it took."""
        begun = self.clock.now()
        self.settle()
        while not happened():
            assert self.clock.now() - begun < within_s, self.story
            self.clock.wait(STEP_S)
            self.settle()
        return self.clock.now() - begun

    def settle(self) -> None:
        """Tick everybody until nothing more is on its way."""
        self._boot_granted()
        for _ in range(200):
            for node in list(self.nodes.values()):
                if node.awake:
                    node.tick(self.clock.now())
            if not any(node.has_news for node in self.nodes.values()):
                return
        raise AssertionError(f"they talk for ever: {self.story}")

    def _boot_granted(self) -> None:
        for token, nodes in self.cloud.groups.items() if self.boots else ():
            for n, node in enumerate(nodes):
                if node.state is NodeState.RUNNING and f"{token}/{n}" not in self.nodes:
                    self.boot(token, n)

    # --- what can be seen --------------------------------------------------------------------

    @property
    def entries(self) -> list[Entry]:
        """The journal as it stands in the bucket."""
        found = sorted(key for (key, _) in MemoryStore.list(self.store, ".spotfit/journal"))
        return [decoder(Entry).decode(MemoryStore.get(self.store, key)) for key in found]

    @property
    def story(self) -> str:
        """The journal in words, for a test that failed."""
        return "\n".join(f"{entry.by}: {entry.event}" for entry in self.entries)

    def all_of(self, kind: type[Any]) -> list[Any]:
        """Every event of that kind."""
        return [entry.event for entry in self.entries if isinstance(entry.event, kind)]

    def last(self, kind: type[Any]) -> Any:
        """The last event of that kind, or None."""
        return next(iter(reversed(self.all_of(kind))), None)

    @property
    def view(self) -> View:
        moody, self.store.moody = self.store.moody, lambda: False
        try:
            return self._me.catch_up()
        finally:
            self.store.moody = moody

    @property
    def leader(self) -> Node:
        leader = self.view.leader
        assert leader is not None
        return next(node for node in self.nodes.values() if node.me == leader.leader)

    def holder(self, rank: int) -> Node:
        """Whose worker has that rank now."""
        return next(
            node for node in self.nodes.values() if node.awake and rank in node.crew.workers
        )

    @property
    def validating(self) -> Node | None:
        """Who validates at the moment."""
        return next((n for n in self.nodes.values() if n.awake and n.assessor.busy), None)

    @property
    def training(self) -> bool:
        """Whether every rank of the open round has its worker."""
        view = self.view
        if view.round is None:
            return False
        started = [
            rank
            for node in self.nodes.values()
            if node.awake and node.crew.rounds[-1:] == [view.round.number]
            for rank in node.ranks
        ]
        return sorted(started) == list(range(view.round.world_size))

    # --- what workers do ---------------------------------------------------------------------

    def train(self) -> int:
        """Until a round is at work; its number."""
        self.until(lambda: self.training)
        assert self.view.round is not None
        return self.view.round.number

    def say(self, rank: int, *frames: FromWorker) -> None:
        self.holder(rank).crew.say(rank, *frames)
        self.settle()

    def heard(self, rank: int, kind: type[Any]) -> list[Any]:
        """What that worker was told, of that kind."""
        return [one for one in self.holder(rank).crew.received[rank] if isinstance(one, kind)]

    def report(self, n: int, **metrics: Any) -> None:
        """All ranks make their n-th report, without files."""
        assert self.view.round is not None
        for rank in range(self.view.round.world_size):
            self.say(rank, Report(n, msgspec.Raw(encode({"rank": rank, **metrics}))))

    def checkpoint(
        self, n: int, name: str, *, asked: ValidationAsked | None = None, **metrics: Any
    ) -> None:
        """All ranks make their n-th report; rank 0 brings files, and saves them."""
        assert self.view.round is not None
        for rank in range(1, self.view.round.world_size):
            self.say(rank, Report(n, msgspec.Raw(encode({"rank": rank, **metrics}))))
        self.say(0, Files(n, msgspec.Raw(encode({"rank": 0, **metrics})), name, validation=asked))
        named = self.heard(0, Named)[-1]
        assert (named.n, named.name) == (n, name)
        self.say(0, Saved(n, name, 10))

    def finish(self, rank: int, value: bytes = b"") -> None:
        """That rank's function comes back."""
        node = self.holder(rank)
        node.crew.say(rank, Returned(0, value))
        node.crew.exit(rank, clean=True)
        self.settle()

    def fail(self, rank: int, told: str = "ValueError: no") -> None:
        """That rank's function raises."""
        node = self.holder(rank)
        node.crew.say(rank, Raised(f"Traceback\n{told}", b"pickle"))
        node.crew.exit(rank, "exited with code 1")
        self.settle()

    def object_at(self, key: str) -> bytes:
        return MemoryStore.get(self.store, key)
