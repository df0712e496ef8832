"""Real runs with a deadline or a budget on a simulated cloud: fallback, return, and the bill."""

from __future__ import annotations

import importlib
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import spotfit
from spotfit.client.run_handle import attach
from spotfit.core.errors import BudgetExhaustedError
from spotfit.model.events import (
    CheckpointCommitted,
    DeadlineAtRisk,
    GroupSubmitted,
    MachinesChosen,
    RoundClosed,
    RoundOpened,
)
from spotfit_localsim.clouds.spot_cloud import SpotCloud
from tests.house.tree import ROOT
from tests.live.cloud import events_of

# The cloud bills from the request, and the record of a machine is exact within the observation.
TOLERANCE_S = 1.0
# 155 s of the machine are kept for the stop of the run.
KEPT_USD = 155 * 900.0 / 3600


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "examples")
    return importlib.import_module("deadline")


@pytest.fixture
def cloud(example: Any, tmp_path: Path) -> Iterator[SpotCloud]:
    cloud = example.open_cloud(tmp_path / "cloud", "plain")
    yield cloud
    cloud.close()


def billed_s(cloud: SpotCloud) -> Counter[str]:
    """Machine-seconds in the books of the cloud, by market."""
    billed: Counter[str] = Counter()
    for machine in cloud.machines():
        assert machine["ended_at_s"] is not None, "the cloud bills it still"
        billed[machine["market"]] += machine["ended_at_s"] - machine["created_at_s"]
    return billed


def recorded_s(cost: spotfit.Bill) -> Counter[str]:
    return Counter({offer.market.value: offer.machine_s for offer in cost.offers})


def assert_same_bill(cost: spotfit.Bill, cloud: SpotCloud) -> None:
    books, record = billed_s(cloud), recorded_s(cost)
    assert books.keys() == record.keys()
    for market, seconds in books.items():
        machines = sum(one["market"] == market for one in cloud.machines())
        assert abs(record[market] - seconds) <= TOLERANCE_S * machines
    assert cost.is_final


def test_a_run_falls_back_to_on_demand_machines_and_returns(example: Any, cloud: SpotCloud) -> None:
    result = example.fit(cloud, steps=100)
    assert result.return_value == 100
    url = f"{cloud.storage_path}/deadline"
    choices = [
        "".join(event.workers) for event in events_of(url) if isinstance(event, MachinesChosen)
    ]
    returned = choices.index("plain/on_demand")
    assert choices[0] == "plain/spot"
    assert choices[returned:][-1] == "plain/spot"
    markets = [machine["market"] for machine in cloud.machines()]
    assert markets == ["spot", "on_demand", "spot"]
    on_demand, last = cloud.machines()[1:]
    assert last["started_at_s"] < on_demand["ended_at_s"], "the new machine starts first"
    assert result.deadline is not None
    assert result.deadline.slack_s is not None
    assert result.deadline.slack_s > 0
    assert not result.deadline.risks
    assert_same_bill(result.cost, cloud)


def test_a_deadline_that_is_missed_is_reported_during_and_after_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first checkpoint has no progress; from those that follow the lateness is predicted."""

    def train() -> None:
        for step in range(1, 27):
            time.sleep(0.5)  # a step of real work
            (tmp_path / f"{step}").mkdir()
            spotfit.report(
                {"step": step},
                checkpoint=spotfit.Checkpoint.from_directory(tmp_path / f"{step}"),
                progress=None if step == 1 else step / 26,
            )

    run = spotfit.RunConfig(name="late", storage_path=str(tmp_path / "runs"), deadline="12s")
    provisioner = 'local?nodes=1&prices={"*":{"on_demand":2}}'
    result = spotfit.DataParallelTrainer(train, run_config=run, provisioner=provisioner).fit()
    assert result.deadline is not None
    assert result.deadline.slack_s is not None
    assert result.deadline.slack_s < 0
    url = f"{tmp_path}/runs/late"
    risks = [event.risk for event in events_of(url) if isinstance(event, DeadlineAtRisk)]
    assert risks == ["no_progress", "late"]
    assert "the deadline cannot be met: " in result.deadline.risks[1], "before it has passed"
    assert attach(url).status().deadline == result.deadline
    printed = capfd.readouterr().err
    for reason in result.deadline.risks:
        assert f'WARNING deadline.at_risk reason="{reason}"' in printed
    assert "; deadline missed by " in printed


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["aws_batch", "gcp_batch"])
def test_a_move_to_cheaper_machines_starts_them_before_the_others_end(
    example: Any, tmp_path: Path, name: str
) -> None:
    """On-demand machines train while the cheaper spot machine starts; no step is repeated."""
    cloud = example.open_cloud(tmp_path / "cloud", name)
    try:
        cloud.set_capacity(0)
        result = example.fit(cloud, steps=150)
        assert_is_start_first(result, cloud)
    finally:
        cloud.close()


def assert_is_start_first(result: spotfit.Result, cloud: SpotCloud) -> None:
    assert result.return_value == 150
    old, new = cloud.machines()
    assert (old["market"], new["market"]) == ("on_demand", "spot")
    assert new["started_at_s"] < old["ended_at_s"]
    events = events_of(f"{cloud.storage_path}/deadline")
    planned = max(n for n, event in enumerate(events) if isinstance(event, GroupSubmitted))
    moved = next(n for n, event in enumerate(events) if isinstance(event, RoundClosed))
    trained = [event for event in events[planned:moved] if isinstance(event, CheckpointCommitted)]
    assert trained, "the on-demand machine trains while the spot machine starts"
    rounds = [event.round for event in events if isinstance(event, RoundOpened)]
    assert [one.checkpoint_name for one in rounds] == [None, trained[-1].name]
    assert_same_bill(result.cost, cloud)


def test_a_used_up_budget_ends_the_run_and_rents_nothing_more(
    example: Any, cloud: SpotCloud
) -> None:
    def fit(budget_usd: float, steps: int) -> spotfit.Result:
        run = spotfit.RunConfig(
            name="budget", storage_path=cloud.storage_path, budget_usd=budget_usd
        )
        return spotfit.DataParallelTrainer(
            example.train,
            train_loop_config={"steps": steps},
            run_config=run,
            provisioner=cloud.provisioner,
        ).fit()

    budget_usd = KEPT_USD + 2.75  # 11 s of one machine
    with pytest.raises(BudgetExhaustedError, match="kept for saving"):
        fit(budget_usd, steps=1000)
    cost = attach(f"{cloud.storage_path}/budget").status().cost
    assert cost.max_usd is not None
    assert cost.max_usd < budget_usd
    assert_same_bill(cost, cloud)


@pytest.mark.timeout(300)
def test_a_run_uses_the_machines_of_two_clouds(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    example = importlib.import_module("two_clouds")
    result: spotfit.Result | None = None

    def fit(*arguments: Any) -> spotfit.Result:
        nonlocal result
        result = original(*arguments)
        return result

    original = example.fit
    monkeypatch.setattr(example, "fit", fit)
    example.main()
    assert result is not None
    assert result.return_value > 0.9
    markets = {one.offer.split("/")[0]: one.market for one in result.cost.offers}
    assert {one.market.value for one in result.cost.offers} == {"spot", "on_demand"}
    assert markets.keys() == {"aws_batch", "gcp_batch"}
    assert "saved" in capfd.readouterr().out
