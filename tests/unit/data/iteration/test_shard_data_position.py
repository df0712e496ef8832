"""A Checkpointer that counts the epochs of a shard."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

import spotfit.data
from spotfit.data.data_config import DataConfig
from spotfit.data.iteration.shard_data_position import ShardDataPosition, is_dataset_shard
from spotfit.torch import Checkpointer
from spotfit.worker.local_session import LocalSession
from spotfit.worker.training_api import use_session

ROWS = 12


@pytest.fixture
def session() -> Iterator[LocalSession]:
    datasets = {"train": spotfit.data.range(ROWS)}
    session = LocalSession("run", datasets=datasets, dataset_config=DataConfig())
    with use_session(session):
        yield session


def make_checkpointer(shard: Any, every: Any = 1) -> Checkpointer:
    return Checkpointer(model=nn.Linear(1, 1), loader=shard, every=every, save_at_end=False)


def test_shards_and_their_batches_are_recognized() -> None:
    shard = spotfit.data.range(3).iterator()
    assert is_dataset_shard(shard)
    assert is_dataset_shard(shard.iter_torch_batches())
    assert not is_dataset_shard([1, 2])


def test_a_step_counts_the_oldest_batch_that_was_read(session: LocalSession) -> None:
    shard = spotfit.get_dataset_shard("train")
    checkpointer = make_checkpointer(shard)
    batches = iter(shard.iter_batches(batch_size=4))
    next(batches), next(batches)  # a training framework reads ahead
    checkpointer.step()
    assert session.data_positions()["train"]["consumed"] == 4


def test_the_last_step_of_an_epoch_saves(
    session: LocalSession, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = spotfit.get_dataset_shard("train")
    checkpointer = make_checkpointer(shard, every="epoch")
    for _ in range(2):
        for _ in shard.iter_batches(batch_size=5):
            checkpointer.step()
    assert capsys.readouterr().err.count("checkpoint.snapshot") == 2


def test_a_restore_returns_the_shard_to_its_position(session: LocalSession) -> None:
    shard = spotfit.get_dataset_shard("train")
    checkpointer = make_checkpointer(shard, every=2)
    for batch in shard.iter_batches(batch_size=4):
        checkpointer.step()
        if checkpointer.steps == 2:
            assert batch["id"].tolist() == [4, 5, 6, 7]
            break
    shard.position.end_epoch()
    restored = checkpointer.restore()
    assert restored is not None
    assert (restored.step, restored.epoch) == (2, 0)
    [rest] = shard.iter_batches(batch_size=4)
    assert rest["id"].tolist() == [8, 9, 10, 11]


def test_a_loop_that_takes_a_part_of_each_epoch_restores_the_next_one(
    session: LocalSession,
) -> None:
    shard = spotfit.get_dataset_shard("train")
    checkpointer = make_checkpointer(shard, every=2)
    for _ in range(2):
        batches = iter(shard.iter_batches(batch_size=4))
        for _ in range(2):
            next(batches)
            checkpointer.step()
    restored = checkpointer.restore()
    assert restored is not None
    assert restored.epoch == 2
    assert len(list(shard.iter_batches(batch_size=4))) == 3


def test_the_end_of_an_epoch_can_be_recorded(session: LocalSession) -> None:
    shard = spotfit.get_dataset_shard("train")
    checkpointer = make_checkpointer(shard)
    next(iter(shard.iter_batches(batch_size=4)))
    checkpointer.step()
    checkpointer.end_epoch()
    assert shard.position.epoch == 1


def test_any_number_of_ranks_can_resume() -> None:
    position = ShardDataPosition(spotfit.data.range(3).iterator().position)
    position.reject_resize([{}, {}])
    assert not position.is_bound_to_world_size
