"""The cost of a preemption on each simulated cloud, and the requests of an undisturbed run.

    python benchmarks/clouds.py reclaim           # machines boot for 30 s; notice 60 s before
    python benchmarks/clouds.py idle              # 16 machines, requests per hour
    python benchmarks/clouds.py reclaim --clouds aws_batch kubernetes

Real client libraries, agents and workers; only the cloud behind its API is simulated.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import boto3

import spotfit
from benchmarks.measure import RESULTS, machine
from benchmarks.tables import markdown
from spotfit.ledger.journal import Journal
from spotfit.model.view import JournalView
from spotfit.store.factory import open_store
from spotfit_localsim.clouds.options import CLOUDS
from spotfit_localsim.clouds.provisioner import SimProvisioner
from spotfit_localsim.live import network_faults

BOOT_S, NOTICE_S = 30.0, 60.0
IDLE_MACHINES = 16
SETTLE_S, WATCH_S = 20.0, 120.0
TIMEOUT_S = 300.0
_POLL_INTERVAL_S = 0.05


# --- training functions ---------------------------------------------------------------------------


def steps(config: dict[str, Any]) -> None:
    """Execute ten steps per second with a barrier, and save every tenth; record the times."""
    import tempfile as temporary
    import uuid

    attempt, step = uuid.uuid4().hex, 0
    rank = spotfit.get_context().get_world_rank()
    if checkpoint := spotfit.get_checkpoint():
        with checkpoint.as_directory() as directory:
            step = int(Path(directory, "step").read_text())
    step_log = Path(config["step_log"], f"{rank}-{attempt}")
    stop_file = Path(config["step_log"], "stop")
    while not spotfit.collective.broadcast_from_rank_zero(stop_file.exists()):
        time.sleep(0.1)
        step += 1
        with step_log.open("a") as lines:
            lines.write(f"{time.time()}\n")
        with temporary.TemporaryDirectory() as directory:
            Path(directory, "step").write_text(str(step))
            saved = rank == 0 and step % 10 == 0
            spotfit.report(
                {"step": step},
                checkpoint=spotfit.Checkpoint.from_directory(directory) if saved else None,
            )


def report_slowly(config: dict[str, Any]) -> None:
    """Compute for ten seconds, report, and repeat."""
    for step in range(config["reports"]):
        time.sleep(10.0)
        spotfit.report({"step": step})


# --- preemption -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reclaim:
    """Durations of the preemption of one of two machines."""

    cloud: str
    notice: bool
    to_next_round_s: float
    """From the notice, or from the loss without one, to the first step of the next round."""
    stopped_s: float
    """From the last step of the first round to the first step of the second."""


def reclaim(cloud: str, *, notice: bool, boot_s: float = BOOT_S) -> Reclaim:
    """Train on two machines and preempt one when both are training."""
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        running_cloud(cloud, folder, boot_s=boot_s, notice_s=NOTICE_S) as sim,
    ):
        step_log = Path(folder, "step_log")
        step_log.mkdir()
        handle = spotfit.DataParallelTrainer(
            steps,
            train_loop_config={"step_log": str(step_log)},
            scaling_config=spotfit.ScalingConfig(num_workers=2),
            run_config=spotfit.RunConfig(storage_path=f"{folder}/runs", name="run"),
            provisioner=provisioner_url(sim),
        ).submit()
        wait_until(lambda: len(rounds(step_log)) == 1 and len(rounds(step_log)[0]) > 30)
        reclaimed_at = time.time()
        sim.call_simulator(
            "reclaim",
            {"notice": notice, "machine": machine_of_last_rank(sim, f"{folder}/runs/run")},
        )
        wait_until(lambda: len(rounds(step_log)) == 2)
        first, second = rounds(step_log)
        (step_log / "stop").touch()
        handle.result()
    return Reclaim(cloud, notice, second[0] - reclaimed_at, second[0] - first[-1])


def rounds(step_log: Path) -> list[list[float]]:
    """Return the times of rank 0's steps by attempt, in order."""
    step_times = [path.read_text().split("\n") for path in step_log.glob("0-*")]
    return sorted([float(line) for line in lines if line] for lines in step_times)


def machine_of_last_rank(sim: SimProvisioner, url: str) -> int:
    """Return the number of the machine of the last rank."""
    round_ = view_of(url).round
    assert round_ is not None
    host = round_.assignments[-1].host
    return next(
        int(one["number"]) for one in sim.call_simulator("machines") if one["address"] == host
    )


# --- idle requests --------------------------------------------------------------------------------


@dataclass(frozen=True)
class IdleRequests:
    """Requests per hour of an undisturbed run."""

    cloud: str
    machines: int
    observe_s: float
    to_cloud: float
    to_bucket: Mapping[str, float]


def idle(cloud: str, *, machines: int = IDLE_MACHINES, watch_s: float = WATCH_S) -> IdleRequests:
    """Train on that many machines, and count requests to the cloud and to the bucket."""
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        counting_s3_server() as endpoint,
        running_cloud(cloud, folder, observe_s=observe_interval_of(cloud)) as sim,
    ):
        run = f"s3://bench/{cloud}?endpoint_url={endpoint}"
        handle = spotfit.DataParallelTrainer(
            report_slowly,
            train_loop_config={"reports": 10_000},
            scaling_config=spotfit.ScalingConfig(num_workers=machines),
            run_config=spotfit.RunConfig(storage_path=run, name="run"),
            provisioner=provisioner_url(sim),
        ).submit()
        wait_until(lambda: view_of(handle.url).round)
        time.sleep(SETTLE_S)
        cloud_before, bucket_before = (
            sim.call_simulator("asked"),
            network_faults.fetch_request_counts(endpoint),
        )
        began = time.time()
        time.sleep(watch_s)
        hours = (time.time() - began) / 3600
        cloud_after, bucket_after = (
            sim.call_simulator("asked"),
            network_faults.fetch_request_counts(endpoint),
        )
        handle.cancel()
        with contextlib.suppress(spotfit.RunCancelledError):
            handle.result()
    return IdleRequests(
        cloud,
        machines,
        sim.options.observe_s,
        (sum(cloud_after.values()) - sum(cloud_before.values())) / hours,
        {kind: (n - bucket_before.get(kind, 0)) / hours for kind, n in bucket_after.items()},
    )


@contextlib.contextmanager
def counting_s3_server() -> Iterator[str]:
    """Run an S3 server that counts its requests; yields its address."""
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "bench",
        "AWS_SECRET_ACCESS_KEY": "bench",
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }
    command = [sys.executable, "-m", "spotfit_localsim.live.network_faults"]
    serving = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert serving.stdout is not None
    try:
        endpoint = serving.stdout.readline().strip()
        boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1").create_bucket(
            Bucket="bench"
        )
        yield endpoint
    finally:
        serving.kill()
        serving.wait()


def observe_interval_of(cloud: str) -> float:
    """Return the polling interval of the cloud's provisioner."""
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        running_cloud(cloud, folder) as sim,
    ):
        traits = sim._cloud_provisioner.traits  # noqa: SLF001  # the traits of the simulator have a shorter interval
        return traits.observe_interval_s


# --- shared ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def running_cloud(cloud: str, folder: str, **options: Any) -> Iterator[SimProvisioner]:
    """Run the simulated cloud; all machines are terminated at the end."""
    sim = SimProvisioner.with_options(cloud=cloud, root=f"{folder}/cloud", **options)
    sim.start_simulator()
    try:
        yield sim
    finally:
        sim.call_simulator("leave", {"machines": True})


def provisioner_url(sim: SimProvisioner) -> str:
    """Return the provisioner URL for a trainer."""
    options = sim.options
    return f"sim://{options.cloud}?root={sim.root}&observe_s={options.observe_s}&notice_s={options.notice_s}"


def view_of(url: str) -> JournalView:
    return Journal(open_store(url)).catch_up()


def wait_until(condition: Callable[[], Any]) -> None:
    deadline = time.time() + TIMEOUT_S
    while not condition():
        if time.time() > deadline:
            raise TimeoutError(f"not within {TIMEOUT_S:.0f} s")
        time.sleep(_POLL_INTERVAL_S)


def reclaim_table(found: Sequence[Reclaim], boot_s: float) -> str:
    rows = []
    for cloud in dict.fromkeys(one.cloud for one in found):
        with_notice, without_notice = (
            next(one for one in found if one.cloud == cloud and one.notice is notice)
            for notice in (True, False)
        )
        after_loss_s = NOTICE_S + without_notice.to_next_round_s
        rows.append(
            (
                cloud,
                f"{with_notice.to_next_round_s:.1f} s",
                f"{after_loss_s:.1f} s",
                f"{with_notice.stopped_s:.1f} s",
                f"{without_notice.stopped_s:.1f} s",
                f"{without_notice.stopped_s - boot_s:.1f} s",
            )
        )
    head = (
        "cloud",
        "notice to next round",
        "if replaced only after the loss",
        "training stops, with notice",
        "training stops, without",
        "of that not boot time",
    )
    return markdown(head, rows)


def idle_table(found: Sequence[IdleRequests]) -> str:
    rows = [
        (
            one.cloud,
            f"{one.observe_s:.0f} s",
            f"{one.to_cloud:.0f}",
            ", ".join(f"{n:.0f} {kind}" for kind, n in sorted(one.to_bucket.items()) if n),
        )
        for one in found
    ]
    return markdown(("cloud", "observed every", "cloud requests / h", "bucket requests / h"), rows)


def write_result(name: str, found: Sequence[Any], table: str) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    result = {"figure": name, "machine": machine(), "measurements": [asdict(one) for one in found]}
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1))
    (RESULTS / f"{name}.md").write_text(table)
    print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("reclaim", "idle"))
    parser.add_argument("--clouds", nargs="+", default=sorted(CLOUDS), choices=sorted(CLOUDS))
    parser.add_argument("--boot-s", type=float, default=BOOT_S)
    parser.add_argument("--machines", type=int, default=IDLE_MACHINES)
    args = parser.parse_args()
    if args.what == "reclaim":
        reclaims = [
            reclaim(cloud, notice=notice, boot_s=args.boot_s)
            for cloud in args.clouds
            for notice in (True, False)
        ]
        write_result("cloud_reclaims", reclaims, reclaim_table(reclaims, args.boot_s))
    else:
        idle_requests = [idle(cloud, machines=args.machines) for cloud in args.clouds]
        write_result("cloud_idle_requests", idle_requests, idle_table(idle_requests))


if __name__ == "__main__":
    main()
