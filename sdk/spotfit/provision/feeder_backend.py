"""`FeederBackendProvisioner`: the machines for feeders come from a backend of their own.

For `Feeders(provisioner=…)`. Requests, plans and groups of other roles are those of the workers'
backend, unchanged. Those of feeders are marked by the name of this provisioner, and their offers by
a suffix: both backends may use the same names. Feeders serve workers of their network only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from msgspec.structs import replace

from spotfit.core.errors import ConfigError
from spotfit.host import plugins
from spotfit.model.group import GroupHandle, GroupPlan, GroupRequest, GroupStatus
from spotfit.model.offer import Offer
from spotfit.provision import combined
from spotfit.provision.api import (
    MachineOutput,
    Provisioner,
    Refusal,
    Traits,
    fetch_machine_output,
    find_group,
    open_client,
    prewarm,
)
from spotfit.provision.launch import AgentLaunchSpec
from spotfit.provision.offers import OfferListing, list_offers
from spotfit.provision.profile import PROVISIONER_ENTRY_POINTS, open_provisioner

NAME = "with_feeders"
_SUFFIX = "#feeders"


class FeederBackendProvisioner:
    """Routes each call by the role of the request, or by the mark of the plan or handle."""

    name = NAME

    def __init__(
        self, workers: Provisioner, feeders: Provisioner, network_prefixes: Sequence[str] = ("",)
    ) -> None:
        """`network_prefixes`: before the networks of the feeders' backend, in those of workers."""
        self.workers = workers
        self.feeders = feeders
        self._prefixes = tuple(network_prefixes)
        if workers.traits.requeues_itself != feeders.traits.requeues_itself:
            raise ConfigError(
                "Feeders(provisioner=…) and provisioner=… differ in whether the backend restarts "
                "lost machines by itself: they cannot be used in one run.",
                do="Set the same attempts for AWS Batch, or max_retries for Google Cloud Batch.",
            )

    @classmethod
    def with_options(
        cls, *, workers: Sequence[Any], feeders: Sequence[Any]
    ) -> FeederBackendProvisioner:
        """Open both backends, each given as a pair of its name and its resolved options.

        Raises what `open_provisioner` raises, and `ConfigError` if machines of the two backends
        cannot connect to each other.
        """
        name, options = workers
        is_combined = name == combined.NAME
        backends = options["backends"] if is_combined else [workers]
        differences = [_difference(one, feeders) for one in backends]
        if all(differences):
            raise ConfigError(
                f"Feeders(provisioner=…) and provisioner=… {differences[0]}: machines for feeders "
                "could not connect to those of the workers.",
                do="Let both name the same backend, in the same network.",
            )
        connected = [index for index, one in enumerate(differences) if not one]
        prefixes = [combined.join_network(one, "") for one in connected] if is_combined else [""]
        return cls(open_provisioner(name, options), open_provisioner(*feeders), prefixes)

    @property
    def traits(self) -> Traits:
        """Those of the workers' backend, with the longest delays of both."""
        workers, feeders = self.workers.traits, self.feeders.traits
        return dataclasses.replace(
            workers,
            releases_on_agent_exit=workers.releases_on_agent_exit
            and feeders.releases_on_agent_exit,
            observe_interval_s=max(workers.observe_interval_s, feeders.observe_interval_s),
            status_lag_s=max(workers.status_lag_s, feeders.status_lag_s),
            read_lag_s=max(workers.read_lag_s, feeders.read_lag_s),
            keeps_output=workers.keeps_output or feeders.keeps_output,
        )

    def open_client(self) -> None:
        """Load the client library of both backends."""
        open_client(self.workers)
        open_client(self.feeders)

    def prewarm(
        self, plan: GroupPlan, framework: str, preload: Sequence[str] = ()
    ) -> AbstractContextManager[object]:
        """Prewarm machines of the workers' backend; see `provision.api.prewarm`."""
        return prewarm(self.workers, plan, framework, preload)

    def offers(self, request: GroupRequest) -> OfferListing:
        """Return the offers of the backend of the role."""
        if request.role != "feed":
            return list_offers(self.workers, request)
        listing = list_offers(self.feeders, request)
        offers = feeder_offers(listing.offers, self._prefixes[0])
        default = listing.default + _SUFFIX if listing.default else listing.default
        return OfferListing(offers, listing.remarks, default)

    def networks_of(self, offers: Iterable[Offer]) -> tuple[str, ...]:
        """Return the networks of workers in which feeders of these offers can be rented."""
        own = dict.fromkeys(one.network.removeprefix(self._prefixes[0]) for one in offers)
        return tuple(prefix + network for prefix in self._prefixes for network in own)

    def plan(self, request: GroupRequest) -> GroupPlan:
        if request.role != "feed":
            return self.workers.plan(request)
        network = request.network
        prefix = next((one for one in self._prefixes if network.startswith(one)), "")
        own = replace(request, network=network.removeprefix(prefix), refused_networks=())
        plan = self.feeders.plan(own)
        body = {"provisioner": plan.provisioner, "body": plan.body, "prefix": prefix}
        return replace(plan, provisioner=NAME, body=body)

    def submit(self, plan: GroupPlan, launch: AgentLaunchSpec) -> GroupHandle | Refusal:
        if plan.provisioner != NAME:
            return self.workers.submit(plan, launch)
        answer = self.feeders.submit(_own_plan(plan), self._own_launch(launch))
        return answer if isinstance(answer, Refusal) else _marked(answer, plan)

    def find_group(self, plan: GroupPlan, launch: AgentLaunchSpec) -> GroupHandle | None:
        """Return the group of the plan at its backend; see `provision.api.find_group`."""
        if plan.provisioner != NAME:
            return find_group(self.workers, plan, launch)
        handle = find_group(self.feeders, _own_plan(plan), self._own_launch(launch))
        return None if handle is None else _marked(handle, plan)

    def observe(self, handle: GroupHandle) -> GroupStatus:
        backend, own = self._backend_of(handle)
        return backend.observe(own)

    def cancel(self, handle: GroupHandle) -> None:
        backend, own = self._backend_of(handle)
        backend.cancel(own)

    def fetch_machine_output(
        self, handle: GroupHandle, node: int, *, max_lines: int
    ) -> Sequence[MachineOutput]:
        """Return the output that the group's backend keeps; see `MachineOutputReader`."""
        backend, own = self._backend_of(handle)
        return fetch_machine_output(backend, own, node, max_lines=max_lines)

    def _own_launch(self, launch: AgentLaunchSpec) -> AgentLaunchSpec:
        return dataclasses.replace(launch, notice_sources=self.feeders.traits.notice_sources)

    def _backend_of(self, handle: GroupHandle) -> tuple[Provisioner, GroupHandle]:
        if handle.provisioner != NAME:
            return self.workers, handle
        detail = handle.detail
        own = replace(
            handle,
            provisioner=detail["provisioner"],
            detail=detail["detail"],
            network=handle.network.removeprefix(detail["prefix"]),
            offer=handle.offer.removesuffix(_SUFFIX),
        )
        return self.feeders, own


def feeder_offers(offers: Iterable[Offer], network_prefix: str = "") -> tuple[Offer, ...]:
    """Return offers of the feeders' backend as they are called in the run."""
    return tuple(
        replace(
            one,
            name=one.name + _SUFFIX,
            # The bill compares the prices of one backend, region and machine type.
            provisioner=NAME,
            network=network_prefix + one.network,
        )
        for one in offers
    )


def backends_of(provisioner: Provisioner) -> Iterator[Provisioner]:
    """Yield the backend of the workers and, if they have one of their own, that of the feeders."""
    if isinstance(provisioner, FeederBackendProvisioner):
        yield provisioner.workers
        yield provisioner.feeders
    else:
        yield provisioner


def _difference(workers: Sequence[Any], feeders: Sequence[Any]) -> str:
    """Why machines of two backends cannot connect to each other; '' if nothing shows that."""
    (name, options), (other_name, other_options) = workers, feeders
    if name != other_name:
        return f"are different backends, {other_name!r} and {name!r}"
    settings: Sequence[str] = getattr(
        plugins.load(PROVISIONER_ENTRY_POINTS, name), "network_options", ()
    )
    different = [one for one in settings if options.get(one) != other_options.get(one)]
    if not different:
        return ""
    texts = [_difference_text(one, options, other_options) for one in different]
    return f"of {name!r} are of different networks ({'; '.join(texts)})"


def _difference_text(option: str, workers: Mapping[str, Any], feeders: Mapping[str, Any]) -> str:
    shown = [repr(one[option]) if option in one else "its default" for one in (feeders, workers)]
    return f"{option} is {shown[0]} for feeders and {shown[1]} for workers"


def _own_plan(plan: GroupPlan) -> GroupPlan:
    return replace(plan, provisioner=plan.body["provisioner"], body=plan.body["body"])


def _marked(handle: GroupHandle, plan: GroupPlan) -> GroupHandle:
    prefix = plan.body["prefix"]
    return replace(
        handle,
        provisioner=NAME,
        detail={"provisioner": handle.provisioner, "detail": handle.detail, "prefix": prefix},
        network=prefix + handle.network,
        offer=handle.offer + _SUFFIX if handle.offer else "",
    )
