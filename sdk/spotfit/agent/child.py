"""One user process, as its agent holds it: a socket, two pipes, a number, and how it ended."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from functools import partial

from spotfit.agent.loop import READ, WRITE, Loop
from spotfit.core.errors import IntegrityError
from spotfit.host import log, process
from spotfit.host.frames import FrameReader, framed

_CHUNK_BYTES = 256 * 1024
_LINE_BYTES = 64 * 1024
_ZOMBIE_POLL_S = 0.02
_POLLS_OF_THE_DEAD = 25
_STRAGGLERS_S = 1.0
_QUEUE_LIMIT_BYTES = 64 * 2**20


class Child:
    """A process between its birth and the last word of it.

    `heard` gets its frames, `printed` its lines, `ended` how it ended, once, after all of them.
    """

    def __init__(
        self,
        loop: Loop,
        *,
        heard: Callable[[list[bytes]], None],
        printed: Callable[[str, str], None],
        ended: Callable[[str, bool], None],
    ) -> None:
        self._loop = loop
        self._heard, self._printed, self._ended = heard, printed, ended
        self.pid: int | None = None
        self.ordered = False
        """Whether it was alive when it was killed from here."""
        self._status: int | None = None
        self._how = ""
        self.doomed = False
        self._over = False
        self._reader = FrameReader()
        self._unsent = bytearray()
        self._talk: socket.socket | None
        self._talk, self._theirs = socket.socketpair()
        self._talk.settimeout(0)
        self._streams: dict[int, tuple[str, bytearray]] = {}
        self._ends = (self._stream("out"), self._stream("err"))
        loop.watch(self._talk, READ, self._on_talk)

    @property
    def descriptors(self) -> tuple[int, int, int]:
        """The process's own ends: its socket, its output, its errors."""
        return (self._theirs.fileno(), *self._ends)

    def send(self, body: bytes) -> None:
        """One frame to it; dropped if it is gone."""
        if self._talk is not None:
            self._unsent += framed(body)
            self._write()

    def born(self, pid: int) -> None:
        """It lives, leads a process group of that number, and holds its ends itself."""
        self.pid = pid
        self._let_go_of_their_ends()
        if self.doomed:
            self.ordered = True
            process.kill_group(pid)

    def kill(self, *, for_cause: bool = False) -> None:
        """End it with its whole group, now or as soon as it is born.

        `for_cause`: it gave reason to, so its end is to be told as any other.
        """
        self.doomed = True
        if self._status is None and not for_cause:
            self.ordered = self.ordered or self._alive
        if self.pid is not None and self._status is None:
            process.kill_group(self.pid)

    @property
    def _alive(self) -> bool:
        """Or not even born."""
        return self.pid is None or (process.exists(self.pid) and process.ended(self.pid) is None)

    def abandon(self) -> None:
        """Forget a process that was never born; nothing is told."""
        self._over = True
        self._let_go_of_their_ends()
        self._close_talk()
        for descriptor in list(self._streams):
            self._close_stream(descriptor)

    def reaped(self, status: int, *, how: str = "") -> None:
        """Its wait status is known. What it wrote is read to the end, but not for ever.

        `how` says it better than the status can.
        """
        if self._status is not None:
            return
        self._status, self._how = status, how
        if self.pid is not None:
            process.kill_group(self.pid)
        else:
            self._let_go_of_their_ends()
        self._drain()
        # A grandchild in a session of its own may hold the pipes as long as it likes.
        self._loop.after(_STRAGGLERS_S, self._finish)
        self._finish_if_silent()

    def _let_go_of_their_ends(self) -> None:
        self._theirs.close()
        for descriptor in self._ends:
            os.close(descriptor)

    # --- what it says ------------------------------------------------------------------------

    def _on_talk(self, mask: int) -> None:
        if mask & WRITE:
            self._write()
        if mask & READ:
            self._read_talk()

    def _read_talk(self) -> None:
        """One gulp; the loop comes back for more."""
        if self._talk is None:
            return
        try:
            received = self._talk.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            self._close_talk()
            return
        try:
            if frames := self._reader.feed(received):
                self._heard(frames)
        except IntegrityError as garbage:
            log.error("worker.garbage", pid=self.pid, why=garbage.what)
            self.kill(for_cause=True)
            self._close_talk()

    def _write(self) -> None:
        if self._talk is None:
            return
        try:
            while self._unsent:
                sent = self._talk.send(memoryview(self._unsent)[:_CHUNK_BYTES])
                del self._unsent[:sent]
        except BlockingIOError:
            if len(self._unsent) > _QUEUE_LIMIT_BYTES:
                log.error("worker.deaf", pid=self.pid, unsent_bytes=len(self._unsent))
                self.kill(for_cause=True)
        except OSError:
            self._unsent.clear()  # it is gone; what it said last is still to be read
        self._loop.watch(self._talk, READ | (WRITE if self._unsent else 0), self._on_talk)

    def _close_talk(self) -> None:
        if self._talk is not None:
            self._loop.forget(self._talk)
            self._talk.close()
            self._talk = None
            self._look_for_death(_POLLS_OF_THE_DEAD)
            self._finish_if_silent()

    def _look_for_death(self, polls: int) -> None:
        """Who closes the socket is dead or dying: see for ourselves, a zygote may be busy.

        Of one that is gone altogether only its parent can tell how; without it, it was killed.
        """
        if self._status is not None or self.pid is None:
            return
        status = process.ended(self.pid)
        if status is None and polls <= 0 and not process.exists(self.pid):
            status = signal.SIGKILL
        if status is not None:
            self.reaped(status)
        else:
            self._loop.after(_ZOMBIE_POLL_S, partial(self._look_for_death, polls - 1))

    # --- what it prints ----------------------------------------------------------------------

    def _stream(self, name: str) -> int:
        ours, theirs = os.pipe()
        os.set_blocking(ours, False)
        self._streams[ours] = (name, bytearray())
        self._loop.watch(ours, READ, partial(self._on_stream, ours))
        return theirs

    def _on_stream(self, descriptor: int, _mask: int) -> None:
        self._read_stream(descriptor)

    def _read_stream(self, descriptor: int) -> bool:
        """Whether there was something to read."""
        try:
            received = os.read(descriptor, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        name, rest = self._streams[descriptor]
        rest += received
        *lines, remainder = rest.split(b"\n")
        if not received or len(remainder) > _LINE_BYTES:
            lines, remainder = [*lines, *([remainder] if remainder else [])], bytearray()
        for line in lines:
            self._printed(name, line.decode(errors="replace"))
        rest[:] = remainder
        if not received:
            self._close_stream(descriptor)
        return bool(received)

    def _close_stream(self, descriptor: int) -> None:
        self._loop.forget(descriptor)
        os.close(descriptor)
        del self._streams[descriptor]
        self._finish_if_silent()

    # --- the end -----------------------------------------------------------------------------

    def _drain(self) -> None:
        """Everything it has written lies in our buffers now."""
        while self._talk is not None:
            before = self._reader.taken_bytes
            self._read_talk()
            if self._talk is None or self._reader.taken_bytes == before:
                break
        for descriptor in list(self._streams):
            while self._read_stream(descriptor):
                continue

    def _finish_if_silent(self) -> None:
        if self._status is not None and self._talk is None and not self._streams:
            self._finish()

    def _finish(self) -> None:
        if self._over or self._status is None:
            return
        self._over = True
        self._close_talk()
        for descriptor in list(self._streams):
            self._flush_stream(descriptor)
        how, clean = process.how_it_ended(self._status)
        self._ended(self._how or how, clean)

    def _flush_stream(self, descriptor: int) -> None:
        name, rest = self._streams[descriptor]
        if rest:
            self._printed(name, rest.decode(errors="replace"))
        self._close_stream(descriptor)
