"""The worker's end of its socket: whole frames from any thread, and no life without an agent."""

import os
import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest

from spotfit.core.codec import decoder, encode
from spotfit.host import frames
from spotfit.model.wire import Committed, FromWorker, Gathered, Report, Running
from spotfit.worker.talk import Talk

_frames: msgspec.json.Decoder[FromWorker] = decoder(FromWorker)  # type: ignore[arg-type]


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    agent, worker = socket.socketpair()
    with agent, worker:
        yield agent, worker


def heard(agent: socket.socket) -> FromWorker:
    body = frames.read(agent)
    assert body is not None
    return _frames.decode(body)


@pytest.mark.parametrize("name", [None, 'odd "name"'])
def test_the_fast_path_says_what_the_slow_one_says(
    ends: tuple[socket.socket, socket.socket], name: str | None
) -> None:
    agent, worker = ends
    talk = Talk(worker)
    talk.send_report(3, b'{"loss":0.5}', name)
    talk.send(Report(3, msgspec.Raw(b'{"loss":0.5}'), name))
    fast, slow = heard(agent), heard(agent)
    assert isinstance(fast, Report)
    assert isinstance(slow, Report)
    assert (fast.n, bytes(fast.metrics), fast.dir_name) == (3, b'{"loss":0.5}', name)
    assert (slow.n, bytes(slow.metrics), slow.dir_name) == (3, b'{"loss":0.5}', name)


def test_frames_of_several_threads_never_mix(ends: tuple[socket.socket, socket.socket]) -> None:
    agent, worker = ends
    talk = Talk(worker)
    body = b'"' + b"x" * 50_000 + b'"'

    def speak() -> None:
        for number in range(20):
            talk.send_report(number, body)

    threads = [threading.Thread(target=speak) for _ in range(4)]
    for thread in threads:
        thread.start()
    came = [heard(agent) for _ in range(80)]
    for thread in threads:
        thread.join()
    assert all(isinstance(frame, Report) and bytes(frame.metrics) == body for frame in came)


def test_what_came_is_pending_and_nothing_is_awaited(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    agent, worker = ends
    talk = Talk(worker)
    assert talk.pending() == []
    sent = [Committed(f"c{n}", {}) for n in range(3)]
    for frame in sent:
        frames.write(agent, encode(frame))
    assert talk.pending() == sent
    assert talk.pending() == []


def test_next_waits_no_longer_than_told(ends: tuple[socket.socket, socket.socket]) -> None:
    agent, worker = ends
    talk = Talk(worker)
    assert talk.next(0.01) is None
    first, second = Gathered("barrier", 0), Gathered("barrier", 1)
    agent.sendall(frames.framed(encode(first)) + frames.framed(encode(second)))
    assert [talk.next(5), talk.next(None)] == [first, second]


@pytest.mark.parametrize("asking", ["speaks", "listens", "looks"])
def test_without_its_agent_a_worker_ends_at_once(asking: str) -> None:
    agent, worker = socket.socketpair()
    agent.close()
    child = os.fork()
    if child == 0:
        talk = Talk(worker)
        {
            "speaks": lambda: talk.send(Running()),
            "listens": lambda: talk.next(None),
            "looks": talk.pending,
        }[asking]()
        os._exit(0)
    worker.close()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
