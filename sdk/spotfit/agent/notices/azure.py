"""Preemption notices of Azure, from the Scheduled Events of the instance metadata service.

A `Preempt` event is announced at most 30 seconds ahead. The service also lists events of other VMs
of the same scale set. Events are never acknowledged: an acknowledged event starts immediately.
https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
"""

from __future__ import annotations

from collections.abc import Callable
from email.utils import parsedate_to_datetime

import msgspec

from spotfit.agent.notices.polled import PolledNoticeSource, request_metadata
from spotfit.core.codec import decoder
from spotfit.host import env, log, system
from spotfit.model.topology import Notice

ENDPOINT_ENV = "AZURE_POD_IDENTITY_AUTHORITY_HOST"
"""The variable by which Azure's identity library finds the metadata service."""
_DEFAULT_ENDPOINT = "http://169.254.169.254"
_EVENTS_PATH = "/metadata/scheduledevents?api-version=2020-07-01"
_NAME_PATH = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_METADATA_HEADERS = {"Metadata": "true"}
# Recommended by Azure.
_POLL_INTERVAL_S = 1.0
# The first request enables Scheduled Events for the VM, which may take two minutes.
_FIRST_REQUEST_TIMEOUT_S = 150.0
_TERMINATING_EVENT_TYPES = ("Preempt", "Terminate", "Redeploy", "Reboot")
"""Events that terminate processes. `Freeze` is not among them: it pauses a VM for seconds."""


class ScheduledEvent(msgspec.Struct, frozen=True, rename="pascal"):
    """One event of the Scheduled Events document."""

    event_id: str = ""
    event_type: str = ""
    resources: tuple[str, ...] = ()
    not_before: str = ""
    """Earliest start; '' once the event has started."""


class ScheduledEvents(msgspec.Struct, frozen=True, rename="pascal"):
    """The Scheduled Events document."""

    events: tuple[ScheduledEvent, ...] = ()


_events_decoder = decoder(ScheduledEvents)


class AzureMetadata:
    """Client of the metadata service of this VM, for the thread of `AzureNoticeSource`."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._vm_name = ""
        self._logged_event_ids: set[str] = set()

    def check(self) -> Notice | None:
        """Return the notice of the first event that terminates this VM's processes, or None.

        Events of other VMs are ignored; other events of this VM are logged once. Blocks: the first
        request may take two minutes. A status other than 200 counts as None. Raises `OSError`,
        `http.client.HTTPException` or `msgspec.DecodeError` if a request fails or its answer is
        invalid.
        """
        status, body = request_metadata(
            self._url, _EVENTS_PATH, headers=_METADATA_HEADERS, timeout_s=_FIRST_REQUEST_TIMEOUT_S
        )
        if status != 200:
            return None
        events = _events_decoder.decode(body).events
        if events and not self._vm_name:
            name_status, name = request_metadata(self._url, _NAME_PATH, headers=_METADATA_HEADERS)
            self._vm_name = name.decode().strip().lower() if name_status == 200 else ""
        # Without the name no event counts: one of another VM must not end this node.
        own = [
            event
            for event in events
            if self._vm_name and self._vm_name in map(str.lower, event.resources)
        ]
        terminating = [event for event in own if event.event_type in _TERMINATING_EVENT_TYPES]
        if terminating:
            first = min(terminating, key=_starts_at_ms)
            deadline_ms = _starts_at_ms(first) or system.wall_ms()
            return Notice(
                reason=f"Azure will {first.event_type.lower()} the VM",
                seconds_left=max(0.0, (deadline_ms - system.wall_ms()) / 1000),
                deadline_ms=deadline_ms,
            )
        for event in own:
            # The document lists an event until it is over.
            if event.event_id not in self._logged_event_ids:
                self._logged_event_ids.add(event.event_id)
                log.info("notice.maintenance", reason=event.event_type, at=event.not_before)
        return None


class AzureNoticeSource(PolledNoticeSource):
    """Polls the Scheduled Events of this VM."""

    def __init__(self, wake: Callable[[], None], interval_s: float = _POLL_INTERVAL_S) -> None:
        check = AzureMetadata(env.lookup(ENDPOINT_ENV) or _DEFAULT_ENDPOINT).check
        super().__init__(wake, check, interval_s=interval_s, name="azure")


def _starts_at_ms(event: ScheduledEvent) -> int:
    """Return the start in milliseconds since 1970, or 0 if the event has started."""
    if not event.not_before:
        return 0
    return int(parsedate_to_datetime(event.not_before).timestamp() * 1000)
