"""The smallest possible cloud: groups of machines by token, over HTTP and JSON.

It has no client library, so this module contains its provisioner as well: 100 lines that show what
a custom provisioner has to implement, and with offers and billing times what it may implement.
"""

from __future__ import annotations

import contextlib
import http.client
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import urlsplit

import msgspec

from spotfit.core.errors import ConfigError, ProvisionError, ProvisionPermissionError, QuotaError
from spotfit.host import system
from spotfit.model.group import (
    GroupHandle,
    GroupPlan,
    GroupRequest,
    GroupStatus,
    NodeState,
    NodeStatus,
    missing_group_status,
)
from spotfit.model.offer import Market, Offer
from spotfit.provision.api import Refusal, Traits
from spotfit.provision.launch import AGENT_COMMAND, AgentLaunchSpec, count_nodes
from spotfit.provision.offers import OfferListing, offer_name, select_offer
from spotfit_localsim.clouds.api import ClientAccess
from spotfit_localsim.clouds.cloud_host import Datacenter, SimulatedMachine
from spotfit_localsim.clouds.http_server import MalformedRequestError, WireRequest, WireResponse
from spotfit_localsim.clouds.injected_errors import ApiFaults
from spotfit_provisioners.prices.given import check_prices, given_price

# --- the cloud ------------------------------------------------------------------------------------


class PlainGroup(msgspec.Struct):
    """One requested group: a command, and an environment for each machine."""

    command: list[str]
    environments: list[dict[str, str]]
    market: Market = Market.SPOT
    is_cancelled: bool = False


class PlainState(msgspec.Struct):
    groups: dict[str, PlainGroup] = {}
    signalled_machines: list[int] = []
    """Machines whose task received SIGTERM as the preemption notice."""


class PlainCloud:
    """POST, GET and DELETE /groups/<token>. A preemption notice is a SIGTERM.

    A machine is billed from the moment when it is rented to its end.
    """

    State = PlainState

    def __init__(self, datacenter: Datacenter, faults: ApiFaults) -> None:
        self.datacenter = datacenter
        self.faults = faults
        self.state = PlainState()

    @staticmethod
    def client_access(url: str) -> ClientAccess:
        return ClientAccess({"url": url})

    def answer_request(self, request: WireRequest) -> WireResponse:
        token = request.path.removeprefix("/groups/")
        if request.method == "POST":
            try:
                group = msgspec.convert(request.json(), PlainGroup)
            except (MalformedRequestError, msgspec.ValidationError) as malformed:
                return WireResponse.json({"error": str(malformed)}, 400)
            return self._create(token, group)
        if token not in self.state.groups:
            return WireResponse.json({"error": "no such group"}, 404)
        group = self.state.groups[token]
        numbers = range(len(group.environments))
        machines = [self.datacenter.find_machine(f"{token}/{number}") for number in numbers]
        if request.method == "DELETE":
            group.is_cancelled = True
            for machine in filter(None, machines):
                self.datacenter.stop(machine, grace_s=5.0)
        # A machine that is not rented yet never will be after a cancellation.
        waiting = {"state": "over" if group.is_cancelled else "waiting", "reason": "", "code": None}
        rendered = [
            waiting
            if one is None
            else {
                "state": one.state,
                "reason": one.end_reason,
                "code": one.exit_code,
                "billed_from_s": one.created_at_s,
                "billed_until_s": one.ended_at_s,
            }
            for one in machines
        ]
        return WireResponse.json({"machines": rendered})

    def is_lagging_read(self, request: WireRequest) -> bool:
        return request.method == "GET"

    def tick(self) -> None:
        for token, group in self.state.groups.items():
            for number, environment in enumerate(group.environments):
                task = f"{token}/{number}"
                if not group.is_cancelled and self.datacenter.find_machine(task) is None:
                    self.datacenter.rent(task, group.command, environment, market=group.market)
        for machine in self.datacenter.active_machines():
            if (
                machine.noticed_at_s is not None
                and machine.number not in self.state.signalled_machines
            ):
                # Stored: a restarted simulator must not signal again.
                self.state.signalled_machines.append(machine.number)
                self.datacenter.send_signal(machine, signal.SIGTERM)

    def task_environment(self, machine: SimulatedMachine) -> Mapping[str, str]:
        return {}

    def answer_metadata(
        self, machine: SimulatedMachine, request: WireRequest
    ) -> WireResponse | None:
        return None

    def _create(self, token: str, group: PlainGroup) -> WireResponse:
        if self.faults.take("credentials"):
            return WireResponse.json({"error": "missing credentials"}, 401)
        if self.faults.take("permission"):
            return WireResponse.json({"error": "permission to rent machines is missing"}, 403)
        if self.faults.take("quota"):
            return WireResponse.json({"error": "quota exceeded: 0 machines"}, 402)
        if self.faults.take("capacity"):
            return WireResponse.json({"error": "no capacity"}, 409)
        if token not in self.state.groups:
            # PUT semantics by the token: a repeated request creates nothing.
            self.state.groups[token] = group
        return WireResponse.json({"token": token})


# --- the provisioner --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainOptions:
    provisioner: ClassVar[str] = "plain"

    url: str = ""
    nodes: int | None = None
    """The number of machines of the whole run; None for one machine per worker."""
    prices: dict[str, Any] = field(default_factory=dict)
    """Prices of a machine in US dollars per hour: {'*': {'spot': 1, 'on_demand': 3}}."""

    def __post_init__(self) -> None:
        check_prices(self.prices, option="PlainOptions(prices=…)", types=("*",))


class PlainProvisioner:
    """The provisioner interface over HTTP."""

    name = "plain"
    Options: ClassVar = PlainOptions

    def __init__(self, options: PlainOptions) -> None:
        if not options.url:
            raise ConfigError(
                "PlainOptions(url=…) is missing.", do="Try provisioner='sim://plain'."
            )
        self.options = options

    @classmethod
    def with_options(cls, **options: Any) -> PlainProvisioner:
        return cls(PlainOptions(**options))

    @property
    def traits(self) -> Traits:
        return Traits(
            max_nodes=1000,
            notice_s=5.0,
            observe_interval_s=1.0,
            notice_sources=("signal",),
            shared_directories="always",
        )

    def plan(self, request: GroupRequest) -> GroupPlan:
        # Rounded up: the last machine may have fewer workers.
        slots = max(1, -(-request.total_workers // (self.options.nodes or request.total_workers)))
        nodes = count_nodes(request, slots=slots, max_nodes=1000, backend=self.name)
        # Without network: the prices have no effect.
        offer = select_offer(request, self._offers(), do="List the offers of this cloud again.")
        return GroupPlan(
            token=request.token,
            provisioner=self.name,
            num_nodes=nodes,
            slots_per_node=slots,
            body={} if offer is None else {"market": offer.market.value},
        )

    def offers(self, request: GroupRequest) -> OfferListing:
        """Return an offer for each market; a request without an offer gets spot machines."""
        return OfferListing(offers=self._offers(), default=offer_name(self.name, Market.SPOT))

    def _offers(self) -> tuple[Offer, ...]:
        now_s = system.wall_ms() / 1000
        return tuple(
            Offer(
                name=offer_name(self.name, market),
                provisioner=self.name,
                market=market,
                price=given_price(self.options.prices, "", market, now_s=now_s),
            )
            for market in Market
        )

    def submit(self, plan: GroupPlan, launch: AgentLaunchSpec) -> GroupHandle | Refusal:
        environments = [
            launch.environment_for(plan.token, n, plan.slots_per_node)
            for n in range(plan.num_nodes)
        ]
        status, content = self._call(
            "POST",
            plan.token,
            {"command": AGENT_COMMAND, "environments": environments, **plan.body},
        )
        # No capacity is an expected outcome, so it is a value.
        if status == 409:
            return Refusal(content["error"])
        if status != 200:
            raise _ERRORS.get(status, ProvisionError)(
                f"The plain cloud rejected the request: {content['error']}."
            )
        return self._handle(plan)

    def find_group(self, plan: GroupPlan, launch: AgentLaunchSpec) -> GroupHandle | None:
        """Return the group whose name is the token."""
        status, _ = self._call("GET", plan.token)
        return None if status == 404 else self._handle(plan)

    def _handle(self, plan: GroupPlan) -> GroupHandle:
        return GroupHandle(
            token=plan.token,
            provisioner=self.name,
            name=plan.token,
            detail={"nodes": plan.num_nodes},
            offer=offer_name(self.name, Market(plan.body.get("market", Market.SPOT))),
        )

    def observe(self, handle: GroupHandle) -> GroupStatus:
        status, content = self._call("GET", handle.name)
        if status == 404:
            return missing_group_status(handle.detail["nodes"])
        nodes = []
        for machine in content["machines"]:
            state = NodeState.RUNNING if machine["state"] == "up" else NodeState.WAITING
            if machine["state"] == "over":
                # Without a code the machine was preempted or stopped; with one its agent failed.
                state = NodeState.FAILED if machine["code"] not in (None, 0) else NodeState.GONE
            reason = machine["reason"] if machine["state"] == "over" else ""
            code = machine["code"] if machine["state"] == "over" else None
            nodes.append(
                NodeStatus(
                    state=state,
                    reason=reason,
                    exit_code=code,
                    started_at_ms=_to_ms(machine.get("billed_from_s")),
                    ended_at_ms=_to_ms(machine.get("billed_until_s")),
                )
            )
        return GroupStatus(nodes=tuple(nodes))

    def cancel(self, handle: GroupHandle) -> None:
        self._call("DELETE", handle.name)

    def _call(self, method: str, token: str, body: Any = None) -> tuple[int, Any]:
        address = urlsplit(self.options.url)
        connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=10)
        with contextlib.closing(connection):
            connection.request(
                method, f"/groups/{token}", msgspec.json.encode(body) if body else None
            )
            reply = connection.getresponse()
            text = reply.read()
        if reply.status >= 500:
            # An OSError is retried by the caller; the other errors are final.
            raise OSError(f"The plain cloud is unavailable (HTTP {reply.status}).")
        return reply.status, msgspec.json.decode(text)


def _to_ms(time_s: float | None) -> int | None:
    return None if time_s is None else int(time_s * 1000)


_ERRORS: Mapping[int, type[ProvisionError]] = {
    401: ProvisionPermissionError,
    402: QuotaError,
    403: ProvisionPermissionError,
}
