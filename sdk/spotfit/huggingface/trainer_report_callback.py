"""RayTrainReportCallback: reports each checkpoint that a transformers.Trainer saves."""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from spotfit.checkpoint.checkpoint_dir import Checkpoint
from spotfit.worker.training_api import get_context, report, require_session

_RANK_ZERO_FILE = "trainer_state.json"
"""File of a Trainer's checkpoint that only rank 0 writes."""


class RayTrainReportCallback(TrainerCallback):
    """Reports the metrics and the newest checkpoint of a Trainer whenever the Trainer has saved.

    The metrics are all entries of `state.log_history`, merged; later values replace earlier ones.
    The reported checkpoint contains the Trainer's folder as `checkpoint/`. Each machine uploads its
    folder once; a folder that all machines share is uploaded by rank 0 only. The call returns after
    the upload. Without `prepare_trainer(every=...)` the training function itself resumes from
    `get_checkpoint()`, by `trainer.train(resume_from_checkpoint=...)`.
    """

    CHECKPOINT_NAME = "checkpoint"
    """Name of the Trainer's folder in the reported checkpoint."""

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Called by the Trainer on every rank after it has saved. Blocks until all ranks report."""
        metrics = {name: value for entry in state.log_history for name, value in entry.items()}
        # Ranks of this machine may still write their files, such as their RNG states.
        require_session("RayTrainReportCallback").barrier()
        newest = get_last_checkpoint(args.output_dir)
        with ExitStack() as stack:
            checkpoint = None
            if newest is not None and _uploads_folder(Path(newest), args):
                # In the same file system, so that files are linked instead of copied.
                parent = stack.enter_context(
                    TemporaryDirectory(dir=args.output_dir, prefix=".report-")
                )
                nested = Path(parent, self.CHECKPOINT_NAME)
                shutil.copytree(newest, nested, copy_function=_link_or_copy)
                checkpoint = Checkpoint.from_directory(parent)
            # Negative or 0 if the number of steps is not known.
            is_known = state.max_steps > 0
            progress = min(1.0, state.global_step / state.max_steps) if is_known else None
            report(metrics, checkpoint=checkpoint, progress=progress)


def _uploads_folder(folder: Path, args: TrainingArguments) -> bool:
    """Return whether this rank uploads the folder: rank 0, and one rank of each other machine.

    The other machines do not if they see rank 0's files: then all of them share the folder.
    """
    context = get_context()
    if context.get_world_rank() == 0 or context.get_local_rank() != 0:
        return context.get_world_rank() == 0
    return bool(args.save_on_each_node) or not (folder / _RANK_ZERO_FILE).exists()


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # the file system has no hard links
        shutil.copy2(source, target)
