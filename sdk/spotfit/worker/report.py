"""What a training function calls: `report`, `get_checkpoint`, `get_context` and their like."""

from __future__ import annotations

from typing import Any

from spotfit.checkpoint.handle import Checkpoint
from spotfit.core.errors import ConfigError
from spotfit.core.ids import parse_name
from spotfit.model.events import ValidationAsked
from spotfit.model.metrics import plain_json
from spotfit.model.preemption import PreemptionInfo
from spotfit.model.reporting import CheckpointConsistencyMode, CheckpointUploadMode
from spotfit.model.validation import ValidationTaskConfig
from spotfit.worker.context import TrainContext
from spotfit.worker.current import current
from spotfit.worker.reported import Luggage, ReportedCheckpoint, UploadFn


def report(
    metrics: dict[str, Any],
    checkpoint: Checkpoint | None = None,
    checkpoint_dir_name: str | None = None,
    checkpoint_upload_mode: CheckpointUploadMode = CheckpointUploadMode.SYNC,
    delete_local_checkpoint_after_upload: bool | None = None,  # noqa: FBT001 - as in Ray Train
    checkpoint_upload_fn: UploadFn | None = None,
    validation: bool | ValidationTaskConfig = False,  # noqa: FBT001, FBT002 - as in Ray Train
) -> None:
    """Tell the run how training goes, and hand over a checkpoint if there is one.

    Every rank has to make the same number of reports: the n-th of all ranks belong together.
    Without a checkpoint nothing is waited for. With one, the ranks that bring files agree on
    the directory and merge into it; rank 0 gives its name and metrics. It counts once all of them
    have uploaded theirs. A name that was used before gets the round and the report behind it
    ("last@1-7"): what had it stays until the next is committed.

    Metrics are a dictionary that JSON can hold; numbers of numpy count as numbers. Tensors raise
    ValueError. `checkpoint_upload_fn(checkpoint, dir_name)` uploads in our place, and returns the
    Checkpoint inside the run's folder.

    With `validation` the checkpoint is validated by the trainer's `validation_config`, outside the
    workers and with nobody waiting; a `ValidationTaskConfig` says with what besides, and how long
    it may take. The first rank that brings files decides.
    """
    session = current("spotfit.report")
    asked = _asked(validation)
    if checkpoint is None and asked is None:
        if checkpoint_dir_name is not None:
            parse_name(checkpoint_dir_name, what="checkpoint_dir_name")
        session.report_metrics(metrics, checkpoint_dir_name)
        return
    if checkpoint is None:
        raise ConfigError("Validation requires a checkpoint.", do="Report one with it.")
    if not isinstance(checkpoint, Checkpoint):
        raise ConfigError(
            f"checkpoint must be a Checkpoint, not a {type(checkpoint).__name__}.",
            do="Write Checkpoint.from_directory(directory).",
        )
    if checkpoint_dir_name is not None:
        parse_name(checkpoint_dir_name, what="checkpoint_dir_name")
    mode = CheckpointUploadMode(checkpoint_upload_mode)
    delete = delete_local_checkpoint_after_upload
    session.report_files(
        metrics,
        Luggage(
            checkpoint,
            mode,
            mode.deletes_local_copy if delete is None else delete,
            checkpoint_dir_name,
            checkpoint_upload_fn,
            asked,
        ),
    )


def get_checkpoint() -> Checkpoint | None:
    """The checkpoint to go on from.

    What this worker itself reported last, once it is uploaded, with the files that other ranks have
    brought by then; else the one every rank of this attempt began from. None in a run that has
    none.
    """
    return current("spotfit.get_checkpoint").checkpoint()


def get_context() -> TrainContext:
    """Who this worker is: ranks, sizes, names."""
    return current("spotfit.get_context").context


def get_dataset_shard(dataset_name: str | None = None) -> Any:
    """This worker's part of that dataset of the trainer, the same object on every call.

    With `num_workers=0` it is the whole of it. Raises `UnknownDatasetError`, which is a KeyError.
    """
    return current("spotfit.get_dataset_shard").dataset(dataset_name)


def get_all_reported_checkpoints(
    consistency_mode: CheckpointConsistencyMode = CheckpointConsistencyMode.VALIDATED,
    timeout_s: float | None = None,
) -> list[ReportedCheckpoint]:
    """All checkpoints the run holds, worst to best; those that were dropped are not among them.

    Waits until every checkpoint this worker has reported is in and, unless `COMMITTED` is asked
    for, until no validation is pending; after `timeout_s` it tells what there is.
    """
    mode = CheckpointConsistencyMode(consistency_mode)
    return current("spotfit.get_all_reported_checkpoints").reported(mode, timeout_s)


def get_preemption_info() -> PreemptionInfo | None:
    """Which nodes of this group will be taken away, as rank 0 knows it; None while none is known.

    A collective: every rank has to call it, and every rank gets the same answer.
    """
    return current("spotfit.get_preemption_info").preemption_info()


def _asked(validation: Any) -> ValidationAsked | None:
    """What the journal keeps of that wish."""
    if isinstance(validation, ValidationTaskConfig):
        kwargs = plain_json(validation.fn_kwargs or {}, what="fn_kwargs")
        return ValidationAsked(kwargs, validation.timeout_s)
    if not isinstance(validation, bool):
        raise ConfigError(
            f"validation must be True, False or a ValidationTaskConfig, not {validation!r}.",
            do="Write validation=True.",
        )
    return ValidationAsked() if validation else None
