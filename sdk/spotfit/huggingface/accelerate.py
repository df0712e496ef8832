"""Public module `spotfit.huggingface.accelerate`: the state of an Accelerator as a checkpoint.

In place of `Accelerator.save_state` and `load_state`, which need a directory that outlives the
machine.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from accelerate import Accelerator

from spotfit.checkpoint.checkpoint_dir import Checkpoint
from spotfit.core.errors import ConfigError
from spotfit.model.reporting import CheckpointUploadMode
from spotfit.worker.training_api import get_checkpoint, get_context, report

__all__ = ["load_state", "save_state"]


def save_state(
    accelerator: Accelerator,
    metrics: dict[str, Any] | None = None,
    *,
    progress: float | None = None,
    **options: Any,
) -> None:
    """Report a checkpoint with what `accelerator.save_state` writes; all ranks call it.

    Returns when the files are written to this machine's disk; the upload continues in the
    background, and its failure fails the worker. `metrics` of rank 0 are stored with the
    checkpoint, `options` are those of `Accelerator.save_state`, `progress` is that of
    `spotfit.report`. Objects that you have passed to
    `register_for_checkpointing` are included. Raises `ConfigError` for metrics that are not JSON,
    and `SessionMisuseError` outside of a training function.
    """
    get_context()  # raises before files are written
    folder = mkdtemp(prefix="spotfit-accelerate-")
    accelerator.save_state(folder, **options)
    report(
        metrics or {},
        checkpoint=Checkpoint.from_directory(folder),
        checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
        progress=progress,
    )


def load_state(accelerator: Accelerator, **options: Any) -> bool:
    """Load the newest state of the run that `save_state` has reported; False if there is none.

    All ranks call it after `accelerator.prepare`. The RNG states are those of each rank if the
    number of workers is the same. `options` are those of `Accelerator.load_state`. Raises
    `ConfigError` if the newest checkpoint holds other files.
    """
    checkpoint = get_checkpoint()
    if checkpoint is None:
        return False
    with checkpoint.as_directory() as folder:
        if not any(Path(folder).glob("random_states_*.pkl")):
            raise ConfigError(
                f"The checkpoint {folder} was not saved by "
                "spotfit.huggingface.accelerate.save_state: it has no random_states_*.pkl.",
                do="Restore a Checkpointer's snapshot by Checkpointer.restore(), or use a new "
                "RunConfig(name=...).",
                retryable=False,
            )
        accelerator.load_state(str(folder), **options)
    return True
