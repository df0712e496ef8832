"""`get_context()`: the ranks, sizes, run name and storage of a worker, as in Ray Train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spotfit.checkpoint.checkpoint_dir import Checkpoint, pyarrow_filesystem_or_store, store_path
from spotfit.core.errors import SessionMisuseError
from spotfit.protocol.worker_agent import StartWorker
from spotfit.store.api import Store
from spotfit.store.transfer import upload_tree


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
    return DeprecationWarning(f"TrainContext.{name} is no longer supported: {alternative}.")
