"""Who is where in which round."""

from __future__ import annotations

import msgspec

from spotfit.core.ids import AgentId, Token
from spotfit.model.holding import State


class Member(msgspec.Struct, frozen=True):
    """An agent that offers to take part: where it is and how many workers it can hold."""

    agent: AgentId
    host: str
    """Address at which workers of other nodes reach this one."""
    hub: str
    """host:port at which it would serve the hub, should it lead."""
    slots: int
    token: Token
    node: int
    """Which machine of its group it is."""
    devices: tuple[str, ...] = ()
    python: str = ""
    pid: int = 0
    vault: str = ""
    """host:port at which it keeps copies of what a peer has saved; empty: it keeps none."""


class Place(msgspec.Struct, frozen=True):
    """A node's part in a round: `workers` consecutive world ranks from `first_rank`."""

    agent: AgentId
    node_rank: int
    first_rank: int
    workers: int
    host: str
    token: Token
    node: int
    """Which machine of which group it is."""
    vault: str = ""
    """host:port of its agent's vault, if it has one."""

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.workers)

    @property
    def machine(self) -> str:
        """The name of its machine, as users see it."""
        return f"{self.token}/{self.node}"


class Round(msgspec.Struct, frozen=True):
    """One formation of the group; any loss ends it and the next has a new number."""

    number: int
    places: tuple[Place, ...]
    checkpoint: str | None = None
    """Name of the committed checkpoint every rank starts from."""
    memory: State | None = None
    """A newer state that lies in the memory of these machines; the checkpoint is for who finds
    it damaged, and for what only a checkpoint holds."""
    holders: tuple[tuple[AgentId, ...], ...] = ()
    """By the rank that saved it, on whose machines each part of that state lies."""

    @property
    def world_size(self) -> int:
        return sum(place.workers for place in self.places)

    def place_of(self, agent: AgentId) -> Place | None:
        """The part that agent plays, or None."""
        return next((place for place in self.places if place.agent == agent), None)

    def holder_of(self, rank: int) -> Place:
        """The node that holds that world rank."""
        return next(place for place in self.places if rank in place.ranks)


class Notice(msgspec.Struct, frozen=True):
    """This machine will be taken away."""

    reason: str
    seconds_left: float | None = None
    deadline_ms: int = 0
    """When, in milliseconds since 1970 by the cloud's clock; for people. 0: nobody knows."""


class Advice(msgspec.Struct, frozen=True):
    """Its cloud takes this machine to be in more danger than others: saving soon is wise.

    No notice: most machines it is given for are never taken away.
    """

    reason: str
