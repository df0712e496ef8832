"""A training with a deadline on a simulated cloud whose spot machines disappear for a while.

    python examples/deadline.py                # a simulated AWS Batch
    python examples/deadline.py gcp_batch      # a simulated Google Cloud Batch
    python examples/deadline.py plain          # a cloud without a client library

The run starts on spot machines. When there are none, it rents on-demand machines, because waiting
would endanger the deadline; when spot machines are available again, it moves back to them, and
starts these first. On a real cloud only `provisioner` differs: see docs/guides/cost.md.
"""

import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import spotfit
from spotfit_localsim.clouds.spot_cloud import SpotCloud

STEPS = 150
# Of one machine in US dollars per hour. These machines run for seconds, hence the high prices.
SPOT_USD, ON_DEMAND_USD = 900.0, 3000.0
CLOUD_OPTIONS: dict[str, dict[str, Any]] = {
    "aws_batch": {},
    "gcp_batch": {"machine_type": "g2-standard-8"},
    "plain": {"prices": json.dumps({"*": {"spot": SPOT_USD, "on_demand": ON_DEMAND_USD}})},
}
PRICES = {
    "spot": {"sim-east-1a": [[0, SPOT_USD]], "sim-east1-a": [[0, SPOT_USD]]},
    "on_demand": {"sim-east-1": ON_DEMAND_USD, "sim-east1": ON_DEMAND_USD},
}


def train(config: dict[str, int]) -> int:
    """Count the steps; report which share of the training is done."""
    import time

    step = 0
    if checkpoint := spotfit.get_checkpoint():
        with checkpoint.as_directory() as directory:
            step = int(Path(directory, "step").read_text())
    while step < config["steps"]:
        time.sleep(0.08)  # noqa: TID251  # a step of real work
        step += 1
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "step").write_text(str(step))
            spotfit.report(
                {"step": step},
                checkpoint=spotfit.Checkpoint.from_directory(directory) if step % 5 == 0 else None,
                progress=step / config["steps"],
            )
    return step


def open_cloud(folder: Path, name: str = "aws_batch") -> SpotCloud:
    """A cloud with these prices; its machines are processes of this computer."""
    folder.mkdir(exist_ok=True)
    prices = folder / "prices.json"
    prices.write_text(json.dumps(PRICES))
    return SpotCloud(folder, cloud=name, price_history=str(prices), **CLOUD_OPTIONS[name])


def fit(cloud: SpotCloud, *, steps: int = STEPS) -> spotfit.Result:
    """Train while the market of the cloud changes."""
    market = threading.Thread(target=change_market, args=(cloud,), daemon=True)
    market.start()
    return spotfit.DataParallelTrainer(
        train,
        train_loop_config={"steps": steps},
        scaling_config=spotfit.ScalingConfig(num_workers=1),
        run_config=spotfit.RunConfig(
            name="deadline",
            storage_path=cloud.storage_path,
            deadline="110s",
            # Used until the progress was measured. With it, a deadline that cannot be kept is an
            # error before anything is rented.
            training_time_s=15,
        ),
        provisioner=cloud.provisioner,
    ).fit()


def change_market(cloud: SpotCloud) -> None:
    """There are no spot machines from step 10 until on-demand machines have trained some steps."""
    wait_until(lambda: count_checkpoints(cloud) >= 2)
    cloud.set_capacity(0)
    wait_until(lambda: any(one["market"] == "on_demand" for one in cloud.machines()))
    lost_at = count_checkpoints(cloud)
    wait_until(lambda: count_checkpoints(cloud) >= lost_at + 2)
    cloud.set_capacity(None)


def count_checkpoints(cloud: SpotCloud) -> int:
    """The number of committed checkpoints; one is saved every five steps."""
    try:
        return len(spotfit.attach(f"{cloud.storage_path}/deadline").status().checkpoints)
    except spotfit.SpotfitError:  # the run has not started yet
        return 0


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll; the condition reads files of this computer."""
    while not condition():
        time.sleep(0.1)  # noqa: TID251


def main() -> None:
    """Train, and print what the machines have cost."""
    with tempfile.TemporaryDirectory() as folder:
        cloud = open_cloud(Path(folder, "cloud"), *sys.argv[1:2])
        try:
            result = fit(cloud)
        finally:
            cloud.close()
    print(f"{result.return_value} steps")
    for offer in result.cost.offers:
        print(f"{offer.offer}: {offer.machine_s:.0f} s, ${offer.usd:.2f}")
    print(f"saved {result.cost.saved_share:.0%} of the on-demand price")


if __name__ == "__main__":
    main()
