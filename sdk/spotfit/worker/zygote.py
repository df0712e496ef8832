"""The process that has imported the framework and forks workers: `python -m spotfit.worker.zygote`.

It is one thread, touches no accelerator, and never runs the user's code: a child does. It lives as
long as its agent's end of the control socket.

It imports what a worker cannot begin without, and forks from then on. What a worker's first steps
will want as well takes a second more, and nobody shall wait for it: a *successor*, forked from the
zygote once its first children have begun, imports that, and when it has, every later child is its.
The first zygote stays between it and the agent.
"""

from __future__ import annotations

import array
import collections
import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
from collections.abc import Iterable
from typing import NamedTuple, NoReturn

import msgspec

from spotfit.core.codec import decoder, encode
from spotfit.core.errors import SpotfitError
from spotfit.frameworks.registry import open_framework
from spotfit.host import log, process
from spotfit.model.cradle import Awake, Bear, Born, FromZygote, Gone, Ripe, Unfit
from spotfit.worker import birth

_PACKET_BYTES = 64 * 1024
_PASSED = 3
_QUIET_MS = 1000
"""The first workers are on their way to their first line then, and want the processors."""
_ALWAYS = (birth.ENTRANCES["worker"], "spotfit.store.opening", "spotfit.ship.luggage")
_LATER = (*birth.ENTRANCES.values(), "spotfit.checkpoint.peer", "spotfit.ship.certificate")
"""Few runs need any of them, and none at once."""
_asks = decoder(Bear)
_says: msgspec.json.Decoder[FromZygote] = decoder(FromZygote)  # type: ignore[arg-type]


class _Asked(NamedTuple):
    ask: Bear
    descriptors: tuple[int, ...]


def main() -> None:
    """Serve the agent at the other end of the socket whose number is the first argument."""
    descriptor, agent, framework = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    zygote = Zygote(socket.socket(fileno=descriptor), *stages_of(framework))
    zygote.watch_over(agent)
    zygote.run()


class Zygote:
    """Imports, then forks on demand."""

    def __init__(self, control: socket.socket, first: list[str], later: list[str]) -> None:
        self._control = control
        self._first = first
        self._later = later
        self._awake_end, self._wake_end = socket.socketpair()
        self._wake_end.settimeout(0)
        self._awake_end.settimeout(0)
        self._asked: collections.deque[_Asked] = collections.deque()
        self._children: dict[int, int] = {}
        self._successor: Successor | None = None
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._poll.register(self._awake_end, select.POLLIN)

    def watch_over(self, parent: int) -> None:
        """When the parent dies, so do our children with all they have started, and so do we."""
        signal.signal(signal.SIGTERM, lambda *_: self._end())
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the agent's to answer
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_end.fileno(), warn_on_full_buffer=False)
        process.call_myself("spotfit-zygote")
        process.die_with_parent(parent, signal.SIGTERM)

    def run(self) -> NoReturn:
        """Import, then serve for ever."""
        gc.disable()  # imports make no garbage worth looking for, and a child wants clean pages
        for module in self._first:
            _import(module)
        self._say_whether_fit()
        while True:
            self._listen()
            self._reap()
            self._relay()
            while self._asked:
                self._answer(self._asked.popleft())
            if not self._wait():
                self._raise_successor()

    def _say_whether_fit(self) -> None:
        if not _can_fork():
            self._say(Unfit("importing the framework has started threads that outlive a fork"))
            self._end()
        gc.freeze()
        self._say(Awake())
        if not self._later:
            self._say(Ripe())

    def _wait(self) -> bool:
        """For a request, a child's end, or a word of the successor. False where there was none for
        as long as the import of the rest has to wait: not at all while nobody is born."""
        patience_ms = _QUIET_MS if self._children else 0
        heard = self._poll.poll(patience_ms if self._later else None)
        with contextlib.suppress(BlockingIOError):
            while self._awake_end.recv(4096):
                continue
        return bool(heard)

    def _listen(self) -> None:
        while True:
            try:
                packet, passed, _, _ = self._control.recvmsg(
                    _PACKET_BYTES, socket.CMSG_SPACE(_PASSED * 4), socket.MSG_DONTWAIT
                )
            except BlockingIOError:
                return
            except OSError:
                packet, passed = b"", []
            if not packet:
                self._end()
            self._asked.append(_Asked(_asks.decode(packet), _descriptors(passed)))

    def _answer(self, asked: _Asked) -> None:
        if self._successor is not None and self._successor.ready:
            self._successor.pass_on(asked)
        else:
            self._bear(asked)

    def _reap(self) -> None:
        for serial, pid in list(self._children.items()):
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                process.kill_group(pid)  # before it is reaped: until then the number is its own
                _, status = os.waitpid(pid, 0)
                del self._children[serial]
                self._say(Gone(serial, pid, status))

    # --- the successor -----------------------------------------------------------------------

    def _raise_successor(self) -> None:
        later, self._later = self._later, []
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        me = os.getpid()
        pid = os.fork()
        if pid == 0:
            ours.close()
            self._forget_others()
            heir = Zygote(theirs, later, [])
            heir.watch_over(me)
            heir.run()
        theirs.close()
        self._successor = Successor(pid, ours)
        self._poll.register(ours, select.POLLIN)

    def _relay(self) -> None:
        """What the successor has to say of its children goes on to the agent."""
        if self._successor is None:
            return
        for message in self._successor.hear():
            self._say(message)
        if self._successor.over:
            self._poll.unregister(self._successor.control)
            self._successor.control.close()
            self._successor = None

    # --- children ----------------------------------------------------------------------------

    def _bear(self, asked: _Asked) -> None:
        me = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become(asked, me)
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)  # the child does it too: whoever is first
        for descriptor in asked.descriptors:
            os.close(descriptor)
        self._children[asked.ask.serial] = pid
        self._say(Born(asked.ask.serial, pid))

    def _become(self, asked: _Asked, zygote: int) -> NoReturn:
        """In the child, for the rest of its life."""
        try:
            signal.set_wakeup_fd(-1)
            self._forget_others()
            birth.separate(zygote)
            talk, out, err = asked.descriptors
            birth.take_streams(out, err)
            birth.leave_inheritance()
            gc.enable()
            birth.enter(asked.ask.what, talk)
        finally:
            os._exit(70)  # only reached when what should end the process did not

    def _forget_others(self) -> None:
        """In the child: what is the zygote's, and what is of children not yet borne."""
        for wire in (self._control, self._awake_end, self._wake_end):
            wire.close()
        if self._successor is not None:
            self._successor.control.close()
        for asked in self._asked:
            for descriptor in asked.descriptors:
                os.close(descriptor)

    # --- the agent ---------------------------------------------------------------------------

    def _say(self, message: FromZygote) -> None:
        try:
            self._control.send(encode(message))
        except OSError:
            self._end()

    def _end(self) -> NoReturn:
        for pid in self._children.values():
            process.kill_group(pid)
        os._exit(0)


class Successor:
    """A zygote's end of its own child that has imported more, and bears the later children."""

    def __init__(self, pid: int, control: socket.socket) -> None:
        self._pid = pid
        self.control = control
        self.control.settimeout(0)
        self.ready = False
        self.over = False
        self._nursed: dict[int, int] = {}
        """Pids of its living children by serial; 0 while they are not born."""

    def pass_on(self, asked: _Asked) -> None:
        """Let it bear that child."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", asked.descriptors))]
        self._nursed[asked.ask.serial] = 0
        try:
            self.control.sendmsg([encode(asked.ask)], rights)
        except OSError:
            log.warning("zygote.successor", pid=self._pid, why="it does not listen any more")
        for descriptor in asked.descriptors:
            os.close(descriptor)

    def hear(self) -> list[FromZygote]:
        """What the agent should know; once it is dead, that its children are, too."""
        messages: list[FromZygote] = []
        while not self.over:
            try:
                packet = self.control.recv(_PACKET_BYTES)
            except BlockingIOError:
                break
            except OSError:
                packet = b""
            messages += self._take(_says.decode(packet)) if packet else self._bury()
        return messages

    def _take(self, message: FromZygote) -> list[FromZygote]:
        match message:
            case Awake():
                self.ready = True
                return [Ripe()]
            case Unfit() | Ripe():
                return []  # the end of its socket follows
            case Born(serial=serial, pid=pid):
                self._nursed[serial] = pid
            case Gone(serial=serial):
                self._nursed.pop(serial, None)
        return [message]

    def _bury(self) -> list[FromZygote]:
        """Its children die with it."""
        self.over, self.ready = True, False
        os.waitpid(self._pid, 0)
        for pid in filter(None, self._nursed.values()):
            process.kill_group(pid)
        return [Gone(serial, pid, signal.SIGKILL) for serial, pid in self._nursed.items()]


def stages_of(framework: str) -> tuple[list[str], list[str]]:
    """What to import before anything is forked, and what when there is time."""
    try:
        stages = open_framework(framework).stages
    except SpotfitError as error:  # a worker will meet it again, and tell it to the user
        log.warning("zygote.framework", name=framework, why=str(error))
        stages = ()
    first = list(stages[0]) if stages else []
    later = [module for stage in stages[1:] for module in stage]
    return ([*first, *_ALWAYS], [*later, *_LATER]) if later else ([*first, *_ALWAYS, *_LATER], [])


def _import(module: str) -> None:
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - whoever needs it will meet this again, and tell
        log.debug("zygote.import", module=module, why=f"{type(error).__name__}: {error}")


def _can_fork() -> bool:
    """Whether this process is one thread when it forks.

    Some libraries put their threads away before a fork; only trying shows which.
    """
    if sys.platform != "linux":
        return False
    if process.thread_count() == 1:
        return True
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return process.thread_count() == 1


def _descriptors(passed: Iterable[tuple[int, int, bytes]]) -> tuple[int, ...]:
    found = array.array("i")
    for level, kind, body in passed:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(body[: len(body) - len(body) % found.itemsize])
    return tuple(found)


if __name__ == "__main__":
    main()
