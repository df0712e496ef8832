"""The fork server: imports, fork safety, and the warm server."""

import array
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from spotfit.core.codec import decoder, encode
from spotfit.fork_server import child_setup, server
from spotfit.protocol.agent_fork_server import (
    ChildExited,
    ChildForked,
    ChildKind,
    ForkChild,
    ForkServerFullyWarm,
    ForkServerReady,
    FromForkServer,
)

_message_decoder: msgspec.json.Decoder[FromForkServer] = decoder(FromForkServer)  # type: ignore[arg-type]
MessageT = TypeVar("MessageT", bound=FromForkServer)


def test_the_first_stage_of_a_framework_is_imported_eagerly() -> None:
    first, later = server.plan_imports("torch")
    assert first[0] == "torch"
    assert "spotfit.worker.main" in first
    assert "torch._dynamo" in later
    assert "torch._dynamo" not in first
    assert "spotfit.sidecar.callbacks_process" in later
    assert "spotfit.sidecar.callbacks_process" not in first


def test_every_child_kind_has_a_program() -> None:
    assert child_setup.CHILD_MODULES.keys() == set(typing.get_args(ChildKind))
    for module in child_setup.CHILD_MODULES.values():
        assert callable(importlib.import_module(module).main)


def test_an_unknown_framework_does_not_stop_the_server() -> None:
    assert server.plan_imports("no such framework")[1] == []


def test_a_failing_import_does_not_stop_the_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "breaks_on_import.py").write_text("raise RuntimeError('broken')")
    monkeypatch.syspath_prepend(str(tmp_path))
    server._try_import("breaks_on_import")
    server._try_import("is_not_there")


def test_a_process_with_threads_is_not_fork_safe() -> None:
    stay, end_child = threading.Event(), threading.Event()

    def wait() -> None:
        stay.set()
        end_child.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    stay.wait()
    try:
        assert not server._is_single_threaded()
    finally:
        end_child.set()
        thread.join()


# --- the warm server -----------------------------------------------------------------------------

SERVER_PROGRAM = """
import socket, sys
from spotfit.fork_server.server import ForkServer
fork_server = ForkServer(socket.socket(fileno=int(sys.argv[1])), [], sys.argv[3:])
fork_server.install_signal_handlers(int(sys.argv[2]))
fork_server.serve_forever()
"""


class ServerProcess:
    """A fork server process whose deferred import blocks until the test releases it."""

    def __init__(self, folder: Path, *later: str) -> None:
        self._gate = folder / "gate"
        os.mkfifo(self._gate)
        (folder / "slow_to_import.py").write_text(f"open({str(self._gate)!r}).read()")
        self._control, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(30)
        with server_end:
            self._server = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    SERVER_PROGRAM,
                    str(server_end.fileno()),
                    str(os.getpid()),
                    *later,
                ],
                env={**os.environ, "PYTHONPATH": ":".join([str(folder), *sys.path])},
                pass_fds=[server_end.fileno()],
                process_group=0,
            )
        self._child_sockets: list[socket.socket] = []
        self._last_request_id = 0

    @property
    def pid(self) -> int:
        return self._server.pid

    def finish_import(self) -> None:
        """Release the deferred import."""
        self._gate.write_text("")
        self.receive(ForkServerFullyWarm)

    def receive(self, kind: type[MessageT]) -> MessageT:
        """Return the next message, which must have that type."""
        message = _message_decoder.decode(self._control.recv(65536))
        assert isinstance(message, kind)
        return message

    def request_fork(self) -> None:
        """Request a worker, which waits for its first frame."""
        agent_end, worker_end = socket.socketpair()
        self._child_sockets.append(agent_end)
        self._last_request_id += 1
        with worker_end:
            descriptors = array.array("i", [worker_end.fileno(), 1, 2])
            request_fork = [encode(ForkChild(request_id=self._last_request_id))]
            self._control.sendmsg(
                request_fork, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)]
            )

    def fork(self) -> ChildForked:
        self.request_fork()
        return self.receive(ChildForked)

    def end_child(self, forked: ChildForked) -> None:
        """Close the socket of a worker, which makes it exit."""
        self._child_sockets[forked.request_id - 1].close()

    def close(self) -> None:
        for sock in (self._control, *self._child_sockets):
            sock.close()
        self._server.wait(30)


@pytest.fixture
def server_process(tmp_path: Path) -> Iterator[ServerProcess]:
    server_process = ServerProcess(tmp_path, "slow_to_import")
    yield server_process
    server_process.close()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_server_without_deferred_modules_is_fully_warm_at_once(tmp_path: Path) -> None:
    server_process = ServerProcess(tmp_path)
    server_process.receive(ForkServerReady)
    server_process.receive(ForkServerFullyWarm)
    assert parent_of(server_process.fork().pid) == server_process.pid
    server_process.close()


def test_children_are_forked_by_the_warm_server_once_it_is_ready(
    server_process: ServerProcess,
) -> None:
    server_process.receive(ForkServerReady)
    early = server_process.fork()
    assert parent_of(early.pid) == server_process.pid
    server_process.finish_import()
    late = server_process.fork()
    warm_server = parent_of(late.pid)
    assert parent_of(warm_server) == server_process.pid
    for forked in (late, early):
        server_process.end_child(forked)
        exited = server_process.receive(ChildExited)
        assert (exited.request_id, exited.pid) == (forked.request_id, forked.pid), (
            "from either server"
        )


def test_a_killed_warm_server_ends_its_children_and_the_first_server_continues(
    server_process: ServerProcess,
) -> None:
    server_process.receive(ForkServerReady)
    early = server_process.fork()
    server_process.finish_import()
    late = server_process.fork()
    os.kill(parent_of(late.pid), signal.SIGKILL)
    exited = server_process.receive(ChildExited)
    assert (exited.request_id, exited.pid, exited.wait_status) == (
        late.request_id,
        late.pid,
        signal.SIGKILL,
    )
    again = server_process.fork()
    assert parent_of(again.pid) == parent_of(early.pid) == server_process.pid


def test_a_child_requested_from_a_dead_warm_server_is_reported_as_exited() -> None:
    """A child that was never forked is reported, too."""
    client_end, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    server_end.close()
    warm_server = server.WarmForkServer(pid, client_end)
    warm_server.is_ready = True
    warm_server.forward(
        server._ForkRequest(ForkChild(request_id=7), (os.dup(1), os.dup(1), os.dup(1)))
    )
    assert select.select([client_end], [], [], 30)[0], "its socket reports its exit"
    assert warm_server.read_messages() == [
        ChildExited(request_id=7, pid=0, wait_status=signal.SIGKILL)
    ]
    assert (warm_server.is_dead, warm_server.is_ready) == (True, False)
    client_end.close()


def test_all_processes_exit_with_the_agent(server_process: ServerProcess) -> None:
    server_process.receive(ForkServerReady)
    early = server_process.fork()
    server_process.finish_import()
    late = server_process.fork()
    warm_server = parent_of(late.pid)
    ends = [os.pidfd_open(pid) for pid in (early.pid, late.pid, warm_server, server_process.pid)]
    server_process._control.close()
    for end in ends:
        assert select.select([end], [], [], 30)[0], "the server continues"
        os.close(end)


def test_an_opened_gpu_is_recognized(tmp_path: Path) -> None:
    for number, target in enumerate(["/dev/null", "/dev/nvidiactl", "/dev/nvidia0", "socket:[5]"]):
        (tmp_path / str(number)).symlink_to(target)
    assert server.open_gpu_files(tmp_path) == ["/dev/nvidia0", "/dev/nvidiactl"]
