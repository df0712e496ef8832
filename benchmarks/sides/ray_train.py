"""The job with Ray Train, as a user would write it."""

import importlib
import json
import sys
from typing import Any

import ray
from ray import train

from benchmarks import workload


def main() -> None:
    job = json.loads(sys.argv[1])
    # Logical CPUs: there may be more workers than cores.
    ray.init(num_cpus=2 * job["workers"], **job["init"])
    for nth in range(job["fits"]):
        config = job["config"] | {"fit": nth}
        workload.record(config, "fit_called")
        result = trainer(job, config, f"run-{nth}").fit()
        workload.record(config, "fit_returned", checkpoints=len(result.best_checkpoints or ()))


def trainer(job: dict[str, Any], config: dict[str, Any], name: str) -> Any:
    module, _, trainer_class = job["trainer"].partition(".")
    return getattr(importlib.import_module(f"ray.train.{module}"), trainer_class)(
        workload.find(job["work"]),
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
