"""Random faults of a cloud in runs of real processes; the result of the training must not change.

`python -m spotfit_localsim.live.cloud_chaos --seeds 20` runs small trainings on simulated clouds,
with their real provisioners and client libraries. The seed decides the cloud and the faults: lost
machines, late reads, refused requests, invalid credentials, partial capacity, exceeded memory
limits, firewalls, and a time budget. Invariants: the result equals that of an undisturbed run, or
the run ends with the documented remedy; no committed checkpoint is lost, no step counts twice, no
machine is rented without need, and no machine, process or directory is left.
"""

from __future__ import annotations

import contextlib
import importlib
import shutil
import sys
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

import spotfit
from spotfit.core.errors import ConfigError, SpotfitError
from spotfit.host.system import SystemClock, wall_ms
from spotfit.ledger.journal import Journal
from spotfit.model.events import (
    CheckpointCommitted,
    FailureCause,
    FitEnded,
    JournalEntry,
    JournalEvent,
    NodeLost,
    RoundOpened,
)
from spotfit.model.group import Unreachable
from spotfit.model.spec import RunTiming
from spotfit.model.usage import bill_of
from spotfit.policy.retry_budget import unreachable_remedy
from spotfit.store.factory import open_store
from spotfit.store.retry import RetryPolicy
from spotfit_localsim.clouds.cloud_host import OUT_OF_MEMORY, RECLAIMED, SIM_ROOT_ENV
from spotfit_localsim.clouds.provisioner import SimProvisioner
from spotfit_localsim.live import network_faults, reference_jobs
from spotfit_localsim.live.chaos_runs import (
    ChaosOutcome,
    LiveChaosSummary,
    LiveRun,
    argument_parser,
    environment_variables,
    read_text,
    run_from_command_line,
    run_seeds,
)
from spotfit_localsim.live.cloud_plans import (
    ApiFault,
    ApiRestart,
    CapacityLimit,
    CloudChaosPlan,
    CloudFault,
    MachineLoss,
    random_cloud_plan,
)
from spotfit_localsim.live.kill_targets import processes_with_variable
from spotfit_localsim.live.post_checks import RunAudit
from spotfit_localsim.random_streams import SeededStreams

_MODULE = "spotfit_localsim.live.cloud_chaos"
_TIMINGS_FUNCTION = "_choose_timings"
"""The function of `client.fit` that chooses the `RunTiming` of a run."""
_UNANSWERED = "run.requests_unanswered"
"""Logged if machines may be rented after the end of `fit()`, because the cloud does not answer."""
_POLL_INTERVAL_S = 0.05
_RELEASE_TIMEOUT_S = 40.0
"""From the end of `fit()` to the end of its last machine: notices, reads that lag, retries."""
_CLEANUP_TIMEOUT_S = 15.0
_CLOCK_TOLERANCE_S = 1.0
"""The clock of a bucket, by which the record is kept, may differ from that of the cloud."""
_REFUSED_RUN_TIMEOUT_S = 90.0
"""Of a run behind a firewall: two machines one after the other, each of which waits for 30 s."""
_WORKER_MEMORY_BYTES = 700 * 2**20
"""The limit of a machine: agent, fork server and worker need about a quarter of it."""


class DriverOutcome(msgspec.Struct, frozen=True):
    """What `fit()` returned or raised."""

    value: str | None = None
    error: str = ""
    """The class of the error."""
    text: str = ""


# --- one run ----------------------------------------------------------------------------------


class CloudChaosRun(LiveRun):
    """One execution of a plan."""

    driver_module = _MODULE

    def __init__(self, plan: CloudChaosPlan, folder: Path, proxy_url: str) -> None:
        super().__init__(plan, folder, proxy_url)
        self.plan = plan
        self.url = f"{plan.storage_path(folder)}/{plan.name}"
        self.sim = SimProvisioner.with_options(**plan.sim_options(folder))
        self.outcomes: list[DriverOutcome | None] = []
        """Of each `fit()`; None if it did not end in time."""
        self.fault_times_ms: list[int] = []
        """When faults took effect."""
        self.machines: list[dict[str, Any]] = []
        """All machines that were rented."""
        self.violations: list[str] = []
        self._pending = list(plan.faults)
        self._origins: dict[str, float] = {}
        self._capacity_ends_at: float | None = None
        self._journal: Journal | None = None
        self._clock = SystemClock()

    def execute(self, *, timeout_s: float) -> RunAudit:
        """Execute the plan and return the audit of the run."""
        if self.plan.store == "s3":
            network_faults.set_faults(self.proxy_url, network_faults.no_faults())
            bucket = urllib.request.Request(f"{self.proxy_url}/chaos", method="PUT")  # noqa: S310  # loopback
            urllib.request.urlopen(bucket).close()  # noqa: S310  # as above
            network_faults.set_faults(self.proxy_url, self.plan.network_faults)
        with environment_variables(self.environment()):
            self.sim.start_simulator()
            self.started_ms = wall_ms()
            self._origins["start"] = self._clock.now()
            modes = ["fit"] if self.plan.time_budget_s is None else ["budget", "fit"]
            for mode in modes:
                limit_s = (
                    min(timeout_s, _REFUSED_RUN_TIMEOUT_S) if self.plan.firewall else timeout_s
                )
                self.outcomes.append(self._run_driver(mode, limit_s))
                self._end_faults()
                self._release_machines()
            leftovers = self._end_cloud()
            if self.plan.store == "s3":
                network_faults.set_faults(self.proxy_url, network_faults.no_faults())
            last = self.outcomes[-1]
            result = last.value if last is not None else None
            return RunAudit.read(
                url=self.url, result=result, machine_starts=[], leftovers=leftovers
            )

    def running_processes(self) -> list[str]:
        """Return the processes of the run, the machines included, as 'pid name'."""
        machines = processes_with_variable(SIM_ROOT_ENV, str(self.sim.root))
        return sorted({*super().running_processes(), *machines})

    def leftover_paths(self) -> list[str]:
        """Return the temporary files of the run and of its machines."""
        machines = (self.sim.root / "machines").glob("*/tmp")
        return super().leftover_paths() + [str(path) for path in machines]

    def _run_driver(self, mode: str, timeout_s: float) -> DriverOutcome | None:
        path = self.folder / "result"
        path.unlink(missing_ok=True)
        deadline = self._clock.now() + timeout_s
        self._inject_due()  # before the first request
        driver = self.start_driver(mode)
        while driver.poll() is None and self._clock.now() < deadline:
            self._inject_due()
            self._clock.wait(_POLL_INTERVAL_S)
        if driver.poll() is None:
            self.violations.append(f"the run has not ended within {timeout_s:.0f} s")
            driver.kill()
            driver.wait()
            return None
        if (body := read_text(path)) is None:
            self.violations.append(f"the driver has crashed: {self.last_line_of_driver()}")
            return None
        outcome = msgspec.json.decode(body, type=DriverOutcome)
        self.log_event(f"fit() ended: {outcome.error or outcome.value}")
        return outcome

    # --- faults --------------------------------------------------------------------------------

    def _inject_due(self) -> None:
        """Inject the faults that are due; end the ones whose time is over."""
        now = self._clock.now()
        if self._capacity_ends_at is not None and now >= self._capacity_ends_at:
            self._set_capacity(None)
        if "round" not in self._origins and self._has_opened_round():
            self._origins["round"] = now
        for fault in list(self._pending):
            is_due = fault.since in self._origins and (
                now >= self._origins[fault.since] + fault.at_s
            )
            # Without a running machine a loss is tried again in the next poll.
            if is_due and not self._is_over() and self._inject(fault):
                self._pending.remove(fault)
                self.fault_times_ms.append(wall_ms())

    def _inject(self, fault: CloudFault) -> bool:
        match fault:
            case MachineLoss():
                return self._preempt(fault)
            case ApiFault(kind=kind, times=times, duration_s=duration_s):
                arguments = {"kind": kind, "times": times, "duration_s": duration_s}
                self.sim.call_simulator("trouble", arguments)
                extent = f"{duration_s:.1f} s" if duration_s else f"{times} requests"
                self.log_event(f"{kind} for {extent}")
            case CapacityLimit(duration_s=duration_s):
                self._set_capacity(self.plan.machines - 1)
                self._capacity_ends_at = self._clock.now() + duration_s
            case ApiRestart():
                # The next request of any process starts it again.
                self.sim.call_simulator("leave", {"machines": False})
                self.log_event("the API restarts")
        return True

    def _preempt(self, fault: MachineLoss) -> bool:
        stream = SeededStreams(self.plan.seed).stream(f"loss {fault.at_s}")
        numbers = self._running_machines()
        if not numbers or (fault.is_total and len(numbers) < self.plan.machines):
            return False
        chosen = numbers if fault.is_total else [stream.choice(numbers)]
        for number in chosen:
            # The machine may have ended meanwhile.
            with contextlib.suppress(ConfigError):
                self.sim.call_simulator("reclaim", {"machine": number, "notice": fault.notice})
        word = "with" if fault.notice else "without"
        self.log_event(f"preempted {', '.join(map(str, chosen))} {word} notice")
        return True

    def _running_machines(self) -> list[int]:
        """Return the running machines without a notice."""
        return [
            one["number"]
            for one in self.sim.call_simulator("machines")
            if one["state"] == "up" and not one["end_reason"]
        ]

    def _set_capacity(self, machines: int | None) -> None:
        self.sim.call_simulator("capacity", {"machines": machines})
        self.log_event(f"capacity: {'unlimited' if machines is None else machines}")
        self._capacity_ends_at = None

    def _end_faults(self) -> None:
        """End the faults that prevent the release of machines or a second `fit()`."""
        if self._capacity_ends_at is not None:
            self._set_capacity(None)

    def _has_opened_round(self) -> bool:
        try:
            view = self._refreshed_journal().view
        except SpotfitError:  # the bucket may have injected faults, or be empty
            return False
        return view.round is not None

    def _is_over(self) -> bool:
        try:
            return self._refreshed_journal().view.fit_end is not None
        except SpotfitError:
            return False

    def _refreshed_journal(self) -> Journal:
        if self._journal is None:
            # One attempt: a fault that waits for the bucket would come too late.
            self._journal = Journal(open_store(self.url, RetryPolicy(max_attempts=1)))
        self._journal.catch_up()
        return self._journal

    # --- end -----------------------------------------------------------------------------------

    def _release_machines(self) -> None:
        """Wait until no machine costs money any more."""
        deadline = self._clock.now() + _RELEASE_TIMEOUT_S
        while True:
            self.machines = list(self.sim.call_simulator("machines"))
            active = [one["number"] for one in self.machines if one["state"] != "over"]
            if not active:
                return
            if self._clock.now() >= deadline:
                self.violations.append(
                    f"machines {active} are rented {_RELEASE_TIMEOUT_S:.0f} s after fit()"
                )
                return
            self._clock.wait(_POLL_INTERVAL_S)

    def _end_cloud(self) -> list[str]:
        self.sim.call_simulator("leave", {"machines": False})
        return self.find_leftovers(_CLEANUP_TIMEOUT_S)


# --- checks -----------------------------------------------------------------------------------


def find_violations(run: CloudChaosRun, audit: RunAudit) -> list[str]:
    """Return the violations of a run."""
    events = _events_of(run)
    counts = check_machine_count(run.plan, run.machines, events, fits=len(run.outcomes))
    checks = [*run.violations, *counts, *_check_bill(run, audit)]
    # Every fault of the API ends well before the limits after which users get this advice.
    if _UNANSWERED in (read_text(run.folder / "logs" / "driver.log") or ""):
        checks.append(f"fit() has logged {_UNANSWERED}, but the cloud answers")
    if run.plan.firewall:
        checks += [f"leftover: {one}" for one in audit.leftovers]
        last = run.outcomes[-1]
        return checks if last is None else [*checks, *check_refused_run(run.plan, last)]
    expected = reference_jobs.expected_hash_chain(run.plan.steps)
    if None not in run.outcomes:
        checks += _check_outcomes(run)
    checks += audit.find_violations(expected, steps=run.plan.steps)
    checks += _check_failure_counts(run, audit, events)
    if run.plan.time_budget_s is not None:
        checks += _check_saved_state(run, audit, events)
    return checks


def _check_bill(run: CloudChaosRun, audit: RunAudit) -> list[str]:
    """Check the record of machine-seconds against the cloud's.

    The certain ones are at most those that the cloud bills, which include the boot. The maximum is
    at least the time from the start of the agents, with which the record of some clouds begins.
    """
    ended = [one for one in run.machines if one["ended_at_s"] is not None]
    billed_s = sum(one["ended_at_s"] - one["created_at_s"] for one in ended)
    booted_s = sum(one["ended_at_s"] - (one["started_at_s"] or one["ended_at_s"]) for one in ended)
    bill = bill_of(audit.view, wall_ms())
    # Machines that have not ended are reported as such.
    if len(ended) < len(run.machines) or (
        bill.machine_s <= billed_s + _CLOCK_TOLERANCE_S
        and booted_s <= bill.max_machine_s + _CLOCK_TOLERANCE_S
    ):
        return []
    return [
        f"the cloud bills {billed_s:.2f} machine-seconds, {booted_s:.2f} of them after boots; the "
        f"run {bill.machine_s:.2f} to {bill.max_machine_s:.2f}"
    ]


def _check_outcomes(run: CloudChaosRun) -> list[str]:
    *first, last = run.outcomes
    violations = []
    # A budget that was not used up is a late fault, and no error.
    if first and first[0] and first[0].error not in ("", "TimeBudgetExceededError"):
        violations.append(f"the first fit() raised {first[0].error}: {first[0].text}")
    if last is not None and last.error:
        violations.append(f"fit() raised {last.error}: {last.text}")
    return violations


def check_refused_run(plan: CloudChaosPlan, outcome: DriverOutcome) -> list[str]:
    """Return a violation if a run behind a firewall did not end with the remedy."""
    kind = Unreachable.LEADER if plan.firewall == "machines" else Unreachable.STORAGE
    remedy = unreachable_remedy(kind)
    if outcome.error != "ControllerError" or remedy not in outcome.text:
        return [f"fit() did not end with the remedy {remedy!r}: {outcome}"]
    return []


def check_machine_count(
    plan: CloudChaosPlan,
    machines: Sequence[Mapping[str, Any]],
    events: Sequence[JournalEvent],
    *,
    fits: int,
) -> list[str]:
    """Return a violation if machines were rented without need. `fits`: calls of `fit()`.

    reason to rent a machine                                    | number
    ------------------------------------------------------------|----------------------------------
    a fit needs it                                              | `plan.machines` for each `fit()`
    one was preempted, had a notice, or exceeded its memory     | 1 each, as the cloud has recorded
    one was killed during its notice: its backend restarts it   | 1 each
    although its replacement is requested (decision 0051)       |
    too few were granted for a round, so one was released       | 1 for each released machine
    the first machine that cannot reach the leader or bucket    | 1
    """
    lost = sum(
        one["end_reason"] in (RECLAIMED, OUT_OF_MEMORY) or one["noticed_at_s"] is not None
        for one in machines
    )
    restarted = sum(
        one["noticed_at_s"] is not None and one["exit_code"] is None for one in machines
    )
    released = sum(isinstance(event, NodeLost) and event.is_unused for event in events)
    unreachable = 1 if plan.firewall else 0
    allowed = plan.machines * fits + lost + restarted + released + unreachable
    if len(machines) <= allowed:
        return []
    return [
        f"{len(machines)} machines were rented, at most {allowed} were needed: {lost} lost, "
        f"{restarted} killed during a notice, {released} released"
    ]


def _check_failure_counts(
    run: CloudChaosRun, audit: RunAudit, events: Sequence[JournalEvent]
) -> list[str]:
    """Check that only an exceeded memory limit is charged to `max_failures`."""
    charged = audit.view.failure_counts.get(FailureCause.WORKER, 0)
    expected = 1 if _has_exceeded_memory(run) else 0
    # A report that arrives after the loss is recorded comes too late (decision 0050).
    is_late = has_unreported_release(events) or any(
        isinstance(one, NodeLost) and _is_unreported(one) for one in events
    )
    if charged != expected and not (is_late and charged == 0):
        return [f"{charged} failures were charged to max_failures, expected {expected}"]
    return []


def _is_unreported(lost: NodeLost) -> bool:
    """Whether the backend had not reported the end of the machine when its loss was recorded."""
    return any(text in lost.reason for text in ("did not reconnect", "connections broke"))


def has_unreported_release(events: Sequence[JournalEvent]) -> bool:
    """Whether a machine of a round was released because too few machines were granted.

    With the partial capacity timeout of these runs, 2 s, a leader may release a machine that has
    been killed while it waits for the report of its end.
    """
    assigned = {
        (one.token, one.node)
        for event in events
        if isinstance(event, RoundOpened)
        for one in event.round.assignments
    }
    return any(
        lost.is_unused and "were granted" in lost.reason and (lost.token, lost.node) in assigned
        for lost in events
        if isinstance(lost, NodeLost)
    )


def _has_exceeded_memory(run: CloudChaosRun) -> bool:
    return any(one["end_reason"] == OUT_OF_MEMORY for one in run.machines)


def _check_saved_state(
    run: CloudChaosRun, audit: RunAudit, events: Sequence[JournalEvent]
) -> list[str]:
    """The first `fit()` has saved its state before it ended by its time budget."""
    first = run.outcomes[0]
    ends = [number for number, event in enumerate(events) if isinstance(event, FitEnded)]
    if first is None or not first.error or not ends:
        return []
    end = events[ends[0]]
    assert isinstance(end, FitEnded)
    if not end.is_time_budget or end.outcome != "cancelled" or end.last_save_error:
        return [f"the first fit() ended otherwise than by its time budget with a save: {end}"]
    rounds = {event.round.number for event in events[: ends[0]] if isinstance(event, RoundOpened)}
    reported = max((one.metrics["step"] for one in audit.reports if one.round in rounds), default=0)
    saved = max(
        (
            event.metrics["step"]
            for event in events[: ends[0]]
            if isinstance(event, CheckpointCommitted)
        ),
        default=0,
    )
    # Rank 0 may have reported the last checkpoint before another rank has.
    needed = (reported // run.plan.save_every - 1) * run.plan.save_every
    return [] if saved >= needed else [f"step {reported} was reported, but {saved} was saved"]


def _events_of(run: CloudChaosRun) -> list[JournalEvent]:
    events: list[JournalEvent] = []

    def on_entry(_slot: int, _body: bytes, entry: JournalEntry) -> None:
        events.append(entry.event)

    with contextlib.suppress(SpotfitError), environment_variables(run.environment()):
        journal = Journal(open_store(run.url), ignore_view_cache=True)
        journal.on_entry = on_entry
        journal.catch_up()
    return events


# --- the driver process -----------------------------------------------------------------------


def run_driver(mode: str, folder: Path) -> int:
    """Call `fit()` and write its outcome; with mode 'budget', within the time budget."""
    plan = msgspec.json.decode((folder / "plan.json").read_bytes(), type=CloudChaosPlan)
    _shorten_timings(plan.timings())
    try:
        result = _fit(plan, folder, plan.time_budget_s if mode == "budget" else None)
        outcome = DriverOutcome(value=str(result.return_value))
    except SpotfitError as error:
        outcome = DriverOutcome(error=type(error).__name__, text=str(error))
    # Renamed when complete.
    (folder / "result.draft").write_bytes(msgspec.json.encode(outcome))
    (folder / "result.draft").rename(folder / "result")
    return 0


def _shorten_timings(timings: Mapping[str, float]) -> None:
    module = importlib.import_module("spotfit.client.fit")
    original: Callable[..., RunTiming] = getattr(module, _TIMINGS_FUNCTION)

    def choose_timings(*arguments: Any) -> RunTiming:
        return replace(original(*arguments), **timings)

    setattr(module, _TIMINGS_FUNCTION, choose_timings)


def _fit(plan: CloudChaosPlan, folder: Path, time_budget_s: float | None) -> spotfit.Result:
    memory: dict[str, float] = {"CPU": 1, "memory": _WORKER_MEMORY_BYTES}
    config: dict[str, Any] = {
        "steps": plan.steps,
        "save_every": plan.save_every,
        "step_s": plan.step_s,
    }
    if plan.memory_use is not None:
        config["memory_use"] = {
            "step": plan.memory_use.step,
            "rank": plan.memory_use.rank,
            "size_bytes": 2 * _WORKER_MEMORY_BYTES,
            "marker": str(folder / "memory_used"),
        }
    return spotfit.DataParallelTrainer(
        reference_jobs.train_hash_chain,
        train_loop_config=config,
        scaling_config=spotfit.ScalingConfig(
            num_workers=plan.machines,
            resources_per_worker=memory if plan.memory_use is not None else None,
        ),
        run_config=spotfit.RunConfig(
            name=plan.name,
            storage_path=plan.storage_path(folder),
            failure_config=spotfit.FailureConfig(max_failures=1 if plan.memory_use else 0),
            checkpoint_config=spotfit.CheckpointConfig(num_to_keep=2),
            time_budget_s=time_budget_s,
        ),
        provisioner=plan.provisioner(folder),
    ).fit()


# --- many runs --------------------------------------------------------------------------------


def run_plan(
    plan: CloudChaosPlan, folder: Path, proxy_url: str, *, timeout_s: float
) -> ChaosOutcome:
    """Execute a plan in a directory below `folder`, which is kept if a check fails."""
    files = folder / str(plan.seed)
    chaos_run = CloudChaosRun(plan, files, proxy_url)
    try:
        audit = chaos_run.execute(timeout_s=timeout_s)
    finally:
        # Also after an exception: the next run must not meet processes of this one.
        chaos_run.kill_all()
    violations = find_violations(chaos_run, audit)
    effective = sum(audit.was_active_at(at_ms) for at_ms in chaos_run.fault_times_ms)
    effective += _has_exceeded_memory(chaos_run)
    # Firewalls and time budgets.
    ends = chaos_run.outcomes if plan.firewall else chaos_run.outcomes[:-1]
    effective += any(one is not None and bool(one.error) for one in ends)
    others = (plan.memory_use, plan.firewall or None, plan.time_budget_s)
    planned = len(plan.faults) + sum(one is not None for one in others)
    log_lines = chaos_run.event_lines()
    log_lines.append(f"{len(chaos_run.machines)} machines rented")
    if not violations:
        shutil.rmtree(files)
    duration_s = max(0, (audit.ended_ms or 0) - chaos_run.started_ms) / 1000
    return ChaosOutcome(log_lines, violations, effective, planned - effective, duration_s)


def run(seeds: Sequence[int], *, folder: Path, timeout_s: float = 120.0) -> LiveChaosSummary:
    """Execute the plans of the seeds, and print each outcome."""

    def run_seed(seed: int, proxy_url: str) -> tuple[ChaosOutcome, str]:
        plan = random_cloud_plan(seed)
        outcome = run_plan(plan, folder, proxy_url, timeout_s=timeout_s)
        return outcome, (
            f"{plan.machines} machines of {plan.cloud} on {plan.store}, "
            f"{', '.join(sorted(plan.fault_kinds()))}; {outcome.duration_s:.1f} s, "
            f"{outcome.effective_kills} faults effective"
        )

    return run_seeds(seeds, folder, run_seed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; the exit code is the number of failed runs, at most 99."""
    options = argument_parser(__doc__).parse_args(arguments)
    if options.act:
        return run_driver(options.act[0], Path(options.act[1]))
    return run_from_command_line(
        options, lambda seeds, folder: run(seeds, folder=folder, timeout_s=options.within)
    )


if __name__ == "__main__":
    sys.exit(main())
