"""report(metrics) back to back on 4 workers: the time of a call, median over calls and workers."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from statistics import median

from benchmarks.measure import Figure, PeerTarget, Reading, main
from benchmarks.peers import RAY, RAY_TUNED, Setting
from benchmarks.run_once import Job, Run

WORKERS = 4
# Limited by the duration of Ray's calls: 1.6 s each by default, 50 ms tuned.
CALLS = {"ours": 5000, "ray-default": 8, "ray-tuned": 60}


def job(setting: Setting) -> Job:
    calls = CALLS[setting.name]
    return Job("report_often", {"calls": calls, "unmeasured": 4}, workers=WORKERS)


def read(run: Run) -> Reading | None:
    ended = run.events.named("reported")
    if len(ended) != WORKERS:
        return None
    since, until = min(e.fields["since"] for e in ended), max(e.at for e in ended)
    calls = ended[0].fields["calls"]
    return Reading(
        median(e.fields["median_us"] for e in ended),
        since,
        until,
        {
            "mean_us": median(e.fields["mean_us"] for e in ended),
            "p99_us": max(e.fields["p99_us"] for e in ended),
            "cpu_us_per_call": run.cpu_between(since, until) / calls / WORKERS * 1e6,
        },
    )


FIGURE = Figure(
    name="report_calls",
    title="report(metrics) back to back, 4 workers, median",
    unit="µs",
    job=job,
    read=read,
    peer_targets=(PeerTarget(RAY_TUNED, target=1000.0), PeerTarget(RAY, target=1000.0)),
    limit_s=120.0,
    at_most=50.0,
    also=(
        ("mean_us", "mean, including waits for other ranks (us)"),
        ("cpu_us_per_call", "CPU of the whole tree per call (us)"),
    ),
)

if __name__ == "__main__":
    main(FIGURE)
