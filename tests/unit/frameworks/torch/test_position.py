"""A place in the data: whoever goes on, with however many, no sample comes twice or never."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
    WeightedRandomSampler,
)

from spotfit.frameworks.torch.loader import with_share
from spotfit.frameworks.torch.position import Position, keeps_its_own, position_in

SAMPLES = 96
DATA = TensorDataset(torch.arange(SAMPLES))


def loader_of(rank: int, world_size: int, *, shuffle: bool = True, batch: int = 4) -> Any:
    plain: DataLoader[Any] = DataLoader(DATA, batch_size=batch, shuffle=shuffle)
    return with_share(plain, world_size=world_size, rank=rank)


def placed(rank: int, world_size: int, **how: Any) -> tuple[DataLoader[Any], Position]:
    loader = loader_of(rank, world_size, **how)
    place = position_in(loader, rank=rank, world_size=world_size)
    assert place is not None
    return loader, place


def numbers(loader: DataLoader[Any]) -> Iterator[list[int]]:
    for (batch,) in loader:
        yield batch.tolist()


def joined(batches: Iterable[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


def taken(
    world_size: int, begin: tuple[int, int], batches: int, **how: Any
) -> tuple[list[int], Any]:
    """What all ranks take together in so many batches, and where they stand then."""
    seen: list[int] = []
    ends = set()
    for rank in range(world_size):
        loader, place = placed(rank, world_size, **how)
        place.go_on(*begin)
        for _, batch in zip(range(batches), numbers(loader), strict=False):
            seen += batch
            place.advance()
        ends.add((place.epoch, place.consumed))
    (end,) = ends
    return seen, end


@given(sizes=st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=4))
def test_however_many_go_on_each_sample_comes_once(sizes: list[int]) -> None:
    seen: list[int] = []
    where = (3, 0)
    for world_size in sizes:
        more, where = taken(world_size, where, 2)
        seen += more
    rest, _ = taken(1, where, SAMPLES)
    often = Counter(seen + rest)
    assert often.keys() == set(range(SAMPLES))
    assert often.total() - SAMPLES < max(sizes), "only the last batch was filled up"


def test_undisturbed_it_reads_as_torch_would() -> None:
    for rank in (0, 1):
        plain = loader_of(rank, 2)
        loader, place = placed(rank, 2)
        for epoch in (0, 1):
            for one in (plain, loader):
                one.sampler.set_epoch(epoch)  # type: ignore[union-attr]
            for mine, theirs in zip(numbers(loader), numbers(plain), strict=True):
                assert mine == theirs
                place.advance()


def test_what_is_left_is_what_would_have_come() -> None:
    loader, place = placed(1, 2)
    whole = list(numbers(loader))
    again, place = placed(1, 2)
    place.go_on(0, 5 * 8)
    assert list(numbers(again)) == whole[5:]


def test_the_last_batch_is_filled_up_for_all_ranks() -> None:
    batches = [len(list(numbers(placed(rank, 5)[0]))) for rank in range(5)]
    assert len(set(batches)) == 1


def test_epochs_count_by_themselves_and_the_end_is_known() -> None:
    loader, place = placed(0, 2)
    told = []
    for _ in range(2):
        for _ in numbers(loader):
            place.advance()
            told.append((place.epoch, place.at_end))
    assert told == [(epoch, step == 11) for epoch in (0, 1) for step in range(12)]


def test_who_looks_at_the_loader_before_begins_no_epoch() -> None:
    loader, place = placed(0, 2)
    next(numbers(loader))
    for _ in numbers(loader):
        place.advance()
    assert place.epoch == 0


def test_after_the_last_batch_of_an_epoch_nothing_is_left_of_it() -> None:
    loader, place = placed(0, 2)
    place.go_on(1, SAMPLES)
    assert list(numbers(loader)) == []
    assert len(list(numbers(loader))) == 12
    assert place.epoch == 2


def test_an_order_of_dice_is_replaced_by_one_that_can_be_found_again() -> None:
    first, second = (list(numbers(placed(0, 1)[0])) for _ in range(2))
    assert first == second
    assert sorted(joined(first)) == list(range(SAMPLES))
    assert joined(first) != list(range(SAMPLES))


def test_it_is_told_when_the_first_pass_begins() -> None:
    loader, place = placed(0, 1)
    told: list[str] = []
    place.resumed = lambda: told.append("now")
    place.go_on(0, 0)
    batches = numbers(loader)
    assert told == []
    next(batches)
    list(numbers(loader))
    assert told == ["now"]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(4)


class Stateful(DataLoader[Any]):
    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on."""


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        (DataLoader(Stream()), "IterableDataset"),
        (DataLoader(DATA, batch_sampler=[[1]]), "list knows the loader's batches"),
        (DataLoader(DATA, sampler=WeightedRandomSampler([1.0], 5)), "WeightedRandomSampler knows"),
    ],
)
def test_what_no_place_can_be_told_of_says_so(
    loader: DataLoader[Any], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert position_in(loader, rank=0, world_size=1) is None
    assert why in capsys.readouterr().err


def test_a_loader_may_keep_its_own_place() -> None:
    assert keeps_its_own(Stateful(DATA))
    assert not keeps_its_own(DataLoader(DATA))


def test_a_sampler_that_drops_the_rest_drops_it_after_a_change_too() -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(DATA, 5, 0, drop_last=True)
    loader: DataLoader[Any] = DataLoader(DATA, batch_size=4, sampler=sampler)
    place = position_in(loader, rank=0, world_size=5)
    assert place is not None
    place.go_on(0, 90)
    assert sum(len(batch) for batch in numbers(loader)) == 1
