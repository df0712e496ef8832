"""The agent's side of fork servers: a client of one, and a pool that outlives a run.

Starts user processes as new interpreters where forking is unsafe (macOS, threaded imports).

Slower than the fork server by the time of the framework's import; equivalent otherwise.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from spotfit.core.codec import DECODE_ERRORS, decoder, encode
from spotfit.core.ids import RunId, Token
from spotfit.fork_server.child_process import ChildProcess
from spotfit.host import env, log, process
from spotfit.host.event_loop import EventLoop
from spotfit.protocol.agent_fork_server import (
    ChildForked,
    ChildKind,
    ForkChild,
    ForkServerReady,
    ForkUnsafe,
    FromForkServer,
)
from spotfit.provision.launch import AgentAssignment, AgentLaunchSpec

_message_decoder: msgspec.json.Decoder[FromForkServer] = decoder(FromForkServer)  # type: ignore[arg-type]
_PACKET_BYTES = 64 * 1024
# A run may use two: one before and one after its environment variables are known.
_MAX_SERVERS = 2
# Variables that configure the agent itself: the user's code must not see or inherit them.
_LAUNCH_SPEC = AgentLaunchSpec("", RunId(""), "", preload=("sys",))
_LAUNCH_VARIABLES = _LAUNCH_SPEC.environment_for(Token(""), 0, 0)
_AGENT_SETTINGS = (env.NOTICE_FILE, env.SCRATCH_DIR, env.HOST, env.PORT, env.STORAGE_KEYS)
_AGENT_VARIABLES = {*_LAUNCH_VARIABLES, *(setting.name for setting in _AGENT_SETTINGS)}
_ARROW_MALLOC = "JE_ARROW_MALLOC_CONF"
# Imports that kill the server twice will do so again: children are spawned instead.
_MAX_FAILED_STARTS = 2
# A process that waits in the kernel, such as for a file server, ends only afterwards.
_KILL_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class RuntimeKey:
    """What a fork server's imports depend on; workers with different keys cannot share one."""

    framework: str
    python: str = sys.executable
    variables: tuple[tuple[str, str], ...] = ()
    """Environment variables that must be set before the first import, sorted by name."""
    preload: tuple[str, ...] = ()
    """Modules to import in addition to those of the framework, as in `RunSpec.preload`."""

    @classmethod
    def of(
        cls, framework: str, python: str, variables: dict[str, str], preload: Sequence[str] = ()
    ) -> RuntimeKey:
        """Return the key of a fork server; equal variables give an equal key in any order.

        `framework` is a registered name, such as `"torch"`, `python` the path of the interpreter,
        `variables` are the environment variables to set before its first import, and `preload` the
        modules to import in addition to those of the framework.
        """
        return cls(framework, python, tuple(sorted(variables.items())), tuple(preload))

    def includes(self, other: RuntimeKey) -> bool:
        """Whether a server with this key imports at least what one with the other key imports."""
        return self == replace(other, preload=self.preload) and {*other.preload} <= {*self.preload}

    def environment(self) -> dict[str, str]:
        """Return the environment variables of processes with this key, as a new dict.

        These are the agent's own, without those that configure the agent, updated with `variables`.
        """
        inherited = env.copy_environment().items()
        return {k: v for k, v in inherited if k not in _AGENT_VARIABLES} | dict(self.variables)


def build_worker_environment(slots: int, run_variables: dict[str, str]) -> dict[str, str]:
    """Return the variables to set for the workers of this node, in addition to the agent's.

    `slots` is the number of workers on the node: with more than one, OMP_NUM_THREADS is 1 unless
    the agent has it. Keeps pyarrow from starting a thread, unless the agent has its variable.
    Includes SPOTFIT_STORAGE_KEYS if it is set. `run_variables` ('env_vars' of `worker_runtime_env`)
    take precedence.
    """
    # As torchrun does: several workers that each start a thread per core slow each other down.
    limit_threads = slots > 1 and env.lookup("OMP_NUM_THREADS") is None
    is_arrow_default = env.lookup(_ARROW_MALLOC) is None
    keys = env.read(env.STORAGE_KEYS)  # the credentials of this run's bucket only
    return {
        **({"OMP_NUM_THREADS": "1"} if limit_threads else {}),
        # The thread that returns free memory outlives a fork: the fork server would be unsafe with
        # pyarrow, which pandas, scikit-learn, XGBoost and LightGBM import where it is installed.
        **({_ARROW_MALLOC: "background_thread:false"} if is_arrow_default else {}),
        **({env.STORAGE_KEYS.name: keys} if keys else {}),
        **run_variables,
    }


class ForkServerClient:
    """A fork server process, and the socket to it. Used by the thread of the agent's event loop.

    The constructor starts the process and does not wait for its imports. It raises `OSError` if the
    process cannot be started.
    """

    def __init__(self, runtime_key: RuntimeKey) -> None:
        self.runtime_key = runtime_key
        self.is_ready = False
        """Whether it has imported what workers need up to their first training step."""
        self.has_forked = False
        """Whether it has ever forked a child."""
        self.fork_unsafe: ForkUnsafe | None = None
        """The import after which it cannot fork, if there is one."""
        self._is_closed = False
        self.control, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.settimeout(0)
        self._last_serial = 0
        with server_end:
            try:
                descriptor = server_end.fileno()
                arguments = [
                    str(descriptor),
                    str(os.getpid()),
                    runtime_key.framework,
                    *runtime_key.preload,
                ]
                self._process = subprocess.Popen(  # noqa: S603 - our own module in a given interpreter
                    [runtime_key.python, "-m", "spotfit.fork_server.server", *arguments],
                    env=runtime_key.environment(),
                    stdin=subprocess.DEVNULL,
                    pass_fds=[descriptor],
                    process_group=0,
                )
            except OSError:
                self.control.close()
                raise
        process.restore_descriptor_limit(self._process.pid)  # its children inherit it

    @property
    def pid(self) -> int:
        """The process id of the fork server, also after its end."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the fork server still runs and can fork; False once its end was read."""
        is_usable = not self._is_closed and self.fork_unsafe is None
        return is_usable and self._process.poll() is None

    def fork(self, kind: ChildKind, descriptors: Sequence[int]) -> int:
        """Request a child and return the id of the request; does not wait for the fork.

        `descriptors` are the child's socket, stdout and stderr (`ChildProcess.descriptors`). They
        can be closed afterwards. `read_messages` returns `ChildForked` and later `ChildExited` with
        this id. Raises `OSError` if the fork server is dead.
        """
        self._last_serial += 1
        request = encode(ForkChild(request_id=self._last_serial, kind=kind))
        socket.send_fds(self.control, [request], descriptors)
        return self._last_serial

    def read_messages(self) -> list[FromForkServer] | None:
        """Return the messages since the last call; None once the fork server has ended.

        Does not block: empty if there are none. The agent calls it when `control` is readable.
        Updates `is_ready`, `has_forked` and `fork_unsafe`.
        """
        messages: list[FromForkServer] = []
        while True:
            try:
                packet = self.control.recv(_PACKET_BYTES)
            except BlockingIOError:
                return messages
            except OSError:
                packet = b""
            if not packet:
                self._is_closed = True
                # The messages first, exits among them; the next call finds the end again.
                return messages or None
            try:
                message = _message_decoder.decode(packet)
            except DECODE_ERRORS as error:
                log.error("fork_server.protocol_error", pid=self.pid, reason=str(error))
                process.kill(self.pid)  # the end of its socket follows
                continue
            self.is_ready = self.is_ready or isinstance(message, ForkServerReady)
            self.has_forked = self.has_forked or isinstance(message, ChildForked)
            if isinstance(message, ForkUnsafe):
                self.fork_unsafe = message
            messages.append(message)

    def kill(self) -> None:
        """End the fork server and all its children, and close its socket.

        Blocks until the server has ended, usually for less than 0.2 s; for seconds if it waits in
        the kernel and cannot be killed. Idempotent.
        """
        self._is_closed = True
        with contextlib.suppress(OSError):
            # At the end of its socket the server kills its children's groups, then exits.
            self.control.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(timeout=0.2)
        except subprocess.TimeoutExpired:  # it is in an import and does not read its socket
            process.kill(self.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_KILL_TIMEOUT_S)
        self.control.close()


class ForkServerPool:
    """Fork servers by runtime key, in one agent process.

    It outlives a run, so that the next run on this machine finds them warm. It reads no messages:
    the agent registers the socket of the server that it uses with its event loop.
    """

    def __init__(self) -> None:
        self._servers: dict[RuntimeKey, ForkServerClient] = {}
        self._failed_starts: dict[RuntimeKey, int] = {}
        """The number of servers that died before their first fork."""
        self._reduced: dict[RuntimeKey, RuntimeKey] = {}
        """Keys whose servers failed because of `preload`, and those without the cause."""
        self._unsafe_servers: dict[RuntimeKey, ForkServerClient] = {}
        """Servers that cannot fork after an import, and have exited."""

    def prewarm(self, assignment: AgentAssignment) -> None:
        """Start a fork server for the framework of the assignment, if it names one. Does not wait.

        An agent calls it first, because importing the framework takes longest of all. Does nothing
        if that server runs already or children are not forked here; a failure to start is logged.
        """
        launch = assignment.launch_spec
        if launch.framework:
            variables = build_worker_environment(assignment.slots, {})
            self.get_or_start(
                RuntimeKey.of(launch.framework, sys.executable, variables, launch.preload)
            )

    def get_or_start(self, runtime_key: RuntimeKey) -> ForkServerClient | None:
        """Return the running fork server of that key, starting it if there is none.

        Does not wait for it. It may still be importing: it forks once it is ready. Modules of
        `preload` after whose import no process can be forked are left out, and all of them if their
        import has ended the server twice. Returns None where children must be spawned as new
        interpreters instead (`Spawner`): on a system other than Linux, with SPOTFIT_FORK=never, if
        the framework itself has such a module or ends the server, or if the server could not be
        started.
        """
        if sys.platform != "linux" or env.read(env.FORK_MODE) == "never":
            return None
        runtime_key = self._resolve(runtime_key)
        server = self._servers.pop(runtime_key, None)  # reinserted below as the latest one used
        if server is not None and server.fork_unsafe is not None:
            self._unsafe_servers[runtime_key] = server
            return self._without(runtime_key, server.fork_unsafe.module)
        if runtime_key in self._unsafe_servers:
            return None
        failed_starts = self._failed_starts.get(runtime_key, 0)
        if server is not None and not server.is_alive:
            if not server.has_forked:
                failed_starts += 1
                self._failed_starts[runtime_key] = failed_starts
            log.warning("fork_server.died", pid=server.pid, was_ready=server.is_ready)
            server.kill()  # closes its socket
            server = None
        if server is None and failed_starts >= _MAX_FAILED_STARTS:
            return self._without(runtime_key, *runtime_key.preload)
        try:
            self._servers[runtime_key] = server = server or ForkServerClient(runtime_key)
        except OSError as error:  # a start of a worker would fail likewise, and is reported
            log.warning("fork_server.start_failed", reason=str(error))
        return server

    def _without(self, runtime_key: RuntimeKey, *modules: str) -> ForkServerClient | None:
        """Return the server that preloads all but these modules; None if they are not preloaded."""
        preload = tuple(name for name in runtime_key.preload if name not in modules)
        if preload == runtime_key.preload:
            return None
        self._reduced[runtime_key] = replace(runtime_key, preload=preload)
        return self.get_or_start(runtime_key)

    def _resolve(self, runtime_key: RuntimeKey) -> RuntimeKey:
        """Return the key of the server that is used for this one."""
        while runtime_key in self._reduced:
            runtime_key = self._reduced[runtime_key]
        # One that has imported more, for an earlier run, will do.
        return next((key for key in self._servers if key.includes(runtime_key)), runtime_key)

    def evict_unused(self, in_use: RuntimeKey) -> None:
        """End all servers and their children, except `in_use` and the other one used last.

        Servers that are not in use end also if they are still importing.
        """
        in_use = self._resolve(in_use)
        unused = [key for key in self._servers if key != in_use]
        # Their imports would delay those of the server in use.
        importing = [key for key in unused if not self._servers[key].is_ready]
        # The latest other one stays: without variables of a run, it is what the next run needs.
        ready = [key for key in unused if self._servers[key].is_ready]
        for key in (*importing, *ready[: -(_MAX_SERVERS - 1)]):
            self._servers.pop(key).kill()

    def close(self) -> None:
        """End all fork servers and their children, and forget them. Idempotent."""
        for servers in (self._servers, self._unsafe_servers):
            for server in servers.values():
                server.kill()
            servers.clear()


# --- Starts user processes as new interpreters where forking is unsafe (macOS ---------------------


# Popen does not report a child's exit through a descriptor on all platforms, so it is polled.
_POLL_S = 0.05


class Spawner:
    """Starts a new interpreter for each child, and reaps it in the agent's event loop."""

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop
        self._running: dict[int, tuple[subprocess.Popen[bytes], ChildProcess]] = {}

    @property
    def live_count(self) -> int:
        """The number of children that have not been reaped."""
        return len(self._running)

    def spawn(self, kind: ChildKind, runtime_key: RuntimeKey, child: ChildProcess) -> None:
        """Start the program `kind`, such as `"uploader"`, in a new interpreter.

        `runtime_key` gives the interpreter and its environment. Calls `child.on_started` before it
        returns, and `child.on_reaped` from the event loop after its end. Does not wait for the
        imports. Raises `OSError` if the interpreter cannot be executed.
        """
        socket_fd, stdout_fd, stderr_fd = child.descriptors
        arguments = [str(socket_fd), str(os.getpid()), kind]
        started = subprocess.Popen(  # noqa: S603 - our own module in a given interpreter
            [runtime_key.python, "-m", "spotfit.fork_server", *arguments],
            env=runtime_key.environment(),
            stdin=subprocess.DEVNULL,
            stdout=stdout_fd,
            stderr=stderr_fd,
            pass_fds=[socket_fd],
            process_group=0,
        )
        process.restore_descriptor_limit(started.pid)
        child.on_started(started.pid)
        if not self._running:
            self._loop.call_later(_POLL_S, self._poll)
        self._running[started.pid] = started, child

    def _poll(self) -> None:
        for pid, (started, child) in list(self._running.items()):
            code = started.poll()
            if code is not None:
                del self._running[pid]
                # The inverse of what Popen made of the status of `waitpid`.
                child.on_reaped(-code if code < 0 else code << 8)
        if self._running:
            self._loop.call_later(_POLL_S, self._poll)
