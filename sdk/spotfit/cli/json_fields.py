"""The fields of `--json`, as the guide of the command line documents them.

Scripts depend on them: a field may be added, but none is renamed, removed or given another meaning.
Times are UTC in the format of RFC 3339; a value that is unknown is null.
"""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from spotfit.client.console import RunEvent
from spotfit.client.deadline_status import DeadlineStatus
from spotfit.client.estimate import Estimate, OfferEstimate
from spotfit.client.metrics_history import ReportedMetrics
from spotfit.client.run_costs import TotalCost
from spotfit.client.run_handle import RunStatus
from spotfit.client.run_list import ListedRun
from spotfit.client.stored_checkpoints import CheckpointInfo
from spotfit.model.bill import Bill, OfferBill


def of_listed_run(run: ListedRun) -> dict[str, Any]:
    """Return the fields of one run, for `spotfit ls`."""
    return {
        "name": run.name,
        "url": run.url,
        "state": run.state,
        "reason": run.reason,
        "started_at": _format_time(run.started_at_ms),
        "ended_at": _format_time(run.ended_at_ms),
        "step": run.step,
        "latest_checkpoint": run.checkpoint,
        "is_verified": run.is_verified,
        "run_id": run.run_id or None,
        "provisioner": run.provisioner or None,
        "cost": _of_bill(run.cost),
    }


def of_run_cost(run: ListedRun) -> dict[str, Any]:
    """Return the fields of the cost of one run, for `spotfit cost`."""
    return {
        "kind": "run",
        "name": run.name,
        "url": run.url,
        "state": run.state,
        "reason": run.reason,
        "run_id": run.run_id or None,
        "provisioner": run.provisioner or None,
        "cost": None if run.state == "unreadable" else _of_bill(run.cost),
    }


def of_total_cost(total: TotalCost) -> dict[str, Any]:
    """Return the fields of the last line of `spotfit cost`, the sum over all runs."""
    return {
        "kind": "total",
        "runs": total.runs,
        "active": total.active,
        "unreadable": total.unreadable,
        "cost": _of_bill(total.bill),
    }


def of_status(status: RunStatus, url: str) -> dict[str, Any]:
    """Return the fields of a run's status, for `spotfit status`; `url` is the run's directory."""
    return {
        "name": status.name,
        "url": url,
        "state": status.state,
        "reason": status.reason,
        "started_at": _format_time(status.started_at_ms),
        "ended_at": _format_time(status.ended_at_ms),
        "round": status.round,
        "workers": status.workers,
        "machines": status.machines,
        "is_starting": status.is_starting,
        "startup_s": status.startup_s,
        "step": status.progress.step,
        "steps_per_s": status.progress.steps_per_s,
        "metrics": status.progress.metrics,
        "checkpoints": status.checkpoints,
        "failures": status.failures,
        "feeders_stopped": status.feeders_stopped or None,
        "is_verified": status.is_verified,
        "run_id": status.run_id,
        "provisioner": status.provisioner,
        "cost": _of_bill(status.cost),
        "deadline": None if status.deadline is None else _of_deadline(status.deadline),
    }


def of_event(event: RunEvent) -> dict[str, Any]:
    """Return the fields of one journal entry, for `spotfit events`."""
    return {
        "slot": event.slot,
        "written_at": _format_time(event.written_at_ms),
        "type": event.type,
        "text": event.text,
    }


def of_report(report: ReportedMetrics) -> dict[str, Any]:
    """Return the fields of one report, for `spotfit metrics`."""
    return {
        "round": report.round,
        "report_index": report.report_index,
        "reported_at": _format_time(report.reported_at_ms),
        "checkpoint": report.checkpoint,
        "metrics": report.metrics,
    }


def of_checkpoint(info: CheckpointInfo) -> dict[str, Any]:
    """Return the fields of one checkpoint, for `spotfit checkpoints ls` and `show`."""
    return {
        "name": info.name,
        "step": info.step,
        "size_bytes": info.size_bytes,
        "metrics": info.metrics,
        "reason": info.reason,
        "read_error": info.read_error,
        "content": info.content._asdict() if info.content else None,
    }


def _of_deadline(deadline: DeadlineStatus) -> dict[str, Any]:
    return {
        "at": _format_time(deadline.at_ms),
        "slack_s": deadline.slack_s,
        "is_final": deadline.is_final,
        "risks": deadline.risks,
    }


def _of_bill(bill: Bill) -> dict[str, Any]:
    return {
        "usd": bill.usd if bill.offers else None,
        "max_usd": bill.max_usd if bill.offers else None,
        "on_demand_usd": bill.on_demand_usd if bill.offers else None,
        "saved_share": bill.saved_share,
        "machine_s": bill.machine_s,
        "max_machine_s": bill.max_machine_s,
        "boot_s": bill.boot_s,
        "repeated_s": bill.repeated_s,
        "idle_s": bill.idle_s,
        "is_final": bill.is_final,
        "offers": [_of_offer(each) for each in bill.offers],
    }


def _of_offer(offer: OfferBill) -> dict[str, Any]:
    return {
        "offer": offer.offer,
        "market": offer.market.value,
        "machine_s": offer.machine_s,
        "max_machine_s": offer.max_machine_s,
        "usd": offer.usd,
        "max_usd": offer.max_usd,
        "on_demand_usd": offer.on_demand_usd,
    }


def of_estimate(estimate: Estimate) -> dict[str, Any]:
    """Return the fields of an estimate, for `spotfit estimate`."""
    limits = estimate.limits
    return {
        "workers": estimate.workers,
        "min_workers": estimate.min_workers,
        "training_time_s": limits.training_time_s,
        "changeover_s": limits.changeover_s,
        "restart_s": limits.restart_s,
        "deadline_s": limits.deadline_s,
        "budget_usd": limits.budget_usd,
        "uses_on_demand": limits.uses_on_demand,
        "is_guaranteed": estimate.is_guaranteed,
        "earliest_deadline_s": estimate.earliest_deadline_s,
        "worst_case_usd": estimate.worst_case_usd,
        "usd": None if estimate.usd is None else asdict(estimate.usd),
        "finish_s": asdict(estimate.finish_s),
        "deadline_share": estimate.deadline_share,
        "budget_share": estimate.budget_share,
        "unfinished_share": estimate.unfinished_share,
        "offers": [_offer_fields(one) for one in estimate.offers],
        "feeders": None if estimate.feeders is None else asdict(estimate.feeders),
        "recordings": estimate.recordings,
        "replays": estimate.replays,
        "as_of": _format_time(estimate.as_of_ms),
        "remarks": estimate.remarks,
        "rejections": estimate.rejections,
    }


def _offer_fields(one: OfferEstimate) -> dict[str, Any]:
    offer, price = one.offer, one.offer.price
    return {
        "name": offer.name,
        "market": offer.market,
        "region": offer.region,
        "zone": offer.zone,
        "machine_type": offer.machine_type,
        "machines": one.machines,
        "usd_per_hour": None if price is None else price.usd_per_hour,
        "price_source": None if price is None else price.source,
        "price_as_of": None if price is None else _format_time(round(price.as_of_s * 1000)),
        "expected_usd": one.expected_usd,
        "on_demand_usd": one.on_demand_usd,
        "is_rentable": one.is_rentable,
    }


def _format_time(unix_ms: int) -> str | None:
    if not unix_ms:
        return None
    try:
        text = datetime.fromtimestamp(unix_ms / 1000, UTC).isoformat(timespec="milliseconds")
    except (OverflowError, ValueError, OSError):  # forged, or of a broken clock
        return None
    return text.replace("+00:00", "Z")
