"""LocalSession: stores the last report, delegates collectives to torchrun peers."""

from __future__ import annotations

from pathlib import Path

import pytest

import spotfit.data
from spotfit.checkpoint.checkpoint_dir import Checkpoint
from spotfit.checkpoint.committed import CheckpointReport
from spotfit.data.data_config import DataConfig
from spotfit.data.preprocessors import StandardScaler, preprocessor_of_metadata
from spotfit.model.reporting import CheckpointConsistencyMode, CheckpointUploadMode
from spotfit.model.topology import Ranks
from spotfit.worker.local_session import LocalSession


def test_the_last_metrics_are_stored() -> None:
    session = LocalSession("run")
    session.report_metrics({"loss": 2})
    session.report_metrics({"loss": 1})
    assert session.metrics == {"loss": 1}
    assert session.latest_checkpoint() is None


def test_a_reported_checkpoint_is_stored_and_its_files_are_kept(tmp_path: Path) -> None:
    session = LocalSession("run")
    checkpoint = Checkpoint.from_directory(tmp_path)
    session.report_checkpoint(
        {"loss": 1},
        CheckpointReport(checkpoint, CheckpointUploadMode.ASYNC, delete_after_upload=True),
    )
    assert session.latest_checkpoint() is checkpoint
    assert session.metrics == {"loss": 1}
    assert tmp_path.exists()


def test_metrics_that_are_not_json_are_rejected() -> None:
    with pytest.raises(ValueError, match="cannot be reported"):
        LocalSession("run").report_metrics({"a": object()})


def test_collectives_without_peers_return_at_once() -> None:
    session = LocalSession("run")
    session.barrier()
    value = object()
    assert session.broadcast(value) is value
    assert session.preemption_info() is None
    assert session.reported_checkpoints(CheckpointConsistencyMode.VALIDATED, None) == []


class FakePeers:
    """Peers started by a launcher."""

    ranks = Ranks(world_rank=3, world_size=4, local_rank=1)

    def __init__(self) -> None:
        self.barriers = 0

    def barrier(self) -> None:
        self.barriers += 1

    def broadcast(self, value: object) -> object:
        return "value of rank 0"


def test_ranks_are_those_of_the_launcher() -> None:
    single = LocalSession("run").context
    assert (single.get_world_size(), single.get_world_rank(), single.get_node_rank()) == (1, 0, 0)
    with pytest.raises(RuntimeError, match="local mode"):
        single.get_storage()
    launched = LocalSession("run", FakePeers()).context
    assert (launched.get_world_size(), launched.get_world_rank()) == (4, 3)
    assert launched.get_local_rank() == 1


def test_collectives_with_peers_are_delegated() -> None:
    peers = FakePeers()
    session = LocalSession("run", peers)
    session.barrier()
    assert (session.broadcast("local value"), peers.barriers) == ("value of rank 0", 1)


def test_a_dataset_shard_is_the_complete_dataset_and_cached() -> None:
    loaded: list[list[int]] = []

    def load() -> list[int]:
        loaded.append([1, 2])
        return loaded[-1]

    session = LocalSession("run", datasets={"train": load, "valid": (3, 4)})
    assert session.dataset_shard("valid") == (3, 4)
    assert session.dataset_shard("train") is session.dataset_shard("train")
    assert loaded == [[1, 2]]
    for unknown in ("test", None):
        with pytest.raises(KeyError, match="no dataset"):
            session.dataset_shard(unknown)


def test_a_checkpoint_has_the_preprocessor_of_the_training_rows(tmp_path: Path) -> None:
    rows = spotfit.data.from_items([{"x": 1.0}, {"x": 3.0}])
    train = StandardScaler(["x"]).fit_transform(rows)
    session = LocalSession("run", datasets={"train": train}, dataset_config=DataConfig())
    session.dataset_shard("train")
    checkpoint = Checkpoint.from_directory(tmp_path)
    session.report_checkpoint({}, CheckpointReport(checkpoint, CheckpointUploadMode.SYNC, False))
    found = preprocessor_of_metadata(Checkpoint(tmp_path).get_metadata())
    assert found is not None
    assert found.stats_ == {"mean(x)": 2.0, "std(x)": 1.0}
