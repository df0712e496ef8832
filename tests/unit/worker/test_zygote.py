"""The zygote by itself: what it may import, when it may fork, and whose pipes it passes on."""

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
from spotfit.model.cradle import Awake, Bear, Born, FromZygote, Gone, Kind, Ripe
from spotfit.worker import birth, zygote

_words: msgspec.json.Decoder[FromZygote] = decoder(FromZygote)  # type: ignore[arg-type]
Word = TypeVar("Word", bound=FromZygote)


def test_a_framework_s_first_stage_comes_first_and_ours_with_it() -> None:
    first, later = zygote.stages_of("torch")
    assert first[0] == "torch"
    assert "spotfit.worker.main" in first
    assert "torch._dynamo" in later
    assert "torch._dynamo" not in first
    assert "spotfit.worker.audience" in later
    assert "spotfit.worker.audience" not in first


def test_every_kind_of_child_has_an_entrance_forked_or_not() -> None:
    assert birth.ENTRANCES.keys() == set(typing.get_args(Kind))
    for module in birth.ENTRANCES.values():
        assert callable(importlib.import_module(module).main)


def test_an_unknown_framework_is_the_worker_s_to_tell() -> None:
    assert zygote.stages_of("no such framework")[1] == []


def test_what_cannot_be_imported_stops_nobody(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "breaks_on_import.py").write_text("raise RuntimeError('broken')")
    monkeypatch.syspath_prepend(str(tmp_path))
    zygote._import("breaks_on_import")
    zygote._import("is_not_there")


def test_a_process_with_threads_may_not_fork() -> None:
    stay, leave = threading.Event(), threading.Event()

    def live() -> None:
        stay.set()
        leave.wait()

    thread = threading.Thread(target=live)
    thread.start()
    stay.wait()
    try:
        assert not zygote._can_fork()
    finally:
        leave.set()
        thread.join()


def test_descriptors_are_found_among_what_came_along() -> None:
    body = array.array("i", [5, 6, 7]).tobytes()
    assert zygote._descriptors([(socket.SOL_SOCKET, socket.SCM_RIGHTS, body)]) == (5, 6, 7)
    assert zygote._descriptors([(socket.SOL_SOCKET, socket.SCM_RIGHTS + 1, body)]) == ()


# --- the successor -------------------------------------------------------------------------------

LIVE = """
import socket, sys
from spotfit.worker.zygote import Zygote
zygote = Zygote(socket.socket(fileno=int(sys.argv[1])), [], sys.argv[3:])
zygote.watch_over(int(sys.argv[2]))
zygote.run()
"""


class Family:
    """A zygote whose successor imports a module that takes as long as the test likes."""

    def __init__(self, folder: Path, *later: str) -> None:
        self._gate = folder / "gate"
        os.mkfifo(self._gate)
        (folder / "slow_to_import.py").write_text(f"open({str(self._gate)!r}).read()")
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(30)
        with theirs:
            self._zygote = subprocess.Popen(
                [sys.executable, "-c", LIVE, str(theirs.fileno()), str(os.getpid()), *later],
                env={**os.environ, "PYTHONPATH": ":".join([str(folder), *sys.path])},
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
        self._talks: list[socket.socket] = []
        self._serial = 0

    @property
    def pid(self) -> int:
        return self._zygote.pid

    def ripen(self) -> None:
        """The import is done."""
        self._gate.write_text("")
        self.hear(Ripe)

    def hear(self, kind: type[Word]) -> Word:
        """The next word, which is of that kind."""
        word = _words.decode(self._control.recv(65536))
        assert isinstance(word, kind)
        return word

    def ask(self) -> None:
        """For a worker, which waits for its first frame and does nothing else."""
        here, there = socket.socketpair()
        self._talks.append(here)
        self._serial += 1
        with there:
            rights = array.array("i", [there.fileno(), 1, 2])
            ask = [encode(Bear(self._serial))]
            self._control.sendmsg(ask, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])

    def bear(self) -> Born:
        self.ask()
        return self.hear(Born)

    def leave(self, born: Born) -> None:
        """Without its agent a worker ends."""
        self._talks[born.serial - 1].close()

    def close(self) -> None:
        for wire in (self._control, *self._talks):
            wire.close()
        self._zygote.wait(30)


@pytest.fixture
def family(tmp_path: Path) -> Iterator[Family]:
    family = Family(tmp_path, "slow_to_import")
    yield family
    family.close()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_who_has_nothing_to_import_later_is_ripe_at_once(tmp_path: Path) -> None:
    family = Family(tmp_path)
    family.hear(Awake)
    family.hear(Ripe)
    assert parent_of(family.bear().pid) == family.pid
    family.close()


def test_children_do_not_wait_for_the_successor_and_later_ones_are_its(family: Family) -> None:
    family.hear(Awake)
    early = family.bear()
    assert parent_of(early.pid) == family.pid
    family.ripen()
    late = family.bear()
    successor = parent_of(late.pid)
    assert parent_of(successor) == family.pid
    for born in (late, early):
        family.leave(born)
        gone = family.hear(Gone)
        assert (gone.serial, gone.pid) == (born.serial, born.pid), "whoever bore it"


def test_a_successor_that_is_killed_takes_its_children_along_and_the_zygote_goes_on(
    family: Family,
) -> None:
    family.hear(Awake)
    early = family.bear()
    family.ripen()
    late = family.bear()
    os.kill(parent_of(late.pid), signal.SIGKILL)
    gone = family.hear(Gone)
    assert (gone.serial, gone.pid, gone.status) == (late.serial, late.pid, signal.SIGKILL)
    again = family.bear()
    assert parent_of(again.pid) == parent_of(early.pid) == family.pid


def test_a_child_a_dead_successor_was_asked_for_is_told_as_gone() -> None:
    """Nobody waits for ever for one that was never born."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    theirs.close()
    successor = zygote.Successor(pid, ours)
    successor.ready = True
    successor.pass_on(zygote._Asked(Bear(7), (os.dup(1), os.dup(1), os.dup(1))))
    assert select.select([ours], [], [], 30)[0], "its end is seen at its socket"
    assert successor.hear() == [Gone(7, 0, signal.SIGKILL)]
    assert (successor.over, successor.ready) == (True, False)
    ours.close()


def test_when_the_agent_is_gone_so_are_all_of_them(family: Family) -> None:
    family.hear(Awake)
    early = family.bear()
    family.ripen()
    late = family.bear()
    successor = parent_of(late.pid)
    ends = [os.pidfd_open(pid) for pid in (early.pid, late.pid, successor, family.pid)]
    family._control.close()
    for end in ends:
        assert select.select([end], [], [], 30)[0], "it lives on"
        os.close(end)
