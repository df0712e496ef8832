"""TrainContext and StorageContext."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyarrow import fs

from spotfit.checkpoint.checkpoint_dir import Checkpoint
from spotfit.store.factory import open_store
from spotfit.worker.training_api import TrainContext
from tests.unit.checkpoint.saved_checkpoints import make_directory
from tests.unit.worker.agent_end import make_start

START = make_start(rank=5, local_rank=1, world_size=8, local_world_size=4, node_rank=1)


def test_context_returns_ranks_sizes_and_names() -> None:
    context = TrainContext(START, None)
    assert context.get_world_rank() == 5
    assert context.get_world_size() == 8
    assert context.get_local_rank() == 1
    assert context.get_local_world_size() == 4
    assert context.get_node_rank() == 1
    assert context.get_experiment_name() == "run"


@pytest.mark.parametrize(
    "name",
    ["get_metadata", "get_trial_name", "get_trial_id", "get_trial_resources", "get_trial_dir"],
)
def test_unsupported_methods_raise(name: str) -> None:
    with pytest.raises(DeprecationWarning, match=f"TrainContext.{name} is no longer supported"):
        getattr(TrainContext(START, None), name)()


def test_storage_returns_the_paths_of_the_run(tmp_path: Path) -> None:
    store = open_store(tmp_path / "results" / "run")
    storage = TrainContext(START, store).get_storage()
    assert storage.storage_fs_path == str(tmp_path / "results")
    assert storage.experiment_dir_name == "run"
    assert storage.experiment_fs_path == str(tmp_path / "results" / "run")
    assert storage.build_checkpoint_path_from_name("ck") == str(tmp_path / "results/run/ck")
    assert isinstance(storage.storage_filesystem, fs.LocalFileSystem)


def test_persist_current_checkpoint_uploads_without_a_report(tmp_path: Path) -> None:
    storage = TrainContext(START, open_store(tmp_path / "run")).get_storage()
    local = Checkpoint.from_directory(make_directory(tmp_path / "local", model="w"))
    stored = storage.persist_current_checkpoint(local, "ck")
    assert stored.path == storage.build_checkpoint_path_from_name("ck")
    assert (tmp_path / "run" / "ck" / "model").read_text() == "w"


def test_get_storage_raises_in_local_mode() -> None:
    with pytest.raises(RuntimeError, match="not available in local mode"):
        TrainContext(START, None).get_storage()
