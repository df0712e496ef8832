"""Who a worker is: ranks, sizes, the run's name and its storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spotfit.checkpoint.handle import Checkpoint, arrow_or_own, path_of
from spotfit.core.errors import SessionMisuseError
from spotfit.model.wire import Start
from spotfit.store.api import Store
from spotfit.store.transfer import upload_tree


class StorageContext:
    """Where the run keeps what it reports. For developers of integrations."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self.experiment_dir_name = name

    @property
    def storage_filesystem(self) -> Any:
        """The file system in which the paths below are meant."""
        return arrow_or_own(self._store)

    @property
    def experiment_fs_path(self) -> str:
        """The run's folder, without a scheme."""
        return path_of(self._store)

    @property
    def storage_fs_path(self) -> str:
        """The folder that holds the run's."""
        return self.experiment_fs_path.rpartition("/")[0]

    def build_checkpoint_path_from_name(self, checkpoint_dir_name: str) -> str:
        """The folder a checkpoint of that name has."""
        return f"{self.experiment_fs_path}/{checkpoint_dir_name}"

    def persist_current_checkpoint(
        self, checkpoint: Checkpoint, checkpoint_dir_name: str
    ) -> Checkpoint:
        """Copy its files into the run's folder under that name; nothing is reported by it."""
        with checkpoint.as_directory() as directory:
            upload_tree(self._store, checkpoint_dir_name, Path(directory))
        return Checkpoint.in_store(self._store, checkpoint_dir_name)


class TrainContext:
    """Who this worker is among the others. Ranks are by node, and within it by device."""

    def __init__(self, start: Start, store: Store | None) -> None:
        self._start = start
        self._store = store

    def get_experiment_name(self) -> str:
        """The name of the run."""
        return self._start.run_name

    def get_world_size(self) -> int:
        """How many workers there are."""
        return self._start.world_size

    def get_world_rank(self) -> int:
        """This worker's number among all."""
        return self._start.rank

    def get_local_rank(self) -> int:
        """This worker's number on its node."""
        return self._start.local_rank

    def get_local_world_size(self) -> int:
        """How many workers its node has."""
        return self._start.local_world_size

    def get_node_rank(self) -> int:
        """The number of its node."""
        return self._start.node_rank

    def get_storage(self) -> StorageContext:
        """Where the run keeps what it reports."""
        if self._store is None:
            raise SessionMisuseError(
                "In local mode (num_workers=0) there is no storage.", do="Use num_workers=1."
            )
        return StorageContext(self._store, self._start.run_name)

    def get_metadata(self) -> Any:
        """No more: pass what you need in `train_loop_config`."""
        raise _no_more("get_metadata", "pass what you need in train_loop_config")

    def get_trial_name(self) -> Any:
        """No more."""
        raise _no_more("get_trial_name", "use get_experiment_name")

    def get_trial_id(self) -> Any:
        """No more."""
        raise _no_more("get_trial_id", "use get_experiment_name")

    def get_trial_resources(self) -> Any:
        """No more."""
        raise _no_more("get_trial_resources", "the scaling config tells the resources of a worker")

    def get_trial_dir(self) -> Any:
        """No more."""
        raise _no_more("get_trial_dir", "use get_storage().experiment_fs_path")


def _no_more(name: str, instead: str) -> DeprecationWarning:
    return DeprecationWarning(f"TrainContext.{name} is no longer supported: {instead}.")
