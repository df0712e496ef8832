"""The agent's end of a worker's wire, over a real socket pair, and sessions that speak with it."""

from __future__ import annotations

import socket
from typing import Any, TypeVar

import msgspec

from spotfit.core.codec import decoder, encode
from spotfit.host.frames import FrameReader, framed
from spotfit.model.wire import FromWorker, Named, Start, ToWorker
from spotfit.worker.talk import Talk

Frame = TypeVar("Frame")
_frames: msgspec.json.Decoder[FromWorker] = decoder(FromWorker)  # type: ignore[arg-type]


class AgentEnd:
    def __init__(self) -> None:
        self._wire, self._theirs = socket.socketpair()
        self._reader = FrameReader()
        self.talk = Talk(self._theirs)

    def close(self) -> None:
        self._wire.close()
        self._theirs.close()

    def say(self, *frames: ToWorker) -> None:
        """Before the worker waits for it: it will find it there."""
        for frame in frames:
            self._wire.sendall(framed(encode(frame)))

    def name(
        self, n: int, name: str, ranks: tuple[int, ...] = (0,), *, base: str = "", **metrics: Any
    ) -> None:
        """Answer the n-th report."""
        self.say(Named(n, name, ranks, msgspec.Raw(encode(metrics)), base))

    def heard(self) -> list[FromWorker]:
        """What the worker has said until now."""
        said: list[FromWorker] = []
        while True:
            try:
                chunk = self._wire.recv(1 << 20, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return said
            said += [_frames.decode(body) for body in self._reader.feed(chunk)]

    def heard_of(self, kind: type[Frame]) -> list[Frame]:
        return [frame for frame in self.heard() if isinstance(frame, kind)]


def start(**changes: Any) -> Start:
    plain: dict[str, Any] = {
        "run_id": "r",
        "run_name": "run",
        "round": 1,
        "rank": 0,
        "local_rank": 0,
        "world_size": 2,
        "local_world_size": 2,
        "node_rank": 0,
        "host": "127.0.0.1",
        "storage_url": "",
        "framework": "none",
        "framework_options": {},
        "luggage": {},
    }
    return Start(**(plain | changes))
