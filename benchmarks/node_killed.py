"""Time from SIGKILL of one of two nodes, without notice, to the first step of all workers after the
restore.

Two of four workers, their fork server and their agent are killed at once. The time includes the
replacement. Only spotfit is measured: neither peer replaces a machine.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import Figure, Reading, main
from benchmarks.peers import Setting
from benchmarks.recoveries import recoveries, summarize
from benchmarks.run_once import Job, Run

WORKERS = 4
KILLS = 3
LIMIT_S = 120.0


def job(setting: Setting) -> Job:
    config = {"kills": KILLS, "victim": "node"}
    return Job("survive", config, workers=WORKERS, nodes=2, max_failures=KILLS)


def read(run: Run) -> Reading | None:
    found = recoveries(run.events, WORKERS)
    if not found:
        return None
    value, more = summarize(found, LIMIT_S)
    return Reading(value, found[0].at, run.ended, more)


FIGURE = Figure(
    name="node_killed",
    title="SIGKILL of a whole node of 2 to the first step after restore, replacement included",
    unit="s",
    job=job,
    read=read,
    peer_targets=(),
    limit_s=LIMIT_S,
    at_most=3.0,
)

if __name__ == "__main__":
    main(FIGURE)
