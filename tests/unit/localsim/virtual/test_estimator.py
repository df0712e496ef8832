"""Jobs on recorded markets: exact arithmetic, the choices of the benchmark, folders of files."""

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from benchmarks import cost
from spotfit.core.errors import ConfigError
from spotfit.host import plugins
from spotfit.model.offer import Market
from spotfit.model.replay import MarketReplay, ReplayedGroup, ReplayedJob, ReplayedOffer
from spotfit_localsim.traces import BUNDLED_RECORDINGS, read_trace
from spotfit_localsim.virtual.deadline_market import (
    DeadlineJob,
    JobState,
    production_policy,
    run_job,
)
from spotfit_localsim.virtual.estimator import RecordedMarkets, elastic_job, market_job
from spotfit_localsim.virtual.recorded_market import MarketRecording, market_recording

HOUR_S = 3600.0
CHANGEOVER_S = 600.0


def markets(*counts: int, ticks_per_count: int = 1) -> RecordedMarkets:
    """One recording with ticks of ten minutes."""
    ticks = tuple(count for count in counts for _ in range(ticks_per_count))
    one = MarketRecording("zone", 600.0, ticks, max(counts), spot_usd=1.0, on_demand_usd=3.0)
    return RecordedMarkets([one])


def an_offer(market: Market, usd: float, machines: int = 2) -> ReplayedOffer:
    """`usd` is the price of one machine."""
    return ReplayedOffer(market=market, machines=machines, usd_per_hour=usd * machines)


def a_job(
    *spot_usd: float,
    machines: int = 2,
    work_s: float = 10 * HOUR_S,
    deadline_h: float | None = None,
    on_demand_usd: float | None = 3.0,
) -> ReplayedJob:
    offers = [an_offer(Market.SPOT, usd, machines) for usd in spot_usd]
    if on_demand_usd is not None:
        offers.append(an_offer(Market.ON_DEMAND, on_demand_usd, machines))
    return ReplayedJob(
        offers=tuple(offers),
        work_s=work_s,
        changeover_s=CHANGEOVER_S,
        deadline_s=None if deadline_h is None else deadline_h * HOUR_S,
    )


SPOT_ONLY = a_job(0.5, on_demand_usd=None)


@pytest.mark.parametrize("deadline_h", [None, 20.0])
def test_constant_availability_costs_training_time_and_one_changeover(
    deadline_h: float | None,
) -> None:
    outcomes = markets(4).replay(a_job(0.5, deadline_h=deadline_h), max_decisions=10**6)
    assert len(outcomes) == 12
    for one in outcomes:
        assert one.usd == pytest.approx(2 * 0.5 * (10 + 1 / 6))
        assert one.finish_s == pytest.approx(10 * HOUR_S + CHANGEOVER_S)
        assert not one.is_late


def test_a_deadline_without_slack_costs_on_demand_machines_all_the_time() -> None:
    job = a_job(0.5, deadline_h=10 + 1 / 6)
    (one,) = markets(4).replay(job, max_decisions=0)
    assert one.usd == pytest.approx(2 * 3.0 * (10 + 1 / 6))
    assert one.finish_s == pytest.approx(job.deadline_s)
    assert not one.is_late


@pytest.mark.parametrize("changeover_s", [37.0, 613.0, 5000.0])
def test_a_deadline_that_can_just_be_kept_is_not_late_because_units_are_rounded(
    changeover_s: float,
) -> None:
    job = ReplayedJob(
        offers=a_job(0.5).offers,
        work_s=40_321.0,
        changeover_s=changeover_s,
        deadline_s=40_321.0 + changeover_s,
    )
    (one,) = markets(4).replay(job, max_decisions=0)
    assert not one.is_late
    assert one.finish_s is not None
    assert one.finish_s <= 40_321.0 + changeover_s


def test_a_deadline_that_is_too_near_is_missed() -> None:
    (one,) = markets(4).replay(a_job(0.5, deadline_h=10), max_decisions=0)
    assert one.is_late
    assert one.finish_s == pytest.approx(10 * HOUR_S + CHANGEOVER_S)


def test_without_on_demand_machines_outages_cost_time_and_another_start() -> None:
    # Six hours with machines, six without: 5 h 50 min of training, then 10 min and 4 h 10 min.
    (one,) = markets(4, 0, ticks_per_count=36).replay(SPOT_ONLY, max_decisions=0)
    assert one.usd == pytest.approx(2 * 0.5 * (6 + 1 / 6 + 4 + 1 / 6))
    assert one.finish_s == pytest.approx((12 + 1 / 6 + 4 + 1 / 6) * HOUR_S)


def test_without_a_deadline_on_demand_machines_bridge_long_outages() -> None:
    # Spot for 6 h, a wait of the changeover time, then on-demand machines: 10 min and 4 h 10 min.
    (one,) = markets(4, 0, ticks_per_count=36).replay(a_job(0.5), max_decisions=0)
    assert one.usd == pytest.approx(2 * (0.5 * 6 + 3.0 * (4 + 2 / 6)))
    assert one.finish_s == pytest.approx((6 + 1 / 6 + 4 + 2 / 6) * HOUR_S)


def test_the_cheapest_granted_spot_machines_are_kept_if_others_save_less_than_a_fifth() -> None:
    zones = [
        MarketRecording(
            "x_us-east1-a", 600.0, (0,) + (1,) * 71, 1, spot_usd=1.0, on_demand_usd=3.0
        ),
        MarketRecording("x_us-east1-b", 600.0, (1,) * 72, 1, spot_usd=1.0, on_demand_usd=3.0),
    ]
    job = a_job(0.5, 0.6, on_demand_usd=None)
    first, second = RecordedMarkets(zones).replay(job, max_decisions=0)
    assert (first.recording, second.recording) == ("x_us-east1-a", "x_us-east1-b")
    assert first.usd == pytest.approx(2 * 0.6 * (10 + 1 / 6))
    assert second.usd == pytest.approx(2 * 0.5 * (10 + 1 / 6))


def test_on_demand_machines_alone_are_rented_at_once() -> None:
    (one,) = markets(0, 1).replay(a_job(), max_decisions=0)
    assert one.usd == pytest.approx(2 * 3.0 * (10 + 1 / 6))


def test_a_short_training_waits_for_the_end_of_a_long_outage() -> None:
    short = a_job(0.5, work_s=600.0, on_demand_usd=None)
    (one,) = markets(0, 0, 0, 0, 1, ticks_per_count=36).replay(short, max_decisions=0)
    assert one.finish_s == pytest.approx(24 * HOUR_S + 1200)


def test_machines_that_never_make_progress_do_not_finish() -> None:
    (one,) = markets(1, 0).replay(SPOT_ONLY, max_decisions=0)
    assert (one.finish_s, one.is_late) == (None, False)
    late = a_job(0.5, deadline_h=12, on_demand_usd=None)
    assert markets(1, 0).replay(late, max_decisions=0)[0].is_late


@pytest.mark.parametrize(("machines", "usd"), [(2, 0.5), (3, 3.0), (9, 3.0)])
def test_availability_depends_on_the_number_of_machines(machines: int, usd: float) -> None:
    """Of 9 machines, which the recording never has, all 4 of it must be available."""
    counts = (2,) * 71 + (4,)
    job = a_job(0.5, machines=machines, deadline_h=11)
    (one,) = markets(*counts).replay(job, max_decisions=0)
    assert one.usd == pytest.approx(machines * usd * (10 + 1 / 6))


def test_offers_without_a_zone_of_their_own_have_another_time_of_the_recording() -> None:
    one = MarketRecording("zone", 600.0, (1, 1, 0, 0), 1, spot_usd=1.0, on_demand_usd=3.0)
    offers = market_job(a_job(0.5, 0.5), [one, one], 0).offers
    assert [offer.available[:6] for offer in offers] == [
        (True, True, False, False, True, True),
        (False, False, True, True, False, False),
        (),
    ]


@pytest.mark.parametrize("deadline_h", [None, 20])
def test_free_machines_cost_nothing(deadline_h: float | None) -> None:
    job = a_job(0.0, deadline_h=deadline_h, on_demand_usd=0.0)
    assert markets(1, 0, 1).replay(job, max_decisions=0)[0].usd == 0.0


def test_the_computing_time_bounds_starts_and_then_recordings() -> None:
    zones = [
        MarketRecording(f"zone-{n}", 600.0, (1,) * 72, 1, spot_usd=1.0, on_demand_usd=3.0)
        for n in range(9)
    ]
    found = RecordedMarkets(zones)
    started = {
        decisions: [one.recording for one in found.replay(SPOT_ONLY, max_decisions=decisions)]
        for decisions in (10**6, 2_500, 0)
    }
    assert len(started[10**6]) == 9 * 12
    assert started[2_500] == list(found.names)
    assert started[0] == ["zone-0", "zone-3", "zone-6"]


# --- Elastic groups -------------------------------------------------------------------------------


def an_elastic_job(min_workers: int, *spot_usd: float, **fields: Any) -> ReplayedJob:
    """Up to four workers, one per machine; a change interrupts them for ten minutes."""
    group = ReplayedGroup(
        min_workers=min_workers, max_workers=4, loss_pause_s=600.0, growth_pause_s=600.0
    )
    return structs.replace(a_job(*spot_usd, machines=4, **fields), group=group)


@pytest.mark.parametrize("deadline_h", [None, 40.0])
def test_an_elastic_group_trains_with_a_part_of_its_machines(deadline_h: float | None) -> None:
    job = an_elastic_job(1, 0.5, deadline_h=deadline_h)
    (one,) = markets(2, 2, 2, 4, ticks_per_count=72).replay(job, max_decisions=0)
    assert one.usd == pytest.approx(2 * 0.5 * (20 + 1 / 6))
    assert one.finish_s == pytest.approx(20 * HOUR_S + CHANGEOVER_S)


def test_an_elastic_group_below_its_minimum_waits_or_is_completed_on_demand() -> None:
    job = an_elastic_job(3, 0.5)
    (one,) = markets(2, 4, ticks_per_count=144).replay(job, max_decisions=0)
    # A wait of one start, then the minimum on demand.
    assert one.usd == pytest.approx(3 * 3.0 * (1 / 6 + 10 * 4 / 3))
    patient = an_elastic_job(3, 0.5, deadline_h=100.0)
    (one,) = markets(2, 4, ticks_per_count=144).replay(patient, max_decisions=0)
    assert one.usd == pytest.approx(4 * 0.5 * (10 + 1 / 6))


def test_a_deadline_without_slack_costs_on_demand_machines_for_the_whole_group() -> None:
    job = an_elastic_job(1, 0.5, deadline_h=10 + 1 / 6)
    (one,) = markets(4).replay(job, max_decisions=0)
    assert one.usd == pytest.approx(4 * 3.0 * (10 + 1 / 6))
    assert one.finish_s == pytest.approx(job.deadline_s)
    assert not one.is_late


def test_a_smaller_recording_has_its_share_of_the_machines() -> None:
    zone = MarketRecording("zone", 600.0, (1, 2, 0), 2, spot_usd=1.0, on_demand_usd=3.0)
    job = an_elastic_job(1, 0.5)
    assert job.group is not None
    offers = elastic_job(job, job.group, [zone], 0).offers
    assert offers[0].capacity[:4] == (2, 4, 0, 2)


def test_elastic_groups_cost_less_on_the_recordings_than_those_of_fixed_size() -> None:
    elastic = an_elastic_job(1, 0.5, work_s=40 * HOUR_S, deadline_h=60.0)
    found = RecordedMarkets.read()
    costs = [
        statistics.fmean(one.usd for one in found.replay(job, max_decisions=0))
        for job in (elastic, structs.replace(elastic, group=None))
    ]
    assert costs[0] < costs[1]


# --- The policy and the recordings ----------------------------------------------------------------


def choices_of(job: DeadlineJob) -> tuple[list[tuple[int, int | None]], float, float]:
    made = []

    def policy(state: JobState) -> int | None:
        made.append((state.now, production_policy(state)))
        return made[-1][1]

    result = run_job(job, policy)
    return made, result.usd, result.finished_at


@pytest.mark.parametrize("names", [["us-east4-a"], ["us-central1-a", "us-central1-c"]])
def test_the_choices_are_those_of_the_cost_benchmark(names: list[str]) -> None:
    zones = [
        market_recording(read_trace(BUNDLED_RECORDINGS / f"gcp_h100x1_16_{name}.json"))
        for name in names
    ]
    benchmark_job = list(cost._jobs(zones, 0.1, 60.0))[2]
    start = cost._job_starts(zones[0], 60.0)[2]
    job = ReplayedJob(
        offers=tuple(
            ReplayedOffer(market=offer.market, machines=16, usd_per_hour=offer.usd_per_hour)
            for offer in benchmark_job.offers
        ),
        work_s=cost.WORK_H * HOUR_S,
        changeover_s=0.1 * HOUR_S,
        deadline_s=60 * HOUR_S,
    )
    made = choices_of(market_job(job, zones, start))
    assert made == choices_of(benchmark_job)
    assert len({choice for _, choice in made[0]}) > 1, "the market must require several choices"


def test_the_estimator_is_found_by_its_entry_point() -> None:
    read: Callable[[Path | None], MarketReplay] = plugins.load("spotfit.estimators", "recorded")
    bundled = read(None)
    assert "bamboo_p3_64" in bundled.names
    assert len(bundled.names) == 9
    assert bundled.remarks == ()


def test_a_folder_of_the_user_replaces_the_recordings(tmp_path: Path) -> None:
    document = {"id": "zone", "kind": "availability", "gap_seconds": 600, "data": [1, 0, 1]}
    (tmp_path / "zone.json").write_text(json.dumps(document))
    (tmp_path / "empty.json").write_text(json.dumps({**document, "data": [0, 0]}))
    (tmp_path / "other.json").write_text("{}")
    found = RecordedMarkets.read(tmp_path)
    assert found.names == ("zone",)
    assert [remark.split(":")[0] for remark in found.remarks] == [
        "empty.json is not used",
        "other.json is not used",
    ]


def test_a_folder_without_recordings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no recorded markets"):
        RecordedMarkets.read(tmp_path / "missing")
