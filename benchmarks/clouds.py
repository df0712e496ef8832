"""The cost of a preemption on each simulated cloud, and the requests of an undisturbed run.

    python benchmarks/clouds.py reclaim           # machines boot for 30 s; notice 60 s before
    python benchmarks/clouds.py idle              # 16 machines, requests an hour
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
PATIENCE_S = 300.0
_LOOK_S = 0.05


# --- the trainings --------------------------------------------------------------------------------


def steps(config: dict[str, Any]) -> None:
    """Execute ten steps per second with a barrier, with a checkpoint every tenth; record time and
    attempt."""
    import tempfile as temporary
    import uuid

    attempt, step = uuid.uuid4().hex, 0
    rank = spotfit.get_context().get_world_rank()
    if checkpoint := spotfit.get_checkpoint():
        with checkpoint.as_directory() as directory:
            step = int(Path(directory, "step").read_text())
    diary = Path(config["diary"], f"{rank}-{attempt}")
    enough = Path(config["diary"], "enough")
    while not spotfit.collective.broadcast_from_rank_zero(enough.exists()):
        time.sleep(0.1)
        step += 1
        with diary.open("a") as lines:
            lines.write(f"{time.time()}\n")
        with temporary.TemporaryDirectory() as directory:
            Path(directory, "step").write_text(str(step))
            saved = rank == 0 and step % 10 == 0
            spotfit.report(
                {"step": step},
                checkpoint=spotfit.Checkpoint.from_directory(directory) if saved else None,
            )


def rest(config: dict[str, Any]) -> None:
    """Compute for ten seconds, report, and repeat."""
    for step in range(config["reports"]):
        time.sleep(10.0)
        spotfit.report({"step": step})


# --- a reclaim ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reclaim:
    """Seconds, for one preempted machine of two."""

    cloud: str
    notice: bool
    until_next_s: float
    """From the notice, or the loss where there was none, to the first step of the next round."""
    standstill_s: float
    """From the last step of the one round to the first of the next."""


def reclaim(cloud: str, *, notice: bool, boot_s: float = BOOT_S) -> Reclaim:
    """Train on two machines and preempt one when both are training."""
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        simulated(cloud, folder, boot_s=boot_s, notice_s=NOTICE_S) as sim,
    ):
        diary = Path(folder, "diary")
        diary.mkdir()
        handle = spotfit.DataParallelTrainer(
            steps,
            train_loop_config={"diary": str(diary)},
            scaling_config=spotfit.ScalingConfig(num_workers=2),
            run_config=spotfit.RunConfig(storage_path=f"{folder}/runs", name="run"),
            provisioner=address(sim),
        ).submit()
        until(lambda: len(rounds(diary)) == 1 and len(rounds(diary)[0]) > 30)
        struck_at = time.time()
        sim.call_simulator(
            "reclaim", {"notice": notice, "machine": at_work(sim, f"{folder}/runs/run")}
        )
        until(lambda: len(rounds(diary)) == 2)
        first, second = rounds(diary)
        (diary / "enough").touch()
        handle.result()
    return Reclaim(cloud, notice, second[0] - struck_at, second[0] - first[-1])


def rounds(diary: Path) -> list[list[float]]:
    """Return the times of rank 0's steps by attempt, in order."""
    told = [path.read_text().split("\n") for path in diary.glob("0-*")]
    return sorted([float(line) for line in lines if line] for lines in told)


def at_work(sim: SimProvisioner, url: str) -> int:
    """Return the number of the machine of the last rank."""
    round_ = view_of(url).round
    assert round_ is not None
    host = round_.assignments[-1].host
    return next(
        int(one["number"]) for one in sim.call_simulator("machines") if one["address"] == host
    )


# --- a rest ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rest:
    """Requests per hour of an undisturbed run."""

    cloud: str
    machines: int
    observe_s: float
    to_cloud: float
    to_bucket: Mapping[str, float]


def idle(cloud: str, *, machines: int = IDLE_MACHINES, watch_s: float = WATCH_S) -> Rest:
    """Train on that many machines, and count requests to the cloud and to the bucket."""
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        a_bucket() as wire,
        simulated(cloud, folder, observe_s=patience_of(cloud)) as sim,
    ):
        run = f"s3://bench/{cloud}?endpoint_url={wire}"
        handle = spotfit.DataParallelTrainer(
            rest,
            train_loop_config={"reports": 10_000},
            scaling_config=spotfit.ScalingConfig(num_workers=machines),
            run_config=spotfit.RunConfig(storage_path=run, name="run"),
            provisioner=address(sim),
        ).submit()
        until(lambda: view_of(handle.url).round)
        time.sleep(SETTLE_S)
        cloud_before, bucket_before = (
            sim.call_simulator("asked"),
            network_faults.fetch_request_counts(wire),
        )
        began = time.time()
        time.sleep(watch_s)
        hours = (time.time() - began) / 3600
        cloud_after, bucket_after = (
            sim.call_simulator("asked"),
            network_faults.fetch_request_counts(wire),
        )
        handle.cancel()
        with contextlib.suppress(spotfit.RunCancelledError):
            handle.result()
    return Rest(
        cloud,
        machines,
        sim.options.observe_s,
        (sum(cloud_after.values()) - sum(cloud_before.values())) / hours,
        {kind: (n - bucket_before.get(kind, 0)) / hours for kind, n in bucket_after.items()},
    )


@contextlib.contextmanager
def a_bucket() -> Iterator[str]:
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
        wire = serving.stdout.readline().strip()
        boto3.client("s3", endpoint_url=wire, region_name="us-east-1").create_bucket(Bucket="bench")
        yield wire
    finally:
        serving.kill()
        serving.wait()


def patience_of(cloud: str) -> float:
    """Return the polling interval of the cloud's provisioner."""
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        simulated(cloud, folder) as sim,
    ):
        of_the_cloud = sim._cloud_provisioner.traits  # noqa: SLF001  # the simulator's own traits are hastier
        return of_the_cloud.observe_interval_s


# --- on both --------------------------------------------------------------------------------------


@contextlib.contextmanager
def simulated(cloud: str, folder: str, **options: Any) -> Iterator[SimProvisioner]:
    """Run the simulated cloud; all machines are terminated at the end."""
    sim = SimProvisioner.with_options(cloud=cloud, root=f"{folder}/cloud", **options)
    sim.start_simulator()
    try:
        yield sim
    finally:
        sim.call_simulator("leave", {"machines": True})


def address(sim: SimProvisioner) -> str:
    """Return the provisioner URL for a trainer."""
    told = sim.options
    return f"sim://{told.cloud}?root={sim.root}&observe_s={told.observe_s}&notice_s={told.notice_s}"


def view_of(url: str) -> JournalView:
    return Journal(open_store(url)).catch_up()


def until(look: Callable[[], Any]) -> None:
    give_up_at = time.time() + PATIENCE_S
    while not look():
        if time.time() > give_up_at:
            raise TimeoutError(f"not within {PATIENCE_S:.0f} s")
        time.sleep(_LOOK_S)


def table_of_reclaims(found: Sequence[Reclaim], boot_s: float) -> str:
    rows = []
    for cloud in dict.fromkeys(one.cloud for one in found):
        told, untold = (
            next(one for one in found if one.cloud == cloud and one.notice is notice)
            for notice in (True, False)
        )
        after_loss_s = NOTICE_S + untold.until_next_s
        rows.append(
            (
                cloud,
                f"{told.until_next_s:.1f} s",
                f"{after_loss_s:.1f} s",
                f"{told.standstill_s:.1f} s",
                f"{untold.standstill_s:.1f} s",
                f"{untold.standstill_s - boot_s:.1f} s",
            )
        )
    head = (
        "cloud",
        "notice to next round",
        "if replaced after the loss",
        "standstill, with notice",
        "standstill, without",
        "of it not the boot",
    )
    return markdown(head, rows)


def table_of_rests(found: Sequence[Rest]) -> str:
    rows = [
        (
            one.cloud,
            f"{one.observe_s:.0f} s",
            f"{one.to_cloud:.0f}",
            ", ".join(f"{n:.0f} {kind}" for kind, n in sorted(one.to_bucket.items()) if n),
        )
        for one in found
    ]
    return markdown(("cloud", "looked at every", "cloud requests / h", "bucket requests / h"), rows)


def keep(name: str, found: Sequence[Any], table: str) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    kept = {"figure": name, "machine": machine(), "found": [asdict(one) for one in found]}
    (RESULTS / f"{name}.json").write_text(json.dumps(kept, indent=1))
    (RESULTS / f"{name}.md").write_text(table)
    print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("reclaim", "idle"))
    parser.add_argument("--clouds", nargs="+", default=sorted(CLOUDS), choices=sorted(CLOUDS))
    parser.add_argument("--boot-s", type=float, default=BOOT_S)
    parser.add_argument("--machines", type=int, default=IDLE_MACHINES)
    told = parser.parse_args()
    if told.what == "reclaim":
        reclaims = [
            reclaim(cloud, notice=notice, boot_s=told.boot_s)
            for cloud in told.clouds
            for notice in (True, False)
        ]
        keep("cloud_reclaims", reclaims, table_of_reclaims(reclaims, told.boot_s))
    else:
        rests = [idle(cloud, machines=told.machines) for cloud in told.clouds]
        keep("cloud_rests", rests, table_of_rests(rests))


if __name__ == "__main__":
    main()
