"""An S3 server on loopback and a bad wire to it: requests are slow, refused, answered to nobody, or
hang for so long that whoever asked has given up when they are carried out.

Run as a process (`python -m spotfit_localsim.live.bad_wire`); its first line of output is its
address. `PUT /-/weather` changes how bad the wire is; `PUT /-/stall` lets all requests hang;
`PUT /-/hold` lets those hang that write below a folder, until another is held; `GET /-/asked` tells
how many requests of each kind there were.
"""

from __future__ import annotations

import contextlib
import http.client
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import msgspec

from spotfit.core.clock import Clock
from spotfit.core.codec import encode
from spotfit.host.clocks import SystemClock
from spotfit_localsim.dice import Dice, Stream

WEATHER = "/-/weather"
STALL = "/-/stall"
HOLD = "/-/hold"
ASKED = "/-/asked"
_LOOK_EVERY_S = 0.1
_NOT_PASSED_ON = ("connection", "host", "transfer-encoding", "keep-alive")


class Weather(msgspec.Struct, frozen=True):
    """How bad the wire is: shares of all requests."""

    refused: float = 0.0
    """Answered with 503; the server never saw them."""
    unanswered: float = 0.0
    """Done by the server, but the answer is lost: who asked cannot know."""
    slow: float = 0.0
    slow_s: float = 0.5
    stalled: float = 0.0
    """Requests that hang for `stall_s`, and are carried out then, whoever still waits for them."""
    stall_s: float = 20.0
    seed: int = 0


def fair() -> Weather:
    """Nothing happens."""
    return Weather()


class BadWire:
    """What befalls a request, by the dice of the weather's seed."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self.asked: Counter[str] = Counter()
        self._held = ""
        self.change(fair())

    def change(self, weather: Weather) -> None:
        """From now on it is like that; no stall goes on."""
        with self._lock:
            self._weather = weather
            self._stalled_until = self._clock.now()
            self._stream: Stream = Dice(weather.seed).stream("weather")

    def stall(self, seconds: float) -> None:
        """For so long every request hangs."""
        with self._lock:
            self._stalled_until = self._clock.now() + seconds

    def hold(self, folder: str) -> None:
        """Whatever writes below folders of that name hangs; '' lets all go on."""
        self._held = folder

    def sit_out_hold(self, method: str, path: str) -> None:
        """Wait while that request is to hang."""
        while method == "PUT" and (folder := self._held) and f"/{folder}/" in path:
            self._clock.wait(_LOOK_EVERY_S)

    def befall(self) -> str:
        """'refused', 'unanswered' or 'passed', perhaps after a while."""
        with self._lock:
            weather, stream = self._weather, self._stream
            slow, fate = stream.chance(weather.slow), stream.random()
            stalled = weather.stalled > 0 and stream.chance(weather.stalled)
        if slow:
            self._clock.wait(weather.slow_s)
        if stalled:
            self._clock.wait(weather.stall_s)
        self._sit_out()
        if fate < weather.refused:
            return "refused"
        return "unanswered" if fate < weather.refused + weather.unanswered else "passed"

    def _sit_out(self) -> None:
        """Wait for the end of the stall that goes on, if one does; it may end before its time."""
        while (left_s := self._stalled_until - self._clock.now()) > 0:
            self._clock.wait(min(left_s, _LOOK_EVERY_S))


class Handler(BaseHTTPRequestHandler):
    """One connection from a store's client."""

    protocol_version = "HTTP/1.1"
    wire: ClassVar[BadWire]
    server_at: ClassVar[tuple[str, int]]
    creating: ClassVar[threading.Lock] = threading.Lock()

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path == WEATHER:
            self.wire.change(msgspec.json.decode(body, type=Weather))
            self._answer(200, {}, b"")
            return
        if self.path == STALL:
            self.wire.stall(msgspec.json.decode(body, type=float))
            self._answer(200, {}, b"")
            return
        if self.path == HOLD:
            self.wire.hold(msgspec.json.decode(body, type=str))
            self._answer(200, {}, b"")
            return
        if self.path == ASKED:
            self._answer(200, {}, encode(dict(self.wire.asked)))
            return
        self.wire.asked["LIST" if "list-type=" in self.path else self.command] += 1
        self.wire.sit_out_hold(self.command, self.path)
        fate = self.wire.befall()
        if fate == "refused":
            self._answer(503, {}, b"")
            return
        status, headers, answer = self._ask_the_server(body)
        if fate == "unanswered":
            self.close_connection = True
            return
        with contextlib.suppress(ConnectionError):  # whoever asked has given up
            self._answer(status, headers, answer)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on  # noqa: N815  # as its base wants

    def _ask_the_server(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        headers = {
            name: text for name, text in self.headers.items() if name.lower() not in _NOT_PASSED_ON
        }
        connection = http.client.HTTPConnection(*self.server_at)
        # moto looks whether an object exists and then writes it: two may see that it does not.
        alone = self.creating if "If-None-Match" in self.headers else contextlib.nullcontext()
        try:
            with alone:
                connection.request(self.command, self.path, body or None, headers)
                answer = connection.getresponse()
                return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response_only(status)
        for name, text in headers.items():
            if name.lower() not in (*_NOT_PASSED_ON, "content-length"):
                self.send_header(name, text)
        length = headers.get("Content-Length") if self.command == "HEAD" else None
        self.send_header("Content-Length", length or str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""


def serve(server_at: tuple[str, int], clock: Clock | None = None) -> ThreadingHTTPServer:
    """A wire to that server; the caller lets it serve."""

    class Bound(Handler):
        wire = BadWire(clock or SystemClock())

    Bound.server_at = server_at
    return ThreadingHTTPServer(("127.0.0.1", 0), Bound)


def change_weather(address: str, weather: Weather) -> None:
    """Of the wire at that address."""
    _tell(address, WEATHER, encode(weather))


def stall(address: str, seconds: float) -> None:
    """Let every request hang for so long at the wire at that address."""
    _tell(address, STALL, encode(seconds))


def hold(address: str, folder: str) -> None:
    """Let whatever writes below folders of that name hang at the wire there; '' lets all go on."""
    _tell(address, HOLD, encode(folder))


def asked(address: str) -> dict[str, int]:
    """How many requests of each kind the wire at that address has carried."""
    counts: dict[str, int] = msgspec.json.decode(_tell(address, ASKED, b"", method="GET"))
    return counts


def _tell(address: str, path: str, body: bytes, *, method: str = "PUT") -> bytes:
    host, _, port = address.removeprefix("http://").partition(":")
    with contextlib.closing(http.client.HTTPConnection(host, int(port))) as connection:
        connection.request(method, path, body)
        return connection.getresponse().read()


def main() -> None:
    """Serve until our input ends."""
    from moto.server import ThreadedMotoServer

    moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    moto.start()
    wire = serve(moto.get_host_and_port())
    threading.Thread(target=wire.serve_forever, daemon=True).start()
    sys.stdout.write(f"http://127.0.0.1:{wire.server_address[1]}\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
