"""What is said to a vault: the place where an agent keeps states for its node and for a peer's.

Frames over TLS. Each connection has one question, the first frame; what follows is bytes.
"""

from __future__ import annotations

import msgspec

from spotfit.model.holding import Part

COPY_BYTES_PER_S = 256 * 2**20
"""Copies take no more of the network than this: training needs it, too."""


KEPT = b"kept"


class Keep(msgspec.Struct, frozen=True, tag="keep"):
    """Keep a copy of what that rank saved with that report of that round.

    Answered by `KEPT` where it lies there already, and by an empty frame where it may come: then
    its bytes follow in frames, and an empty one once it is whole; the answer is an empty one, too.
    """

    round: int
    report: int
    rank: int
    fellows: tuple[int, ...]
    """The ranks of its machine: copies of one save are whole with all of theirs."""
    size_bytes: int


class Look(msgspec.Struct, frozen=True, tag="look"):
    """Answered by the index of that part; by an empty frame where it is not here any more."""

    part: Part


class Fetch(msgspec.Struct, frozen=True, tag="fetch"):
    """Answered by so many bytes of that part; by an empty frame where it is not here any more."""

    part: Part
    start: int
    size_bytes: int


ToVault = Keep | Look | Fetch
