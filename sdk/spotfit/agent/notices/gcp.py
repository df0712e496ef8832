"""Google's own word that this VM will be taken away: its metadata server.

`instance/preempted` turns TRUE when the shutdown begins, at most half a minute before the end,
unless an instance template asks for two minutes more; hence a question that waits for its
answer. That containers get a SIGTERM then is not documented. https://docs.cloud.google.com/compute/docs/instances/spot,
https://docs.cloud.google.com/compute/docs/metadata/getting-live-migration-notice
"""

from __future__ import annotations

from collections.abc import Callable

from spotfit.agent.notices.polled import PolledNotice, whole_answer
from spotfit.host import clocks, env, log
from spotfit.model.world import Notice

ENDPOINT = "GCE_METADATA_HOST"
_ENDPOINT = "169.254.169.254"
_INSTANCE = "/computeMetadata/v1/instance/"
_PREEMPTED = "preempted"
_EVERY_S = 0.5
_WAIT_S = 3
"""How long the server may keep a question back for a change: less than `ask` has patience."""
_STAYS_S = 30.0
"""From the flag to the end, at best, where nobody says otherwise."""


class GceMetadata:
    """The server of this VM."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._etag = ""
        self._maintenance = "NONE"

    def look(self) -> Notice | None:
        """The notice, if there is one; waits a few seconds for it."""
        if self._asked(_PREEMPTED, self._until_changed()) == "TRUE":
            stays_s = env.value(env.SIGNAL_GRACE_S) or _STAYS_S
            deadline_ms = clocks.wall_ms() + int(stays_s * 1000)
            return Notice("Google preempts it", stays_s, deadline_ms)
        return self._look_for_maintenance()

    def _look_for_maintenance(self) -> Notice | None:
        """A VM that moves to another host goes on; one with GPUs is ended, an hour after this."""
        told = self._asked("maintenance-event")
        if told == "TERMINATE_ON_HOST_MAINTENANCE":
            return Notice("Google will end it for maintenance of its host")
        if told not in ("", self._maintenance):
            log.info("notice.maintenance", why=told)
            self._maintenance = told
        return None

    def _until_changed(self) -> str:
        if not self._etag:
            return ""
        return f"?wait_for_change=true&timeout_sec={_WAIT_S}&last_etag={self._etag}"

    def _asked(self, what: str, query: str = "") -> str:
        """'' where the server does not know it."""
        path = f"{_INSTANCE}{what}{query}"
        answer = whole_answer(self._url, path, headers={"Metadata-Flavor": "Google"})
        if what == _PREEMPTED:
            self._etag = answer.headers.get("etag", "")
        return answer.body.decode().strip() if answer.status == 200 else ""


class GcpNotice(PolledNotice):
    """Asks again as soon as it has its answer."""

    def __init__(self, wake: Callable[[], None], every_s: float = _EVERY_S) -> None:
        url = f"http://{env.lookup(ENDPOINT) or _ENDPOINT}"
        super().__init__(wake, GceMetadata(url).look, every_s=every_s, name="gcp")
