"""Data loaders are sharded per worker, and all other options are kept."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from spotfit.core.errors import ConfigError
from spotfit.torch.data_loader import (
    DeviceDataLoader,
    move_batch,
    shard_data_loader,
    with_device_transfer,
)

CPU, META = torch.device("cpu"), torch.device("meta")
NUMBERS = TensorDataset(torch.arange(10))
OWN: DistributedSampler[Any] = DistributedSampler(NUMBERS, num_replicas=5, rank=1)
Pair = namedtuple("Pair", "x y")


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(4)


class Shuffled(Sampler[int]):
    """A sampler like torchdata's, which does not derive from torch's RandomSampler."""

    def __init__(self, data: TensorDataset) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(len(self)).tolist())


def numbers(loader: DataLoader[Any]) -> list[int]:
    return [int(number) for (batch,) in loader for number in batch]


def test_shards_of_a_sequential_loader_are_in_order() -> None:
    loader: DataLoader[Any] = DataLoader(NUMBERS, batch_size=2)
    shares = [shard_data_loader(loader, world_size=2, rank=rank) for rank in range(2)]
    assert [numbers(share) for share in shares] == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]
    assert all(isinstance(share.sampler, DistributedSampler) for share in shares)
    assert {share.sampler.shuffle for share in shares} == {False}  # type: ignore[attr-defined]


def test_shards_of_a_shuffling_loader_are_shuffled() -> None:
    loader: DataLoader[Any] = DataLoader(NUMBERS, shuffle=True)
    share = shard_data_loader(loader, world_size=2, rank=0)
    assert isinstance(loader.sampler, RandomSampler), "the given one is not changed"
    assert share.sampler.shuffle is True  # type: ignore[attr-defined]


def test_options_are_copied_and_the_batch_size_is_per_worker() -> None:
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
        prefetch_factor=7,
        persistent_workers=True,
        multiprocessing_context="spawn",
    )
    share = shard_data_loader(loader, world_size=2, rank=0)
    assert share is not loader
    assert (share.batch_size, share.num_workers, share.drop_last, share.timeout) == (3, 1, True, 5)
    assert share.collate_fn is collate
    assert share.worker_init_fn is init
    assert share.generator is generator
    assert (share.prefetch_factor, share.persistent_workers) == (7, True)
    assert share.multiprocessing_context is loader.multiprocessing_context
    assert share.pin_memory is False
    pinned: DataLoader[Any] = DataLoader(NUMBERS, pin_memory=True)
    assert shard_data_loader(pinned, world_size=2, rank=0).pin_memory is True


def test_shards_are_padded_to_equal_length() -> None:
    loader: DataLoader[Any] = DataLoader(NUMBERS, batch_size=2)
    shares = [numbers(shard_data_loader(loader, world_size=3, rank=rank)) for rank in range(3)]
    assert shares == [[0, 3, 6, 9], [1, 4, 7, 0], [2, 5, 8, 1]]


def test_drop_last_is_kept_for_shards() -> None:
    loader: DataLoader[Any] = DataLoader(NUMBERS, batch_size=2, drop_last=True)
    assert numbers(shard_data_loader(loader, world_size=2, rank=0)) == [0, 2, 4, 6]


def test_a_loader_without_batching_is_sharded() -> None:
    loader: DataLoader[Any] = DataLoader(NUMBERS, batch_size=None)
    share = shard_data_loader(loader, world_size=2, rank=1)
    assert [int(number) for (number,) in share] == [1, 3, 5, 7, 9]


def test_set_epoch_changes_the_order() -> None:
    loader: DataLoader[Any] = DataLoader(NUMBERS, shuffle=True)
    shares = [shard_data_loader(loader, world_size=2, rank=rank) for rank in range(2)]

    def epoch(number: int) -> list[int]:
        for share in shares:
            share.sampler.set_epoch(number)  # type: ignore[attr-defined]
        return [*numbers(shares[0]), *numbers(shares[1])]

    first = epoch(0)
    assert sorted(first) == list(range(10))
    assert first == epoch(0) != epoch(1)


def test_without_set_epoch_every_epoch_has_the_same_order() -> None:
    loader: DataLoader[Any] = DataLoader(NUMBERS, shuffle=True)
    share = shard_data_loader(loader, world_size=2, rank=0)
    assert numbers(share) == numbers(share)


@pytest.mark.parametrize(("rank", "is_logged"), [(0, True), (1, False)])
def test_a_custom_sampler_is_replaced_with_a_warning_on_rank_0(
    rank: int, is_logged: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    weighted = WeightedRandomSampler([1.0] * 10, 10)
    loader: DataLoader[Any] = DataLoader(NUMBERS, sampler=weighted)
    share = shard_data_loader(loader, world_size=2, rank=rank)
    assert isinstance(share.sampler, DistributedSampler)
    assert share.sampler.shuffle is True
    assert ("sampler=WeightedRandomSampler" in capsys.readouterr().err) is is_logged


def test_the_default_sampler_of_torchdata_is_replaced_without_a_warning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parts = {"__module__": "torchdata.stateful_dataloader.sampler"}
    sampler = type("RandomSampler", (Shuffled,), parts)(NUMBERS)
    share = shard_data_loader(DataLoader(NUMBERS, sampler=sampler), world_size=2, rank=0)
    assert share.sampler.shuffle is True  # type: ignore[attr-defined]
    assert "torch.sampler.replaced" not in capsys.readouterr().err
    shard_data_loader(DataLoader(NUMBERS, sampler=Shuffled(NUMBERS)), world_size=2, rank=0)
    assert "sampler=Shuffled" in capsys.readouterr().err


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_standard_batch_sampler_is_sharded(shuffle: bool) -> None:
    inner = RandomSampler(NUMBERS) if shuffle else SequentialSampler(NUMBERS)
    batches = BatchSampler(inner, batch_size=3, drop_last=True)
    loader: DataLoader[Any] = DataLoader(NUMBERS, batch_sampler=batches)
    share = shard_data_loader(loader, world_size=2, rank=0)
    assert [len(batch) for (batch,) in share] == [3]
    assert share.sampler.shuffle is shuffle  # type: ignore[attr-defined]


class ByLength(BatchSampler):
    """A custom batch sampler that groups similar samples."""


def test_a_custom_batch_sampler_is_rejected() -> None:
    batches = ByLength(SequentialSampler(NUMBERS), batch_size=2, drop_last=False)
    loader: DataLoader[Any] = DataLoader(NUMBERS, batch_sampler=batches)
    with pytest.raises(ConfigError, match=r"custom batch_sampler \(ByLength\)"):
        shard_data_loader(loader, world_size=2, rank=0)


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Endless()),
        DataLoader(NUMBERS, sampler=OWN),
        DataLoader(NUMBERS, batch_sampler=ByLength(OWN, 2, drop_last=False)),
        DataLoader(NUMBERS, batch_sampler=OWN),
    ],
    ids=["iterable", "the user's own sampler", "in batches", "of batches"],
)
def test_loaders_that_cannot_be_sharded_are_returned_unchanged(loader: DataLoader[Any]) -> None:
    assert shard_data_loader(loader, world_size=2, rank=0) is loader


def test_the_loader_of_a_single_worker_is_returned_unchanged() -> None:
    loader: DataLoader[Any] = DataLoader(NUMBERS)
    assert shard_data_loader(loader, world_size=1, rank=0) is loader
    assert shard_data_loader(loader, world_size=1, rank=0, is_elastic=True) is loader


@pytest.mark.parametrize(
    ("shuffle", "sampler"), [(True, RandomSampler), (False, SequentialSampler)]
)
def test_a_stateful_loader_is_replaced_in_an_elastic_group_of_one(
    shuffle: bool, sampler: type
) -> None:
    loader = Counting(NUMBERS, shuffle=shuffle, batch_size=3)
    assert shard_data_loader(loader, world_size=1, rank=0) is loader
    plain = shard_data_loader(loader, world_size=1, rank=0, is_elastic=True)
    assert (type(plain), type(plain.sampler)) == (DataLoader, sampler)
    assert sorted(numbers(plain)) == list(range(10))
    stream = Counting(Endless())
    assert shard_data_loader(stream, world_size=1, rank=0, is_elastic=True) is stream


def test_a_device_loader_has_the_attributes_of_a_loader() -> None:
    loader: DataLoader[Any] = DataLoader(NUMBERS, batch_size=4)
    moving = DeviceDataLoader(loader, META, prefetch=True)
    assert isinstance(moving, DataLoader)
    assert isinstance(moving.sampler, SequentialSampler)
    assert (len(moving), moving.batch_size, moving.dataset) == (3, 4, NUMBERS)
    for _ in range(2):
        assert [batch.device.type for (batch,) in moving] == ["meta"] * 3


def test_on_a_cpu_the_given_loader_is_returned() -> None:
    loader: DataLoader[Any] = DataLoader(NUMBERS)
    assert with_device_transfer(loader, CPU, prefetch=True) is loader
    assert isinstance(with_device_transfer(loader, META, prefetch=True), DeviceDataLoader)


class Restorable(DataLoader[Any]):
    def state_dict(self) -> dict[str, int]:
        return {"step": 3}


def test_a_device_loader_forwards_additional_methods() -> None:
    moving = DeviceDataLoader(Restorable(NUMBERS), META, prefetch=True)
    assert moving.state_dict() == {"step": 3}
    assert len(copy.copy(moving)) == len(pickle.loads(pickle.dumps(moving))) == 10
    with pytest.raises(AttributeError, match="no_such_thing"):
        moving.no_such_thing  # noqa: B018


class Counting(DataLoader[Any]):
    """A stateful loader whose state is the number of batches it yielded."""

    yielded = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            self.yielded += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"yielded": self.yielded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.yielded = state["yielded"]


class FakeStream:
    """Replaces a CUDA stream on a machine without a GPU."""

    def wait_stream(self, other: FakeStream) -> None: ...


@pytest.mark.parametrize(("kind", "expected"), [(Counting, 1), (DataLoader, 2)])
def test_batches_of_a_stateful_loader_are_not_prefetched(
    monkeypatch: pytest.MonkeyPatch, kind: Any, expected: int
) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: FakeStream())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    fetched: list[Any] = []

    def collate(items: list[Any]) -> str:
        fetched.append(items)
        return "a batch without tensors"

    loader = kind(NUMBERS, collate_fn=collate)
    moving: Any = DeviceDataLoader(loader, torch.device("cuda"), prefetch=True)
    assert next(iter(moving)) == "a batch without tensors"
    assert len(fetched) == expected
    if kind is Counting:
        assert moving.state_dict() == {"yielded": 1}


class Tokens(UserDict[str, Any]):
    """A batch as tokenizers return it: a dictionary whose entries are also attributes."""

    def __getattr__(self, name: str) -> Any:
        return self.data[name]


class Graph:
    """A batch as graph libraries return it: opaque, with a `to` method."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def to(self, device: torch.device) -> Graph:
        return Graph(device)


def test_moved_mappings_and_custom_objects_keep_their_type() -> None:
    one = torch.ones(1)
    batch: list[Any] = [Tokens(ids=one), OrderedDict(a=one), Graph(CPU), None]
    tokens, ordered, graph, nothing = move_batch(batch, META)
    assert isinstance(tokens, Tokens)
    assert tokens.ids.device == META
    assert isinstance(ordered, OrderedDict)
    assert ordered["a"].device == META
    assert graph.device == META
    assert nothing is None
    assert batch[0]["ids"].device == batch[1]["a"].device == CPU, "the given batch is not changed"


def test_nested_tensors_are_moved() -> None:
    one = torch.ones(1)
    batch = {"a": one, "b": [one, (one, "text")], "c": Pair(one, 3)}
    moved = move_batch(batch, META)
    assert moved["a"].device == moved["b"][0].device == moved["b"][1][0].device == META
    assert moved["b"][1][1] == "text"
    assert isinstance(moved["b"][1], tuple)
    assert isinstance(moved["c"], Pair)
    assert (moved["c"].x.device, moved["c"].y) == (META, 3)
    assert one.device == CPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_next_batch_is_prefetched_completely() -> None:
    device = torch.device("cuda:0")
    data = TensorDataset(torch.arange(100_000, dtype=torch.float32).reshape(100, 1000))
    loader: DataLoader[Any] = DataLoader(data, batch_size=10, pin_memory=True)
    moving = DeviceDataLoader(loader, device, prefetch=True)
    for _ in range(2):
        batches = [batch * 2 for (batch,) in moving]
        assert {batch.device for batch in batches} == {device}
        assert torch.equal(torch.cat(batches).cpu(), data.tensors[0] * 2)
