"""Scale test: many agents and one leader; checks the invariants and measures the request cost.

    python -m spotfit_localsim.virtual.scale --agents 1000 --minutes 10

Every agent is the production agent. Only the view after a journal entry, which all agents compute
alike, is computed once.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from spotfit.ledger import journal
from spotfit.model.events import JournalEntry
from spotfit.model.spec import RunTiming
from spotfit.model.view import JournalView, fold
from spotfit.store.api import Store
from spotfit_localsim.virtual.engine import Engine, patched_attribute
from spotfit_localsim.virtual.invariants import InvariantViolation
from spotfit_localsim.virtual.market import SimMarketConfig
from spotfit_localsim.virtual.scenario import AtTime, CancelRun, Scenario
from spotfit_localsim.virtual.simulation import SimWorld
from spotfit_localsim.virtual.timeline import SimulationResult
from spotfit_localsim.virtual.workload import Workload

USD_PER_1000_REQUESTS = {"put": 0.005, "create": 0.005, "list": 0.005, "get": 0.0004, "delete": 0.0}
"""List prices of S3 Standard in us-east-1."""

_CANCEL_DELAY_S = 30.0
"""Time from the end of the churn to the cancellation of the run."""


@dataclass(frozen=True, slots=True)
class BucketCost:
    """The requests to the bucket, and their price."""

    requests: Counter[str]
    agent_hours: float

    @property
    def requests_per_agent_hour(self) -> dict[str, float]:
        """Requests by kind that one agent makes per hour."""
        return {kind: count / self.agent_hours for kind, count in sorted(self.requests.items())}

    @property
    def usd_per_agent_hour(self) -> float:
        """Price at `USD_PER_1000_REQUESTS`."""
        return sum(
            n * USD_PER_1000_REQUESTS[kind] / 1000
            for kind, n in self.requests_per_agent_hour.items()
        )

    def __str__(self) -> str:
        lines = [
            f"  {kind:<8}{count:10.2f}" for kind, count in self.requests_per_agent_hour.items()
        ]
        # Six digits: the price of one agent is far below a cent.
        total = f"  cost    ${self.usd_per_agent_hour:10.6f}"
        return "\n".join(["per agent and hour:", *lines, total])


def churn_scenario(
    agents: int, minutes: float, *, reclaimed_fraction_per_minute: float = 0.1
) -> Scenario:
    """Return an elastic run in which a fraction of the agents is preempted every minute."""
    churn_s = minutes * 60
    return Scenario(
        f"churn of {agents} agents",
        num_workers=agents,
        min_workers=agents // 2,
        slots_per_machine=1,
        workload=Workload(
            # The training does not end by itself; the run is cancelled after the churn.
            steps=1_000_000,
            step_s=(1.0, 1.0),
            report_every=5,
            save_every=10,
            all_ranks_save=False,
            peer_error_probability=0.0,
        ),
        timing=RunTiming(round_fill_timeout_s=5.0),
        market=SimMarketConfig(
            reclaims_per_hour=60.0 * reclaimed_fraction_per_minute,
            notice_probability=0.5,
            notice_s=30.0,
            boot_s=(20.0, 40.0),
        ),
        events=(CancelRun(AtTime(churn_s + _CANCEL_DELAY_S)),),
        faults_duration_s=churn_s,
        expected_outcome="cancelled",
    )


def measure(scenario: Scenario, seed: int) -> tuple[SimulationResult, BucketCost]:
    """Run the scenario. Raises `InvariantViolation`."""
    with shared_folds():
        world = SimWorld(scenario, seed, engine=Engine(max_events=500_000_000))
        # Comparing views costs more than computing them, and all are one object here.
        world.checker.compares_views = False
        result = world.run()
    if result.violation is not None:
        raise InvariantViolation(str(result))
    return result, BucketCost(result.requests, result.agent_seconds / 3600)


@contextmanager
def shared_folds() -> Iterator[None]:
    """Patch the journal inside the context: equal entries on equal views give one shared view."""
    shared = _FoldCache(journal._decode_entry)  # noqa: SLF001  # patched below
    with (
        patched_attribute(journal, "_decode_entry", shared.read),
        patched_attribute(journal, "fold", shared.fold),
    ):
        yield


class _FoldCache:
    """Decoded entries by their bytes, and views by their slot."""

    def __init__(self, read: Callable[[int, bytes, Store], JournalEntry]) -> None:
        self._read = read
        self._entries: dict[tuple[int, bytes], JournalEntry] = {}
        self._views: dict[int, JournalView] = {}
        self._folded: dict[tuple[int, int], JournalView] = {}

    def read(self, slot: int, body: bytes, store: Store) -> JournalEntry:
        key = (slot, body)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = self._read(slot, body, store)
        return entry

    def fold(self, view: JournalView, entry: JournalEntry) -> JournalView:
        # Views of one slot are equal unless an agent is wrong; then it computes its own.
        canonical = self._views.setdefault(view.next_slot, view)
        if canonical is not view and canonical != view:
            return fold(view, entry)
        # Entries are shared objects, kept by `_entries`: an identity is not reused.
        key = (view.next_slot, id(entry))
        after = self._folded.get(key)
        if after is None:
            after = self._folded[key] = fold(canonical, entry)
            self._views.setdefault(after.next_slot, after)
        return after


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; the exit code is 1 for a violated invariant."""
    parser = argparse.ArgumentParser(prog="python -m spotfit_localsim.virtual.scale")
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument(
        "--churn", type=float, default=0.1, help="fraction of agents preempted per minute"
    )
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    scenario = churn_scenario(
        options.agents, options.minutes, reclaimed_fraction_per_minute=options.churn
    )
    try:
        result, cost = measure(scenario, options.seed)
    except InvariantViolation as broken:
        sys.stdout.write(f"{broken}\n")
        return 1
    sys.stdout.write(
        f"{scenario.name}, seed {options.seed}: {result.outcome} after {result.duration_s:.0f} s, "
        f"{result.rounds} rounds, {result.elections} elections, {len(result.entries)} entries, "
        f"{result.event_count} events; no invariant violated\n{cost}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
