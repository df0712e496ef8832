"""The half gigabyte of `checkpointed.py` under Ray Train: how long a save holds the loop up."""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray  # type: ignore[import-not-found]
import torch
from ray import train
from ray.train.torch import TorchTrainer, prepare_model  # type: ignore[import-not-found]

from benchmarks.checkpointed import WARM_UP, Training, together


def work(config: dict[str, Any]) -> None:
    rank = train.get_context().get_world_rank()
    training = Training(prepare_model, rank, config["layers"])
    training.begin()
    stalls = []
    for _ in range(config["saves"] + WARM_UP):
        training.step()
        stalls.append(together(lambda: _save(training, rank)))
        time.sleep(config["pause_s"])  # its upload shall not be in the next one's way
    if rank == 0:
        Path(config["notes"]).write_text(json.dumps(stalls[WARM_UP:]))


def _save(training: Training, rank: int) -> None:
    """As Ray's guide has it: rank 0 writes a file, and all report; the upload is asynchronous."""
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
