"""ChildProcess: all messages and lines are delivered before the exit."""

import os
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from spotfit.core.errors import IntegrityError
from spotfit.fork_server import child_process as children
from spotfit.fork_server.child_process import ChildProcess
from spotfit.host.event_loop import EventLoop
from spotfit.protocol.framing import encode_frame
from tests.unit.agent.transports import SkippableClock, run_loop_until
from tests.unit.host.descriptors import no_free_descriptors


class Recorder:
    """Records messages, lines and the exit in order."""

    def __init__(self) -> None:
        self.all: list[object] = []

    def frames(self, frames: list[bytes]) -> None:
        self.all += frames

    def line(self, stream: str, text: str) -> None:
        self.all.append((stream, text))

    def end(self, how: str, _clean: bool) -> None:
        self.all.append(how)


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    loop = EventLoop(SkippableClock())
    yield loop
    loop.close()


def _was_killed(recorder: Recorder) -> bool:
    return bool(recorder.all == ["was killed by SIGKILL"])


def make_child(loop: EventLoop) -> tuple[ChildProcess, Recorder]:
    recorder = Recorder()
    return ChildProcess(
        loop, on_messages=recorder.frames, on_line=recorder.line, on_exit=recorder.end
    ), recorder


def fork_child(child: ChildProcess, program: Callable[[socket.socket], object]) -> int:
    """Fork a process that holds the child's descriptors and runs `program`."""
    sock, out, stderr_fd = child.descriptors
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        os.dup2(out, 1)
        os.dup2(stderr_fd, 2)
        os.closerange(out, out + 1)
        os.closerange(stderr_fd, stderr_fd + 1)
        try:
            program(socket.socket(fileno=sock))
        finally:
            os._exit(7)
    os.setpgid(pid, pid)
    child.on_started(pid)
    return pid


def notify_reaped(child: ChildProcess, pid: int) -> None:
    child.on_reaped(os.waitpid(pid, 0)[1])


def test_messages_and_lines_are_delivered_before_the_exit(loop: EventLoop) -> None:
    child, recorder = make_child(loop)

    def program(sock: socket.socket) -> None:
        os.write(1, b"a line\nhalf a line")
        sock.sendall(encode_frame(b"one") + encode_frame(b"two"))
        os.kill(os.getpid(), 9)

    notify_reaped(child, fork_child(child, program))
    run_loop_until(loop, lambda: bool(recorder.all) and recorder.all[-1] == "was killed by SIGKILL")
    assert set(recorder.all[:-1]) == {b"one", b"two", ("out", "a line"), ("out", "half a line")}
    assert len(recorder.all) == 5


def test_an_exit_is_detected_without_the_fork_server(loop: EventLoop) -> None:
    child, recorder = make_child(loop)
    pid = fork_child(child, lambda _: os._exit(3))
    run_loop_until(loop, lambda: recorder.all == ["exited with code 3"])
    os.waitpid(pid, 0)


def test_a_grandchild_in_the_group_is_killed(loop: EventLoop) -> None:
    child, recorder = make_child(loop)

    def program(_: socket.socket) -> None:
        if os.fork() == 0:
            os.read(os.pipe()[0], 1)  # blocks, and holds the pipes
        os._exit(0)

    notify_reaped(child, fork_child(child, program))
    run_loop_until(loop, lambda: recorder.all == ["exited with code 0"])


def test_a_grandchild_in_another_session_does_not_delay_the_exit(loop: EventLoop) -> None:
    child, recorder = make_child(loop)
    read_end, write_end = os.pipe()

    def program(_: socket.socket) -> None:
        grandchild_pid = os.fork()
        if grandchild_pid == 0:
            os.setsid()
            os.write(write_end, f"{os.getpid()}\n".encode())
            os.read(os.pipe()[0], 1)
        os.read(read_end, 0)
        os._exit(0)

    pid = fork_child(child, program)
    grandchild = int(os.read(read_end, 100))
    notify_reaped(child, pid)
    assert recorder.all == []
    assert isinstance(loop.clock, SkippableClock)
    loop.clock.skipped_s += 1.1
    loop.run_once(0)
    assert recorder.all == ["exited with code 0"]
    os.kill(grandchild, 9)
    os.close(read_end)
    os.close(write_end)


def test_a_process_killed_before_its_start_is_killed_at_its_start(loop: EventLoop) -> None:
    child, recorder = make_child(loop)
    child.kill()
    notify_reaped(child, fork_child(child, lambda sock: sock.recv(1)))
    run_loop_until(loop, lambda: recorder.all == ["was killed by SIGKILL"])


def test_was_killed_distinguishes_orders_from_failures(loop: EventLoop) -> None:
    for for_cause in (False, True):
        child, recorder = make_child(loop)
        pid = fork_child(child, lambda sock: sock.recv(1))
        child.kill(as_failure=for_cause)
        notify_reaped(child, pid)
        run_loop_until(loop, partial(_was_killed, recorder))
        assert child.was_killed is not for_cause


def test_messages_sent_before_the_start_are_received(loop: EventLoop) -> None:
    child, recorder = make_child(loop)
    child.send(b"x" * 1_000_000)

    def program(sock: socket.socket) -> None:
        left = 1_000_004
        while left:
            left -= len(sock.recv(left))
        os._exit(0)

    pid = fork_child(child, program)
    run_loop_until(loop, lambda: recorder.all == ["exited with code 0"])
    os.waitpid(pid, 0)


def test_a_process_that_sends_invalid_frames_is_killed(loop: EventLoop) -> None:
    child, recorder = make_child(loop)

    def program(sock: socket.socket) -> None:
        sock.sendall(b"\xff" * 100)
        os.read(os.pipe()[0], 1)

    pid = fork_child(child, program)
    run_loop_until(loop, lambda: bool(recorder.all))
    os.waitpid(pid, 0)
    [reason] = recorder.all
    assert str(reason).startswith("sent an invalid message: A message between processes")
    assert not child.was_killed, "it failed before it was killed"


def test_a_message_that_the_owner_rejects_ends_the_process_with_its_reason(
    loop: EventLoop, caplog: pytest.LogCaptureFixture
) -> None:
    ends: list[tuple[str, bool]] = []

    def reject(_: list[bytes]) -> None:
        raise IntegrityError("'at_gate' is invalid.")

    child = ChildProcess(
        loop,
        on_messages=reject,
        on_line=print,
        on_exit=lambda how, is_clean: ends.append((how, is_clean)),
        log_fields={"rank": 3},
    )

    def program(sock: socket.socket) -> None:
        sock.sendall(encode_frame(b"any"))
        os._exit(0)

    notify_reaped(child, fork_child(child, program))
    run_loop_until(loop, lambda: bool(ends))
    assert ends == [("sent an invalid message: 'at_gate' is invalid.", False)]
    [record] = caplog.records
    assert (record.message, vars(record)["rank"]) == ("worker.protocol_error", 3)


def test_a_frame_above_the_limit_of_the_process_is_rejected(loop: EventLoop) -> None:
    recorder = Recorder()
    child = ChildProcess(
        loop,
        on_messages=recorder.frames,
        on_line=recorder.line,
        on_exit=recorder.end,
        frame_limit_bytes=10,
    )
    notify_reaped(child, fork_child(child, lambda sock: sock.sendall(encode_frame(b"x" * 11))))
    run_loop_until(loop, lambda: bool(recorder.all))
    assert "has 11 bytes, which exceeds the limit of 10" in str(recorder.all[0])


def test_without_free_descriptors_the_process_cannot_be_started_and_ends(loop: EventLoop) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with no_free_descriptors(keep=3):
        child, recorder = make_child(loop)
        with pytest.raises(OSError, match="Too many open files"):
            _ = child.descriptors
    child.send(b"is dropped")
    child.on_reaped(9, reason="could not be started")
    assert recorder.all == ["could not be started"]
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_process_that_never_reads_is_killed(
    loop: EventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "_SEND_BUFFER_LIMIT_BYTES", 1000)
    child, recorder = make_child(loop)
    pid = fork_child(child, lambda _: os.read(os.pipe()[0], 1))
    child.send(b"x" * 10_000_000)
    run_loop_until(loop, lambda: recorder.all == ["was killed by SIGKILL"])
    os.waitpid(pid, 0)
    assert not child.was_killed


def test_a_line_without_end_is_split(loop: EventLoop) -> None:
    child, recorder = make_child(loop)
    pid = fork_child(child, lambda _: os.write(1, b"x" * 60_000))
    run_loop_until(loop, lambda: "exited with code 7" in recorder.all)
    os.waitpid(pid, 0)
    assert recorder.all[0] == ("out", "x" * 60_000)


# --- carriage returns ----------------------------------------------------------------------------


def output_child(loop: EventLoop) -> tuple[ChildProcess, Recorder, Callable[[bytes], None]]:
    """A child whose standard output is written by the returned function."""
    child, recorder = make_child(loop)

    def write(output: bytes) -> None:
        os.write(child.descriptors[1], output)
        loop.run_once(0)

    return child, recorder, write


def skip_a_second(loop: EventLoop) -> None:
    assert isinstance(loop.clock, SkippableClock)
    loop.clock.skipped_s += 1.01
    loop.run_once(0)


def test_a_progress_bar_is_shown_at_most_once_a_second(loop: EventLoop) -> None:
    child, recorder, write = output_child(loop)
    for percent in range(30):
        write(b"\r %d%%" % percent)
    assert recorder.all == []
    skip_a_second(loop)
    assert recorder.all == [("out", " 29%")]
    write(b"\r 30%\r 31%")
    write(b"\r 32%")
    skip_a_second(loop)
    skip_a_second(loop)
    assert recorder.all == [("out", " 29%"), ("out", " 32%")]
    child.discard()


def test_the_last_state_of_a_progress_bar_is_shown_once(loop: EventLoop) -> None:
    child, recorder, write = output_child(loop)
    write(b"\r 99%\r100%")
    skip_a_second(loop)
    write(b"\ndone\n")
    assert recorder.all == [("out", "100%"), ("out", "done")]
    child.discard()


def test_overwritten_text_of_a_finished_line_is_omitted(loop: EventLoop) -> None:
    child, recorder, write = output_child(loop)
    write(b"\r 1%\r 50%\r100%\nfrom Windows\r\n\r\n\n")
    expected = [("out", text) for text in ("100%", "from Windows", "", "")]
    assert recorder.all == expected
    skip_a_second(loop)
    assert recorder.all == expected
    child.discard()


def test_an_unfinished_progress_bar_uses_bounded_memory(loop: EventLoop) -> None:
    child, recorder, write = output_child(loop)
    for _ in range(10):
        write(b"\r" + b"#" * 20_000)
    assert recorder.all == []
    skip_a_second(loop)
    assert recorder.all == [("out", "#" * 20_000)]
    child.discard()
