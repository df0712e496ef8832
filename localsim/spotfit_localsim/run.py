"""simulate(scenario, seed) -> story: one world from its first event to its last."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass

from spotfit.core.ids import RunId
from spotfit.ledger import keys
from spotfit.model.events import Entry
from spotfit.model.spec import RunSpec, ValidationSpec
from spotfit.provision.launch import Launch
from spotfit_localsim.bucket import Bucket, SimStore
from spotfit_localsim.cloud import Box, Cloud, SimProvisioner
from spotfit_localsim.crew import Theatre
from spotfit_localsim.dice import Dice
from spotfit_localsim.engine import Clock, Engine, Process, small_world
from spotfit_localsim.faults import Hazards, Line, Season
from spotfit_localsim.invariants import Checker, InvariantBroken
from spotfit_localsim.machine import Machine, Minder, Parts
from spotfit_localsim.market import Tide
from spotfit_localsim.net import Fabric, Wall
from spotfit_localsim.scenario import (
    Act,
    At,
    Cancel,
    Crash,
    Freeze,
    Isolate,
    Outage,
    Reclaim,
    Scenario,
    Stall,
    Step,
    Whom,
)
from spotfit_localsim.story import Line as Told
from spotfit_localsim.story import Story, tell
from spotfit_localsim.workload import Training, Validations

RUN_ID = RunId("5" * 32)
_LOOK_S = 1.0
_OURS = keys.OURS.rstrip("/")
_MOSTLY_BESIDE = 0.75
"""Share of worlds whose errands are done as production does them."""


@dataclass(frozen=True)
class Design:
    """What the world is built of; tests put in parts that are known to be wrong."""

    store: type[SimStore] = SimStore
    provisioner: type[SimProvisioner] = SimProvisioner
    beside: bool | None = None
    """Whether errands run beside the ticks, as threads do, or within them; None: the seed says."""


SOUND = Design()


def simulate(scenario: Scenario, seed: int, design: Design = SOUND) -> Story:
    """Live through one world. Raises `InvariantBroken`, with the story, if something broke."""
    story = World(scenario, seed, design).live()
    if story.broken is not None:
        raise InvariantBroken(str(story))
    return story


class World:
    """Everything that is simulated: bucket, cloud, wires, machines and the laptop."""

    def __init__(
        self,
        scenario: Scenario,
        seed: int,
        design: Design = SOUND,
        *,
        engine: Engine | None = None,
    ) -> None:
        self.scenario = scenario
        self.story = Story(scenario.name, seed)
        self.engine = engine or Engine()
        self.machines: dict[str, Machine] = {}
        self._dice = Dice(seed)
        self._design = design
        self._fate = self._dice.stream("fate")
        self._season = Season(scenario.faults)
        self._training = Training(scenario.load)
        self.bucket = Bucket()
        self.checker = Checker(
            self.bucket.objects, self._training, broke=self._break, wrote=self._wrote
        )
        self.bucket.watchers.append(self.checker.written)
        self._tide = Tide(scenario.market, self._dice.stream("market"))
        self.cloud = Cloud(self.engine, self._tide, self._say)
        self.cloud.tenant = self
        self.cloud.requested.append(self.checker.requested)
        self.fabric = Fabric(self.engine, self._dice.stream("wire"), scenario.wire.latency_s)
        self._walls: list[Wall] = []
        self._numbers: dict[str, int] = {}
        self._born: dict[str, float] = {}
        self._processes: list[Process] = []
        self._ended_at: float | None = None
        self._calm = False
        self._launch = Launch("sim://run", RUN_ID, "no secret at all", ("sim",))
        self._parts = Parts(
            RUN_ID,
            self._theatre(),
            self.fabric,
            self._store,
            self._provisioner,
            self.checker.heard,
            lambda: self._new_name("t"),
            beside=self._beside(),
        )

    def live(self) -> Story:
        """From the first event to the last."""
        self.begin()
        with small_world():
            self.engine.run(until=self.scenario.storm_s + self.scenario.patience_s)
        if self.checker.broken is None:
            self.checker.at_the_end(self.scenario.outcome)
        return self._close()

    def begin(self) -> None:
        """Plan all that does not depend on what happens."""
        self._open_the_laptop()
        for act in self.scenario.acts:
            self._plan(act)
        self._plan_weather(self.scenario.wire.resets_per_hour, self._reset_a_wire)
        self._plan_weather(self.scenario.wire.walls_per_hour, self._cut_somebody_off)
        self.engine.after(self.scenario.storm_s, self._calm_down)
        self.engine.after(_LOOK_S, self._look)

    # --- the tenant of the cloud -------------------------------------------------------------

    def boot(self, box: Box) -> None:
        """A machine is up: its agent begins to live."""
        process = self._process("a", lambda error: self._over(name, error))
        name = process.name
        self._say(name, f"begins to live on {box.name}")
        self.machines[name] = Machine(self._parts, process, box)

    def evict(self, box: Box, *, told: bool) -> None:
        """A machine is gone."""
        for machine in self.machines.values():
            if machine.box is box:
                machine.evict(told=told)

    def _over(self, name: str, error: BaseException | None) -> None:
        machine = self.machines.pop(name)
        self.story.agent_seconds += self.engine.now - self._born[name]
        if error is not None:
            told = "".join(traceback.format_exception(error))
            self.checker.complain(f"the agent {name} broke: {told}")
        machine.clean_up()
        self.cloud.end(machine.box, "its agent is gone", told=True, failed=error is not None)

    # --- the laptop and those who come by ----------------------------------------------------

    def _open_the_laptop(self) -> None:
        plan = self.scenario.laptop
        laptop = self._process("laptop", lambda error: self._minder_over("laptop", error))
        laptop.start(self._minder(laptop).tick)
        if plan.swept_anyway and plan.sweep_every_s is not None:
            self._sweep(plan.sweep_every_s)
        if plan.dies_at_s is not None:
            self.engine.after(plan.dies_at_s, lambda: self._close_the_laptop(laptop))

    def _close_the_laptop(self, laptop: Process) -> None:
        self._say("laptop", "is closed")
        laptop.kill()
        plan = self.scenario.laptop
        if plan.sweep_every_s is not None and not plan.swept_anyway:
            self._sweep(plan.sweep_every_s)

    def _sweep(self, every_s: float) -> None:
        sweep = self._process("sweep", lambda error: self._minder_over("sweep", error))
        sweep.start(self._minder(sweep).tick)
        self.engine.after(self.scenario.laptop.sweep_s, sweep.kill)
        self.engine.after(every_s, lambda: self._sweep(every_s))

    def _cancel(self) -> None:
        someone = self._process("someone", lambda error: self._minder_over("someone", error))
        someone.start(self._minder(someone).cancel)

    def _minder(self, process: Process) -> Minder:
        return Minder(self._parts, process, self._spec(), self._launch)

    def _minder_over(self, name: str, error: BaseException | None) -> None:
        if error is not None:
            self.checker.complain(f"{name} broke: {''.join(traceback.format_exception(error))}")

    def _spec(self) -> RunSpec:
        scenario = self.scenario
        return RunSpec(
            run_id=RUN_ID,
            name="run",
            fit_id="fit",
            workers_min=scenario.workers_min or scenario.workers,
            workers_max=scenario.workers,
            elastic=scenario.workers_min is not None,
            resize_every_s=scenario.resize_every_s,
            limits=scenario.limits,
            keep=scenario.keep,
            provisioner="sim",
            storage_url="sim://run",
            vigil=scenario.vigil,
            tempo=scenario.tempo,
            validation=_validation(scenario.load.validations),
        )

    # --- what befalls whom -------------------------------------------------------------------

    def _plan(self, act: Act) -> None:
        match act.when:
            case At(seconds=seconds):
                self.engine.after(seconds, lambda: self._play(act))
            case Step(number=number):
                self._training.reached.append(lambda step: self._play_at(act, step == number))

    def _play_at(self, act: Act, due: bool) -> None:  # noqa: FBT001  # one question, asked once
        if due:
            self.engine.after(0.0, lambda: self._play(act))

    def _play(self, act: Act) -> None:
        match act:
            case Reclaim(whom=whom, notice=notice):
                for machine in self._chosen(whom):
                    self.cloud.reclaim(machine.box, notice=notice)
            case Freeze(whom=whom, seconds=seconds):
                for machine in self._chosen(whom):
                    self._say(machine.agent_id, f"is frozen for {seconds:.1f} s")
                    machine.process.freeze(seconds)
            case Crash(whom=whom):
                for machine in self._chosen(whom):
                    self._say(machine.agent_id, "dies")
                    machine.process.kill()
            case Isolate(whom=whom, seconds=seconds, outwards=outwards, inwards=inwards):
                for machine in self._chosen(whom):
                    self._wall(Wall(machine.host, outwards, inwards), seconds)
            case Cancel():
                self._cancel()
            case Outage(seconds=seconds):
                self._say("bucket", f"refuses everybody for {seconds:.1f} s")
                self._season.cut_off()
                self.engine.after(seconds, self._season.reopen)
            case Stall(seconds=seconds):
                self._say("bucket", f"hangs for {seconds:.1f} s")
                self._season.stall(self.engine.now + seconds)

    def _chosen(self, whom: Whom) -> list[Machine]:
        leader = self.checker.leader
        here = [machine for machine in self.machines.values() if machine.process.alive]
        if whom == "everybody":
            return here
        if whom == "leader":
            return [machine for machine in here if machine.agent_id == leader]
        if whom == "follower":
            here = [machine for machine in here if machine.agent_id != leader]
        return [self._fate.choice(here)] if here else []

    def _plan_weather(self, per_hour: float, strike: Callable[[], None]) -> None:
        if per_hour > 0 and not self._calm:
            wait_s = self._fate.expovariate(per_hour / 3600.0)
            self.engine.after(wait_s, lambda: self._strike(per_hour, strike))

    def _strike(self, per_hour: float, strike: Callable[[], None]) -> None:
        if not self._calm:
            strike()
            self._plan_weather(per_hour, strike)

    def _reset_a_wire(self) -> None:
        wires = list(self.fabric.connections)
        if wires:
            wire = self._fate.choice(wires)
            self._say(wire.agent, f"loses its connection to {wire.address}")
            wire.reset()

    def _cut_somebody_off(self) -> None:
        for machine in self._chosen("anybody"):
            way = self._fate.choice([(True, True), (True, False), (False, True)])
            self._wall(Wall(machine.host, *way), self._fate.between(self.scenario.wire.wall_s))

    def _wall(self, wall: Wall, seconds: float) -> None:
        way = {(True, True): "", (True, False): ", but hears", (False, True): ", but is heard"}
        self._say(wall.host, f"is cut off for {seconds:.1f} s{way[wall.outwards, wall.inwards]}")
        self.fabric.build(wall)
        self._walls.append(wall)
        self.engine.after(seconds, lambda: self._tear_down(wall))

    def _tear_down(self, wall: Wall) -> None:
        if wall in self._walls:
            self._walls.remove(wall)
            self.fabric.tear_down(wall)

    def _calm_down(self) -> None:
        self._calm = True
        self._say("world", "the storm is over")
        self._season.calm()
        self._tide.calm()
        self.cloud.look_again()
        for wall in list(self._walls):
            self._tear_down(wall)

    # --- what everybody is given -------------------------------------------------------------

    def _process(self, kind: str, ended: Callable[[BaseException | None], None]) -> Process:
        name = self._new_name(kind)
        stream = self._dice.stream(name)
        skew = self.scenario.skew
        clock = Clock(stream.uniform(0.0, 1e5), 1.0 + stream.uniform(-skew, skew))
        hazards = Hazards(self._season, stream, mortal=kind == "a")
        process = Process(self.engine, name, clock=clock, hazards=hazards, ended=ended)
        self._born[name] = self.engine.now
        self._processes.append(process)
        return process

    def _new_name(self, kind: str) -> str:
        number = self._numbers[kind] = self._numbers.get(kind, 0) + 1
        return f"{kind}{number}"

    def _store(self, process: Process) -> SimStore:
        line = Line(self._season, self._dice.stream(f"line of {process.name}"))
        return self._design.store(self.bucket, process, line)

    def _provisioner(self, process: Process) -> SimProvisioner:
        return self._design.provisioner(self.cloud, self._tide, process, slots=self.scenario.slots)

    def _theatre(self) -> Theatre:
        return Theatre(
            self.engine,
            self.fabric,
            self.bucket,
            self._training,
            self._dice.stream("workers"),
            self.checker.complain,
            self._say,
            self.checker.is_pending,
            self.checker.latest,
        )

    def _beside(self) -> bool:
        drawn = self._fate.chance(_MOSTLY_BESIDE)
        return drawn if self._design.beside is None else self._design.beside

    # --- the story ---------------------------------------------------------------------------

    def _say(self, who: str, what: str) -> None:
        self.story.lines.append(Told(self.engine.now, who, what))

    def _wrote(self, entry: Entry) -> None:
        slot = len(self.checker.entries) - 1
        self._say(entry.by, f"[{slot}] {tell(entry.event)}")

    def _break(self, what: str) -> None:
        self._say("CHECKER", what)
        self.engine.halt()

    def _look(self) -> None:
        """Is the run over, and everything let go?"""
        now = self.engine.now
        if self.checker.truth.ended is not None:
            self._ended_at = now if self._ended_at is None else self._ended_at
            standing = [box.name for box in self.cloud.standing()]
            if not standing:
                self.engine.halt()
                return
            if now - max(self._ended_at, self.scenario.storm_s) > self.scenario.leave_s:
                self.checker.complain(f"long after the end {', '.join(standing)} still cost money")
        self.engine.after(_LOOK_S, self._look)

    def _close(self) -> Story:
        story, checker = self.story, self.checker
        story.broken = checker.broken
        story.entries = checker.entries
        story.view = checker.truth
        story.lasted_s = self.engine.now
        story.events = self.engine.steps
        story.requests = self.bucket.bill
        story.machine_seconds = self.cloud.machine_seconds
        story.steps_repeated = self._training.steps_done - self._training.furthest
        story.folders = frozenset(key.partition("/")[0] for key in self.bucket.objects) - {_OURS}
        for name in self.machines:
            story.agent_seconds += self.engine.now - self._born[name]
        for process in self._processes:
            process.abandon()
        return story


def _validation(plan: Validations | None) -> ValidationSpec | None:
    if plan is None:
        return None
    return ValidationSpec(plan.own_machine, {"CPU": 1.0}, plan.timeout_s)
