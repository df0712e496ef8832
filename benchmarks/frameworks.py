"""Lightning, Transformers, XGBoost and LightGBM on 2 workers, under spotfit and under Ray Train.

restarts_*  a worker kills itself after step 12: from the kill to the next step of both workers;
            also the time and CPU time to the first line, and the CPU time of the whole run
saves_*     a model of 200 or 230 MB with Adam's state, three times as much: how long a save stops
            the loop, the mean over the saves of a run of the time between two steps with a
            save, less the median without one

Ray Train runs with its best settings: those of the other figures, the niceness of its workers,
and asynchronous uploads.
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import Figure, PeerTarget, Reading, main, requested
from benchmarks.peers import OURS_FRAMEWORKS, RAY_FRAMEWORKS
from benchmarks.run_once import Events, Job, Run

WORKERS = 2
LIMIT_S = 120.0
TRAINERS = {
    "lightning": "torch.TorchTrainer",
    "transformers": "torch.TorchTrainer",
    "xgboost": "xgboost.XGBoostTrainer",
    "lightgbm": "lightgbm.LightGBMTrainer",
}
KILL_AFTER = 12
RESTART = {"steps": 16, "save_every": 5, "kill_after": KILL_AFTER, "step_s": 0.05}
SAVES, SAVE_EVERY = 3, 2
# The last save ends before one more step.
STEPS = SAVES * SAVE_EVERY + 1
# In the pauses the processors are free, as with a GPU.
SAVE = {"steps": STEPS, "save_every": SAVE_EVERY, "kill_after": 0, "step_s": 0.5}
SIZES: Mapping[str, tuple[dict[str, int], dict[str, int]]] = {
    "lightning": ({"layers": 2}, {"layers": 48}),
    "transformers": ({"layers": 1, "hidden": 32}, {"layers": 8, "hidden": 768}),
}
"""The model of restarts and of saves."""


def job(library: str, config: Mapping[str, Any]) -> Job:
    return Job(
        f"frameworks_workload.{library}",
        config,
        workers=WORKERS,
        max_failures=1,
        trainer=TRAINERS[library],
    )


def read_restart(run: Run) -> Reading | None:
    line = run.events.when_all("first_line", WORKERS, attempt=0)
    step = run.events.when_all("trained", WORKERS, attempt=1)
    kills = run.events.named("killed")
    if line is None or step is None or len(kills) != 1:
        return None
    resumed = run.events.named("trained", attempt=1)[0].fields["step"]
    return Reading(
        step - kills[0].at,
        kills[0].at,
        step,
        {
            "first_line_s": line - run.started,
            "first_line_cpu_s": run.cpu_between(run.started, line),
            "total_s": run.ended - run.started,
            "total_cpu_s": run.cpu_s,
            "steps_lost": KILL_AFTER + 1 - resumed,
        },
    )


def read_save(run: Run) -> Reading | None:
    pauses = _pauses(run.events)
    returned = run.events.named("fit_returned")
    if len(pauses) != STEPS - 1 or not returned:
        return None
    if returned[0].fields["checkpoints"] < SAVES:
        return None
    with_save = [pause for step, pause in pauses.items() if step % SAVE_EVERY == 0]
    usual = median(pause for step, pause in pauses.items() if step % SAVE_EVERY)
    stalls = [pause - usual for pause in with_save]
    trained = run.events.named("trained")
    since, until = trained[0].at, trained[-1].at
    return Reading(
        mean(stalls),
        since,
        until,
        {
            "stalls_s": stalls,
            "p95_s": quantiles(stalls, n=20, method="inclusive")[-1],
            "loop_s": until - since,
            "total_cpu_s": run.cpu_s,
        },
    )


def _pauses(events: Events) -> dict[int, float]:
    """Return the time from each step's end to the next step, of the slowest rank."""
    found: dict[int, float] = {}
    ended = {(e.fields["rank"], e.fields["step"]): e.at for e in events.named("trained")}
    for event in events.named("began"):
        rank, step = event.fields["rank"], event.fields["step"] - 1
        if step:
            found[step] = max(found.get(step, 0.0), event.at - ended[rank, step])
    return found


def _figure(
    name: str,
    title: str,
    job_of_run: Job,
    read: Callable[[Run], Reading | None],
    target: float,
    also: Mapping[str, str],
) -> Figure:
    return Figure(
        name=f"frameworks_{name}",
        title=title,
        unit="s",
        job=lambda _: job_of_run,
        read=read,
        peer_targets=(PeerTarget(RAY_FRAMEWORKS, target=target),),
        limit_s=LIMIT_S,
        ours=OURS_FRAMEWORKS,
        also=tuple(also.items()),
    )


def figures() -> dict[str, Figure]:
    """Return the figures by the name that `--of` takes."""
    found = {}
    for library in TRAINERS:
        small, large = SIZES.get(library, ({}, None))
        found[f"restarts_{library}"] = _figure(
            f"restarts_{library}",
            f"{library}: SIGKILL of one of {WORKERS} workers to the next step",
            job(library, RESTART | small),
            read_restart,
            10.0,
            {
                "first_line_s": "start of the program to the first line of the function (s)",
                "first_line_cpu_s": "the same, CPU of the process tree (s)",
                "total_s": "the whole run (s)",
                "total_cpu_s": "the whole run, CPU of the process tree (s)",
            },
        )
        if large is not None:
            found[f"saves_{library}"] = _figure(
                f"saves_{library}",
                f"{library}: a save of a model of 200 MB, with Adam, stops the loop for",
                job(library, SAVE | large),
                read_save,
                5.0,
                {
                    "p95_s": "95th percentile of the saves (s)",
                    "loop_s": f"{STEPS} steps with {SAVES} saves (s)",
                    "total_cpu_s": "the whole run, CPU of the process tree (s)",
                },
            )
    return found


FIGURES = figures()

if __name__ == "__main__":
    for name in requested(FIGURES):
        main(FIGURES[name])
