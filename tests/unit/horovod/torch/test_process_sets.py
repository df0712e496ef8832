"""Ranks and process sets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

import spotfit.horovod.torch as hvd
from spotfit.core.errors import ConfigError
from tests.unit.horovod.rank_processes import RankProcesses


@pytest.fixture(autouse=True)
def _shut_down() -> Iterator[None]:
    yield
    hvd.shutdown()


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No variables of torchrun."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_ranks_are_those_of_the_group(ranks: RankProcesses) -> None:
    def describe() -> list[int]:
        numbers = [hvd.rank(), hvd.size(), hvd.local_rank()]
        return [*numbers, hvd.cross_rank(), hvd.cross_size()]

    # Ranks 0 and 1 are on one node: only it has a local rank 1.
    assert ranks.run(describe) == [[0, 3, 0, 0, 2], [1, 3, 1, 0, 1], [2, 3, 0, 1, 2]]
    assert ranks.run(hvd.is_homogeneous) == [False] * 3


def test_the_local_rank_is_counted_without_a_launcher(ranks: RankProcesses) -> None:
    def describe() -> tuple[int, int]:
        import os

        given = os.environ.pop("LOCAL_RANK")
        hvd.shutdown()
        hvd.init()
        counted = hvd.local_rank(), hvd.local_size()
        os.environ["LOCAL_RANK"] = given
        hvd.shutdown()
        hvd.init()
        return counted

    assert ranks.run(describe) == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.usefixtures("no_launcher")
def test_a_process_without_launcher_is_alone() -> None:
    hvd.init()
    assert hvd.is_initialized()
    assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (0, 1, 0, 1)
    assert (hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()) == (0, 1, True)


def test_init_forms_the_group_of_a_launcher(no_launcher: pytest.MonkeyPatch) -> None:
    launcher = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in (launcher | address).items():
        no_launcher.setenv(name, value)
    hvd.init()
    assert dist.is_initialized()
    hvd.shutdown()
    assert not dist.is_initialized(), "init has formed the group"


@pytest.mark.usefixtures("group", "no_launcher")
def test_a_group_that_others_have_formed_remains() -> None:
    hvd.init()
    hvd.shutdown()
    assert dist.is_initialized()
    assert not hvd.is_initialized()


def test_one_of_several_workers_without_a_group_is_rejected(
    no_launcher: pytest.MonkeyPatch,
) -> None:
    no_launcher.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="HorovodTrainer"):
        hvd.init()


@pytest.mark.usefixtures("no_launcher")
def test_init_with_an_mpi_communicator_is_rejected() -> None:
    with pytest.raises(ConfigError, match="no MPI"):
        hvd.init(comm=[0, 1])
    assert not hvd.is_initialized()


@pytest.mark.parametrize("function", [hvd.rank, hvd.size, hvd.cross_size, hvd.local_rank])
def test_ranks_need_init(function: Any) -> None:
    with pytest.raises(ConfigError, match=rf"hvd.{function.__name__}\(\) needs hvd.init\(\)"):
        function()


def test_process_sets_may_be_given_to_init(ranks: RankProcesses) -> None:
    def describe() -> list[Any]:
        hvd.shutdown()
        pair = hvd.ProcessSet([1, 2])
        hvd.init(process_sets=[pair])
        before = [pair.process_set_id, pair.size(), pair.rank()]
        hvd.shutdown()
        hvd.init()
        return [*before, pair.process_set_id]

    results = ranks.run(describe)
    assert results == [[1, 2, None, None], [1, 2, 0, None], [1, 2, 1, None]]


@pytest.mark.usefixtures("no_launcher")
@pytest.mark.parametrize("set_of_ranks", [[0], [0, 1], []])
def test_an_impossible_process_set_is_rejected(set_of_ranks: list[int]) -> None:
    hvd.init()
    with pytest.raises(ConfigError, match="ranks are 0 to 0"):
        hvd.add_process_set(set_of_ranks)


@pytest.mark.parametrize("communicator", [object(), ["comm"], iter([0])])
def test_a_process_set_of_anything_but_a_list_of_ranks_is_rejected(communicator: Any) -> None:
    with pytest.raises(ConfigError, match="no MPI"):
        hvd.ProcessSet(communicator)


@pytest.mark.usefixtures("no_launcher")
def test_the_set_of_all_ranks_cannot_be_removed() -> None:
    hvd.init()
    assert not hvd.remove_process_set(hvd.global_process_set)
    assert hvd.global_process_set.size() == 1
