"""Who holds which part of a saved state: in its memory, or in the bucket."""

from __future__ import annotations

import msgspec


class State(msgspec.Struct, frozen=True, order=True):
    """One state of the training: the group's, after that step of that round.

    A later round's states come after those of rounds before, whatever their steps: it has begun
    from one of them, and what it did not begin from it has left behind.
    """

    round: int
    step: int


class Part(msgspec.Struct, frozen=True, order=True):
    """What one rank has saved of a state; somebody holds it, and all of it."""

    state: State
    rank: int
    world_size: int
    """Of the round that saved it: so many parts make it complete."""
