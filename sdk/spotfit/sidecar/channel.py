"""The agent's side of a sidecar process: starts it with the first message, and decodes its replies.

| state   | event               | next                                                           |
|---------|---------------------|----------------------------------------------------------------|
| idle    | `send`              | running: the process is started, init and message are sent     |
| running | process exits       | exited: `on_exit` called                                       |
| running | `kill`              | running until the process exits                                |
| running | `close`             | idle: later messages and the exit of the process are ignored   |
| exited  | `send`              | exited: the message is dropped                                 |
| exited  | `forget` or `close` | idle                                                           |
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from spotfit.core.codec import DECODE_ERRORS, encode
from spotfit.core.errors import IntegrityError

MessageT = TypeVar("MessageT")


class SidecarProcess(Protocol):
    """The part of `fork_server.ChildProcess` that a sidecar needs."""

    def send(self, body: bytes) -> None:
        """Queue one frame; dropped if the process has closed its socket. Does not block."""
        ...

    def kill(self) -> None:
        """Kill the process; its exit handler is called later, once it has exited."""
        ...


StartSidecarFn = Callable[
    [Callable[[list[bytes]], None], Callable[[str, bool], None]], SidecarProcess
]
"""Starts a process, given the handlers of its frames and of its exit (reason, is_clean)."""


class SidecarChannel(Generic[MessageT]):
    """The connection to a sidecar process, of which at most one exists at a time.

    Args:
        decoder: Decodes the frames of the process.
        on_message: Called with each message, in order. Raises `IntegrityError` for one that
            contradicts the state of the owner: that kills the process, as an invalid frame does.
        on_exit: Called with the reason ("exited with code 1") after the last message.
        init: Sent to each new process before any other message.
    """

    def __init__(
        self,
        start_process: StartSidecarFn,
        *,
        decoder: msgspec.json.Decoder[MessageT],
        on_message: Callable[[MessageT], None],
        on_exit: Callable[[str], None],
        init: Any = None,
    ) -> None:
        self._start_process = start_process
        self._decoder = decoder
        self._on_message = on_message
        self._on_exit = on_exit
        self._init = init
        self._process: SidecarProcess | None = None
        self._generation = 0
        """Distinguishes the current process from those closed before, which may still report."""

    @property
    def is_started(self) -> bool:
        """Whether there is a process, running or exited, that was not closed or forgotten."""
        return self._process is not None

    def send(self, message: Any) -> None:
        """Queue a message for the process, which is started first if there is none. Does not block.

        Dropped if the process has exited and was not forgotten. If it cannot be started, `on_exit`
        is called before this returns.
        """
        if self._process is None:
            generation = self._generation
            process = self._start_process(
                partial(self._on_frames, generation), partial(self._on_process_exit, generation)
            )
            # A process that could not be started has called `on_exit`, and that perhaps `forget`.
            if generation == self._generation:
                self._process = process
                if self._init is not None:
                    process.send(encode(self._init))
        if self._process is not None:
            self._process.send(encode(message))

    def kill(self) -> None:
        """Kill the process, if there is one. `on_exit` is called later, once it has exited."""
        if self._process is not None:
            self._process.kill()

    def forget(self) -> None:
        """Ignore the current process from now on: the next message starts another one.

        The process is not killed; its later messages and its exit are not reported.
        """
        # The process may still run and send: the frames of its generation are ignored.
        self._process = None
        self._generation += 1

    def close(self) -> None:
        """Kill the process, if any, and ignore its exit. The next message starts another one.

        Does not wait for the exit. Harmless if repeated.
        """
        process = self._process
        self.forget()  # first: the exit must not reach `on_exit`
        if process is not None:
            process.kill()

    def _on_frames(self, generation: int, frames: list[bytes]) -> None:
        for frame in frames:
            # Checked for each frame: a handler may close the channel.
            if generation == self._generation:
                self._on_message(self._decode(frame))

    def _decode(self, frame: bytes) -> MessageT:
        """Raises `IntegrityError`, for which `ChildProcess` kills the process.

        User code runs in the process, and may write to its socket.
        """
        try:
            return self._decoder.decode(frame)
        except DECODE_ERRORS as error:
            raise IntegrityError(
                f"{frame[:40]!r} is not a message of spotfit: {error}",
                do="Check whether your code writes to file descriptors it has not opened.",
            ) from error

    def _on_process_exit(self, generation: int, reason: str, _is_clean: bool) -> None:  # noqa: FBT001 - see ChildProcess
        if generation == self._generation:
            self._on_exit(reason)
