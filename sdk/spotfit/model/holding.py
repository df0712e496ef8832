"""Who holds which part of a saved state: in its memory, or in the bucket."""

from __future__ import annotations

import msgspec

from spotfit.core.ids import AgentId


class Saved(msgspec.Struct, frozen=True, order=True):
    """One state of the training: the group's, after that step of that round.

    A later round's states come after those of rounds before, whatever their steps: it has begun
    from one of them, and what it did not begin from it has left behind.
    """

    round: int
    step: int


class Part(msgspec.Struct, frozen=True):
    """That somebody holds, whole and verified, what one rank saved of a state."""

    state: Saved
    rank: int
    world_size: int
    """Of the round that saved it: how many parts make it complete."""
    holder: AgentId | None
    """The agent that keeps it in memory; None: it lies in the bucket."""
    whole: bool = False
    """Whether each part of this state is all of it, as where every rank holds the same."""
