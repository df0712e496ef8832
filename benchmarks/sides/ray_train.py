"""The job by Ray Train: one script, as its user would write it."""

import json
import sys

import ray  # type: ignore[import-not-found]
from ray import train
from ray.train.torch import TorchTrainer  # type: ignore[import-not-found]

from benchmarks import work


def main() -> None:
    job = json.loads(sys.argv[1])
    # The workers outnumber the cores on a small machine; Ray counts, it does not measure.
    ray.init(num_cpus=2 * job["workers"], **job["init"])
    for nth in range(job["fits"]):
        config = job["config"] | {"fit": nth}
        work.record(config, "fit_called")
        trainer(job, config, f"run-{nth}").fit()
        work.record(config, "fit_returned")


def trainer(job: dict[str, object], config: dict[str, object], name: str) -> TorchTrainer:
    return TorchTrainer(
        getattr(work, str(job["work"])),
        train_loop_config=config,
        scaling_config=train.ScalingConfig(num_workers=job["workers"]),
        run_config=train.RunConfig(
            name=name,
            storage_path=job["storage"],
            failure_config=train.FailureConfig(max_failures=job["max_failures"]),
        ),
    )


if __name__ == "__main__":
    main()
