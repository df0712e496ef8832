"""A vault: keeps copies of what a peer's workers have saved, and gives out what lies here.

Threads of its own, one a connection and one that sends: the agent never waits for a gigabyte.
"""

from __future__ import annotations

import queue
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from spotfit.checkpoint.peer import PATIENCE_S, connected
from spotfit.checkpoint.segment import Segment
from spotfit.checkpoint.snapshot import write_index
from spotfit.core.clock import Clock
from spotfit.core.codec import decoder, encode
from spotfit.core.errors import IntegrityError
from spotfit.host import frames, log
from spotfit.model.holding import Part
from spotfit.model.vault import COPY_BYTES_PER_S, Fetch, Keep, Look, ToVault
from spotfit.ship.certificate import Contexts

_PIECE_BYTES = 4 * 2**20
_GUESTS = 32
_BACKLOG = 1024
"""So many more wait for a place: a rank that restores comes with several questions at once."""
_GREETING_S = 10.0
"""Who has a place and says nothing for so long loses it."""
_OF_EACH_RANK = 2
_questions: msgspec.json.Decoder[ToVault] = decoder(ToVault)  # type: ignore[arg-type]

Find = Callable[[Part], Path | None]
"""Where a part lies on this machine; None where it does not."""

CopyTold = Callable[[int, int, int, str], None]
"""Told of a copy that is kept: of which round, rank and step, and at which vault. By a thread."""


class Vault:
    """Listens from the moment it is made until it is closed."""

    def __init__(self, folder: Path, find: Find, *, tls: Contexts, host: str, clock: Clock) -> None:
        """Copies are kept in `folder`. Raises `OSError` where `host` is no address of ours."""
        self.folder = folder
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
        self._due: queue.SimpleQueue[tuple[Path, str] | None] = queue.SimpleQueue()
        for work in (self._listen, self._send_all):
            threading.Thread(target=work, name="spotfit-vault", daemon=True).start()

    def close(self) -> None:
        """Listen and send no more."""
        self._due.put(None)
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def copy(self, segment: Path, to: str) -> None:
        """Have the vault at `to` keep a copy, as soon as those before are sent.

        A segment that is written anew meanwhile is no loss: its next copy is newer.
        """
        self._due.put((segment, to))

    # --- sending -----------------------------------------------------------------------------

    def _send_all(self) -> None:
        while (due := self._due.get()) is not None:
            segment, to = due
            try:
                step = self._send(segment, to)
            except (OSError, IntegrityError) as failed:
                log.warning("vault.not_copied", segment=segment.name, to=to, why=str(failed))
            else:
                self._tell(segment, step, to)

    def _tell(self, segment: Path, step: int, to: str) -> None:
        if self.kept is not None:
            round_, rank, *_ = segment.name.split("-")
            self.kept(int(round_), int(rank), step, to)

    def _send(self, path: Path, to: str) -> int:
        """Of which step it is."""
        with Segment.open(path) as segment, connected(to, self._tls.client) as wire:
            before, step = segment.seal, segment.index().step
            frames.write(wire, encode(Keep(path.name, len(segment.whole))))
            began = self._clock.now()
            for at in range(0, len(segment.whole), _PIECE_BYTES):
                frames.write(wire, bytes(segment.whole[at : at + _PIECE_BYTES]))
                self._clock.wait(began + at / COPY_BYTES_PER_S - self._clock.now())
            if segment.seal != before:
                raise IntegrityError("it was written anew while it was sent")
            frames.write(wire, b"")
            if frames.read(wire) is None:
                raise IntegrityError("the other machine did not keep it")
            return step

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
        self.folder.mkdir(mode=0o700, exist_ok=True)  # not what it lies in: our agent may be gone
        coming = self.folder / f"{Path(keep.name).name}.coming"
        try:
            with coming.open("wb") as file:
                while body := frames.read(wire):
                    file.write(body)
                whole = body is not None and file.tell() == keep.size_bytes
            if whole:
                coming.replace(self.folder / Path(keep.name).name)
                free_older(self.folder, Path(keep.name).name)
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


def free_older(folder: Path, kept: str) -> None:
    """Of rounds before that one nothing is needed any more, nor more than two of a rank."""
    round_, rank, *_ = kept.split("-")
    for path in folder.glob("*.segment"):
        if not path.name.startswith(f"{round_}-"):
            path.unlink(missing_ok=True)
    of_rank = folder.glob(f"{round_}-{rank}-*.segment")
    for path in sorted(of_rank, key=lambda one: one.stat().st_mtime_ns)[:-_OF_EACH_RANK]:
        path.unlink(missing_ok=True)


def read_part(path: Path, part: Part) -> Segment:
    """That part, which was there when it was looked for; raises `IntegrityError` where a later
    copy has taken its place since."""
    segment = Segment.open(path)
    index = segment.index()
    if (index.step, index.rank, index.world_size) != (part.state.step, part.rank, part.world_size):
        segment.close()
        raise IntegrityError(f"In the place of {part} lies step {index.step} by now.")
    return segment
