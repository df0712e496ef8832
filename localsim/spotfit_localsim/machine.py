"""A machine of the world: it boots, runs the real agent on simulated ports, is told, and dies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from spotfit.agent.agent import Agent
from spotfit.agent.ports import Audience, Hooks
from spotfit.control.caretaker import Caretaker
from spotfit.control.conductor import Conductor
from spotfit.control.errands import Errands, Inline
from spotfit.control.scribe import Scribe
from spotfit.core.errors import TransientStoreError
from spotfit.core.ids import AgentId, RunId
from spotfit.ledger.journal import Heard
from spotfit.ledger.run import Ledger
from spotfit.model.events import CancelRequested, Entry, FitStarted
from spotfit.model.spec import RunSpec
from spotfit.model.view import View
from spotfit.model.world import Member, Notice
from spotfit.provision.api import Provisioner
from spotfit.provision.launch import Launch
from spotfit.store.api import Store
from spotfit_localsim.assessor import SimAssessor
from spotfit_localsim.cloud import Box
from spotfit_localsim.crew import SimCrew, Theatre
from spotfit_localsim.engine import Process, Sidelong
from spotfit_localsim.net import PORT, Fabric, SimNet


@dataclass(frozen=True)
class Parts:
    """What the world lends to everybody who runs production code in it."""

    run_id: RunId
    theatre: Theatre
    fabric: Fabric
    store: Callable[[Process], Store]
    provisioner: Callable[[Process], Provisioner]
    heard: Callable[[str, int, bytes, View], None]
    """Told whenever somebody folds an entry: who, its slot, its bytes, the view it led to."""
    new_id: Callable[[], str]
    beside: bool
    """Whether errands run beside the ticks, or within them."""

    def ledger(self, process: Process) -> Ledger:
        """The run, as that process reads and writes it."""
        return WatchedLedger(self, process)

    def errands(self, process: Process) -> Errands:
        """Somebody for the slow calls of that process."""
        return Sidelong(process) if self.beside else Inline()


class WatchedLedger(Ledger):
    """The real one; the checker hears of every entry it folds, before anybody else."""

    def __init__(self, parts: Parts, process: Process) -> None:
        super().__init__(parts.store(process), parts.run_id, AgentId(process.name))
        self._told = parts.heard
        self.listen(lambda _slot, _body, _entry: None)

    def listen(self, heard: Heard) -> None:
        def checked(slot: int, body: bytes, entry: Entry) -> None:
            self._told(self.me, slot, body, self.view)
            heard(slot, body, entry)

        super().listen(checked)


class Watching:
    """The notice source of one machine."""

    def __init__(self, box: Box) -> None:
        self._box = box

    def poll(self, now: float) -> Notice | None:  # the words of a notice source
        return self._box.notice


class Workplace:
    """What the agent asks of its machine beyond the wire and the workers."""

    def __init__(self, parts: Parts, process: Process) -> None:
        self._parts = parts
        self._process = process
        self._errands = parts.errands(process)
        self.own_assessor = SimAssessor(parts.theatre, process)

    def provisioner(self, spec: RunSpec) -> Provisioner:  # there is one cloud
        return self._parts.provisioner(self._process)

    def audience(self, spec: RunSpec) -> Audience | None:  # nobody listens
        return None

    def hooks(self, spec: RunSpec) -> Hooks | None:  # and no backend of the user's own
        return None

    def resign(self) -> None:
        """There was nothing beside the leader."""

    def say(self, text: str) -> None:
        """Nobody reads it."""

    def assessor(self) -> SimAssessor:
        return self.own_assessor

    def errands(self) -> Errands:
        return self._errands

    def journal_errands(self) -> Errands:
        return self._parts.errands(self._process)

    def seal(self, payload: bytes, purpose: str) -> bytes:
        return f"{purpose}:".encode() + payload

    def new_token(self) -> str:
        return self._parts.new_id()

    def name_for(self, report: int) -> str:
        return f"checkpoint_{report:06d}_{self._parts.new_id()}"


class Machine:
    """One life of one agent, on the machine that the cloud calls `box`."""

    def __init__(self, parts: Parts, process: Process, box: Box) -> None:
        self.box = box
        self.process = process
        self.agent_id = AgentId(process.name)
        self.host = process.name
        self.silent = False
        self._fabric = parts.fabric
        self.ledger = parts.ledger(process)
        self.net = SimNet(parts.fabric, process, host=self.host, me=self.agent_id)
        self.crew = SimCrew(parts.theatre, process)
        workplace = Workplace(parts, process)
        self.assessor = workplace.own_assessor
        self.agent = Agent(
            member=self._member(),
            ledger=self.ledger,
            net=self.net,
            crew=self.crew,
            notices=[Watching(box)],
            launch=box.launch,
            workplace=workplace,
        )
        process.start(self.agent.tick)

    def evict(self, *, told: bool) -> None:
        """The machine is gone; unless `told`, nobody hears of it."""
        self.silent = not told
        if self.silent:
            self._fabric.silence(self.host)
        self.process.kill()

    def clean_up(self) -> None:
        """The agent's process is gone; so is what the kernel kept for it."""
        self.crew.close(told=not self.silent)
        self.assessor.close()
        self.net.close()

    def _member(self) -> Member:
        box = self.box
        return Member(
            self.agent_id,
            self.host,
            f"{self.host}:{PORT}",
            box.slots,
            box.token,
            box.node,
            vault=self.crew.vault,
        )


class Minder:
    """The laptop that called `fit()`, or a sweep: a caretaker under a driver of its own."""

    def __init__(self, parts: Parts, process: Process, spec: RunSpec, launch: Launch) -> None:
        self._spec = spec
        self._caretaker: Caretaker | None = None
        self._ledger = parts.ledger(process)
        self._scribe = Scribe(self._ledger, Inline())
        self._conductor = Conductor(
            self._scribe,
            parts.provisioner(process),
            launch,
            parts.errands(process),
            parts.new_id,
        )

    def tick(self, now: float) -> float | None:
        """Start the fit if nobody has, then mind it."""
        try:
            return self._tick(now)
        except TransientStoreError:
            return now + 0.5

    def cancel(self, now: float) -> float | None:
        """A tick of somebody who only wants the run to end."""
        try:
            view = self._ledger.catch_up()
            if view.cancelled is not None or view.ended is not None:
                return None
            if view.spec is not None:
                self._ledger.append(CancelRequested("enough"), after=view)
        except TransientStoreError:
            return now + 0.5
        return now + 0.1

    def _tick(self, now: float) -> float | None:
        if self._ledger.view.spec is None:
            view = self._ledger.catch_up()
            if view.spec is None:
                self._ledger.append(FitStarted(self._spec), after=view)
                return now
        if self._caretaker is None:
            self._caretaker = Caretaker(self._scribe, self._conductor, now)
        return self._caretaker.tick(now)
