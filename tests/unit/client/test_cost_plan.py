"""The offers that a run may rent, and that `estimate()` rejects the limits that `fit()` rejects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

import spotfit.data
from spotfit.client.cost_plan import CostPlan, plan_cost
from spotfit.client.estimate import Estimate
from spotfit.client.estimate_run import estimate_request
from spotfit.client.request import FitRequest, run_preflight
from spotfit.client.run_config import RunConfig
from spotfit.core.errors import ConfigError, ConfigErrors
from spotfit.core.ids import Token
from spotfit.data.feeders import Feeders
from spotfit.host import plugins
from spotfit.model.group import GroupPlan, GroupRequest
from spotfit.model.offer import Market, Offer, Price
from spotfit.model.replay import ReplayedJob, ReplayOutcome
from spotfit.model.validation_config import ValidationConfig
from spotfit.provision.offers import OfferListing
from tests.unit.client.harness import ClientHarness
from tests.unit.control.fake_provisioner import FakeProvisioner

WORKERS = GroupRequest(token=Token("t-1"), num_workers=2, total_workers=2)


def an_offer(market: Market, usd: float | None) -> Offer:
    price = None if usd is None else Price(usd_per_hour=usd, source="given", as_of_s=0.0)
    return Offer(name=f"local/{market}", provisioner="local", market=market, price=price)


SPOT = an_offer(Market.SPOT, 1.0)
ON_DEMAND = an_offer(Market.ON_DEMAND, 3.0)
UNPRICED_SPOT = an_offer(Market.SPOT, None)
UNPRICED_ON_DEMAND = an_offer(Market.ON_DEMAND, None)


class Cloud(FakeProvisioner):
    """A cloud with these offers, which rents those that are not `compared`."""

    def __init__(self, *offers: Offer, compared: bool = False, default: str | None = None) -> None:
        super().__init__()
        self.listing = OfferListing(offers, ("A remark.",), default)
        self.compared = (ON_DEMAND, UNPRICED_ON_DEMAND) if compared else ()

    def offers(self, request: GroupRequest) -> OfferListing:
        return self.listing

    def plan(self, request: GroupRequest) -> GroupPlan:
        if request.offer in self.compared:
            raise ConfigError("On-demand machines cannot be rented.", do="Rent spot machines.")
        return super().plan(request)


# --- The plan -------------------------------------------------------------------------------------


def plan(cloud: Cloud, **run: Any) -> CostPlan:
    return plan_cost(RunConfig(**run), cloud, WORKERS, 0)


def test_offers_without_a_price_are_rentable_but_not_by_a_run_with_limits() -> None:
    found = plan(Cloud(SPOT, UNPRICED_ON_DEMAND))
    assert [one.offer for one in found.rentable] == [SPOT, UNPRICED_ON_DEMAND]
    assert [(one.offer, one.machines) for one in found.plans] == [(SPOT, 2)]
    assert found.spec.machines == {SPOT.name: 2}


def test_an_offer_that_cannot_be_rented_is_listed_with_the_reason() -> None:
    found = plan(Cloud(SPOT, ON_DEMAND, compared=True, default="x"))
    assert [one.offer for one in found.rentable] == [SPOT]
    assert found.listing.offers == found.spec.offers == (SPOT, ON_DEMAND)
    assert found.listing.remarks == ("A remark.", "On-demand machines cannot be rented.")
    assert found.listing.default == "x"


def test_a_run_without_limits_contradicts_nothing() -> None:
    assert not list(plan(Cloud(UNPRICED_SPOT)).errors(plan(Cloud(UNPRICED_SPOT)).limits))


# --- The checks of fit() and estimate() -----------------------------------------------------------

CLOUDS = {
    "both markets": Cloud(SPOT, ON_DEMAND),
    "spot": Cloud(SPOT),
    "spot, without price": Cloud(UNPRICED_SPOT),
    "spot, on-demand for comparison": Cloud(SPOT, ON_DEMAND, compared=True),
    "spot, on-demand without price": Cloud(SPOT, UNPRICED_ON_DEMAND),
    "on-demand, spot without price": Cloud(UNPRICED_SPOT, ON_DEMAND),
    "on-demand": Cloud(ON_DEMAND),
    "on-demand, without price": Cloud(UNPRICED_ON_DEMAND),
    "no prices": Cloud(UNPRICED_SPOT, UNPRICED_ON_DEMAND),
    "an unknown default": Cloud(SPOT, ON_DEMAND, default=""),
}
# 40 hours on two machines cost $80 on spot and $240 on on-demand ones.
LIMITS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "deadline": {"deadline": "60h"},
    "early deadline": {"deadline": "40h"},
    "deadline without fallback": {"deadline": "60h", "fallback": "never"},
    "early deadline without fallback": {"deadline": "40h", "fallback": "never"},
    "budget": {"budget_usd": 400},
    "small budget": {"budget_usd": 50},
    "tiny budget": {"budget_usd": 0.01},
    "budget with fallback": {"budget_usd": 400, "fallback": "on_demand"},
    "deadline and budget": {"deadline": "60h", "budget_usd": 400},
    "deadline and small budget": {"deadline": "60h", "budget_usd": 200},
    "deadline and tiny budget": {"deadline": "60h", "budget_usd": 0.01},
    "fallback": {"fallback": "on_demand"},
}


class SpotMarkets:
    """Markets whose spot machines are always available."""

    names = ("zone-1",)
    remarks = ()

    def replay(self, job: ReplayedJob, *, max_decisions: int) -> Sequence[ReplayOutcome]:
        finish_s = job.work_s + job.changeover_s
        usd = min(one.usd_per_hour for one in job.offers) * finish_s / 3600
        return [ReplayOutcome(recording="zone-1", usd=usd, finish_s=finish_s, is_late=False)]


@pytest.fixture(autouse=True)
def markets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "load", lambda _group, _name: lambda _folder: SpotMarkets())


def compare(harness: ClientHarness, cloud: Cloud, request: FitRequest) -> Estimate:
    """Return the estimate, whose rejections must be the errors of the checks of `fit()`."""
    harness.cloud = cloud
    found = estimate_request(request, {})
    errors: Sequence[BaseException] = ()
    try:
        run_preflight(request)
    except ConfigErrors as several:
        errors = several.errors
    except ConfigError as error:
        errors = (error,)
    assert found.rejections == tuple(one.message for one in errors if isinstance(one, ConfigError))
    return found


def validate() -> dict[str, Any]:
    """A validation without machines."""
    return {}


def a_run(harness: ClientHarness, **limits: Any) -> FitRequest:
    run = RunConfig(name="n", storage_path=harness.storage_path, training_time_s="40h", **limits)
    return harness.request(run=run)


@pytest.mark.parametrize("cloud", CLOUDS)
@pytest.mark.parametrize("limits", LIMITS)
def test_an_estimate_rejects_what_fit_rejects(
    harness: ClientHarness, cloud: str, limits: str
) -> None:
    given = LIMITS[limits]
    found = compare(harness, CLOUDS[cloud], a_run(harness, **given))
    has_guarantee = "deadline" in given and given.get("fallback") != "never"
    assert found.is_guaranteed == (has_guarantee and not found.rejections)


def test_the_earliest_deadline_of_an_estimate_is_accepted_by_fit(harness: ClientHarness) -> None:
    without = compare(harness, CLOUDS["both markets"], a_run(harness))
    assert without.earliest_deadline_s is not None
    request = a_run(harness, deadline=without.earliest_deadline_s)
    assert compare(harness, CLOUDS["both markets"], request).is_guaranteed


@pytest.mark.parametrize("default", ["", SPOT.name])
def test_validations_need_a_default_offer(harness: ClientHarness, default: str) -> None:
    request = replace(a_run(harness, budget_usd=400), validation=ValidationConfig(validate))
    found = compare(harness, Cloud(SPOT, ON_DEMAND, default=default), request)
    assert bool(found.rejections) == (default == "")


@pytest.mark.parametrize(("budget_usd", "is_rejected"), [(200.0, False), (100.0, True)])
def test_feeders_count(harness: ClientHarness, budget_usd: float, *, is_rejected: bool) -> None:
    rows, feeders = spotfit.data.range(8), Feeders(nodes=(1, 2), cpus=16)
    request = replace(
        a_run(harness, budget_usd=budget_usd), datasets={"train": rows}, data_feeders=feeders
    )
    found = compare(harness, CLOUDS["both markets"], request)
    assert bool(found.rejections) == is_rejected
