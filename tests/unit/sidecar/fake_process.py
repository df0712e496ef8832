"""A fake sidecar process: records the messages it receives, and replies when the test says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from spotfit.core.codec import encode


class FakeProcess:
    def __init__(
        self, on_frames: Callable[[list[bytes]], None], on_exit: Callable[[str, bool], None]
    ) -> None:
        self.received: list[dict[str, Any]] = []
        self.killed = False
        self._on_frames, self._on_exit = on_frames, on_exit

    def send(self, body: bytes) -> None:
        self.received.append(msgspec.json.decode(body))

    def kill(self) -> None:
        self.killed = True

    def reply(self, *messages: Any) -> None:
        self._on_frames([encode(message) for message in messages])

    def reply_bytes(self, frame: bytes) -> None:
        self._on_frames([frame])

    def exit(self, reason: str = "was killed by SIGKILL") -> None:
        self._on_exit(reason, False)

    @property
    def received_types(self) -> list[str]:
        return [message["type"] for message in self.received]


class FakeStarter:
    """Starts fake processes; `processes` has all of them in order."""

    def __init__(self) -> None:
        self.processes: list[FakeProcess] = []

    def start(
        self, on_frames: Callable[[list[bytes]], None], on_exit: Callable[[str, bool], None]
    ) -> FakeProcess:
        self.processes.append(FakeProcess(on_frames, on_exit))
        return self.processes[-1]

    @property
    def latest(self) -> FakeProcess:
        return self.processes[-1]
