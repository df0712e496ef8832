"""An S3 server on loopback whose next responses a test can script."""

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


@dataclass
class ScriptedBucket:
    """Stores objects; the queued `responses` are sent first, one per request."""

    responses: deque[tuple[int, str]] = field(default_factory=deque)
    objects: dict[str, bytes] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    authorizations: set[str] = field(default_factory=set)
    body_hashes: list[str] = field(default_factory=list)
    """`x-amz-content-sha256` of each request."""
    url: str = ""

    def enqueue_responses(self, *statuses: int, code: str = "Code") -> None:
        self.responses.extend((status, code) for status in statuses)


class _BucketResponder(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet, or each answer waits for an acknowledgement
    bucket: ScriptedBucket

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        key = self.path.partition("?")[0]
        self.bucket.requests.append((self.command, key))
        self.bucket.authorizations.add(self.headers.get("authorization", ""))
        self.bucket.body_hashes.append(self.headers.get("x-amz-content-sha256", ""))
        if self.bucket.responses:
            status, code = self.bucket.responses.popleft()
            self._send(status, f"<Error><Code>{code}</Code><Message>why</Message></Error>".encode())
        elif self.command == "PUT":
            self.bucket.objects[key] = body
            self._send(200, b"")
        elif key in self.bucket.objects and "range" in self.headers:
            whole = self.bucket.objects[key]
            first, last = map(int, self.headers["range"].removeprefix("bytes=").split("-"))
            part = whole[first : last + 1]
            self._send(206, part, f"bytes {first}-{first + len(part) - 1}/{len(whole)}")
        elif key in self.bucket.objects:
            self._send(200, self.bucket.objects[key])
        else:
            self._send(404, b"<Error><Code>NoSuchKey</Code><Message>why</Message></Error>")

    do_GET = do_PUT = do_POST = do_DELETE = _answer  # noqa: N815  # http.server's names

    def _send(self, status: int, body: bytes, content_range: str = "") -> None:
        self.send_response(status)
        if content_range:
            self.send_header("content-range", content_range)
        self.send_header("content-length", str(len(body)))
        self.send_header("last-modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.send_header("etag", '"1"')
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # http.server's name
        """Discard the log."""


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedBucket]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "something")
    scripted = ScriptedBucket()
    answers = type("Answers", (_BucketResponder,), {"bucket": scripted})
    with ThreadingHTTPServer(("127.0.0.1", 0), answers) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        scripted.url = f"s3://bucket?endpoint_url=http://127.0.0.1:{server.server_port}"
        yield scripted
        server.shutdown()
        thread.join()
