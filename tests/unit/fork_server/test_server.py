"""The fork server: imports, fork safety and children."""

import array
import importlib
import os
import select
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
    ForkServerReady,
    ForkUnsafe,
    FromForkServer,
)

_message_decoder: msgspec.json.Decoder[FromForkServer] = decoder(FromForkServer)  # type: ignore[arg-type]
MessageT = TypeVar("MessageT", bound=FromForkServer)


def test_modules_of_the_framework_are_imported_before_those_of_the_run() -> None:
    modules = server.plan_imports("torch", ["pandas", "torch"])
    assert modules[0] == "torch"
    assert modules[-1] == "pandas"
    assert modules.count("torch") == 1
    assert {"torch._dynamo", "spotfit.worker.main"} < set(modules)


def test_every_child_kind_has_a_program() -> None:
    assert child_setup.CHILD_MODULES.keys() == set(typing.get_args(ChildKind))
    for module in child_setup.CHILD_MODULES.values():
        assert callable(importlib.import_module(module).main)


def test_an_unknown_framework_does_not_stop_the_server() -> None:
    modules = server.plan_imports("no such framework", ["pandas"])
    assert {"spotfit.worker.main", "pandas"} < set(modules)


@pytest.mark.parametrize("code", ["raise RuntimeError('broken')", "raise SystemExit(3)"])
def test_a_failing_import_does_not_stop_the_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "breaks_on_import.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    server._try_import("breaks_on_import")
    server._try_import("is_not_there")
    first, second = capsys.readouterr().err.splitlines()
    assert "fork_server.not_preloaded module=breaks_on_import" in first
    assert "fork_server.not_preloaded module=is_not_there" in second


def test_an_attribute_that_a_package_imports_on_demand_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "lazy_package"
    package.mkdir()
    loads = "import importlib\ndef __getattr__(_):\n    return importlib.import_module('heavy')\n"
    (package / "__init__.py").write_text(loads)
    (tmp_path / "heavy.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    server._try_import("lazy_package.Trainer")
    assert "heavy" in sys.modules
    del sys.modules["heavy"], sys.modules["lazy_package"]


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


# --- the process ---------------------------------------------------------------------------------

SERVER_PROGRAM = """
import socket, sys
from spotfit.fork_server.server import ForkServer
fork_server = ForkServer(socket.socket(fileno=int(sys.argv[1])), sys.argv[3:])
fork_server.install_signal_handlers(int(sys.argv[2]))
fork_server.serve_forever()
"""


class ServerProcess:
    """A fork server process, which can import modules in `folder`."""

    def __init__(self, folder: Path, *modules: str) -> None:
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
                    *modules,
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
    server_process = ServerProcess(tmp_path)
    yield server_process
    server_process.close()


def test_a_child_is_forked_and_its_exit_reported(server_process: ServerProcess) -> None:
    server_process.receive(ForkServerReady)
    forked = server_process.fork()
    server_process.end_child(forked)
    exited = server_process.receive(ChildExited)
    assert (exited.request_id, exited.pid) == (forked.request_id, forked.pid)


def test_a_child_requested_during_an_import_is_forked_after_it(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    (tmp_path / "slow_to_import.py").write_text(f"open({str(gate)!r}).read()")
    server_process = ServerProcess(tmp_path, "slow_to_import")
    server_process.request_fork()
    gate.write_text("")
    server_process.receive(ForkServerReady)
    server_process.receive(ChildForked)
    server_process.close()


def test_a_module_that_starts_a_thread_is_named(tmp_path: Path) -> None:
    (tmp_path / "harmless.py").write_text("")
    (tmp_path / "starts_a_thread.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"
    )
    server_process = ServerProcess(tmp_path, "harmless", "starts_a_thread")
    unsafe = server_process.receive(ForkUnsafe)
    assert (unsafe.module, "threads" in unsafe.reason) == ("starts_a_thread", True)
    server_process.close()


def test_all_processes_exit_with_the_agent(server_process: ServerProcess) -> None:
    server_process.receive(ForkServerReady)
    forked = server_process.fork()
    ends = [os.pidfd_open(pid) for pid in (forked.pid, server_process.pid)]
    server_process._control.close()
    for end in ends:
        assert select.select([end], [], [], 30)[0], "the process continues"
        os.close(end)


def test_an_opened_gpu_is_recognized(tmp_path: Path) -> None:
    for number, target in enumerate(["/dev/null", "/dev/nvidiactl", "/dev/nvidia0", "socket:[5]"]):
        (tmp_path / str(number)).symlink_to(target)
    assert server.open_gpu_files(tmp_path) == ["/dev/nvidia0", "/dev/nvidiactl"]
