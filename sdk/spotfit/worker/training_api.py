"""The functions that a training function calls, with the signatures of Ray Train.

The session of this process, which `report()`, `get_checkpoint()` and their like use.

`get_context()`: the ranks, sizes, run name and storage of a worker, as in Ray Train.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from spotfit.checkpoint.checkpoint_dir import Checkpoint, pyarrow_filesystem_or_store, store_path
from spotfit.checkpoint.committed import CheckpointReport, ReportedCheckpoint, UploadFn
from spotfit.checkpoint.snapshot_channel import SnapshotChannel
from spotfit.core.errors import ConfigError, SessionMisuseError
from spotfit.core.ids import parse_name
from spotfit.model.events import ValidationRequest
from spotfit.model.reporting import (
    CheckpointConsistencyMode,
    CheckpointUploadMode,
    metrics_to_plain_json,
)
from spotfit.model.topology import PreemptionInfo
from spotfit.model.validation_config import ValidationTaskConfig
from spotfit.protocol.worker_agent import StartWorker
from spotfit.store.api import Store
from spotfit.store.transfer import upload_tree

# --- get_context() --------------------------------------------------------------------------------


class StorageContext:
    """The storage location of the run, for developers of integrations."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self.experiment_dir_name = name

    @property
    def storage_filesystem(self) -> Any:
        """The file system to which the paths of this object belong."""
        return pyarrow_filesystem_or_store(self._store)

    @property
    def experiment_fs_path(self) -> str:
        """The run's directory, without a URL scheme."""
        return store_path(self._store)

    @property
    def storage_fs_path(self) -> str:
        """The parent of the run's directory, without a URL scheme."""
        return self.experiment_fs_path.rpartition("/")[0]

    def build_checkpoint_path_from_name(self, checkpoint_dir_name: str) -> str:
        """Return the path of the checkpoint directory with that name."""
        return f"{self.experiment_fs_path}/{checkpoint_dir_name}"

    def persist_current_checkpoint(
        self, checkpoint: Checkpoint, checkpoint_dir_name: str
    ) -> Checkpoint:
        """Upload the checkpoint's files to the run's directory without reporting them."""
        # A checkpoint in a bucket is downloaded first, to a temporary directory.
        with checkpoint.as_directory() as directory:
            upload_tree(self._store, checkpoint_dir_name, Path(directory))
        return Checkpoint.from_store(self._store, checkpoint_dir_name)


class TrainContext:
    """The identity of this worker. World ranks are ordered by node, then by local rank."""

    def __init__(self, start: StartWorker, store: Store | None) -> None:
        self._start = start
        self._store = store

    def get_experiment_name(self) -> str:
        """Return the name of the run."""
        return self._start.run_name

    def get_world_size(self) -> int:
        """Return the number of workers in the group."""
        return self._start.world_size

    def get_world_rank(self) -> int:
        """Return the rank of this worker in the group."""
        return self._start.rank

    def get_local_rank(self) -> int:
        """Return the rank of this worker on its node."""
        return self._start.local_rank

    def get_local_world_size(self) -> int:
        """Return the number of workers on this node."""
        return self._start.local_world_size

    def get_node_rank(self) -> int:
        """Return the rank of this node among the nodes of the group."""
        return self._start.node_rank

    def get_storage(self) -> StorageContext:
        """Return the run's storage. Raises `SessionMisuseError` in local mode."""
        if self._store is None:
            raise SessionMisuseError(
                "get_storage() is not available in local mode (num_workers=0), "
                "which stores nothing in the bucket.",
                do="Use num_workers=1.",
            )
        return StorageContext(self._store, self._start.run_name)

    # The methods below exist so that a script written for Ray Train gets an explanation instead of
    # an AttributeError.

    def get_metadata(self) -> Any:
        """Not supported. Raises `DeprecationWarning`, as Ray Train does."""
        raise _deprecation_warning("get_metadata", "pass the values in train_loop_config")

    def get_trial_name(self) -> Any:
        """Not supported. Raises `DeprecationWarning`, as Ray Train does."""
        raise _deprecation_warning("get_trial_name", "use get_experiment_name")

    def get_trial_id(self) -> Any:
        """Not supported. Raises `DeprecationWarning`, as Ray Train does."""
        raise _deprecation_warning("get_trial_id", "use get_experiment_name")

    def get_trial_resources(self) -> Any:
        """Not supported. Raises `DeprecationWarning`, as Ray Train does."""
        raise _deprecation_warning(
            "get_trial_resources", "read resources_per_worker of the ScalingConfig"
        )

    def get_trial_dir(self) -> Any:
        """Not supported. Raises `DeprecationWarning`, as Ray Train does."""
        raise _deprecation_warning("get_trial_dir", "use get_storage().experiment_fs_path")


def _deprecation_warning(name: str, alternative: str) -> DeprecationWarning:
    return DeprecationWarning(
        f"TrainContext.{name} is no longer supported. Instead, {alternative}."
    )


# --- The session of this process ------------------------------------------------------------------


class TrainSession(Protocol):
    """The operations available to a training function, on a worker or in local mode."""

    @property
    def context(self) -> TrainContext:
        """The identity of this worker."""

    @property
    def devices(self) -> tuple[str, ...] | None:
        """The accelerators of this worker; None in local mode, which does not assign any."""

    @property
    def snapshot_channel(self) -> SnapshotChannel:
        """The interface of a Checkpointer."""

    def report_metrics(self, metrics: dict[str, Any], dir_name: str | None = None) -> None:
        """Make the next report without files. Does not wait for other ranks."""

    def report_checkpoint(self, metrics: dict[str, Any], report: CheckpointReport) -> None:
        """Make the next report with a checkpoint."""

    def latest_checkpoint(self) -> Checkpoint | None:
        """Return the checkpoint to resume from; None if there is none."""

    def dataset_shard(self, name: str | None) -> Any:
        """Return this worker's shard of a dataset. Raises `UnknownDatasetError`."""

    def reported_checkpoints(
        self, mode: CheckpointConsistencyMode, timeout_s: float | None
    ) -> list[ReportedCheckpoint]:
        """Return all checkpoints of the run, worst to best."""

    def preemption_info(self) -> PreemptionInfo | None:
        """Return the preemption notices that rank 0 has received. A collective of all ranks."""

    def barrier(self) -> None:
        """Wait until all ranks have called this."""

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value. A collective of all ranks."""


_session: TrainSession | None = None


def set_session(session: TrainSession) -> None:
    """Make `session` the current session of this process."""
    global _session  # a process trains in one session at a time
    _session = session


def clear_session() -> None:
    """Leave this process without a current session."""
    global _session
    _session = None


@contextmanager
def use_session(session: TrainSession) -> Iterator[None]:
    """Make `session` the current session within the block, then restore the previous one."""
    global _session
    # Nested: a training function may call a trainer in local mode.
    previous, _session = _session, session
    try:
        yield
    finally:
        _session = previous


def has_session() -> bool:
    """Return whether this process is executing a training function."""
    return _session is not None


def require_session(caller: str) -> TrainSession:
    """Return the current session. Raises `SessionMisuseError` (a RuntimeError) without one."""
    if _session is None:
        raise SessionMisuseError(
            f"`{caller}` cannot be used outside of a spotfit training function.",
            do=f"Call `{caller}` in the training function that is passed to the trainer.",
        )
    return _session


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
            parse_name(checkpoint_dir_name, what="report(checkpoint_dir_name=...):")
        session.report_metrics(metrics, checkpoint_dir_name)
        return
    if checkpoint is None:
        raise ConfigError(
            "report(validation=…) requires a checkpoint, but checkpoint is None.",
            do="Pass checkpoint=Checkpoint.from_directory(directory), or omit validation.",
        )
    if not isinstance(checkpoint, Checkpoint):
        raise ConfigError(
            f"report(checkpoint=...) must be a Checkpoint, not a {type(checkpoint).__name__}.",
            do="Pass Checkpoint.from_directory(directory).",
        )
    if checkpoint_dir_name is not None:
        parse_name(checkpoint_dir_name, what="report(checkpoint_dir_name=...):")
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
            "report(validation=...) must be True, False or a ValidationTaskConfig, not "
            f"{validation!r}.",
            do="Pass validation=True.",
        )
    return ValidationRequest() if validation else None
