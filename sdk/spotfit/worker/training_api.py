"""The functions that a training function calls, with the signatures of Ray Train.

The session of this process, which `report()`, `get_checkpoint()` and their like use.

`get_context()`: the ranks, sizes, run name and storage of a worker, as in Ray Train.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    """The storage location of one run; returned by `TrainContext.get_storage` for integrations."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self.experiment_dir_name = name

    @property
    def storage_filesystem(self) -> Any:
        """The file system in which the paths of this object are valid, or a `Store` without one.

        A `pyarrow.fs.FileSystem`. If pyarrow is not installed or has none for the storage, it is
        the spotfit `Store` of the run, whose keys are relative to the run's directory.
        """
        return pyarrow_filesystem_or_store(self._store)

    @property
    def experiment_fs_path(self) -> str:
        """The run's directory without a URL scheme, such as "bucket/prefix/my-run"."""
        return store_path(self._store)

    @property
    def storage_fs_path(self) -> str:
        """The parent of the run's directory without a URL scheme, such as "bucket/prefix"."""
        return self.experiment_fs_path.rpartition("/")[0]

    def build_checkpoint_path_from_name(self, checkpoint_dir_name: str) -> str:
        """Return the path of a checkpoint in the run's directory: "bucket/prefix/my-run/epoch-3".

        Does no I/O; the checkpoint need not exist.
        """
        return f"{self.experiment_fs_path}/{checkpoint_dir_name}"

    def persist_current_checkpoint(
        self, checkpoint: Checkpoint, checkpoint_dir_name: str
    ) -> Checkpoint:
        """Upload a checkpoint's files to `<run>/<checkpoint_dir_name>` and return that copy.

        Blocks until the upload is complete. Nothing is reported or committed: the run does not
        resume from these files unless the returned checkpoint is passed to `report()`, with
        `CheckpointUploadMode.NO_UPLOAD`. Raises `StoreError` if the upload fails.
        """
        # A checkpoint in a bucket is downloaded first, to a temporary directory.
        with checkpoint.as_directory() as directory:
            upload_tree(self._store, checkpoint_dir_name, Path(directory))
        return Checkpoint.from_store(self._store, checkpoint_dir_name)


class TrainContext:
    """Ranks, sizes, run name and storage of this worker, fixed for the round.

    World ranks are ordered by node, then by local rank.
    """

    def __init__(self, start: StartWorker, store: Store | None) -> None:
        self._start = start
        self._store = store

    def get_experiment_name(self) -> str:
        """Return the name of the run, `RunConfig(name=...)`."""
        return self._start.run_name

    def get_world_size(self) -> int:
        """Return the number of workers in the round.

        In an elastic run the next round may have another number.
        """
        return self._start.world_size

    def get_world_rank(self) -> int:
        """Return the global rank of this worker in the round, from 0 to `get_world_size() - 1`."""
        return self._start.rank

    def get_local_rank(self) -> int:
        """Return the rank of this worker among the workers on its node, starting at 0."""
        return self._start.local_rank

    def get_local_world_size(self) -> int:
        """Return the number of workers of this round on this node."""
        return self._start.local_world_size

    def get_node_rank(self) -> int:
        """Return the rank of this worker's node among the nodes of the round, starting at 0."""
        return self._start.node_rank

    def get_storage(self) -> StorageContext:
        """Return the storage location of the run.

        Raises `SessionMisuseError` (a RuntimeError) in local mode (`num_workers=0`).
        """
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
    """What the functions of this module need of a process: one implementation for workers, one for

    local mode.
    """

    @property
    def context(self) -> TrainContext:
        """Ranks, sizes, run name and storage of this worker."""

    @property
    def devices(self) -> tuple[str, ...] | None:
        """This worker's accelerators by device name, such as ("cuda:0",).

        Numbered among the devices that the process sees. Empty if it requested none; None in local
        mode, which does not assign any.
        """

    @property
    def snapshot_channel(self) -> SnapshotChannel:
        """The channel by which a `Checkpointer` of this process submits and finds snapshots."""

    def report_metrics(self, metrics: dict[str, Any], dir_name: str | None = None) -> None:
        """Make this worker's next report without files. Does not wait for other ranks.

        `dir_name` is the `checkpoint_dir_name` of `report()`. Raises `ConfigError` (a ValueError)
        if the metrics are not JSON-serializable.
        """

    def report_checkpoint(self, metrics: dict[str, Any], report: CheckpointReport) -> None:
        """Make this worker's next report with files, and upload them as `report.upload_mode` says.

        On a worker it waits until all ranks have made this report. Raises `ConfigError` for invalid
        metrics or an unsuitable path, and `CollectiveTimeoutError` or `SessionMisuseError` if
        another rank does not report.
        """

    def latest_checkpoint(self) -> Checkpoint | None:
        """Return the checkpoint to resume from, for `get_checkpoint()`; None if there is none."""

    def dataset_shard(self, name: str | None) -> Any:
        """Return this worker's shard of the trainer's dataset `name`; the same object every time.

        Raises `UnknownDatasetError` (a KeyError).
        """

    def data_positions(self) -> dict[str, dict[str, Any]]:
        """Return the positions in the trainer's datasets, for a snapshot of a `Checkpointer`.

        The batches that the training function has now count as trained on. {} without datasets.
        """

    def resume_data(self, positions: Mapping[str, Mapping[str, Any]]) -> None:
        """Continue the trainer's datasets at the positions of a snapshot that was restored.

        Raises `ConfigError` if a position belongs to other rows.
        """

    def reported_checkpoints(
        self, mode: CheckpointConsistencyMode, timeout_s: float | None
    ) -> list[ReportedCheckpoint]:
        """Return all checkpoints of the run that retention has kept, worst to best.

        Waits as `mode` says, at most `timeout_s` seconds (None: without a limit); then returns the
        current state.
        """

    def preemption_info(self) -> PreemptionInfo | None:
        """Return the preemption notices that rank 0 has received; None if there are none.

        A collective: blocks until all ranks have called it.
        """

    def barrier(self) -> None:
        """Wait until all ranks have called this.

        Raises `CollectiveTimeoutError` or `SessionMisuseError` if a rank does not.
        """

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's `value` on every rank; the argument of other ranks is ignored.

        A collective: blocks until all ranks have called it, with the errors of `barrier`.
        """


_session: TrainSession | None = None


def set_session(session: TrainSession) -> None:
    """Make `session` the current session of this process; called once when a worker process starts.

    Replaces an earlier session. Process-wide: all threads use it.
    """
    global _session  # a process trains in one session at a time
    _session = session


def clear_session() -> None:
    """Leave this process without a current session; for tests. Harmless if there is none."""
    global _session
    _session = None


@contextmanager
def use_session(session: TrainSession) -> Iterator[None]:
    """Make `session` the current session of this process within the block; used by local mode.

    At the end of the block, also after an exception, the previous session (or none) is current
    again.
    """
    global _session
    # Nested: a training function may call a trainer in local mode.
    previous, _session = _session, session
    try:
        yield
    finally:
        _session = previous


def has_session() -> bool:
    """Return whether this process has a current session: it executes a training function."""
    return _session is not None


def require_session(caller: str) -> TrainSession:
    """Return the current session, for the public function `caller`, such as "spotfit.report".

    Raises `SessionMisuseError` (a RuntimeError), which names `caller`, if there is no session.
    """
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
    *,
    progress: float | None = None,
) -> None:
    """Report metrics of this worker and, optionally, a checkpoint, from the training function.

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
        delete_local_checkpoint_after_upload: None means True for ASYNC and False otherwise.
        checkpoint_upload_fn: Called with the checkpoint and the directory name in place of the
            built-in upload. It returns a Checkpoint below the run's root.
        validation: Whether to validate the checkpoint with the trainer's `validation_config`, in
            the background; a `ValidationTaskConfig` adds arguments and a timeout. The value of the
            first rank that has files is used.
        progress: The share of the training that is done, from 0 to 1. A run with a deadline
            computes from it how long the training still takes.

    Raises `SessionMisuseError` outside of a training function, `ConfigError` (a ValueError) for
    invalid arguments, and `CollectiveTimeoutError` or `SessionMisuseError` if another rank does not
    report. In local mode nothing is uploaded: metrics and checkpoint are only kept for the result.
    """
    session = require_session("spotfit.report")
    if progress is not None:
        session.snapshot_channel.record_progress(_check_progress(progress))
    request = _to_validation_request(validation)
    has_files = checkpoint is not None or request is not None
    files = _check_checkpoint(checkpoint) if has_files else None
    # Names are checked here: an invalid one must raise before other ranks wait for this report.
    if checkpoint_dir_name is not None:
        parse_name(checkpoint_dir_name, what="report(checkpoint_dir_name=...):")
    if files is None:
        session.report_metrics(metrics, checkpoint_dir_name)
        return
    mode = CheckpointUploadMode(checkpoint_upload_mode)  # also accepts a value, such as "SYNC"
    delete = delete_local_checkpoint_after_upload
    if delete is None:
        delete = mode._default_delete_local_checkpoint_after_upload()  # noqa: SLF001 - Ray's name
    session.report_checkpoint(
        metrics,
        CheckpointReport(
            files,
            upload_mode=mode,
            delete_after_upload=delete,
            dir_name=checkpoint_dir_name,
            upload_fn=checkpoint_upload_fn,
            validation=request,
        ),
    )


def _check_checkpoint(checkpoint: Checkpoint | None) -> Checkpoint:
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
    return checkpoint


def _check_progress(progress: Any) -> float:
    is_number = isinstance(progress, (int, float)) and not isinstance(progress, bool)
    if not is_number or not 0 <= progress <= 1:
        raise ConfigError(
            f"report(progress={progress!r}): progress must be a number from 0 to 1.",
            do="Pass the share of the training that is done, such as step / total_steps.",
        )
    return float(progress)


def get_checkpoint() -> Checkpoint | None:
    """Return the checkpoint to resume from; None if the run has none.

    This is the last checkpoint that this worker has reported and uploaded in this round, including
    the files that other ranks have uploaded so far; before that, the committed checkpoint from
    which the round has started. In local mode: the last reported one. Raises `SessionMisuseError`
    outside of a training function.
    """
    return require_session("spotfit.get_checkpoint").latest_checkpoint()


def get_context() -> TrainContext:
    """Return the ranks, sizes, run name and storage of this worker, fixed for the round.

    Raises `SessionMisuseError` (a RuntimeError) outside of a training function.
    """
    return require_session("spotfit.get_context").context


def get_dataset_shard(dataset_name: str | None = None) -> Any:
    """Return this worker's shard of the trainer's dataset `datasets[dataset_name]`.

    A `spotfit.data.DataIterator`; the same object on every call. Which rows it has is determined
    by the trainer's `DataConfig`. After a restart from a checkpoint with files it continues after
    the last row that was trained on; after one from a snapshot, once its `Checkpointer` has
    restored it. In local mode (`num_workers=0`) an object that is not a `spotfit.data.Dataset` is
    returned unchanged.

    Raises `UnknownDatasetError`, a KeyError, if the trainer has no dataset of this name.
    Raises `SessionMisuseError` outside of a training function.
    """
    return require_session("spotfit.get_dataset_shard").dataset_shard(dataset_name)


def get_all_reported_checkpoints(
    consistency_mode: CheckpointConsistencyMode = CheckpointConsistencyMode.VALIDATED,
    timeout_s: float | None = None,
) -> list[ReportedCheckpoint]:
    """Return all checkpoints of the run that retention has kept, worst to best.

    Waits until all ranks have made the reports that this worker has made in this round and their
    checkpoints, of whichever rank, are committed or have failed. With `VALIDATED` it also waits
    until no validation of the run is pending. After `timeout_s` seconds (None: no limit) it returns
    the current state. The list is empty in local mode. Raises `SessionMisuseError` outside of a
    training function.
    """
    mode = CheckpointConsistencyMode(consistency_mode)
    return require_session("spotfit.get_all_reported_checkpoints").reported_checkpoints(
        mode, timeout_s
    )


def get_preemption_info() -> PreemptionInfo | None:
    """Return the nodes of this round that will be preempted, and when; None without a notice.

    A collective: it blocks until all ranks have called it, and all receive what rank 0 knows. In
    local mode always None. Raises `CollectiveTimeoutError` or `SessionMisuseError` if a rank does
    not call it, and `SessionMisuseError` outside of a training function.
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
            do="Pass True to validate, False not to, or ValidationTaskConfig(fn_kwargs={...}) to "
            "pass arguments.",
        )
    return ValidationRequest() if validation else None
