"""report(metrics) back to back on 4 workers: the time of a call, median over calls and workers."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from statistics import median

from benchmarks.measure import Figure, Reading, Rival, main
from benchmarks.peers import RAY, RAY_TUNED, Setting
from benchmarks.run_once import Job, Run

WORKERS = 4
# Enough to be sure, few enough to end: Ray's take 1.6 s each by default, and 50 ms tuned.
CALLS = {"ours": 5000, "ray-default": 8, "ray-tuned": 60}


def job(setting: Setting) -> Job:
    calls = CALLS[setting.name]
    return Job("report_often", {"calls": calls, "unmeasured": 4}, workers=WORKERS)


def read(run: Run) -> Reading | None:
    ended = run.events.named("reported")
    if len(ended) != WORKERS:
        return None
    since, until = min(e.facts["since"] for e in ended), max(e.at for e in ended)
    calls = ended[0].facts["calls"]
    return Reading(
        median(e.facts["median_us"] for e in ended),
        since,
        until,
        {
            "mean_us": median(e.facts["mean_us"] for e in ended),
            "p99_us": max(e.facts["p99_us"] for e in ended),
            "cpu_us_a_call": run.cpu_between(since, until) / calls / WORKERS * 1e6,
        },
    )


FIGURE = Figure(
    name="report_calls",
    title="report(metrics) back to back, 4 workers, median",
    unit="µs",
    job=job,
    read=read,
    rivals=(Rival(RAY_TUNED, asked=1000.0), Rival(RAY, asked=1000.0)),
    limit_s=120.0,
    at_most=50.0,
    also=(
        ("mean_us", "mean, which holds what waits for others (us)"),
        ("cpu_us_a_call", "CPU of the whole tree per call (us)"),
    ),
)

if __name__ == "__main__":
    main(FIGURE)
