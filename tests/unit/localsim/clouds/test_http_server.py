"""The HTTP server of the simulated clouds parses requests, holds long polls and closes."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from spotfit_localsim.clouds.http_server import (
    WireRequest,
    WireResponse,
    WireServer,
    drop_nulls,
    free_port,
)

received: list[WireRequest] = []


def respond(request: WireRequest) -> WireResponse:
    received.append(request)
    if request.path == "/json":
        return WireResponse.json({"got": request.json()}, 201, x_kind="test")
    return WireResponse(200, b"ok")


@pytest.fixture
def server() -> Iterator[WireServer]:
    received.clear()
    server = WireServer(respond)
    yield server
    server.close()


@pytest.fixture
def connection(server: WireServer) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=10)
    yield connection
    connection.close()


def test_request_is_parsed(connection: http.client.HTTPConnection) -> None:
    connection.request("PUT", "/a%20b/c?x=1&y=&x=2", b"body", {"X-Thing": "7"})
    assert connection.getresponse().read() == b"ok"
    (request,) = received
    assert (request.method, request.path, request.body) == ("PUT", "/a b/c", b"body")
    assert request.query == {"x": "1", "y": ""}
    assert request.headers["x-thing"] == "7"


def test_json_response_has_its_content_type_and_headers(
    connection: http.client.HTTPConnection,
) -> None:
    connection.request("POST", "/json", b'{"a": 1}')
    reply = connection.getresponse()
    assert (reply.status, reply.read()) == (201, b'{"got":{"a":1}}')
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-kind"] == "test"


def test_chunked_body_is_assembled(connection: http.client.HTTPConnection) -> None:
    connection.request("POST", "/", iter([b"one ", b"two"]), encode_chunked=True)
    connection.getresponse().read()
    connection.request("GET", "/again")
    connection.getresponse().read()
    assert [request.body for request in received] == [b"one two", b""]


def test_port_can_be_reused_after_close() -> None:
    port = free_port()
    for _ in range(2):
        server = WireServer(respond, port=port)
        assert server.url == f"http://127.0.0.1:{port}"
        server.close()


@pytest.mark.real_time("a response is held in real time")
def test_long_poll_returns_on_change_or_timeout() -> None:
    poll_numbers = iter(range(100))

    def hold_until_change(request: WireRequest) -> WireResponse:
        has_changed = request.path == "/soon" and next(poll_numbers) >= 2
        return WireResponse(
            200, b"changed" if has_changed else b"unchanged", hold_s=0.0 if has_changed else 0.1
        )

    server = WireServer(hold_until_change)
    for path, expected in (("/soon", b"changed"), ("/never", b"unchanged")):
        connection = http.client.HTTPConnection(server.host, server.port, timeout=10)
        connection.request("GET", path)
        assert connection.getresponse().read() == expected
        connection.close()
    server.close()


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nContent-Length: x",
        b"GET / HTTP/1.1\r\nContent-Length: -1",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n-1",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nsize",
        b"GET http://[ HTTP/1.1",
    ],
)
def test_malformed_request_is_answered_with_400(server: WireServer, head: bytes) -> None:
    with socket.create_connection((server.host, server.port), timeout=10) as connection:
        connection.sendall(head + b"\r\n\r\n")
        # Until the server closes the connection.
        reply = b"".join(iter(lambda: connection.recv(4096), b""))
    assert reply.startswith(b"HTTP/1.1 400 ")
    assert received == []


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"a": None, "b": {"c": None, "d": 1}}, {"b": {"d": 1}}),
        ({"a": [{"b": None}, None, 1]}, {"a": [{}, None, 1]}),
    ],
)
def test_members_that_are_null_are_dropped(value: Any, expected: Any) -> None:
    drop_nulls(value)
    assert value == expected
