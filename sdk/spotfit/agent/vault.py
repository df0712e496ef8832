"""A vault: keeps copies of what a peer's workers have saved, and gives out what lies here.

Threads of its own, one a connection and one that sends: the agent never waits for a gigabyte.
"""

from __future__ import annotations

import os
import socket
import ssl
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from spotfit.agent.copies import Copy, Due, Line, Shelf
from spotfit.checkpoint.peer import PATIENCE_S, connected
from spotfit.checkpoint.segment import Segment
from spotfit.checkpoint.snapshot import write_index
from spotfit.core.clock import Clock
from spotfit.core.codec import decoder, encode
from spotfit.core.errors import IntegrityError
from spotfit.host import frames, log
from spotfit.model.holding import Part
from spotfit.model.vault import COPY_BYTES_PER_S, KEPT, Fetch, Keep, Look, ToVault
from spotfit.ship.certificate import Contexts

_PIECE_BYTES = 4 * 2**20
_GUESTS = 32
_BACKLOG = 1024
"""So many more wait for a place: a rank that restores comes with several questions at once."""
_GREETING_S = 10.0
"""Who has a place and says nothing for so long loses it."""
_questions: msgspec.json.Decoder[ToVault] = decoder(ToVault)  # type: ignore[arg-type]

Find = Callable[[Part], Path | None]
"""Where a part lies on this machine; None where it does not."""

CopyTold = Callable[[int, int, int, str], None]
"""Told of a copy that is kept: of which round, rank and step, and at which vault. By a thread."""


class Vault:
    """Listens from the moment it is made until it is closed."""

    def __init__(self, shelf: Shelf, find: Find, *, tls: Contexts, host: str, clock: Clock) -> None:
        """Copies are kept on `shelf`. Raises `OSError` where `host` is no address of ours."""
        self._shelf = shelf
        self._find = find
        self.kept: CopyTold | None = None
        """Told of copies of ours that others keep."""
        self._tls = tls
        self._clock = clock
        family, _, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        self._listener = socket.create_server(place[:2], family=family, backlog=_BACKLOG)
        here, port = self._listener.getsockname()[:2]
        self.address = f"[{here}]:{port}" if ":" in here else f"{here}:{port}"
        self._guests = threading.BoundedSemaphore(_GUESTS)
        self._line: Line | None = Line()
        """None once nothing is sent any more."""
        self._line_moves = threading.Condition()
        for work in (self._listen, self._send_all):
            threading.Thread(target=work, name="spotfit-vault", daemon=True).start()

    def close(self) -> None:
        """Listen and send no more."""
        with self._line_moves:
            self._line = None
            self._line_moves.notify()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def copy(self, due: Due) -> None:
        """Send that copy, as soon as what was begun before is sent.

        A segment that is written anew meanwhile is no loss: its next copy is newer.
        """
        with self._line_moves:
            if self._line is not None:
                self._line.add(due)
                self._line_moves.notify()

    # --- sending -----------------------------------------------------------------------------

    def _send_all(self) -> None:
        while (due := self._next()) is not None:
            try:
                step = self._send(due)
            except (OSError, IntegrityError) as failed:
                log.warning("vault.not_copied", copy=due.copy.name, to=due.to, why=str(failed))
                self._lose(due)
            else:
                if self.kept is not None:
                    self.kept(due.copy.round, due.copy.rank, step, due.to)

    def _next(self) -> Due | None:
        """Waits for one; None once nothing is sent any more."""
        with self._line_moves:
            while self._line is not None:
                due = self._line.take()
                if due is not None:
                    return due
                self._line_moves.wait()
            return None

    def _lose(self, due: Due) -> None:
        with self._line_moves:
            if self._line is not None:
                self._line.lose(due)

    def _is_needless(self, due: Due) -> bool:
        with self._line_moves:
            return self._line is None or self._line.is_needless(due)

    def _send(self, due: Due) -> int:
        """Of which step it is."""
        with Segment.open(due.segment) as segment, connected(due.to, self._tls.client) as wire:
            step = segment.index().step
            _check(segment, due)
            frames.write(wire, encode(Keep(*due.copy, due.fellows, len(segment.whole))))
            answer = frames.read(wire)
            if answer == b"":
                self._send_bytes(wire, segment, due)
                answer = frames.read(wire)
            if answer is None:
                raise IntegrityError("the other machine did not keep it")
            return step

    def _send_bytes(self, wire: ssl.SSLSocket, segment: Segment, due: Due) -> None:
        began = self._clock.now()
        for at in range(0, len(segment.whole), _PIECE_BYTES):
            frames.write(wire, bytes(segment.whole[at : at + _PIECE_BYTES]))
            _check(segment, due)
            if self._is_needless(due):
                raise IntegrityError("a later save would not have time enough after it")
            self._clock.wait(began + at / COPY_BYTES_PER_S - self._clock.now())
        frames.write(wire, b"")

    # --- receiving ---------------------------------------------------------------------------

    def _listen(self) -> None:
        while True:
            self._guests.acquire()
            try:
                plain, _ = self._listener.accept()
            except OSError:
                return  # closed
            guest = threading.Thread(target=self._receive, args=(plain,), daemon=True)
            guest.start()

    def _receive(self, plain: socket.socket) -> None:
        try:
            plain.settimeout(_GREETING_S)
            with self._tls.server.wrap_socket(plain, server_side=True) as wire:
                body = frames.read(wire)
                wire.settimeout(PATIENCE_S)
                if body is not None:
                    self._answer(wire, _questions.decode(body))
        except (OSError, IntegrityError, msgspec.MsgspecError) as failed:
            log.debug("vault.guest", why=str(failed))
        finally:
            plain.close()
            self._guests.release()

    def _answer(self, wire: ssl.SSLSocket, question: ToVault) -> None:
        match question:
            case Keep():
                self._keep(wire, question)
            case Look(part=part):
                frames.write(wire, self._index_of(part))
            case Fetch(part=part, start=start, size_bytes=size_bytes):
                frames.write(wire, self._bytes_of(part, start, size_bytes))

    def _keep(self, wire: ssl.SSLSocket, keep: Keep) -> None:
        """Written beside, and put into its place once it is whole."""
        copy = Copy(keep.round, keep.report, keep.rank)
        if copy in self._shelf.lying:
            frames.write(wire, KEPT)
            return
        if not self._shelf.make_room(copy, keep.fellows):
            return
        frames.write(wire, b"")
        descriptor, name = tempfile.mkstemp(".coming", dir=self._shelf.folder)
        coming = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                while body := frames.read(wire):
                    file.write(body)
                whole = body is not None and file.tell() == keep.size_bytes
            if whole and self._shelf.put(coming, copy):
                frames.write(wire, b"")
        finally:
            coming.unlink(missing_ok=True)

    def _index_of(self, part: Part) -> bytes:
        path = self._find(part)
        if path is None:
            return b""
        with read_part(path, part) as segment:
            return write_index(segment.index())

    def _bytes_of(self, part: Part, start: int, size_bytes: int) -> bytes:
        path = self._find(part)
        if path is None:
            return b""
        with read_part(path, part) as segment:
            return bytes(segment.bytes[start : start + size_bytes])


def read_part(path: Path, part: Part) -> Segment:
    """That part, which was there when it was looked for; raises `IntegrityError` where a later
    copy has taken its place since."""
    segment = Segment.open(path)
    index = segment.index()
    if (index.step, index.rank, index.world_size) != (part.state.step, part.rank, part.world_size):
        segment.close()
        raise IntegrityError(f"In the place of {part} lies step {index.step} by now.")
    return segment


def _check(segment: Segment, due: Due) -> None:
    if segment.seal != due.seal:
        raise IntegrityError("it was written anew meanwhile")
