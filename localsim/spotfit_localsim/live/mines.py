"""Mines: a process of a story comes to a certain line for the n-th time, and that is its end.

Blows from outside fall at some time; a mine lies at one moment of a save, however short that is.
"""

from __future__ import annotations

import errno
import functools
import importlib
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from spotfit.host import env
from spotfit.host.clocks import wall_ms

MARK = "SPOTFIT_CHAOS"
"""In the environment of every process of a story: its folder."""

Who = Literal["worker", "agent"]
How = Literal["dies", "is full"]


class Moment(NamedTuple):
    """Where a mine can lie."""

    who: Who
    place: str
    """module:Class.method"""
    when: Literal["before", "after"] = "before"
    about: str = ""
    """Only calls with this in one of their arguments count."""
    full: bool = False
    """Whether what is there is writing, for which there may be no room."""


_COMMIT = '"checkpoint_committed"'

MOMENTS: Mapping[str, Moment] = {
    "a segment is made": Moment("worker", "spotfit.checkpoint.segment:Segment.create", full=True),
    "a snapshot begins": Moment("worker", "spotfit.checkpoint.segment:Segment.begin", "after"),
    "its index is due": Moment("worker", "spotfit.checkpoint.segment:Segment.finish", full=True),
    "a snapshot is whole": Moment("worker", "spotfit.checkpoint.segment:Segment.finish", "after"),
    "a snapshot is given": Moment("worker", "spotfit.worker.snapshots:Snapshots.give", "after"),
    "it learns its name": Moment("worker", "spotfit.worker.snapshots:Snapshots.take"),
    "memory is opened": Moment("worker", "spotfit.worker.snapshots:Snapshots.open_memory"),
    "memory is read": Moment("worker", "spotfit.checkpoint.saved:InMemory.fetch", "after"),
    "a peer is asked": Moment("worker", "spotfit.checkpoint.peer:InPeer.fetch"),
    "a peer has answered": Moment("worker", "spotfit.checkpoint.peer:InPeer.fetch", "after"),
    "a checkpoint is read": Moment("worker", "spotfit.checkpoint.saved:InBucket.fetch", "after"),
    "a snapshot comes": Moment("agent", "spotfit.agent.snapshots:Snapshots.keep"),
    "a name comes": Moment("agent", "spotfit.agent.snapshots:Snapshots.named"),
    "a name is known": Moment("agent", "spotfit.agent.snapshots:Snapshots.named", "after"),
    "older ones are freed": Moment("agent", "spotfit.agent.snapshots:Snapshots._free_others"),
    "a copy is sent": Moment("agent", "spotfit.agent.vault:Vault._send"),
    "a copy was sent": Moment("agent", "spotfit.agent.vault:Vault._send", "after"),
    "a copy comes": Moment("agent", "spotfit.agent.vault:Vault._keep", full=True),
    "a copy is kept": Moment("agent", "spotfit.agent.vault:Vault._keep", "after"),
    "a part is asked for": Moment("agent", "spotfit.agent.vault:Vault._bytes_of", "after"),
    "memory is looked through": Moment("agent", "spotfit.agent.snapshots:Snapshots.held", "after"),
    "a parcel was brought": Moment("agent", "spotfit.agent.crew:LiveCrew._note_carried"),
    "a commit is decided": Moment("agent", "spotfit.ledger.run:Ledger.enter", "before", _COMMIT),
    "a commit is written": Moment("agent", "spotfit.ledger.run:Ledger.enter", "after", _COMMIT),
}


_laid: set[Who] = set()
"""Once a process, though it may serve several nodes."""


class Mine(msgspec.Struct, frozen=True):
    """Whoever comes there for the n-th time in its life steps on it; one does."""

    moment: str
    nth: int = 1
    how: How = "dies"


def lay(who: Who) -> None:
    """From now on this process may step on a mine of its story's, if it is in one."""
    folder = env.lookup(MARK)
    if who in _laid or folder is None:
        return
    _laid.add(who)
    for path in sorted(Path(folder, "mines").glob("*.mine")):
        mine = msgspec.json.decode(path.read_bytes(), type=Mine)
        moment = MOMENTS[mine.moment]
        if moment.who == who:
            _wrap(moment, functools.partial(_step, mine, path.with_suffix(".sprung")))


def put(mines: tuple[Mine, ...], folder: Path) -> None:
    """For all processes of that story to find."""
    (folder / "mines").mkdir()
    for n, mine in enumerate(mines):
        (folder / "mines" / f"{n}.mine").write_bytes(msgspec.json.encode(mine))


def sprung(folder: Path) -> list[tuple[int, str]]:
    """When somebody stepped on which, in milliseconds since 1970."""
    found = []
    for path in sorted((folder / "mines").glob("*.sprung")):
        mine = msgspec.json.decode(path.with_suffix(".mine").read_bytes(), type=Mine)
        when_ms, _, who = path.read_text().partition(" ")
        found.append((int(when_ms or 0), f"{mine.how} when {mine.moment}: {who}"))
    return found


def place_of(moment: Moment) -> tuple[Any, str]:
    """The class, and the name of its method. Raises `AttributeError` where there is none."""
    module, _, name = moment.place.partition(":")
    owner, _, method = name.partition(".")
    found = getattr(importlib.import_module(module), owner)
    getattr(found, method)
    return found, method


def _wrap(moment: Moment, step: Callable[[int], None]) -> None:
    owner, name = place_of(moment)
    plain = owner.__dict__[name]
    function = plain.__func__ if isinstance(plain, classmethod) else plain
    calls = 0

    @functools.wraps(function)
    def mined(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        counts = moment.about in " ".join(map(_told, args)) if moment.about else True
        calls += counts
        if counts and moment.when == "before":
            step(calls)
        answer = function(*args, **kwargs)
        if counts and moment.when == "after":
            step(calls)
        return answer

    setattr(owner, name, classmethod(mined) if isinstance(plain, classmethod) else mined)


def _told(argument: Any) -> str:
    return argument.decode(errors="replace") if isinstance(argument, bytes) else ""


def _step(mine: Mine, sprung_at: Path, calls: int) -> None:
    if calls != mine.nth:
        return
    try:
        sprung = os.open(sprung_at, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return  # somebody else was here first
    os.write(sprung, f"{wall_ms()} {os.getpid()}".encode())
    os.close(sprung)
    if mine.how == "is full":
        raise OSError(errno.ENOSPC, "No space left on device (a mine)")
    os.kill(os.getpid(), signal.SIGKILL)
