"""A fake agent at the other end of a worker's socket, and a `StartWorker` for tests."""

from __future__ import annotations

import socket
from typing import Any, TypeVar

import msgspec

from spotfit.core.codec import decoder, encode
from spotfit.protocol.framing import FrameReader, encode_frame
from spotfit.protocol.worker_agent import CheckpointNamed, FromWorker, StartWorker, ToWorker
from spotfit.testing.builders import a_spec
from spotfit.worker.agent_connection import AgentConnection

Frame = TypeVar("Frame")
_frames: msgspec.json.Decoder[FromWorker] = decoder(FromWorker)  # type: ignore[arg-type]


class FakeAgentConnection:
    def __init__(self) -> None:
        self._socket, self._worker_socket = socket.socketpair()
        self._reader = FrameReader()
        self.connection = AgentConnection(self._worker_socket)

    def close(self) -> None:
        self._socket.close()
        self._worker_socket.close()

    def send(self, *frames: ToWorker) -> None:
        """Send messages; the worker finds them when it reads."""
        for frame in frames:
            self._socket.sendall(encode_frame(encode(frame)))

    def name_report(
        self, n: int, name: str, ranks: tuple[int, ...] = (0,), *, base: str = "", **metrics: Any
    ) -> None:
        """Reply to the n-th report with a checkpoint name."""
        self.send(
            CheckpointNamed(
                report_index=n,
                checkpoint_name=name,
                ranks=ranks,
                metrics=msgspec.Raw(encode(metrics)),
                parent=base,
            )
        )

    def receive(self) -> list[FromWorker]:
        """Return the messages that the worker has sent so far."""
        received: list[FromWorker] = []
        while True:
            try:
                chunk = self._socket.recv(1 << 20, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return received
            received += [_frames.decode(body) for body in self._reader.feed(chunk)]

    def receive_of_type(self, frame_type: type[Frame]) -> list[Frame]:
        return [frame for frame in self.receive() if isinstance(frame, frame_type)]


def make_start(**changes: Any) -> StartWorker:
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
        "code_bundle": {},
        "spec": msgspec.Raw(encode(a_spec())),
    }
    return StartWorker(**(plain | changes))
