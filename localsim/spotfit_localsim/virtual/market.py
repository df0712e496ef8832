"""The simulated spot market: offers with prices, capacity, preemptions, boot times and refusals.

A market without configured offers has one, with the name '' and without a price.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter

from spotfit.core.errors import ConfigError
from spotfit.model.offer import Market, Offer, Price
from spotfit_localsim.clouds.price_history import PriceChange
from spotfit_localsim.random_streams import RandomStream
from spotfit_localsim.traces import CapacityTrace
from spotfit_localsim.virtual.faults import FloatRange

UNLIMITED_CAPACITY = 1_000_000
PRICE_SOURCE = "simulated market"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimOfferConfig:
    """Machines of one type in one zone, on one market. All durations are in virtual time."""

    name: str
    market: Market = Market.SPOT
    """The cloud never preempts on-demand machines."""
    prices: tuple[PriceChange, ...] = ((0.0, 1.0),)
    """Seconds since the start and US dollars per machine and hour, in the order of time; the first
    price is also in force before."""
    region: str = "sim-east"
    zone: str = ""
    machine_type: str = "sim"
    for_feeders: bool = False
    """Whether it is of the backend of feeders, which has no other offers."""
    network: str | None = None
    """Machines of different networks cannot connect to each other; None: one for the region."""
    capacity: CapacityTrace | None = None
    """Capacity over time; None for no limit."""
    boot_s: FloatRange = (5.0, 20.0)
    grant_delay_s: FloatRange = (0.0, 0.0)
    """How long a request waits for machines although there is capacity. They are not billed yet."""
    refusal_probability: float = 0.0
    """The fraction of requests that are refused independently of capacity."""
    max_refused_s: float = math.inf
    """After this time of refusals only, the next request is accepted."""
    reclaims_per_hour: float = 0.0
    """Preemption rate of each machine while faults are active."""
    early_loss_probability: float = 0.0
    """The fraction of machines that are preempted `early_loss_s` after they are up."""
    early_loss_s: FloatRange = (0.0, 10.0)

    @property
    def network_name(self) -> str:
        """The name of the network of its machines."""
        return self.region if self.network is None else self.network


@dataclass(frozen=True, slots=True)
class SimMarketConfig:
    """Parameters of the market."""

    reclaims_per_hour: float = 0.0
    """Preemption rate of each machine while faults are active."""
    notice_probability: float = 0.5
    """The fraction of preemptions with a notice."""
    notice_s: float = 30.0
    drop_notice_probability: float = 0.0
    """The fraction of the machines lost to a drop of the capacity that receive a notice before."""
    boot_s: FloatRange = (5.0, 20.0)
    boot_failure_probability: float = 0.0
    """The fraction of machines whose agent never starts."""
    failed_start_probability: float = 0.0
    """The fraction of machines that end with an error instead of starting their agent."""
    restarts_per_machine: int = 0
    """How often the API restarts the agent of a preempted machine on another one, by itself."""
    rejects_when_full: bool = False
    """Whether a request without capacity is refused instead of queued."""
    refusal_probability: float = 0.0
    """The fraction of requests that are refused independently of capacity."""
    clean_close_probability: float = 0.7
    """The fraction of lost machines whose kernel closes its connections; others become silent."""
    status_lag_s: FloatRange = (0.5, 5.0)
    """How long the API reports a terminated machine as running."""
    read_lag_s: float = 0.0
    """How long the API does not show a group after it was requested."""
    reports_times: bool = True
    """Whether the API reports from when until when it bills a machine."""
    lost_response_probability: float = 0.0
    """The fraction of API calls that are executed but whose response is lost."""
    latency_s: FloatRange = (0.05, 0.4)
    capacity: CapacityTrace | None = None
    """Capacity over time; None for no limit."""
    offers: tuple[SimOfferConfig, ...] = ()
    """What can be rented. They replace `reclaims_per_hour`, `boot_s`, `refusal_probability` and
    `capacity`, which describe the only offer of a market without any."""

    def __post_init__(self) -> None:
        names = [offer.name for offer in self.offers]
        if len(set(names)) < len(names) or "" in names:
            raise ConfigError(f"The offers {names} do not have different names.")

    def offers_at(
        self, now: float, provisioner: str, *, for_feeders: bool = False
    ) -> tuple[Offer, ...]:
        """Return the configured offers with the prices in force at `now`: of workers or feeders."""
        return tuple(
            Offer(
                name=one.name,
                provisioner=provisioner,
                market=one.market,
                region=one.region,
                zone=one.zone,
                machine_type=one.machine_type,
                network=one.network_name,
                price=Price(
                    usd_per_hour=price_at(one.prices, now), source=PRICE_SOURCE, as_of_s=now
                ),
                options={"offer": one.name},
            )
            for one in self.offers
            if one.for_feeders == for_feeders
        )


def price_at(prices: tuple[PriceChange, ...], now: float) -> float:
    """Return the price in force at `now`, in US dollars per hour."""
    return prices[_last_change(prices, now)][1]


def cost_usd(prices: tuple[PriceChange, ...], start_s: float, end_s: float) -> float:
    """Return the cost of one machine from `start_s` to `end_s`, each second at its own price."""
    changes = [
        moment for moment, _ in prices[_last_change(prices, start_s) :] if start_s < moment < end_s
    ]
    return sum(
        price_at(prices, since) * (until - since) / 3600
        for since, until in itertools.pairwise([start_s, *changes, end_s])
    )


def _last_change(changes: Sequence[tuple[float, float]], now: float) -> int:
    """The index of the last change until `now`; the first one is also in force before its time."""
    return max(0, bisect_right(changes, now, key=itemgetter(0)) - 1)


def random_outages(
    stream: RandomStream,
    *,
    machines: int,
    mean_available_s: float,
    mean_outage_s: float,
    duration_s: float,
) -> CapacityTrace:
    """Draw a capacity of `machines` with outages, both of exponentially distributed duration."""
    points, now, is_available = [], 0.0, stream.bernoulli(0.7)
    while now < duration_s:
        points.append((now, machines if is_available else 0))
        mean_s = mean_available_s if is_available else mean_outage_s
        now += stream.expovariate(1 / mean_s)
        is_available = not is_available
    return CapacityTrace("random outages", tuple(points), duration_s=duration_s)


def random_levels(
    stream: RandomStream, *, machines: int, mean_s: float, duration_s: float
) -> CapacityTrace:
    """Draw a capacity that changes to 0 to `machines` machines after times of mean `mean_s`."""
    points, now = [], 0.0
    while now < duration_s:
        points.append((now, stream.randint(0, machines)))
        now += stream.expovariate(1 / mean_s)
    return CapacityTrace("random levels", tuple(points), duration_s=duration_s)


class SimOffer:
    """One offer over time: unlimited and without preemptions once faults have been stopped."""

    def __init__(self, config: SimOfferConfig, stream: RandomStream) -> None:
        self.config = config
        self.name = config.name
        self._stream = stream
        self._faults_stopped = False
        self._refused_since: float | None = None

    @property
    def network(self) -> str:
        """The network of its machines; '' for the only offer of a market without any."""
        return self.config.network_name if self.name else ""

    @property
    def is_preemptible(self) -> bool:
        """Whether the cloud may preempt its machines."""
        return self.config.market is Market.SPOT

    def stop_faults(self) -> None:
        """Give unlimited capacity, and preempt and refuse no machines from now on."""
        self._faults_stopped = True

    def capacity_at(self, now: float) -> int:
        """Return the number of machines that may run at `now`."""
        trace = self.config.capacity
        # Unlimited at the end: every run must be able to finish.
        if trace is None or self._faults_stopped:
            return UNLIMITED_CAPACITY
        return trace.points[_last_change(trace.points, now)][1]

    def capacity_change_times(self) -> tuple[float, ...]:
        """Return the times at which the capacity changes."""
        trace = self.config.capacity
        return tuple(moment for moment, _ in trace.points) if trace else ()

    def capacity_drop_times(self) -> tuple[float, ...]:
        """Return the times at which the capacity decreases."""
        trace = self.config.capacity
        changes = itertools.pairwise(trace.points) if trace else ()
        return tuple(moment for (_, before), (moment, after) in changes if after < before)

    def cost_usd(self, start_s: float, end_s: float) -> float:
        """Return the cost of one of its machines from `start_s` to `end_s`."""
        return cost_usd(self.config.prices, start_s, end_s) if self.name else 0.0

    def draw_boot_s(self) -> float:
        """Draw how long a machine boots."""
        return self._stream.uniform_in(self.config.boot_s)

    def draw_grant_delay_s(self) -> float:
        """Draw how long a request waits for machines although there is capacity."""
        return self._stream.uniform_in(self.config.grant_delay_s)

    def draw_lifetime_s(self) -> float | None:
        """Draw the time until a machine is preempted; None for no preemption."""
        config = self.config
        if self._faults_stopped or not self.is_preemptible:
            return None
        if self._stream.bernoulli(config.early_loss_probability):
            return self._stream.uniform_in(config.early_loss_s)
        if config.reclaims_per_hour <= 0:
            return None
        # A constant rate gives exponential lifetimes.
        return self._stream.expovariate(config.reclaims_per_hour / 3600.0)

    def should_refuse(self, now: float) -> bool:
        """Draw whether a request is refused independently of capacity."""
        is_drawn = not self._faults_stopped and self._stream.bernoulli(
            self.config.refusal_probability
        )
        since = now if self._refused_since is None else self._refused_since
        is_refused = is_drawn and now - since < self.config.max_refused_s
        self._refused_since = since if is_refused else None
        return is_refused


class SimMarket:
    """The market over time: its offers, and the faults that are common to all of them."""

    def __init__(
        self,
        config: SimMarketConfig,
        stream: RandomStream,
        offer_stream: Callable[[str], RandomStream] | None = None,
    ) -> None:
        """`offer_stream` returns the random stream of an offer; by default all share `stream`."""
        self.config = config
        self.stream = stream
        self.are_faults_stopped = False
        self._credentials_valid_from = 0.0
        only_offer = SimOfferConfig(
            name="",
            capacity=config.capacity,
            boot_s=config.boot_s,
            refusal_probability=config.refusal_probability,
            reclaims_per_hour=config.reclaims_per_hour,
        )
        self.offers = {
            one.name: SimOffer(
                one, stream if offer_stream is None or not one.name else offer_stream(one.name)
            )
            for one in config.offers or (only_offer,)
        }
        """By name, in the order of the configuration; never empty."""

    @property
    def has_offers(self) -> bool:
        """Whether offers are configured."""
        return bool(self.config.offers)

    def stop_faults(self) -> None:
        """Give unlimited capacity and preempt no machines from now on."""
        self.are_faults_stopped = True
        for offer in self.offers.values():
            offer.stop_faults()

    def should_fail_boot(self) -> bool:
        """Draw whether the agent of a machine never starts."""
        return not self.are_faults_stopped and self.stream.bernoulli(
            self.config.boot_failure_probability
        )

    def should_fail_start(self) -> bool:
        """Draw whether a machine ends with an error instead of starting its agent."""
        probability = self.config.failed_start_probability
        # No draw without the fault: scenarios without it keep their random streams.
        return (
            not self.are_faults_stopped and probability > 0 and self.stream.bernoulli(probability)
        )

    def reject_credentials_until(self, until_s: float) -> None:
        """Reject every API call until that virtual time."""
        self._credentials_valid_from = until_s

    def are_credentials_invalid(self, now: float) -> bool:
        """Return whether the API rejects the credentials at `now`."""
        return not self.are_faults_stopped and now < self._credentials_valid_from

    def should_lose_response(self) -> bool:
        """Draw whether the response of an API call is lost."""
        return not self.are_faults_stopped and self.stream.bernoulli(
            self.config.lost_response_probability
        )
