"""The messages between a leader and the process of the user's backend hooks.

It begins with `audience.Hello`, as the callbacks' process does.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from spotfit.model.audience import Hello

Hook = Literal["on_start", "on_training_start", "on_shutdown"]

# --- leader -> process -----------------------------------------------------------------------


class Perform(msgspec.Struct, frozen=True, tag="perform"):
    """Call that hook for the round. Answered by `Performed`, in order."""

    hook: Hook
    round: int
    world_size: int
    resources: dict[str, float] = {}
    """What each worker has."""


class Told(msgspec.Struct, frozen=True, tag="told"):
    """What a worker answered to a call: a pickle, of what was returned or of what was raised."""

    round: int
    rank: int
    call: int
    value: bytes
    raised: str | None = None
    """The traceback, where the call raised; `value` is empty where that cannot be pickled."""


class Over(msgspec.Struct, frozen=True, tag="over"):
    """No worker of that round can be called any more: nobody answers what was not answered yet."""

    round: int


ToHooks = Hello | Perform | Told | Over

# --- process -> leader -----------------------------------------------------------------------


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Have a pickled call made by workers of that round."""

    round: int
    call: int
    ranks: tuple[int, ...]
    body: bytes


class Performed(msgspec.Struct, frozen=True, tag="performed"):
    """A hook came back; with `trouble`, the traceback of what it raised."""

    hook: Hook
    round: int
    trouble: str | None = None
    pickle_key: str | None = None
    """Where what it raised lies, pickled and sealed, if it can be pickled."""


FromHooks = Ask | Performed
