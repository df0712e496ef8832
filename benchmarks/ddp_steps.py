"""Steps a second of a small DDP model on 4 workers: what we cost while nothing happens.

On every side the first steps do not count: libraries are still imported then, ours also in the
background, and a day of training does not notice.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import Figure, Reading, Rival, main
from benchmarks.peers import TORCHRUN, TORCHRUN_TUNED, Setting
from benchmarks.run_once import Job, Run

WORKERS = 4
STEPS = 1500


def job(setting: Setting) -> Job:
    return Job("loop", {"steps": STEPS, "unmeasured": 400}, workers=WORKERS)


def read(run: Run) -> Reading | None:
    ended = run.events.named("looped")
    if len(ended) != WORKERS:
        return None
    since, until = min(e.facts["since"] for e in ended), max(e.at for e in ended)
    cpu_ms = run.cpu_between(since, until) / STEPS * 1e3
    return Reading(STEPS / (until - since), since, until, {"cpu_ms_a_step": cpu_ms})


FIGURE = Figure(
    name="ddp_steps",
    title="steps a second of a DDP loop, 4 workers",
    unit="steps/s",
    job=job,
    read=read,
    rivals=(Rival(TORCHRUN_TUNED, asked=0.98), Rival(TORCHRUN, asked=0.98)),
    limit_s=120.0,
    more_is_better=True,
    also=(("cpu_ms_a_step", "CPU of the whole tree per step (ms)"),),
)

if __name__ == "__main__":
    main(FIGURE)
