"""The process that has imported the framework and forks workers: `python -m spotfit.worker.zygote`.

It is one thread whenever it forks, touches no accelerator, and never runs the user's code: a child
does. It lives as long as its agent's end of the control socket.
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
import threading
from collections.abc import Iterable
from typing import NamedTuple, NoReturn

from spotfit.core.codec import decoder, encode
from spotfit.core.errors import SpotfitError
from spotfit.frameworks.registry import open_framework
from spotfit.host import log, process
from spotfit.model.cradle import Awake, Bear, Born, FromZygote, Gone, Unfit
from spotfit.worker import audience, birth
from spotfit.worker import main as worker

_PACKET_BYTES = 64 * 1024
_PASSED = 3
_ALWAYS = ("spotfit.worker.session", "spotfit.store.opening", "spotfit.ship.luggage")
_asks = decoder(Bear)


class _Asked(NamedTuple):
    ask: Bear
    descriptors: tuple[int, ...]


def main() -> None:
    """Serve the agent at the other end of the socket whose number is the first argument."""
    descriptor, agent, framework = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    zygote = Zygote(socket.socket(fileno=descriptor), framework)
    zygote.watch_over(agent)
    zygote.run()


class Zygote:
    """Imports in stages; forks as soon as the first is done; imports the rest when it may."""

    def __init__(self, control: socket.socket, framework: str) -> None:
        self._control = control
        self._framework = framework
        self._awake_end, self._wake_end = socket.socketpair()
        self._wake_end.settimeout(0)
        self._awake_end.settimeout(0)
        self._later: collections.deque[str] = collections.deque()
        self._importer: threading.Thread | None = None
        self._imported = False
        self._asked: collections.deque[_Asked] = collections.deque()
        self._children: dict[int, int] = {}
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._poll.register(self._awake_end, select.POLLIN)

    def watch_over(self, agent: int) -> None:
        """When the agent dies, so do our children with all they have started, and so do we."""
        signal.signal(signal.SIGTERM, lambda *_: self._end())
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the agent's to answer
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_end.fileno(), warn_on_full_buffer=False)
        process.call_myself("spotfit-zygote")
        process.die_with_parent(agent, signal.SIGTERM)

    def run(self) -> NoReturn:
        gc.disable()  # imports make no garbage worth looking for, and a child wants clean pages
        first, later = stages_of(self._framework)
        for module in first:
            _import(module)
        self._later.extend(later)
        self._say_whether_fit()
        while True:
            self._turn()

    def _say_whether_fit(self) -> None:
        if not _can_fork():
            self._say(Unfit(f"importing {self._framework} has started threads that outlive a fork"))
            self._end()
        gc.freeze()
        self._say(Awake())

    # --- one turn ----------------------------------------------------------------------------

    def _turn(self) -> None:
        self._wait()
        self._listen()
        self._reap()
        if self._imported:
            self._see_importer_off()
        if self._importer is not None:
            return
        while self._asked:
            self._bear(self._asked.popleft())
        if self._later:
            self._import_next()

    def _wait(self) -> None:
        """For a request, a child's end or an import's; not at all while there is work at hand."""
        at_hand = self._later and self._importer is None
        self._poll.poll(0 if at_hand else None)
        with contextlib.suppress(BlockingIOError):
            while self._awake_end.recv(4096):
                continue

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

    def _reap(self) -> None:
        for serial, pid in list(self._children.items()):
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                process.kill_group(pid)  # before it is reaped: until then the number is its own
                _, status = os.waitpid(pid, 0)
                del self._children[serial]
                self._say(Gone(serial, pid, status))

    # --- imports -----------------------------------------------------------------------------

    def _import_next(self) -> None:
        """At full speed while nobody works here; else in a thread that only takes idle time.

        A thread, because a process that has lowered its own rank may not raise it again.
        """
        module = self._later.popleft()
        if not self._children:
            _import(module)
            gc.freeze()
            return
        self._importer = threading.Thread(target=self._import_idly, args=(module,), name="imports")
        self._importer.start()

    def _import_idly(self, module: str) -> None:
        if sys.platform == "linux":
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        _import(module)
        self._imported = True
        self._wake_end.send(b"i")

    def _see_importer_off(self) -> None:
        """To the end: a fork must not find even the last steps of another thread."""
        assert self._importer is not None
        self._importer.join()
        while process.has_thread(self._importer.native_id or 0):
            os.sched_yield()
        self._importer, self._imported = None, False
        gc.freeze()

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
            {"worker": worker.main, "audience": audience.main}[asked.ask.what](talk)
        finally:
            os._exit(70)  # only reached when what should end the process did not

    def _forget_others(self) -> None:
        """In the child: what is the zygote's, and what is of children not yet borne."""
        for wire in (self._control, self._awake_end, self._wake_end):
            wire.close()
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


def stages_of(framework: str) -> tuple[list[str], list[str]]:
    """What to import before anything is forked, and what when there is time."""
    try:
        stages = open_framework(framework).stages
    except SpotfitError as error:  # a worker will meet it again, and tell it to the user
        log.warning("zygote.framework", name=framework, why=str(error))
        stages = ()
    first = list(stages[0]) if stages else []
    return [*first, *_ALWAYS], [module for stage in stages[1:] for module in stage]


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
