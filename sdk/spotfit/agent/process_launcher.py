"""Starts the processes of this node in the environment of the run: forked, or spawned where unsafe.

The state of the environment in which processes are started:

| state     | event                               | next                                       |
|-----------|-------------------------------------|--------------------------------------------|
| empty     | `prepare(spec)`                     | unpacking; launches are queued             |
| unpacking | code and requirements are unpacked  | ready; queued launches are started         |
| unpacking | permanent error                     | broken: `on_broken`, launches fail         |
| unpacking | error that may be temporary         | empty; queued launches fail                |
| empty     | the next launch (of the next round) | unpacking again                            |
"""

from __future__ import annotations

import pickle
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from spotfit.code.code_bundle import (
    CodeBundlePayload,
    CodeBundleRef,
    check_environment,
    fetch_code_bundle,
)
from spotfit.code.environment_setup import PreparedRuntimeEnv, prepare_runtime_env
from spotfit.core.errors import InfrastructureError
from spotfit.fork_server.child_process import ChildProcess
from spotfit.fork_server.fork_client import (
    ForkServerClient,
    ForkServerPool,
    RuntimeKey,
    Spawner,
    build_worker_environment,
)
from spotfit.host import log, machine
from spotfit.host.event_loop import READ, EventLoop
from spotfit.model.spec import RunSpec
from spotfit.policy.retry_budget import diagnose_setup_failure
from spotfit.protocol.agent_fork_server import (
    EXIT_FORK_SERVER_DIED,
    EXIT_NOT_STARTED,
    ChildExited,
    ChildForked,
    ChildKind,
    ForkServerReady,
    ForkUnsafe,
)
from spotfit.protocol.framing import MAX_FRAME_BYTES
from spotfit.protocol.worker_agent import WorkerRaised
from spotfit.security.run_key import RunKey
from spotfit.store.api import Store


class ProcessLaunch(NamedTuple):
    """A process to start."""

    kind: ChildKind
    child: ChildProcess
    on_not_started: Callable[[WorkerRaised], None] | None = None
    """Called with the error if the process cannot be started, before its exit is reported."""
    restart: Callable[[], None] | None = None
    """Replaces the process by one with a new socket; None if it can be forked with this one."""


class ProcessLauncher:
    """Starts and tracks the processes of this node: workers and sidecars.

    Args:
        unpack: Unpacks the environment of a run. Called in a thread, because the bucket and pip
            may take minutes.
        slots: The number of worker slots of this node.
        on_broken: Called with the permanent error if no process can be started on this node.
        on_slow_starts: Called with a sentence for the user if processes of this node start slowly,
            because a module cannot be imported before they are forked.
    """

    def __init__(
        self,
        loop: EventLoop,
        fork_servers: ForkServerPool,
        *,
        unpack: Callable[[RunSpec], PreparedRuntimeEnv],
        slots: int,
        on_broken: Callable[[WorkerRaised], None],
        on_slow_starts: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._fork_servers = fork_servers
        self._unpack_environment = unpack
        self._slots = slots
        self._on_broken = on_broken
        self._on_slow_starts = on_slow_starts
        self._spawner = Spawner(loop)
        self._runtime_key: RuntimeKey | None = None
        """What processes are started from; None until the environment is unpacked."""
        self._unpack_error: Exception | None = None
        """Why the environment cannot be unpacked on this node, if that is permanent."""
        self._spec: RunSpec | None = None
        self._is_unpacking = False
        self._fork_server: ForkServerClient | None = None
        self._pending_launches: list[ProcessLaunch] = []
        """Launches queued until the environment is unpacked."""
        self._launches_by_serial: dict[int, ProcessLaunch] = {}
        """Launches requested from the fork server, by request id."""
        self._children: set[ChildProcess] = set()
        """All processes that have not ended."""

    @property
    def live_count(self) -> int:
        """How many processes have not ended or were not reaped, queued ones included; 0 for none.

        A process that was spawned, not forked, may count twice.
        """
        return len(self._children) + self._spawner.live_count

    @property
    def is_warm(self) -> bool:
        """Whether the fork server has imported what workers need up to their first training steps.

        Also True without a fork server, where processes are spawned and never become warm.
        """
        # Without a fork server nothing will become warmer: do not make the leader wait.
        return self._fork_server is None or self._fork_server.is_ready

    def prepare(self, spec: RunSpec) -> None:
        """Start to unpack the environment in a thread, and to import the framework meanwhile.

        Called once per run. Errors are reported later: by `on_broken` if they are permanent, and as
        failed launches.
        """
        # Most runs set no environment variables: then this fork server is the one that is used.
        variables = build_worker_environment(self._slots, {})
        self._use_fork_server(
            RuntimeKey.of(spec.framework, sys.executable, variables, spec.preload)
        )
        self._spec = spec
        self._start_unpacking(spec)

    def create_child(
        self,
        *,
        on_messages: Callable[[list[bytes]], None],
        on_line: Callable[[str, str], None],
        on_exit: Callable[[str, bool], None],
        log_fields: Mapping[str, object] | None = None,
        frame_limit_bytes: int = MAX_FRAME_BYTES,
    ) -> ChildProcess:
        """Create the handle of a process, which `launch` starts. Frames may be sent before.

        `on_messages` receives lists of frames, `on_line` a stream ("out" or "err") and a line of
        output, `on_exit` once the reason in words and whether the exit code is 0. All are called by
        the event loop. `log_fields` identify the process in log records, and no frame of it may be
        larger than `frame_limit_bytes`. The process counts as live from now on.
        """
        child: ChildProcess

        def on_child_exit(reason: str, is_clean: bool) -> None:  # noqa: FBT001 - see ChildProcess
            self._children.discard(child)
            on_exit(reason, is_clean)

        child = ChildProcess(
            self._loop,
            on_messages=on_messages,
            on_line=on_line,
            on_exit=on_child_exit,
            log_fields=log_fields,
            frame_limit_bytes=frame_limit_bytes,
        )
        self._children.add(child)  # before its start: `close` must cancel it, too
        return child

    def launch(self, launch: ProcessLaunch) -> None:
        """Start a process now, or once the environment is unpacked; does not wait for it.

        A process that cannot be started is reported by `on_not_started`, then as an exit; nothing
        is raised. After a temporary error of the previous attempt, unpacking starts again.
        """
        if self._unpack_error is not None:
            _fail(launch, self._unpack_error)
            return
        if self._runtime_key is None:
            self._pending_launches.append(launch)
            if self._spec is not None and not self._is_unpacking:
                self._start_unpacking(self._spec)  # the previous attempt has failed
            return
        self._notice_dead_fork_server()
        self._use_fork_server(self._runtime_key)
        try:
            if self._fork_server is not None:
                serial = self._fork_server.fork(launch.kind, launch.child.descriptors)
                self._launches_by_serial[serial] = launch
            else:
                self._spawner.spawn(launch.kind, self._runtime_key, launch.child)
        except OSError as error:
            do = "Check the machine's limits of processes and open files with `ulimit -a`."
            reason = f"The machine {machine.hostname()} could not start a process: {error}"
            _fail(launch, InfrastructureError(reason, do=do))

    def cancel_pending(self, *, only: ChildKind | None = None) -> None:
        """Cancel the launches that wait for the environment, all or those of one kind.

        Each is reported as killed. Processes that run are not affected.
        """
        queued, self._pending_launches = self._pending_launches, []
        for launch in queued:
            if only is not None and launch.kind != only:
                self._pending_launches.append(launch)
                continue
            # Reported like any kill: the leader waits for the exit of every worker.
            launch.child.kill()
            launch.child.on_reaped(signal.SIGKILL)

    def close(self) -> None:
        """Kill all processes and cancel queued launches; returns before they have exited.

        Their exits are still reported while the event loop runs. Harmless if repeated.
        """
        for child in list(self._children):
            child.kill()
        self.cancel_pending()

    def kill_fork_server(self) -> None:
        """End the fork server, if there is one, with its children. Blocks for some seconds at most.

        The pool starts another one for the next run.
        """
        if self._fork_server is not None:
            log.warning("fork_server.unresponsive", pid=self._fork_server.pid)
            server = self._fork_server
            self.detach()
            server.kill()

    def detach(self) -> None:
        """Stop reading from the fork server, which stays in its pool for the next run.

        Its children's exits are not observed afterwards. Harmless if repeated.
        """
        if self._fork_server is not None:
            self._loop.unregister(self._fork_server.control)
            self._fork_server = None

    # --- environment ---------------------------------------------------------------------------

    def _start_unpacking(self, spec: RunSpec) -> None:
        self._is_unpacking = True
        # A daemon: pip may hang, and must not keep an agent from exiting.
        threading.Thread(
            target=self._unpack, args=(spec,), name="spotfit-unpack", daemon=True
        ).start()

    def _unpack(self, spec: RunSpec) -> None:
        """Unpack code and requirements. Runs in a thread."""
        outcome: PreparedRuntimeEnv | Exception
        try:
            outcome = self._unpack_environment(spec)
        except OSError as error:
            outcome = InfrastructureError(
                f"The machine {machine.hostname()} could not unpack the run's code: {error}",
                do="Check the free space of its disk, or use machines with a larger disk.",
            )
        except Exception as error:  # noqa: BLE001 - the user's code and pip may raise anything
            outcome = error
        self._loop.call_soon_threadsafe(partial(self._on_unpacked, spec, outcome))

    def _on_unpacked(self, spec: RunSpec, outcome: PreparedRuntimeEnv | Exception) -> None:
        """Start the queued launches, or fail them; a temporary error does not fail later ones."""
        self._is_unpacking = False
        if isinstance(outcome, PreparedRuntimeEnv):
            variables = build_worker_environment(self._slots, outcome.env_vars)
            self._runtime_key = RuntimeKey.of(
                spec.framework, outcome.python, variables, spec.preload
            )
            self._use_fork_server(self._runtime_key)
        else:
            log.error("worker_pool.unpack_failed", reason=str(outcome))
            self._unpack_error = outcome
        # After a failure these report it: `launch` finds `_unpack_error`.
        launches, self._pending_launches = self._pending_launches, []
        for launch in launches:
            self.launch(launch)
        if isinstance(outcome, Exception):
            raised = _to_failure_message(outcome)
            if raised.is_permanent:
                self._on_broken(raised)
            else:
                self._unpack_error = None  # so that the next round unpacks again

    # --- fork servers --------------------------------------------------------------------------

    def _use_fork_server(self, runtime_key: RuntimeKey) -> None:
        """Switch to the fork server with that key, starting it if necessary."""
        server = self._fork_servers.get_or_start(runtime_key)
        if server is self._fork_server:
            return
        self.detach()
        self._fork_server = server
        self._fork_servers.evict_unused(runtime_key)
        if server is not None:
            self._loop.register(
                server.control, READ, partial(self._on_fork_server_readable, server)
            )

    def _notice_dead_fork_server(self) -> None:
        """Handle the death of the fork server before the event loop reads the end of its socket.

        Otherwise the next server would reuse the request ids of launches that still await this one.
        """
        if (server := self._fork_server) is not None and not server.is_alive:
            self._on_fork_server_readable(server, READ)  # exits that it reported before its death
            if self._fork_server is server:
                self._on_fork_server_lost(server)

    def _on_fork_server_readable(self, fork_server: ForkServerClient, _mask: int) -> None:
        messages = fork_server.read_messages()
        if messages is None:
            self._on_fork_server_lost(fork_server)
            return
        for message in messages:
            match message:
                # The fork server outlives a run: unknown ids are of the run before.
                case ChildForked(request_id=serial, pid=pid):
                    if serial in self._launches_by_serial:
                        self._launches_by_serial[serial].child.on_started(pid)
                case ChildExited(request_id=serial, wait_status=status):
                    if serial in self._launches_by_serial:
                        self._launches_by_serial.pop(serial).child.on_reaped(status)
                case ForkUnsafe():
                    text = _describe_unsafe_import(message, fork_server.runtime_key)
                    log.warning("fork_server.fork_unsafe", module=message.module, text=text)
                    self._on_slow_starts(text)
                case ForkServerReady():
                    log.debug("fork_server.ready", framework=fork_server.runtime_key.framework)

    def _on_fork_server_lost(self, fork_server: ForkServerClient) -> None:
        """Record that its children have died with it, and start elsewhere those not forked yet."""
        self._loop.unregister(fork_server.control)
        self._fork_server = None
        launches, self._launches_by_serial = self._launches_by_serial, {}
        # Another server, or none after repeated deaths: then the launches below are spawned.
        self._use_fork_server(self._runtime_key or fork_server.runtime_key)
        for launch in launches.values():
            if launch.child.pid is not None or launch.child.is_kill_requested:
                launch.child.on_reaped(signal.SIGKILL, reason=EXIT_FORK_SERVER_DIED)
            elif launch.restart is None:
                self.launch(launch)
            else:
                # The child may have been forked and have read its first frame: use a new socket.
                launch.child.discard()
                self._children.discard(launch.child)
                launch.restart()


def unpack_environment(
    spec: RunSpec, *, store: Store, key: RunKey, scratch: Path
) -> PreparedRuntimeEnv:
    """Fetch and check the run's code bundle, and install its requirements below `scratch`.

    Blocks, possibly for minutes. `key` decrypts the bundle, `store` is the root of the run. Raises
    `IntegrityError` for a modified bundle, `ShippingError` for an unknown format or unsatisfiable
    requirements, `EnvironmentMismatchError` for other package versions, and `StoreError`,
    `InfrastructureError` or `OSError` for failures that may be temporary.
    """
    bundle_ref = msgspec.convert(spec.code_bundle, CodeBundleRef)
    envelope = fetch_code_bundle(bundle_ref, store=store)
    payload = CodeBundlePayload.open(envelope, key=key)
    check_environment(bundle_ref, payload.runtime_env)
    # A copy for the workers of this node, so that each need not download it.
    directory = scratch / "code_bundle"
    directory.mkdir(parents=True, exist_ok=True)
    # Renamed when complete: an agent that dies meanwhile must not leave a truncated bundle.
    draft = directory / f"{bundle_ref.sha256}.draft"
    draft.write_bytes(envelope)
    draft.rename(directory / bundle_ref.sha256)
    return prepare_runtime_env(payload.runtime_env, store=store, scratch_dir=scratch)


def _describe_unsafe_import(unsafe: ForkUnsafe, runtime_key: RuntimeKey) -> str:
    module = unsafe.module
    consequence = (
        f"Therefore {module} is not preloaded: every worker imports it at each start. It must not "
        "compute, nor start threads, when it is imported."
        if module in runtime_key.preload
        else "Therefore workers are not forked: each imports everything at each start."
    )
    return f"The import of {module} cannot precede a fork: {unsafe.reason}. {consequence}"


def _fail(launch: ProcessLaunch, error: Exception) -> None:
    log.error("worker_pool.start_failed", what=launch.kind, reason=str(error))
    if launch.on_not_started is not None:
        launch.on_not_started(_to_failure_message(error))
    launch.child.on_reaped(signal.SIGKILL, reason=f"{EXIT_NOT_STARTED}: {error}")


def _to_failure_message(error: Exception) -> WorkerRaised:
    diagnosis = diagnose_setup_failure(error)
    return WorkerRaised(
        traceback_text=str(error),
        pickled_exception=pickle.dumps(error),
        cause=diagnosis.cause,
        is_permanent=diagnosis.is_permanent,
    )
