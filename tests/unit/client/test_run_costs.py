"""The cost of many runs: every run counts once, and none that can be read is left out."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from spotfit.client import run_list
from spotfit.client.run_costs import RunCosts, sum_bills
from spotfit.core.errors import StorePermissionError
from spotfit.ledger import keys
from spotfit.ledger.journal import Ledger
from spotfit.model.bill import Bill
from spotfit.model.events import FitEnded, FitStarted, JournalEvent
from spotfit.model.view import JournalView, View
from spotfit.store.factory import open_store
from spotfit.store.local import MemoryStore
from spotfit.testing.builders import RUN_ID, a_spec, an_agent_id
from tests.unit.client.bills import LOCAL, ON_DEMAND, SPOT, UNPRICED, a_bill

FINISHED = FitEnded(outcome="finished")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("SPOTFIT_HOME", str(tmp_path / "home"))
    return f"memory://{uuid.uuid4().hex}/runs"


@pytest.fixture
def bills(monkeypatch: pytest.MonkeyPatch) -> dict[str, Bill]:
    """The bill of each run by its name."""
    by_name: dict[str, Bill] = {}

    def bill_of(view: JournalView, _now_ms: int) -> Bill:
        assert isinstance(view, View)
        return by_name[view.spec.name]

    monkeypatch.setattr(run_list, "bill_of", bill_of)
    return by_name


def write_run(root: str, name: str, *events: JournalEvent, provisioner: str = "aws_batch") -> None:
    store = open_store(f"{root}/{name}")
    ledger = Ledger(store, RUN_ID, an_agent_id(0))
    spec = a_spec(name=name, storage_url=store.url, provisioner=provisioner)
    for event in (FitStarted(spec=spec), *events):
        ledger.append(event, after=ledger.catch_up())


def test_the_total_includes_active_runs_and_reports_unreadable_ones(
    root: str, bills: dict[str, Bill]
) -> None:
    write_run(root, "ended", FINISHED)
    write_run(root, "active")
    open_store(f"{root}/damaged").put(keys.entry(0), b"{")
    bills |= {"ended": a_bill(), "active": a_bill(is_final=False)}
    costs = RunCosts([root])
    assert [(run.name, run.state) for run in costs] == [
        ("active", "waiting"),
        ("damaged", "unreadable"),
        ("ended", "finished"),
    ]
    total = costs.total
    assert (total.runs, total.active, total.unreadable) == (3, 1, 1)
    assert total.bill.usd == pytest.approx(24.80)
    assert not total.bill.is_final


def test_a_run_below_several_roots_counts_once(root: str, bills: dict[str, Bill]) -> None:
    write_run(root, "a", FINISHED)
    bills["a"] = a_bill(ON_DEMAND)
    costs = RunCosts([root, f"{root}/a", f"{root}/"])
    assert len(list(costs)) == 1
    assert (costs.total.bill.usd, costs.empty_roots) == (8.25, [])


def test_a_root_without_runs_is_reported(root: str) -> None:
    costs = RunCosts([root])
    assert list(costs) == []
    assert (costs.empty_roots, costs.total.runs) == ([root], 0)


def test_machines_of_this_computer_are_not_in_the_total(root: str, bills: dict[str, Bill]) -> None:
    write_run(root, "a", FINISHED, provisioner="local")
    bills["a"] = a_bill(LOCAL)
    costs = RunCosts([root])
    [run] = costs
    assert run.cost == a_bill(LOCAL)
    assert (costs.total.runs, costs.total.bill) == (1, Bill(is_final=True))


def test_permission_to_read_suffices(
    root: str, bills: dict[str, Bill], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(root, "active")
    write_run(root, "ended", FINISHED)
    bills |= {"active": a_bill(ON_DEMAND), "ended": a_bill(ON_DEMAND)}

    def denied(*_arguments: Any, **_options: Any) -> Callable[..., Any]:
        raise StorePermissionError("write access is denied", do="")

    for method in ("put", "create", "delete"):
        monkeypatch.setattr(MemoryStore, method, denied)
    costs = RunCosts([root])
    assert [run.state for run in costs] == ["waiting", "finished"]
    assert costs.total.bill.usd == 16.50


def test_bills_are_summed_by_offer() -> None:
    total = sum_bills(
        [a_bill(boot_s=10.0), a_bill(SPOT, boot_s=5.0, repeated_s=1.0), a_bill(idle_s=2.0)]
    )
    assert [(each.offer, each.usd) for each in total.offers] == [
        (ON_DEMAND.offer, 16.50),
        (SPOT.offer, pytest.approx(12.45)),
    ]
    assert (total.boot_s, total.repeated_s, total.idle_s) == (15.0, 1.0, 2.0)
    assert total.max_usd == pytest.approx(29.40)
    assert total.on_demand_usd == pytest.approx(115.05)


def test_a_known_cost_is_kept_if_another_run_has_no_price_of_the_offer() -> None:
    priced = replace(UNPRICED, usd=10.0, max_usd=10.0)
    known, unknown = sum_bills([a_bill(UNPRICED), a_bill(priced), a_bill(priced)]).offers
    assert (known.usd, known.machine_s) == (20.0, 10 * 3600)
    assert (unknown.usd, unknown.machine_s) == (None, 5 * 3600)
