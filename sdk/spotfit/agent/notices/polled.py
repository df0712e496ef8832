"""`PolledNoticeSource`: a source that polls in a thread, and HTTP requests for such sources."""

from __future__ import annotations

import http.client
import ssl
import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

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
        # Written by the thread and read by the agent: one reference each, so no lock is needed.
        self._notice: Notice | None = None
        self._risk: PreemptionRisk | None = None
        self._last_error = ""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"spotfit-{name}", daemon=True)
        self._thread.start()

    def poll(self, now: float) -> Notice | PreemptionRisk | None:
        """Return the notice that the thread has found, else its last risk, else None; no I/O."""
        return self._notice or self._risk

    def close(self) -> None:
        """Stop polling after the check in progress; does not wait for it. Harmless if repeated."""
        self._closed.set()

    def _run(self) -> None:
        while self._notice is None and not self._closed.wait(self._interval_s):
            try:
                found = self._check()
                if found is not None and found != self._risk:
                    if isinstance(found, Notice):
                        self._notice = found
                    else:
                        self._risk = found
                    self._wake()
            except Exception as error:  # noqa: BLE001  # a failing source must not stop the agent
                reason = f"{type(error).__name__}: {error}"
                # A service that is down fails at every poll: one line per kind of failure.
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
    """Send an HTTP request without a proxy; return its status and body.

    As `http_request`, without the headers of the response.
    """
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
    """Send an HTTP request to `url` plus `path`, without a proxy, and return the response.

    `url` is a base such as `"http://169.254.169.254"`. Blocks, for up to `timeout_s` seconds per
    socket operation. Any status is returned. Raises `OSError` (no connection, timeout) or
    `http.client.HTTPException`. `tls_context` applies to https; None means the default.
    """
    address = urlsplit(url)
    host, port = str(address.hostname), address.port
    # `http.client` ignores proxy variables: link-local addresses are not reachable by a proxy.
    connection = (
        http.client.HTTPSConnection(host, port, timeout=timeout_s, context=tls_context)
        if address.scheme == "https"
        else http.client.HTTPConnection(host, port, timeout=timeout_s)
    )
    try:
        connection.request(method, address.path.rstrip("/") + path, headers=dict(headers or {}))
        response = connection.getresponse()
        response_headers = {name.lower(): text for name, text in response.getheaders()}
        return HttpResponse(response.status, response.read(), response_headers)
    finally:
        connection.close()
