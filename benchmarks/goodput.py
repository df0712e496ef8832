"""Goodput on recorded spot markets: spotfit, bounds, and other save intervals.

The upper bound is computed with knowledge of the end of each group. The best intervals by age are
fitted to the lifetimes in the same recording, without knowledge of individual ends.

    python benchmarks/goodput.py                        # the recordings in this repository
    python benchmarks/goodput.py --traces FOLDER        # the recordings in FOLDER instead
    python benchmarks/goodput.py --json FILE            # one row per recording, notice and costs
    python benchmarks/goodput.py --plot docs/guides/goodput.svg

A recording is any JSON file that `spotfit_localsim.traces` reads; other files are skipped with a
sentence. `--traces` can be repeated. Virtual time with the production policies; see
`spotfit_localsim.virtual.goodput`.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from dataclasses import replace as with_
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import RESULTS
from benchmarks.tables import markdown
from spotfit.core.errors import ConfigError
from spotfit.core.units import format_seconds
from spotfit.model.failure_model import (
    AGE_BUCKET_EDGES_S,
    FailureModel,
    MarketPrior,
    SaveCostEstimate,
)
from spotfit_localsim.random_streams import SeededStreams
from spotfit_localsim.traces import BUNDLED_RECORDINGS, CapacityTrace, read_trace
from spotfit_localsim.virtual.goodput import (
    GoodputConfig,
    GroupLifetime,
    ProductionPolicy,
    goodput,
    group_lifetimes,
    interval_by_age,
    oracle_goodput,
)

NOTICE_S = {"gcp": 30.0, "aws": 120.0}
"""Notice by cloud. A recording whose name does not contain "gcp" is taken to be from AWS."""
FIXED_INTERVALS_S = (
    60.0,
    90.0,
    135.0,
    200.0,
    300.0,
    450.0,
    600.0,
    1000.0,
    1500.0,
    2300.0,
    3600.0,
    7800.0,
)
NOTICED_FRACTION = 0.9
MIN_GROUPS = 10
"""With fewer groups a single preemption decides which interval is best."""
SMALL_SAVES = "saves of 6.5 s"
LARGE_SAVES = "saves of 38 s"
COST_SETTINGS = {
    SMALL_SAVES: GoodputConfig(
        costs=SaveCostEstimate(stall_s=0.5, slowdown_fraction=0.3, commit_s=20.0),
        final_upload_s=10.0,
    ),
    LARGE_SAVES: GoodputConfig(
        costs=SaveCostEstimate(stall_s=2.0, slowdown_fraction=0.3, commit_s=120.0),
        final_upload_s=60.0,
    ),
}
"""Save costs by the training time that each save takes: stall plus slowdown until the commit."""
MAX_REGRET = {False: 6.0, True: 2.0}
"""Largest accepted mean distance from the upper bound with small saves, in points, without and with
notice. Large saves have no such target: their costs alone are larger."""
MAX_BEHIND_FIXED = 1.0
"""Largest accepted distance from the best fixed interval, in points."""


@dataclass(frozen=True)
class Row:
    """One recording with one cost setting, with or without notice.

    Goodput in per cent, the mean over the seeds.
    """

    trace: str
    costs: str
    """Key of `COST_SETTINGS`."""
    cost_per_save_s: float
    notice: bool
    notice_s: float
    """Time from the notice to the end, of the fraction `NOTICED_FRACTION` of the preemptions; 0.0
    without notice."""
    machines: int
    """Machines of the group."""
    groups: int
    mean_lifetime_s: float
    bound: float
    ours: float
    worst_seed: float
    """The lowest goodput of spotfit over the seeds."""
    fixed: Mapping[float, float]
    """Goodput by interval in seconds."""
    by_age: float
    """Goodput with the intervals by age that are best for this recording."""
    ages_s: tuple[float, ...]
    """Those intervals, by the buckets of `AGE_BUCKET_EDGES_S`."""

    def as_json(self) -> dict[str, object]:
        """Return the fields, and the comparisons with the bound and the best fixed interval."""
        best_interval_s, best_fixed = self.best
        return {
            **asdict(self),
            "best_fixed": best_fixed,
            "best_fixed_interval_s": best_interval_s,
            "points_below_bound": self.regret,
            "points_above_best_fixed": self.lead_over_fixed,
        }

    @property
    def best(self) -> tuple[float, float]:
        """The best fixed interval in hindsight, and its goodput."""
        return max(self.fixed.items(), key=lambda one: one[1])

    @property
    def regret(self) -> float:
        return self.bound - self.ours

    @property
    def lead_over_fixed(self) -> float:
        """Points above the best fixed interval."""
        return self.ours - self.best[1]

    @property
    def gap_to_by_age(self) -> float:
        """Points below the best intervals by age."""
        return self.by_age - self.ours


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python benchmarks/goodput.py")
    parser.add_argument("--traces", type=Path, action="append", metavar="FOLDER")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args(arguments)
    folders = args.traces or [BUNDLED_RECORDINGS]
    missing = [str(folder) for folder in folders if not folder.is_dir()]
    if missing:
        parser.error(f"no such folder: {', '.join(missing)}")
    rows = [row for trace in recordings(folders) for row in measured(trace, args.seeds)]
    if not rows:
        parser.error(f"no recording with at least {MIN_GROUPS} groups was found")
    RESULTS.mkdir(parents=True, exist_ok=True)
    for path in (RESULTS / "goodput.json", *([args.json] if args.json else [])):
        path.write_text(json.dumps([row.as_json() for row in rows], indent=1))
    for costs in COST_SETTINGS:
        chosen = [row for row in rows if row.costs == costs]
        print(f"\n{costs}\n", table(chosen), verdict(chosen), sep="\n")
    if args.plot is not None:
        args.plot.write_text(plot([row for row in rows if row.costs == SMALL_SAVES]))
    return 0


def recordings(folders: Sequence[Path]) -> list[CapacityTrace]:
    """Return the recordings in the folders, one per file name.

    Prints a sentence for each JSON file that is not a recording.
    """
    paths = {path.name: path for folder in folders for path in folder.glob("*.json")}
    found: list[CapacityTrace] = []
    for path in (paths[name] for name in sorted(paths)):
        try:
            found.append(read_trace(path))
        except ConfigError as error:
            print(f"skipped {path.name}: {error}")
    return found


def measured(trace: CapacityTrace, seeds: int) -> list[Row]:
    """Return a row for each cost setting, without and with notice.

    None, and a printed sentence, if the recording has too few groups.
    """
    groups = min(len(_history(trace, seed)) for seed in range(seeds))
    if groups < MIN_GROUPS:
        print(
            f"skipped {trace.name}: {groups} groups of {trace.max_capacity} machines ended in it, "
            f"at least {MIN_GROUPS} are needed"
        )
        return []
    return [
        _row(trace, seeds, costs=costs, notice=notice)
        for costs in COST_SETTINGS
        for notice in (False, True)
    ]


def _history(
    trace: CapacityTrace, seed: int, noticed_fraction: float = 0.0
) -> tuple[GroupLifetime, ...]:
    return group_lifetimes(
        trace,
        trace.max_capacity,
        noticed_fraction=noticed_fraction,
        stream=SeededStreams(seed).stream(trace.name),
    )


def _row(trace: CapacityTrace, seeds: int, *, costs: str, notice: bool) -> Row:
    notice_s = NOTICE_S["gcp" if "gcp" in trace.name else "aws"]
    config = with_(
        COST_SETTINGS[costs],
        notice_s=notice_s,
        noticed_fraction=NOTICED_FRACTION if notice else 0.0,
    )
    failure_model = FailureModel(
        market_prior=MarketPrior(notice_s=notice_s if notice else 0.0), num_nodes=trace.max_capacity
    )
    histories = [_history(trace, seed, config.noticed_fraction) for seed in range(seeds)]
    each = [lifetime.duration_s for history in histories for lifetime in history]
    ours = [goodput(history, config, ProductionPolicy(failure_model)) for history in histories]
    share = partial(_share, histories, config)
    fixed = {interval_s: share(_constant(interval_s)) for interval_s in FIXED_INTERVALS_S}
    ages_s, best = best_by_age(share, max(fixed, key=lambda interval_s: fixed[interval_s]))
    return Row(
        trace=trace.name,
        costs=costs,
        cost_per_save_s=config.costs.cost_per_save_s,
        notice=notice,
        notice_s=notice_s if notice else 0.0,
        machines=trace.max_capacity,
        groups=len(histories[0]),
        mean_lifetime_s=sum(each) / len(each),
        bound=_mean([oracle_goodput(history, config) for history in histories]),
        ours=_mean(ours),
        worst_seed=100 * min(ours),
        fixed=fixed,
        by_age=best,
        ages_s=ages_s,
    )


def best_by_age(
    share: Callable[[tuple[float, ...]], float], first_s: float
) -> tuple[tuple[float, ...], float]:
    """Return the intervals by age with the largest goodput, and that goodput.

    Coordinate search: one interval at a time moves to an adjacent one of `FIXED_INTERVALS_S`, until
    no move improves the goodput.
    """
    intervals = _constant(first_s)
    best = share(intervals)
    while True:
        tried = {others: share(others) for others in _adjacent_choices(intervals)}
        better = max(tried, key=lambda others: tried[others])
        if tried[better] <= best:
            return intervals, best
        intervals, best = better, tried[better]


def _adjacent_choices(intervals: tuple[float, ...]) -> list[tuple[float, ...]]:
    return [
        (*intervals[:n], FIXED_INTERVALS_S[at], *intervals[n + 1 :])
        for n, interval_s in enumerate(intervals)
        for at in (FIXED_INTERVALS_S.index(interval_s) - 1, FIXED_INTERVALS_S.index(interval_s) + 1)
        if 0 <= at < len(FIXED_INTERVALS_S)
    ]


def _constant(interval_s: float) -> tuple[float, ...]:
    return (interval_s,) * (len(AGE_BUCKET_EDGES_S) + 1)


def _share(
    histories: Sequence[Sequence[GroupLifetime]], config: GoodputConfig, ages_s: tuple[float, ...]
) -> float:
    return _mean([goodput(history, config, interval_by_age(ages_s)) for history in histories])


def _mean(shares: Sequence[float]) -> float:
    return 100 * sum(shares) / len(shares)


def table(rows: Sequence[Row]) -> str:
    """One row per recording, without and with notice; in brackets the points below the bound."""
    each = ("ours", "best by age", "best fixed", "every 1h")
    head = (
        "recording",
        "groups",
        "mean lifetime",
        "upper bound",
        *each,
        *(f"{n}, notice" for n in each),
    )
    named = dict.fromkeys(row.trace for row in rows)
    return markdown(head, [_cells([row for row in rows if row.trace == name]) for name in named])


def _cells(both: Sequence[Row]) -> tuple[str, ...]:
    first = both[0]
    about = (
        first.trace,
        str(first.groups),
        format_seconds(first.mean_lifetime_s),
        f"{first.bound:.1f}",
    )
    return about + tuple(cell for row in both for cell in _shares(row))


def _shares(row: Row) -> tuple[str, ...]:
    interval_s, best = row.best
    return (
        f"**{row.ours:.1f}** ({row.regret:.1f})",
        f"{row.by_age:.1f}",
        f"{best:.1f} at {interval_s:.0f} s",
        f"{row.fixed[3600.0]:.1f}",
    )


def verdict(rows: Sequence[Row]) -> str:
    """Compare the results with the targets."""
    return "\n".join(
        _line([row for row in rows if row.notice is notice], MAX_REGRET[notice], notice=notice)
        for notice in (False, True)
        if any(row.notice is notice for row in rows)
    )


def _line(rows: Sequence[Row], at_most: float, *, notice: bool) -> str:
    name = "With notice" if notice else "Without notice"
    fixed = min(rows, key=lambda row: row.lead_over_fixed)
    by_age = max(row.gap_to_by_age for row in rows)
    worst_gap = max(row.ours - row.worst_seed for row in rows)
    return (
        f"{name}: {_regret_sentence(rows, at_most)} At worst {fixed.lead_over_fixed:+.2f} relative "
        f"to the best fixed interval "
        f"({_verdict_word(fixed.lead_over_fixed >= -MAX_BEHIND_FIXED)}: "
        f"≥ -{MAX_BEHIND_FIXED:g}; {fixed.trace}). Below the best intervals by age: "
        f"{_average(row.gap_to_by_age for row in rows):.2f} on average, {by_age:.2f} at worst. "
        f"No seed is more than {worst_gap:.2f} below the mean."
    )


def _regret_sentence(rows: Sequence[Row], at_most: float) -> str:
    mean = _average(row.regret for row in rows)
    worst = max(rows, key=lambda row: row.regret)
    worst_case = (
        f"{worst.regret:.2f} at worst ({worst.trace}, lost every "
        f"{format_seconds(worst.mean_lifetime_s)})"
    )
    below = f"{mean:.2f} points below the upper bound on average"
    if rows[0].costs != SMALL_SAVES:
        return f"{below}, {worst_case}."
    over = [row for row in rows if row.regret > at_most]
    unreachable = [row for row in over if row.bound - row.by_age > at_most]
    return (
        f"{below} ({_verdict_word(mean <= at_most)}: ≤ {at_most:g}), {worst_case}. "
        f"{len(rows) - len(over)} of {len(rows)} recordings are within {at_most:g}; of the other "
        f"{len(over)}, {len(unreachable)} would not be with the best intervals by age either."
    )


def _average(points: Iterable[float]) -> float:
    return statistics.fmean(points)


def _verdict_word(reached: bool) -> str:  # noqa: FBT001  # the only argument
    return "reached" if reached else "missed"


# --- the plot -------------------------------------------------------------------------------------

_LEFT, _WIDTH, _LINE, _MIN_SHARE = 330, 520, 15, 70.0
_COLOURS = {
    "upper bound": "#999",
    "best by age": "#7fbf7b",
    "best fixed": "#e08214",
    "every 1h": "#c51b7d",
    "ours": "#1b7837",
}


def plot(rows: Sequence[Row]) -> str:
    """Return an SVG: one line per recording, one dot per policy."""
    ordered = sorted(rows, key=lambda row: (row.notice, -row.mean_lifetime_s))
    height = 60 + _LINE * len(ordered)
    body = [_legend(), _scale(height), *(_dots(n, row) for n, row in enumerate(ordered))]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 20}" height="{height}" '
        f'font-family="sans-serif" font-size="10"><rect width="100%" height="100%" fill="#fff"/>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def _legend() -> str:
    return "".join(
        f'<circle cx="{_LEFT + 110 * n}" cy="14" r="4" fill="{colour}"/>'
        f'<text x="{_LEFT + 8 + 110 * n}" y="18">{name}</text>'
        for n, (name, colour) in enumerate(_COLOURS.items())
    )


def _scale(height: int) -> str:
    return "".join(
        f'<line x1="{_x(share)}" x2="{_x(share)}" y1="40" y2="{height - 10}" stroke="#ddd"/>'
        f'<text x="{_x(share)}" y="36" text-anchor="middle">{share:g} %</text>'
        for share in (70, 75, 80, 85, 90, 95, 100)
    )


def _dots(n: int, row: Row) -> str:
    y = 50 + n * _LINE
    shares = (row.bound, row.by_age, row.best[1], row.fixed[3600.0], row.ours)
    dots = "".join(
        f'<circle cx="{_x(share)}" cy="{y}" r="3.5" fill="{colour}"/>'
        for share, colour in zip(shares, _COLOURS.values(), strict=True)
    )
    name = f"{row.trace.removeprefix('sp_')}{', notice' if row.notice else ''}"
    return f'<text x="{_LEFT - 8}" y="{y + 3}" text-anchor="end">{name}</text>{dots}'


def _x(share: float) -> str:
    return f"{_LEFT + _WIDTH * (max(share, _MIN_SHARE) - _MIN_SHARE) / (100 - _MIN_SHARE):.1f}"


if __name__ == "__main__":
    raise SystemExit(main())
