"""The measurement protocol: pairs in the order A B, B A, A B, …, after a discarded warm-up pair.

Nothing is dropped: a run that hangs or fails counts as the whole limit. A pair with very different
CPU pressure on its two halves is repeated, and reported as such. The claim is the lower bound of
the ratio.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from benchmarks import peers, ratios, tables
from benchmarks.peers import OURS, SETTINGS, Setting
from benchmarks.run_once import Job, Run, run_once

RESULTS = peers.BENCH / "results"
PAIRS = 7
# How far apart the pressure on the cores may be within one pair, in points of percent.
PRESSURE_APART = 20.0
REPEATS = 2


@dataclass(frozen=True, slots=True)
class Reading:
    """The result of one run: the figure, the interval for its CPU time, and further readings."""

    value: float
    since: float
    until: float
    more: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rival:
    """A peer's setting, and the ratio that we want to reach (None: shown, not claimed)."""

    setting: Setting
    asked: float | None = None


@dataclass(frozen=True, slots=True)
class Figure:
    """One row of the table: the work, how its figure is read, and the peers."""

    name: str
    title: str
    unit: str
    job: Callable[[Setting], Job]
    read: Callable[[Run], Reading | None]
    rivals: tuple[Rival, ...]
    limit_s: float
    more_is_better: bool = False
    at_most: float | None = None
    # What else to compare, of `Reading.more`: name there to words; less is better.
    also: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Measured:
    """One run, as it is kept."""

    setting: str
    value: float
    cpu_s: float
    ok: bool
    hung: bool
    wall_s: float
    total_cpu_s: float
    processes: int
    left_behind: int
    load: float
    pressure: float
    more: dict[str, Any]
    tail: str


@dataclass(frozen=True, slots=True)
class Pair:
    """Ours and the peer's, run one right after the other."""

    ours: Measured
    theirs: Measured
    repeated: int


# ── measuring ────────────────────────────────────────────────────────────────────────────────────


def measure(figure: Figure, setting: Setting) -> Measured:
    """One run of one side."""
    run = run_once(setting, figure.job(setting), limit_s=figure.limit_s)
    reading = figure.read(run)
    measured = _kept(figure, run, reading)
    how = "" if measured.ok else "  HUNG" if measured.hung else f"  FAILED ({run.exit_code})"
    print(
        f"  {setting.name:<17}{measured.value:>10.4g} {figure.unit:<8}"
        f"{measured.cpu_s:>7.2f} CPU-s"
        f"  of {measured.total_cpu_s:>6.1f} in {measured.wall_s:>5.1f} s"
        f"  load {measured.load:>4.1f}  pressure {measured.pressure:>3.0f} %{how}",
        flush=True,
    )
    return measured


def _kept(figure: Figure, run: Run, reading: Reading | None) -> Measured:
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
        left_behind=run.left_behind,
        load=run.load,
        pressure=run.pressure,
        more=found.more,
        tail="" if ok else run.tail,
    )


def race(figure: Figure, rival: Rival, pairs: int) -> list[Pair]:
    """Run the pairs against one peer, after one that does not count."""
    print(f"{figure.title}: ours against {rival.setting.name}", flush=True)
    print("  (warm-up)", flush=True)
    _pair(figure, rival, ours_first=True)
    return [_fair_pair(figure, rival, ours_first=first) for first in ratios.order(pairs)]


def _fair_pair(figure: Figure, rival: Rival, *, ours_first: bool) -> Pair:
    pair = _pair(figure, rival, ours_first=ours_first)
    while abs(pair.ours.pressure - pair.theirs.pressure) > PRESSURE_APART:
        if pair.repeated == REPEATS:
            break
        print("  (again: the machine was busy in one half of the pair)", flush=True)
        again = _pair(figure, rival, ours_first=ours_first)
        pair = replace(again, repeated=pair.repeated + 1)
    return pair


def _pair(figure: Figure, rival: Rival, *, ours_first: bool) -> Pair:
    sides = (OURS, rival.setting) if ours_first else (rival.setting, OURS)
    first, second = (measure(figure, side) for side in sides)
    return Pair(first, second, 0) if ours_first else Pair(second, first, 0)


# ── judging ──────────────────────────────────────────────────────────────────────────────────────


def outcome(figure: Figure, rival: Rival, pairs: Sequence[Pair]) -> dict[str, Any]:
    """What a race says, ready to be kept."""
    better = _better(pairs, lambda run: run.value, more_is_better=figure.more_is_better)
    cheaper = _better(pairs, lambda run: max(run.cpu_s, 0.01))
    return {
        "rival": rival.setting.name,
        "asked": rival.asked,
        "ratio": better.median,
        "lower": better.lower,
        "cpu_ratio": cheaper.median,
        "cpu_lower": cheaper.lower,
        "also": [_also(pairs, key, words) for key, words in figure.also],
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


def _also(pairs: Sequence[Pair], key: str, words: str) -> dict[str, Any]:
    """Another comparison of the same pairs, over those in which both sides came so far."""
    told = [pair for pair in pairs if key in pair.ours.more and key in pair.theirs.more]
    if not told:
        return {"words": words, "pairs": 0}
    better = _better(told, lambda run: float(run.more[key]))
    return {
        "words": words,
        "pairs": len(told),
        "ratio": better.median,
        "lower": better.lower,
        "ours": median(pair.ours.more[key] for pair in told),
        "theirs": median(pair.theirs.more[key] for pair in told),
    }


def summary(runs: Sequence[Measured]) -> dict[str, Any]:
    """Several runs of one side in one line."""
    values = [run.value for run in runs]
    return {
        "median": median(values),
        "least": min(values),
        "most": max(values),
        "cpu_s": median(run.cpu_s for run in runs),
        "total_cpu_s": median(run.total_cpu_s for run in runs),
        "processes": median(run.processes for run in runs),
        "left_behind": max(run.left_behind for run in runs),
        "ok": sum(run.ok for run in runs),
        "hung": sum(run.hung for run in runs),
        "runs": len(runs),
        "more": [run.more for run in runs],
    }


# ── the command ──────────────────────────────────────────────────────────────────────────────────


def main(figure: Figure) -> None:
    """Race every rival of a figure, or measure one side alone; keep and print what came out."""
    asked = _arguments(figure)
    if asked.alone:
        _sample(figure, SETTINGS[asked.alone], asked.runs)
    elif figure.rivals:
        _race_all(figure, asked)
    else:
        main_alone(figure, runs=asked.pairs)


def main_alone(figure: Figure, *, runs: int) -> None:
    """Measure a figure that no peer has."""
    measured = _runs(figure, OURS, runs)
    every = {"all": [asdict(run) for run in measured]}
    print(tables.of_figure(keep(figure, summary(measured) | every, [])))


def _race_all(figure: Figure, asked: argparse.Namespace) -> None:
    races: list[dict[str, Any]] = []
    for rival in figure.rivals:
        if not asked.rivals or rival.setting.name in asked.rivals:
            races.append(outcome(figure, rival, race(figure, rival, asked.pairs)))
            keep(figure, None, races)
    print("\n" + tables.of_figure(keep(figure, None, races)))


def _arguments(figure: Figure) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=figure.title)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--rivals", nargs="*", help="only these", choices=[*SETTINGS])
    parser.add_argument("--alone", help="measure one side, without pairs", choices=[*SETTINGS])
    parser.add_argument("--runs", type=int, default=3, help="how often, with --alone")
    return parser.parse_args()


def _sample(figure: Figure, setting: Setting, runs: int) -> None:
    measured = _runs(figure, setting, runs)
    RESULTS.mkdir(parents=True, exist_ok=True)
    kept = {"figure": figure.name, "machine": machine(), "runs": [asdict(run) for run in measured]}
    path = RESULTS / f"{figure.name}-alone-{setting.name}.json"
    path.write_text(json.dumps(kept, indent=1))
    print(json.dumps(summary(measured), indent=1))


def _runs(figure: Figure, setting: Setting, runs: int) -> list[Measured]:
    print(f"{figure.title}: {setting.name} alone", flush=True)
    return [measure(figure, setting) for _ in range(runs)]


def keep(
    figure: Figure, alone: dict[str, Any] | None, races: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Write the results so far: an interrupted run keeps them."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    found = {
        "figure": figure.name,
        "title": figure.title,
        "unit": figure.unit,
        "at_most": figure.at_most,
        "machine": machine(),
        "races": list(races),
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
