"""`HangDetector`: detects ranks of a round that hang, and stores the stacks of all ranks.

The decision is pure (`policy.hang`); this module collects its inputs and acts on it:

| state      | event                                            | next                         |
|------------|--------------------------------------------------|------------------------------|
| watching   | `detect_hang` names ranks                        | collecting (stacks requested)|
| collecting | all stacks arrived, or `STACK_DUMP_TIMEOUT_S`    | storing                      |
| storing    | stored, failed, or twice `STACK_DUMP_TIMEOUT_S`  | reported                     |
| any        | `detect_hang` returns None                       | watching                     |
| reported   | `detect_hang` names other ranks                  | collecting                   |
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from spotfit.agent.round_coordinator import RoundCoordinator
from spotfit.control.background_calls import BackgroundCalls
from spotfit.ledger import keys
from spotfit.ledger.run import Ledger
from spotfit.model.spec import HangDetectionConfig
from spotfit.policy import hang
from spotfit.policy.hang import SuspectedHang
from spotfit.protocol.agent_leader import DumpStacks, StackDump

# Workers that respond dump their stacks within a second; waiting longer delays the restart.
STACK_DUMP_TIMEOUT_S = 30.0
"""How long agents may take to collect stacks, and again the bucket to store them."""


class HangReport(NamedTuple):
    """A hang whose stacks were collected."""

    hang: SuspectedHang
    text: str
    """The reason and the location of the stored stacks, for the run's log."""


class HangDetector:
    """Watches one round. `request_stacks` sends to every agent that has workers in it."""

    def __init__(
        self,
        coordinator: RoundCoordinator,
        config: HangDetectionConfig,
        *,
        request_stacks: Callable[[DumpStacks], None],
        ledger: Ledger,
        background_calls: BackgroundCalls,
    ) -> None:
        self._coordinator = coordinator
        self._config = config
        self._request_stacks = request_stacks
        self._ledger = ledger
        self._background_calls = background_calls
        self._silent_s: dict[int, float] = {}
        self._suspected_hang: SuspectedHang | None = None
        """The hang whose stacks are being collected or stored."""
        self._dump_id = 0
        self._requested_at = 0.0
        self._stack_texts: dict[int, str] = {}
        self._known_hang: SuspectedHang | None = None
        """The current hang if its stacks were already requested: it is reported only once."""

    def record_liveness(self, rank: int, silent_s: float) -> None:
        """Record that a worker sent no heartbeat for `silent_s` seconds; 0: it responds again."""
        self._silent_s.pop(rank, None)
        if silent_s:
            self._silent_s[rank] = silent_s

    def add_stack_dump(self, stack_dump: StackDump) -> None:
        """Record the stacks of one worker. Ignores answers to earlier requests."""
        # Stacks of an earlier suspicion would show a state that has passed.
        if stack_dump.dump_id == self._dump_id:
            self._stack_texts[stack_dump.rank] = stack_dump.stack_text

    def next_check(self) -> float:
        """When to call `check` again if no event arrives before."""
        if self._suspected_hang is not None:
            return self._requested_at + STACK_DUMP_TIMEOUT_S
        if self._known_hang is not None:
            return math.inf
        return hang.next_hang_check_at(self._config, self._coordinator.progress)

    def check(self, now: float) -> HangReport | None:
        """Advance the detection. Returns the report of a hang once, when it is complete."""
        suspected = hang.detect_hang(self._config, self._silent_s, self._coordinator.progress, now)
        if suspected is None:
            # The ranks made progress while the stacks were collected: nothing is reported.
            self._known_hang = self._suspected_hang = None
        elif self._suspected_hang is None and (
            self._known_hang is None or self._known_hang.ranks != suspected.ranks
        ):
            self._suspected_hang = self._known_hang = suspected
            self._requested_at = now
            self._dump_id += 1
            self._stack_texts = {}
            self._request_stacks(DumpStacks(round=self._coordinator.round, dump_id=self._dump_id))
        if self._suspected_hang is None:
            return None
        # A node that is frozen or lost never answers; the report then lacks its stacks.
        is_complete = len(self._stack_texts) == self._coordinator.world_size
        if not is_complete and now < self._requested_at + STACK_DUMP_TIMEOUT_S:
            return None
        return self._store_stack_dump(self._suspected_hang, now)

    def _store_stack_dump(self, suspected_hang: SuspectedHang, now: float) -> HangReport | None:
        """Return None while the write is in progress.

        If the write fails or times out, the report says so: a hang must not stay undetected because
        the bucket is unavailable.
        """
        key = keys.stack_dump(self._ledger.agent_id, self._coordinator.round, self._dump_id)
        missing = f"its node did not send them within {STACK_DUMP_TIMEOUT_S:.0f} s"
        # The suspected ranks first: at 1,000 ranks nobody reads all stacks.
        ranks = dict.fromkeys([*suspected_hang.ranks, *range(self._coordinator.world_size)])
        parts = [f"=== rank {rank}: {self._stack_texts.get(rank, missing)}\n" for rank in ranks]
        body = "\n".join([f"{suspected_hang.reason}\n", *parts])
        store = self._ledger.store
        write = partial(store.put, key, body.encode())
        result = self._background_calls.run(f"stacks {key}", write)
        # A write that is in progress twice as long as allowed is not waited for.
        if result is None and now < self._requested_at + 2 * STACK_DUMP_TIMEOUT_S:
            return None
        self._suspected_hang = None
        location = f"the stacks of all ranks are in {store.url.rstrip('/')}/{key}"
        if result is None or result.error is not None:
            reason = "the bucket does not answer" if result is None else result.error
            location = f"their stacks could not be stored: {reason}"
        return HangReport(suspected_hang, f"{suspected_hang.reason}; {location}")
