"""Loaders: a share for each worker, everything else as the user made it."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

from spotfit.frameworks.torch.loader import MovingLoader, moved, with_share

CPU, META = torch.device("cpu"), torch.device("meta")
NUMBERS = TensorDataset(torch.arange(10))
Pair = namedtuple("Pair", "x y")


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(4)


def numbers(loader: DataLoader[Any]) -> list[int]:
    return [int(number) for (batch,) in loader for number in batch]


def test_each_worker_reads_its_share_in_order_if_the_loader_did() -> None:
    loader: DataLoader[Any] = DataLoader(NUMBERS, batch_size=2)
    shares = [with_share(loader, world_size=2, rank=rank) for rank in range(2)]
    assert [numbers(share) for share in shares] == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]
    assert all(isinstance(share.sampler, DistributedSampler) for share in shares)
    assert {share.sampler.shuffle for share in shares} == {False}  # type: ignore[attr-defined]


def test_a_loader_that_shuffled_shuffles() -> None:
    loader: DataLoader[Any] = DataLoader(NUMBERS, shuffle=True)
    share = with_share(loader, world_size=2, rank=0)
    assert isinstance(loader.sampler, RandomSampler), "the given one is not changed"
    assert share.sampler.shuffle is True  # type: ignore[attr-defined]


def test_what_the_user_chose_is_kept_and_batches_are_per_worker() -> None:
    def collate(items: list[Any]) -> list[Any]:
        return items

    def init(worker: int) -> None: ...

    generator = torch.Generator()
    loader: DataLoader[Any] = DataLoader(
        NUMBERS,
        batch_size=3,
        num_workers=1,
        collate_fn=collate,
        drop_last=True,
        timeout=5,
        worker_init_fn=init,
        generator=generator,
    )
    share = with_share(loader, world_size=2, rank=0)
    assert share is not loader
    assert (share.batch_size, share.num_workers, share.drop_last, share.timeout) == (3, 1, True, 5)
    assert share.collate_fn is collate
    assert share.worker_init_fn is init
    assert share.generator is generator
    assert share.pin_memory is loader.pin_memory


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Endless()),
        DataLoader(NUMBERS, sampler=DistributedSampler(NUMBERS, num_replicas=5, rank=1)),
    ],
    ids=["iterable", "the user's own sampler"],
)
def test_what_cannot_or_need_not_be_shared_is_kept(loader: DataLoader[Any]) -> None:
    assert with_share(loader, world_size=2, rank=0) is loader


def test_one_worker_reads_everything() -> None:
    loader: DataLoader[Any] = DataLoader(NUMBERS)
    assert with_share(loader, world_size=1, rank=0) is loader


def test_a_moving_loader_is_still_a_loader() -> None:
    loader: DataLoader[Any] = DataLoader(NUMBERS, batch_size=4)
    moving = MovingLoader(loader, META, ahead=True)
    assert isinstance(moving, DataLoader)
    assert isinstance(moving.sampler, SequentialSampler)
    assert (len(moving), moving.batch_size, moving.dataset) == (3, 4, NUMBERS)
    for _ in range(2):
        assert [batch.device.type for (batch,) in moving] == ["meta"] * 3


def test_tensors_move_wherever_they_are() -> None:
    one = torch.ones(1)
    batch = {"a": one, "b": [one, (one, "text")], "c": Pair(one, 3)}
    there = moved(batch, META)
    assert there["a"].device == there["b"][0].device == there["b"][1][0].device == META
    assert there["b"][1][1] == "text"
    assert isinstance(there["b"][1], tuple)
    assert isinstance(there["c"], Pair)
    assert (there["c"].x.device, there["c"].y) == (META, 3)
    assert one.device == CPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_one_batch_is_ahead_and_arrives_whole() -> None:
    device = torch.device("cuda:0")
    data = TensorDataset(torch.arange(100_000, dtype=torch.float32).reshape(100, 1000))
    loader: DataLoader[Any] = DataLoader(data, batch_size=10, pin_memory=True)
    moving = MovingLoader(loader, device, ahead=True)
    for _ in range(2):
        batches = [batch * 2 for (batch,) in moving]
        assert {batch.device for batch in batches} == {device}
        assert torch.equal(torch.cat(batches).cpu(), data.tensors[0] * 2)
