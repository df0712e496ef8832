"""Cost of a job with a deadline on recorded spot markets, with the production policies.

    python benchmarks/cost.py                               # the recordings in this repository
    python benchmarks/cost.py --traces FOLDER --json FILE   # other recordings, one row per setting
    python benchmarks/cost.py --only zones --starts 31      # one kind of market, more jobs per row
    python benchmarks/cost.py --adversarial 100000          # random markets that try to be late

One zone and several zones: cost divided by the least cost with knowledge of the whole market
(`cost_optimum`), for a job of 48 hours that loses all its machines at once. Elastic: cost divided
by that of an elastic job without any changes, a bound that no policy reaches. Virtual time.
"""

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cost_optimum import least_usd
from benchmarks.cost_policies import greedy, uniform_progress
from benchmarks.measure import RESULTS
from benchmarks.tables import markdown
from spotfit.core.errors import ConfigError
from spotfit.model.offer import Market
from spotfit_localsim.traces import BUNDLED_RECORDINGS, read_trace
from spotfit_localsim.virtual.deadline_market import (
    DeadlineJob,
    JobPolicy,
    MarketOffer,
    production_policy,
    run_job,
)
from spotfit_localsim.virtual.elastic_market import CapacityOffer, ElasticJob, run_elastic_job
from spotfit_localsim.virtual.recorded_market import (
    MarketRecording,
    market_grid,
    market_recording,
    recorded_together,
)

WORK_H = 48.0
DEADLINES_H = (52.0, 60.0, 72.0, 92.0)
CHANGEOVERS_H = (0.02, 0.1, 0.2)
PRICE_RATIOS = (2.0, 3.0, 5.0)
STARTS = 6
"""Default number of times at which a job starts in each recording, evenly distributed."""
LOSS_PAUSE_S, GROWTH_PAUSE_S = 216.0, 36.0
MIN_ELASTIC_MACHINES = 8

POLICIES: dict[str, tuple[Callable[[], JobPolicy], bool]] = {
    "spotfit": (lambda: production_policy, True),
    "uniform progress": (uniform_progress, False),
    "greedy": (greedy, False),
}
"""By name: the policy, and whether it starts machines beside others."""


@dataclass(frozen=True, slots=True)
class Score:
    """Cost ratios of one policy in one setting."""

    mean: float
    worst: float
    late: int
    """Jobs that missed their deadline."""
    jobs: int


@dataclass(frozen=True, slots=True)
class CostRow:
    """One setting."""

    market: str
    recordings: tuple[str, ...]
    changeover_h: float
    deadline_h: float
    price_ratio: float | None
    """None: the recorded prices."""
    policies: dict[str, Score]


# --- One zone and several zones -------------------------------------------------------------------


def one_zone_rows(recordings: Sequence[MarketRecording], starts: int = STARTS) -> Iterator[CostRow]:
    """Yield a row per changeover time, deadline and price ratio, over all recordings."""
    for changeover_h in CHANGEOVERS_H:
        for deadline_h in DEADLINES_H:
            used = [one for one in recordings if _covers(one, deadline_h)]
            ratios: dict[float, dict[str, list[tuple[float, bool]]]] = {
                price_ratio: {name: [] for name in POLICIES} for price_ratio in PRICE_RATIOS
            }
            for one in used:
                for job in _jobs([one], changeover_h, deadline_h, starts):
                    _run_with_price_ratios(job, ratios)
            for price_ratio, results in ratios.items():
                if used:
                    names = tuple(one.name for one in used)
                    scores = {name: _score(results[name]) for name in results}
                    yield CostRow("one zone", names, changeover_h, deadline_h, price_ratio, scores)


def _run_with_price_ratios(
    job: DeadlineJob, ratios: dict[float, dict[str, list[tuple[float, bool]]]]
) -> None:
    best = least_usd(job, [(1.0, price_ratio) for price_ratio in PRICE_RATIOS])
    for price_ratio, least in zip(PRICE_RATIOS, best, strict=True):
        spot, on_demand = job.offers
        offers = (replace(spot, usd_per_hour=1.0), replace(on_demand, usd_per_hour=price_ratio))
        _run_policies(replace(job, offers=offers), least, ratios[price_ratio])


def zones_rows(recordings: Sequence[MarketRecording], starts: int = STARTS) -> Iterator[CostRow]:
    """Yield rows for each set of zones that were recorded at the same time, with their prices."""
    for zones in recorded_together(recordings):
        if len(zones) < 2:
            continue
        names = tuple(one.name for one in zones)
        for changeover_h in CHANGEOVERS_H:
            for deadline_h in DEADLINES_H:
                if not _covers(zones[0], deadline_h):
                    continue
                results: dict[str, list[tuple[float, bool]]] = {name: [] for name in POLICIES}
                for job in _jobs(zones, changeover_h, deadline_h, starts):
                    prices = [offer.usd_per_hour for offer in job.offers]
                    _run_policies(job, least_usd(job, [prices])[0], results)
                scores = {name: _score(results[name]) for name in results}
                yield CostRow("several zones", names, changeover_h, deadline_h, None, scores)


def _covers(one: MarketRecording, deadline_h: float) -> bool:
    return len(one.counts) * one.tick_s >= deadline_h * 3600


def _jobs(
    zones: Sequence[MarketRecording], changeover_h: float, deadline_h: float, starts: int = STARTS
) -> Iterator[DeadlineJob]:
    tick_s = zones[0].tick_s
    units = market_grid(tick_s, changeover_h * 3600)
    ticks = int(deadline_h * 3600 / tick_s)
    machines = max(one.machines for one in zones)
    highest = min(one.on_demand_usd for one in zones)
    for start in _job_starts(zones[0], deadline_h, starts):
        spot = tuple(
            MarketOffer(
                Market.SPOT,
                one.spot_usd,
                tuple(count >= machines for count in one.counts[start : start + ticks]),
            )
            for one in zones
        )
        yield DeadlineJob(
            unit_s=units.unit_s,
            tick=units.tick,
            boot=units.boot,
            work=math.ceil(WORK_H * 3600 / units.unit_s),
            deadline=ticks * units.tick,
            offers=(*spot, MarketOffer(Market.ON_DEMAND, highest)),
        )


def _job_starts(one: MarketRecording, deadline_h: float, starts: int = STARTS) -> list[int]:
    """The ticks at which jobs start."""
    last = len(one.counts) - int(deadline_h * 3600 / one.tick_s)
    return sorted({round(n * last / (starts - 1)) for n in range(starts)})


def _run_policies(
    job: DeadlineJob, least: float, results: dict[str, list[tuple[float, bool]]]
) -> None:
    for name, (policy, starts_beside) in POLICIES.items():
        result = run_job(replace(job, starts_beside=starts_beside), policy())
        results[name].append((result.usd / least, result.is_late))


def _score(results: Sequence[tuple[float, bool]]) -> Score:
    ratios = [ratio for ratio, _ in results]
    late = sum(is_late for _, is_late in results)
    return Score(statistics.fmean(ratios), max(ratios), late, len(results))


# --- Elastic groups -------------------------------------------------------------------------------


def elastic_rows(recordings: Sequence[MarketRecording], starts: int = STARTS) -> Iterator[CostRow]:
    """Yield rows for groups of fixed size and elastic ones, over recordings of many machines."""
    many = [one for one in recordings if one.machines >= MIN_ELASTIC_MACHINES]
    for changeover_h in CHANGEOVERS_H:
        for deadline_h in DEADLINES_H:
            used = [one for one in many if _covers(one, deadline_h)]
            results: dict[str, list[tuple[float, bool]]] = {}
            for one in used:
                jobs = _jobs([one], changeover_h, deadline_h, starts)
                at_ticks = _job_starts(one, deadline_h, starts)
                for start, job in zip(at_ticks, jobs, strict=True):
                    for name, result in _elastic_results(one, job, start):
                        results.setdefault(name, []).append(result)
            if results:
                names = tuple(one.name for one in used)
                scores = {name: _score(each) for name, each in results.items()}
                yield CostRow("elastic", names, changeover_h, deadline_h, None, scores)


def _elastic_results(
    one: MarketRecording, fixed: DeadlineJob, start: int
) -> Iterator[tuple[str, tuple[float, bool]]]:
    ratio = one.on_demand_usd / one.spot_usd
    capacity = one.counts[start : start + fixed.deadline // fixed.tick]
    machine_hours = fixed.work * one.machines
    spot_hours = min(
        machine_hours, sum(min(one.machines, count) for count in capacity) * fixed.tick
    )
    bound = (spot_hours + ratio * (machine_hours - spot_hours)) * fixed.unit_s / 3600
    result = run_job(fixed, production_policy)
    yield "fixed size", (result.usd / one.spot_usd * one.machines / bound, result.is_late)
    for name, least in (("from half", one.machines // 2), ("from 1", 1)):
        job = ElasticJob(
            unit_s=fixed.unit_s,
            tick=fixed.tick,
            boot=fixed.boot,
            loss_pause=LOSS_PAUSE_S / fixed.unit_s,
            growth_pause=GROWTH_PAUSE_S / fixed.unit_s,
            work=fixed.work,
            deadline=fixed.deadline,
            min_workers=least,
            max_workers=one.machines,
            offers=(
                CapacityOffer(market=Market.SPOT, usd_per_hour=1.0, capacity=capacity),
                CapacityOffer(market=Market.ON_DEMAND, usd_per_hour=ratio),
            ),
        )
        elastic = run_elastic_job(job)
        yield name, (elastic.usd / bound, elastic.is_late)


# --- Adversarial markets --------------------------------------------------------------------------


def adversarial_job(seed: int) -> DeadlineJob:
    """Return a job whose deadline can just be kept, on a market that changes at bad times."""
    stream = random.Random(seed)  # noqa: S311  # no secret
    boot, repeated = stream.randint(1, 12), stream.choice((0, 0, stream.randint(1, 8)))
    work = stream.randint(1, 200)
    slack = boot + repeated + stream.choice((0, 1, stream.randint(0, 30), stream.randint(0, 150)))
    deadline = work + slack
    zones = stream.choice((1, 1, 2, 4))
    offers = [
        MarketOffer(
            Market.SPOT,
            stream.uniform(0.5, 4),
            _adversarial_availability(stream, deadline, boot),
        )
        for _ in range(zones)
    ]
    return DeadlineJob(
        unit_s=stream.choice((1.0, 24.0, 60.0)),
        tick=1,
        boot=boot,
        repeated=repeated,
        work=work,
        deadline=deadline,
        offers=(*offers, MarketOffer(Market.ON_DEMAND, stream.uniform(1, 6))),
    )


def _adversarial_availability(stream: random.Random, deadline: int, boot: int) -> tuple[bool, ...]:
    """Machines that are lost around the end of their boot, or at random times."""
    lives = stream.choice(((1, 3), (boot, boot + 2), (1, 3 * boot), (boot, 20 * boot)))
    outages = stream.choice(((1, 1), (1, 3), (1, 2 * boot), (boot, 10 * boot)))
    available: list[bool] = []
    while len(available) < deadline:
        available += [True] * stream.randint(*lives) + [False] * stream.randint(*outages)
    return tuple(available[:deadline])


def late_seeds(count: int) -> list[int]:
    """Return the seeds whose job missed its deadline, of the first `count`."""
    return [
        seed for seed in range(count) if run_job(adversarial_job(seed), production_policy).is_late
    ]


# --- Output ---------------------------------------------------------------------------------------

MARKETS = {"one": one_zone_rows, "zones": zones_rows, "elastic": elastic_rows}
"""By the name in `--only`."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python benchmarks/cost.py")
    parser.add_argument("--traces", type=Path, action="append", default=[])
    parser.add_argument("--json", type=Path, default=RESULTS / "cost.json")
    parser.add_argument("--only", choices=tuple(MARKETS), nargs="+", default=list(MARKETS))
    parser.add_argument("--starts", type=int, default=STARTS, metavar="N")
    parser.add_argument("--adversarial", type=int, metavar="N")
    args = parser.parse_args(arguments)
    if args.starts < 2:
        parser.error("--starts must be at least 2: the first and the last time")
    if args.adversarial is not None:
        late = late_seeds(args.adversarial)
        print(f"{args.adversarial:,} adversarial markets, {len(late)} deadlines missed: {late[:9]}")
        return 1 if late else 0
    folders = args.traces or [BUNDLED_RECORDINGS]
    if missing := [str(folder) for folder in folders if not folder.is_dir()]:
        parser.error(f"no such folder: {', '.join(missing)}")
    recordings = list(_read(folders))
    rows: list[CostRow] = []
    for name in args.only:
        for row in MARKETS[name](recordings, args.starts):
            rows.append(row)
            print(_line(row), flush=True)
    if not rows:
        parser.error("no recording is long enough for any setting")
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    print(summary(rows))
    print(comparison(rows))
    return 0


def _read(folders: Sequence[Path]) -> Iterator[MarketRecording]:
    for path in sorted(path for folder in folders for path in folder.glob("*.json")):
        if path.name == "MANIFEST.json":
            continue
        try:
            one = market_recording(read_trace(path))
        except ConfigError as error:
            print(f"{path.name} is skipped: {error.message}")
            continue
        if _covers(one, DEADLINES_H[0]):
            yield one
        else:
            print(f"{path.name} is skipped: it is shorter than {DEADLINES_H[0]:g} hours")


def _line(row: CostRow) -> str:
    price = "" if row.price_ratio is None else f", on-demand {row.price_ratio:g} times spot"
    scores = ", ".join(
        f"{name} {one.mean:.3f} (worst {one.worst:.2f}, {one.late} late)"
        for name, one in row.policies.items()
    )
    setting = f"deadline {row.deadline_h:g} h, changeover {row.changeover_h:g} h{price}"
    return f"{row.market}, {len(row.recordings)} recordings, {setting}: {scores}"


def summary(rows: Sequence[CostRow]) -> str:
    """Return the means over the settings by market and changeover time, as a table."""
    cells: dict[tuple[str, tuple[str, ...], float], list[CostRow]] = {}
    for row in rows:
        family = row.recordings if row.market == "several zones" else ()
        cells.setdefault((row.market, family, row.changeover_h), []).append(row)
    body = []
    for (market, family, changeover_h), each in cells.items():
        means = {
            name: statistics.fmean(row.policies[name].mean for row in each)
            for name in each[0].policies
        }
        late = sum(score.late for row in each for score in row.policies.values())
        figures = ", ".join(f"{name} {mean:.3f}" for name, mean in means.items())
        label = f"{market} ({family[0]}, …)" if family else market
        body.append((label, f"{changeover_h:g} h", figures, str(late)))
    return markdown(("market", "changeover", "mean cost ÷ optimum or bound", "late"), body)


def comparison(rows: Sequence[CostRow]) -> str:
    """Return in how many settings each other policy, or size of the group, has the lower mean."""
    lines = []
    for market in dict.fromkeys(row.market for row in rows):
        settings = [row for row in rows if row.market == market]
        ours, *others = settings[0].policies
        for other in others:
            leads = [row.policies[ours].mean - row.policies[other].mean for row in settings]
            cheaper = [lead for lead in leads if lead > 0]
            most = f", by {max(cheaper):.4f} at most" if cheaper else ""
            share = f"{len(cheaper)} of {len(settings)} settings{most}"
            lines.append(f"{market}: {other} is cheaper than {ours} in {share}")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
