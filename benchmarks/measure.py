"""The measurement protocol: pairs in the order A B, B A, A B, …, after a discarded warm-up pair.

No run is dropped: one that hangs or fails counts as the time limit. A pair whose runs had very
different CPU pressure is repeated and reported as repeated. The claim is the lower bound of
the ratio.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from benchmarks import peers, ratios, tables
from benchmarks.peers import OURS, SETTINGS, Setting
from benchmarks.run_once import Job, Run, run_once

RESULTS = peers.BENCH / "results"
PAIRS = 7
# Largest difference of the CPU pressure within a pair, in percentage points.
MAX_PRESSURE_DIFFERENCE = 20.0
REPEATS = 2


@dataclass(frozen=True, slots=True)
class Reading:
    """The result of one run: the figure, the interval for its CPU time, and further readings."""

    value: float
    since: float
    until: float
    more: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PeerTarget:
    """A setting of a peer, and the target ratio (None: shown, not claimed)."""

    setting: Setting
    target: float | None = None


@dataclass(frozen=True, slots=True)
class Figure:
    """One row of the table: the work, how its figure is read, and the peers."""

    name: str
    title: str
    unit: str
    job: Callable[[Setting], Job]
    read: Callable[[Run], Reading | None]
    peer_targets: tuple[PeerTarget, ...]
    limit_s: float
    more_is_better: bool = False
    at_most: float | None = None
    ours: Setting = OURS
    # Additional comparisons: (key of `Reading.more`, title); smaller is better.
    also: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Measured:
    """One run, as stored in the result file."""

    setting: str
    value: float
    cpu_s: float
    ok: bool
    hung: bool
    wall_s: float
    total_cpu_s: float
    processes: int
    leftover_processes: int
    load: float
    pressure: float
    more: dict[str, Any]
    tail: str


@dataclass(frozen=True, slots=True)
class Pair:
    """A run of spotfit and one of the peer, one directly after the other."""

    ours: Measured
    theirs: Measured
    repeated: int


# ── measuring ─────────────────────────────────────────────────────────────────────────────────────


def measure(figure: Figure, setting: Setting) -> Measured:
    """Run and measure one side once."""
    run = run_once(setting, figure.job(setting), limit_s=figure.limit_s)
    reading = figure.read(run)
    measured = _measured(figure, run, reading)
    how = "" if measured.ok else "  HUNG" if measured.hung else f"  FAILED ({run.exit_code})"
    print(
        f"  {setting.name:<17}{measured.value:>10.4g} {figure.unit:<8}"
        f"{measured.cpu_s:>7.2f} CPU-s"
        f"  of {measured.total_cpu_s:>6.1f} in {measured.wall_s:>5.1f} s"
        f"  load {measured.load:>4.1f}  pressure {measured.pressure:>3.0f} %{how}",
        flush=True,
    )
    return measured


def _measured(figure: Figure, run: Run, reading: Reading | None) -> Measured:
    ok = reading is not None and run.exit_code == 0
    worst = 0.0 if figure.more_is_better else figure.limit_s
    found = reading or Reading(worst, run.started, run.ended)
    return Measured(
        setting=run.setting,
        value=found.value,
        cpu_s=run.cpu_between(found.since, found.until),
        ok=ok,
        hung=run.hung,
        wall_s=run.ended - run.started,
        total_cpu_s=run.cpu_s,
        processes=run.processes,
        leftover_processes=run.leftover_processes,
        load=run.load,
        pressure=run.pressure,
        more=found.more,
        tail="" if ok else run.tail,
    )


def measure_pairs(figure: Figure, peer_target: PeerTarget, pairs: int) -> list[Pair]:
    """Run the pairs against one peer, after a warm-up pair."""
    print(f"{figure.title}: ours against {peer_target.setting.name}", flush=True)
    print("  (warm-up)", flush=True)
    _pair(figure, peer_target, ours_first=True)
    return [_balanced_pair(figure, peer_target, ours_first=first) for first in ratios.order(pairs)]


def _balanced_pair(figure: Figure, peer_target: PeerTarget, *, ours_first: bool) -> Pair:
    pair = _pair(figure, peer_target, ours_first=ours_first)
    while abs(pair.ours.pressure - pair.theirs.pressure) > MAX_PRESSURE_DIFFERENCE:
        if pair.repeated == REPEATS:
            break
        print("  (repeated: the machine was busy during one run of the pair)", flush=True)
        again = _pair(figure, peer_target, ours_first=ours_first)
        pair = replace(again, repeated=pair.repeated + 1)
    return pair


def _pair(figure: Figure, peer_target: PeerTarget, *, ours_first: bool) -> Pair:
    sides = (figure.ours, peer_target.setting)
    if not ours_first:
        sides = sides[::-1]
    first, second = (measure(figure, side) for side in sides)
    return Pair(first, second, 0) if ours_first else Pair(second, first, 0)


# ── comparing ─────────────────────────────────────────────────────────────────────────────────────


def compare(figure: Figure, peer_target: PeerTarget, pairs: Sequence[Pair]) -> dict[str, Any]:
    """Return the statistics of the pairs, for the result file."""
    better = _better(pairs, lambda run: run.value, more_is_better=figure.more_is_better)
    cheaper = _better(pairs, lambda run: max(run.cpu_s, 0.01))
    return {
        "peer": peer_target.setting.name,
        "target": peer_target.target,
        "ratio": better.median,
        "lower": better.lower,
        "cpu_ratio": cheaper.median,
        "cpu_lower": cheaper.lower,
        "also": [_also(pairs, key, title) for key, title in figure.also],
        "ours": summary([pair.ours for pair in pairs]),
        "theirs": summary([pair.theirs for pair in pairs]),
        "pairs": [asdict(pair) for pair in pairs],
    }


def _better(
    pairs: Sequence[Pair], of: Callable[[Measured], float], *, more_is_better: bool = False
) -> ratios.Verdict:
    return ratios.verdict(
        [
            ratios.times_better(of(pair.ours), of(pair.theirs), more_is_better=more_is_better)
            for pair in pairs
        ]
    )


def _also(pairs: Sequence[Pair], key: str, title: str) -> dict[str, Any]:
    """Compare another reading of the pairs in which both sides have it."""
    complete = [pair for pair in pairs if key in pair.ours.more and key in pair.theirs.more]
    if not complete:
        return {"title": title, "pairs": 0}
    better = _better(complete, lambda run: float(run.more[key]))
    return {
        "title": title,
        "pairs": len(complete),
        "ratio": better.median,
        "lower": better.lower,
        "ours": median(pair.ours.more[key] for pair in complete),
        "theirs": median(pair.theirs.more[key] for pair in complete),
    }


def summary(runs: Sequence[Measured]) -> dict[str, Any]:
    """Summarize several runs of one side."""
    values = [run.value for run in runs]
    return {
        "median": median(values),
        "min": min(values),
        "max": max(values),
        "cpu_s": median(run.cpu_s for run in runs),
        "total_cpu_s": median(run.total_cpu_s for run in runs),
        "processes": median(run.processes for run in runs),
        "leftover_processes": max(run.leftover_processes for run in runs),
        "ok": sum(run.ok for run in runs),
        "hung": sum(run.hung for run in runs),
        "runs": len(runs),
        "more": [run.more for run in runs],
    }


# ── the command ───────────────────────────────────────────────────────────────────────────────────


def main(figure: Figure) -> None:
    """Compare with each peer of a figure, or measure one side; write and print the result."""
    args = _arguments(figure)
    if args.alone:
        _measure_alone(figure, _settings(figure)[args.alone], args.runs)
    elif figure.peer_targets:
        _compare_all(figure, args)
    else:
        main_alone(figure, runs=args.pairs)


def main_alone(figure: Figure, *, runs: int) -> None:
    """Measure a figure without peers."""
    measured = _runs(figure, figure.ours, runs)
    every = {"all": [asdict(run) for run in measured]}
    print(tables.of_figure(write_result(figure, summary(measured) | every, [])))


def _compare_all(figure: Figure, args: argparse.Namespace) -> None:
    comparisons: list[dict[str, Any]] = []
    for peer_target in figure.peer_targets:
        if not args.peers or peer_target.setting.name in args.peers:
            comparisons.append(
                compare(figure, peer_target, measure_pairs(figure, peer_target, args.pairs))
            )
            write_result(figure, None, comparisons)
    print("\n" + tables.of_figure(write_result(figure, None, comparisons)))


def _arguments(figure: Figure) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=figure.title)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--peers", nargs="*", help="only these", choices=[*SETTINGS])
    parser.add_argument("--alone", help="measure one side, without pairs", choices=[*SETTINGS])
    parser.add_argument("--runs", type=int, default=3, help="how often, with --alone")
    return parser.parse_args()


def _settings(figure: Figure) -> dict[str, Setting]:
    """Return the settings by name; those of the figure replace others of the same name."""
    own = (figure.ours, *(target.setting for target in figure.peer_targets))
    return {**SETTINGS, **{setting.name: setting for setting in own}}


def requested(names: Iterable[str]) -> list[str]:
    """Return the figure named by `--of`, by default all; other arguments remain in sys.argv."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--of", choices=[*names])
    args, sys.argv[1:] = parser.parse_known_args()
    return [args.of] if args.of else [*names]


def _measure_alone(figure: Figure, setting: Setting, runs: int) -> None:
    measured = _runs(figure, setting, runs)
    RESULTS.mkdir(parents=True, exist_ok=True)
    result = {
        "figure": figure.name,
        "machine": machine(),
        "runs": [asdict(run) for run in measured],
    }
    path = RESULTS / f"{figure.name}-alone-{setting.name}.json"
    path.write_text(json.dumps(result, indent=1))
    print(json.dumps(summary(measured), indent=1))


def _runs(figure: Figure, setting: Setting, runs: int) -> list[Measured]:
    print(f"{figure.title}: {setting.name} alone", flush=True)
    return [measure(figure, setting) for _ in range(runs)]


def write_result(
    figure: Figure, alone: dict[str, Any] | None, comparisons: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Write the results so far, so that an interrupted run keeps them."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    found = {
        "figure": figure.name,
        "title": figure.title,
        "unit": figure.unit,
        "at_most": figure.at_most,
        "machine": machine(),
        "comparisons": list(comparisons),
        "alone": alone,
    }
    (RESULTS / f"{figure.name}.json").write_text(json.dumps(found, indent=1))
    return found


def machine() -> dict[str, Any]:
    return {
        "when": time.strftime("%Y-%m-%d %H:%M:%S%z"),
        "cores": len(os.sched_getaffinity(0)),
        "processor": platform.processor() or platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
