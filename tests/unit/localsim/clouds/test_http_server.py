"""The small server: it takes requests apart, answers one at a time, and closes."""

from __future__ import annotations

import http.client
from collections.abc import Iterator

import pytest

from spotfit_localsim.clouds.http_server import WireRequest, WireResponse, WireServer, free_port

heard: list[WireRequest] = []


def answer(request: WireRequest) -> WireResponse:
    heard.append(request)
    if request.path == "/json":
        return WireResponse.json({"got": request.json()}, 201, x_kind="ours")
    return WireResponse(200, b"fine")


@pytest.fixture
def server() -> Iterator[WireServer]:
    heard.clear()
    server = WireServer(answer)
    yield server
    server.close()


@pytest.fixture
def wire(server: WireServer) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=10)
    yield connection
    connection.close()


def test_a_request_is_taken_apart(wire: http.client.HTTPConnection) -> None:
    wire.request("PUT", "/a%20b/c?x=1&y=&x=2", b"body", {"X-Thing": "7"})
    assert wire.getresponse().read() == b"fine"
    (request,) = heard
    assert (request.method, request.path, request.body) == ("PUT", "/a b/c", b"body")
    assert request.query == {"x": "1", "y": ""}
    assert request.headers["x-thing"] == "7"


def test_an_answer_in_json_has_its_type_and_headers(wire: http.client.HTTPConnection) -> None:
    wire.request("POST", "/json", b'{"a": 1}')
    reply = wire.getresponse()
    assert (reply.status, reply.read()) == (201, b'{"got":{"a":1}}')
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-kind"] == "ours"


def test_a_body_in_chunks_is_put_together(wire: http.client.HTTPConnection) -> None:
    wire.request("POST", "/", iter([b"one ", b"two"]), encode_chunked=True)
    wire.getresponse().read()
    wire.request("GET", "/again")
    wire.getresponse().read()
    assert [request.body for request in heard] == [b"one two", b""]


def test_a_port_can_be_had_again_once_it_was_closed() -> None:
    port = free_port()
    for _ in range(2):
        server = WireServer(answer, port=port)
        assert server.url == f"http://127.0.0.1:{port}"
        server.close()


@pytest.mark.real_time("an answer is kept back in real time")
def test_long_poll_returns_on_change_or_timeout() -> None:
    asked = iter(range(100))

    def held(request: WireRequest) -> WireResponse:
        better = request.path == "/soon" and next(asked) >= 2
        return WireResponse(200, b"better" if better else b"same", hold_s=0.0 if better else 0.1)

    server = WireServer(held)
    for path, told in (("/soon", b"better"), ("/never", b"same")):
        wire = http.client.HTTPConnection(server.host, server.port, timeout=10)
        wire.request("GET", path)
        assert wire.getresponse().read() == told
        wire.close()
    server.close()
