"""`Estimate`: expected cost and duration of a run, and their text for people."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from spotfit.core.units import format_count, format_seconds
from spotfit.model.offer import Market, Offer

_BINS = 8
_BAR_WIDTH = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateLimits:
    """What is estimated, beside the offers. Times are in seconds."""

    training_time_s: float
    """With all machines, without losses."""
    deadline_s: float | None = None
    """From now; None for none."""
    budget_usd: float | None = None
    changeover_s: float
    """From the loss of machines to new progress, including the work that is repeated."""
    restart_s: float
    """For which machines that leave or join an elastic group interrupt the others."""
    uses_on_demand: bool
    """Whether the run may rent on-demand machines."""
    fallback: str | None = None
    """As in `RunConfig`; None for its default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Values of equally likely replays. Infinite where the training did not finish."""

    mean: float
    median: float
    p5: float
    p95: float
    highest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferEstimate:
    """One offer of the backend, and what the run would cost with it."""

    offer: Offer
    machines: int
    """For all workers."""
    expected_usd: float | None
    """Mean cost of the workers' machines with this offer and, if the run may use it, the cheapest
    on-demand one; None if a price is unknown."""
    on_demand_usd: float | None
    """Cost on the on-demand offer of the same region and machine type; None if it is unknown."""
    is_rentable: bool = True
    """Whether the run may rent it; otherwise it is listed for comparison."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeederEstimate:
    """The machines that transform datasets for the workers, for the training time."""

    min_machines: int
    max_machines: int
    usd_per_hour: float | None
    """The highest price that the backend may charge for one of them; None if it is unknown."""
    expected_usd: float | None
    """With the smallest number of machines."""
    highest_usd: float | None
    """With the largest number of machines, for the training time and one changeover."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a run is expected to cost, and when it is expected to finish. `print()` shows it."""

    workers: int
    min_workers: int
    """Less than `workers` for an elastic group."""
    limits: EstimateLimits
    earliest_deadline_s: float | None
    """The nearest deadline that on-demand machines guarantee if they arrive within the changeover
    time; None without on-demand offers of known price that can be rented, or with
    fallback="never"."""
    worst_case_usd: float | None
    """The higher one of two costs: of on-demand machines for the training time and one changeover,
    if the run may use them, and of the replay that costs most; with the largest number of feeders.
    No limit: only a budget is one. None if a price is unknown."""
    costs_usd: tuple[float, ...]
    """Of all replays, with the smallest number of feeders, in ascending order; empty if a price is
    unknown."""
    finish_s: Distribution
    """Time from the start to the end of the training."""
    deadline_share: float | None
    """Share of the replays that keep the deadline; None without one."""
    offers: tuple[OfferEstimate, ...]
    """All offers that the backend lists."""
    recordings: tuple[str, ...]
    """The names of the recorded markets."""
    replays: int
    unfinished_share: float
    """Share of the replays that were not finished in ten times the training time."""
    as_of_ms: int
    """When the offers were listed, in milliseconds since 1970."""
    remarks: tuple[str, ...] = ()
    """What the user must know about prices, recordings and assumptions, one sentence each."""
    feeders: FeederEstimate | None = None
    """None if the run rents no machines for feeders."""
    rejections: tuple[str, ...] = ()
    """Why `fit()` rejects deadline, budget or fallback; empty if it accepts them."""

    @property
    def usd(self) -> Distribution | None:
        """The cost in US dollars; None if a price is unknown."""
        return distribution(self.costs_usd) if self.costs_usd else None

    @property
    def budget_share(self) -> float | None:
        """Share of the replays that cost no more than the budget; None if either is unknown."""
        if self.limits.budget_usd is None or not self.costs_usd:
            return None
        within = sum(usd <= self.limits.budget_usd for usd in self.costs_usd)
        return within / len(self.costs_usd)

    @property
    def is_guaranteed(self) -> bool:
        """Whether the deadline is kept within the budget if on-demand machines arrive in time."""
        limits = self.limits
        if limits.deadline_s is None or self.earliest_deadline_s is None or self.rejections:
            return False
        if limits.deadline_s < self.earliest_deadline_s:
            return False
        if limits.budget_usd is None:
            return True
        return self.worst_case_usd is not None and self.worst_case_usd <= limits.budget_usd

    def __str__(self) -> str:
        return "\n".join(format_estimate(self))


def distribution(values: Sequence[float]) -> Distribution:
    """Return the distribution of at least one value; percentiles are values of the sequence."""
    ordered = sorted(values)

    def percentile(share: float) -> float:
        return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]

    return Distribution(
        mean=statistics.fmean(ordered),
        median=statistics.median_low(ordered),
        p5=percentile(0.05),
        p95=percentile(0.95),
        highest=ordered[-1],
    )


# --- Text for people -----------------------------------------------------------------------------


def format_estimate(estimate: Estimate) -> list[str]:
    """Return the lines that `print(estimate)` and `spotfit estimate` show."""
    lines = [_heading(estimate), *guarantee_lines(estimate), ""]
    rows: list[tuple[str, ...]] = [("", "mean", "median", "5 %", "95 %", "highest")]
    if estimate.usd is not None:
        rows.append(("cost", *_figures(estimate.usd, format_usd)))
    rows.append(("finished after", *_figures(estimate.finish_s, _duration)))
    lines += _table(rows)
    if histogram := list(_histogram(estimate.costs_usd)):
        lines += ["", f"Cost of {estimate.replays} replays:", *histogram]
    lines += ["", *_table(list(_offer_rows(estimate))), ""]
    if estimate.feeders is not None:
        lines.append(_feeder_line(estimate.feeders))
    if _rents_spot(estimate):
        lines.append(_source_of_outages(estimate))
    return [*lines, *estimate.remarks]


def format_confirmation(estimate: Estimate) -> list[str]:
    """Return the estimate in three lines, for the question before machines are rented."""
    costs = f"Cost: {_costs(estimate)}."
    return [_heading(estimate), costs, f"{_guarantee(estimate)}."]


def guarantee_lines(estimate: Estimate) -> list[str]:
    """Return whether the deadline can be guaranteed and at which cost, in sentences."""
    limits, earliest_s = estimate.limits, estimate.earliest_deadline_s
    lines = [f"{_guarantee(estimate)}: {_costs(estimate)}."]
    lines += [f"fit() rejects these limits: {reason}" for reason in estimate.rejections]
    if earliest_s is not None:
        lines.append(
            f"The earliest deadline that can be guaranteed is in {_rounded_up(earliest_s)}, if "
            f"on-demand machines arrive within {format_seconds(limits.changeover_s)}."
        )
    if estimate.deadline_share is not None and not estimate.is_guaranteed:
        lines.append(f"The deadline is kept in {_percent(estimate.deadline_share)} of the replays.")
    if estimate.unfinished_share:
        lines.append(
            f"{_percent(estimate.unfinished_share)} of the replays are not finished in ten times "
            "the training time."
        )
    if estimate.budget_share is not None and not estimate.rejections:
        lines.append(
            f"The budget of {format_usd(limits.budget_usd)} suffices in "
            f"{_percent(estimate.budget_share)} of the replays."
        )
    return lines


def _guarantee(estimate: Estimate) -> str:
    limits = estimate.limits
    if not _rents_spot(estimate):
        only = "The run rents no spot machines"
        return only if limits.deadline_s is None else f"{only}. {_deadline(estimate)}"
    if limits.deadline_s is None and limits.uses_on_demand:
        return "There is no deadline; on-demand machines are used while spot is refused"
    if limits.deadline_s is None:
        return "Without a deadline the run waits for spot machines"
    return _deadline(estimate)


def _rents_spot(estimate: Estimate) -> bool:
    return any(one.is_rentable and one.offer.market is Market.SPOT for one in estimate.offers)


def _deadline(estimate: Estimate) -> str:
    limits, earliest_s = estimate.limits, estimate.earliest_deadline_s
    if estimate.is_guaranteed:
        return "The deadline can be guaranteed"
    if earliest_s is None and limits.fallback == "never":
        return 'The deadline cannot be guaranteed with fallback="never"'
    if earliest_s is None:
        return (
            "The deadline cannot be guaranteed without on-demand offers of known price that can "
            "be rented"
        )
    assert limits.deadline_s is not None
    if limits.budget_usd is None or limits.deadline_s < earliest_s:
        return f"The deadline in {format_seconds(limits.deadline_s)} cannot be guaranteed"
    return f"The deadline cannot be guaranteed for {format_usd(limits.budget_usd)}"


def _costs(estimate: Estimate) -> str:
    usd = estimate.usd
    if usd is None:
        return "the cost is unknown"
    return (
        f"worst case {format_usd(estimate.worst_case_usd)}, expected {format_usd(usd.mean)}, "
        f"{format_usd(usd.p95)} or less in 95 % of the replays"
    )


def format_usd(usd: float | None) -> str:
    """Return an amount for display: "$0.32", "$1,234", "unknown"; "unlimited" for infinity."""
    if usd is None:
        return "unknown"
    if math.isinf(usd):
        return "unlimited"
    return f"${usd:,.2f}" if usd < 1000 else f"${usd:,.0f}"


def _heading(estimate: Estimate) -> str:
    limits = estimate.limits
    deadline = (
        "" if limits.deadline_s is None else f", deadline in {format_seconds(limits.deadline_s)}"
    )
    budget = "" if limits.budget_usd is None else f", budget {format_usd(limits.budget_usd)}"
    workers = format_count(estimate.workers, "worker")
    if estimate.min_workers < estimate.workers:
        workers = f"{estimate.min_workers} to {workers}"
    training = f"{format_seconds(limits.training_time_s)} of training"
    return f"{workers}, {training}{deadline}{budget}"


def _rounded_up(seconds: float) -> str:
    # A deadline that is shown as possible must be so.
    unit_s = 360 if seconds >= 7200 else 60
    return format_seconds(math.ceil(seconds / unit_s - 1e-9) * unit_s)


def _percent(share: float) -> str:
    # Rounded down: 99.6 % must not look like a certainty.
    return f"{math.floor(share * 100 + 1e-9)} %"


def _duration(seconds: float) -> str:
    return "unfinished" if math.isinf(seconds) else format_seconds(seconds)


def _figures(values: Distribution, text: Callable[[float], str]) -> tuple[str, ...]:
    shown = (values.mean, values.median, values.p5, values.p95, values.highest)
    return tuple(text(value) for value in shown)


def _histogram(costs: Sequence[float]) -> Iterator[str]:
    finite = [usd for usd in costs if math.isfinite(usd)]
    if not finite or format_usd(min(finite)) == format_usd(max(finite)):
        return
    low, high = min(finite), max(finite)
    width = (high - low) / _BINS
    counts = [0] * _BINS
    for usd in finite:
        counts[min(_BINS - 1, int((usd - low) / width))] += 1
    labels = [
        f"{format_usd(low + n * width)} to {format_usd(low + (n + 1) * width)}"
        for n in range(_BINS)
    ]
    longest = max(map(len, labels))
    for label, count in zip(labels, counts, strict=True):
        bar = "#" * math.ceil(count * _BAR_WIDTH / max(counts))
        yield f"  {label:>{longest}}  {bar} {count}".rstrip()


def _offer_rows(estimate: Estimate) -> Iterator[tuple[str, ...]]:
    yield "market", "place", "machines", "per hour", "source", "alone", "on-demand"
    for one in estimate.offers:
        offer = one.offer
        price = "unknown" if offer.price is None else format_usd(offer.price.usd_per_hour)
        yield (
            offer.market.value,
            _place(offer) or "-",
            f"{one.machines} {offer.machine_type}".strip(),
            price,
            _source(one, estimate.as_of_ms),
            format_usd(one.expected_usd) if one.is_rentable else "-",
            format_usd(one.on_demand_usd),
        )


def _feeder_line(feeders: FeederEstimate) -> str:
    machines = format_count(feeders.max_machines, "machine")
    if feeders.min_machines < feeders.max_machines:
        machines = f"{feeders.min_machines} to {machines}"
    if feeders.usd_per_hour is None:
        return f"Feeders: {machines}, whose price is unknown."
    return (
        f"Feeders: {machines} at {format_usd(feeders.usd_per_hour)} per hour, in the cost with "
        f"{format_usd(feeders.expected_usd)} (expected) and {format_usd(feeders.highest_usd)} "
        "(worst case)."
    )


def _place(offer: Offer) -> str:
    if offer.zone:
        return offer.zone
    # For example a queue, if the provider chooses the zone.
    selected = [
        value for value in offer.options.values() if value not in (offer.region, offer.machine_type)
    ]
    return " ".join(filter(None, (offer.region, *selected)))


def _source(one: OfferEstimate, now_ms: int) -> str:
    price = one.offer.price
    if price is None:
        return "-"
    age_s = now_ms / 1000 - price.as_of_s
    return price.source if age_s < 60 else f"{price.source}, {format_seconds(age_s)} ago"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _source_of_outages(estimate: Estimate) -> str:
    count = format_count(len(estimate.recordings), "recorded market")
    return (
        f"Outages and lifetimes are those of {count} of other machines, prices those listed above: "
        f"{', '.join(estimate.recordings)}."
    )
