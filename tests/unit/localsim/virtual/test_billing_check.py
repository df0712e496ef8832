"""The comparison of the record of machine-hours with the books of the simulated cloud."""

from __future__ import annotations

from typing import Any

import pytest

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
    NodeLost,
)
from spotfit.model.group import GroupHandle, GroupPlan
from spotfit.testing.builders import TOKEN, a_request, a_spec, an_entry
from spotfit_localsim.virtual.billing_check import Books, find_billing_error


def journal(*events: JournalEvent) -> list[JournalEntry]:
    plan = GroupPlan(token=TOKEN, provisioner="sim", num_nodes=2, slots_per_node=1)
    handle = GroupHandle(token=TOKEN, provisioner="sim", name="g")
    begin = (
        FitStarted(spec=a_spec()),
        GroupPlanned(request=a_request(), plan=plan),
        GroupSubmitted(token=TOKEN, handle=handle),
    )
    return [an_entry(event, written_at_ms=1000) for event in (*begin, *events)]


def times(node: int, **bounds: Any) -> MachineTimes:
    return MachineTimes(node=node, **bounds)


def two_machines(end_ms: tuple[int, int]) -> list[JournalEntry]:
    """Both start at 2 s; one ends at 12 s, the other within `end_ms`."""
    started = [times(n, started_ms=(2000, 2000)) for n in range(2)]
    ends = (times(0, ended_ms=(12_000, 12_000)), times(1, ended_ms=end_ms))
    return journal(
        MachinesObserved(times={TOKEN: tuple(started)}),
        NodeLost(token=TOKEN, node=0, agent=None, reason="", times=ends[0]),
        GroupsReleased(token=TOKEN, times={TOKEN: ends[1:]}),
    )


@pytest.mark.parametrize(("billed_s", "is_right"), [(20, True), (18, False), (22, False)])
def test_books_must_be_within_the_record(billed_s: float, is_right: bool) -> None:
    error = find_billing_error(two_machines((12_000, 12_000)), {TOKEN: Books(billed_s, 2)}, 99_000)
    assert (error is None) == is_right


def test_books_within_wide_bounds_are_right_if_an_end_is_unknown() -> None:
    books = {TOKEN: Books(18.0, 2)}
    assert find_billing_error(two_machines((5_000, 15_000)), books, 99_000) is None


def test_wide_bounds_are_an_error_if_all_ends_are_known() -> None:
    of_machine = times(0, started_ms=(2000, 9000), ended_ms=(12_000, 12_000))
    unbilled = times(1, is_unbilled=True)
    entries = journal(GroupsReleased(token=TOKEN, times={TOKEN: (of_machine, unbilled)}))
    error = find_billing_error(entries, {TOKEN: Books(5.0, 1)}, 99_000)
    assert error is not None
    assert "although all ends are known" in error


def test_groups_that_were_refused_or_not_released_are_not_compared() -> None:
    books = {TOKEN: Books(1000.0, 1)}
    assert find_billing_error(journal(), books, 99_000) is None
    refused = journal(GroupRefused(token=TOKEN, reason="full"))
    assert find_billing_error(refused, books, 99_000) is None
