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
from spotfit.model.holding import Part, Saved
from spotfit.model.world import Place, Round

Way = Literal["own memory", "peer", "bucket"]


class Fetch(NamedTuple):
    """One part, and where a rank has it from."""

    part: Part
    way: Way


class Recovery(NamedTuple):
    """The state that all ranks begin from, and why it is that one."""

    state: Saved | None
    """None: nothing is complete anywhere, and the training begins anew."""
    fetches: Mapping[int, tuple[Fetch, ...]]
    """By rank of the new round, everything it may need: its own part; all parts, where the round
    has another size, of which it reads what falls to it; any part, where each is the whole."""
    why: str


def recover(round_: Round, parts: Iterable[Part]) -> Recovery:
    """The newest complete state, and the nearest holder of each of its parts for each rank."""
    held: dict[tuple[Saved, int], list[Part]] = defaultdict(list)
    for part in parts:
        held[part.state, part.world_size].append(part)
    complete = [key for key, found in held.items() if _complete(found, world_size=key[1])]
    if not complete:
        return Recovery(None, {}, f"no state is complete: {_torn(held) or 'none is held'}")
    newest = max(complete)
    fetches = _fetches(round_, sorted(held[newest], key=_order), world_size=newest[1])
    return Recovery(newest[0], fetches, _reason(newest[0], fetches, held))


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


def _complete(parts: Sequence[Part], *, world_size: int) -> bool:
    ranks = {part.rank for part in parts}
    return any(part.whole for part in parts) or ranks.issuperset(range(world_size))


def _fetches(
    round_: Round, parts: Sequence[Part], *, world_size: int
) -> dict[int, tuple[Fetch, ...]]:
    asked: Counter[AgentId] = Counter()
    return {
        rank: tuple(
            _nearest(choice, place.agent, asked)
            for choice in _choices(rank, parts, same_size=world_size == round_.world_size)
        )
        for place in round_.places
        for rank in place.ranks
    }


def _choices(rank: int, parts: Sequence[Part], *, same_size: bool) -> list[list[Part]]:
    """What that rank needs; of each, all who have it."""
    if whole := [part for part in parts if part.whole]:
        return [whole]
    by_rank: dict[int, list[Part]] = defaultdict(list)
    for part in parts:
        by_rank[part.rank].append(part)
    return [by_rank[rank]] if same_size else list(by_rank.values())


def _nearest(choice: Sequence[Part], agent: AgentId, asked: Counter[AgentId]) -> Fetch:
    """Its own machine's, else that of the peer that was asked least so far, else the bucket's."""
    own = next((part for part in choice if part.holder == agent), None)
    if own is not None:
        return Fetch(own, "own memory")
    peers = [part for part in choice if part.holder is not None]
    if not peers:
        return Fetch(choice[0], "bucket")
    nearest = min(peers, key=lambda part: asked[part.holder])  # type: ignore[index]  # see above
    asked[nearest.holder] += 1  # type: ignore[index]  # see above
    return Fetch(nearest, "peer")


def _order(part: Part) -> tuple[int, bool, str]:
    return (part.rank, part.holder is None, part.holder or "")


def _reason(
    state: Saved,
    fetches: Mapping[int, tuple[Fetch, ...]],
    held: Mapping[tuple[Saved, int], Sequence[Part]],
) -> str:
    ways = Counter(_farthest(fetched) for fetched in fetches.values())
    told = ", ".join(f"{count} from {_WORDS[way]}" for way, count in sorted(ways.items()))
    newer = {key: parts for key, parts in held.items() if key[0] > state}
    torn = f"; newer, but torn: {_torn(newer)}" if newer else ""
    return f"{_named(state)} is the newest that is complete; of its ranks {told}{torn}"


_FAR: Mapping[Way, int] = {"own memory": 0, "peer": 1, "bucket": 2}
_WORDS: Mapping[Way, str] = {
    "own memory": "their machine's own memory",
    "peer": "a peer's memory",
    "bucket": "the bucket",
}


def _farthest(fetched: Iterable[Fetch]) -> Way:
    return max((fetch.way for fetch in fetched), key=_FAR.__getitem__)


def _torn(held: Mapping[tuple[Saved, int], Sequence[Part]]) -> str:
    """Of the newest states, how much of them is there."""
    newest = sorted(held, reverse=True)[:2]
    return ", ".join(
        f"{_named(key[0])} ({len({part.rank for part in held[key]})} of {key[1]} parts)"
        for key in newest
    )


def _named(state: Saved) -> str:
    return f"step {state.step} of round {state.round}"
