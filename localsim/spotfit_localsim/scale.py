"""A thousand agents and one leader: does anything break, and what does the bucket cost?

    python -m spotfit_localsim.scale --agents 1000 --minutes 10

Every agent is the real one. Only what all would compute alike is computed once: the view that an
entry leads to.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from spotfit.ledger import journal
from spotfit.model.events import Entry
from spotfit.model.fold import fold
from spotfit.model.spec import Tempo
from spotfit.model.view import View
from spotfit_localsim.engine import Engine, swapped
from spotfit_localsim.invariants import InvariantBroken
from spotfit_localsim.market import Market
from spotfit_localsim.run import World
from spotfit_localsim.scenario import At, Cancel, Scenario
from spotfit_localsim.story import Story
from spotfit_localsim.workload import Workload

DOLLARS_PER_1000 = {"put": 0.005, "create": 0.005, "list": 0.005, "get": 0.0004, "delete": 0.0}
"""List prices of S3 Standard requests."""

_CALM_S = 30.0
"""After the churn: how long until somebody ends the run."""


@dataclass(frozen=True, slots=True)
class Bill:
    """What the bucket was asked, and what that costs."""

    requests: Counter[str]
    agent_hours: float

    @property
    def per_agent_hour(self) -> dict[str, float]:
        """Requests by kind that one agent makes in an hour."""
        return {kind: count / self.agent_hours for kind, count in sorted(self.requests.items())}

    @property
    def dollars_per_agent_hour(self) -> float:
        """At list prices."""
        return sum(n * DOLLARS_PER_1000[kind] / 1000 for kind, n in self.per_agent_hour.items())

    def __str__(self) -> str:
        lines = [f"  {kind:<8}{count:10.2f}" for kind, count in self.per_agent_hour.items()]
        total = f"  bill    ${self.dollars_per_agent_hour:10.6f}"
        return "\n".join(["per agent and hour:", *lines, total])


def churn(agents: int, minutes: float, *, share_per_minute: float = 0.1) -> Scenario:
    """So many agents of one elastic run, of which a share is reclaimed every minute."""
    storm_s = minutes * 60
    return Scenario(
        f"churn of {agents} agents",
        workers=agents,
        workers_min=agents // 2,
        slots=1,
        load=Workload(
            steps=1_000_000,
            step_s=(1.0, 1.0),
            report_every=5,
            save_every=10,
            everyone_saves=False,
            peers_raise=0.0,
        ),
        tempo=Tempo(form_patience_s=5.0),
        market=Market(
            reclaims_per_hour=60.0 * share_per_minute,
            with_notice=0.5,
            notice_s=30.0,
            boot_s=(20.0, 40.0),
        ),
        acts=(Cancel(At(storm_s + _CALM_S)),),
        storm_s=storm_s,
        outcome="cancelled",
    )


def measure(scenario: Scenario, seed: int) -> tuple[Story, Bill]:
    """Live through it. Raises `InvariantBroken` if something did not hold."""
    with one_fold_for_all():
        world = World(scenario, seed, engine=Engine(most_steps=500_000_000))
        world.checker.deep = False
        story = world.live()
    if story.broken is not None:
        raise InvariantBroken(str(story))
    return story, Bill(story.requests, story.agent_seconds / 3600)


@contextmanager
def one_fold_for_all() -> Iterator[None]:
    """Whoever folds the same bytes onto the same view is given the same view again."""
    shared = _Shared(journal._read)  # noqa: SLF001  # what is shared has no name outside
    with swapped(journal, "_read", shared.read), swapped(journal, "fold", shared.fold):
        yield


class _Shared:
    """Entries by their bytes, views by their slot; all that are equal are one object."""

    def __init__(self, read: Callable[[int, bytes], Entry]) -> None:
        self._read = read
        self._entries: dict[tuple[int, bytes], Entry] = {}
        self._views: dict[int, View] = {}
        self._folded: dict[tuple[int, int], View] = {}

    def read(self, slot: int, body: bytes) -> Entry:
        key = (slot, body)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = self._read(slot, body)
        return entry

    def fold(self, view: View, entry: Entry) -> View:
        known = self._views.setdefault(view.next_slot, view)
        if known is not view and known != view:
            return fold(view, entry)
        key = (view.next_slot, id(entry))
        after = self._folded.get(key)
        if after is None:
            after = self._folded[key] = fold(known, entry)
            self._views.setdefault(after.next_slot, after)
        return after


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it from the command line; the exit code says whether all held."""
    parser = argparse.ArgumentParser(prog="python -m spotfit_localsim.scale")
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--churn", type=float, default=0.1, help="share of agents lost a minute")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(arguments)
    scenario = churn(given.agents, given.minutes, share_per_minute=given.churn)
    try:
        story, bill = measure(scenario, given.seed)
    except InvariantBroken as broken:
        sys.stdout.write(f"{broken}\n")
        return 1
    sys.stdout.write(
        f"{scenario.name}, seed {given.seed}: {story.outcome} after {story.lasted_s:.0f} s, "
        f"{story.rounds} rounds, {story.elections} elections, {len(story.entries)} entries, "
        f"{story.events} events; no invariant broken\n{bill}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
