"""Goodput on recorded spot markets: spotfit, bounds, and other save intervals.

The upper bound knows when each group ends. The best intervals by age know the lifetimes of the
groups of this very recording, but not when one ends.

    python benchmarks/goodput.py                        # the recordings in this repository
    python benchmarks/goodput.py --traces FOLDER        # additional recordings
    python benchmarks/goodput.py --plot docs/guides/goodput.svg

Virtual time with the production policies; see `spotfit_localsim.virtual.goodput`.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import RESULTS
from benchmarks.tables import markdown
from spotfit.core.units import format_seconds
from spotfit.model.failure_model import AGE_BUCKET_EDGES_S, FailureModel, MarketPrior
from spotfit_localsim.random_streams import SeededStreams
from spotfit_localsim.traces import CapacityTrace, read_trace
from spotfit_localsim.virtual.goodput import (
    GoodputConfig,
    GroupLifetime,
    ProductionPolicy,
    goodput,
    group_lifetimes,
    interval_by_age,
    oracle_goodput,
)

SHIPPED = Path(__file__).resolve().parent / "traces"
NOTICE_S = {"gcp": 30.0, "aws": 120.0}
FIXED_S = (60.0, 90.0, 135.0, 200.0, 300.0, 450.0, 600.0, 1000.0, 1500.0, 2300.0, 3600.0, 7800.0)
HONOURED = 0.9
FEWEST_LIVES = 10
"""Of fewer, one reclaim more or less decides which interval was best."""
AT_MOST = {False: 6.0, True: 2.0}
"""Points below the clairvoyant, without and with notice."""
NO_WORSE = 0.5
"""Points below the best interval, found afterwards."""


@dataclass(frozen=True)
class Row:
    """One recording, with or without notice; goodput in per cent, the mean over the seeds."""

    trace: str
    notice: bool
    lives: int
    life_s: float
    bound: float
    ours: float
    least: float
    """Of the seeds, the one that went worst for ours."""
    fixed: Mapping[float, float]
    """By interval."""
    by_age: float
    """With the interval for each age that turned out best for this very recording."""
    ages_s: tuple[float, ...]
    """Those intervals, by the brackets of `BRACKETS_S`."""

    @property
    def best(self) -> tuple[float, float]:
        """The interval that would have been best, and its goodput."""
        return max(self.fixed.items(), key=lambda one: one[1])

    @property
    def regret(self) -> float:
        return self.bound - self.ours

    @property
    def ahead(self) -> float:
        """Of the best fixed interval."""
        return self.ours - self.best[1]

    @property
    def behind(self) -> float:
        """Those who knew how long groups live at which age, but not when one ends."""
        return self.by_age - self.ours


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python benchmarks/goodput.py")
    parser.add_argument("--traces", type=Path, action="append", default=[])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args(arguments)
    paths = sorted({path.name: path for path in _recordings([SHIPPED, *given.traces])}.values())
    rows = [row for path in paths for row in measured(read_trace(path), given.seeds)]
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "goodput.json").write_text(json.dumps([asdict(row) for row in rows], indent=1))
    print(table(rows), verdict(rows), sep="\n")
    if given.plot is not None:
        given.plot.write_text(plot(rows))
    return 0


def _recordings(folders: Sequence[Path]) -> list[Path]:
    """Those that count what there was at every look."""
    named = [path for folder in folders for path in folder.glob("*.json")]
    return [path for path in named if path.name.partition("_")[0] in ("gcp", "sp")]


def measured(trace: CapacityTrace, seeds: int) -> list[Row]:
    """Without notice and with it; nothing where too few groups lived and died."""
    rows = [_row(trace, seeds, notice=notice) for notice in (False, True)]
    return [row for row in rows if row is not None]


def _row(trace: CapacityTrace, seeds: int, *, notice: bool) -> Row | None:
    notice_s = NOTICE_S["gcp" if "gcp" in trace.name else "aws"]
    setting = GoodputConfig(notice_s=notice_s, noticed_fraction=HONOURED if notice else 0.0)
    odds = FailureModel(
        market_prior=MarketPrior(notice_s=notice_s if notice else 0.0), num_nodes=trace.max_capacity
    )
    histories = [
        group_lifetimes(
            trace,
            trace.max_capacity,
            noticed_fraction=setting.noticed_fraction,
            stream=SeededStreams(seed).stream(trace.name),
        )
        for seed in range(seeds)
    ]
    if min(map(len, histories)) < FEWEST_LIVES:
        return None
    each = [life.duration_s for history in histories for life in history]
    ours = [goodput(history, setting, ProductionPolicy(odds)) for history in histories]
    share = partial(_share, histories, setting)
    fixed = {apart_s: share(_alike(apart_s)) for apart_s in FIXED_S}
    ages_s, best = best_by_age(share, max(fixed, key=lambda apart_s: fixed[apart_s]))
    return Row(
        trace=trace.name,
        notice=notice,
        lives=len(histories[0]),
        life_s=sum(each) / len(each),
        bound=_mean([oracle_goodput(history, setting) for history in histories]),
        ours=_mean(ours),
        least=100 * min(ours),
        fixed=fixed,
        by_age=best,
        ages_s=ages_s,
    )


def best_by_age(
    share: Callable[[tuple[float, ...]], float], first_s: float
) -> tuple[tuple[float, ...], float]:
    """The intervals by age that give the largest share, and that: one after the other is moved to
    the next of `FIXED_S`, up or down, until none gets better."""
    chosen = _alike(first_s)
    best = share(chosen)
    while True:
        tried = {others: share(others) for others in _neighbours(chosen)}
        better = max(tried, key=lambda others: tried[others])
        if tried[better] <= best:
            return chosen, best
        chosen, best = better, tried[better]


def _neighbours(chosen: tuple[float, ...]) -> list[tuple[float, ...]]:
    return [
        (*chosen[:n], FIXED_S[at], *chosen[n + 1 :])
        for n, apart_s in enumerate(chosen)
        for at in (FIXED_S.index(apart_s) - 1, FIXED_S.index(apart_s) + 1)
        if 0 <= at < len(FIXED_S)
    ]


def _alike(apart_s: float) -> tuple[float, ...]:
    return (apart_s,) * (len(AGE_BUCKET_EDGES_S) + 1)


def _share(
    histories: Sequence[Sequence[GroupLifetime]], setting: GoodputConfig, ages_s: tuple[float, ...]
) -> float:
    return _mean([goodput(history, setting, interval_by_age(ages_s)) for history in histories])


def _mean(shares: Sequence[float]) -> float:
    return 100 * sum(shares) / len(shares)


def table(rows: Sequence[Row]) -> str:
    """A row a recording: first without notice, then with it; in brackets points below the bound."""
    each = ("ours", "best by age", "best fixed", "every 1h")
    head = (
        "recording",
        "lives",
        "mean life",
        "clairvoyant",
        *each,
        *(f"{n}, notice" for n in each),
    )
    named = dict.fromkeys(row.trace for row in rows)
    return markdown(head, [_cells([row for row in rows if row.trace == name]) for name in named])


def _cells(both: Sequence[Row]) -> tuple[str, ...]:
    first = both[0]
    about = (first.trace, str(first.lives), format_seconds(first.life_s), f"{first.bound:.1f}")
    return about + tuple(cell for row in both for cell in _shares(row))


def _shares(row: Row) -> tuple[str, ...]:
    apart_s, best = row.best
    return (
        f"**{row.ours:.1f}** ({row.regret:.1f})",
        f"{row.by_age:.1f}",
        f"{best:.1f} at {apart_s:.0f} s",
        f"{row.fixed[3600.0]:.1f}",
    )


def verdict(rows: Sequence[Row]) -> str:
    """What was asked for, against what came out."""
    return "\n".join(
        _line([row for row in rows if row.notice is notice], AT_MOST[notice], notice=notice)
        for notice in (False, True)
        if any(row.notice is notice for row in rows)
    )


def _line(rows: Sequence[Row], at_most: float, *, notice: bool) -> str:
    mean = _average(row.regret for row in rows)
    over = [row for row in rows if row.regret > at_most]
    beyond = [row for row in over if row.bound - row.by_age > at_most]
    worst = max(rows, key=lambda row: row.regret)
    fixed, by_age = min(row.ahead for row in rows), max(row.behind for row in rows)
    name = "With notice" if notice else "Without notice"
    return (
        f"{name}: {mean:.2f} points below the clairvoyant on average "
        f"({_so(mean <= at_most)}: ≤ {at_most:g}); ahead of each one's best fixed interval "
        f"{fixed:+.2f} at worst ({_so(fixed >= -NO_WORSE)}: ≥ -{NO_WORSE:g}). "
        f"{len(rows) - len(over)} of {len(rows)} recordings are within {at_most:g}; of the other "
        f"{len(over)}, {len(beyond)} would not be with the best intervals by age either; "
        f"{worst.regret:.2f} at worst ({worst.trace}, lost every {format_seconds(worst.life_s)}). "
        f"Behind the best intervals by age: {_average(row.behind for row in rows):.2f} on average, "
        f"{by_age:.2f} at worst. No seed is more than "
        f"{max(row.ours - row.least for row in rows):.2f} below the mean."
    )


def _average(points: Iterable[float]) -> float:
    return statistics.fmean(points)


def _so(reached: bool) -> str:  # noqa: FBT001  # the one question it answers
    return "reached" if reached else "missed"


# --- the plot --------------------------------------------------------------------------------

_LEFT, _WIDTH, _LINE, _LEAST = 330, 520, 15, 70.0
_COLOURS = {
    "clairvoyant": "#999",
    "best by age": "#7fbf7b",
    "best fixed": "#e08214",
    "every 1h": "#c51b7d",
    "ours": "#1b7837",
}


def plot(rows: Sequence[Row]) -> str:
    """An SVG: a line a recording, a dot for each who saves."""
    ordered = sorted(rows, key=lambda row: (row.notice, -row.life_s))
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
    return f"{_LEFT + _WIDTH * (max(share, _LEAST) - _LEAST) / (100 - _LEAST):.1f}"


if __name__ == "__main__":
    raise SystemExit(main())
