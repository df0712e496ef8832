"""The field names of `--json` are pinned: scripts depend on them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spotfit.cli import json_fields
from spotfit.client.console import RunEvent, format_local_time
from spotfit.client.deadline_status import DeadlineStatus
from spotfit.client.metrics_history import ReportedMetrics
from spotfit.client.run_costs import TotalCost
from spotfit.client.run_handle import RunStatus
from spotfit.client.run_list import ListedRun
from spotfit.client.stored_checkpoints import CheckpointContent, CheckpointInfo
from spotfit.model.bill import Bill
from tests.house.tree import ROOT
from tests.unit.client.bills import SPOT, UNPRICED, a_bill
from tests.unit.client.test_estimate import an_estimate

# A field may be added here. None may be removed or renamed.
LISTED_RUN = (
    "name url state reason started_at ended_at step latest_checkpoint is_verified run_id "
    "provisioner cost"
)
STATUS = (
    "name url state reason started_at ended_at round workers machines is_starting startup_s step "
    "steps_per_s metrics checkpoints failures feeders_stopped is_verified run_id provisioner cost "
    "deadline"
)
RUN_COST = "kind name url state reason run_id provisioner cost"
TOTAL_COST = "kind runs active unreadable cost"
DEADLINE = "at slack_s is_final risks"
BILL = (
    "usd max_usd on_demand_usd saved_share machine_s max_machine_s boot_s repeated_s idle_s "
    "is_final offers"
)
OFFER = "offer market machine_s max_machine_s usd max_usd on_demand_usd"
EVENT = "slot written_at type text"
REPORT = "round report_index reported_at checkpoint metrics"
CHECKPOINT = "name step size_bytes metrics reason read_error content"
ESTIMATE = (
    "workers min_workers training_time_s changeover_s restart_s deadline_s budget_usd "
    "uses_on_demand is_guaranteed earliest_deadline_s worst_case_usd usd finish_s deadline_share "
    "budget_share unfinished_share offers feeders recordings replays as_of remarks "
    "rejections"
)
ESTIMATED_OFFER = (
    "name market region zone machine_type machines usd_per_hour price_source price_as_of "
    "expected_usd on_demand_usd is_rentable"
)
DISTRIBUTION = "mean median p5 p95 highest"
CONTENT = "step epoch world_size tensors parameters shared_bytes"

LATE = RunStatus("a", "running", 1, 2, 2, (), {}, deadline=DeadlineStatus(1_700_000_000_000, -5.0))
AN_ESTIMATE = json_fields.of_estimate(an_estimate())
A_CONTENT = CheckpointContent(5, 0, 2, 3, 100, 0)
A_RUN = ListedRun(name="a", url="/runs/a", state="running", cost=a_bill(SPOT, UNPRICED))
A_TOTAL = TotalCost(runs=2, active=1, unreadable=0, bill=a_bill())
RECORDS = {
    LISTED_RUN: json_fields.of_listed_run(
        ListedRun(name="a", url="/runs/a", state="running", started_at_ms=1_700_000_000_123)
    ),
    STATUS: json_fields.of_status(
        RunStatus(
            name="a",
            state="waiting",
            round=None,
            workers=0,
            machines=0,
            checkpoints=(),
            failures={},
        ),
        "/runs/a",
    ),
    DEADLINE: json_fields.of_status(LATE, "/runs/a")["deadline"],
    EVENT: json_fields.of_event(RunEvent(3, 1_700_000_000_000, "round_opened", "round 1 started")),
    REPORT: json_fields.of_report(ReportedMetrics(1, 0, None, {"loss": 1.0})),
    CHECKPOINT: json_fields.of_checkpoint(CheckpointInfo("c", 1, {}, 5, content=A_CONTENT)),
    CONTENT: A_CONTENT._asdict(),
    RUN_COST: json_fields.of_run_cost(A_RUN),
    TOTAL_COST: json_fields.of_total_cost(A_TOTAL),
    BILL: json_fields.of_total_cost(A_TOTAL)["cost"],
    OFFER: json_fields.of_total_cost(A_TOTAL)["cost"]["offers"][0],
    ESTIMATE: AN_ESTIMATE,
    ESTIMATED_OFFER: AN_ESTIMATE["offers"][0],
    DISTRIBUTION: AN_ESTIMATE["usd"],
}


def test_the_fields_are_the_pinned_ones() -> None:
    for pinned, record in RECORDS.items():
        assert list(record) == pinned.split()


def test_the_guide_documents_all_fields() -> None:
    guide = (ROOT / "docs/guides/command_line.md").read_text()
    names = {name for pinned in RECORDS for name in pinned.split()}
    assert [name for name in sorted(names) if f"`{name}`" not in guide] == []


def test_a_cost_is_null_unless_all_prices_are_known() -> None:
    assert RECORDS[BILL]["usd"] == pytest.approx(12.40)
    cost = json_fields.of_run_cost(A_RUN)["cost"]
    assert (cost["usd"], cost["max_usd"], cost["on_demand_usd"], cost["saved_share"]) == (None,) * 4
    assert [(each["market"], each["usd"]) for each in cost["offers"]] == [
        ("spot", 4.15),
        ("on_demand", None),
    ]
    without_machines = json_fields.of_run_cost(replace(A_RUN, cost=Bill()))["cost"]
    assert (without_machines["usd"], without_machines["machine_s"]) == (None, 0)
    assert json_fields.of_run_cost(replace(A_RUN, state="unreadable"))["cost"] is None


def test_times_are_utc_and_null_if_unknown() -> None:
    run = RECORDS[LISTED_RUN]
    assert (run["started_at"], run["ended_at"]) == ("2023-11-14T22:13:20.123Z", None)


def test_a_time_that_no_calendar_has_is_unknown() -> None:
    """Anyone who can write to the bucket may have written it."""
    for unix_ms in (2**62, 2**90):
        event = RunEvent(3, unix_ms, "round_opened", "round 1 started")
        assert json_fields.of_event(event)["written_at"] is None
    assert format_local_time(2**90) == "-"
