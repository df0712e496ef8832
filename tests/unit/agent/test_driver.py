"""The agent's process: it ends with a code its scheduler can read, and leaves nothing behind."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotfit.agent import driver
from spotfit.agent.loop import Loop
from spotfit.agent.net import TlsNet
from spotfit.agent.zygote import ZygoteKeeper
from spotfit.core.ids import AgentId, RunId, Token
from spotfit.host.clocks import SystemClock
from spotfit.ledger import keys
from spotfit.ledger.run import Ledger
from spotfit.model.events import FitEnded, FitStarted
from spotfit.model.spec import RunSpec
from spotfit.model.wire import Beat
from spotfit.model.world import Member
from spotfit.provision.launch import Assignment, Exit, Launch
from spotfit.ship.sign import RunKey
from spotfit.store.local import LocalStore
from spotfit.store.opening import open_store
from tests.unit.agent.wires import join_of, net_in

RUN = RunId("r" * 32)


@pytest.fixture
def keeper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ZygoteKeeper]:
    monkeypatch.setenv("SPOTFIT_HOST", "127.0.0.1")
    monkeypatch.setenv("SPOTFIT_FORK", "never")
    monkeypatch.setenv("SPOTFIT_SCRATCH", str(tmp_path / "scratch"))
    keeper = ZygoteKeeper()
    yield keeper
    keeper.close()


def assignment(folder: Path, *, notices: tuple[str, ...] = ("signal",)) -> Assignment:
    launch = Launch(str(folder), RUN, RunKey(b"s" * 32, RUN).to_text(), notices)
    return Assignment(launch, Token("t"), 0, 1)


def ledger(folder: Path) -> Ledger:
    folder.mkdir(exist_ok=True)
    store = open_store(str(folder))
    assert isinstance(store, LocalStore)
    return Ledger(store, RUN, AgentId("the-door"))


def an_ended_run(folder: Path) -> Ledger:
    run = ledger(folder)
    luggage = {"sha256": "0" * 64, "size_bytes": 1, "function": "train"}
    spec = RunSpec(RUN, "n", "f", 1, 1, luggage=luggage, storage_url=str(folder))
    view = run.append(FitStarted(spec), after=run.catch_up())
    run.append(FitEnded("finished"), after=view)
    return run


def test_a_run_that_is_over_is_left_with_code_0_and_nothing_behind(
    tmp_path: Path, keeper: ZygoteKeeper
) -> None:
    an_ended_run(tmp_path / "run")
    before = signal.getsignal(signal.SIGTERM)
    code = driver.serve(assignment(tmp_path / "run"), zygotes=keeper)
    assert code == Exit.DONE
    assert list((tmp_path / "scratch").iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_end_of_its_log_is_in_the_bucket(tmp_path: Path, keeper: ZygoteKeeper) -> None:
    run = an_ended_run(tmp_path / "run")
    driver.serve(assignment(tmp_path / "run"), zygotes=keeper)
    (chunk,) = run.store.list(".spotfit/logs")
    assert run.store.get(chunk.key) == b'{"end":true}\n'


def test_what_cannot_be_done_here_is_refused(
    tmp_path: Path, keeper: ZygoteKeeper, capsys: pytest.CaptureFixture[str]
) -> None:
    code = driver.serve(assignment(tmp_path, notices=("no such source",)), zygotes=keeper)
    assert code == Exit.REFUSED
    assert "no such source" in capsys.readouterr().err


def test_a_journal_that_is_not_ours_is_refused_aloud(
    tmp_path: Path, keeper: ZygoteKeeper, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger(tmp_path / "run").store.put(keys.entry(0), b"not an entry")
    assert driver.serve(assignment(tmp_path / "run"), zygotes=keeper) == Exit.REFUSED
    assert "cannot be read" in capsys.readouterr().err


def test_a_fault_of_ours_is_a_crash_with_its_traceback(
    tmp_path: Path,
    keeper: ZygoteKeeper,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(driver, "_tick_to_the_end", lambda *_: 1 / 0)
    ledger(tmp_path / "run")
    assert driver.serve(assignment(tmp_path / "run"), zygotes=keeper) == Exit.CRASHED
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert list((tmp_path / "scratch").iterdir()) == []


def test_what_a_killed_agent_left_is_removed_by_the_next(
    tmp_path: Path, keeper: ZygoteKeeper
) -> None:
    an_ended_run(tmp_path / "run")
    left = tmp_path / "scratch" / f"spotfit-{os.getuid()}-scratch-a-0"
    left.mkdir(parents=True)
    (left / "owner").write_text(os.uname().nodename)
    assert driver.serve(assignment(tmp_path / "run"), zygotes=keeper) == Exit.DONE
    assert list((tmp_path / "scratch").iterdir()) == []


class Asking:
    """An agent that leads itself: it says something to its own hub, then waits for long."""

    def __init__(self, net: TlsNet) -> None:
        self._net = net
        self._ticks = 0

    def tick(self, now: float) -> float | None:
        self._net.events()
        self._ticks += 1
        if self._ticks == 1:
            self._net.send_up(Beat())
        return None if self._ticks > 2 else now + 60


def test_what_our_own_hub_is_told_is_heard_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float | None] = []
    monkeypatch.setattr(Loop, "turn", lambda _, timeout_s: waits.append(timeout_s))
    with contextlib.closing(Loop(SystemClock())) as loop, contextlib.closing(net_in(loop)) as net:
        net.dial(net.hub, join_of("a"))
        driver._tick_to_the_end(Asking(net), loop, net, ())  # type: ignore[arg-type]
    assert waits[0] == 0
    assert waits[1] is not None
    assert waits[1] > 1


def test_a_member_says_where_it_is(tmp_path: Path) -> None:
    member = driver._member(assignment(tmp_path), AgentId("a"), "[::1]:7000", "[::1]:7001")
    assert isinstance(member, Member)
    assert (member.host, member.hub, member.pid) == ("::1", "[::1]:7000", os.getpid())
    assert member.vault == "[::1]:7001"
