"""Azure's own word that this VM will be taken away: Scheduled Events of its metadata service.

A preemption is told half a minute ahead, at best. Events of other VMs are told, too. An event that
is acknowledged begins at once: we never do.
https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
"""

from __future__ import annotations

from collections.abc import Callable
from email.utils import parsedate_to_datetime

import msgspec

from spotfit.agent.notices.polled import PolledNotice, ask
from spotfit.core.codec import decoder
from spotfit.host import clocks, env, log
from spotfit.model.world import Notice

ENDPOINT = "AZURE_POD_IDENTITY_AUTHORITY_HOST"
"""Where Azure's own identity library looks for the metadata service."""
_ENDPOINT = "http://169.254.169.254"
_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_METADATA = {"Metadata": "true"}
_EVERY_S = 1.0
_PATIENCE_S = 150.0
"""The first question turns the events on; that may take two minutes."""
_TAKES_AWAY = ("Preempt", "Terminate", "Redeploy", "Reboot")
"""What ends processes; a `Freeze` is a pause of seconds."""


class Event(msgspec.Struct, frozen=True, rename="pascal"):
    """One of the events that are told."""

    event_id: str = ""
    event_type: str = ""
    resources: tuple[str, ...] = ()
    not_before: str = ""
    """When it begins at the earliest; '' once it has begun."""


class Events(msgspec.Struct, frozen=True, rename="pascal"):
    """All that are told."""

    events: tuple[Event, ...] = ()


_events = decoder(Events)


class AzureMetadata:
    """The service of this VM."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._name = ""
        self._told: set[str] = set()

    def look(self) -> Notice | None:
        """The notice, if there is one for this VM."""
        status, body = ask(self._url, _EVENTS, headers=_METADATA, within_s=_PATIENCE_S)
        if status != 200:
            return None
        mine = [event for event in _events.decode(body).events if self._concerns_us(event)]
        going = [event for event in mine if event.event_type in _TAKES_AWAY]
        if going:
            return _notice(min(going, key=_begins_ms))
        self._tell(mine)
        return None

    def _concerns_us(self, event: Event) -> bool:
        self._name = self._name or self._own_name()
        return bool(self._name) and self._name in map(str.lower, event.resources)

    def _own_name(self) -> str:
        status, body = ask(self._url, _NAME, headers=_METADATA)
        return body.decode().strip().lower() if status == 200 else ""

    def _tell(self, events: list[Event]) -> None:
        for event in events:
            if event.event_id not in self._told:
                self._told.add(event.event_id)
                log.info("notice.maintenance", why=event.event_type, at=event.not_before)


class AzureNotice(PolledNotice):
    """Asks once a second, by Azure's advice."""

    def __init__(self, wake: Callable[[], None], every_s: float = _EVERY_S) -> None:
        look = AzureMetadata(env.lookup(ENDPOINT) or _ENDPOINT).look
        super().__init__(wake, look, every_s=every_s, name="azure")


def _notice(event: Event) -> Notice:
    deadline_ms = _begins_ms(event) or clocks.wall_ms()
    left_s = max(0.0, (deadline_ms - clocks.wall_ms()) / 1000)
    return Notice(f"Azure will {event.event_type.lower()} it", left_s, deadline_ms)


def _begins_ms(event: Event) -> int:
    """0 where it has begun already."""
    if not event.not_before:
        return 0
    return int(parsedate_to_datetime(event.not_before).timestamp() * 1000)
