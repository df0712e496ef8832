"""Steps per second of a small DDP model on 4 workers: the overhead during undisturbed training.

The first steps are not measured on any side, because libraries are still being imported.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import Figure, PeerTarget, Reading, main
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
    since, until = min(e.fields["since"] for e in ended), max(e.at for e in ended)
    cpu_ms = run.cpu_between(since, until) / STEPS * 1e3
    return Reading(STEPS / (until - since), since, until, {"cpu_ms_per_step": cpu_ms})


FIGURE = Figure(
    name="ddp_steps",
    title="steps per second of a DDP loop, 4 workers",
    unit="steps/s",
    job=job,
    read=read,
    peer_targets=(PeerTarget(TORCHRUN_TUNED, target=0.98), PeerTarget(TORCHRUN, target=0.98)),
    limit_s=120.0,
    more_is_better=True,
    also=(("cpu_ms_per_step", "CPU of the whole tree per step (ms)"),),
)

if __name__ == "__main__":
    main(FIGURE)
