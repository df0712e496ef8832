"""Compares the record of machine-hours in a journal with the books of the simulated clouds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from spotfit.core.ids import Token
from spotfit.model.events import (
    GroupPlanned,
    GroupRefused,
    GroupsReleased,
    GroupSubmitted,
    JournalEntry,
    MachinesObserved,
    MachineTimes,
    NodeLost,
)
from spotfit.model.usage import Usage, bill_of, fold_usage

CLOCK_TOLERANCE_S = 0.5
"""More than the difference of two wall clocks of a simulation, per machine."""
EXACT_TOLERANCE_S = 1.0


@dataclass(frozen=True, slots=True)
class Books:
    """The billed machines of one group."""

    billed_s: float
    machines: int
    """Number of machines that were billed; a restarted one counts as another."""


@dataclass(frozen=True, slots=True)
class GroupBill:
    """The record of one group, in machine-seconds."""

    certain_s: float
    maximum_s: float
    exact_ends: int
    """Number of its machines of which the provider's time of the end is recorded."""


def bills_by_group(entries: Sequence[JournalEntry], now_ms: int) -> dict[Token, GroupBill]:
    """Return the record of every group that was released, or has ended otherwise."""
    usage, ends = Usage(), _count_exact_ends(entries)
    for entry in entries:
        usage = fold_usage(usage, _with_offer_of_group(entry))
    offers = {one.offer: one for one in bill_of(_Record(usage), now_ms).offers}
    return {
        token: GroupBill(
            certain_s=offers[token].machine_s if token in offers else 0.0,
            maximum_s=offers[token].max_machine_s if token in offers else 0.0,
            exact_ends=ends.get(token, 0),
        )
        for token in _released_tokens(entries)
    }


@dataclass(frozen=True, slots=True)
class _Record:
    usage: Usage


def _with_offer_of_group(entry: JournalEntry) -> JournalEntry:
    """The entry, in which every group has an offer of its own: totals are by offer."""
    match entry.event:
        case GroupPlanned(request=request) as planned:
            return replace(entry, event=replace(planned, request=replace(request, offer=None)))
        case GroupSubmitted(token=token, handle=handle) as submitted:
            return replace(entry, event=replace(submitted, handle=replace(handle, offer=token)))
        case _:
            return entry


def _released_tokens(entries: Iterable[JournalEntry]) -> set[Token]:
    released: set[Token] = set()
    for entry in entries:
        match entry.event:
            case GroupsReleased(token=token, other_tokens=others):
                released |= {token, *others}
            # Late requests of a deposed leader are unknown to every process.
            case GroupRefused(token=token):
                released -= {token}
    return released


def _count_exact_ends(entries: Iterable[JournalEntry]) -> dict[Token, int]:
    ends: set[tuple[Token, int, int]] = set()
    for entry in entries:
        for token, times in _times_of(entry):
            for one in times:
                if one.ended_ms is not None and one.ended_ms[0] == one.ended_ms[1]:
                    ends.add((token, one.node, one.ended_ms[0]))
    tokens = [token for token, _, _ in ends]
    return {token: tokens.count(token) for token in tokens}


def _times_of(entry: JournalEntry) -> Iterable[tuple[Token, Sequence[MachineTimes]]]:
    match entry.event:
        case MachinesObserved(times=times) | GroupsReleased(times=times):
            return times.items()
        case NodeLost(token=token, times=MachineTimes() as one):
            return [(token, [one])]
        case _:
            return []


def find_billing_error(
    entries: Sequence[JournalEntry], books: Mapping[Token, Books], now_ms: int
) -> str | None:
    """Return the first group whose books are not within its record; None if there is none.

    If the provider's times of all its ends are recorded, both must be equal.
    """
    for token, bill in bills_by_group(entries, now_ms).items():
        book = books.get(token, Books(0.0, 0))
        tolerance_s = CLOCK_TOLERANCE_S * book.machines
        record = f"the record of {token} is {bill.certain_s:.3f} to {bill.maximum_s:.3f} s"
        billed = f"{book.machines} machines were billed for {book.billed_s:.3f} s"
        if not bill.certain_s - tolerance_s <= book.billed_s <= bill.maximum_s + tolerance_s:
            return f"{record}, but {billed}"
        width_s = bill.maximum_s - bill.certain_s
        is_exact = 0 < book.machines == bill.exact_ends
        if is_exact and width_s > EXACT_TOLERANCE_S * book.machines:
            return f"{record} although all ends are known; {billed}"
    return None
