"""Runs an agent in real time: opens its resources, then waits for events and calls `Agent.tick`.

`serve` is the entry point. `LocalNodeServices` implements `NodeServices` with processes and threads
of this machine.
"""

from __future__ import annotations

import hashlib
import signal
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from spotfit.agent.agent import Agent, StartFailure
from spotfit.agent.log_shipper import LogShipper
from spotfit.agent.notices.sources import open_notice_source
from spotfit.agent.ports import (
    BackendHookRunner,
    CallbackRunner,
    FeederNode,
    NoticeSource,
    Validator,
)
from spotfit.agent.selfcheck import measure_size
from spotfit.agent.snapshot_registry import SnapshotRegistry
from spotfit.agent.tls_transport import TlsTransport
from spotfit.agent.worker_pool import ProcessWorkerPool
from spotfit.checkpoint.peer_store import PeerStore
from spotfit.control.background_calls import BackgroundCalls, ThreadedCalls
from spotfit.core.clock import Clock
from spotfit.core.errors import SpotfitError
from spotfit.core.ids import AgentId
from spotfit.fork_server.fork_client import ForkServerPool
from spotfit.host import env, log, machine, owned_dirs, system
from spotfit.host.event_loop import EventLoop
from spotfit.host.owned_dirs import owned_directory
from spotfit.ledger import keys
from spotfit.ledger.authenticated_store import AuthenticatedStore
from spotfit.ledger.journal import Ledger
from spotfit.model.events import MAX_CRASH_TEXT_CHARS, AgentCrash
from spotfit.model.group import Unreachable
from spotfit.model.spec import RunSpec
from spotfit.model.topology import Member
from spotfit.policy.retry_budget import unreachable_remedy
from spotfit.protocol.agent_sidecar import SidecarInit
from spotfit.provision.api import Provisioner
from spotfit.provision.launch import UNREACHABLE_EXIT_CODES, AgentAssignment, AgentExitCode
from spotfit.provision.profile import open_provisioner
from spotfit.security.run_key import RunKey, make_tls_contexts
from spotfit.sidecar.backend_hooks import ProcessBackendHookRunner
from spotfit.sidecar.callbacks import ProcessCallbackRunner
from spotfit.sidecar.feeder_node import ProcessFeederNode
from spotfit.sidecar.validator import ProcessValidator
from spotfit.store.api import Store
from spotfit.store.factory import open_store
from spotfit.store.retry import AGENT_RETRY_POLICY, PATIENT_RETRY_POLICY

# Notice sources wake the loop themselves; this bounds the delay of plug-ins that cannot.
_NOTICE_POLL_S = 0.25
# One call each may be in progress: read the journal, write an entry, read or renew a lease, check
# whether the journal exists.
_JOURNAL_THREADS = 4
# Killed workers exit within milliseconds; their last lines of output are still in the pipes.
_SHUTDOWN_DRAIN_S = 1.0
# A local directory costs nothing per request, so that the console can follow more closely.
_LOCAL_FLUSH_INTERVAL_S, _REMOTE_FLUSH_INTERVAL_S = 0.1, 0.5


@cache
def shared_fork_servers() -> ForkServerPool:
    """Return the fork servers of this process, which stay warm for the next run.

    Every call returns the same object. `python -m spotfit.agent` closes it before it exits.
    """
    return ForkServerPool()


def serve(
    assignment: AgentAssignment,
    *,
    fork_servers: ForkServerPool | None = None,
    clock: Clock | None = None,
) -> int:
    """Run the agent of this machine until its run ends; blocks. Returns an `AgentExitCode`.

    Errors are logged, and stored for the leader, not raised: a `SpotfitError` gives
    `NODE_UNUSABLE`, any other `CRASHED`. The run's key is removed from the environment variables.
    Without `fork_servers`, those of the process are used; without `clock`, the machine's monotonic
    clock.

    May be called again in the same process. Signals are only handled in the main thread.
    """
    env.unset(env.RUN_SECRET.name)  # child processes must not inherit the run's key
    # First: the output of a machine that is too small may end at any later line.
    log.info("agent.machine", size=str(measure_size()), instance=machine.instance_id())
    fork_servers = fork_servers or shared_fork_servers()
    agent_id = system.new_agent_id()
    try:
        with ExitStack() as exit_stack, _store_crash(assignment, agent_id):
            fork_servers.prewarm(assignment)
            node = _open_node(assignment, agent_id, clock or system.SystemClock(), exit_stack)
            return _run_agent(assignment, fork_servers, node, exit_stack)
    except SpotfitError as error:
        log.error("agent.refused", reason=str(error))
        return AgentExitCode.NODE_UNUSABLE
    except Exception:  # noqa: BLE001 - the scheduler restarts the agent by its exit code
        log.error("agent.crashed", traceback=traceback.format_exc())
        return AgentExitCode.CRASHED


@contextmanager
def _store_crash(assignment: AgentAssignment, agent_id: AgentId) -> Iterator[None]:
    """Store an error of the agent for the leader, before the resources of the agent are closed."""
    try:
        yield
    except Exception as error:
        # The leader looks for it once the connections of the agent are closed.
        _publish_crash(assignment, make_crash(assignment, agent_id, error))
        raise


def make_crash(assignment: AgentAssignment, agent_id: AgentId, error: Exception) -> AgentCrash:
    """Return the error of an agent in the form in which the leader reads it."""
    # Without messages and folders, which differ between machines, and repetitions of a recursion.
    frames = traceback.extract_tb(error.__traceback__)
    places = dict.fromkeys(f"{Path(one.filename).name}:{one.lineno} {one.name}" for one in frames)
    digest = hashlib.sha256("\n".join([type(error).__qualname__, *places]).encode())
    text = assignment.launch_spec.without_secrets("".join(traceback.format_exception(error)))
    return AgentCrash(
        agent=agent_id,
        token=assignment.token,
        node=assignment.node,
        signature=digest.hexdigest()[:16],
        traceback_text=text[-MAX_CRASH_TEXT_CHARS:],
    )


def _publish_crash(assignment: AgentAssignment, crash: AgentCrash) -> None:
    launch = assignment.launch_spec
    # Everything may be the cause of the crash, also the storage: the error itself is logged anyway.
    try:
        key = RunKey.from_text(launch.secret, launch.run_id)
        store = AuthenticatedStore(open_store(launch.run_url, AGENT_RETRY_POLICY), key)
        ledger = Ledger(store, launch.run_id, crash.agent, wall_ms=system.wall_ms)
        ledger.publish_crash(crash)
    except Exception as error:  # noqa: BLE001
        log.warning("agent.crash_not_stored", reason=str(error))


class _Node(NamedTuple):
    """Resources of this machine that several parts of the agent share."""

    agent_id: AgentId
    key: RunKey
    loop: EventLoop
    store: Store
    scratch: str
    background_calls: ThreadedCalls
    log_shipper: LogShipper
    transport: TlsTransport
    exit_stack: ExitStack
    """Closes all resources in reverse order: the log shipper after the processes that it serves."""


def _run_agent(
    assignment: AgentAssignment, fork_servers: ForkServerPool, node: _Node, exit_stack: ExitStack
) -> int:
    """Open the agent's other resources, run it to its end, and return its exit code."""
    launch = assignment.launch_spec
    worker_pool, peer_store_address = _open_worker_pool(assignment, node, fork_servers)
    node_services = LocalNodeServices(node, worker_pool)
    # Called before `_stop_workers`, which waits for the processes of all kinds.
    exit_stack.callback(node_services.close)
    # Entered before the sources are opened: one of them may replace the handler of SIGTERM.
    exit_stack.enter_context(_restore_signal_handlers())
    notice_sources = [open_notice_source(name, node.loop.wake) for name in launch.notice_sources]
    ledger_store = AuthenticatedStore(open_store(launch.run_url, AGENT_RETRY_POLICY), node.key)
    agent = Agent(
        member=_make_member(
            assignment,
            node.agent_id,
            coordinator_address=node.transport.address,
            peer_store_address=peer_store_address,
        ),
        ledger=Ledger(ledger_store, launch.run_id, node.agent_id, wall_ms=system.wall_ms),
        transport=node.transport,
        worker_pool=worker_pool,
        notice_sources=notice_sources,
        launch=launch,
        node_services=node_services,
        scratch=node.scratch,
    )
    log.info(
        "agent.started",
        agent=node.agent_id,
        address=node.transport.address,
        slots=assignment.slots,
        scratch=node.scratch,
    )
    _tick_until_done(agent, node.loop, node.transport, notice_sources)
    if agent.has_processes_left:
        worker_pool.kill_fork_server()
    log.info(
        "agent.exited", agent=node.agent_id, abandoned=agent.is_abandoned, drained=agent.is_drained
    )
    if (failure := agent.start_failure) is not None:
        remedy = unreachable_remedy(failure.what)
        log.error("agent.refused", what=failure.what, reason=failure.reason, do=remedy)
        # Before the connections are closed. Without the storage, only the exit code is left.
        if failure.what is Unreachable.LEADER:
            _publish_crash(assignment, _make_report(assignment, node.agent_id, failure))
        return UNREACHABLE_EXIT_CODES[failure.what]
    return _exit_code(agent)


def _make_report(
    assignment: AgentAssignment, agent_id: AgentId, failure: StartFailure
) -> AgentCrash:
    """Return what the agent could not reach in the form in which the leader reads it."""
    return AgentCrash(
        agent=agent_id,
        token=assignment.token,
        node=assignment.node,
        signature=f"unreachable {failure.what}",
        traceback_text=failure.reason[:MAX_CRASH_TEXT_CHARS],
        unreachable=failure.what,
    )


def _exit_code(agent: Agent) -> AgentExitCode:
    # Schedulers requeue an agent by its exit code, and only after `DRAINED`.
    if agent.is_drained and not agent.is_replaced:
        return AgentExitCode.DRAINED
    return AgentExitCode.RELEASED if agent.is_abandoned or agent.is_drained else AgentExitCode.DONE


def _open_node(
    assignment: AgentAssignment, agent_id: AgentId, clock: Clock, exit_stack: ExitStack
) -> _Node:
    launch = assignment.launch_spec
    # The loop is closed last: every other resource has registered its sockets or pipes in it.
    loop = EventLoop(clock)
    exit_stack.callback(loop.close)
    key = RunKey.from_text(launch.secret, launch.run_id)
    store = AuthenticatedStore(open_store(launch.run_url, PATIENT_RETRY_POLICY), key)
    # Directories of agents that were killed are deleted first; no other process deletes them.
    scratch_parent = Path(env.read(env.SCRATCH_DIR) or tempfile.gettempdir())
    scratch = exit_stack.enter_context(owned_directory(scratch_parent, f"scratch-{agent_id}"))
    background_calls = ThreadedCalls(loop.wake)
    exit_stack.callback(background_calls.close)
    transport = TlsTransport(
        loop,
        secret=launch.secret,
        run_id=launch.run_id,
        host=machine.own_address(),
        port=env.read(env.PORT),
    )
    exit_stack.callback(transport.close)
    # Closed before the transport, see `Agent._shut_down`.
    is_local = store.url.startswith(("/", "file:"))
    flush_interval_s = _LOCAL_FLUSH_INTERVAL_S if is_local else _REMOTE_FLUSH_INTERVAL_S
    log_shipper = LogShipper(
        store, agent_id, wall_ms=system.wall_ms, clock=clock, flush_interval_s=flush_interval_s
    )
    exit_stack.callback(log_shipper.close)
    return _Node(
        agent_id=agent_id,
        key=key,
        loop=loop,
        store=store,
        scratch=str(scratch),
        background_calls=background_calls,
        log_shipper=log_shipper,
        transport=transport,
        exit_stack=exit_stack,
    )


def _open_worker_pool(
    assignment: AgentAssignment, node: _Node, fork_servers: ForkServerPool
) -> tuple[ProcessWorkerPool, str]:
    """Return the worker pool, and the address of the peer store that serves its snapshots."""
    launch = assignment.launch_spec
    shared_memory = owned_dirs.shared_memory_directory(str(node.agent_id))
    snapshots = SnapshotRegistry(str(node.exit_stack.enter_context(shared_memory)))
    peer_store = PeerStore(
        snapshots.replicas,
        snapshots.find_shard,
        tls=make_tls_contexts(launch.secret, launch.run_id),
        host=machine.own_address(),
        clock=node.loop.clock,
    )
    node.exit_stack.callback(peer_store.close)
    snapshots.replicate = peer_store.replicate
    worker_pool = ProcessWorkerPool(
        node.loop,
        fork_servers,
        store=node.store,
        key=node.key,
        logs=node.log_shipper,
        scratch=node.scratch,
        slots=assignment.slots,
        snapshots=snapshots,
    )
    # Set afterwards: the pool needs the registry, and the registry and the peer store each other.
    peer_store.on_replica_stored = worker_pool.record_replica
    node.exit_stack.callback(_stop_workers, worker_pool, node.loop)
    return worker_pool, peer_store.address


def _tick_until_done(
    agent: Agent, loop: EventLoop, transport: TlsTransport, notice_sources: Sequence[NoticeSource]
) -> None:
    while (wake_at := agent.tick(loop.clock.now())) is not None:
        # Messages of an agent to itself as the leader are in memory: no socket wakes the loop.
        wait_s = 0.0 if transport.has_events else max(0.0, wake_at - loop.clock.now())
        loop.run_once(min(wait_s, _NOTICE_POLL_S) if notice_sources else wait_s)


class LocalNodeServices:
    """`NodeServices` of this machine for one agent; see there for the methods."""

    def __init__(self, node: _Node, worker_pool: ProcessWorkerPool) -> None:
        self._node = node
        self._worker_pool = worker_pool
        # Separate threads: the journal and the lease must not wait behind a slow cloud API.
        self._journal_calls = ThreadedCalls(node.loop.wake, _JOURNAL_THREADS)
        self._callback_runner: ProcessCallbackRunner | None = None
        self._backend_hook_runner: ProcessBackendHookRunner | None = None

    def close(self) -> None:
        """Kill the callback and hook processes, and end the journal's threads; does not wait."""
        self.stop_sidecars()
        self._journal_calls.close()

    def open_provisioner(self, spec: RunSpec) -> Provisioner:
        return open_provisioner(spec.provisioner, spec.provisioner_options)

    def open_callback_runner(self, spec: RunSpec) -> CallbackRunner | None:
        # An agent that lost and regained the leadership between two ticks has one already.
        _close(self._callback_runner)
        self._callback_runner = None
        if spec.has_callbacks:
            start = partial(self._worker_pool.start_sidecar, "callbacks")
            self._callback_runner = ProcessCallbackRunner(self._sidecar_init(spec), start)
        return self._callback_runner

    def open_backend_hook_runner(self, spec: RunSpec) -> BackendHookRunner | None:
        _close(self._backend_hook_runner)
        self._backend_hook_runner = None
        if spec.has_backend_hooks:
            start = partial(self._worker_pool.start_sidecar, "hooks")
            self._backend_hook_runner = ProcessBackendHookRunner(
                self._sidecar_init(spec), start, self._node.loop.call_later
            )
        return self._backend_hook_runner

    def stop_sidecars(self) -> None:
        _close(self._callback_runner)
        _close(self._backend_hook_runner)
        self._callback_runner = self._backend_hook_runner = None

    def write_run_log(self, text: str) -> None:
        # On this machine's stderr, and in the bucket for the console of `fit()`.
        log.warning("run.message", message=text)
        self._node.log_shipper.add_line(-1, keys.RUN_RANK, "err", text)

    @property
    def has_unwritten_logs(self) -> bool:
        return self._node.log_shipper.has_unwritten

    def open_validator(self) -> Validator:
        return ProcessValidator(
            partial(self._worker_pool.start_sidecar, "validation"),
            secret=self._node.key.to_text(),
            run_id=self._node.key.run_id,
            scratch=self._node.scratch,
            devices=machine.devices(),
        )

    def open_feeder_node(self) -> FeederNode:
        return ProcessFeederNode(
            partial(self._worker_pool.start_sidecar, "feeder"),
            self._sidecar_init,
            processors=machine.cpu_count(),
        )

    def background_calls(self) -> BackgroundCalls:
        return self._node.background_calls

    def journal_background_calls(self) -> BackgroundCalls:
        return self._journal_calls

    def seal(self, payload: bytes, purpose: str) -> bytes:
        return self._node.key.seal(payload, purpose=purpose)

    def new_token(self) -> str:
        return system.new_token()

    def default_checkpoint_name(self, report_index: int) -> str:
        return f"checkpoint_{system.utc_timestamp()}"

    def _sidecar_init(self, spec: RunSpec) -> SidecarInit:
        return SidecarInit(
            storage_url=spec.storage_url,
            code_bundle=spec.code_bundle,
            secret=self._node.key.to_text(),
            run_id=self._node.key.run_id,
            scratch_dir=self._node.scratch,
        )


def _close(runner: ProcessCallbackRunner | ProcessBackendHookRunner | None) -> None:
    if runner is not None:
        runner.close()


def _make_member(
    assignment: AgentAssignment,
    agent_id: AgentId,
    *,
    coordinator_address: str,
    peer_store_address: str,
) -> Member:
    return Member(
        agent=agent_id,
        host=coordinator_address.rpartition(":")[0].strip("[]"),
        coordinator_address=coordinator_address,
        slots=assignment.slots,
        token=assignment.token,
        node=assignment.node,
        devices=machine.devices(),
        python=machine.python_version(),
        pid=machine.pid(),
        peer_store_address=peer_store_address,
        instance=machine.instance_id(),
        size=measure_size(),
    )


@contextmanager
def _restore_signal_handlers() -> Iterator[None]:
    """Restore the caller's SIGTERM handler, which a notice source may have replaced."""
    # Only restored if it was replaced: `signal.signal` is forbidden outside of the main thread.
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is not before:
            signal.signal(signal.SIGTERM, before)


def _stop_workers(worker_pool: ProcessWorkerPool, loop: EventLoop) -> None:
    """Kill all processes and read their last output before the log shipper closes."""
    worker_pool.close()
    # Bounded: a process in uninterruptible sleep, as on a hung file system, never exits.
    deadline = loop.clock.now() + _SHUTDOWN_DRAIN_S
    while worker_pool.live_process_count and loop.clock.now() < deadline:
        loop.run_once(0.05)
    worker_pool.detach()
