"""Checkpoints of DeepSpeed's engine: each rank saves its own files, which form one checkpoint.

The engine keeps weights and optimizer in flat partitions of its own, which only its own methods can
save. A checkpoint has what `engine.save_checkpoint` writes, and the RNG states of each rank.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from spotfit.checkpoint.checkpoint_dir import Checkpoint
from spotfit.core.errors import ConfigError
from spotfit.model.reporting import CheckpointUploadMode
from spotfit.torch.checkpoint.save_plan import decode_values, encode_values
from spotfit.torch.checkpoint.training_state import rng_state, set_rng_state
from spotfit.worker.training_api import get_checkpoint, get_context, report

_TAG = "deepspeed"
"""Name of the engine's folder in a checkpoint."""


def report_checkpoint(
    engine: Any,
    metrics: dict[str, Any],
    *,
    client_state: dict[str, Any] | None = None,
    checkpoint_dir_name: str | None = None,
    progress: float | None = None,
) -> None:
    """Save the engine's state and report it with `metrics`. All ranks call it after the same step.

    Returns when every rank has written its files to its local disk; the upload continues in the
    background. `client_state` is what `load_checkpoint` returns, such as the position in the data;
    the engine's own counters (`engine.global_steps`) and the RNG states of each rank are saved as
    well. `progress` is that of `spotfit.report`. Raises the errors of `engine.save_checkpoint` and
    `spotfit.report`.
    """
    context = get_context()
    directory = tempfile.mkdtemp(prefix="spotfit-deepspeed-")
    engine.save_checkpoint(directory, tag=_TAG, client_state=client_state or {})
    own = {"world_size": context.get_world_size(), "rng_state": rng_state()}
    Path(directory, _rank_file(context.get_world_rank())).write_bytes(encode_values(own))
    report(
        metrics,
        checkpoint=Checkpoint.from_directory(directory),
        checkpoint_dir_name=checkpoint_dir_name,
        checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
        progress=progress,
    )


def load_checkpoint(engine: Any) -> dict[str, Any] | None:
    """Load the run's latest checkpoint into the engine and return its `client_state`.

    None without a checkpoint. All ranks call it after `initialize`. Restores weights, optimizer,
    scheduler, counters and RNG states: a resumed training continues bit by bit. DeepSpeed unpickles
    the checkpoint's files: it must be one of your own runs. Raises `ConfigError` for
    a checkpoint of other files, or of another number of workers.
    """
    checkpoint = get_checkpoint()
    if checkpoint is None:
        return None
    context = get_context()
    with checkpoint.as_directory() as directory:
        own = _read_rank_file(Path(directory), context.get_world_rank())
        if own["world_size"] != context.get_world_size():
            raise ConfigError(
                f"The checkpoint was saved by {own['world_size']} workers; DeepSpeed cannot load "
                f"it with {context.get_world_size()}.",
                do=f"Set num_workers={own['world_size']}. To change the number, convert the "
                "checkpoint to a universal one (deepspeed.checkpoint.ds_to_universal) in a run of "
                'its own, and set "load_universal" in the configuration.',
                retryable=False,
            )
        path, client_state = engine.load_checkpoint(directory, tag=_TAG)
        if path is None:
            raise _foreign_checkpoint(Path(directory))
    set_rng_state(own["rng_state"])
    state: dict[str, Any] = client_state
    return state


def _rank_file(rank: int) -> str:
    return f"rank-{rank}.values"


def _read_rank_file(directory: Path, rank: int) -> dict[str, Any]:
    # Ranks beyond the saved ones compare their number with that of rank 0's file.
    for name in (_rank_file(rank), _rank_file(0)):
        if (path := directory / name).is_file():
            own: dict[str, Any] = decode_values(path.read_bytes(), f"rank {rank}")
            return own
    raise _foreign_checkpoint(directory)


def _foreign_checkpoint(directory: Path) -> ConfigError:
    names = sorted(path.name for path in directory.iterdir())
    return ConfigError(
        f"The run's latest checkpoint is not one of spotfit.deepspeed.report_checkpoint: it has "
        f"{', '.join(names[:5])}.",
        do="Load it as it was saved, or use a new RunConfig(name=...).",
        retryable=False,
    )
