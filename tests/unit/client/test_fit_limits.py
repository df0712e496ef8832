"""Limits of the cost of a fit: those of a continued run count what earlier fits have done."""

from __future__ import annotations

from typing import Any

import pytest

from spotfit.client import fit as fitting
from spotfit.client.fit import start_run
from spotfit.client.request import FitRequest
from spotfit.client.run_config import RunConfig
from spotfit.core.errors import ConfigError
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


def test_a_deadline_before_the_end_of_the_rest_is_an_error(harness: ClientHarness) -> None:
    end_after(harness, 0.8)
    with pytest.raises(ConfigError, match=r"the remaining 20% of the training takes 8\.0 h"):
        start_run(request(harness, deadline="5h"))
    assert harness.view.fit_count == 1


def test_the_deadline_of_an_active_run_is_not_checked_again(harness: ClientHarness) -> None:
    start_run(request(harness, deadline="60h"))
    start_run(request(harness, deadline="10h"))
    assert harness.view.fit_count == 1
