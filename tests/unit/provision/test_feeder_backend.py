"""Machines for feeders from a backend of their own: routing, names, networks, contradictions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from msgspec.structs import replace

from spotfit.core.errors import ConfigError
from spotfit.model.group import GroupHandle, GroupPlan, GroupRequest, Role
from spotfit.provision.api import Refusal, Traits, fetch_machine_output, find_group
from spotfit.provision.combined import CombinedProvisioner
from spotfit.provision.feeder_backend import FeederBackendProvisioner, backends_of
from spotfit.provision.offers import OfferListing, list_offers
from spotfit.provision.profile import open_provisioner
from tests.unit.provision.test_combined import LAUNCH, REQUEST, Backend

FEED = replace(REQUEST, role="feed")


@dataclass
class NamedBackend(Backend):
    """A backend that knows which offer it grants without a request for one."""

    def offers(self, request: GroupRequest) -> OfferListing:
        listing = super().offers(request)
        return OfferListing(listing.offers, listing.remarks, default="spot")


@pytest.fixture
def workers() -> Backend:
    return Backend("one", "eu")


@pytest.fixture
def feeders() -> Backend:
    return NamedBackend("one", "eu")


@pytest.fixture
def both(workers: Backend, feeders: Backend) -> FeederBackendProvisioner:
    return FeederBackendProvisioner(workers, feeders)


def submitted(both: FeederBackendProvisioner, request: GroupRequest) -> GroupHandle:
    handle = both.submit(both.plan(request), LAUNCH)
    assert isinstance(handle, GroupHandle)
    return handle


@pytest.mark.parametrize("role", ["train", "validate"])
def test_other_roles_are_those_of_the_backend_of_the_workers(
    both: FeederBackendProvisioner, workers: Backend, feeders: Backend, role: Role
) -> None:
    request = replace(REQUEST, role=role)
    assert both.plan(request) == workers.plan(request)
    handle = submitted(both, request)
    assert (handle.provisioner, handle.offer, handle.network) == ("one", "spot", "eu")
    both.observe(handle)
    both.cancel(handle)
    assert workers.calls[-2:] == [handle, handle]
    assert list_offers(both, request).offers == workers.offers(request).offers
    assert not feeders.calls


def test_feeders_are_submitted_observed_and_cancelled_at_their_backend(
    both: FeederBackendProvisioner, workers: Backend, feeders: Backend
) -> None:
    plan = both.plan(replace(FEED, network="eu"))
    handle = both.submit(plan, LAUNCH)
    assert isinstance(handle, GroupHandle)
    own_plan, launch = feeders.calls[-2:]
    assert own_plan == feeders.plan(FEED)
    assert launch.notice_sources == ("one",)
    both.observe(handle)
    own = feeders.calls[-1]
    assert (own.provisioner, own.detail, own.offer) == ("one", {"region": "eu"}, "spot")
    both.cancel(handle)
    assert feeders.calls[-1] == own
    assert not workers.calls


def test_the_group_of_a_token_is_found_at_its_backend(
    both: FeederBackendProvisioner, workers: Backend, feeders: Backend
) -> None:
    assert find_group(both, both.plan(FEED), LAUNCH) == submitted(both, FEED)
    assert not workers.calls
    feeders.calls.clear()
    assert find_group(both, both.plan(REQUEST), LAUNCH) == submitted(both, REQUEST)
    assert not feeders.calls


def test_output_is_that_of_the_backend_of_the_group() -> None:
    both = FeederBackendProvisioner(Backend("one", "eu"), Backend("two", "eu"))
    sources = [
        fetch_machine_output(both, submitted(both, request), 0)[0].source
        for request in (REQUEST, FEED)
    ]
    assert sources == ["one", "two"]


def test_a_refusal_is_passed_on(both: FeederBackendProvisioner, feeders: Backend) -> None:
    feeders.is_full = True
    assert both.submit(both.plan(FEED), LAUNCH) == Refusal("full")


def test_offers_of_feeders_have_names_of_their_own(both: FeederBackendProvisioner) -> None:
    listing = list_offers(both, FEED)
    (offer,) = listing.offers
    assert (offer.name, offer.provisioner, offer.network) == ("spot#feeders", "with_feeders", "eu")
    assert listing.default == offer.name
    assert submitted(both, FEED).offer == offer.name


def test_feeders_are_placed_in_the_network_of_the_workers(
    both: FeederBackendProvisioner, feeders: Backend
) -> None:
    both.plan(replace(FEED, network="eu", refused_networks=("us",)))
    assert (feeders.calls[-1].network, feeders.calls[-1].refused_networks) == ("eu", ())
    assert submitted(both, replace(FEED, network="eu")).network == "eu"


def test_networks_of_several_backends_of_workers_have_their_index() -> None:
    workers = CombinedProvisioner([Backend("one", "us"), Backend("one", "eu")])
    feeders = Backend("one", "eu")
    both = FeederBackendProvisioner(workers, feeders, ["0:", "1:"])
    offers = list_offers(both, FEED).offers
    assert both.networks_of(offers) == ("0:eu", "1:eu")
    handle = submitted(both, replace(FEED, network="1:eu"))
    planned = [one for one in feeders.calls if isinstance(one, GroupRequest)]
    assert planned[-1].network == "eu"
    assert handle.network == "1:eu"
    both.observe(handle)
    assert feeders.calls[-1].network == "eu"


def test_delays_are_the_longest_ones_and_the_rest_that_of_the_workers() -> None:
    workers = Traits(notice_s=30.0, status_lag_s=1.0, read_lag_s=9.0, releases_on_agent_exit=False)
    feeders = Traits(notice_s=120.0, status_lag_s=5.0, read_lag_s=2.0, keeps_output=True)
    merged = FeederBackendProvisioner(TraitsBackend(workers), TraitsBackend(feeders)).traits
    assert (merged.notice_s, merged.status_lag_s, merged.read_lag_s) == (30.0, 5.0, 9.0)
    assert merged.keeps_output
    assert not merged.releases_on_agent_exit


class TraitsBackend(Backend):
    def __init__(self, traits: Traits) -> None:
        super().__init__("one", "eu")
        self._traits = traits

    @property
    def traits(self) -> Traits:
        return self._traits


def test_a_backend_that_restarts_machines_and_one_that_does_not_are_refused() -> None:
    with pytest.raises(ConfigError, match="restarts lost machines"):
        FeederBackendProvisioner(Backend("one", "eu", requeues=True), Backend("one", "eu"))


def test_the_backend_of_the_workers_comes_first() -> None:
    one, two = Backend("one", "eu"), Backend("two", "eu")
    assert list(backends_of(FeederBackendProvisioner(one, two))) == [one, two]
    assert list(backends_of(one)) == [one]


# --- opening --------------------------------------------------------------------------------------

GCP = {"region": "us-central1", "image": "i"}


def opened(workers: list[Any], feeders: list[Any]) -> FeederBackendProvisioner:
    provisioner = open_provisioner("with_feeders", {"workers": workers, "feeders": feeders})
    assert isinstance(provisioner, FeederBackendProvisioner)
    return provisioner


def feed_plan(provisioner: FeederBackendProvisioner) -> GroupPlan:
    return provisioner.plan(replace(FEED, resources_per_worker={"CPU": 16.0}))


def test_both_backends_are_opened_with_their_options() -> None:
    provisioner = opened(
        ["gcp_batch", {**GCP, "machine_type": "a3-highgpu-8g"}],
        ["gcp_batch", {**GCP, "machine_type": "c3-standard-22"}],
    )
    instances = [
        plan.body["allocationPolicy"]["instances"][0]["policy"]["machineType"]
        for plan in (
            provisioner.plan(REQUEST),
            replace(feed_plan(provisioner), body=feed_plan(provisioner).body["body"]),
        )
    ]
    assert instances == ["a3-highgpu-8g", "c3-standard-22"]


def test_different_backends_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'slurm' and 'gcp_batch'.*could not connect"):
        opened(["gcp_batch", GCP], ["slurm", {}])


@pytest.mark.parametrize(
    ("name", "workers", "feeders", "text"),
    [
        ("gcp_batch", {**GCP, "project": "a"}, GCP, "project is its default for feeders and 'a'"),
        ("gcp_batch", GCP, {**GCP, "network": "other"}, "network is 'other' for feeders and its"),
        ("azure_batch", {"subnet": "a"}, {"subnet": "b"}, "subnet"),
        ("kubernetes", {"context": "a"}, {"context": "b"}, "context"),
        ("sim", {"cloud": "gcp_batch"}, {"cloud": "aws_batch"}, "cloud"),
    ],
)
def test_different_networks_are_refused(
    name: str, workers: dict[str, Any], feeders: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=f"of different networks \\(.*{text}"):
        opened([name, workers], [name, feeders])


def test_one_of_several_backends_of_the_workers_suffices() -> None:
    backends = [["slurm", {}], ["gcp_batch", GCP]]
    provisioner = opened(["combined", {"backends": backends}], ["gcp_batch", GCP])
    plan = provisioner.plan(replace(FEED, network="1:", resources_per_worker={"CPU": 2.0}))
    assert plan.body["prefix"] == "1:"
    with pytest.raises(ConfigError, match="could not connect"):
        opened(["combined", {"backends": backends}], ["ssh", {"hosts": ["a"]}])
