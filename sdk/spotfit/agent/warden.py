"""Watches one round for ranks that hang: has the stacks of all taken, and keeps them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from spotfit.agent.hub import Hub
from spotfit.control.errands import Errands
from spotfit.ledger import keys
from spotfit.ledger.run import Ledger
from spotfit.model.spec import Vigil
from spotfit.model.wire import Examine, Stacks
from spotfit.policy import hang
from spotfit.policy.hang import Hang

PATIENCE_S = 30.0
"""How long agents may take to tell what their workers are doing, and the bucket to keep it."""


class Finding(NamedTuple):
    """What was found out about a hang."""

    hang: Hang
    told: str
    """In words, with the place of the stacks."""


class Warden:
    """One round. `ask` reaches every agent that has workers in it."""

    def __init__(
        self,
        hub: Hub,
        vigil: Vigil,
        *,
        ask: Callable[[Examine], None],
        ledger: Ledger,
        errands: Errands,
    ) -> None:
        self._hub = hub
        self._vigil = vigil
        self._ask = ask
        self._ledger = ledger
        self._errands = errands
        self._silent: dict[int, float] = {}
        self._hang: Hang | None = None
        """What is being looked into."""
        self._number = 0
        self._asked_at = 0.0
        self._stacks: dict[int, str] = {}
        self._known: Hang | None = None
        """What was found out already, while it lasts."""

    @property
    def round(self) -> int:
        """Which one."""
        return self._hub.round

    def unwell(self, rank: int, silent_s: float) -> None:
        """A worker has not answered for so long; 0: it answers again."""
        self._silent.pop(rank, None)
        if silent_s:
            self._silent[rank] = silent_s

    def hear(self, stacks: Stacks) -> None:
        """What one worker is doing."""
        if stacks.examination == self._number:
            self._stacks[stacks.rank] = stacks.told

    def next_look(self) -> float:
        """When to `step` again, if nothing happens before."""
        if self._hang is not None:
            return self._asked_at + PATIENCE_S
        return hang.looked_for_at(self._vigil, self._hub.progress) if not self._known else _NEVER

    def step(self, now: float) -> Finding | None:
        """Look, ask, and tell once all is known. None while there is nothing to tell."""
        seen = hang.suspected(self._vigil, self._silent, self._hub.progress, now)
        if seen is None:
            self._known = self._hang = None
        elif self._hang is None and (self._known is None or self._known.ranks != seen.ranks):
            self._begin(seen, now)
        if self._hang is None:
            return None
        complete = len(self._stacks) == self._hub.world_size
        return self._keep(now) if complete or now >= self._asked_at + PATIENCE_S else None

    def _begin(self, seen: Hang, now: float) -> None:
        self._hang, self._known, self._asked_at = seen, seen, now
        self._number += 1
        self._stacks = {}
        self._ask(Examine(self._hub.round, self._number))

    def _keep(self, now: float) -> Finding | None:
        """None while the bucket has not got it. Where that fails, or takes too long, the hang is
        told without."""
        assert self._hang is not None
        key = keys.stacks(self._ledger.me, self._hub.round, self._number)
        body = _report(self._hang, self._stacks, self._hub.world_size).encode()
        store = self._ledger.store
        done = self._errands.run(f"stacks {key}", lambda: store.put(key, body))
        if done is None and now < self._asked_at + 2 * PATIENCE_S:
            return None
        found, self._hang = self._hang, None
        where = f"the stacks of all ranks are in {store.url.rstrip('/')}/{key}"
        if done is None or done.error is not None:
            why = "the bucket does not answer" if done is None else done.error
            where = f"their stacks could not be kept: {why}"
        return Finding(found, f"{found.why}; {where}")


_NEVER = float("inf")


def _report(seen: Hang, stacks: dict[int, str], world_size: int) -> str:
    """All ranks, first those that are waited for."""
    others = [rank for rank in range(world_size) if rank not in seen.ranks]
    parts = [f"{seen.why}\n"]
    for rank in [*seen.ranks, *others]:
        told = stacks.get(rank, f"its machine did not tell within {PATIENCE_S:.0f} s")
        parts.append(f"=== rank {rank}: {told}\n")
    return "\n".join(parts)
