"""The wire is as bad as it was told, by dice, and passes everything else on unchanged."""

import http.client
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from spotfit.testing.builders import ManualClock
from spotfit_localsim.live.network_faults import (
    NetworkFaults,
    RequestFaultInjector,
    create_proxy,
    fetch_request_counts,
    hold_writes,
    set_faults,
    start_stall,
)

PATIENCE_S = 30.0


class Echo(BaseHTTPRequestHandler):
    """A server that remembers what it was asked."""

    protocol_version = "HTTP/1.1"
    asked: list[tuple[str, str, bytes]]

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.asked.append((self.command, self.path, body))
        self.send_response(201)
        self.send_header("ETag", '"7"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_HEAD = answer  # noqa: N815  # as its base wants

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    Echo.asked = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as made:
        threading.Thread(target=made.serve_forever).start()
        yield made
        made.shutdown()


@pytest.fixture
def address(server: ThreadingHTTPServer) -> Iterator[str]:
    with create_proxy(("127.0.0.1", server.server_address[1])) as wire:
        threading.Thread(target=wire.serve_forever).start()
        yield f"127.0.0.1:{wire.server_address[1]}"
        wire.shutdown()


def ask(address: str, method: str = "PUT", body: bytes = b"hello") -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(address)
    try:
        connection.request(method, "/bucket/key?x=1", body)
        answer = connection.getresponse()
        answer.read_body = answer.read()  # type: ignore[attr-defined]  # for the tests below
        return answer
    finally:
        connection.close()


def test_without_faults_requests_are_forwarded(address: str) -> None:
    answer = ask(address)
    assert (answer.status, answer.headers["ETag"]) == (201, '"7"')
    assert answer.read_body == b"hello"  # type: ignore[attr-defined]  # see ask
    assert Echo.asked == [("PUT", "/bucket/key?x=1", b"hello")]


def test_the_length_of_what_is_not_sent_passes_too(address: str) -> None:
    assert ask(address, "HEAD", b"12345").headers["Content-Length"] == "5"


def test_it_counts_what_it_was_asked_for_by_kind(address: str) -> None:
    for method in ("GET", "PUT", "PUT"):
        ask(address, method)
    assert fetch_request_counts(address) == {"GET": 1, "PUT": 2}
    assert fetch_request_counts(address) == {"GET": 1, "PUT": 2}, (
        "and not how often it was asked that"
    )


def test_refused_request_does_not_reach_the_server(address: str) -> None:
    set_faults(f"http://{address}", NetworkFaults(refusal_probability=1.0))
    assert ask(address).status == 503
    assert Echo.asked == []
    set_faults(f"http://{address}", NetworkFaults())
    assert ask(address).status == 201


def test_request_with_lost_response_is_executed(address: str) -> None:
    set_faults(f"http://{address}", NetworkFaults(lost_response_probability=1.0))
    with pytest.raises(http.client.RemoteDisconnected):
        ask(address)
    assert len(Echo.asked) == 1


def test_stalled_request_is_executed_later() -> None:
    clock = ManualClock()
    wire = RequestFaultInjector(clock)
    wire.set_faults(NetworkFaults(stall_probability=1.0, stall_s=25.0))
    assert wire.draw_outcome() == "forwarded"
    assert clock.now() == pytest.approx(25.0)


class Gate(ManualClock):
    """Whoever waits on it goes on when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.opened = threading.Event(), threading.Event()

    def wait(self, seconds: float) -> None:
        self.reached.set()
        assert self.opened.wait(PATIENCE_S)


def test_stall_delays_every_request(server: ThreadingHTTPServer) -> None:
    gate, answers = Gate(), []
    with create_proxy(("127.0.0.1", server.server_address[1]), gate) as wire:
        threading.Thread(target=wire.serve_forever).start()
        address = f"127.0.0.1:{wire.server_address[1]}"
        start_stall(f"http://{address}", 600.0)
        asking = threading.Thread(target=lambda: answers.append(ask(address).status))
        asking.start()
        assert gate.reached.wait(PATIENCE_S)
        assert Echo.asked == []
        set_faults(f"http://{address}", NetworkFaults())
        gate.opened.set()
        asking.join(PATIENCE_S)
        assert answers == [201]
        wire.shutdown()


def test_held_writes_wait_until_released(
    server: ThreadingHTTPServer,
) -> None:
    gate, answers = Gate(), []
    with create_proxy(("127.0.0.1", server.server_address[1]), gate) as wire:
        threading.Thread(target=wire.serve_forever).start()
        address = f"127.0.0.1:{wire.server_address[1]}"
        hold_writes(f"http://{address}", "bucket")
        asking = threading.Thread(target=lambda: answers.append(ask(address).status))
        asking.start()
        assert gate.reached.wait(PATIENCE_S)
        assert ask(address, "GET").status == 201, "what only reads passes"
        assert [method for method, *_ in Echo.asked] == ["GET"]
        hold_writes(f"http://{address}", "another")
        gate.opened.set()
        asking.join(PATIENCE_S)
        assert answers == [201]
        wire.shutdown()


def test_client_timeout_does_not_break_the_proxy(server: ThreadingHTTPServer) -> None:
    gate = Gate()
    with create_proxy(("127.0.0.1", server.server_address[1]), gate) as wire:
        threading.Thread(target=wire.serve_forever).start()
        host, port = "127.0.0.1", wire.server_address[1]
        start_stall(f"http://{host}:{port}", 600.0)
        with socket.create_connection((host, port)) as impatient:
            impatient.sendall(b"PUT /bucket/key HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello")
            assert gate.reached.wait(PATIENCE_S)
        set_faults(f"http://{host}:{port}", NetworkFaults())
        gate.opened.set()
        assert ask(f"{host}:{port}").status == 201
        wire.shutdown()


def test_same_seed_gives_the_same_faults() -> None:
    fates = []
    for _ in range(2):
        clock = ManualClock()
        waited: list[float] = []
        clock.wait = waited.append  # type: ignore[method-assign, assignment]  # counts instead
        wire = RequestFaultInjector(clock)
        wire.set_faults(
            NetworkFaults(
                refusal_probability=0.3,
                lost_response_probability=0.2,
                slow_probability=0.5,
                slow_latency_s=2.0,
                seed=9,
            )
        )
        fates.append(([wire.draw_outcome() for _ in range(100)], waited))
    assert fates[0] == fates[1]
    assert set(fates[0][0]) == {"refused", "response_lost", "forwarded"}
    assert 20 < len(fates[0][1]) < 80
