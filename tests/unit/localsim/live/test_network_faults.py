"""The fault proxy injects the configured faults and forwards all other requests unchanged."""

import contextlib
import http.client
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from spotfit.testing.builders import ManualClock
from spotfit_localsim.live.network_faults import (
    BucketRegion,
    NetworkFaults,
    RequestFaultInjector,
    create_proxy,
    fetch_request_counts,
    hold_writes,
    set_faults,
    set_region,
    start_stall,
)

TIMEOUT_S = 30.0


class EchoHandler(BaseHTTPRequestHandler):
    """A server that records its requests and returns their body."""

    protocol_version = "HTTP/1.1"
    requests: list[tuple[str, str, bytes]]

    def respond(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.requests.append((self.command, self.path, body))
        self.send_response(201)
        self.send_header("ETag", '"7"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_HEAD = respond  # noqa: N815  # names of the base class

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    EchoHandler.requests = []
    with ThreadingHTTPServer(("127.0.0.1", 0), EchoHandler) as http_server:
        threading.Thread(target=http_server.serve_forever).start()
        yield http_server
        http_server.shutdown()


@pytest.fixture
def address(server: ThreadingHTTPServer) -> Iterator[str]:
    with create_proxy(("127.0.0.1", server.server_address[1])) as proxy:
        threading.Thread(target=proxy.serve_forever).start()
        yield f"127.0.0.1:{proxy.server_address[1]}"
        proxy.shutdown()


def send_request(
    address: str, method: str = "PUT", body: bytes = b"hello"
) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(address)
    try:
        connection.request(method, "/bucket/key?x=1", body)
        response = connection.getresponse()
        response.read_body = response.read()  # type: ignore[attr-defined]  # for the tests below
        return response
    finally:
        connection.close()


def test_without_faults_requests_are_forwarded(address: str) -> None:
    response = send_request(address)
    assert (response.status, response.headers["ETag"]) == (201, '"7"')
    assert response.read_body == b"hello"  # type: ignore[attr-defined]  # see send_request
    assert EchoHandler.requests == [("PUT", "/bucket/key?x=1", b"hello")]


def test_content_length_of_a_head_response_is_forwarded(address: str) -> None:
    assert send_request(address, "HEAD", b"12345").headers["Content-Length"] == "5"


def test_requests_are_counted_by_method(address: str) -> None:
    for method in ("GET", "PUT", "PUT"):
        send_request(address, method)
    assert fetch_request_counts(address) == {"GET": 1, "PUT": 2}
    assert fetch_request_counts(address) == {"GET": 1, "PUT": 2}, (
        "the query of the counts is not counted"
    )


def test_refused_request_does_not_reach_the_server(address: str) -> None:
    set_faults(f"http://{address}", NetworkFaults(refusal_probability=1.0))
    assert send_request(address).status == 503
    assert EchoHandler.requests == []
    set_faults(f"http://{address}", NetworkFaults())
    assert send_request(address).status == 201


def test_request_with_lost_response_is_executed(address: str) -> None:
    set_faults(f"http://{address}", NetworkFaults(lost_response_probability=1.0))
    with pytest.raises(http.client.RemoteDisconnected):
        send_request(address)
    assert len(EchoHandler.requests) == 1


@pytest.mark.parametrize(
    ("faults", "status"),
    [
        (NetworkFaults(throttled_probability=1.0), 429),
        (NetworkFaults(denied_probability=1.0), 403),
    ],
)
def test_throttled_or_denied_request_does_not_reach_the_server(
    address: str, faults: NetworkFaults, status: int
) -> None:
    set_faults(f"http://{address}", faults)
    assert send_request(address).status == status
    assert EchoHandler.requests == []


def test_reset_request_is_executed(address: str) -> None:
    set_faults(f"http://{address}", NetworkFaults(reset_probability=1.0))
    with pytest.raises(ConnectionResetError):
        send_request(address)
    assert len(EchoHandler.requests) == 1


def send_create(address: str) -> http.client.HTTPResponse:
    with contextlib.closing(http.client.HTTPConnection(address)) as connection:
        connection.request("PUT", "/bucket/key", b"hello", {"If-None-Match": "*"})
        response = connection.getresponse()
        response.read()
        return response


@pytest.mark.parametrize(
    ("faults", "executed"),
    [
        (NetworkFaults(conflict_probability=1.0), 0),
        (NetworkFaults(late_conflict_probability=1.0), 1),
    ],
)
def test_conflict_hits_only_conditional_creates(
    address: str, faults: NetworkFaults, executed: int
) -> None:
    set_faults(f"http://{address}", faults)
    assert send_create(address).status == 409
    assert len(EchoHandler.requests) == executed
    assert send_request(address).status == 201


def test_damaged_body_has_a_changed_bit_or_is_a_prefix() -> None:
    injector = RequestFaultInjector(ManualClock())
    injector.set_faults(NetworkFaults(flipped_probability=1.0))
    flipped = int.from_bytes(injector.damage(b"body")) ^ int.from_bytes(b"body")
    assert flipped.bit_count() == 1
    assert injector.damage(b"") == b""
    injector.set_faults(NetworkFaults(truncated_probability=1.0))
    assert {injector.damage(b"ab") for _ in range(40)} == {b"", b"a", b"ab"}


def test_only_read_objects_are_damaged(server: ThreadingHTTPServer, address: str) -> None:
    set_faults(f"http://{address}", NetworkFaults(flipped_probability=1.0))
    bodies = {}
    for method, path in (("PUT", "/b/k"), ("GET", "/b?list-type=2"), ("GET", "/b/k")):
        with contextlib.closing(http.client.HTTPConnection(address)) as connection:
            connection.request(method, path, b"hello")
            bodies[method, path] = connection.getresponse().read()
    damaged = [request for request, body in bodies.items() if body != b"hello"]
    assert damaged == [("GET", "/b/k")]


def test_stalled_request_is_executed_later() -> None:
    clock = ManualClock()
    proxy = RequestFaultInjector(clock)
    proxy.set_faults(NetworkFaults(stall_probability=1.0, stall_s=25.0))
    assert proxy.draw_outcome() == "forwarded"
    assert clock.now() == pytest.approx(25.0)


class Gate(ManualClock):
    """A clock whose waits end when the test opens the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.opened = threading.Event(), threading.Event()

    def wait(self, seconds: float) -> None:
        self.reached.set()
        assert self.opened.wait(TIMEOUT_S)


def test_stall_delays_every_request(server: ThreadingHTTPServer) -> None:
    gate, statuses = Gate(), []
    with create_proxy(("127.0.0.1", server.server_address[1]), gate) as proxy:
        threading.Thread(target=proxy.serve_forever).start()
        address = f"127.0.0.1:{proxy.server_address[1]}"
        start_stall(f"http://{address}", 600.0)
        request_thread = threading.Thread(
            target=lambda: statuses.append(send_request(address).status)
        )
        request_thread.start()
        assert gate.reached.wait(TIMEOUT_S)
        assert EchoHandler.requests == []
        set_faults(f"http://{address}", NetworkFaults())
        gate.opened.set()
        request_thread.join(TIMEOUT_S)
        assert statuses == [201]
        proxy.shutdown()


def test_held_writes_wait_until_released(
    server: ThreadingHTTPServer,
) -> None:
    gate, statuses = Gate(), []
    with create_proxy(("127.0.0.1", server.server_address[1]), gate) as proxy:
        threading.Thread(target=proxy.serve_forever).start()
        address = f"127.0.0.1:{proxy.server_address[1]}"
        hold_writes(f"http://{address}", "bucket")
        request_thread = threading.Thread(
            target=lambda: statuses.append(send_request(address).status)
        )
        request_thread.start()
        assert gate.reached.wait(TIMEOUT_S)
        assert send_request(address, "GET").status == 201, "reads are not held"
        assert [method for method, *_ in EchoHandler.requests] == ["GET"]
        hold_writes(f"http://{address}", "another")
        gate.opened.set()
        request_thread.join(TIMEOUT_S)
        assert statuses == [201]
        proxy.shutdown()


def test_client_timeout_does_not_break_the_proxy(server: ThreadingHTTPServer) -> None:
    gate = Gate()
    with create_proxy(("127.0.0.1", server.server_address[1]), gate) as proxy:
        threading.Thread(target=proxy.serve_forever).start()
        host, port = "127.0.0.1", proxy.server_address[1]
        start_stall(f"http://{host}:{port}", 600.0)
        with socket.create_connection((host, port)) as client_socket:
            client_socket.sendall(b"PUT /bucket/key HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello")
            assert gate.reached.wait(TIMEOUT_S)
        set_faults(f"http://{host}:{port}", NetworkFaults())
        gate.opened.set()
        assert send_request(f"{host}:{port}").status == 201
        proxy.shutdown()


def sign_for(region: str) -> dict[str, str]:
    credential = f"key/20260101/{region}/s3/aws4_request"
    return {"Authorization": f"AWS4-HMAC-SHA256 Credential={credential}, Signature=0"}


def request_signed(address: str, headers: dict[str, str]) -> tuple[int, str, bytes]:
    """Return the status, the region in the header, and the body."""
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=TIMEOUT_S)
    with contextlib.closing(connection):
        connection.request("GET", "/bucket", headers=headers)
        response = connection.getresponse()
        return response.status, response.getheader("x-amz-bucket-region", ""), response.read()


def test_bucket_answers_requests_for_another_region_as_s3_does(address: str) -> None:
    set_region(address, BucketRegion("eu-west-1"))
    status, region, body = request_signed(address, sign_for("us-east-1"))
    assert (status, region) == (400, "eu-west-1")
    assert b"<Code>AuthorizationHeaderMalformed</Code>" in body
    assert request_signed(address, sign_for("eu-west-1"))[0] == 201, "forwarded"


@pytest.mark.parametrize(("announced", "region"), [(True, "eu-west-1"), (False, "")])
def test_request_without_credentials_shows_the_region(
    address: str, announced: bool, region: str
) -> None:
    set_region(address, BucketRegion("eu-west-1", is_announced=announced))
    assert request_signed(address, {})[:2] == (403, region)


def test_same_seed_gives_the_same_faults() -> None:
    outcomes = []
    for _ in range(2):
        clock = ManualClock()
        waited: list[float] = []
        clock.wait = waited.append  # type: ignore[method-assign, assignment]  # counts instead
        proxy = RequestFaultInjector(clock)
        proxy.set_faults(
            NetworkFaults(
                refusal_probability=0.3,
                lost_response_probability=0.2,
                slow_probability=0.5,
                slow_latency_s=2.0,
                seed=9,
            )
        )
        outcomes.append(([proxy.draw_outcome() for _ in range(100)], waited))
    assert outcomes[0] == outcomes[1]
    assert set(outcomes[0][0]) == {"refused", "response_lost", "forwarded"}
    assert 20 < len(outcomes[0][1]) < 80
