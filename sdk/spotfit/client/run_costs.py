"""The cost of many runs, from their journals (`spotfit cost`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from spotfit.client.bill_text import is_bill_shown
from spotfit.client.run_list import ListedRun, list_runs
from spotfit.model.bill import Bill, OfferBill


@dataclass(frozen=True, kw_only=True)
class TotalCost:
    """The sum over several runs."""

    runs: int
    """Number of runs, including those that cost nothing and those that cannot be read."""
    active: int
    """Number of runs that have not ended, whose cost still grows."""
    unreadable: int
    """Number of runs whose journal cannot be read. Their cost is not included."""
    bill: Bill
    """By offer; an offer whose price is unknown in some of the runs is listed twice."""


class RunCosts:
    """The runs below storage paths, or single runs, with their cost. A run is listed once.

    Iterating reads the journals, at most 16 at once, and yields each run as `list_runs`, whose
    errors it raises. The other attributes are those of the runs that were yielded.
    """

    def __init__(self, roots: Iterable[str | Path]) -> None:
        self._roots = list(roots)
        self._runs: dict[str, ListedRun] = {}
        self.empty_roots: list[str] = []
        """Those of `roots` that contain no run."""

    def __iter__(self) -> Iterator[ListedRun]:
        for root in self._roots:
            is_empty = True
            for run in list_runs(root):
                is_empty = False
                # The roots may overlap, and a run must not be counted twice.
                if run.url not in self._runs:
                    self._runs[run.url] = run
                    yield run
            if is_empty:
                self.empty_roots.append(str(root))

    @property
    def total(self) -> TotalCost:
        """The sum over the runs that were yielded so far. Reads nothing."""
        runs = list(self._runs.values())
        # Machines of this computer cost nothing; their hours are not those of rented machines.
        bills = [run.cost for run in runs if is_bill_shown(run.cost, run.provisioner)]
        return TotalCost(
            runs=len(runs),
            active=sum(run.is_active for run in runs),
            unreadable=sum(run.state == "unreadable" for run in runs),
            bill=sum_bills(bills),
        )


def sum_bills(bills: Iterable[Bill]) -> Bill:
    """Return the bill of several runs together, by offer.

    The parts of an offer with a known and with an unknown price stay apart, so that no known cost
    is lost. Final if all are.
    """
    listed = list(bills)
    parts: dict[tuple[str, str, bool], list[OfferBill]] = {}
    for bill in listed:
        for each in bill.offers:
            parts.setdefault((each.offer, each.market, each.usd is None), []).append(each)
    return Bill(
        offers=tuple(_sum_offer(same) for _, same in sorted(parts.items())),
        boot_s=sum(bill.boot_s for bill in listed),
        repeated_s=sum(bill.repeated_s for bill in listed),
        idle_s=sum(bill.idle_s for bill in listed),
        is_final=all(bill.is_final for bill in listed),
    )


def _sum_offer(parts: list[OfferBill]) -> OfferBill:
    together = Bill(offers=tuple(parts))
    return OfferBill(
        offer=parts[0].offer,
        market=parts[0].market,
        machine_s=together.machine_s,
        max_machine_s=together.max_machine_s,
        usd=together.usd,
        max_usd=together.max_usd,
        on_demand_usd=together.on_demand_usd,
    )
