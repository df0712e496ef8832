"""`CombinedProvisioner`: several backends as one, for `provisioner=["aws_batch", "gcp_batch"]`.

Each offer belongs to one backend, and with it the request, the plan and the group. The networks of
two backends are different: their machines cannot connect, so that a run trains on those of one of
them at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from spotfit.core.errors import ConfigError
from spotfit.model.group import (
    GroupHandle,
    GroupPlan,
    GroupRequest,
    GroupStatus,
)
from spotfit.model.offer import Offer
from spotfit.provision.api import (
    AccountCheck,
    MachineOutput,
    Provisioner,
    Refusal,
    Traits,
    fetch_machine_output,
    find_group,
    open_client,
    run_account_checks,
)
from spotfit.provision.launch import AgentLaunchSpec
from spotfit.provision.offers import OfferListing, list_offers
from spotfit.provision.profile import open_provisioner

NAME = "combined"
_BACKEND = "backend"


class CombinedProvisioner:
    """Routes each call to the backend of the offer, plan or handle.

    A request without an offer goes to the backend of its network, else to the first one of which no
    network was refused.
    """

    name = NAME

    def __init__(self, backends: Sequence[Provisioner]) -> None:
        self._backends = tuple(backends)
        requeueing = {one.traits.requeues_itself for one in self._backends}
        if len(requeueing) > 1:
            names = ", ".join(one.name for one in self._backends if one.traits.requeues_itself)
            raise ConfigError(
                f"The backends {names} restart lost machines by themselves, and others do not: "
                "they cannot be combined.",
                do="Set attempts=1 for AWS Batch and max_retries=0 for Google Cloud Batch, or let "
                "all backends of the run restart machines.",
            )

    @classmethod
    def with_options(cls, *, backends: Sequence[Sequence[Any]]) -> CombinedProvisioner:
        """Open the backends, given as pairs of their name and their resolved options.

        Raises what `open_provisioner` raises, and `ConfigError` for backends that cannot be
        combined.
        """
        return cls([open_provisioner(name, options) for name, options in backends])

    @property
    def traits(self) -> Traits:
        """What holds for all backends, and the longest of their delays."""
        all_traits = [one.traits for one in self._backends]
        shared = {one.shared_directories for one in all_traits}
        return Traits(
            spot=any(one.spot for one in all_traits),
            max_nodes=min(one.max_nodes for one in all_traits),
            notice_s=min(one.notice_s for one in all_traits),
            mean_lifetime_s=min(one.mean_lifetime_s for one in all_traits),
            start_time_s=max(one.start_time_s for one in all_traits),
            requeues_itself=all_traits[0].requeues_itself,
            releases_on_agent_exit=all(one.releases_on_agent_exit for one in all_traits),
            observe_interval_s=max(one.observe_interval_s for one in all_traits),
            status_lag_s=max(one.status_lag_s for one in all_traits),
            read_lag_s=max(one.read_lag_s for one in all_traits),
            notice_sources=tuple(
                dict.fromkeys(source for one in all_traits for source in one.notice_sources)
            ),
            shared_directories=next(
                one for one in ("never", "possibly", "always") if one in shared
            ),
            keeps_output=any(one.keeps_output for one in all_traits),
        )

    def open_client(self) -> None:
        """Load the client library of each backend."""
        for one in self._backends:
            open_client(one)

    def offers(self, request: GroupRequest) -> OfferListing:
        """Return the offers of all backends; the index of the backend is among their options."""
        offers: list[Offer] = []
        remarks: list[str] = []
        for index, backend in enumerate(self._backends):
            listing = list_offers(backend, self._own_request(request, index))
            known = {offer.name for offer in offers}
            for offer in listing.offers:
                # Two backends of one kind, such as two projects, may use the same names.
                name = f"{offer.name}#{index}" if offer.name in known else offer.name
                options = {**offer.options, _BACKEND: str(index)}
                network = join_network(index, offer.network)
                offers.append(replace(offer, name=name, network=network, options=options))
            remarks += listing.remarks
        return OfferListing(offers=tuple(offers), remarks=tuple(remarks))

    def plan(self, request: GroupRequest) -> GroupPlan:
        index = self._backend_of(request)
        plan = self._backends[index].plan(self._own_request(request, index))
        body = {_BACKEND: index, "provisioner": plan.provisioner, "body": plan.body}
        if request.offer is not None:
            body["offer"] = request.offer.name
        return replace(plan, provisioner=NAME, body=body)

    def submit(self, plan: GroupPlan, launch: AgentLaunchSpec) -> GroupHandle | Refusal:
        index, own_plan = _split_plan(plan)
        backend = self._backends[index]
        answer = backend.submit(own_plan, _own_launch(backend, launch))
        return answer if isinstance(answer, Refusal) else _join_handle(index, answer, plan)

    def find_group(self, plan: GroupPlan, launch: AgentLaunchSpec) -> GroupHandle | None:
        """Return the group of the plan at its backend; see `provision.api.find_group`."""
        index, own_plan = _split_plan(plan)
        backend = self._backends[index]
        handle = find_group(backend, own_plan, _own_launch(backend, launch))
        return None if handle is None else _join_handle(index, handle, plan)

    def observe(self, handle: GroupHandle) -> GroupStatus:
        index, own_handle = _split_handle(handle)
        return self._backends[index].observe(own_handle)

    def cancel(self, handle: GroupHandle) -> None:
        index, own_handle = _split_handle(handle)
        self._backends[index].cancel(own_handle)

    def fetch_machine_output(
        self, handle: GroupHandle, node: int, *, max_lines: int
    ) -> Sequence[MachineOutput]:
        """Return the output that the group's backend keeps; see `MachineOutputReader`."""
        index, own_handle = _split_handle(handle)
        return fetch_machine_output(self._backends[index], own_handle, node, max_lines=max_lines)

    def check_account(self, storage: str = "") -> Iterator[AccountCheck]:
        """Yield the checks of each backend."""
        for one in self._backends:
            yield from run_account_checks(one, storage)

    def _backend_of(self, request: GroupRequest) -> int:
        if request.offer is not None:
            return int(request.offer.options[_BACKEND])
        if request.network:
            return _split_network(request.network)[0]
        refused = {_split_network(one)[0] for one in request.refused_networks}
        return next((n for n in range(len(self._backends)) if n not in refused), 0)

    def _own_request(self, request: GroupRequest, index: int) -> GroupRequest:
        """The request in the terms of one backend."""
        offer = request.offer
        if offer is not None:
            options = {name: text for name, text in offer.options.items() if name != _BACKEND}
            network = _split_network(offer.network)[1]
            offer = replace(offer, options=options, network=network)
        networks = [_split_network(one) for one in request.refused_networks]
        return replace(
            request,
            offer=offer,
            network=_split_network(request.network)[1],
            refused_networks=tuple(network for n, network in networks if n == index and network),
        )


def _own_launch(backend: Provisioner, launch: AgentLaunchSpec) -> AgentLaunchSpec:
    return dataclasses.replace(launch, notice_sources=backend.traits.notice_sources)


def join_network(index: int, network: str) -> str:
    """Return the name of a network of the backend with that index among those of the run."""
    return f"{index}:{network}"


def _split_network(network: str) -> tuple[int, str]:
    index, _, own = network.partition(":")
    return (int(index), own) if index else (0, "")


def _split_plan(plan: GroupPlan) -> tuple[int, GroupPlan]:
    body = plan.body
    return body[_BACKEND], replace(plan, provisioner=body["provisioner"], body=body["body"])


def _join_handle(index: int, handle: GroupHandle, plan: GroupPlan) -> GroupHandle:
    return replace(
        handle,
        provisioner=NAME,
        detail={_BACKEND: index, "provisioner": handle.provisioner, "detail": handle.detail},
        network=join_network(index, handle.network),
        offer=plan.body.get("offer", handle.offer),
    )


def _split_handle(handle: GroupHandle) -> tuple[int, GroupHandle]:
    detail = handle.detail
    own = replace(
        handle,
        provisioner=detail["provisioner"],
        detail=detail["detail"],
        network=_split_network(handle.network)[1],
    )
    return detail[_BACKEND], own
