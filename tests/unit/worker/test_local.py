"""Local mode: the last report is remembered, and there is nobody else."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotfit.checkpoint.handle import Checkpoint
from spotfit.model.ranks import Ranks
from spotfit.model.reporting import CheckpointConsistencyMode, CheckpointUploadMode
from spotfit.worker.local import LocalSession
from spotfit.worker.reported import Luggage


def test_metrics_count_without_a_checkpoint() -> None:
    session = LocalSession("run")
    session.report_metrics({"loss": 2})
    session.report_metrics({"loss": 1})
    assert session.metrics == {"loss": 1}
    assert session.checkpoint() is None


def test_a_checkpoint_is_remembered_and_not_touched(tmp_path: Path) -> None:
    session = LocalSession("run")
    checkpoint = Checkpoint.from_directory(tmp_path)
    session.report_files({"loss": 1}, Luggage(checkpoint, CheckpointUploadMode.ASYNC, delete=True))
    assert session.checkpoint() is checkpoint
    assert session.metrics == {"loss": 1}
    assert tmp_path.exists()


def test_what_a_worker_could_not_report_is_refused_here_too() -> None:
    with pytest.raises(ValueError, match="cannot be reported"):
        LocalSession("run").report_metrics({"a": object()})


def test_collectives_have_nobody_to_wait_for() -> None:
    session = LocalSession("run")
    session.barrier()
    thing = object()
    assert session.broadcast(thing) is thing
    assert session.preemption_info() is None
    assert session.reported(CheckpointConsistencyMode.VALIDATED, None) == []


class Others:
    """Peers that a launcher has started."""

    ranks = Ranks(world_rank=3, world_size=4, local_rank=1)

    def __init__(self) -> None:
        self.met = 0

    def barrier(self) -> None:
        self.met += 1

    def broadcast(self, thing: object) -> object:
        return "rank 0's"


def test_it_is_alone_unless_a_launcher_says_otherwise() -> None:
    alone = LocalSession("run").context
    assert (alone.get_world_size(), alone.get_world_rank(), alone.get_node_rank()) == (1, 0, 0)
    with pytest.raises(RuntimeError, match="local mode"):
        alone.get_storage()
    launched = LocalSession("run", Others()).context
    assert (launched.get_world_size(), launched.get_world_rank()) == (4, 3)
    assert launched.get_local_rank() == 1


def test_with_peers_collectives_are_theirs() -> None:
    others = Others()
    session = LocalSession("run", others)
    session.barrier()
    assert (session.broadcast("mine"), others.met) == ("rank 0's", 1)


def test_a_dataset_is_given_whole_and_the_same_each_time() -> None:
    made: list[list[int]] = []

    def make() -> list[int]:
        made.append([1, 2])
        return made[-1]

    session = LocalSession("run", datasets={"train": make, "valid": (3, 4)})
    assert session.dataset("valid") == (3, 4)
    assert session.dataset("train") is session.dataset("train")
    assert made == [[1, 2]]
    for unknown in ("test", None):
        with pytest.raises(KeyError, match="no dataset"):
            session.dataset(unknown)
