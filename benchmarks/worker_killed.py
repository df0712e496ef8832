"""Time from SIGKILL of one of four workers to the first step of all workers after the restore.

The worker records the time and kills itself between two steps; every rank in turn. With
`--count 200` spotfit alone is killed that often, 25 times per fit(), and every recovery counts.
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
LIMIT_S = 90.0


def job(setting: Setting) -> Job:
    return killed(KILLS)


def killed(kills: int) -> Job:
    return Job("survive", {"kills": kills, "victim": "worker"}, workers=WORKERS, max_failures=kills)


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


def kills_to_count() -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--count", type=int, default=0)
    return int(parser.parse_known_args()[0].count)


if __name__ == "__main__":
    if wanted := kills_to_count():
        main_alone(FIGURE_COUNTED, runs=-(-wanted // KILLS_WHEN_COUNTED))
    else:
        main(FIGURE)
