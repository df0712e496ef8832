"""A bucket on loopback whose next answers a test may dictate."""

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


@dataclass
class ScriptedBucket:
    """Keeps objects; answers with the statuses of `script` first, one a request."""

    script: deque[tuple[int, str]] = field(default_factory=deque)
    objects: dict[str, bytes] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)
    signed_by: set[str] = field(default_factory=set)
    hashes: list[str] = field(default_factory=list)
    """What each request said of its body."""
    url: str = ""

    def will_answer(self, *statuses: int, code: str = "Code") -> None:
        self.script.extend((status, code) for status in statuses)


class _Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet, or each answer waits for an acknowledgement
    bucket: ScriptedBucket

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        key = self.path.partition("?")[0]
        self.bucket.asked.append((self.command, key))
        self.bucket.signed_by.add(self.headers.get("authorization", ""))
        self.bucket.hashes.append(self.headers.get("x-amz-content-sha256", ""))
        if self.bucket.script:
            status, code = self.bucket.script.popleft()
            self._say(status, f"<Error><Code>{code}</Code><Message>why</Message></Error>".encode())
        elif self.command == "PUT":
            self.bucket.objects[key] = body
            self._say(200, b"")
        elif key in self.bucket.objects:
            self._say(200, self.bucket.objects[key])
        else:
            self._say(404, b"<Error><Code>NoSuchKey</Code><Message>why</Message></Error>")

    do_GET = do_PUT = do_POST = do_DELETE = _answer  # noqa: N815  # http.server's names

    def _say(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.send_header("last-modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.send_header("etag", '"1"')
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # http.server's name
        """Say nothing."""


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedBucket]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "something")
    scripted = ScriptedBucket()
    answers = type("Answers", (_Answers,), {"bucket": scripted})
    with ThreadingHTTPServer(("127.0.0.1", 0), answers) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        scripted.url = f"s3://bucket?endpoint_url=http://127.0.0.1:{server.server_port}"
        yield scripted
        server.shutdown()
        thread.join()
