"""A source that has to ask: in a thread of its own, so that nobody waits for the answer."""

from __future__ import annotations

import http.client
import ssl
import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

from spotfit.host import log
from spotfit.model.world import Advice, Notice

_ANSWER_WITHIN_S = 5.0

Look = Callable[[], Notice | Advice | None]


class PolledNotice:
    """Calls `look` every so often until it gives a notice; what is less than one is remembered
    meanwhile. What `look` raises is logged once."""

    def __init__(self, wake: Callable[[], None], look: Look, *, every_s: float, name: str) -> None:
        self._wake = wake
        self._look = look
        self._every_s = every_s
        self._name = name
        self._notice: Notice | None = None
        self._advice: Advice | None = None
        self._trouble = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"spotfit-{name}", daemon=True)
        self._thread.start()

    def poll(self, now: float) -> Notice | Advice | None:
        return self._notice or self._advice

    def close(self) -> None:
        """Ask no more."""
        self._ended.set()

    def _run(self) -> None:
        while self._notice is None and not self._ended.wait(self._every_s):
            try:
                self._take(self._look())
            except Exception as error:  # noqa: BLE001  # a source that fails must not end the agent
                self._complain(f"{type(error).__name__}: {error}")

    def _take(self, seen: Notice | Advice | None) -> None:
        if seen is None or seen == self._advice:
            return
        if isinstance(seen, Notice):
            self._notice = seen
        else:
            self._advice = seen
        self._wake()

    def _complain(self, why: str) -> None:
        if why != self._trouble:
            self._trouble = why
            log.warning("notice.unreadable", source=self._name, why=why)


class Answer(NamedTuple):
    """What a metadata service says. Names of headers are in lower case."""

    status: int
    body: bytes
    headers: Mapping[str, str]


def ask(
    url: str,
    path: str,
    *,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    within_s: float = _ANSWER_WITHIN_S,
) -> tuple[int, bytes]:
    """One request to a metadata service: status and body. Never by a proxy."""
    answer = whole_answer(url, path, method=method, headers=headers, within_s=within_s)
    return answer.status, answer.body


def whole_answer(
    url: str,
    path: str,
    *,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    trust: ssl.SSLContext | None = None,
    within_s: float = _ANSWER_WITHIN_S,
) -> Answer:
    """As `ask`, for whoever needs the headers, too, or trusts an authority of its own."""
    address = urlsplit(url)
    wire = _wire(address, trust, within_s=within_s)
    try:
        wire.request(method, address.path.rstrip("/") + path, headers=dict(headers or {}))
        reply = wire.getresponse()
        told = {name.lower(): text for name, text in reply.getheaders()}
        return Answer(reply.status, reply.read(), told)
    finally:
        wire.close()


def _wire(
    address: SplitResult, trust: ssl.SSLContext | None, *, within_s: float
) -> http.client.HTTPConnection:
    host, port = str(address.hostname), address.port
    if address.scheme == "https":
        return http.client.HTTPSConnection(host, port, timeout=within_s, context=trust)
    return http.client.HTTPConnection(host, port, timeout=within_s)
