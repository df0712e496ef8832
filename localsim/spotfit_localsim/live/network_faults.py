"""An S3 server on loopback behind a proxy that delays, refuses or stalls requests, and loses or
damages responses.

Run as a process (`python -m spotfit_localsim.live.network_faults`); its first line of output is its
URL. Control requests:

    PUT /-/faults          set the fault probabilities
    PUT /-/stall           stall all requests for a time
    PUT /-/hold            hold writes below a folder until another folder, or '', is set
    PUT /-/region          answer requests that are signed for another region as S3 does
    GET /-/request_counts  the number of requests by kind
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import struct
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import msgspec

from spotfit.core.clock import Clock
from spotfit.core.codec import encode
from spotfit.host.system import SystemClock
from spotfit_localsim.random_streams import RandomStream, SeededStreams

FAULTS_PATH = "/-/faults"
STALL_PATH = "/-/stall"
HOLD_PATH = "/-/hold"
REGION_PATH = "/-/region"
REQUEST_COUNTS_PATH = "/-/request_counts"
_POLL_INTERVAL_S = 0.1
# RFC 9110, 7.6.1: they describe one connection; the host is that of the proxy.
_HOP_BY_HOP_HEADERS = ("connection", "host", "transfer-encoding", "keep-alive")


class NetworkFaults(msgspec.Struct, frozen=True):
    """Fault probabilities; each is a fraction of all requests."""

    refusal_probability: float = 0.0
    """Answered with 503 without reaching the server."""
    throttled_probability: float = 0.0
    """Answered with 429 without reaching the server."""
    denied_probability: float = 0.0
    """Answered with 403 without reaching the server."""
    conflict_probability: float = 0.0
    """Of the conditional creates: answered with 409 ConditionalRequestConflict without reaching the
    server."""
    late_conflict_probability: float = 0.0
    """Of the conditional creates: executed by the server, and answered with 409."""
    lost_response_probability: float = 0.0
    """Executed by the server, but the connection is closed without a response."""
    reset_probability: float = 0.0
    """Executed by the server, but the connection is reset (RST) without a response."""
    flipped_probability: float = 0.0
    """Of the objects that are read: one bit of the response is changed."""
    truncated_probability: float = 0.0
    """Of the objects that are read: the response is a prefix, with the length of the prefix."""
    slow_probability: float = 0.0
    slow_latency_s: float = 0.5
    stall_probability: float = 0.0
    """Delayed by `stall_s` and then executed, even if the client has timed out."""
    stall_s: float = 20.0
    seed: int = 0


class BucketRegion(msgspec.Struct, frozen=True):
    """Where the buckets of the server are."""

    name: str = ""
    """Such as "eu-west-1"; '' accepts requests for any region."""
    is_announced: bool = True
    """Whether requests without credentials are answered with the region, too."""


def no_faults() -> NetworkFaults:
    """Return faults with all probabilities 0."""
    return NetworkFaults()


class RequestFaultInjector:
    """Decides the fault of each request, by the seed of the faults."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self.request_counts: Counter[str] = Counter()
        self._held_folder = ""
        self.region = BucketRegion()
        self.set_faults(no_faults())

    def set_faults(self, faults: NetworkFaults) -> None:
        """Replace the faults, and end a stall."""
        with self._lock:
            self._faults = faults
            self._stall_ends_at = self._clock.now()
            self._stream: RandomStream = SeededStreams(faults.seed).stream("weather")

    def start_stall(self, seconds: float) -> None:
        """Stall every request for `seconds`."""
        with self._lock:
            self._stall_ends_at = self._clock.now() + seconds

    def hold_writes(self, folder: str) -> None:
        """Hold writes below folders of that name; '' releases them."""
        self._held_folder = folder

    def wait_for_hold(self, method: str, path: str) -> None:
        """Block while the request is held."""
        while method == "PUT" and (folder := self._held_folder) and f"/{folder}/" in path:
            self._clock.wait(_POLL_INTERVAL_S)

    def draw_outcome(self) -> str:
        """Return the name of the drawn fault, or 'forwarded', after a delay if drawn."""
        with self._lock:
            faults, stream = self._faults, self._stream
            # Under the lock: threads share the stream.
            slow, drawn = stream.bernoulli(faults.slow_probability), stream.random()
            stalled = faults.stall_probability > 0 and stream.bernoulli(faults.stall_probability)
        if slow:
            self._clock.wait(faults.slow_latency_s)
        if stalled:
            self._clock.wait(faults.stall_s)
        # In short waits: `set_faults` may end the stall early.
        while (remaining_s := self._stall_ends_at - self._clock.now()) > 0:
            self._clock.wait(min(remaining_s, _POLL_INTERVAL_S))
        for outcome, probability in _outcome_probabilities(faults).items():
            if drawn < probability:
                return outcome
            drawn -= probability
        return "forwarded"

    def draw_conflict(self) -> str:
        """Return 'refused', 'executed' or '' for the conflict that a conditional create meets."""
        with self._lock:
            drawn, faults = self._stream.random(), self._faults
        if drawn < faults.conflict_probability:
            return "refused"
        drawn -= faults.conflict_probability
        return "executed" if drawn < faults.late_conflict_probability else ""

    def damage(self, body: bytes) -> bytes:
        """Return the body of a read object, with a changed bit or truncated if drawn."""
        with self._lock:
            faults, stream = self._faults, self._stream
            if body and stream.bernoulli(faults.flipped_probability):
                flipped = bytearray(body)
                flipped[stream.randrange(len(body))] ^= 1 << stream.randrange(8)
                body = bytes(flipped)
            if stream.bernoulli(faults.truncated_probability):
                body = body[: stream.randrange(len(body) + 1)]
        return body


def _outcome_probabilities(faults: NetworkFaults) -> dict[str, float]:
    return {
        "refused": faults.refusal_probability,
        "response_lost": faults.lost_response_probability,
        "throttled": faults.throttled_probability,
        "denied": faults.denied_probability,
        "reset": faults.reset_probability,
    }


_REFUSALS = {"refused": 503, "throttled": 429, "denied": 403}
"""Status by outcome of the requests that do not reach the server."""
_CONFLICT_BODY = (
    b"<Error><Code>ConditionalRequestConflict</Code><Message>The conditional request cannot "
    b"succeed due to a conflicting operation against this resource.</Message></Error>"
)
_SCOPE_LENGTH = 5
_DENIED_BODY = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


class FaultyProxyHandler(BaseHTTPRequestHandler):
    """One connection from a store client."""

    protocol_version = "HTTP/1.1"
    fault_injector: ClassVar[RequestFaultInjector]
    upstream_address: ClassVar[tuple[str, int]]
    create_lock: ClassVar[threading.Lock] = threading.Lock()

    def _forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path == FAULTS_PATH:
            self.fault_injector.set_faults(msgspec.json.decode(body, type=NetworkFaults))
            self._reply(200, {}, b"")
            return
        if self.path == STALL_PATH:
            self.fault_injector.start_stall(msgspec.json.decode(body, type=float))
            self._reply(200, {}, b"")
            return
        if self.path == HOLD_PATH:
            self.fault_injector.hold_writes(msgspec.json.decode(body, type=str))
            self._reply(200, {}, b"")
            return
        if self.path == REGION_PATH:
            self.fault_injector.region = msgspec.json.decode(body, type=BucketRegion)
            self._reply(200, {}, b"")
            return
        if self.path == REQUEST_COUNTS_PATH:
            self._reply(200, {}, encode(dict(self.fault_injector.request_counts)))
            return
        self.fault_injector.request_counts[
            "LIST" if "list-type=" in self.path else self.command
        ] += 1
        if self._reject_region():
            return
        # Before the outcome is drawn: a held request uses up no fault.
        self.fault_injector.wait_for_hold(self.command, self.path)
        outcome = self.fault_injector.draw_outcome()
        if outcome in _REFUSALS:
            self._reply(_REFUSALS[outcome], {}, _DENIED_BODY if outcome == "denied" else b"")
            return
        is_create = "If-None-Match" in self.headers and self.command == "PUT"
        conflict = self.fault_injector.draw_conflict() if is_create else ""
        if conflict == "refused":
            self._reply(409, {}, _CONFLICT_BODY)
            return
        status, headers, response = self._call_upstream(body)
        if outcome in ("response_lost", "reset"):
            # The client sees the end of the connection instead of a response.
            self.close_connection = True
            if outcome == "reset":
                # A linger time of 0: closing the socket sends RST instead of FIN.
                linger = struct.pack("ii", 1, 0)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                # Not by the base class, which would send FIN before.
                os.close(self.connection.detach())
            return
        if conflict == "executed":
            status, headers, response = 409, {}, _CONFLICT_BODY
        # Not of listings: no key and size there is protected by anything but the connection.
        elif self.command == "GET" and status < 300 and "list-type=" not in self.path:
            response = self.fault_injector.damage(response)
        with contextlib.suppress(ConnectionError):  # the client has timed out
            self._reply(status, headers, response)

    def _reject_region(self) -> bool:
        """Answer a request without a signature, or with one for another region."""
        region = self.fault_injector.region
        if not region.name:
            return False
        # AWS4-HMAC-SHA256 Credential=<key>/<date>/<region>/s3/aws4_request, …
        scope = self.headers.get("Authorization", "").partition("Credential=")[2].split("/")
        if len(scope) < _SCOPE_LENGTH:
            # https://docs.aws.amazon.com/AmazonS3/latest/API/API_HeadBucket.html: "regardless of
            # the permissions on the bucket".
            headers = {"x-amz-bucket-region": region.name} if region.is_announced else {}
            self._reply(403, headers, _DENIED_BODY)
            return True
        if scope[2] == region.name:
            return False
        # https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
        message = (
            "<Error><Code>AuthorizationHeaderMalformed</Code><Message>The authorization header is "
            f"malformed; the region '{scope[2]}' is wrong; expecting '{region.name}'</Message>"
            f"<Region>{region.name}</Region></Error>"
        )
        self._reply(400, {"x-amz-bucket-region": region.name}, message.encode())
        return True

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _forward  # noqa: N815  # names of the base class

    def _call_upstream(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        headers = {
            name: text
            for name, text in self.headers.items()
            if name.lower() not in _HOP_BY_HOP_HEADERS
        }
        connection = http.client.HTTPConnection(*self.upstream_address)
        # moto checks for the object and then writes it, not atomically: conditional writes are
        # serialized here.
        exclusive = (
            self.create_lock if "If-None-Match" in self.headers else contextlib.nullcontext()
        )
        try:
            with exclusive:
                connection.request(self.command, self.path, body or None, headers)
                response = connection.getresponse()
                return response.status, dict(response.getheaders()), response.read()
        finally:
            connection.close()

    def _reply(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response_only(status)
        for name, text in headers.items():
            if name.lower() not in (*_HOP_BY_HOP_HEADERS, "content-length"):
                self.send_header(name, text)
        # The length of a HEAD response is that of the object.
        length = headers.get("Content-Length") if self.command == "HEAD" else None
        self.send_header("Content-Length", length or str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Suppress the access log."""


def create_proxy(
    upstream_address: tuple[str, int], clock: Clock | None = None
) -> ThreadingHTTPServer:
    """Return a proxy to that server; the caller runs `serve_forever`."""

    class ConfiguredProxyHandler(FaultyProxyHandler):
        fault_injector = RequestFaultInjector(clock or SystemClock())

    ConfiguredProxyHandler.upstream_address = upstream_address
    return ThreadingHTTPServer(("127.0.0.1", 0), ConfiguredProxyHandler)


def set_faults(address: str, faults: NetworkFaults) -> None:
    """Set the faults of the proxy at that address."""
    _call_control(address, FAULTS_PATH, encode(faults))


def start_stall(address: str, seconds: float) -> None:
    """Stall every request at the proxy for `seconds`."""
    _call_control(address, STALL_PATH, encode(seconds))


def hold_writes(address: str, folder: str) -> None:
    """Hold writes below folders of that name at the proxy; '' releases them."""
    _call_control(address, HOLD_PATH, encode(folder))


def set_region(address: str, region: BucketRegion) -> None:
    """Place the buckets of the proxy at that address in a region."""
    _call_control(address, REGION_PATH, encode(region))


def fetch_request_counts(address: str) -> dict[str, int]:
    """Return the number of requests by kind at the proxy."""
    counts: dict[str, int] = msgspec.json.decode(
        _call_control(address, REQUEST_COUNTS_PATH, b"", method="GET")
    )
    return counts


def _call_control(address: str, path: str, body: bytes, *, method: str = "PUT") -> bytes:
    host, _, port = address.removeprefix("http://").partition(":")
    with contextlib.closing(http.client.HTTPConnection(host, int(port))) as connection:
        connection.request(method, path, body)
        return connection.getresponse().read()


def main() -> None:
    """Serve until stdin is closed."""
    from moto.server import ThreadedMotoServer

    # Port 0: the kernel chooses a free one.
    moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    moto.start()
    proxy = create_proxy(moto.get_host_and_port())
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    sys.stdout.write(f"http://127.0.0.1:{proxy.server_address[1]}\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
