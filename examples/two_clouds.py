"""Handwritten digits on two simulated clouds, with a deadline: the run uses what is available.

    python examples/two_clouds.py

Spot machines of AWS Batch are the cheapest. When they disappear, the run goes on with those of
Google Cloud Batch; when these disappear as well, on on-demand machines; and it returns to spot
machines when there are some again. On real clouds only `provisioner` and `storage_path` differ.
"""

import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import spotfit
from spotfit.torch import Checkpointer, TorchTrainer, prepare_model
from spotfit_localsim.clouds.spot_cloud import SpotCloud

STEPS, STEP_S = 240, 0.1
# Of one machine in US dollars per hour. These machines run for seconds, hence the high prices.
SPOT_USD = {"aws_batch": 900.0, "gcp_batch": 1000.0}
ON_DEMAND_USD = 3000.0
ZONE = {"aws_batch": "sim-east-1a", "gcp_batch": "sim-east1-a"}
REGION = {"aws_batch": "sim-east-1", "gcp_batch": "sim-east1"}


def train(config: dict[str, Any]) -> float:
    """Train a linear classifier; return its accuracy on the training data."""
    import time

    import torch
    from sklearn.datasets import load_digits

    torch.manual_seed(0)
    images, labels = (torch.tensor(one) for one in load_digits(return_X_y=True))
    model = prepare_model(torch.nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    # With the number of steps the run knows how long the training still takes.
    checkpointer = Checkpointer(
        model=model, optimizer=optimizer, every=5, total_steps=config["steps"]
    )
    checkpointer.restore()
    for _ in range(checkpointer.steps, config["steps"]):
        loss: Any = torch.nn.functional.cross_entropy(model(images.float() / 16), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(STEP_S)  # noqa: TID251  # a longer step
        checkpointer.step({"loss": loss.item()})
    with torch.no_grad():
        return float((model(images.float() / 16).argmax(dim=1) == labels).float().mean())


def open_cloud(folder: Path, name: str) -> SpotCloud:
    """A cloud with prices; its machines are processes of this computer."""
    folder.mkdir(parents=True)
    prices = {
        "spot": {ZONE[name]: [[0, SPOT_USD[name]]]},
        "on_demand": {REGION[name]: ON_DEMAND_USD},
    }
    path = folder / "prices.json"
    path.write_text(json.dumps(prices))
    options = {"machine_type": "g2-standard-8"} if name == "gcp_batch" else {}
    return SpotCloud(folder, cloud=name, price_history=str(path), **options)


class CapacityChanges:
    """Changes the spot capacity of both clouds while the run trains."""

    def __init__(self, url: str, aws: SpotCloud, google: SpotCloud) -> None:
        self.url, self.aws, self.google = url, aws, google

    def make(self) -> None:
        """AWS has no spot machines any more, then Google, and then both have some again."""
        self.wait_until_trained("spot", self.aws)
        self.aws.set_capacity(0)
        self.wait_until_trained("spot", self.google)
        self.google.set_capacity(0)
        self.wait_until_trained("on_demand", self.aws, self.google)
        self.aws.set_capacity(None)
        self.google.set_capacity(None)

    def wait_until_trained(self, market: str, *clouds: SpotCloud) -> None:
        """Wait until machines of that market run, and the run has saved twice since."""
        while not any(self.is_running(cloud, market) for cloud in clouds):
            time.sleep(0.1)  # noqa: TID251
        saved = self.count_checkpoints()
        while self.count_checkpoints() < saved + 2:
            time.sleep(0.1)  # noqa: TID251

    def count_checkpoints(self) -> int:
        """The number of committed checkpoints."""
        try:
            return len(spotfit.attach(self.url).status().checkpoints)
        except spotfit.SpotfitError:  # the run has not started yet
            return 0

    @staticmethod
    def is_running(cloud: SpotCloud, market: str) -> bool:
        """Whether the cloud has a machine of that market which runs."""
        return any(one["market"] == market and one["state"] == "up" for one in cloud.machines())


def fit(folder: Path, aws: SpotCloud, google: SpotCloud) -> spotfit.Result:
    """Train on the machines of both clouds."""
    return TorchTrainer(
        train,
        train_loop_config={"steps": STEPS},
        scaling_config=spotfit.ScalingConfig(num_workers=2),
        run_config=spotfit.RunConfig(
            name="digits",
            storage_path=str(folder / "runs"),
            deadline="200s",
            training_time_s=1.2 * STEPS * STEP_S,
        ),
        provisioner=[aws.provisioner, google.provisioner],
    ).fit()


def main() -> None:
    """Train, and print what the machines have cost."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        clouds = [open_cloud(folder / one, one) for one in ("aws_batch", "gcp_batch")]
        changes = CapacityChanges(str(folder / "runs" / "digits"), *clouds)
        threading.Thread(target=changes.make, daemon=True).start()
        try:
            result = fit(folder, *clouds)
        finally:
            for cloud in clouds:
                cloud.close()
    print(f"accuracy {result.return_value:.2f}")
    for offer in result.cost.offers:
        print(f"{offer.offer}: {offer.machine_s:.0f} s, ${offer.usd:.2f}")
    saved = result.cost.saved_share
    sys.exit("the prices are unknown") if saved is None else print(f"saved {saved:.0%}")


if __name__ == "__main__":
    main()
