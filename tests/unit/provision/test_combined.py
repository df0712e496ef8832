"""Several backends as one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import replace

from spotfit.core.errors import ConfigError
from spotfit.core.ids import RunId, Token
from spotfit.model.group import (
    GroupHandle,
    GroupPlan,
    GroupRequest,
    GroupStatus,
    NodeState,
    NodeStatus,
)
from spotfit.model.offer import Market, Offer
from spotfit.provision.api import MachineOutput, Refusal, Traits, run_account_checks
from spotfit.provision.combined import CombinedProvisioner
from spotfit.provision.launch import AgentLaunchSpec
from spotfit.provision.offers import OfferListing, list_offers

TOKEN = Token("t-1")
REQUEST = GroupRequest(token=TOKEN, num_workers=1, total_workers=1)
LAUNCH = AgentLaunchSpec("s3://b/r", RunId("r" * 32), "secret", ("aws", "gcp"))


@dataclass
class Backend:
    """A backend with one offer in one region, which records its calls."""

    name: str
    region: str
    requeues: bool = False
    is_full: bool = False
    calls: list[Any] = field(default_factory=list)

    @property
    def traits(self) -> Traits:
        return Traits(
            notice_sources=(self.name,),
            requeues_itself=self.requeues,
            notice_s=30.0 if self.name == "one" else 120.0,
            shared_directories="never" if self.name == "one" else "possibly",
            keeps_output=True,
        )

    def offers(self, request: GroupRequest) -> OfferListing:
        self.calls.append(request)
        offer = Offer(
            name="spot",
            provisioner=self.name,
            market=Market.SPOT,
            region=self.region,
            network=self.region,
            options={"queue": "q"},
        )
        return OfferListing(offers=(offer,), remarks=(f"remark of {self.name}",))

    def plan(self, request: GroupRequest) -> GroupPlan:
        self.calls.append(request)
        return GroupPlan(
            token=request.token,
            provisioner=self.name,
            num_nodes=1,
            slots_per_node=1,
            body={"region": self.region},
        )

    def submit(self, plan: GroupPlan, launch: AgentLaunchSpec) -> GroupHandle | Refusal:
        self.calls += [plan, launch]
        if self.is_full:
            return Refusal("full")
        return GroupHandle(
            token=plan.token,
            provisioner=self.name,
            name="job",
            detail={"region": self.region},
            network=self.region,
            offer="spot",
        )

    def find_group(self, plan: GroupPlan, launch: AgentLaunchSpec) -> GroupHandle | None:
        found = self.submit(plan, launch)
        return found if isinstance(found, GroupHandle) else None

    def observe(self, handle: GroupHandle) -> GroupStatus:
        self.calls.append(handle)
        return GroupStatus(nodes=(NodeStatus(state=NodeState.RUNNING, reason=self.name),))

    def cancel(self, handle: GroupHandle) -> None:
        self.calls.append(handle)

    def fetch_machine_output(
        self, handle: GroupHandle, node: int, *, max_lines: int
    ) -> list[MachineOutput]:
        return [MachineOutput(self.name)]


@pytest.fixture
def one() -> Backend:
    return Backend("one", "eu")


@pytest.fixture
def two() -> Backend:
    return Backend("two", "us")


@pytest.fixture
def both(one: Backend, two: Backend) -> CombinedProvisioner:
    return CombinedProvisioner([one, two])


def offers(both: CombinedProvisioner) -> tuple[Offer, ...]:
    return list_offers(both, REQUEST).offers


def test_offers_have_unique_names_and_networks(both: CombinedProvisioner) -> None:
    listing = list_offers(both, REQUEST)
    assert [one.name for one in listing.offers] == ["spot", "spot#1"]
    assert [one.network for one in listing.offers] == ["0:eu", "1:us"]
    assert listing.remarks == ("remark of one", "remark of two")


def test_a_backend_plans_its_own_offer(both: CombinedProvisioner, two: Backend) -> None:
    offer = offers(both)[1]
    plan = both.plan(replace(REQUEST, offer=offer, network=offer.network))
    planned = two.calls[-1]
    assert (planned.offer.network, planned.offer.options) == ("us", {"queue": "q"})
    assert planned.network == "us"
    assert (plan.provisioner, plan.token) == ("combined", TOKEN)


@pytest.mark.parametrize(
    ("network", "refused", "expected"),
    [("", (), "one"), ("1:us", (), "two"), ("", ("0:eu",), "two"), ("", ("0:eu", "1:us"), "one")],
)
def test_a_request_without_an_offer_goes_to_the_backend_of_its_network_or_the_next(
    both: CombinedProvisioner, network: str, refused: tuple[str, ...], expected: str
) -> None:
    plan = both.plan(replace(REQUEST, network=network, refused_networks=refused))
    assert plan.body["provisioner"] == expected


def test_only_the_refused_networks_of_a_backend_are_its_own(
    both: CombinedProvisioner, two: Backend
) -> None:
    both.plan(replace(REQUEST, network="1:us", refused_networks=("0:eu", "1:asia")))
    assert two.calls[-1].refused_networks == ("asia",)


def test_a_group_is_submitted_observed_and_cancelled_at_its_backend(
    both: CombinedProvisioner, one: Backend, two: Backend
) -> None:
    plan = both.plan(replace(REQUEST, offer=offers(both)[1]))
    one.calls.clear()
    handle = both.submit(plan, LAUNCH)
    assert isinstance(handle, GroupHandle)
    own_plan, own_launch = two.calls[-2:]
    assert (own_plan.provisioner, own_plan.body) == ("two", {"region": "us"})
    assert own_launch.notice_sources == ("two",)
    assert (handle.offer, handle.network, handle.provisioner) == ("spot#1", "1:us", "combined")
    assert both.observe(handle).nodes[0].reason == "two"
    both.cancel(handle)
    own_handle = two.calls[-1]
    assert (own_handle.provisioner, own_handle.detail) == ("two", {"region": "us"})
    assert own_handle.network == "us"
    assert [one.source for one in both.fetch_machine_output(handle, 0, max_lines=9)] == ["two"]
    assert one.calls == []


def test_a_submitted_group_is_found_at_its_backend(both: CombinedProvisioner) -> None:
    plan = both.plan(replace(REQUEST, offer=offers(both)[1]))
    assert both.find_group(plan, LAUNCH) == both.submit(plan, LAUNCH)


def test_a_refusal_is_that_of_the_backend(both: CombinedProvisioner, one: Backend) -> None:
    one.is_full = True
    plan = both.plan(REQUEST)
    assert both.submit(plan, LAUNCH) == Refusal("full")
    assert both.find_group(plan, LAUNCH) is None


def test_traits_hold_for_all_backends(both: CombinedProvisioner) -> None:
    traits = both.traits
    assert (traits.notice_s, traits.shared_directories) == (30.0, "never")
    assert traits.notice_sources == ("one", "two")


def test_backends_that_differ_in_restarts_cannot_be_combined(one: Backend, two: Backend) -> None:
    one.requeues = True
    with pytest.raises(ConfigError, match="backends one restart lost machines"):
        CombinedProvisioner([one, two])


def test_the_accounts_of_all_backends_are_checked(both: CombinedProvisioner) -> None:
    assert len(list(run_account_checks(both))) == 3
