"""Limits of the cost of a fit: those of a continued run count what earlier fits have done."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import spotfit.data
from spotfit.client import fit as fitting
from spotfit.client.fit import start_run
from spotfit.client.request import FitRequest
from spotfit.client.run_config import RunConfig
from spotfit.core.errors import ConfigError
from spotfit.data.feeders import Feeders
from spotfit.model.events import FitEnded
from spotfit.model.group import GroupRequest
from spotfit.model.offer import Market, Offer, Price
from spotfit.provision.offers import OfferListing
from spotfit.testing.builders import a_committed_checkpoint
from tests.unit.client.harness import ClientHarness

PRICE = Price(usd_per_hour=1.0, source="given", as_of_s=0.0)
OFFERS = tuple(
    Offer(name=market.value, provisioner="local", market=market, price=PRICE)
    for market in (Market.SPOT, Market.ON_DEMAND)
)


@pytest.fixture(autouse=True)
def offers(harness: ClientHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    def list_offers(_request: GroupRequest) -> OfferListing:
        return OfferListing(offers=OFFERS)

    monkeypatch.setattr(harness.cloud, "offers", list_offers, raising=False)
    monkeypatch.setattr(fitting, "check_latest_checkpoint", lambda *_: None)


def test_a_budget_applies_to_on_demand_machines_if_there_are_no_others(
    harness: ClientHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing = OfferListing(offers=OFFERS[1:])
    monkeypatch.setattr(harness.cloud, "offers", lambda _request: listing, raising=False)
    start_run(request(harness, budget_usd=100.0))
    assert harness.view.spec.cost.uses_on_demand
    choice = harness.view.market.choice
    assert choice is not None
    assert list(choice.workers) == [OFFERS[1].name]


def request(harness: ClientHarness, **limits: Any) -> FitRequest:
    run = RunConfig(
        name="digits", storage_path=harness.storage_path, training_time_s="40h", **limits
    )
    return harness.request(run=run)


def end_after(harness: ClientHarness, progress: float) -> None:
    """End a fit that has done that share of the training."""
    start_run(request(harness, deadline="60h"))
    harness.append_as_agent(a_committed_checkpoint("c1", step=100, progress=progress))
    harness.end_run(FitEnded(outcome="cancelled"))


def test_a_new_run_needs_time_for_the_whole_training(harness: ClientHarness) -> None:
    with pytest.raises(ConfigError, match=r"the training takes 40\.0 h"):
        start_run(request(harness, deadline="10h"))
    assert not harness.cloud.submitted_tokens


def test_a_continued_run_needs_time_for_the_rest_of_the_training(harness: ClientHarness) -> None:
    end_after(harness, 0.8)
    start_run(request(harness, deadline="10h"))
    assert harness.view.fit_count == 2


def test_the_status_of_a_run_has_its_deadline(harness: ClientHarness) -> None:
    deadline = start_run(request(harness, deadline="60h")).status().deadline
    assert deadline is not None
    assert deadline.slack_s == pytest.approx(20 * 3600, abs=60)


def test_a_deadline_before_the_end_of_the_rest_is_an_error(harness: ClientHarness) -> None:
    end_after(harness, 0.8)
    with pytest.raises(ConfigError, match=r"the remaining 20% of the training takes 8\.0 h"):
        start_run(request(harness, deadline="5h"))
    assert harness.view.fit_count == 1


def test_the_deadline_of_an_active_run_is_not_checked_again(harness: ClientHarness) -> None:
    start_run(request(harness, deadline="60h"))
    start_run(request(harness, deadline="10h"))
    assert harness.view.fit_count == 1


FEEDERS = Feeders(nodes=(1, 3), cpus=16)


def with_feeders(harness: ClientHarness, **limits: Any) -> FitRequest:
    rows = spotfit.data.range(8)
    base = request(harness, **limits)
    return replace(base, datasets={"train": rows}, data_feeders=FEEDERS)


def test_the_budget_must_suffice_for_feeders(harness: ClientHarness) -> None:
    start_run(request(harness, budget_usd=85.0))
    harness.end_run(FitEnded(outcome="cancelled"))
    run = RunConfig(
        name="other", storage_path=harness.storage_path, training_time_s="40h", budget_usd=85.0
    )
    with pytest.raises(ConfigError, match=r"expected to cost .*, with the machines for feeders"):
        start_run(replace(with_feeders(harness), run=run))


def test_the_spec_has_the_price_of_feeders_where_a_budget_needs_it(harness: ClientHarness) -> None:
    start_run(with_feeders(harness, budget_usd=500.0))
    feeders = harness.view.spec.feeders
    assert feeders is not None
    assert (feeders.min_nodes, feeders.max_nodes, feeders.usd_per_hour) == (1, 3, 1.0)
    assert (feeders.offers, feeders.networks) == ((), ())


def test_a_run_with_prices_of_feeders_is_rejoined_unchanged(
    harness: ClientHarness, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        start_run(with_feeders(harness, budget_usd=500.0))
    shown = capsys.readouterr().err
    assert "run.rejoined" in shown
    assert "ignored" not in shown
