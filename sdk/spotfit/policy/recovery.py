"""Where each rank of the next round has its state from: memory where it can, the bucket otherwise.

Facts are the parts that are held by whoever is still here. The newest state that is complete wins,
wherever its parts are, and all ranks begin from that one state. Who finds a part that cannot be
read, or is not what was saved, leaves it out and asks again.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from spotfit.core.ids import AgentId
from spotfit.model.events import CheckpointCommitted
from spotfit.model.holding import Part, State
from spotfit.model.view import View
from spotfit.model.watch import Seat
from spotfit.model.world import Place, Round

Way = Literal["own memory", "peer", "bucket"]

Holder = AgentId | None
"""The agent that keeps a part in its memory; None: it lies in the bucket."""


class Fetch(NamedTuple):
    """One part, and where a rank has it from."""

    part: Part
    holder: Holder
    way: Way


class Recovery(NamedTuple):
    """The state that all ranks begin from, and why it is that one."""

    state: State | None
    """None: nothing is complete anywhere."""
    fetches: Mapping[int, tuple[Fetch, ...]]
    """By rank of the new round, where each part is nearest. Of which of them it needs anything is
    its own to know: of one where each rank kept its shards, of all where the round's size is
    another, or where the ranks had dealt out what all of them held."""
    why: str


def recover(places: Sequence[Place], held: Mapping[Holder, Iterable[Part]]) -> Recovery:
    """The newest complete state, and the nearest holder of each of its parts for each rank."""
    holders: dict[tuple[State, int], dict[Part, list[Holder]]] = defaultdict(dict)
    for holder in sorted(held, key=lambda one: one or ""):
        for part in held[holder]:
            holders[part.state, part.world_size].setdefault(part, []).append(holder)
    complete = [key for key, parts in holders.items() if len(parts) == key[1]]
    if not complete:
        return Recovery(None, {}, f"no state is complete: {_torn(holders) or 'none is held'}")
    newest = max(complete)
    fetches = _fetches(places, holders[newest])
    return Recovery(newest[0], fetches, _reason(newest[0], fetches, holders))


class Memory(NamedTuple):
    """A state to begin from that needs no bucket."""

    state: State
    holders: tuple[tuple[AgentId, ...], ...]
    """By the rank that saved it, who holds that part."""


def from_memory(view: View, places: Sequence[Place], seats: Iterable[Seat]) -> Memory | None:
    """The state to begin from, if all of it lies in the memory of the machines of the round.

    A part that others need must lie where they can ask for it. None where the latest checkpoint is
    newer: then the bucket has all that memory has.
    """
    here = {place.agent for place in places}
    held: dict[Holder, tuple[Part, ...]] = {
        seat.member.agent: seat.held for seat in seats if seat.member.agent in here
    }
    found = recover(places, held)
    latest = view.latest_checkpoint
    if found.state is None or (latest is not None and _is_newer(latest, found.state)):
        return None
    vaults = {place.agent: place.vault for place in places}
    asked = {one.holder for each in found.fetches.values() for one in each if one.way == "peer"}
    if not all(holder is not None and vaults[holder] for holder in asked):
        return None
    parts = [fetch.part for fetch in next(iter(found.fetches.values()))]
    holders = (tuple(sorted(who for who in here if part in held.get(who, ()))) for part in parts)
    return Memory(found.state, tuple(holders))


def _is_newer(committed: CheckpointCommitted, state: State) -> bool:
    """Whether more is committed than memory has: of its own newest state a part may be lost."""
    if committed.round != state.round or committed.step is None:
        return committed.round > state.round
    return committed.step > state.step


def sources(round_: Round, agent: AgentId) -> tuple[str, ...]:
    """By the rank that saved it, the vault from which that machine has each part of the state the
    round begins from; empty for those that lie in its own memory."""
    assert round_.memory is not None
    held: dict[Holder, list[Part]] = defaultdict(list)
    for rank, holders in enumerate(round_.holders):
        for holder in holders:
            held[holder].append(Part(round_.memory, rank, len(round_.holders)))
    place = round_.place_of(agent)
    assert place is not None
    fetches = recover(round_.places, held).fetches[place.first_rank]
    vaults = {one.agent: one.vault for one in round_.places}
    return tuple("" if one.holder in (None, agent) else vaults[one.holder] for one in fetches)


def keepers(
    places: Sequence[Place], *, leaving: Collection[AgentId] = ()
) -> dict[AgentId, AgentId]:
    """Who keeps a copy of whose parts: the next machine of the ring that will stay.

    None keeps its own; a machine without another that stays has no keeper.
    """
    ring = [place.agent for place in sorted(places, key=lambda place: place.node_rank)]
    found: dict[AgentId, AgentId] = {}
    for n, agent in enumerate(ring):
        others = [*ring[n + 1 :], *ring[:n]]
        keeper = next((other for other in others if other not in leaving), None)
        if keeper is not None:
            found[agent] = keeper
    return found


def _fetches(
    places: Sequence[Place], parts: Mapping[Part, Sequence[Holder]]
) -> dict[int, tuple[Fetch, ...]]:
    asked: Counter[AgentId] = Counter()
    return {
        rank: tuple(_nearest(part, parts[part], place.agent, asked) for part in sorted(parts))
        for place in places
        for rank in place.ranks
    }


def _nearest(
    part: Part, holders: Sequence[Holder], agent: AgentId, asked: Counter[AgentId]
) -> Fetch:
    """Its own machine's, else that of the peer that was asked least so far, else the bucket's."""
    if agent in holders:
        return Fetch(part, agent, "own memory")
    peers = [holder for holder in holders if holder is not None]
    if not peers:
        return Fetch(part, None, "bucket")
    nearest = min(peers, key=lambda peer: asked[peer])
    asked[nearest] += 1
    return Fetch(part, nearest, "peer")


Holders = Mapping[tuple[State, int], Mapping[Part, Sequence[Holder]]]


def _reason(state: State, fetches: Mapping[int, tuple[Fetch, ...]], holders: Holders) -> str:
    ways = Counter(fetch.way for fetched in fetches.values() for fetch in fetched)
    told = ", ".join(f"{ways[way]} {_WORDS[way]}" for way in _WORDS if ways[way])
    newer = {key: parts for key, parts in holders.items() if key[0] > state}
    torn = f"; newer, but torn: {_torn(newer)}" if newer else ""
    return f"{_named(state)} is the newest that is complete; of its parts lie {told}{torn}"


_WORDS: Mapping[Way, str] = {
    "own memory": "on the machines that read them",
    "peer": "in a peer's memory",
    "bucket": "in the bucket",
}


def _torn(holders: Holders) -> str:
    """Of the newest states, how much of them is there."""
    newest = sorted(holders, reverse=True)[:2]
    return ", ".join(f"{_named(key[0])} ({len(holders[key])} of {key[1]} parts)" for key in newest)


def _named(state: State) -> str:
    return f"step {state.step} of round {state.round}"
