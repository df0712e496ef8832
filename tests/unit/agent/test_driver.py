"""The agent's process: its exit codes, its log and the removal of its scratch directory."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotfit.agent import agent as agent_module
from spotfit.agent import driver
from spotfit.agent.log_shipper import LogShipper
from spotfit.agent.tls_transport import TlsTransport
from spotfit.core.ids import AgentId, RunId, Token
from spotfit.fork_server.fork_client import ForkServerPool
from spotfit.host.event_loop import EventLoop
from spotfit.host.system import SystemClock
from spotfit.ledger import keys
from spotfit.ledger.authenticated_store import AuthenticatedStore
from spotfit.ledger.journal import Ledger
from spotfit.model.events import FitEnded, FitStarted
from spotfit.model.spec import RunSpec
from spotfit.model.topology import Member
from spotfit.protocol.agent_leader import ConnectionHeartbeat
from spotfit.provision.launch import AgentAssignment, AgentExitCode, AgentLaunchSpec
from spotfit.security.run_key import RunKey
from spotfit.store.factory import open_store
from spotfit.store.local import LocalStore
from tests.unit.agent.transports import make_join, make_net

RUN = RunId("r" * 32)
KEY = RunKey(b"s" * 32, RUN)


@pytest.fixture
def fork_servers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ForkServerPool]:
    monkeypatch.setenv("SPOTFIT_HOST", "127.0.0.1")
    monkeypatch.setenv("SPOTFIT_FORK", "never")
    monkeypatch.setenv("SPOTFIT_SCRATCH", str(tmp_path / "scratch"))
    fork_servers = ForkServerPool()
    yield fork_servers
    fork_servers.close()


def assignment(folder: Path, *, notices: tuple[str, ...] = ("signal",)) -> AgentAssignment:
    launch = AgentLaunchSpec(str(folder), RUN, KEY.to_text(), notices)
    return AgentAssignment(launch, Token("t"), 0, 1)


def ledger(folder: Path) -> Ledger:
    folder.mkdir(exist_ok=True)
    store = open_store(str(folder))
    assert isinstance(store, LocalStore)
    return Ledger(AuthenticatedStore(store, KEY), RUN, AgentId("driver"))


def write_ended_run(folder: Path) -> Ledger:
    run = ledger(folder)
    bundle = {"sha256": "0" * 64, "size_bytes": 1, "function": "train"}
    spec = RunSpec(
        run_id=RUN,
        name="n",
        fit_id="f",
        min_workers=1,
        max_workers=1,
        code_bundle=bundle,
        storage_url=str(folder),
    )
    view = run.append(FitStarted(spec=spec), after=run.catch_up())
    run.append(FitEnded(outcome="finished"), after=view)
    return run


def test_an_ended_run_exits_with_code_0_and_removes_scratch(
    tmp_path: Path, fork_servers: ForkServerPool
) -> None:
    write_ended_run(tmp_path / "run")
    before = signal.getsignal(signal.SIGTERM)
    code = driver.serve(assignment(tmp_path / "run"), fork_servers=fork_servers)
    assert code == AgentExitCode.DONE
    assert list((tmp_path / "scratch").iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_log_ends_with_an_end_marker(tmp_path: Path, fork_servers: ForkServerPool) -> None:
    run = write_ended_run(tmp_path / "run")
    driver.serve(assignment(tmp_path / "run"), fork_servers=fork_servers)
    (chunk,) = run.store.list(".spotfit/logs")
    assert run.store.get(chunk.key) == b'{"end":true}\n'


def test_the_log_is_uploaded_before_the_agent_disconnects(
    tmp_path: Path, fork_servers: ForkServerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader releases the machine of a disconnected agent after the end of the run."""
    calls: list[str] = []

    def recorded(owner: type, name: str) -> None:
        real = getattr(owner, name)

        def record(self: object, *arguments: object, **options: object) -> None:
            calls.append(f"{owner.__name__}.{name}")
            real(self, *arguments, **options)

        monkeypatch.setattr(owner, name, record)

    recorded(LogShipper, "close")
    recorded(TlsTransport, "close")
    recorded(TlsTransport, "disconnect")
    write_ended_run(tmp_path / "run")
    driver.serve(assignment(tmp_path / "run"), fork_servers=fork_servers)
    assert calls[0] == "LogShipper.close"
    assert "TlsTransport.close" in calls


def test_a_machine_that_does_not_share_the_directory_of_the_run_exits_with_the_remedy(
    tmp_path: Path,
    fork_servers: ForkServerPool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(agent_module, "_FIRST_READ_TIMEOUT_S", 0.0)
    code = driver.serve(assignment(tmp_path / "run"), fork_servers=fork_servers)
    assert code == AgentExitCode.RUN_NOT_FOUND
    printed = capsys.readouterr().err
    assert f"{tmp_path}/run has no journal of the run" in printed
    assert "a directory that all machines mount" in printed


def test_an_invalid_setting_returns_node_unusable(
    tmp_path: Path, fork_servers: ForkServerPool, capsys: pytest.CaptureFixture[str]
) -> None:
    code = driver.serve(
        assignment(tmp_path, notices=("no such source",)), fork_servers=fork_servers
    )
    assert code == AgentExitCode.NODE_UNUSABLE
    assert "no such source" in capsys.readouterr().err


def test_a_foreign_journal_returns_node_unusable(
    tmp_path: Path, fork_servers: ForkServerPool, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger(tmp_path / "run").store.put(keys.entry(0), b"not an entry")
    assert (
        driver.serve(assignment(tmp_path / "run"), fork_servers=fork_servers)
        == AgentExitCode.NODE_UNUSABLE
    )
    assert "start a new run with another RunConfig" in capsys.readouterr().err


def test_an_unexpected_exception_is_logged_as_a_crash(
    tmp_path: Path,
    fork_servers: ForkServerPool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(driver, "_tick_until_done", lambda *_: 1 / 0)
    ledger(tmp_path / "run")
    assert (
        driver.serve(assignment(tmp_path / "run"), fork_servers=fork_servers)
        == AgentExitCode.CRASHED
    )
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_crash_is_stored_before_the_connections_close(
    tmp_path: Path, fork_servers: ForkServerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ledger(tmp_path / "run")
    stored_at_close: list[bool] = []
    close = TlsTransport.close

    def record_and_close(transport: TlsTransport) -> None:
        stored_at_close.append(run.read_crash(Token("t"), 0) is not None)
        close(transport)

    monkeypatch.setattr(TlsTransport, "close", record_and_close)
    monkeypatch.setattr(driver, "_tick_until_done", lambda *_: 1 / 0)
    driver.serve(assignment(tmp_path / "run"), fork_servers=fork_servers)
    assert stored_at_close[0]
    crash = run.read_crash(Token("t"), 0)
    assert crash is not None
    assert crash.traceback_text.endswith("ZeroDivisionError: division by zero\n")


def test_an_agent_that_is_refused_stores_the_reason(
    tmp_path: Path, fork_servers: ForkServerPool
) -> None:
    run = ledger(tmp_path / "run")
    driver.serve(
        assignment(tmp_path / "run", notices=("no such source",)), fork_servers=fork_servers
    )
    crash = run.read_crash(Token("t"), 0)
    assert crash is not None
    assert "no such source" in crash.traceback_text


def test_an_agent_without_access_to_the_bucket_keeps_its_exit_code(
    tmp_path: Path,
    fork_servers: ForkServerPool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(driver, "_tick_until_done", lambda *_: 1 / 0)
    monkeypatch.setattr(Ledger, "publish_crash", lambda *_: 1 / 0)
    code = driver.serve(assignment(tmp_path / "run"), fork_servers=fork_servers)
    assert code == AgentExitCode.CRASHED
    assert "agent.crash_not_stored" in capsys.readouterr().err


def _raise(error: Exception) -> Exception:
    with pytest.raises(type(error)) as raised:
        raise error
    return raised.value


def _signature(error: Exception, folder: Path) -> str:
    return driver.make_crash(assignment(folder), AgentId("a"), error).signature


def test_the_text_of_a_crash_does_not_contain_the_run_key(tmp_path: Path) -> None:
    error = ValueError(f"invalid environment: SPOTFIT_RUN_SECRET={KEY.to_text()}")
    crash = driver.make_crash(assignment(tmp_path), AgentId("a"), error)
    assert crash.traceback_text.endswith("SPOTFIT_RUN_SECRET=***\n")


def test_equal_crashes_have_one_signature_whatever_their_message(tmp_path: Path) -> None:
    first, second = (_signature(_raise(KeyError(name)), tmp_path) for name in ("a-1", "a-2"))
    assert first == second


def test_crashes_of_other_types_have_another_signature(tmp_path: Path) -> None:
    assert _signature(_raise(KeyError("a")), tmp_path) != _signature(
        _raise(ValueError("a")), tmp_path
    )


def test_a_recursion_has_one_signature_at_every_depth(tmp_path: Path) -> None:
    def recurse(depth: int) -> None:
        if depth == 0:
            raise RecursionError
        recurse(depth - 1)

    def caught(depth: int) -> Exception:
        with pytest.raises(RecursionError) as raised:
            recurse(depth)
        return raised.value

    assert _signature(caught(5), tmp_path) == _signature(caught(9), tmp_path)


def test_scratch_of_a_killed_agent_is_removed(tmp_path: Path, fork_servers: ForkServerPool) -> None:
    write_ended_run(tmp_path / "run")
    left = tmp_path / "scratch" / f"spotfit-{os.getuid()}-scratch-a-0"
    left.mkdir(parents=True)
    (left / "owner").write_text(os.uname().nodename)
    assert (
        driver.serve(assignment(tmp_path / "run"), fork_servers=fork_servers) == AgentExitCode.DONE
    )
    assert list((tmp_path / "scratch").iterdir()) == []


class MessagingAgent:
    """A leader that sends a message to itself and then waits for a long time."""

    def __init__(self, transport: TlsTransport) -> None:
        self._net = transport
        self._ticks = 0

    def tick(self, now: float) -> float | None:
        self._net.drain_events()
        self._ticks += 1
        if self._ticks == 1:
            self._net.send_to_leader(ConnectionHeartbeat())
        return None if self._ticks > 2 else now + 60


def test_loopback_messages_are_processed_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float | None] = []
    monkeypatch.setattr(EventLoop, "run_once", lambda _, timeout_s: waits.append(timeout_s))
    with (
        contextlib.closing(EventLoop(SystemClock())) as loop,
        contextlib.closing(make_net(loop)) as transport,
    ):
        transport.connect(transport.address, make_join("a"))
        driver._tick_until_done(MessagingAgent(transport), loop, transport, ())  # type: ignore[arg-type]
    assert waits[0] == 0
    assert waits[1] is not None
    assert waits[1] > 1


def test_a_member_holds_its_addresses(tmp_path: Path) -> None:
    member = driver._make_member(
        assignment(tmp_path),
        AgentId("a"),
        coordinator_address="[::1]:7000",
        peer_store_address="[::1]:7001",
    )
    assert isinstance(member, Member)
    assert (member.host, member.coordinator_address, member.pid) == (
        "::1",
        "[::1]:7000",
        os.getpid(),
    )
    assert member.peer_store_address == "[::1]:7001"
