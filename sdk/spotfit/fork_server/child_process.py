"""The agent's handle of one user process: a socket, two output pipes, its pid and its exit status.

| state     | event                                        | next                                  |
|-----------|----------------------------------------------|---------------------------------------|
| created   | `on_started(pid)`                            | running                               |
| created   | `discard()`                                  | finished, without `on_exit`           |
| created   | `on_reaped(status)`: could not be started    | draining                              |
| running   | `on_reaped(status)`, or found to be a zombie | draining                              |
| draining  | socket and pipes at end of file, or timeout  | finished, `on_exit(reason, is_clean)` |

`kill()` is valid in every state; in "created" it takes effect with `on_started`.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from spotfit.core.errors import IntegrityError
from spotfit.host import log, process
from spotfit.host.event_loop import READ, WRITE, EventLoop
from spotfit.protocol.framing import MAX_FRAME_BYTES, FrameReader, encode_frame

_CHUNK_BYTES = 256 * 1024
_MAX_LINE_BYTES = 64 * 1024  # a program may print for hours without a newline
# A progress bar overwrites its line many times a second; each state that is shown is stored.
_PROGRESS_INTERVAL_S = 1.0
# A process closes its socket some milliseconds before it is a zombie; longer than half a second
# means that its parent has reaped it, or that it has closed the socket but keeps running.
_EXIT_POLL_S = 0.02
_EXIT_POLLS = 25
# A grandchild in a session of its own survives the kill of the group and keeps the pipes open.
_OUTPUT_DRAIN_TIMEOUT_S = 1.0
# A worker that does not read for this long is stuck; the agent's memory must stay bounded.
_SEND_BUFFER_LIMIT_BYTES = 64 * 2**20


class _OutputStream:
    """Splits the output of one pipe into lines.

    Text that a carriage return overwrites is omitted, as in a terminal.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_flush_scheduled = False
        self._partial_line = bytearray()
        self._shown_progress = b""
        """The state of the unfinished line that `take_progress` returned last."""

    def feed(self, received: bytes) -> Iterator[str]:
        """Yield the lines that are complete with the received bytes."""
        self._partial_line += received
        *lines, remainder = self._partial_line.split(b"\n")
        self._partial_line = bytearray(remainder)
        for line in lines:
            yield from self._finish_line(bytes(line))
        if self.has_progress:
            # Only the last two states can be shown: the last one may be incomplete or empty.
            self._partial_line = bytearray(b"\r".join(remainder.rsplit(b"\r", 2)[-2:]))
        if len(self._partial_line) > _MAX_LINE_BYTES:
            yield from self.close()

    def close(self) -> Iterator[str]:
        """Yield the unfinished line, if there is one."""
        line, self._partial_line = bytes(self._partial_line), bytearray()
        if line:
            yield from self._finish_line(line)

    @property
    def has_progress(self) -> bool:
        """Whether the unfinished line contains a carriage return."""
        return b"\r" in self._partial_line

    def take_progress(self) -> str | None:
        """Return the current state of the unfinished line, or None if it was returned before."""
        state = _visible_text(bytes(self._partial_line))
        if state in (b"", self._shown_progress):
            return None
        self._shown_progress = state
        return state.decode(errors="replace")

    def _finish_line(self, line: bytes) -> Iterator[str]:
        text, shown = _visible_text(line), self._shown_progress
        self._shown_progress = b""
        if text != shown or not text:  # the last state of a progress bar may have been shown
            yield text.decode(errors="replace")


def _visible_text(line: bytes) -> bytes:
    """Return what a terminal shows of a line: the text after the last carriage return with text."""
    return next(filter(None, reversed(line.split(b"\r"))), b"")


class ChildProcess:
    """A user process.

    Args:
        on_messages: Called with the frames that the process has sent. Raises `IntegrityError` for
            an invalid one: that kills the process, as its own failure.
        on_line: Called with "out" or "err" and a line of output, or at most once a second with the
            state of a line that the process overwrites, such as a progress bar.
        on_exit: Called once, after all frames and lines, with the exit in words ("exited with code
            1") and whether the exit code is 0. After an invalid frame the reason says so.
        log_fields: What identifies the process in log records, such as its rank.
        frame_limit_bytes: The largest frame that it may send.
    """

    def __init__(
        self,
        loop: EventLoop,
        *,
        on_messages: Callable[[list[bytes]], None],
        on_line: Callable[[str, str], None],
        on_exit: Callable[[str, bool], None],
        log_fields: Mapping[str, object] | None = None,
        frame_limit_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self._loop = loop
        self._log_fields = dict(log_fields or {})
        self._on_messages, self._on_line, self._on_exit = on_messages, on_line, on_exit
        self.pid: int | None = None
        self.was_killed = False
        """Whether the process was alive when `kill` was called."""
        self._status: int | None = None
        self._exit_reason = ""
        self._protocol_error = ""
        """Why the process was killed, if it has sent an invalid frame."""
        self.is_kill_requested = False
        self._is_finished = False
        self._reader = FrameReader(limit_bytes=frame_limit_bytes)
        self._send_buffer = bytearray()
        self._socket: socket.socket | None = None
        self._child_socket: socket.socket | None = None
        self._streams: dict[int, _OutputStream] = {}
        self._child_pipes: list[int] = []
        self._open_error: OSError | None = None
        """Why the process cannot be started: this process has no descriptors left."""
        try:
            self._open_descriptors()
        except OSError as error:
            self._open_error = error
            self.discard()
            self._is_finished = False  # `on_reaped` reports the end

    @property
    def descriptors(self) -> tuple[int, int, int]:
        """The child's ends of its socket, standard output and standard error, in this order.

        The code that starts the process passes them on. They are closed once it is started or
        discarded. Raises `OSError` if they could not be opened.
        """
        if self._open_error is not None:
            raise self._open_error
        assert self._child_socket is not None
        stdout_fd, stderr_fd = self._child_pipes
        return self._child_socket.fileno(), stdout_fd, stderr_fd

    def send(self, body: bytes) -> None:
        """Send one frame to the process. Does not block: the event loop sends what remains.

        Allowed before the start: the process reads the frame once it runs. Dropped if the process
        has ended or closed its socket. A process that leaves more than 64 MiB unread is killed, and
        its exit counts as its own failure.
        """
        if self._socket is not None:
            self._send_buffer += encode_frame(body)
            self._flush_send_buffer()

    def on_started(self, pid: int) -> None:
        """Record that the process runs, with the id `pid`, as leader of its process group.

        Called once, by the code that started it. Closes the child's ends of the descriptors. Kills
        the process at once if `kill` was called before.
        """
        self.pid = pid
        self._close_child_ends()
        if self.is_kill_requested:
            self.was_killed = True
            process.kill_group(pid)

    def kill(self, *, as_failure: bool = False) -> None:
        """Send SIGKILL to the process and its group, now or as soon as it is started.

        Does not wait: `on_exit` reports the end. Idempotent. With `as_failure` the exit counts as
        the process's own failure (`was_killed` is not set), not as ordered by the agent.
        """
        self.is_kill_requested = True
        if self._status is None and not as_failure and not self.was_killed:
            # A process that is not started yet counts: the kill will be what ends it. One that is
            # ending, which its peers notice first, has its own exit status.
            self.was_killed = self.pid is None or (
                process.exists(self.pid) and not process.is_ending(self.pid)
            )
        if self.pid is not None and self._status is None:
            process.kill_group(self.pid)

    def discard(self) -> None:
        """Close everything of a process that was never started; `on_exit` is not called."""
        self._is_finished = True
        self._close_child_ends()
        self._close_socket()
        for descriptor in list(self._streams):
            self._close_stream(descriptor)

    def on_reaped(self, status: int, *, reason: str = "") -> None:
        """Record the wait status of `os.waitpid`, and deliver the remaining frames and lines.

        Called by the code that started or reaped the process, or that could not start it; repeated
        calls do nothing. `on_exit` is called here, or from the event loop at most a second later,
        even if a grandchild keeps the pipes open. It gets `reason`, unless that is '', instead of a
        description of the status. Kills the rest of the process group.
        """
        if self._status is not None:
            return
        self._status, self._exit_reason = status, reason
        if self.pid is not None:
            process.kill_group(self.pid)  # its children must not outlive it
        else:
            self._close_child_ends()
        # Its last frames and lines, which `on_exit` must follow, are still in the kernel's buffers.
        while self._socket is not None:
            before = self._reader.received_bytes
            self._read_socket()
            if self._socket is None or self._reader.received_bytes == before:
                break
        for descriptor in list(self._streams):
            while self._read_stream(descriptor):
                continue
        self._loop.call_later(_OUTPUT_DRAIN_TIMEOUT_S, self._finish)
        self._finish_if_drained()

    def _open_descriptors(self) -> None:
        self._socket, self._child_socket = socket.socketpair()
        self._socket.settimeout(0)
        self._child_pipes.append(self._open_stream("out"))
        self._child_pipes.append(self._open_stream("err"))
        self._loop.register(self._socket, READ, self._on_socket_ready)

    def _close_child_ends(self) -> None:
        if self._child_socket is not None:
            self._child_socket.close()
        for descriptor in self._child_pipes:
            os.close(descriptor)
        self._child_pipes.clear()

    # --- socket ------------------------------------------------------------------------------

    def _on_socket_ready(self, mask: int) -> None:
        if mask & WRITE:
            self._flush_send_buffer()
        if mask & READ:
            self._read_socket()

    def _read_socket(self) -> None:
        # One chunk per event: the loop serves other descriptors before the next.
        if self._socket is None:
            return
        try:
            received = self._socket.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            self._close_socket()
            return
        try:
            if frames := self._reader.feed(received):
                self._on_messages(frames)
        except IntegrityError as error:
            log.error("worker.protocol_error", pid=self.pid, reason=str(error), **self._log_fields)
            self._protocol_error = error.message
            self.kill(as_failure=True)
            self._close_socket()

    def _flush_send_buffer(self) -> None:
        if self._socket is None:
            return
        try:
            while self._send_buffer:
                sent = self._socket.send(memoryview(self._send_buffer)[:_CHUNK_BYTES])
                del self._send_buffer[:sent]
        except BlockingIOError:
            if len(self._send_buffer) > _SEND_BUFFER_LIMIT_BYTES:
                log.error(
                    "worker.send_buffer_full",
                    pid=self.pid,
                    unsent_bytes=len(self._send_buffer),
                    **self._log_fields,
                )
                self.kill(as_failure=True)
        except OSError:
            # The process is gone. The socket stays open: its last frames are still unread.
            self._send_buffer.clear()
        self._loop.register(
            self._socket, READ | (WRITE if self._send_buffer else 0), self._on_socket_ready
        )

    def _close_socket(self) -> None:
        if self._socket is not None:
            self._loop.unregister(self._socket)
            self._socket.close()
            self._socket = None
            self._poll_exit(_EXIT_POLLS)
            self._finish_if_drained()

    def _poll_exit(self, polls: int) -> None:
        """Look for the exit status in /proc after the process has closed its socket.

        The fork server would report it, but may be busy with an import for seconds.
        """
        if self._status is not None or self.pid is None:
            return
        status = process.zombie_wait_status(self.pid)
        if status is None and polls <= 0 and not process.exists(self.pid):
            status = signal.SIGKILL  # reaped by a parent that did not report: assume a kill
        if status is not None:
            self.on_reaped(status)
        else:
            self._loop.call_later(_EXIT_POLL_S, partial(self._poll_exit, polls - 1))

    # --- output ------------------------------------------------------------------------------

    def _open_stream(self, name: str) -> int:
        """Create a pipe; return the child's end."""
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)  # the child's end blocks, as programs expect of stdout
        self._streams[read_end] = _OutputStream(name)
        self._loop.register(read_end, READ, partial(self._on_stream, read_end))
        return write_end

    def _on_stream(self, descriptor: int, _mask: int) -> None:
        # One chunk per event, as for the socket: a process that prints must not occupy the loop.
        self._read_stream(descriptor)

    def _read_stream(self, descriptor: int) -> bool:
        """Pass complete lines to `on_line`; return whether there was something to read."""
        try:
            received = os.read(descriptor, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        stream = self._streams[descriptor]
        for line in stream.feed(received) if received else stream.close():
            self._on_line(stream.name, line)
        if not received:
            self._close_stream(descriptor)
        elif stream.has_progress and not stream.is_flush_scheduled:
            stream.is_flush_scheduled = True
            self._loop.call_later(_PROGRESS_INTERVAL_S, partial(self._show_progress, stream))
        return bool(received)

    def _show_progress(self, stream: _OutputStream) -> None:
        stream.is_flush_scheduled = False
        if stream.has_progress and (state := stream.take_progress()) is not None:
            self._on_line(stream.name, state)

    def _close_stream(self, descriptor: int) -> None:
        self._loop.unregister(descriptor)
        os.close(descriptor)
        del self._streams[descriptor]
        self._finish_if_drained()

    # --- exit --------------------------------------------------------------------------------

    def _finish_if_drained(self) -> None:
        if self._status is not None and self._socket is None and not self._streams:
            self._finish()

    def _finish(self) -> None:
        if self._is_finished or self._status is None:
            return
        self._is_finished = True
        self._close_socket()
        for descriptor in list(self._streams):
            stream = self._streams[descriptor]
            for line in stream.close():
                self._on_line(stream.name, line)
            self._close_stream(descriptor)
        description, is_clean = process.describe_exit(self._status)
        if self._protocol_error and not self.was_killed:
            description = f"sent an invalid message: {self._protocol_error}"
            is_clean = False
        self._on_exit(self._exit_reason or description, is_clean)
