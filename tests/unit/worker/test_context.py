"""A worker knows its place."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyarrow import fs

from spotfit.checkpoint.handle import Checkpoint
from spotfit.store.opening import open_store
from spotfit.worker.context import TrainContext
from tests.unit.checkpoint.kept import directory
from tests.unit.worker.agent_end import start

PLACE = start(rank=5, local_rank=1, world_size=8, local_world_size=4, node_rank=1)


def test_it_tells_ranks_sizes_and_names() -> None:
    context = TrainContext(PLACE, None)
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
def test_what_is_no_more_raises(name: str) -> None:
    with pytest.raises(DeprecationWarning, match=f"TrainContext.{name} is no longer supported"):
        getattr(TrainContext(PLACE, None), name)()


def test_it_tells_where_the_run_is_kept(tmp_path: Path) -> None:
    store = open_store(tmp_path / "results" / "run")
    storage = TrainContext(PLACE, store).get_storage()
    assert storage.storage_fs_path == str(tmp_path / "results")
    assert storage.experiment_dir_name == "run"
    assert storage.experiment_fs_path == str(tmp_path / "results" / "run")
    assert storage.build_checkpoint_path_from_name("ck") == str(tmp_path / "results/run/ck")
    assert isinstance(storage.storage_filesystem, fs.LocalFileSystem)


def test_files_can_be_brought_there_without_a_report(tmp_path: Path) -> None:
    storage = TrainContext(PLACE, open_store(tmp_path / "run")).get_storage()
    mine = Checkpoint.from_directory(directory(tmp_path / "mine", model="w"))
    there = storage.persist_current_checkpoint(mine, "ck")
    assert there.path == storage.build_checkpoint_path_from_name("ck")
    assert (tmp_path / "run" / "ck" / "model").read_text() == "w"


def test_without_storage_there_is_none() -> None:
    with pytest.raises(RuntimeError, match="no storage"):
        TrainContext(PLACE, None).get_storage()
