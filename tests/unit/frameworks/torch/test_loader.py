"""Loaders: a share for each worker, everything else as the user made it."""

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
from spotfit.frameworks.torch.loader import MovingLoader, moved, on_device, with_share

CPU, META = torch.device("cpu"), torch.device("meta")
NUMBERS = TensorDataset(torch.arange(10))
OWN: DistributedSampler[Any] = DistributedSampler(NUMBERS, num_replicas=5, rank=1)
Pair = namedtuple("Pair", "x y")


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(4)


class Shuffled(Sampler[int]):
    """Like torchdata's, not made from torch's."""

    def __init__(self, data: TensorDataset) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(len(self)).tolist())


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
        prefetch_factor=7,
        persistent_workers=True,
        multiprocessing_context="spawn",
    )
    share = with_share(loader, world_size=2, rank=0)
    assert share is not loader
    assert (share.batch_size, share.num_workers, share.drop_last, share.timeout) == (3, 1, True, 5)
    assert share.collate_fn is collate
    assert share.worker_init_fn is init
    assert share.generator is generator
    assert (share.prefetch_factor, share.persistent_workers) == (7, True)
    assert share.multiprocessing_context is loader.multiprocessing_context
    assert share.pin_memory is False
    pinned: DataLoader[Any] = DataLoader(NUMBERS, pin_memory=True)
    assert with_share(pinned, world_size=2, rank=0).pin_memory is True


def test_shares_are_filled_up_to_one_length() -> None:
    loader: DataLoader[Any] = DataLoader(NUMBERS, batch_size=2)
    shares = [numbers(with_share(loader, world_size=3, rank=rank)) for rank in range(3)]
    assert shares == [[0, 3, 6, 9], [1, 4, 7, 0], [2, 5, 8, 1]]


def test_a_share_drops_its_last_batch_as_the_loader_did() -> None:
    loader: DataLoader[Any] = DataLoader(NUMBERS, batch_size=2, drop_last=True)
    assert numbers(with_share(loader, world_size=2, rank=0)) == [0, 2, 4, 6]


def test_samples_may_come_one_by_one() -> None:
    loader: DataLoader[Any] = DataLoader(NUMBERS, batch_size=None)
    share = with_share(loader, world_size=2, rank=1)
    assert [int(number) for (number,) in share] == [1, 3, 5, 7, 9]


def test_each_epoch_has_an_order_of_its_own_once_it_is_told() -> None:
    loader: DataLoader[Any] = DataLoader(NUMBERS, shuffle=True)
    shares = [with_share(loader, world_size=2, rank=rank) for rank in range(2)]

    def epoch(number: int) -> list[int]:
        for share in shares:
            share.sampler.set_epoch(number)  # type: ignore[attr-defined]
        return [*numbers(shares[0]), *numbers(shares[1])]

    first = epoch(0)
    assert sorted(first) == list(range(10))
    assert first == epoch(0) != epoch(1)


def test_without_being_told_every_epoch_is_the_same() -> None:
    loader: DataLoader[Any] = DataLoader(NUMBERS, shuffle=True)
    share = with_share(loader, world_size=2, rank=0)
    assert numbers(share) == numbers(share)


@pytest.mark.parametrize(("rank", "says"), [(0, True), (1, False)])
def test_any_other_sampler_is_replaced_and_rank_0_says_so(
    rank: int, says: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    weighted = WeightedRandomSampler([1.0] * 10, 10)
    loader: DataLoader[Any] = DataLoader(NUMBERS, sampler=weighted)
    share = with_share(loader, world_size=2, rank=rank)
    assert isinstance(share.sampler, DistributedSampler)
    assert share.sampler.shuffle is True
    assert ("sampler=WeightedRandomSampler" in capsys.readouterr().err) is says


def test_what_a_loader_of_torchdata_s_makes_by_itself_is_replaced_without_a_word(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parts = {"__module__": "torchdata.stateful_dataloader.sampler"}
    theirs = type("RandomSampler", (Shuffled,), parts)(NUMBERS)
    share = with_share(DataLoader(NUMBERS, sampler=theirs), world_size=2, rank=0)
    assert share.sampler.shuffle is True  # type: ignore[attr-defined]
    assert "torch.sampler.replaced" not in capsys.readouterr().err
    with_share(DataLoader(NUMBERS, sampler=Shuffled(NUMBERS)), world_size=2, rank=0)
    assert "sampler=Shuffled" in capsys.readouterr().err


@pytest.mark.parametrize("shuffle", [True, False])
def test_torch_s_own_batches_are_shared_as_if_the_loader_had_made_them(shuffle: bool) -> None:
    inner = RandomSampler(NUMBERS) if shuffle else SequentialSampler(NUMBERS)
    batches = BatchSampler(inner, batch_size=3, drop_last=True)
    loader: DataLoader[Any] = DataLoader(NUMBERS, batch_sampler=batches)
    share = with_share(loader, world_size=2, rank=0)
    assert [len(batch) for (batch,) in share] == [3]
    assert share.sampler.shuffle is shuffle  # type: ignore[attr-defined]


class ByLength(BatchSampler):
    """Puts together what is alike."""


def test_batches_that_a_sampler_of_the_user_makes_are_not_torn() -> None:
    batches = ByLength(SequentialSampler(NUMBERS), batch_size=2, drop_last=False)
    loader: DataLoader[Any] = DataLoader(NUMBERS, batch_sampler=batches)
    with pytest.raises(ConfigError, match="batches of ByLength cannot be shared"):
        with_share(loader, world_size=2, rank=0)


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
def test_what_cannot_or_need_not_be_shared_is_kept(loader: DataLoader[Any]) -> None:
    assert with_share(loader, world_size=2, rank=0) is loader


def test_one_worker_reads_everything() -> None:
    loader: DataLoader[Any] = DataLoader(NUMBERS)
    assert with_share(loader, world_size=1, rank=0) is loader
    assert with_share(loader, world_size=1, rank=0, resizes=True) is loader


@pytest.mark.parametrize(
    ("shuffle", "sampler"), [(True, RandomSampler), (False, SequentialSampler)]
)
def test_one_worker_of_an_elastic_group_keeps_no_place_that_others_could_not_go_on_from(
    shuffle: bool, sampler: type
) -> None:
    loader = Counting(NUMBERS, shuffle=shuffle, batch_size=3)
    assert with_share(loader, world_size=1, rank=0) is loader
    plain = with_share(loader, world_size=1, rank=0, resizes=True)
    assert (type(plain), type(plain.sampler)) == (DataLoader, sampler)
    assert sorted(numbers(plain)) == list(range(10))
    stream = Counting(Endless())
    assert with_share(stream, world_size=1, rank=0, resizes=True) is stream


def test_a_moving_loader_is_still_a_loader() -> None:
    loader: DataLoader[Any] = DataLoader(NUMBERS, batch_size=4)
    moving = MovingLoader(loader, META, ahead=True)
    assert isinstance(moving, DataLoader)
    assert isinstance(moving.sampler, SequentialSampler)
    assert (len(moving), moving.batch_size, moving.dataset) == (3, 4, NUMBERS)
    for _ in range(2):
        assert [batch.device.type for (batch,) in moving] == ["meta"] * 3


def test_on_a_cpu_the_loader_itself_has_nothing_to_move() -> None:
    loader: DataLoader[Any] = DataLoader(NUMBERS)
    assert on_device(loader, CPU, ahead=True) is loader
    assert isinstance(on_device(loader, META, ahead=True), MovingLoader)


class Restorable(DataLoader[Any]):
    def state_dict(self) -> dict[str, int]:
        return {"step": 3}


def test_a_moving_loader_can_whatever_the_given_one_can() -> None:
    moving = MovingLoader(Restorable(NUMBERS), META, ahead=True)
    assert moving.state_dict() == {"step": 3}
    assert len(copy.copy(moving)) == len(pickle.loads(pickle.dumps(moving))) == 10
    with pytest.raises(AttributeError, match="no_such_thing"):
        moving.no_such_thing  # noqa: B018


class Counting(DataLoader[Any]):
    """Keeps its place: the batches it has given."""

    given = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            self.given += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


class Lane:
    """Instead of a GPU's stream: there is nothing to wait for."""

    def wait_stream(self, other: Lane) -> None: ...


@pytest.mark.parametrize(("kind", "given"), [(Counting, 1), (DataLoader, 2)])
def test_a_loader_that_keeps_its_place_gives_no_batch_before_its_time(
    monkeypatch: pytest.MonkeyPatch, kind: Any, given: int
) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Lane())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Lane())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    fetched: list[Any] = []

    def collate(items: list[Any]) -> str:
        fetched.append(items)
        return "a batch without tensors"

    loader = kind(NUMBERS, collate_fn=collate)
    moving: Any = MovingLoader(loader, torch.device("cuda"), ahead=True)
    assert next(iter(moving)) == "a batch without tensors"
    assert len(fetched) == given
    if kind is Counting:
        assert moving.state_dict() == {"given": 1}


class Tokens(UserDict[str, Any]):
    """As tokenizers make them: a dictionary whose entries are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        return self.data[name]


class Graph:
    """As graph libraries make them: nothing we can look into, but it can move."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def to(self, device: torch.device) -> Graph:
        return Graph(device)


def test_mappings_and_what_moves_itself_stay_of_their_kind() -> None:
    one = torch.ones(1)
    batch: list[Any] = [Tokens(ids=one), OrderedDict(a=one), Graph(CPU), None]
    tokens, ordered, graph, nothing = moved(batch, META)
    assert isinstance(tokens, Tokens)
    assert tokens.ids.device == META
    assert isinstance(ordered, OrderedDict)
    assert ordered["a"].device == META
    assert graph.device == META
    assert nothing is None
    assert batch[0]["ids"].device == batch[1]["a"].device == CPU, "the given batch is not changed"


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
