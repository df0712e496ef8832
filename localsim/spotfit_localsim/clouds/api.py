"""The interface between the simulator process and one simulated cloud."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from spotfit_localsim.clouds.cloud_host import Datacenter, SimulatedMachine
from spotfit_localsim.clouds.http_server import WireRequest, WireResponse
from spotfit_localsim.clouds.injected_errors import ApiFaults


@dataclass(frozen=True, slots=True)
class ClientAccess:
    """What redirects a client from the real cloud to the simulator."""

    options: Mapping[str, Any]
    """Options of the cloud's provisioner."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables for the cloud's client library; variables that are set already are kept."""


class SimulatedCloud(Protocol):
    """A cloud API over a `Datacenter`, constructed as `cloud(datacenter, faults)`.

    The simulator makes all calls under one lock, and stores `state` on disk after every request and
    tick.
    """

    datacenter: Datacenter
    faults: ApiFaults
    state: Any
    """A msgspec struct; the class attribute `State` of the cloud is its type."""

    @staticmethod
    def client_access(url: str) -> ClientAccess:
        """Return how clients reach the API at `url`."""
        ...

    def answer_request(self, request: WireRequest) -> WireResponse:
        """Answer one request of a client in the cloud's own format, including errors."""
        ...

    def is_lagging_read(self, request: WireRequest) -> bool:
        """Return whether the answer may be out of date by the option `lag_s`.

        Those are the reads of jobs and of the states of their machines. They must not change
        `state`.
        """
        ...

    def tick(self) -> None:
        """Start waiting tasks and record ended ones. Called after the tick of the datacenter."""
        ...

    def task_environment(self, machine: SimulatedMachine) -> Mapping[str, str]:
        """Return the environment variables that the cloud sets for the machine's task."""
        ...

    def answer_metadata(
        self, machine: SimulatedMachine, request: WireRequest
    ) -> WireResponse | None:
        """Answer a request to the machine's metadata service; None for an unknown path."""
        ...
