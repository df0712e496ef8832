"""The fork server process: `python -m spotfit.fork_server.server <fd> <agent pid> <framework>`.

It has one thread, does not touch accelerators, and never runs the user's code; its children do. It
exits, and kills its children, when the agent closes the control socket.

The modules that a worker needs to start (eager) are imported before the first fork. Those of its
first training steps (deferred) take as long again, so a second process imports them: the *warm
server*, forked from the first one once the first children are quiet. Later children are forked
there; the first server relays its requests and replies (docs/decisions/0013).

| state    | event                                      | next                                     |
|----------|--------------------------------------------|------------------------------------------|
| starting | eager modules imported                     | ready: `ForkServerReady`                 |
| starting | the imports started threads, opened a GPU  | exit: `ForkUnsafe`                       |
| ready    | `ForkChild`                                | fork a child                             |
| ready    | idle for `_IDLE_BEFORE_WARMUP_MS`          | warming: warm server forked              |
| warming  | `ForkChild`                                | fork a child                             |
| warming  | warm server ready                          | warm: `ForkServerFullyWarm`              |
| warm     | `ForkChild`                                | forwarded to the warm server             |
| warm     | warm server exits; its children are killed | fork children here again                 |
| any      | control socket closed                      | kill all children, exit                  |
"""

from __future__ import annotations

import collections
import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
from pathlib import Path
from typing import NamedTuple, NoReturn

import msgspec

from spotfit.core.codec import decoder, encode
from spotfit.core.errors import SpotfitError
from spotfit.fork_server import child_setup
from spotfit.frameworks.registry import open_framework
from spotfit.host import log, process
from spotfit.protocol.agent_fork_server import (
    ChildExited,
    ChildForked,
    ForkChild,
    ForkServerFullyWarm,
    ForkServerReady,
    ForkUnsafe,
    FromForkServer,
)

_PACKET_BYTES = 64 * 1024
_FDS_PER_REQUEST = 3
# The first workers approach their first training step, and should not share the CPU with imports.
_IDLE_BEFORE_WARMUP_MS = 1000
_EAGER_MODULES = (
    child_setup.CHILD_MODULES["worker"],
    "spotfit.store.factory",
    "spotfit.code.code_bundle",
)
_DEFERRED_MODULES = (
    *child_setup.CHILD_MODULES.values(),
    "spotfit.checkpoint.peer_store",
    "spotfit.security.run_key",
)
"""Modules that few runs need, and none during its start."""
_request_decoder = decoder(ForkChild)
_message_decoder: msgspec.json.Decoder[FromForkServer] = decoder(FromForkServer)  # type: ignore[arg-type]


class _ForkRequest(NamedTuple):
    message: ForkChild
    descriptors: tuple[int, ...]


def main() -> None:
    """Serve as the fork server of an agent until the agent closes the control socket or ends.

    The arguments, in `sys.argv`, are the descriptor of the control socket, the process id of the
    agent and the framework.
    """
    log.use_default_handler()
    descriptor, agent_pid, framework = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    server = ForkServer(socket.socket(fileno=descriptor), *plan_imports(framework))
    server.install_signal_handlers(agent_pid)
    server.serve_forever()


class ForkServer:
    """Imports modules, then forks children on request.

    Args:
        control: The socket to the agent, or to the first server.
        eager: Modules to import before the first fork.
        deferred: Modules for the warm server; empty if this is the warm server.
    """

    def __init__(self, control: socket.socket, eager: list[str], deferred: list[str]) -> None:
        self._control = control
        self._eager = eager
        self._deferred = deferred
        self._wakeup_reader, self._wakeup_writer = socket.socketpair()
        self._wakeup_writer.settimeout(0)
        self._wakeup_reader.settimeout(0)
        self._requests: collections.deque[_ForkRequest] = collections.deque()
        self._child_pids: dict[int, int] = {}
        self._warm_server: WarmForkServer | None = None
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._poll.register(self._wakeup_reader, select.POLLIN)

    def install_signal_handlers(self, parent_pid: int) -> None:
        """Exit with all children on SIGTERM, which the kernel sends when `parent_pid` ends.

        Called once, before `serve_forever`. Ignores SIGINT, lets SIGCHLD end the wait for requests,
        and sets the process name.
        """
        signal.signal(signal.SIGTERM, lambda *_: self._shut_down())
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the agent handles Ctrl-C
        # With a handler, SIGCHLD writes to the wakeup socket, which ends the poll.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup_writer.fileno(), warn_on_full_buffer=False)
        process.set_process_name("spotfit-forksrv")
        process.die_with_parent(parent_pid, signal.SIGTERM)

    def serve_forever(self) -> NoReturn:
        """Import the eager modules, then fork children until the agent closes the control socket.

        Ends the process, with all children; also, after `ForkUnsafe`, if the imports have started
        threads. Modules that cannot be imported are logged: the child that needs them raises the
        error. Disables garbage collection in the server.
        """
        # A collection writes to every object: children would no longer share those pages.
        gc.disable()
        for module in self._eager:
            _try_import(module)
        if reason := _fork_hazard():
            self._send(ForkUnsafe(reason=reason))
            self._shut_down()
        gc.freeze()  # collections in children do not write to the objects that exist now
        self._send(ForkServerReady())
        if not self._deferred:
            self._send(ForkServerFullyWarm())
        while True:
            self._read_requests()
            self._reap_children()
            self._relay_warm_server_messages()
            while self._requests:
                request = self._requests.popleft()
                if self._warm_server is not None and self._warm_server.is_ready:
                    self._warm_server.forward(request)
                else:
                    self._fork_child(request)
            idle_ms = _IDLE_BEFORE_WARMUP_MS if self._child_pids else 0
            events = self._poll.poll(idle_ms if self._deferred else None)
            # Its bytes only end the poll: `_reap_children` looks for all exits.
            with contextlib.suppress(BlockingIOError):
                while self._wakeup_reader.recv(4096):
                    continue
            if not events:  # timed out: the children are quiet, or there are none yet
                self._fork_warm_server()

    def _read_requests(self) -> None:
        # Python 3.11 ignores the flags of `recv_fds`, so that MSG_DONTWAIT has no effect. Not
        # `select()`, which rejects descriptors above 1023: this one has the agent's number.
        readable = select.poll()
        readable.register(self._control, select.POLLIN)
        while readable.poll(0):
            try:
                packet, descriptors, _, _ = socket.recv_fds(
                    self._control, _PACKET_BYTES, _FDS_PER_REQUEST
                )
            except OSError:
                packet, descriptors = b"", []
            if not packet:
                self._shut_down()  # the agent has closed the socket or is gone
            self._requests.append(_ForkRequest(_request_decoder.decode(packet), tuple(descriptors)))

    def _reap_children(self) -> None:
        for serial, pid in list(self._child_pids.items()):
            exited = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if exited is not None:
                process.kill_group(pid)  # before reaping, after which the pid may be reused
                _, status = os.waitpid(pid, 0)
                del self._child_pids[serial]
                self._send(ChildExited(request_id=serial, pid=pid, wait_status=status))

    # --- the warm server ---------------------------------------------------------------------

    def _fork_warm_server(self) -> None:
        deferred, self._deferred = self._deferred, []  # one attempt: a failure would repeat
        parent_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Taken before the fork: afterwards the parent may have died, and getppid() would be 1.
        parent_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            # Otherwise it would hold its own control socket open after the death of this server.
            parent_end.close()
            self._close_inherited_fds()
            server = ForkServer(child_end, deferred, [])
            server.install_signal_handlers(parent_pid)
            server.serve_forever()
        child_end.close()
        self._warm_server = WarmForkServer(pid, parent_end)
        self._poll.register(parent_end, select.POLLIN)

    def _relay_warm_server_messages(self) -> None:
        if self._warm_server is None:
            return
        for message in self._warm_server.read_messages():
            self._send(message)
        if self._warm_server.is_dead:
            self._poll.unregister(self._warm_server.control)
            self._warm_server.control.close()
            self._warm_server = None

    # --- children ----------------------------------------------------------------------------

    def _fork_child(self, request: _ForkRequest) -> None:
        parent_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                # Before anything else: a signal must not write into the server's socket.
                signal.set_wakeup_fd(-1)
                self._close_inherited_fds()
                child_setup.isolate_process(parent_pid)
                socket_fd, stdout_fd, stderr_fd = request.descriptors
                child_setup.redirect_streams(stdout_fd, stderr_fd)
                child_setup.drop_inherited_finalizers()
                gc.enable()
                child_setup.run_child(request.message.kind, socket_fd)
            finally:
                os._exit(70)  # EX_SOFTWARE: reached only if `run_child` returns or raises
        with contextlib.suppress(PermissionError, ProcessLookupError):
            # The child does the same: either may run first, and the agent may kill the group now.
            os.setpgid(pid, pid)
        for descriptor in request.descriptors:
            os.close(descriptor)
        self._child_pids[request.message.request_id] = pid
        self._send(ChildForked(request_id=request.message.request_id, pid=pid))

    def _close_inherited_fds(self) -> None:
        """In a child, close the server's sockets and the descriptors of queued requests."""
        for sock in (self._control, self._wakeup_reader, self._wakeup_writer):
            sock.close()
        if self._warm_server is not None:
            self._warm_server.control.close()
        for request in self._requests:
            for descriptor in request.descriptors:
                os.close(descriptor)

    # --- replies and exit --------------------------------------------------------------------

    def _send(self, message: FromForkServer) -> None:
        try:
            self._control.send(encode(message))
        except OSError:
            self._shut_down()

    def _shut_down(self) -> NoReturn:
        for pid in self._child_pids.values():
            process.kill_group(pid)
        os._exit(0)


class WarmForkServer:
    """The first server's side of the warm server: its pid, socket and running children."""

    def __init__(self, pid: int, control: socket.socket) -> None:
        self._pid = pid
        self.control = control
        self.control.settimeout(0)
        self.is_ready = False
        self.is_dead = False
        self._child_pids: dict[int, int] = {}
        """The pids of its running children by request id; 0 until `ChildForked`."""

    def forward(self, request: _ForkRequest) -> None:
        """Send the request to the warm server, which forks the child; close its descriptors here.

        If the warm server is dead, `read_messages` reports the exit of the child.
        """
        self._child_pids[request.message.request_id] = 0
        try:
            socket.send_fds(self.control, [encode(request.message)], request.descriptors)
        except OSError:
            # `read_messages` will report the exit, and of this child, too.
            log.warning("fork_server.warm_server_lost", pid=self._pid, reason="connection closed")
        for descriptor in request.descriptors:
            os.close(descriptor)

    def read_messages(self) -> list[FromForkServer]:
        """Return the messages of the warm server that concern the agent, without blocking.

        Empty if there are none. Once it has ended, kills its children and returns a `ChildExited`
        for each of them, and `is_dead` is True.
        """
        messages: list[FromForkServer] = []
        while not self.is_dead:
            try:
                packet = self.control.recv(_PACKET_BYTES)
            except BlockingIOError:
                break
            except OSError:
                packet = b""
            if packet:
                messages += self._translate(_message_decoder.decode(packet))
                continue
            # Without a parent that reaps them, its children could not be tracked: kill them.
            self.is_dead, self.is_ready = True, False
            os.waitpid(self._pid, 0)
            for pid in filter(None, self._child_pids.values()):
                process.kill_group(pid)
            messages += [
                ChildExited(request_id=serial, pid=pid, wait_status=signal.SIGKILL)
                for serial, pid in self._child_pids.items()
            ]
        return messages

    def _translate(self, message: FromForkServer) -> list[FromForkServer]:
        match message:
            case ForkServerReady():
                self.is_ready = True
                return [ForkServerFullyWarm()]
            case ForkUnsafe() | ForkServerFullyWarm():
                return []  # it exits if it cannot fork, and the end of its socket follows
            case ChildForked(request_id=serial, pid=pid):
                self._child_pids[serial] = pid
            case ChildExited(request_id=serial):
                self._child_pids.pop(serial, None)
        return [message]


def plan_imports(framework: str) -> tuple[list[str], list[str]]:
    """Return the modules to import before the first fork, and those for the warm server.

    They come from the framework, such as `"torch"`, and from spotfit. The second list is empty if
    the framework has no deferred modules. An unknown framework is logged and counts as one without
    modules: a worker raises the error again.
    """
    try:
        stages = open_framework(framework).preload_stages
    except SpotfitError as error:  # a worker raises it again, and reports it to the user
        log.warning("fork_server.unknown_framework", name=framework, reason=str(error))
        stages = ()
    eager = [*(stages[0] if stages else ()), *_EAGER_MODULES]
    deferred = [module for stage in stages[1:] for module in stage]
    if not deferred:  # our own modules alone are not worth a second process
        return [*eager, *_DEFERRED_MODULES], []
    return eager, [*deferred, *_DEFERRED_MODULES]


def _try_import(module: str) -> None:
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - the child that needs it raises it again
        log.debug(
            "fork_server.import_failed", module=module, reason=f"{type(error).__name__}: {error}"
        )


def _fork_hazard() -> str:
    """Return why children of this process would not work, or "" if they would."""
    if not _is_single_threaded():
        return "importing the framework has started threads that outlive a fork"
    # An imported package may do that, such as a plugin of torch or sitecustomize. Every child would
    # fail with "Cannot re-initialize CUDA in forked subprocess".
    if opened := open_gpu_files(Path("/proc/self/fd")):
        return f"importing the framework has opened a GPU ({opened[0]}), which forks cannot use"
    return ""


def open_gpu_files(fd_dir: Path) -> list[str]:
    """Return the NVIDIA devices among the open files of a process, such as ["/dev/nvidiactl"].

    `fd_dir` is the process's directory of descriptors, /proc/<pid>/fd. CUDA opens them when it is
    initialized, and keeps them open.
    """
    targets = []
    for descriptor in fd_dir.iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            targets.append(str(descriptor.readlink()))
    return sorted({target for target in targets if target.startswith("/dev/nvidia")})


def _is_single_threaded() -> bool:
    """Return whether this process has a single thread when it forks."""
    if sys.platform != "linux":
        return False
    if process.thread_count() == 1:
        return True
    # Some libraries stop their threads in a fork handler (OpenBLAS); only a fork shows which.
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return process.thread_count() == 1


if __name__ == "__main__":
    main()
