"""Preemption notices of Google Compute Engine, from the metadata server of the VM.

`instance/preempted` becomes TRUE when the shutdown starts, at most 30 seconds before the end unless
the instance template extends it by up to two minutes. The request is therefore a long poll. Google
does not document a SIGTERM for containers. https://docs.cloud.google.com/compute/docs/instances/spot,
https://docs.cloud.google.com/compute/docs/metadata/getting-live-migration-notice
"""

from __future__ import annotations

from collections.abc import Callable

from spotfit.agent.notices.polled import PolledNoticeSource, http_request
from spotfit.host import env, log, system
from spotfit.model.topology import Notice

ENDPOINT_ENV = "GCE_METADATA_HOST"
_DEFAULT_ENDPOINT = "169.254.169.254"
_INSTANCE_PATH = "/computeMetadata/v1/instance/"
_PREEMPTED_KEY = "preempted"
_POLL_INTERVAL_S = 0.5
# The server answers after this time at the latest; shorter than the timeout of `http_request`.
_LONG_POLL_S = 3
_LONG_POLL_QUERY = f"?wait_for_change=true&timeout_sec={_LONG_POLL_S}&last_etag="
# Time from `preempted` to the end of a VM, unless SPOTFIT_SIGNAL_GRACE_S is set.
_DEFAULT_GRACE_S = 30.0


class GceMetadata:
    """Client of the metadata server of this VM, for the thread of `GcpNoticeSource`."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._etag = ""
        self._maintenance = "NONE"

    def check(self) -> Notice | None:
        """Return a preemption or termination notice, or None after a long poll of up to 3 s.

        The deadline of a preemption is SPOTFIT_SIGNAL_GRACE_S (default 30 s) from now; a host
        maintenance has none. Raises `OSError` or `http.client.HTTPException` if a request fails.
        """
        # Without an etag the server answers at once; with it, when the value changes.
        query = f"{_LONG_POLL_QUERY}{self._etag}" if self._etag else ""
        if self._request(_PREEMPTED_KEY, query) == "TRUE":
            grace_s = env.read(env.SIGNAL_GRACE_S) or _DEFAULT_GRACE_S
            deadline_ms = system.wall_ms() + int(grace_s * 1000)
            return Notice(
                reason="Google preempts the VM", seconds_left=grace_s, deadline_ms=deadline_ms
            )
        event = self._request("maintenance-event")
        # VMs with GPUs cannot migrate: they end an hour later. Other events migrate the VM live.
        if event == "TERMINATE_ON_HOST_MAINTENANCE":
            return Notice(reason="Google will terminate the VM for host maintenance")
        if event not in ("", self._maintenance):
            log.info("notice.maintenance", reason=event)
            self._maintenance = event
        return None

    def _request(self, key: str, query: str = "") -> str:
        """Return the value, or '' if the server does not have that key."""
        path = f"{_INSTANCE_PATH}{key}{query}"
        response = http_request(self._url, path, headers={"Metadata-Flavor": "Google"})
        if key == _PREEMPTED_KEY:
            self._etag = response.headers.get("etag", "")
        return response.body.decode().strip() if response.status == 200 else ""


class GcpNoticeSource(PolledNoticeSource):
    """Long-polls the metadata server."""

    def __init__(self, wake: Callable[[], None], interval_s: float = _POLL_INTERVAL_S) -> None:
        url = f"http://{env.lookup(ENDPOINT_ENV) or _DEFAULT_ENDPOINT}"
        super().__init__(wake, GceMetadata(url).check, interval_s=interval_s, name="gcp")
