"""ProcessLauncher: queued launches, unpacking again, and the loss of a fork server."""

import contextlib
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import msgspec
import pytest

from spotfit.agent.process_launcher import ProcessLaunch, ProcessLauncher, unpack_environment
from spotfit.code.code_bundle import upload_code_bundle
from spotfit.code.environment_setup import PreparedRuntimeEnv
from spotfit.code.runtime_env import RuntimeEnv
from spotfit.core.errors import ConfigError, TransientStoreError
from spotfit.core.ids import RunId
from spotfit.fork_server.child_process import ChildProcess
from spotfit.fork_server.fork_client import ForkServerPool, RuntimeKey
from spotfit.host.event_loop import EventLoop
from spotfit.model.spec import RunSpec
from spotfit.protocol.agent_fork_server import (
    EXIT_FORK_SERVER_DIED,
    ChildForked,
    ChildKind,
    ForkUnsafe,
    FromForkServer,
)
from spotfit.protocol.worker_agent import WorkerRaised
from spotfit.security.run_key import RunKey
from spotfit.store.local import MemoryStore
from spotfit.store.url import RootUrl
from spotfit.testing.builders import RUN_ID
from tests.unit.agent.transports import SkippableClock, run_loop_until

KEY = RunKey(b"s" * 32, RUN_ID)
SPEC = RunSpec(
    run_id=RunId("r"),
    name="n",
    fit_id="f",
    min_workers=1,
    max_workers=1,
    code_bundle={},
    storage_url="memory://launcher",
)
PREPARED = PreparedRuntimeEnv(python="python", sys_path=(), cwd=None, env_vars={})


class FakeForkServer:
    """A fork server whose messages the test chooses; None is the end of its socket."""

    def __init__(self, runtime_key: RuntimeKey) -> None:
        self.runtime_key = runtime_key
        self.is_ready = False
        self.is_alive = True
        self.control, self._server_end = socket.socketpair()
        self._messages: list[FromForkServer] | None = None
        self.forked: list[ChildKind] = []
        self.reads = 0
        self.pid = 1

    def fork(self, kind: ChildKind, _descriptors: tuple[int, ...]) -> int:
        self.forked.append(kind)
        return len(self.forked)

    def report(self, *messages: FromForkServer, is_lost: bool = False) -> None:
        """Make the control socket readable; `read_messages` returns `messages` then."""
        self._messages = None if is_lost else list(messages)
        self._server_end.send(b"x")

    def read_messages(self) -> list[FromForkServer] | None:
        with contextlib.suppress(BlockingIOError):
            self.control.recv(1, socket.MSG_DONTWAIT)
        self.reads += 1
        return self._messages

    def kill(self) -> None:
        self.is_alive = False

    def close(self) -> None:
        self.control.close()
        self._server_end.close()


class FakeForkServers:
    """A `ForkServerPool` with one server at a time."""

    def __init__(self) -> None:
        self.started: list[FakeForkServer] = []

    def get_or_start(self, runtime_key: RuntimeKey) -> FakeForkServer:
        if not (self.started and self.started[-1].is_alive):
            self.started.append(FakeForkServer(runtime_key))
        return self.started[-1]

    def evict_unused(self, in_use: RuntimeKey) -> None:
        """Nothing is unused."""


class Launched:
    """A launcher and its reported events."""

    def __init__(self, loop: EventLoop) -> None:
        self.loop = loop
        self.fork_servers = FakeForkServers()
        self.unpacked: list[RunSpec] = []
        self.error: Exception | None = None
        self.broken: list[WorkerRaised] = []
        self.failures: list[WorkerRaised] = []
        self.exits: list[str] = []
        self.slow_starts: list[str] = []
        self.restarts = 0
        self.launcher = ProcessLauncher(
            loop,
            cast("ForkServerPool", self.fork_servers),
            unpack=self._unpack,
            slots=1,
            on_broken=self.broken.append,
            on_slow_starts=self.slow_starts.append,
        )

    def _unpack(self, spec: RunSpec) -> PreparedRuntimeEnv:
        self.unpacked.append(spec)
        if self.error is not None:
            raise self.error
        return PREPARED

    def prepare(self) -> None:
        self.launcher.prepare(SPEC)
        self.until(lambda: not self.launcher._is_unpacking)

    def launch(self, kind: ChildKind, *, can_restart: bool = False) -> ChildProcess:
        child = self.launcher.create_child(
            on_messages=lambda _frames: None,
            on_line=lambda _stream, _line: None,
            on_exit=lambda reason, _is_clean: self.exits.append(reason),
        )
        self.launcher.launch(
            ProcessLaunch(kind, child, self.failures.append, self._restart if can_restart else None)
        )
        return child

    def _restart(self) -> None:
        self.restarts += 1

    def until(self, condition: Callable[[], bool]) -> None:
        run_loop_until(self.loop, condition)


@pytest.fixture
def launched() -> Iterator[Launched]:
    loop = EventLoop(SkippableClock())
    launched = Launched(loop)
    yield launched
    for child in list(launched.launcher._children):
        child.discard()
    launched.launcher.detach()
    for server in launched.fork_servers.started:
        server.close()
    loop.close()


def test_launches_are_queued_until_the_environment_is_unpacked(launched: Launched) -> None:
    launched.launch("worker")
    assert launched.launcher.live_count == 1
    assert launched.fork_servers.started == []
    launched.prepare()
    assert launched.fork_servers.started[-1].forked == ["worker"]


def test_only_queued_launches_of_the_kind_are_cancelled(launched: Launched) -> None:
    launched.launch("worker")
    launched.launch("uploader")
    launched.launcher.cancel_pending(only="worker")
    launched.until(lambda: launched.exits == ["was killed by SIGKILL"])
    launched.prepare()
    assert launched.fork_servers.started[-1].forked == ["uploader"]


def test_a_killed_fork_server_is_not_used_again(launched: Launched) -> None:
    launched.prepare()
    launched.launch("worker")
    launched.launcher.kill_fork_server()
    launched.launcher.kill_fork_server()  # there is none
    launched.launch("worker")
    assert [server.forked for server in launched.fork_servers.started] == [["worker"]] * 2


def test_closing_cancels_all_queued_launches(launched: Launched) -> None:
    launched.launch("worker")
    launched.launch("uploader")
    launched.launcher.close()
    launched.until(lambda: launched.exits == ["was killed by SIGKILL"] * 2)
    assert launched.launcher.live_count == 0


def test_a_temporary_error_fails_the_queued_launches_only(launched: Launched) -> None:
    launched.error = TransientStoreError("the bucket is down")
    launched.launch("worker")
    launched.prepare()
    launched.until(lambda: len(launched.exits) == 1)
    assert [raised.is_permanent for raised in launched.failures] == [False]
    assert launched.broken == []
    launched.error = None
    launched.launch("worker")
    launched.until(lambda: launched.fork_servers.started[-1].forked == ["worker"])
    assert len(launched.unpacked) == 2


def test_a_permanent_error_fails_later_launches_without_unpacking_again(
    launched: Launched,
) -> None:
    launched.error = ConfigError("no such package")
    launched.prepare()
    assert [raised.is_permanent for raised in launched.broken] == [True]
    launched.launch("worker")
    launched.until(lambda: len(launched.exits) == 1)
    assert launched.failures == launched.broken
    assert len(launched.unpacked) == 1


def test_a_lost_fork_server_ends_its_children_and_queued_launches_use_another_server(
    launched: Launched,
) -> None:
    launched.prepare()
    (first,) = launched.fork_servers.started
    forked = launched.launch("worker", can_restart=True)
    launched.launch("worker", can_restart=True)
    launched.launch("uploader")
    with subprocess.Popen(["sleep", "60"], process_group=0) as running:
        first.report(ChildForked(request_id=1, pid=running.pid))
        launched.until(lambda: forked.pid is not None)
        first.is_alive = False
        first.report(is_lost=True)
        launched.until(lambda: len(launched.exits) == 1)
    assert launched.exits == [EXIT_FORK_SERVER_DIED]
    assert launched.restarts == 1, "one worker was not forked yet"
    assert launched.fork_servers.started[-1].forked == ["uploader"]


def test_a_launch_after_the_death_of_the_fork_server_ends_the_launches_before_it(
    launched: Launched,
) -> None:
    launched.prepare()
    (first,) = launched.fork_servers.started
    launched.launch("worker", can_restart=True)
    first.is_alive = False  # its socket has not been read yet
    launched.launch("uploader")
    assert launched.restarts == 1, "one worker was not forked by the first server"
    assert launched.fork_servers.started[-1].forked == ["uploader"]


@pytest.mark.parametrize(
    ("module", "consequence"),
    [("jax_model", "every worker imports it at each start"), ("torch", "workers are not forked")],
)
def test_an_import_that_prevents_forks_is_reported_to_the_user(
    launched: Launched, module: str, consequence: str
) -> None:
    launched.launcher.prepare(msgspec.structs.replace(SPEC, preload=("jax_model",)))
    (server,) = launched.fork_servers.started
    server.report(ForkUnsafe(module=module, reason="it has started threads"))
    launched.until(lambda: bool(launched.slow_starts))
    (text,) = launched.slow_starts
    assert f"The import of {module} cannot precede a fork: it has started threads." in text
    assert consequence in text


def test_messages_about_children_of_an_earlier_run_are_ignored(launched: Launched) -> None:
    launched.prepare()
    (server,) = launched.fork_servers.started
    child = launched.launch("worker")
    server.report(ChildForked(request_id=7, pid=1))
    launched.until(lambda: server.reads == 1)
    assert child.pid is None


def test_a_launcher_is_warm_with_a_warm_fork_server_or_none(launched: Launched) -> None:
    is_warm = [launched.launcher.is_warm]
    launched.prepare()
    is_warm.append(launched.launcher.is_warm)
    launched.fork_servers.started[-1].is_ready = True
    is_warm.append(launched.launcher.is_warm)
    assert is_warm == [True, False, True]


def test_unpacking_stores_a_copy_of_the_bundle_for_the_workers(tmp_path: Path) -> None:
    store = MemoryStore(RootUrl.parse("memory://launcher-bundle"))
    bundle = upload_code_bundle(lambda: 7, None, runtime_env=RuntimeEnv(), key=KEY, store=store)
    spec = msgspec.structs.replace(SPEC, code_bundle=msgspec.to_builtins(bundle))
    unpack_environment(spec, store=store, key=KEY, scratch=tmp_path)
    (copy,) = (tmp_path / "code_bundle").iterdir()
    assert copy.name == bundle.sha256
