"""Real time around the step machine: opens what an agent needs, then waits and ticks to the end."""

from __future__ import annotations

import contextlib
import signal
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from spotfit.agent.agent import Agent
from spotfit.agent.audience import LiveAudience
from spotfit.agent.crew import LiveCrew
from spotfit.agent.hooks import LiveHooks
from spotfit.agent.logs import LogShipper
from spotfit.agent.loop import Loop
from spotfit.agent.net import TlsNet
from spotfit.agent.notices.registry import open_source
from spotfit.agent.ports import Assessor, Audience, Hooks, NoticeSource
from spotfit.agent.snapshots import Snapshots
from spotfit.agent.validation import LiveAssessor
from spotfit.agent.vault import Vault
from spotfit.agent.zygote import ZygoteKeeper
from spotfit.control.errands import Errands, Threaded
from spotfit.core.clock import Clock
from spotfit.core.errors import SpotfitError
from spotfit.core.ids import AgentId
from spotfit.host import clocks, dice, env, log, machine, shared_memory
from spotfit.host.owned import owned
from spotfit.ledger.run import Ledger
from spotfit.model import output
from spotfit.model.audience import Hello
from spotfit.model.spec import RunSpec
from spotfit.model.world import Member
from spotfit.provision.api import Provisioner
from spotfit.provision.launch import Assignment, Exit
from spotfit.provision.registry import open_provisioner
from spotfit.ship.certificate import contexts
from spotfit.ship.sign import RunKey
from spotfit.store.api import Store
from spotfit.store.budget import PATIENT, Budget
from spotfit.store.opening import open_store

_NOTICE_POLL_S = 0.25
_HASTY = Budget(attempts=1)
"""The agent itself asks again, and may by then want something else."""
_JOURNAL_THREADS = 3
"""It is read and written and a lease looked at, each once at a time."""
_LAST_LOOK_S = 1.0
_LOCAL_PAUSE_S, _REMOTE_PAUSE_S = 0.1, 0.5


@cache
def zygotes_of_this_process() -> ZygoteKeeper:
    """Warm for whichever run is served next."""
    return ZygoteKeeper()


def serve(
    assignment: Assignment,
    *,
    zygotes: ZygoteKeeper | None = None,
    clock: Clock | None = None,
) -> int:
    """Be the agent of this machine until its run is over; gives the exit code.

    May be called again in the same process. Only the main thread hears signals.
    """
    env.forget(env.RUN_SECRET.name)  # nobody started from here needs it in its environment
    kept = zygotes or zygotes_of_this_process()
    try:
        kept.begin(assignment)
        with ExitStack() as opened:
            return _drive(assignment, kept, clock or clocks.SystemClock(), opened)
    except SpotfitError as error:
        log.error("agent.refused", why=str(error))
        return Exit.REFUSED
    except Exception:  # noqa: BLE001 - the agent's border: its scheduler learns of it as a code
        log.error("agent.crashed", traceback=traceback.format_exc())
        return Exit.CRASHED


def _drive(assignment: Assignment, zygotes: ZygoteKeeper, clock: Clock, opened: ExitStack) -> int:
    """Build the agent from the ground up, and let it step until it has nothing left to do."""
    launch, me = assignment.launch, dice.new_agent_id()
    key = RunKey.from_text(launch.secret, launch.run_id)
    loop = opened.enter_context(contextlib.closing(Loop(clock)))
    store = open_store(launch.run_url, PATIENT)
    scratch = str(opened.enter_context(_scratch(me)))
    errands = opened.enter_context(contextlib.closing(Threaded(loop.wake)))
    logs = opened.enter_context(contextlib.closing(_logs(store, me, clock)))
    net = opened.enter_context(contextlib.closing(_net(loop, assignment)))
    snapshots = Snapshots(str(opened.enter_context(shared_memory.folder_for(str(me)))))
    vault = opened.enter_context(contextlib.closing(_vault(snapshots, assignment, clock)))
    snapshots.copy = vault.copy
    crew = LiveCrew(
        loop,
        zygotes,
        store=store,
        key=key,
        logs=logs,
        scratch=scratch,
        slots=assignment.slots,
        snapshots=snapshots,
    )
    vault.kept = crew.note_copy
    opened.callback(_end_workers, crew, loop)
    for_journal = opened.enter_context(contextlib.closing(Threaded(loop.wake, _JOURNAL_THREADS)))
    runners = Runners(errands, for_journal)
    workplace = Workplace(
        crew,
        runners,
        loop,
        logs,
        key=key,
        scratch=scratch,
        devices=machine.devices(),
    )
    opened.callback(workplace.close)
    opened.enter_context(_signals_put_back())
    notices = [open_source(name, loop.wake) for name in launch.notices]
    agent = Agent(
        member=_member(assignment, me, net.hub, vault.address),
        ledger=Ledger(
            open_store(launch.run_url, _HASTY), launch.run_id, me, wall_ms=clocks.wall_ms
        ),
        net=net,
        crew=crew,
        notices=notices,
        launch=launch,
        workplace=workplace,
        scratch=scratch,
    )
    log.info("agent.up", agent=me, hub=net.hub, slots=assignment.slots, scratch=scratch)
    _tick_to_the_end(agent, loop, net, notices)
    log.info("agent.done", agent=me, given_up=agent.given_up, drained=agent.drained)
    if agent.drained:
        return Exit.DRAINED
    return Exit.GIVEN_UP if agent.given_up else Exit.DONE


def _tick_to_the_end(
    agent: Agent, loop: Loop, net: TlsNet, notices: Sequence[NoticeSource]
) -> None:
    while (wake := agent.tick(loop.clock.now())) is not None:
        wait_s = 0.0 if net.waiting else max(0.0, wake - loop.clock.now())
        loop.turn(min(wait_s, _NOTICE_POLL_S) if notices else wait_s)


class Runners(NamedTuple):
    """Who goes on errands."""

    usual: Errands
    for_journal: Errands
    """For the journal and the lease alone: these never wait behind a slow cloud."""


class Workplace:
    """What the agent asks of its machine beyond the wire and the workers."""

    def __init__(
        self,
        crew: LiveCrew,
        runners: Runners,
        loop: Loop,
        logs: LogShipper,
        *,
        key: RunKey,
        scratch: str,
        devices: tuple[str, ...] = (),
    ) -> None:
        self._crew = crew
        self._logs = logs
        self._loop = loop
        self._runners = runners
        self._key = key
        self._scratch = scratch
        self._devices = devices
        self._audience: LiveAudience | None = None
        self._hooks: LiveHooks | None = None

    def provisioner(self, spec: RunSpec) -> Provisioner:
        return open_provisioner(spec.provisioner, spec.provisioner_options)

    def audience(self, spec: RunSpec) -> Audience | None:
        self._dismiss_audience()
        if spec.callbacks:
            begin = partial(self._crew.beside, "audience")
            self._audience = LiveAudience(self._hello(spec), begin)
        return self._audience

    def hooks(self, spec: RunSpec) -> Hooks | None:
        self._dismiss_hooks()
        if spec.hooks:
            begin = partial(self._crew.beside, "hooks")
            self._hooks = LiveHooks(self._hello(spec), begin, self._loop.after)
        return self._hooks

    def resign(self) -> None:
        self.close()

    def say(self, text: str) -> None:
        log.warning("run.says", what=text)
        self._logs.line(-1, output.RUN, "err", text)

    def assessor(self) -> Assessor:
        return LiveAssessor(
            partial(self._crew.beside, "validation"),
            secret=self._key.to_text(),
            run_id=self._key.run,
            scratch=self._scratch,
            devices=self._devices,
        )

    def errands(self) -> Errands:
        return self._runners.usual

    def journal_errands(self) -> Errands:
        return self._runners.for_journal

    def seal(self, payload: bytes, purpose: str) -> bytes:
        return self._key.seal(payload, purpose=purpose)

    def new_token(self) -> str:
        return dice.new_token()

    def name_for(self, report: int) -> str:
        return f"checkpoint_{clocks.wall_stamp()}"

    def close(self) -> None:
        """End the processes of callbacks and hooks, if there are any."""
        self._dismiss_audience()
        self._dismiss_hooks()

    def _hello(self, spec: RunSpec) -> Hello:
        return Hello(
            spec.storage_url, spec.luggage, self._key.to_text(), self._key.run, self._scratch
        )

    def _dismiss_audience(self) -> None:
        if self._audience is not None:
            self._audience.close()
            self._audience = None

    def _dismiss_hooks(self) -> None:
        if self._hooks is not None:
            self._hooks.close()
            self._hooks = None


def _member(assignment: Assignment, me: AgentId, hub: str, vault: str) -> Member:
    return Member(
        agent=me,
        host=hub.rpartition(":")[0].strip("[]"),
        hub=hub,
        slots=assignment.slots,
        token=assignment.token,
        node=assignment.node,
        devices=machine.devices(),
        python=machine.python_version(),
        pid=machine.pid(),
        vault=vault,
    )


def _net(loop: Loop, assignment: Assignment) -> TlsNet:
    return TlsNet(
        loop,
        secret=assignment.launch.secret,
        run_id=assignment.launch.run_id,
        host=machine.own_address(),
        port=env.value(env.PORT),
    )


def _vault(snapshots: Snapshots, assignment: Assignment, clock: Clock) -> Vault:
    tls = contexts(assignment.launch.secret, assignment.launch.run_id)
    host = machine.own_address()
    return Vault(snapshots.shelf, snapshots.find, tls=tls, host=host, clock=clock)


def _logs(store: Store, me: AgentId, clock: Clock) -> LogShipper:
    local = store.url.startswith(("/", "file:"))
    pause_s = _LOCAL_PAUSE_S if local else _REMOTE_PAUSE_S
    return LogShipper(store, me, wall_ms=clocks.wall_ms, clock=clock, pause_s=pause_s)


def _scratch(me: AgentId) -> AbstractContextManager[Path]:
    """A directory of this agent's own, which goes with it; those of killed ones go first."""
    return owned(Path(env.value(env.SCRATCH) or tempfile.gettempdir()), f"scratch-{me}")


@contextmanager
def _signals_put_back() -> Iterator[None]:
    """Who called us answers SIGTERM again as before."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is not before:
            signal.signal(signal.SIGTERM, before)


def _end_workers(crew: LiveCrew, loop: Loop) -> None:
    """Whatever is left; what it has printed last is kept."""
    crew.close()
    deadline = loop.clock.now() + _LAST_LOOK_S
    while crew.left and loop.clock.now() < deadline:
        loop.turn(0.05)
    crew.detach()
