"""From a cold start of the program to the first line of the training function, on 4 workers.

The clock starts when the program is executed and stops when the last worker enters the function,
with torch imported and the process group formed, on every side.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import Figure, PeerTarget, Reading, main
from benchmarks.peers import RAY, RAY_TUNED, TORCHRUN, TORCHRUN_TUNED, Setting
from benchmarks.run_once import Job, Run

WORKERS = 4


def job(setting: Setting) -> Job:
    return Job("first_line", workers=WORKERS)


def read(run: Run) -> Reading | None:
    line = run.events.when_all("first_line", WORKERS)
    step = run.events.when_all("first_step", WORKERS)
    if line is None or step is None:
        return None
    ready = all(e.fields["torch"] and e.fields["group"] for e in run.events.named("first_line"))
    return Reading(
        line - run.started,
        run.started,
        line,
        {"first_step_s": step - run.started, "ready": ready, "from_fit_s": _from_fit(run, line)},
    )


def _from_fit(run: Run, line: float) -> float | None:
    called = run.events.named("fit_called")
    return line - called[0].at if called else None


FIGURE = Figure(
    name="fit_to_first_line",
    title="fit() to the first line, cold process, 4 workers",
    unit="s",
    job=job,
    read=read,
    peer_targets=(
        PeerTarget(TORCHRUN_TUNED, target=2.5),
        PeerTarget(TORCHRUN, target=2.5),
        PeerTarget(RAY_TUNED, target=8.0),
        PeerTarget(RAY, target=8.0),
    ),
    limit_s=120.0,
    also=(("first_step_s", "to the end of the first step (s)"),),
)

if __name__ == "__main__":
    main(FIGURE)
