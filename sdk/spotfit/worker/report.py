"""The functions that a training function calls, with the signatures of Ray Train."""

from __future__ import annotations

from typing import Any

from spotfit.checkpoint.checkpoint_dir import Checkpoint
from spotfit.checkpoint.reported import CheckpointReport, ReportedCheckpoint, UploadFn
from spotfit.core.errors import ConfigError
from spotfit.core.ids import parse_name
from spotfit.model.events import ValidationRequest
from spotfit.model.metrics import metrics_to_plain_json
from spotfit.model.reporting import CheckpointConsistencyMode, CheckpointUploadMode
from spotfit.model.topology import PreemptionInfo
from spotfit.model.validation_config import ValidationTaskConfig
from spotfit.worker.context import TrainContext
from spotfit.worker.current_session import require_session


def report(
    metrics: dict[str, Any],
    checkpoint: Checkpoint | None = None,
    checkpoint_dir_name: str | None = None,
    checkpoint_upload_mode: CheckpointUploadMode = CheckpointUploadMode.SYNC,
    delete_local_checkpoint_after_upload: bool | None = None,  # noqa: FBT001 - as in Ray Train
    checkpoint_upload_fn: UploadFn | None = None,
    validation: bool | ValidationTaskConfig = False,  # noqa: FBT001, FBT002 - as in Ray Train
) -> None:
    """Report metrics and, optionally, a checkpoint.

    All ranks must make the same number of reports; the n-th reports of all ranks form one report.
    A report without a checkpoint does not wait. With a checkpoint, the call waits until all ranks
    have reported; the files of all ranks are merged into one directory, and the checkpoint is
    committed once all of them are uploaded. Rank 0 determines the name and the metrics. If the name
    was used before, round and report number are appended ("last@1-7"), and the previous checkpoint
    is kept until the new one is committed.

    Args:
        metrics: A JSON-serializable dictionary; NumPy scalars are allowed. Tensors raise
            ValueError.
        checkpoint: This rank's files.
        checkpoint_dir_name: The directory below the run's root; generated if None.
        checkpoint_upload_mode: Whether the call waits for the upload.
        delete_local_checkpoint_after_upload: Default: depends on `checkpoint_upload_mode`.
        checkpoint_upload_fn: Called with the checkpoint and the directory name in place of the
            built-in upload. It returns a Checkpoint below the run's root.
        validation: Whether to validate the checkpoint with the trainer's `validation_config`, in
            the background; a `ValidationTaskConfig` adds arguments and a timeout. The value of the
            first rank that has files is used.
    """
    session = require_session("spotfit.report")
    request = _to_validation_request(validation)
    # Names are checked here: an invalid one must raise before other ranks wait for this report.
    if checkpoint is None and request is None:
        if checkpoint_dir_name is not None:
            parse_name(checkpoint_dir_name, what="checkpoint_dir_name")
        session.report_metrics(metrics, checkpoint_dir_name)
        return
    if checkpoint is None:
        raise ConfigError(
            "report(validation=…) requires a checkpoint, but checkpoint is None.",
            do="Pass checkpoint=Checkpoint.from_directory(directory), or omit validation.",
        )
    if not isinstance(checkpoint, Checkpoint):
        raise ConfigError(
            f"checkpoint must be a Checkpoint, not a {type(checkpoint).__name__}.",
            do="Pass Checkpoint.from_directory(directory).",
        )
    if checkpoint_dir_name is not None:
        parse_name(checkpoint_dir_name, what="checkpoint_dir_name")
    mode = CheckpointUploadMode(checkpoint_upload_mode)  # also accepts a value, such as "SYNC"
    delete = delete_local_checkpoint_after_upload
    session.report_checkpoint(
        metrics,
        CheckpointReport(
            checkpoint,
            upload_mode=mode,
            delete_after_upload=mode.deletes_local_copy if delete is None else delete,
            dir_name=checkpoint_dir_name,
            upload_fn=checkpoint_upload_fn,
            validation=request,
        ),
    )


def get_checkpoint() -> Checkpoint | None:
    """Return the checkpoint to resume from; None if the run has none.

    This is the last checkpoint that this worker has reported and uploaded, including the files that
    other ranks have uploaded so far; before that, the checkpoint from which the round has started.
    """
    return require_session("spotfit.get_checkpoint").latest_checkpoint()


def get_context() -> TrainContext:
    """Return the ranks, sizes, run name and storage of this worker."""
    return require_session("spotfit.get_context").context


def get_dataset_shard(dataset_name: str | None = None) -> Any:
    """Return this worker's shard of a dataset of the trainer; the same object on every call.

    In local mode (`num_workers=0`) this is the complete dataset. Raises `UnknownDatasetError`,
    a KeyError.
    """
    return require_session("spotfit.get_dataset_shard").dataset_shard(dataset_name)


def get_all_reported_checkpoints(
    consistency_mode: CheckpointConsistencyMode = CheckpointConsistencyMode.VALIDATED,
    timeout_s: float | None = None,
) -> list[ReportedCheckpoint]:
    """Return all checkpoints of the run that retention has kept, worst to best.

    Waits until the checkpoints that this worker has reported are committed and, with `VALIDATED`,
    until no validation is pending. After `timeout_s` it returns the current state.
    """
    mode = CheckpointConsistencyMode(consistency_mode)
    return require_session("spotfit.get_all_reported_checkpoints").reported_checkpoints(
        mode, timeout_s
    )


def get_preemption_info() -> PreemptionInfo | None:
    """Return the preemption notices of this group's nodes; None if there is none.

    A collective: all ranks must call it, and all receive what rank 0 knows.
    """
    return require_session("spotfit.get_preemption_info").preemption_info()


def _to_validation_request(validation: Any) -> ValidationRequest | None:
    if isinstance(validation, ValidationTaskConfig):
        kwargs = metrics_to_plain_json(validation.fn_kwargs or {}, label="fn_kwargs")
        return ValidationRequest(fn_kwargs=kwargs, timeout_s=validation.timeout_s)
    if not isinstance(validation, bool):
        raise ConfigError(
            f"validation must be True, False or a ValidationTaskConfig, not {validation!r}.",
            do="Pass validation=True.",
        )
    return ValidationRequest() if validation else None
