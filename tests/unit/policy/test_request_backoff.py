"""Pauses between requests for machines."""

from __future__ import annotations

import pytest

from spotfit.policy.request_backoff import next_request_at, offer_request_due_s
from spotfit.testing.builders import a_leader_state, a_view
from tests.unit.policy.offered_run import SPOT, OfferedRun

NOW = 1000.0


@pytest.mark.parametrize(
    ("refusals", "wait_s"), [(1, 1.0), (2, 2.0), (5, 16.0), (7, 60.0), (5000, 60.0)]
)
def test_requests_back_off_after_refusals(refusals: int, wait_s: float) -> None:
    request = next_request_at(
        a_view(refusals=refusals), a_leader_state(refused_at={"train": 100.0})
    )
    assert request == 100.0 + wait_s


def test_requests_back_off_after_boot_failures() -> None:
    assert (
        next_request_at(a_view(boot_failures=3), a_leader_state(refused_at={"train": 100.0}))
        == 104.0
    )


def test_without_refusals_the_next_request_is_immediate() -> None:
    assert next_request_at(a_view(refusals=3), a_leader_state(refused_at={})) == float("-inf")
    assert next_request_at(a_view(refusals=0), a_leader_state(refused_at={"train": NOW})) == float(
        "-inf"
    )


def test_the_pause_after_failed_starts_does_not_grow_with_the_machines() -> None:
    state = a_leader_state(members={}, refused_at={"train": NOW})
    assert next_request_at(a_view(boot_failures=16, failed_starts=2), state) == NOW + 2.0


def test_an_offer_without_refusals_may_be_requested_at_once() -> None:
    assert offer_request_due_s(OfferedRun().view, "spot") == 0.0


@pytest.mark.parametrize(("refusals", "pause_s"), [(1, 1.0), (2, 2.0), (6, 32.0), (7, 60.0)])
def test_pauses_of_a_refused_offer_grow_to_a_minute(refusals: int, pause_s: float) -> None:
    run = OfferedRun()
    for n in range(refusals):
        run.refuse(100, f"t-{n}", SPOT)
    assert offer_request_due_s(run.view, "spot") == 100 + pause_s
    assert offer_request_due_s(run.view, "on-demand") == 0.0
