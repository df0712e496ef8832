"""ForkServerClient and ForkServerPool: fork, replace, evict."""

import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from spotfit.core.ids import RunId, Token
from spotfit.fork_server.fork_client import (
    ForkServerClient,
    ForkServerPool,
    RuntimeKey,
    build_worker_environment,
)
from spotfit.host import process
from spotfit.protocol.agent_fork_server import (
    ChildExited,
    ChildForked,
    ForkServerReady,
    ForkUnsafe,
    FromForkServer,
)
from spotfit.provision.launch import AgentAssignment, AgentLaunchSpec


@pytest.fixture
def pool() -> Iterator[ForkServerPool]:
    pool = ForkServerPool()
    yield pool
    pool.close()


def receive(server: ForkServerClient, kind: type[FromForkServer]) -> FromForkServer:
    """Return the next message of that type."""
    server.control.settimeout(30)
    while (messages := receive_available(server)) is not None:
        for message in messages:
            if isinstance(message, kind):
                return message
    raise AssertionError("the server has ended")


def receive_available(server: ForkServerClient) -> list[FromForkServer] | None:
    server.control.recv(1, socket.MSG_PEEK)
    server.control.settimeout(0)
    try:
        return server.read_messages()
    finally:
        server.control.settimeout(30)


def start_server(pool: ForkServerPool, **variables: str) -> ForkServerClient:
    server = pool.get_or_start(RuntimeKey.of("none", sys.executable, variables))
    assert server is not None
    return server


def test_a_runtime_key_has_one_server_until_it_dies(pool: ForkServerPool) -> None:
    first = start_server(pool)
    assert start_server(pool) is first
    assert start_server(pool, MINE="yes") is not first
    receive(first, ForkServerReady)
    process.kill(first.pid)
    first._process.wait()
    assert start_server(pool) is not first


def test_a_forked_child_and_its_exit_are_reported(pool: ForkServerPool) -> None:
    server = start_server(pool)
    agent_end, worker_end = socket.socketpair()
    request_id = server.fork("worker", [worker_end.fileno(), 1, 2])
    worker_end.close()
    forked = receive(server, ChildForked)
    assert isinstance(forked, ChildForked)
    agent_end.close()  # without its agent a worker ends
    exited = receive(server, ChildExited)
    assert isinstance(exited, ChildExited)
    assert (exited.request_id, exited.pid) == (request_id, forked.pid)


def test_prewarm_starts_the_server_of_an_assignment(pool: ForkServerPool) -> None:
    launch = AgentLaunchSpec("/run", RunId("r"), "secret", framework="none", preload=("wave",))
    pool.prewarm(AgentAssignment(launch, Token("t"), 0, 1))
    (started,) = pool._servers.values()
    assert (started.runtime_key.framework, started.runtime_key.preload) == ("none", ("wave",))
    pool.prewarm(AgentAssignment(replace(launch, framework=""), Token("t"), 0, 1))
    assert list(pool._servers.values()) == [started], "one server for the framework"


def start_preloading(pool: ForkServerPool, folder: Path, *modules: str) -> ForkServerClient:
    """Start a server that imports modules in `folder`."""
    variables = {"PYTHONPATH": ":".join([str(folder), *sys.path])}
    server = pool.get_or_start(RuntimeKey.of("none", sys.executable, variables, modules))
    assert server is not None
    return server


def test_a_server_that_has_imported_more_is_used(pool: ForkServerPool, tmp_path: Path) -> None:
    server = start_preloading(pool, tmp_path, "wave", "mailbox")
    assert start_preloading(pool, tmp_path, "mailbox") is server
    pool.evict_unused(replace(server.runtime_key, preload=("mailbox",)))
    assert server.is_alive
    assert start_preloading(pool, tmp_path, "mailbox", "sched") is not server


def test_a_module_that_prevents_forks_is_left_out(pool: ForkServerPool, tmp_path: Path) -> None:
    (tmp_path / "starts_a_thread.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"
    )
    unsafe = start_preloading(pool, tmp_path, "starts_a_thread", "wave")
    receive(unsafe, ForkUnsafe)
    server = start_preloading(pool, tmp_path, "starts_a_thread", "wave")
    assert server.runtime_key.preload == ("wave",)
    receive(server, ForkServerReady)


def test_modules_that_end_the_server_are_left_out(pool: ForkServerPool, tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("import os\nos._exit(1)")
    for _ in range(2):
        server = start_preloading(pool, tmp_path, "ends")
        assert server.runtime_key.preload == ("ends",)
        server._process.wait()
    assert start_preloading(pool, tmp_path, "ends").runtime_key.preload == ()


def test_pyarrow_starts_no_thread_unless_the_user_configures_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("JE_ARROW_MALLOC_CONF", raising=False)
    name = "JE_ARROW_MALLOC_CONF"
    assert build_worker_environment(1, {})[name] == "background_thread:false"
    assert build_worker_environment(1, {name: "narenas:1"})[name] == "narenas:1"
    monkeypatch.setenv(name, "")
    assert name not in build_worker_environment(1, {})


def test_evict_unused_keeps_the_latest_servers(pool: ForkServerPool) -> None:
    old, newer, newest = (
        start_server(pool, N="1"),
        start_server(pool, N="2"),
        start_server(pool, N="3"),
    )
    receive(old, ForkServerReady)
    receive(newer, ForkServerReady)
    pool.evict_unused(newest.runtime_key)
    assert (old.is_alive, newer.is_alive, newest.is_alive) == (False, True, True)


def test_evict_unused_ends_servers_that_are_still_importing(
    pool: ForkServerPool, tmp_path: Path
) -> None:
    (tmp_path / "never_imported.py").write_text("import threading\nthreading.Event().wait()")
    importing = start_preloading(pool, tmp_path, "never_imported")
    in_use = start_server(pool)
    pool.evict_unused(in_use.runtime_key)
    assert (importing.is_alive, in_use.is_alive) == (False, True)


def test_a_server_that_dies_before_forking_is_not_restarted_indefinitely(
    pool: ForkServerPool,
) -> None:
    variables = {"PYTHONHOME": "/nowhere"}  # such an interpreter does not even start
    for _ in range(2):
        start_server(pool, **variables)._process.wait()
    assert pool.get_or_start(RuntimeKey.of("none", sys.executable, variables)) is None


def test_a_failed_start_returns_none(pool: ForkServerPool) -> None:
    assert pool.get_or_start(RuntimeKey("none", "/no/such/python")) is None
    assert pool._servers == {}


def test_fork_mode_never_returns_none(
    pool: ForkServerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOTFIT_FORK", "never")
    assert pool.get_or_start(RuntimeKey("none")) is None


def test_agent_settings_are_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTFIT_RUN_SECRET", "s")
    monkeypatch.setenv("SPOTFIT_LOG_LEVEL", "DEBUG")
    environment = RuntimeKey.of("none", sys.executable, {"MINE": "yes"}).environment()
    assert "SPOTFIT_RUN_SECRET" not in environment
    assert environment["SPOTFIT_LOG_LEVEL"] == "DEBUG"
    assert environment["MINE"] == "yes"


def test_a_killed_server_leaves_no_process(pool: ForkServerPool) -> None:
    server = start_server(pool)
    pool.close()
    assert not server.is_alive
    assert not process.exists(server.pid)


def test_a_server_that_does_not_respond_is_replaced_once_it_is_killed(
    pool: ForkServerPool,
) -> None:
    server = start_server(pool)
    receive(server, ForkServerReady)
    os.kill(server.pid, signal.SIGSTOP)
    server.kill()
    assert not process.exists(server.pid)
    assert start_server(pool) is not server


def test_a_server_that_sends_an_invalid_packet_is_killed(
    pool: ForkServerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server(pool)
    receive(server, ForkServerReady)
    agent_end, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    agent_end.settimeout(0)
    control = server.control
    monkeypatch.setattr(server, "control", agent_end)
    for packet in (b"garbage", b"[" * 5_000, b"\xff"):
        server_end.send(packet)
    server_end.close()
    assert server.read_messages() is None
    server._process.wait()
    assert not server.is_alive
    control.close()


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is raised on Linux only")
def test_a_server_has_the_descriptor_limit_from_before_the_agent_raised_it(
    pool: ForkServerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(process, "_descriptor_limits", [(321, hard)])
    server = start_server(pool)
    assert resource.prlimit(server.pid, resource.RLIMIT_NOFILE) == (321, hard)
