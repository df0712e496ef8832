"""The fork server: `python -m spotfit.fork_server.server <fd> <agent pid> <framework> [module …]`.

It has one thread, does not touch accelerators, and never runs the user's function; its children do.
It exits, and kills its children, when the agent closes the control socket.

Before the first fork it imports what workers need up to the end of their first training step: the
modules of the framework, spotfit's own, and those in the arguments (docs/decisions/0064).

| state    | event                                    | next                                     |
|----------|------------------------------------------|------------------------------------------|
| starting | all modules imported                     | ready: `ForkServerReady`                 |
| starting | an import started threads, opened a GPU  | exit: `ForkUnsafe` with the module       |
| starting | `ForkChild`                              | queued until all modules are imported    |
| ready    | `ForkChild`                              | fork a child                             |
| any      | control socket closed                    | kill all children, exit                  |
"""

from __future__ import annotations

import collections
import contextlib
import gc
import os
import pkgutil
import select
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from spotfit.core.codec import decoder, encode
from spotfit.core.errors import SpotfitError
from spotfit.fork_server import child_setup
from spotfit.frameworks.registry import open_framework
from spotfit.host import log, process
from spotfit.protocol.agent_fork_server import (
    ChildExited,
    ChildForked,
    ForkChild,
    ForkServerReady,
    ForkUnsafe,
    FromForkServer,
)

_PACKET_BYTES = 64 * 1024
_FDS_PER_REQUEST = 3
_OWN_MODULES = (
    *child_setup.CHILD_MODULES.values(),
    "spotfit.store.factory",
    "spotfit.code.code_bundle",
    "spotfit.checkpoint.peer_store",
    "spotfit.security.run_key",
)
_request_decoder = decoder(ForkChild)


class _ForkRequest(NamedTuple):
    message: ForkChild
    descriptors: tuple[int, ...]


def main() -> None:
    """Serve as the fork server of an agent until the agent closes the control socket or ends.

    The arguments, in `sys.argv`, are the descriptor of the control socket, the process id of the
    agent, the framework, and the modules to import in addition to those of the framework.
    """
    log.use_default_handler()
    descriptor, agent_pid, framework, *preload = sys.argv[1:]
    server = ForkServer(socket.socket(fileno=int(descriptor)), plan_imports(framework, preload))
    server.install_signal_handlers(int(agent_pid))
    server.serve_forever()


class ForkServer:
    """Imports modules, then forks children on request.

    Args:
        control: The socket to the agent.
        modules: Modules to import before the first fork, as for `pkgutil.resolve_name`.
    """

    def __init__(self, control: socket.socket, modules: Sequence[str]) -> None:
        self._control = control
        self._modules = modules
        self._wakeup_reader, self._wakeup_writer = socket.socketpair()
        self._wakeup_writer.settimeout(0)
        self._wakeup_reader.settimeout(0)
        self._requests: collections.deque[_ForkRequest] = collections.deque()
        self._child_pids: dict[int, int] = {}
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
        """Import the modules, then fork children until the agent closes the control socket.

        Ends the process, with all children; also, after `ForkUnsafe`, if an import has started
        threads. Modules that cannot be imported are logged: the child that needs them raises the
        error. Disables garbage collection in the server.
        """
        # A collection writes to every object: children would no longer share those pages.
        gc.disable()
        # "site": a sitecustomize or .pth file may have started a thread before.
        for module in ("site", *self._modules):
            _try_import(module)
            # After each import, so that the report names the module.
            if reason := _fork_hazard():
                self._send(ForkUnsafe(module=module, reason=reason))
                self._shut_down()
        gc.freeze()  # collections in children do not write to the objects that exist now
        self._send(ForkServerReady())
        while True:
            self._read_requests()
            self._reap_children()
            while self._requests:
                self._fork_child(self._requests.popleft())
            self._poll.poll()
            # Its bytes only end the poll: `_reap_children` looks for all exits.
            with contextlib.suppress(BlockingIOError):
                while self._wakeup_reader.recv(4096):
                    continue

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


def plan_imports(framework: str, preload: Sequence[str] = ()) -> list[str]:
    """Return the modules to import before the first fork, in their order.

    They come from the framework, such as `"torch"`, from spotfit and from `preload`. An unknown
    framework is logged and counts as one without modules: a worker raises the error again.
    """
    modules: tuple[str, ...] = ()
    try:
        modules = open_framework(framework).preload_modules
    except SpotfitError as error:  # a worker raises it again, and reports it to the user
        log.warning("fork_server.unknown_framework", name=framework, reason=str(error))
    return list(dict.fromkeys((*modules, *_OWN_MODULES, *preload)))


def _try_import(module: str) -> None:
    try:
        # Also an attribute of a package that imports its modules on demand.
        pkgutil.resolve_name(module)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the child that needs it raises it
        log.info(
            "fork_server.not_preloaded", module=module, reason=f"{type(error).__name__}: {error}"
        )


def _fork_hazard() -> str:
    """Return why children of this process would not work, or "" if they would."""
    if not _is_single_threaded():
        return "it has started threads, which a forked process lacks"
    # An imported package may do that, such as a plugin of torch or sitecustomize. Every child would
    # fail with "Cannot re-initialize CUDA in forked subprocess".
    if opened := open_gpu_files(Path("/proc/self/fd")):
        return f"it has opened a GPU ({opened[0]}), which a forked process cannot use"
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
