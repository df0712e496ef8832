"""The comparison of a journal's machine-hours with the books of the clouds."""

from __future__ import annotations

import pytest

from spotfit.core.ids import Token
from spotfit.model.events import (
    FitStarted,
    GroupPlanned,
    GroupRefused,
    GroupsReleased,
    GroupSubmitted,
    JournalEntry,
    JournalEvent,
    MachinesObserved,
    MachineTimes,
)
from spotfit.model.group import GroupHandle, GroupPlan
from spotfit.model.spec import RunTiming
from spotfit.testing.builders import TOKEN, a_request, a_spec, an_entry
from spotfit_localsim.virtual.billing_check import (
    Books,
    GroupBill,
    bills_by_group,
    find_billing_error,
)

T0_MS = 1_000_000_000_000
OTHER = Token("t-2")


def ms(at_s: float) -> int:
    return T0_MS + round(at_s * 1000)


def journal(*events: tuple[float, JournalEvent]) -> list[JournalEntry]:
    timing = RunTiming(heartbeat_timeout_s=0.0, lease_timeout_s=0.0)
    started = (0.0, FitStarted(spec=a_spec(timing=timing)))
    return [an_entry(event, written_at_ms=ms(at_s)) for at_s, event in (started, *events)]


def rented(token: Token = TOKEN) -> list[tuple[float, JournalEvent]]:
    plan = GroupPlan(token=token, provisioner="sim", num_nodes=1, slots_per_node=1)
    handle = GroupHandle(token=token, provisioner="sim", name="g")
    return [
        (0.0, GroupPlanned(request=a_request(token, 1), plan=plan)),
        (0.0, GroupSubmitted(token=token, handle=handle)),
    ]


def observed(at_s: float, started_s: float, token: Token = TOKEN) -> tuple[float, JournalEvent]:
    times = MachineTimes(node=0, started_ms=(ms(started_s), ms(started_s)))
    return at_s, MachinesObserved(times={token: (times,)})


def released(at_s: float, first_s: float, last_s: float) -> tuple[float, JournalEvent]:
    times = MachineTimes(node=0, ended_ms=(ms(first_s), ms(last_s)))
    return at_s, GroupsReleased(token=TOKEN, times={TOKEN: (times,)})


EXACT = journal(*rented(), observed(10, 10), released(60, 50, 50))
UNCERTAIN = journal(*rented(), observed(10, 10), released(60, 50, 60))


def error(entries: list[JournalEntry], billed_s: float, machines: int = 1) -> str | None:
    return find_billing_error(entries, {TOKEN: Books(billed_s, machines)}, ms(100))


def test_the_record_of_a_group_has_the_times_of_its_machines() -> None:
    assert bills_by_group(EXACT, ms(100)) == {TOKEN: GroupBill(40.0, 40.0, 1)}
    assert bills_by_group(UNCERTAIN, ms(100)) == {TOKEN: GroupBill(40.0, 50.0, 0)}


def test_groups_of_the_same_offer_are_recorded_apart() -> None:
    entries = journal(
        *rented(), *rented(OTHER), observed(10, 10), observed(20, 20, OTHER), released(60, 50, 50)
    )
    assert bills_by_group(entries, ms(100))[TOKEN].certain_s == 40.0


def test_groups_that_are_not_released_are_not_compared() -> None:
    assert error(journal(*rented(), observed(10, 10)), 9999.0) is None


def test_refused_requests_of_a_released_group_are_not_compared() -> None:
    refused = (70.0, GroupRefused(token=TOKEN, reason="full"))
    entries = journal(*rented(), (60.0, GroupsReleased(token=TOKEN)), refused)
    assert bills_by_group(entries, ms(100)) == {}


@pytest.mark.parametrize("billed_s", [39.4, 50.6])
def test_books_outside_the_record_are_an_error(billed_s: float) -> None:
    found = error(UNCERTAIN, billed_s)
    assert found is not None
    assert "the record of t-1 is 40.000 to 50.000 s" in found
    assert f"1 machines were billed for {billed_s:.3f} s" in found


@pytest.mark.parametrize("billed_s", [39.6, 45.0, 50.4])
def test_books_within_the_record_are_right(billed_s: float) -> None:
    assert error(UNCERTAIN, billed_s) is None


def test_a_group_without_books_was_not_billed() -> None:
    found = find_billing_error(EXACT, {}, ms(100))
    assert found is not None
    assert "0 machines were billed for 0.000 s" in found


def test_a_record_with_all_ends_must_be_exact() -> None:
    # The end is exact and the start is not.
    times = MachineTimes(node=0, started_ms=(ms(10), ms(30)))
    entries = journal(*rented(), (30.0, MachinesObserved(times={TOKEN: (times,)})))
    entries += journal(released(60, 50, 50))[1:]
    found = error(entries, 30.0)
    assert found is not None
    assert "although all ends are known" in found
