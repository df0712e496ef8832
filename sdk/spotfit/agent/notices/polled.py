"""`PolledNoticeSource`: a source that polls in a thread, and HTTP requests for such sources."""

from __future__ import annotations

import http.client
import ssl
import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

from spotfit.host import log
from spotfit.model.topology import Notice, PreemptionRisk

# Metadata services answer within milliseconds; a stuck request must not hide a notice for long.
_RESPONSE_TIMEOUT_S = 5.0

NoticeCheck = Callable[[], Notice | PreemptionRisk | None]


class PolledNoticeSource:
    """Calls `check` every `interval_s` in a thread until it returns a notice.

    Until then the last `PreemptionRisk` is returned by `poll`. An exception of `check` is logged
    when its text changes.
    """

    def __init__(
        self, wake: Callable[[], None], check: NoticeCheck, *, interval_s: float, name: str
    ) -> None:
        self._wake = wake
        self._check = check
        self._interval_s = interval_s
        self._name = name
        self._notice: Notice | None = None
        self._advice: PreemptionRisk | None = None
        self._last_error = ""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"spotfit-{name}", daemon=True)
        self._thread.start()

    def poll(self, now: float) -> Notice | PreemptionRisk | None:
        return self._notice or self._advice

    def close(self) -> None:
        """Stop polling."""
        self._closed.set()

    def _run(self) -> None:
        while self._notice is None and not self._closed.wait(self._interval_s):
            try:
                self._record(self._check())
            except Exception as error:  # noqa: BLE001  # a failing source must not stop the agent
                self._log_failure(f"{type(error).__name__}: {error}")

    def _record(self, notice: Notice | PreemptionRisk | None) -> None:
        if notice is None or notice == self._advice:
            return
        if isinstance(notice, Notice):
            self._notice = notice
        else:
            self._advice = notice
        self._wake()

    def _log_failure(self, reason: str) -> None:
        if reason != self._last_error:
            self._last_error = reason
            log.warning("notice.poll_failed", source=self._name, reason=reason)


class HttpResponse(NamedTuple):
    """The response of an HTTP server; header names are in lower case."""

    status: int
    body: bytes
    headers: Mapping[str, str]


def request_metadata(
    url: str,
    path: str,
    *,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    timeout_s: float = _RESPONSE_TIMEOUT_S,
) -> tuple[int, bytes]:
    """Send a request without a proxy and return its status and body."""
    response = http_request(url, path, method=method, headers=headers, timeout_s=timeout_s)
    return response.status, response.body


def http_request(
    url: str,
    path: str,
    *,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    tls_context: ssl.SSLContext | None = None,
    timeout_s: float = _RESPONSE_TIMEOUT_S,
) -> HttpResponse:
    """Like `request_metadata`, with the response headers and an optional TLS context."""
    address = urlsplit(url)
    connection = _open_connection(address, tls_context, timeout_s=timeout_s)
    try:
        connection.request(method, address.path.rstrip("/") + path, headers=dict(headers or {}))
        response = connection.getresponse()
        response_headers = {name.lower(): text for name, text in response.getheaders()}
        return HttpResponse(response.status, response.read(), response_headers)
    finally:
        connection.close()


def _open_connection(
    url: SplitResult, tls_context: ssl.SSLContext | None, *, timeout_s: float
) -> http.client.HTTPConnection:
    host, port = str(url.hostname), url.port
    if url.scheme == "https":
        return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=tls_context)
    return http.client.HTTPConnection(host, port, timeout=timeout_s)
