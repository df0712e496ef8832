"""A small HTTP server for simulated clouds: requests come in, a function answers, one at a time."""

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

from spotfit.host.clocks import SystemClock


@dataclass(frozen=True, slots=True)
class Request:
    """One request. Header names are in lower case, `path` is decoded."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """The body; nothing where it is empty."""
        return msgspec.json.decode(self.body) if self.body else {}


@dataclass(frozen=True, slots=True)
class Reply:
    """What is answered."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    hold_s: float = 0.0
    """For so long since the question a better answer may come: whoever asked wants to wait."""

    @classmethod
    def json(cls, told: Any, status: int = 200, **headers: str) -> Reply:
        """As JSON; `x_header=…` becomes the header `x-header`."""
        named = {name.replace("_", "-"): text for name, text in headers.items()}
        return cls(status, msgspec.json.encode(told), {"content-type": _JSON, **named})


_JSON = "application/json"
_ASK_AGAIN_S = 0.02
Answer = Callable[[Request], Reply]


class Server:
    """Answers at an address of loopback until it is closed. `lock` holds while it answers."""

    def __init__(
        self,
        answer: Answer,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        lock: threading.RLock | None = None,
    ) -> None:
        class Bound(_Handler):
            pass

        Bound.answer = staticmethod(answer)
        Bound.lock = lock or threading.RLock()
        self._server = _Quiet((host, port), Bound)
        self.host, self.port = host, int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, args=[0.05], daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def close(self) -> None:
        """Answer nobody any more."""
        self._server.shutdown()
        self._server.server_close()


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who asked is gone; there is nobody to tell."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    answer: ClassVar[Answer]
    lock: ClassVar[threading.RLock]

    def _serve(self) -> None:
        url = urlsplit(self.path)
        request = Request(
            self.command,
            unquote(url.path),
            {name: texts[0] for name, texts in parse_qs(url.query, keep_blank_values=True).items()},
            {name.lower(): text for name, text in self.headers.items()},
            self._body(),
        )
        clock = SystemClock()
        asked_at = clock.now()
        while not self._answer(request, clock.now() - asked_at):
            clock.wait(_ASK_AGAIN_S)

    def _answer(self, request: Request, waited_s: float) -> bool:
        """Whether there was an answer, or none better would come in time."""
        with self.lock:  # held until the answer is on its way: nobody ends in between
            reply = type(self).answer(request)
            if waited_s < reply.hold_s:
                return False
            self._reply(reply)
            return True

    def _reply(self, reply: Reply) -> None:
        self.send_response(reply.status)
        for name, text in reply.headers.items():
            self.send_header(name, text)
        self.send_header("content-length", str(len(reply.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.body)
        self.wfile.flush()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_PATCH = _serve  # noqa: N815  # its base's

    def _body(self) -> bytes:
        if self.headers.get("transfer-encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("content-length") or 0))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""


def free_port(host: str = "127.0.0.1") -> int:
    """A port nobody listens at, for now."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
