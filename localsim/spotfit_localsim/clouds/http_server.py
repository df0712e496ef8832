"""A small HTTP server for simulated clouds: one handler function, one request at a time."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec

from spotfit.host.system import SystemClock


class MalformedRequestError(ValueError):
    """A body or parameter that cannot be read; each cloud answers it in its own format."""


@dataclass(frozen=True, slots=True)
class WireRequest:
    """One request; header names are in lower case and `path` is decoded."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> dict[str, Any]:
        """Return the decoded body, or {} if it is empty.

        Raises `MalformedRequestError` if it is not a JSON object.
        """
        if not self.body:
            return {}
        try:
            return msgspec.json.decode(self.body, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise MalformedRequestError(f"The body is not a JSON object: {error}") from error

    def integer(self, name: str, default: int) -> int:
        """Return a parameter of the query, at least 0. Raises `MalformedRequestError` otherwise."""
        text = self.query.get(name) or str(default)
        if not is_number(text):
            raise MalformedRequestError(f"The parameter {name}={text!r} is not a number.")
        return int(text)


@dataclass(frozen=True, slots=True)
class WireResponse:
    """One response."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    hold_s: float = 0.0
    """Long polling: the handler is called again until its answer has no hold, at most this long
    after the request arrived."""

    @classmethod
    def json(cls, content: Any, status: int = 200, **headers: str) -> WireResponse:
        """Return a JSON response; `x_header=…` sets the header `x-header`."""
        named = {name.replace("_", "-"): text for name, text in headers.items()}
        return cls(status, msgspec.json.encode(content), {"content-type": _JSON, **named})


_JSON = "application/json"
# How often the handler is asked again during a long poll; see `WireResponse.hold_s`.
_RETRY_INTERVAL_S = 0.02
RequestHandler = Callable[[WireRequest], WireResponse]


class WireServer:
    """A server on loopback. It holds `lock` while it handles and answers a request."""

    def __init__(
        self,
        handler: RequestHandler,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        lock: threading.RLock | None = None,
    ) -> None:
        # The base class creates handlers itself: parameters are passed as class attributes.
        class ConfiguredRequestHandler(_WireRequestHandler):
            pass

        ConfiguredRequestHandler.request_handler = staticmethod(handler)
        ConfiguredRequestHandler.lock = lock or threading.RLock()
        self._server = _QuietServer((host, port), ConfiguredRequestHandler)
        # Port 0 lets the kernel choose a free one.
        self.host, self.port = host, int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, args=[0.05], daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def close(self) -> None:
        """Stop serving and close the socket."""
        self._server.shutdown()
        self._server.server_close()


class _QuietServer(ThreadingHTTPServer):
    # A client that keeps its connection open must not block the exit.
    daemon_threads = True
    # The default of 5 refuses connections when many agents start at once.
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of connections that the client has closed."""


class _WireRequestHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    # Buffered: headers and body leave in one packet.
    wbufsize = -1
    request_handler: ClassVar[RequestHandler]
    lock: ClassVar[threading.RLock]

    def _handle_method(self) -> None:
        try:
            request = self._read_request()
        except ValueError as error:
            # The rest of the connection cannot be interpreted; this closes it.
            self.send_error(400, explain=str(error))
            return
        clock = SystemClock()
        received_at = clock.now()
        while not self._try_answer(request, clock.now() - received_at):
            clock.wait(_RETRY_INTERVAL_S)

    def _read_request(self) -> WireRequest:
        """Raises `ValueError` for a malformed target, length or chunk."""
        url = urlsplit(self.path)
        return WireRequest(
            self.command,
            unquote(url.path),
            {name: texts[0] for name, texts in parse_qs(url.query, keep_blank_values=True).items()},
            {name.lower(): text for name, text in self.headers.items()},
            self._body(),
        )

    def _try_answer(self, request: WireRequest, waited_s: float) -> bool:
        """Send an answer; return False if the handler may have a better one later."""
        # Held until the answer is sent: `Simulator.close` takes the lock to let requests finish.
        with self.lock:
            reply = type(self).request_handler(request)
            if waited_s < reply.hold_s:
                return False
            self.send_response(reply.status)
            for name, text in reply.headers.items():
                self.send_header(name, text)
            self.send_header("content-length", str(len(reply.body)))
            self.end_headers()
            # The length of a HEAD response is that of the body which GET would return.
            if self.command != "HEAD":
                self.wfile.write(reply.body)
            self.wfile.flush()
            return True

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_PATCH = _handle_method  # noqa: N815  # names of the base class

    def _body(self) -> bytes:
        if self.headers.get("transfer-encoding", "").lower() != "chunked":
            return self.rfile.read(_parse_size(self.headers.get("content-length") or "0", base=10))
        # Chunked: each chunk is its size in hexadecimal, a line end, the bytes and a line end.
        parts = []
        while size := _parse_size(self.rfile.readline().split(b";")[0].decode().strip(), base=16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def log_message(self, *_: object) -> None:
        """Suppress the access log."""


def _parse_size(text: str, *, base: int) -> int:
    # A negative size would read until the client closes its connection.
    if not text.isalnum():
        raise ValueError(f"The size {text!r} is not a number.")
    return int(text, base)


def is_number(text: str) -> bool:
    """Whether the text is a decimal number that fits 64 bits."""
    return text.isascii() and text.isdecimal() and len(text) <= 18


def drop_nulls(value: Any) -> None:
    """Remove members that are null, which servers read as absent."""
    if isinstance(value, dict):
        for name in [name for name, one in value.items() if one is None]:
            del value[name]
    for one in value.values() if isinstance(value, dict) else value:
        if isinstance(one, dict | list):
            drop_nulls(one)


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that is unused at the moment of the call."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
