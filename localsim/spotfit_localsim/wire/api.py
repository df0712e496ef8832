"""What one simulated cloud has to offer, so that the simulator can run it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from spotfit_localsim.wire.http import Reply, Request
from spotfit_localsim.wire.site import Machine, Site
from spotfit_localsim.wire.trouble import Troubles


@dataclass(frozen=True, slots=True)
class Access:
    """What a client has to be told to come here instead of to the real cloud."""

    options: Mapping[str, Any]
    """Options of the cloud's provisioner."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """What the cloud's own library reads; variables that are set already are left alone."""


class WireCloud(Protocol):
    """An API over a `Site`, made with `(site, troubles)`. The simulator calls it under one lock.

    What it has to remember is `memory`: plain data, kept on disk after every request and tick.
    """

    site: Site
    troubles: Troubles
    memory: Any
    """A msgspec struct; `type(cloud).Memory` reads it back."""

    @staticmethod
    def access(url: str) -> Access:
        """How clients find the API at that address."""
        ...

    def answer(self, request: Request) -> Reply:
        """One request of a client, in the cloud's own language, errors included."""
        ...

    def tick(self) -> None:
        """After the site's own tick: give machines to what waits, note what has ended."""
        ...

    def environment(self, machine: Machine) -> Mapping[str, str]:
        """What the cloud puts into the environment of that machine's task."""
        ...

    def metadata(self, machine: Machine, request: Request) -> Reply | None:
        """The machine's own metadata service; None where the cloud has none for that path."""
        ...
