"""Random faults in runs of real processes; the result of the training must not change.

`python -m spotfit_localsim.live.chaos --seeds 20` runs small trainings of four workers on two
nodes. The seed decides the training job, the store, the network faults, and which processes are
killed when. Invariants: the result equals that of an undisturbed run, no committed checkpoint
is lost, no step counts twice, no machine is started twice, and no process or directory is left.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
from msgspec.structs import replace

import spotfit
from spotfit.agent import driver
from spotfit.core.errors import RunNotFoundError, TransientStoreError
from spotfit.fork_server.fork_client import ForkServerPool
from spotfit.host import env
from spotfit.host.system import SystemClock, wall_ms
from spotfit.ledger import keys
from spotfit.provision.launch import AgentAssignment
from spotfit.store.factory import open_store
from spotfit_localsim.live import crash_points, network_faults, reference_jobs, reference_saves
from spotfit_localsim.live.chaos_runs import (
    CLEANUP_TIMEOUT_S,
    ChaosOutcome,
    LiveChaosSummary,
    LiveRun,
    argument_parser,
    environment_variables,
    read_text,
    run_from_command_line,
    run_seeds,
)
from spotfit_localsim.live.crash_points import CHAOS_DIR_ENV, CRASH_POINTS, InjectedCrash
from spotfit_localsim.live.kill_targets import (
    KillTargets,
    TargetKind,
)
from spotfit_localsim.live.post_checks import RunAudit
from spotfit_localsim.random_streams import RandomStream, SeededStreams
from spotfit_provisioners.local.options import LocalOptions
from spotfit_provisioners.local.state_dir import LocalCloudDir

_MODULE = "spotfit_localsim.live.chaos"
_AGENT_FUNCTION = f"{_MODULE}:serve"
_WORKERS, _NODES = 4, 2
_POLL_INTERVAL_S = 0.01
# Kills of a replay come within this fraction of the previous run's duration.
_REPLAY_TIME_FRACTION = 0.6
_MAX_REPLAYS = 3
"""A run that ended before its kills proves nothing: it is repeated, with earlier kills."""
_STALL_RANGE_S = (5.0, 30.0)
_SMALL_COUNTS = (0, 0, 1, 1, 2)
_EXTRA_STALL_TIME_S = 60.0
"""Additional time for a run in which the bucket hangs."""


class PlannedKill(msgspec.Struct, frozen=True):
    """Kill a process at a time after the start, or as soon as there is one of that kind."""

    at_s: float
    target: TargetKind


class PlannedStall(msgspec.Struct, frozen=True):
    """The bucket hangs, at a time after the start or as soon as there are workers.

    Without workers `fit()` may rightly fail because it cannot reach the bucket.
    """

    at_s: float
    duration_s: float


class PlannedCorruption(msgspec.Struct, frozen=True):
    """Corrupt a file of the latest checkpoint, as soon as there are two, and kill all machines so
    that the state is not restored from memory.
    """

    at_s: float
    kind: Literal["flip", "cut", "delete"]


ChaosJob = Literal["hash_chain", "gradient_descent", "snapshots", "checkpointer"]
"""The training function; the last two save by snapshots."""


class ChaosPlan(msgspec.Struct, frozen=True):
    """Everything that a seed decides."""

    seed: int
    job: ChaosJob
    store: Literal["file", "s3"]
    network_faults: network_faults.NetworkFaults
    kills: tuple[PlannedKill, ...]
    stall: PlannedStall | None = None
    injected_crashes: tuple[InjectedCrash, ...] = ()
    corruption: PlannedCorruption | None = None
    strategy: Literal["ddp", "fsdp2"] = "ddp"
    steps: int = 40
    save_every: int = 5
    step_s: float = 0.03
    replay: int = 0
    """How often the plan was repeated, each time with earlier kills."""

    @property
    def has_stalls(self) -> bool:
        """Whether requests to the bucket may hang, which prolongs the run."""
        return self.stall is not None or self.network_faults.stall_probability > 0

    @property
    def name(self) -> str:
        """The name of the run."""
        return f"chaos-{self.seed}-{self.replay}"

    def with_earlier_kills(self, run_duration_s: float) -> ChaosPlan:
        """Return the plan with all kills well before the time at which the run ended."""
        last = max((kill.at_s for kill in self.kills), default=0.0)
        scale = min(1.0, _REPLAY_TIME_FRACTION * run_duration_s / last) if last > 0 else 1.0
        kills = tuple(PlannedKill(kill.at_s * scale, kill.target) for kill in self.kills)
        return replace(self, kills=kills, replay=self.replay + 1)

    @property
    def workers(self) -> int:
        """The number of workers.

        Only two for torch: the order of more summands depends on timing.
        """
        return 2 if self.job == "checkpointer" else _WORKERS

    def train_config(self, folder: Path) -> dict[str, Any]:
        """The configuration of the training function."""
        return {
            "steps": self.steps,
            "save_every": self.save_every,
            "step_s": self.step_s,
            "strategy": self.strategy,
            "folder": str(folder),
        }


def random_plan(seed: int, *, torch_fraction: float = 0.1) -> ChaosPlan:
    """Return the plan of a seed; a fraction of the plans trains with torch."""
    stream = SeededStreams(seed).stream("story")
    job: Literal["hash_chain", "gradient_descent"] = (
        "gradient_descent" if stream.bernoulli(torch_fraction) else "hash_chain"
    )
    store: Literal["file", "s3"] = "s3" if stream.bernoulli(0.5) else "file"
    faults = network_faults.NetworkFaults(
        refusal_probability=stream.uniform_in((0.0, 0.05)),
        lost_response_probability=stream.uniform_in((0.0, 0.03)),
        slow_probability=stream.uniform_in((0.0, 0.1)),
        seed=seed,
    )
    kinds: list[TargetKind] = ["worker", "agent", "leader", "node", "fork_server", "driver"]
    # The time in which an undisturbed run trains; a later kill would hit nothing.
    span_s = (0.0, 3.0 if job == "hash_chain" else 8.0)
    count = 1 + min(3, int(stream.expovariate(0.8)))
    kills = [PlannedKill(stream.uniform_in(span_s), stream.choice(kinds)) for _ in range(count)]
    # Only the first one is compared with the clock.
    kills.sort(key=lambda kill: kill.at_s)
    if store == "file":
        # A directory has no network.
        return ChaosPlan(seed, job, store, network_faults.no_faults(), tuple(kills))
    faults = _add_hostile_answers(faults)
    if stream.bernoulli(0.2):
        faults = replace(faults, stall_probability=0.005, stall_s=stream.uniform_in(_STALL_RANGE_S))
    stall = (
        PlannedStall(stream.uniform_in(span_s), stream.uniform_in(_STALL_RANGE_S))
        if stream.bernoulli(0.3)
        else None
    )
    return ChaosPlan(seed, job, store, faults, tuple(kills), stall)


def _add_hostile_answers(faults: network_faults.NetworkFaults) -> network_faults.NetworkFaults:
    """Add other answers of a bucket and damaged reads to half of the seeds."""
    # From a stream of its own: the other draws of a seed stay the same.
    stream = SeededStreams(faults.seed).stream("answers")
    if stream.bernoulli(0.5):
        return faults
    return replace(
        faults,
        refusal_probability=stream.choice([faults.refusal_probability, 0.1]),
        throttled_probability=stream.uniform_in((0.0, 0.05)),
        denied_probability=stream.choice([0.0, 0.01, 0.03]),
        conflict_probability=stream.choice([0.0, 0.1, 0.3]),
        late_conflict_probability=stream.choice([0.0, 0.1, 0.3]),
        reset_probability=stream.uniform_in((0.0, 0.03)),
        flipped_probability=stream.choice([0.0, 0.005, 0.02]),
        truncated_probability=stream.choice([0.0, 0.005, 0.02]),
    )


def random_save_plan(seed: int, *, torch_fraction: float = 0.1) -> ChaosPlan:
    """Return a plan with frequent saves, in which most faults hit saves."""
    stream = SeededStreams(seed).stream("story of saves")
    job: ChaosJob = "checkpointer" if stream.bernoulli(torch_fraction) else "snapshots"
    store: Literal["file", "s3"] = "s3" if stream.bernoulli(0.6) else "file"
    span_s = (0.0, 4.0 if job == "snapshots" else 8.0)
    # A kind that occurs twice is drawn twice as often.
    kinds: list[TargetKind] = [
        "worker",
        "agent",
        "node",
        "all_machines",
        "uploader",
        "uploader",
        "driver",
    ]
    kills = [
        PlannedKill(stream.uniform_in(span_s), stream.choice(kinds))
        for _ in range(stream.choice(_SMALL_COUNTS))
    ]
    crashes = []
    for _ in range(1 + stream.choice(_SMALL_COUNTS)):
        crash_point = stream.choice(sorted(CRASH_POINTS))
        is_full = CRASH_POINTS[crash_point].can_fill_disk and stream.bernoulli(0.5)
        # Mostly one of the first calls: later ones may not happen before the end of the run.
        nth = 1 + min(7, int(stream.expovariate(0.5)))
        crashes.append(InjectedCrash(crash_point, nth, "disk_full" if is_full else "kill"))
    corruption_kinds: list[Literal["flip", "cut", "delete"]] = ["flip", "cut", "delete"]
    corruption = None
    if stream.bernoulli(0.25):
        at_s = stream.uniform_in(span_s)
        corruption = PlannedCorruption(at_s, stream.choice(corruption_kinds))
    plan = ChaosPlan(
        seed,
        job,
        store,
        network_faults.no_faults(),
        tuple(sorted(kills, key=lambda kill: kill.at_s)),
        injected_crashes=tuple(crashes),
        corruption=corruption,
        strategy="fsdp2" if stream.bernoulli(0.5) else "ddp",
        save_every=stream.choice([2, 4, 5]),
    )
    return plan if store == "file" else _add_network_faults(plan, stream, span_s)


def _add_network_faults(
    plan: ChaosPlan, stream: RandomStream, span_s: tuple[float, float]
) -> ChaosPlan:
    faults = _add_hostile_answers(
        network_faults.NetworkFaults(
            refusal_probability=stream.uniform_in((0.0, 0.1)),
            lost_response_probability=stream.uniform_in((0.0, 0.05)),
            slow_probability=stream.uniform_in((0.0, 0.3)),
            slow_latency_s=stream.uniform_in((0.1, 1.0)),
            seed=plan.seed,
        )
    )
    stall = (
        PlannedStall(stream.uniform_in(span_s), stream.uniform_in(_STALL_RANGE_S))
        if stream.bernoulli(0.1)
        else None
    )
    return replace(plan, network_faults=faults, stall=stall)


# --- one run ----------------------------------------------------------------------------------


class ChaosRun(LiveRun):
    """One execution of a plan."""

    driver_module = _MODULE

    def __init__(self, plan: ChaosPlan, folder: Path, proxy_url: str) -> None:
        super().__init__(plan, folder, proxy_url)
        self.plan = plan
        self.cloud_dir = LocalCloudDir(folder / "machines")
        self.storage_path = "s3://chaos/runs" if plan.store == "s3" else str(folder / "store")
        self.url = f"{self.storage_path}/{plan.name}"
        self.kill_times_ms: list[int] = []
        """Times of the kills."""
        self.triggered_crash_count = 0
        """Number of triggered crash points."""
        self.corrupted_checkpoints: set[str] = set()
        """Checkpoints with a corrupted file."""
        crash_points.write_injected_crashes(plan.injected_crashes, folder)

    def execute(self, *, timeout_s: float) -> RunAudit:
        """Execute the plan and return the audit of the run."""
        if self.plan.store == "s3":
            # Without the faults of the previous run, until the bucket exists.
            network_faults.set_faults(self.proxy_url, network_faults.no_faults())
            bucket = urllib.request.Request(f"{self.proxy_url}/chaos", method="PUT")  # noqa: S310  # loopback
            urllib.request.urlopen(bucket).close()  # noqa: S310  # as above
            network_faults.set_faults(self.proxy_url, self.plan.network_faults)
        is_finished = self._run_to_end(timeout_s + _EXTRA_STALL_TIME_S * self.plan.has_stalls)
        if self.plan.store == "s3":
            network_faults.set_faults(self.proxy_url, network_faults.no_faults())
        # Faults are off: what is left now is left for good.
        leftovers = self.find_leftovers(max(CLEANUP_TIMEOUT_S, timeout_s / 2))
        triggered = crash_points.triggered_crashes(self.folder)
        self.triggered_crash_count = len(triggered)
        for at_ms, text in triggered:
            self.kill_times_ms.append(at_ms)
            self.log(f"{(at_ms - self.started_ms) / 1000:6.2f} s  {text}")
        with environment_variables(self.environment()):
            return RunAudit.read(
                url=self.url,
                result=read_text(self.folder / "result") if is_finished else None,
                machine_starts=(read_text(self.folder / "machine_starts") or "").splitlines(),
                leftovers=leftovers,
                corrupted_checkpoints=self.corrupted_checkpoints,
            )

    def _run_to_end(self, timeout_s: float) -> bool:
        clock = SystemClock()
        started_at, self.started_ms = clock.now(), wall_ms()
        kills, stall = list(self.plan.kills), self.plan.stall
        corruption = self.plan.corruption
        driver_process = self.start_driver("fit")
        targets = KillTargets(self.cloud_dir, self.url)
        while clock.now() - started_at < timeout_s:
            with environment_variables(self.environment()):
                self._kill_if_due(kills, targets, driver_process, clock.now() - started_at)
            if corruption is not None and clock.now() - started_at >= corruption.at_s:
                with environment_variables(self.environment()):
                    corruption = (
                        None
                        if self._corrupt_checkpoint(corruption, targets, clock.now() - started_at)
                        else corruption
                    )
            if stall is not None and clock.now() - started_at >= stall.at_s and targets.has_workers:
                network_faults.start_stall(self.proxy_url, stall.duration_s)
                self.log(
                    f"{clock.now() - started_at:6.2f} s  bucket hangs for {stall.duration_s:.1f} s"
                )
                stall = None
            code = driver_process.poll()
            if code == 0:
                return True
            # Killed by the plan: a user would attach to the run from another process.
            if code == -signal.SIGKILL:
                driver_process = self.start_driver("attach")
            elif code is not None:
                self.log(f"the driver exited with code {code}: {self.last_line_of_driver()}")
                return False
            clock.wait(_POLL_INTERVAL_S)
        self.log(f"the run has not ended within {timeout_s:.0f} s")
        driver_process.kill()
        driver_process.wait()
        return False

    def _kill_if_due(
        self,
        kills: list[PlannedKill],
        targets: KillTargets,
        driver_process: subprocess.Popen[bytes],
        elapsed_s: float,
    ) -> None:
        if not kills or elapsed_s < kills[0].at_s:
            return
        target = kills[0].target
        # By the number of the kill: a replay of the plan kills the same process.
        stream = SeededStreams(self.plan.seed).stream(f"victim {len(kills)}")
        if target == "driver":
            driver_process.kill()
            driver_process.wait()
            description: str | None = f"the driver {driver_process.pid}"
        else:
            description = targets.kill(target, stream)
        # Without a process of that kind the kill is tried again in the next poll.
        if description is not None:
            kills.pop(0)
            self.kill_times_ms.append(wall_ms())
            self.log(f"{elapsed_s:6.2f} s  killed {description}")

    def _corrupt_checkpoint(
        self, corruption: PlannedCorruption, targets: KillTargets, elapsed_s: float
    ) -> bool:
        """Corrupt a file that no other checkpoint shares; return whether there was a checkpoint."""
        # At least two: the run falls back to the one before.
        latest = targets.latest_checkpoint(2)
        if latest is None:
            return False
        store = open_store(self.url)
        stream = SeededStreams(self.plan.seed).stream("harm")
        files = [
            info.key
            for info in store.list(latest)
            # The large constant chunk is shared by all checkpoints, so its loss would end the run.
            if info.size_bytes < reference_saves.FROZEN_BYTES
        ]
        files += [info.key for info in store.list(f"{keys.MANIFESTS}{latest}")]
        if not files:
            return False
        self.corrupted_checkpoints.add(latest)
        key = stream.choice(sorted(files))
        body = bytearray(store.get(key))
        if corruption.kind == "delete":
            store.delete(key)
        else:
            if corruption.kind == "cut":
                del body[len(body) // 2 :]
            elif not body:  # no byte to flip
                body.append(1)
            else:
                body[int(stream.random() * len(body))] ^= 1
            store.put(key, bytes(body))
        # Without its machines the run must restore from the bucket.
        description = targets.kill("all_machines", stream)
        self.log(f"{elapsed_s:6.2f} s  {corruption.kind} {key}; killed {description}")
        return True

    def leftover_paths(self) -> list[str]:
        """Return the paths that must not exist after the run."""
        # `walk` ignores directories that other processes remove meanwhile.
        return super().leftover_paths() + [
            str(Path(path, name))
            for path, folders, files in os.walk(self.cloud_dir.path)
            for name in (*folders, *files)
        ]


# --- processes of a run -----------------------------------------------------------------------


def serve(assignment: AgentAssignment, *, fork_servers: ForkServerPool) -> int:
    """Run an agent of a chaos run: record the start, redirect the output, arm crash points."""
    folder = Path(env.lookup(CHAOS_DIR_ENV) or "")
    with (folder / "machine_starts").open("a") as starts:
        starts.write(f"{assignment.token} {assignment.node} {os.getpid()}\n")
    log = (folder / "logs" / f"{assignment.token}-{assignment.node}.log").open("a")
    with log:
        # File descriptors, not sys.stdout: child processes inherit them.
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    # After the redirection, so that a traceback of the crash is kept.
    crash_points.arm("agent")
    return driver.serve(assignment, fork_servers=fork_servers)


def run_driver(mode: str, folder: Path) -> int:
    """The driver process: call `fit()`, or attach to the run of a killed driver."""
    plan = msgspec.json.decode((folder / "plan.json").read_bytes(), type=ChaosPlan)
    result = None
    while result is None:
        try:
            run_url = read_text(folder / "url")
            if mode == "attach" and run_url:
                with contextlib.suppress(RunNotFoundError):
                    result = spotfit.attach(run_url).result()
            # The driver may have been killed before it started the run.
            result = result or _fit(plan, folder)
        except TransientStoreError:
            # The bucket was unavailable for longer than the retry budget: a user would try again.
            mode = "attach"
    # Renamed when complete: the driver may be killed while it writes.
    (folder / "result.draft").write_text(str(result.return_value))
    (folder / "result.draft").rename(folder / "result")
    return 0


def _fit(plan: ChaosPlan, folder: Path) -> spotfit.Result:
    storage = "s3://chaos/runs" if plan.store == "s3" else str(folder / "store")
    (folder / "url").write_text(f"{storage}/{plan.name}")
    trainer: Callable[..., spotfit.DataParallelTrainer] = spotfit.DataParallelTrainer
    if plan.job not in ("hash_chain", "snapshots"):
        # Imported late: most plans do without torch, which takes seconds to import.
        from spotfit.torch import TorchTrainer

        trainer = TorchTrainer
    return trainer(
        _TRAIN_FUNCTIONS[plan.job],
        train_loop_config=plan.train_config(folder),
        scaling_config=spotfit.ScalingConfig(num_workers=plan.workers),
        run_config=spotfit.RunConfig(
            name=plan.name,
            storage_path=storage,
            failure_config=spotfit.FailureConfig(max_failures=-1),
            checkpoint_config=spotfit.CheckpointConfig(num_to_keep=2),
        ),
        provisioner=LocalOptions(
            nodes=_NODES, root=str(folder / "machines"), agent=_AGENT_FUNCTION
        ),
    ).fit()


_TRAIN_FUNCTIONS: dict[ChaosJob, Callable[..., Any]] = {
    "hash_chain": reference_jobs.train_hash_chain,
    "gradient_descent": reference_jobs.train_gradient_descent,
    "snapshots": reference_saves.train_with_snapshots,
    "checkpointer": reference_saves.train_with_checkpointer,
}


# --- many runs --------------------------------------------------------------------------------


class ChaosRunner:
    """Executes plans; directories of failed runs are kept."""

    def __init__(self, folder: Path, *, timeout_s: float) -> None:
        self._folder = folder
        self._timeout_s = timeout_s
        self._expected_results: dict[str, str] = {}

    def run_plan(self, plan: ChaosPlan, proxy_url: str) -> ChaosOutcome:
        """Execute the plan and audit the run; repeat it with earlier kills if some were late."""
        expected = self._expected_result(plan, proxy_url)
        while True:
            outcome = self._run_once(plan, proxy_url, expected)
            # A kill after the end tests nothing: the plan is repeated with earlier kills.
            if outcome.violations or not outcome.late_kills or plan.replay + 1 == _MAX_REPLAYS:
                return outcome
            plan = plan.with_earlier_kills(outcome.duration_s)

    def _run_once(self, plan: ChaosPlan, proxy_url: str, expected: str) -> ChaosOutcome:
        folder = self._folder / str(plan.seed)
        chaos_run = ChaosRun(plan, folder, proxy_url)
        try:
            audit = chaos_run.execute(timeout_s=self._timeout_s)
        finally:
            # Also after an exception: the next run must not meet processes of this one.
            chaos_run.kill_all()
        violations = audit.find_violations(expected, steps=plan.steps)
        if corruption := read_text(folder / "corruption"):
            violations.append(f"the restored state differs from the saved one: {corruption}")
        log_lines = chaos_run.event_lines()
        if not violations:
            shutil.rmtree(folder)
        # Kills and crash points count if the run had not ended.
        effective = sum(audit.was_active_at(killed_ms) for killed_ms in chaos_run.kill_times_ms)
        duration_s = max(0, (audit.ended_ms or 0) - chaos_run.started_ms) / 1000
        late = max(0, len(plan.kills) + chaos_run.triggered_crash_count - effective)
        return ChaosOutcome(log_lines, violations, effective, late, duration_s)

    def _expected_result(self, plan: ChaosPlan, proxy_url: str) -> str:
        if plan.job in ("hash_chain", "snapshots"):
            return reference_jobs.expected_hash_chain(plan.steps)
        key = f"{plan.job}-{plan.strategy}"
        # One reference run for each job and strategy.
        if key not in self._expected_results:
            faults = network_faults.no_faults()
            reference_plan = ChaosPlan(
                0, plan.job, "file", faults, (), strategy=plan.strategy, step_s=0.0
            )
            folder = self._folder / f"undisturbed-{key}"
            chaos_run = ChaosRun(reference_plan, folder, proxy_url)
            audit = chaos_run.execute(timeout_s=self._timeout_s)
            self._expected_results[key] = audit.result or "the reference run failed"
            shutil.rmtree(folder)
        return self._expected_results[key]


class ChaosPlanFactory(Protocol):
    """Returns the plan of a seed."""

    def __call__(self, seed: int, *, torch_fraction: float) -> ChaosPlan: ...


def run(
    seeds: Sequence[int],
    *,
    folder: Path,
    timeout_s: float = 120.0,
    torch_fraction: float = 0.1,
    plan_for: ChaosPlanFactory | None = None,
) -> LiveChaosSummary:
    """Execute the plans of the seeds, and print each outcome."""
    plan_for = plan_for or random_plan
    runner = ChaosRunner(folder, timeout_s=timeout_s)

    def run_seed(seed: int, proxy_url: str) -> tuple[ChaosOutcome, str]:
        plan = plan_for(seed, torch_fraction=torch_fraction)
        outcome = runner.run_plan(plan, proxy_url)
        return outcome, (
            f"{plan.job} on {plan.store}, {outcome.effective_kills} of {len(plan.kills)} kills and "
            f"{len(plan.injected_crashes)} crash points effective"
        )

    return run_seeds(seeds, folder, run_seed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; the exit code is the number of failed runs, at most 99."""
    parser = argument_parser(__doc__)
    parser.add_argument("--torch", type=float, default=0.1, help="fraction of runs with torch")
    parser.add_argument("--saves", action="store_true", help="only runs that save by Checkpointer")
    options = parser.parse_args(arguments)
    if options.act:
        return run_driver(options.act[0], Path(options.act[1]))
    return run_from_command_line(
        options,
        lambda seeds, folder: run(
            seeds,
            folder=folder,
            timeout_s=options.within,
            torch_fraction=options.torch,
            plan_for=random_save_plan if options.saves else random_plan,
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
