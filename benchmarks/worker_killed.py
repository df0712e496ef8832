"""Time from SIGKILL of one of four workers to the first step of all workers after the restore.

The worker records the time and kills itself between two steps; every rank in turn. With
`--count 200` spotfit alone is killed that often, 25 times per fit(), and every recovery counts.
With `--early` one worker is killed, two seconds after its function was called.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import Figure, PeerTarget, Reading, main, main_alone
from benchmarks.peers import RAY, RAY_TUNED, TORCHRUN, TORCHRUN_TUNED, Setting
from benchmarks.recoveries import recoveries, summarize
from benchmarks.run_once import Job, Run

WORKERS = 4
# Each rank is killed once.
KILLS = WORKERS
KILLS_WHEN_COUNTED = 25
EARLY_S = 2.0
LIMIT_S = 90.0


def job(setting: Setting) -> Job:
    return killed(KILLS)


def killed(kills: int, *, after_s: float = 0.0) -> Job:
    config = {"kills": kills, "victim": "worker", "kill_after_s": after_s}
    return Job("survive", config, workers=WORKERS, max_failures=kills)


def read(run: Run) -> Reading | None:
    found = recoveries(run.events, WORKERS)
    if not found:
        return None
    value, more = summarize(found, LIMIT_S)
    last = found[-1].at + (found[-1].recovered_s or LIMIT_S)
    return Reading(value, found[0].at, min(last, run.ended), more)


FIGURE = Figure(
    name="worker_killed",
    title="SIGKILL of one of 4 workers to the first step after restore",
    unit="s",
    job=job,
    read=read,
    peer_targets=(
        PeerTarget(TORCHRUN_TUNED, target=10.0),
        PeerTarget(TORCHRUN),
        PeerTarget(RAY_TUNED, target=20.0),
        PeerTarget(RAY, target=20.0),
    ),
    limit_s=LIMIT_S,
    also=(("first_recovery_s", "the first kill alone, moments after the start (s)"),),
)

FIGURE_COUNTED = replace(
    FIGURE,
    name="worker_killed_often",
    title="the same, spotfit alone, every recovery counted",
    job=lambda _: killed(KILLS_WHEN_COUNTED),
    peer_targets=(),
    also=(),
)


FIGURE_EARLY = replace(
    FIGURE,
    name="worker_killed_early",
    title=f"the same, one worker killed {EARLY_S:g} s after its function was called",
    job=lambda _: killed(1, after_s=EARLY_S),
    peer_targets=(PeerTarget(TORCHRUN_TUNED, target=20.0),),
    also=(),
)


def own_arguments() -> argparse.Namespace:
    """Remove the arguments of this program from `sys.argv`, and return them."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--early", action="store_true")
    known, sys.argv[1:] = parser.parse_known_args()
    return known


if __name__ == "__main__":
    own = own_arguments()
    if own.count:
        main_alone(FIGURE_COUNTED, runs=-(-own.count // KILLS_WHEN_COUNTED))
    elif own.early:
        main(FIGURE_EARLY)
    else:
        main(FIGURE)
