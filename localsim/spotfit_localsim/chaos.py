"""Random worlds by the thousand: which seeds break something?

    python -m spotfit_localsim.chaos --virtual 20000 --live 500

A seed that is found again tells the same story again: `--seed-start S --virtual 1`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from spotfit.core.clock import Clock
from spotfit.host.clocks import SystemClock
from spotfit_localsim.library import random_saves, random_storm
from spotfit_localsim.run import World
from spotfit_localsim.scenario import Scenario

_LIVE = "spotfit_localsim.live.chaos"
_TELL_EVERY = 500


Teller = Callable[[int], Scenario]
"""What a seed tells of; random storms, if nobody says otherwise."""


@dataclass
class Tally:
    """How a number of worlds went."""

    worlds: int = 0
    broken: list[int] = field(default_factory=list)
    """Seeds of worlds in which something did not hold."""
    met: Counter[str] = field(default_factory=Counter)
    """What was lived through, summed over all worlds."""

    def __str__(self) -> str:
        met = ", ".join(f"{count:,} {what}" for what, count in self.met.items())
        return f"{self.worlds:,} worlds, {len(self.broken)} broken; {met}"


def live_through(seed: int, tally: Tally, teller: Teller | None = None) -> str | None:
    """One world; its story if something in it did not hold."""
    tally.worlds += 1
    try:
        story = World((teller or random_storm)(seed), seed).live()
    except Exception:  # noqa: BLE001  # a world that cannot even be simulated is a finding too
        tally.broken.append(seed)
        return f"storm {seed}: the simulation broke\n{traceback.format_exc()}"
    tally.met["rounds"] += story.rounds
    tally.met["elections"] += story.elections
    tally.met["journal entries"] += len(story.entries)
    tally.met["steps repeated"] += story.steps_repeated
    tally.met["rounds from memory"] += story.rounds_from_memory
    tally.met["virtual seconds"] += round(story.lasted_s)
    if story.broken is None:
        return None
    tally.broken.append(seed)
    return str(story)


def virtual(
    count: int,
    seed_start: int,
    say: Callable[[str], None],
    clock: Clock,
    *,
    teller: Teller | None = None,
) -> Tally:
    """`count` worlds from that seed on, with progress and the stories of those that broke."""
    tally = Tally()
    began = clock.now()
    for seed in range(seed_start, seed_start + count):
        story = live_through(seed, tally, teller)
        if story is not None:
            say(story)
        if tally.worlds % _TELL_EVERY == 0:
            say(f"{clock.now() - began:7.0f} s  {tally}")
    say(f"virtual, seeds {seed_start}..{seed_start + count - 1}: {tally}")
    if tally.broken:
        say(f"broken seeds: {tally.broken}")
    return tally


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it from the command line; the exit code says whether all held."""
    parser = argparse.ArgumentParser(prog="python -m spotfit_localsim.chaos")
    parser.add_argument("--virtual", type=int, default=0, help="worlds under a virtual clock")
    parser.add_argument("--live", type=int, default=0, help="schedules with real processes")
    parser.add_argument("--saves", action="store_true", help="of a Checkpointer's saves alone")
    parser.add_argument("--seed-start", type=int, default=0)
    given = parser.parse_args(arguments)
    held = True
    if given.virtual:
        teller = random_saves if given.saves else None
        tally = virtual(given.virtual, given.seed_start, _say, SystemClock(), teller=teller)
        held = not tally.broken
    if given.live:
        live = importlib.import_module(_LIVE)  # real processes: only where they are asked for
        seeds = range(given.seed_start, given.seed_start + given.live)
        folder = Path(tempfile.mkdtemp(prefix="spotfit-chaos-"))  # keeps what went wrong
        stories = live.story_of_saves if given.saves else live.story_of
        played = live.run(seeds, folder=folder, teller=stories)
        _say(f"live, seeds {seeds.start}..{seeds.stop - 1}: {played}")
        held = played.wrong == 0 and held
        with contextlib.suppress(OSError):
            folder.rmdir()
    return 0 if held else 1


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
