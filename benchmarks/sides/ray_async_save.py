"""The state of `checkpointer_workload.py` with Ray Train: how long a save blocks the loop."""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import torch
from ray import train
from ray.train.torch import TorchTrainer, prepare_model

from benchmarks.checkpointer_workload import WARM_UP_ROUNDS, BenchmarkModel, timed_together


def work(config: dict[str, Any]) -> None:
    rank = train.get_context().get_world_rank()
    training = BenchmarkModel(prepare_model, rank, config["layers"])
    training.initialize_optimizer()
    blocking_times = []
    for _ in range(config["saves"] + WARM_UP_ROUNDS):
        training.step()
        blocking_times.append(timed_together(lambda: _save(training, rank)))
        time.sleep(config["pause_s"])  # the upload must not overlap the next save
    if rank == 0:
        Path(config["events"]).write_text(json.dumps(blocking_times[WARM_UP_ROUNDS:]))


def _save(training: BenchmarkModel, rank: int) -> None:
    """Save as in Ray's guide: rank 0 writes a file, all ranks report, asynchronous upload."""
    checkpoint = None
    if rank == 0:
        folder = tempfile.mkdtemp()
        whole = {
            "model": training.model.state_dict(),
            "optimizer": training.optimizer.state_dict(),
        }
        torch.save(whole, Path(folder, "state.pt"))
        checkpoint = train.Checkpoint.from_directory(folder)
    train.report(
        {},
        checkpoint=checkpoint,
        checkpoint_upload_mode=train.CheckpointUploadMode.ASYNC,
        delete_local_checkpoint_after_upload=True,
    )


def main() -> None:
    config = json.loads(sys.argv[1])
    ray.init(num_cpus=2 * config["ranks"], include_dashboard=False)
    TorchTrainer(
        work,
        train_loop_config=config,
        scaling_config=train.ScalingConfig(num_workers=config["ranks"]),
        run_config=train.RunConfig(name="saves", storage_path=config["storage"]),
    ).fit()


if __name__ == "__main__":
    main()
