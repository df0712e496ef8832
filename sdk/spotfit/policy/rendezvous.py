"""Who is in the next round, and in which place."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from spotfit.model.view import View
from spotfit.model.watch import Seat, Watch
from spotfit.model.world import Place, Round
from spotfit.policy.actions import Wait
from spotfit.policy.capacity import expected_slots, lasting, may_ask_at, usable_seats
from spotfit.policy.recovery import from_memory

_PATIENCE_ROUNDS = 5
_LONGEST_PAUSE_S = 30.0


def next_round(view: View, watch: Watch, now: float) -> Round | Wait:
    """The round that can be opened now, or how long to wait for what."""
    assert view.spec is not None
    rested = watch.turned_at + _pause_s(view)
    if now < rested:
        return Wait(rested, f"{view.fruitless} rounds in a row ended before they saved anything")
    seats = usable_seats(view, watch)
    stopping = [seat.member.agent for seat in seats if seat.running is not None]
    if stopping:
        return Wait(now + 1.0, f"workers of the last round still end on {len(stopping)} nodes")
    slots = sum(seat.member.slots for seat in seats)
    if slots < max(1, view.spec.workers_min):
        return Wait(now + 5.0, f"{slots} of at least {view.spec.workers_min} workers have a place")
    patience_ends = watch.turned_at + view.spec.tempo.form_patience_s
    if slots < view.spec.workers_max and _more_may_come(view, watch, now) and now < patience_ends:
        why = f"{slots} of {view.spec.workers_max} workers have a place; more may come"
        return Wait(patience_ends, why)
    return _form(view, _preferred(view, watch, seats))


def _pause_s(view: View) -> float:
    """A few rounds may fail at once; one after the other only ever more slowly."""
    if view.fruitless <= _PATIENCE_ROUNDS:
        return 0.0
    return min(_LONGEST_PAUSE_S, 0.1 * 2.0 ** min(view.fruitless - _PATIENCE_ROUNDS, 10))


def _more_may_come(view: View, watch: Watch, now: float) -> bool:
    refused = view.last_refusal is not None and now < may_ask_at(view, watch)
    return expected_slots(view, watch) > 0 and not refused


def _preferred(view: View, watch: Watch, seats: list[Seat]) -> list[Seat]:
    """Without machines that will not be brought back once more, where others suffice."""
    assert view.spec is not None
    staying = lasting(view, watch)
    enough = sum(seat.member.slots for seat in staying) >= view.spec.workers_max
    return staying if enough else seats


def _form(view: View, seats: Sequence[Seat]) -> Round:
    """Places by seniority: survivors keep their order, newcomers follow, nobody is cut in half."""
    assert view.spec is not None
    left = view.spec.workers_max
    places: list[Place] = []
    for seat in sorted(seats, key=lambda seat: _seniority(view, seat)):
        if left == 0:
            break
        member = seat.member
        workers = min(member.slots, left)
        first = view.spec.workers_max - left
        places.append(
            Place(
                member.agent,
                len(places),
                first,
                workers,
                member.host,
                member.token,
                member.node,
                member.vault,
            )
        )
        left -= workers
    number = view.last_round.number + 1 if view.last_round else 1
    latest = view.latest_checkpoint
    memory = from_memory(view, places, seats)
    round_ = Round(number, tuple(places), latest.name if latest else None)
    if memory is None:
        return round_
    return replace(round_, memory=memory.state, holders=memory.holders)


def _seniority(view: View, seat: Seat) -> tuple[float, str, int]:
    place = view.last_round.place_of(seat.member.agent) if view.last_round else None
    rank = float(place.node_rank) if place else float("inf")
    return (rank, seat.member.token, seat.member.node)
