"""A second fit() in the same process, from its call to the first line on all 4 workers."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import Figure, PeerTarget, Reading, main
from benchmarks.peers import RAY, RAY_TUNED, Setting
from benchmarks.run_once import Job, Run

WORKERS = 4


def job(setting: Setting) -> Job:
    return Job("first_line", workers=WORKERS, fits=2)


def read(run: Run) -> Reading | None:
    line = run.events.when_all("first_line", WORKERS, fit=1)
    called = run.events.named("fit_called", fit=1)
    returned = run.events.named("fit_returned", fit=1)
    if line is None or not returned:
        return None
    since = called[0].at
    return Reading(line - since, since, line, {"returned_s": returned[0].at - since})


FIGURE = Figure(
    name="second_fit",
    title="second fit() in one process, 4 workers",
    unit="s",
    job=job,
    read=read,
    peer_targets=(PeerTarget(RAY_TUNED, target=20.0), PeerTarget(RAY, target=20.0)),
    limit_s=180.0,
    also=(("returned_s", "to the return of fit() (s)"),),
)

if __name__ == "__main__":
    main(FIGURE)
