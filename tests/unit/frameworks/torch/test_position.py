"""A place in the data: whoever goes on, with however many, no sample comes twice or never."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from spotfit.core.errors import ConfigError
from spotfit.frameworks.torch.loader import with_share
from spotfit.frameworks.torch.position import Passes, Position, keeps_its_own, place_in

SAMPLES = 96
DATA = TensorDataset(torch.arange(SAMPLES))
Own = dict[str, Any]


def loader_of(rank: int, world_size: int, *, shuffle: bool = True, batch: int = 4) -> Any:
    plain: DataLoader[Any] = DataLoader(DATA, batch_size=batch, shuffle=shuffle)
    return with_share(plain, world_size=world_size, rank=rank)


def known(loader: DataLoader[Any], *, world_size: int) -> Position:
    place = place_in(loader, world_size=world_size)
    assert isinstance(place, Position)
    return place


def placed(rank: int, world_size: int, **how: Any) -> tuple[DataLoader[Any], Position]:
    loader = loader_of(rank, world_size, **how)
    place = known(loader, world_size=world_size)
    return loader, place


def numbers(loader: DataLoader[Any]) -> Iterator[list[int]]:
    for (batch,) in loader:
        yield batch.tolist()


def joined(batches: Iterable[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


def taken(
    world_size: int, begin: tuple[int, int, Own], batches: int, **how: Any
) -> tuple[list[int], tuple[int, int, Own]]:
    """What all ranks take together in so many batches, and where they stand then."""
    epoch, consumed, own = begin
    seen: list[int] = []
    ends = set()
    for rank in range(world_size):
        loader, place = placed(rank, world_size, **how)
        place.refuse_resized([own])
        place.go_on_resized(epoch, consumed, [own])
        for _, batch in zip(range(batches), numbers(loader), strict=False):
            seen += batch
            place.advance()
        ends.add((place.epoch, place.consumed))
        own = place.state()
    ((epoch, consumed),) = ends
    return seen, (epoch, consumed, own)


@given(sizes=st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=4))
def test_however_many_go_on_each_sample_comes_once(sizes: list[int]) -> None:
    seen: list[int] = []
    where: tuple[int, int, Own] = (3, 0, {})
    for world_size, batches in [*((size, 2) for size in sizes), (1, SAMPLES)]:
        if where[0] == 3:  # an epoch that was read to its end is over
            more, where = taken(world_size, where, batches)
            seen += more
    often = Counter(seen)
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


def test_who_looks_before_going_on_takes_nothing_away_from_it() -> None:
    loader, place = placed(0, 2)
    told: list[str] = []
    place.go_on(1, 5 * 8, put_back=lambda: told.append("the dice are put back"))
    (looked,) = next(iter(loader))
    rest = list(numbers(loader))
    assert (len(rest), rest[0], place.epoch) == (12 - 5, looked.tolist(), 1)
    assert len(told) == 2, "a look throws dice, too"
    place.advance()
    next(numbers(loader))
    assert (place.epoch, len(told)) == (2, 2)


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


def test_what_is_saved_after_the_loop_over_an_epoch_goes_on_with_the_next() -> None:
    loader, before = placed(0, 2)
    for _ in numbers(loader):
        before.advance()
    assert (before.epoch, before.consumed) == (1, 0)
    again, after = placed(0, 2)
    told: list[str] = []
    after.go_on(before.epoch, 0, before.state(), lambda: told.append("the dice are put back"))
    assert len(list(numbers(again))) == 12
    assert after.epoch == 1
    assert told == [], "the loader had not thrown its own yet"


def test_who_only_looks_through_an_epoch_does_not_end_it() -> None:
    loader, place = placed(0, 2)
    first, second = list(numbers(loader)), list(numbers(loader))
    assert (place.epoch, first) == (0, second)


def test_the_dice_are_put_back_when_the_first_pass_has_begun() -> None:
    loader, place = placed(0, 1)
    told: list[str] = []
    place.go_on(0, 4, put_back=lambda: told.append("now"))
    batches = numbers(loader)
    assert told == []
    next(batches)
    place.advance()
    list(numbers(loader))
    assert told == ["now"]


def test_ranks_that_share_a_model_s_parts_read_what_their_sampler_says() -> None:
    """Four ranks, two of them a replica: what a sampler deals out is dealt the same way."""

    def loader(rank: int) -> DataLoader[Any]:
        sampler: DistributedSampler[Any] = DistributedSampler(DATA, 2, rank // 2, seed=9)
        return DataLoader(DATA, batch_size=4, sampler=sampler)

    for rank in range(4):
        mine = loader(rank)
        place = known(mine, world_size=4)
        told = []
        for batch, as_torch_has_it in zip(numbers(mine), numbers(loader(rank)), strict=True):
            place.advance()
            assert batch == as_torch_has_it
            told.append((place.consumed, place.at_end))
        assert told[-2:] == [(SAMPLES - 8, False), (SAMPLES, True)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_shard_of_a_rank_s_own_is_read_whole(shuffle: bool) -> None:
    loader: DataLoader[Any] = DataLoader(DATA, batch_size=4, shuffle=shuffle)
    place = known(loader, world_size=3)
    seen = []
    for batch in numbers(loader):
        seen += batch
        place.advance()
        assert place.consumed == len(seen)
    assert sorted(seen) == list(range(SAMPLES))
    assert place.epoch == 1


def test_who_reads_a_shard_of_its_own_reads_in_an_order_of_its_own() -> None:
    def order(seed: int) -> list[int]:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            loader: DataLoader[Any] = DataLoader(DATA, shuffle=True)
            known(loader, world_size=2)
        return joined(numbers(loader))

    assert order(1) == order(1) != order(2)


def plain(world_size: int) -> Position:
    return known(DataLoader(DATA, shuffle=True), world_size=world_size)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (plain(2), plain(3)),
        (plain(2), plain(1)),
        (plain(1), plain(2)),
        (placed(0, 2)[1], plain(3)),
        (plain(2), placed(0, 3)[1]),
    ],
)
def test_places_of_their_own_are_no_epoch_that_others_could_go_on_with(
    before: Position, after: Position
) -> None:
    with pytest.raises(ConfigError, match="place of each is its own"):
        after.refuse_resized([before.state()])


def test_a_place_that_only_the_loader_knew_cannot_be_dealt_out() -> None:
    with pytest.raises(ConfigError, match="place of each is its own"):
        placed(0, 2)[1].refuse_resized([{"loader": {}}])


def test_batches_of_torch_s_that_a_user_made_are_read_in_their_order() -> None:
    def loader(rank: int) -> DataLoader[Any]:
        sampler: DistributedSampler[Any] = DistributedSampler(DATA, 2, rank, seed=7)
        return DataLoader(DATA, batch_sampler=BatchSampler(sampler, 5, drop_last=True))

    for rank in (0, 1):
        mine, again = loader(rank), loader(rank)
        as_torch_has_them = list(numbers(loader(rank)))
        place, next_place = (known(one, world_size=2) for one in (mine, again))
        for _, batch in zip(range(3), numbers(mine), strict=False):
            assert batch == as_torch_has_them[place.consumed // 10]
            place.advance()
        next_place.go_on(place.epoch, place.consumed, place.state())
        assert list(numbers(again)) == as_torch_has_them[3:]
        assert len(as_torch_has_them) == 9, "the rest of three is dropped"


def test_a_loader_s_own_dice_say_which_order_it_is_and_it_is_kept() -> None:
    def loader(seed: int) -> tuple[DataLoader[Any], Position]:
        dice = torch.Generator().manual_seed(seed)
        one: DataLoader[Any] = DataLoader(DATA, batch_size=4, shuffle=True, generator=dice)
        return one, known(one, world_size=1)

    (first, place), (second, other) = loader(1), loader(2)
    order = list(numbers(first))
    assert order != list(numbers(second))
    other.go_on(0, 8, place.state())
    assert list(numbers(second)) == order[2:]


def looked_at(loader: DataLoader[Any], place: Position) -> None:
    next(iter(loader))


def evaluated_with(loader: DataLoader[Any], place: Position) -> None:
    gone_through(loader, place)
    list(loader)


def gone_through(loader: DataLoader[Any], place: Position) -> None:
    for _ in loader:
        place.advance()


@pytest.mark.parametrize("done", [looked_at, evaluated_with, gone_through])
def test_the_next_pass_finds_the_dice_as_it_would_have(done: Any) -> None:
    """A loader throws some whenever it begins."""

    def thrown_in_a_pass(loader: DataLoader[Any]) -> float:
        batches = iter(loader)
        next(batches)
        return float(torch.rand(1))

    torch.manual_seed(7)
    loader, place = placed(0, 1)
    done(loader, place)
    dice, saved = torch.get_rng_state(), (place.epoch, place.consumed, place.state())
    undisturbed = thrown_in_a_pass(loader)
    again, resumed = placed(0, 1)
    torch.set_rng_state(dice)
    resumed.go_on(*saved, lambda: torch.set_rng_state(dice))
    assert thrown_in_a_pass(again) == undisturbed


@pytest.mark.parametrize("persists", [True, False])
def test_a_loader_whose_processes_persist_throws_dice_once(*, persists: bool) -> None:
    loader: DataLoader[Any] = DataLoader(
        DATA, batch_size=4, num_workers=1, persistent_workers=persists
    )
    place = known(loader, world_size=1)
    assert not place.state()["place"]["open"]

    def begin() -> Iterator[int]:
        iter(place)  # torch does, and has its processes read
        return iter(range(24))

    for _ in place.begun(begin):
        place.advance()
    assert (place.epoch, place.state()["place"]["open"]) == (1, persists)


def test_batches_that_were_all_fetched_before_a_step_are_gone_on_with_without_a_throw() -> None:
    loader, place = placed(0, 1)
    fetched = list(loader)
    assert not place.state()["place"]["open"]
    for _ in fetched[:5]:
        place.advance()
    assert place.state()["place"]["open"]


def test_a_second_place_in_a_loader_is_that_of_the_sampler_it_had() -> None:
    loader, first = placed(1, 2)
    second = known(loader, world_size=2)
    assert second.given is first.given


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(4)


class Mine(DistributedSampler[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter([7] * len(self))


class Hard(RandomSampler):
    def __iter__(self) -> Iterator[int]:
        return iter([7] * len(self))


class Stateful(DataLoader[Any]):
    """Keeps its place as torchdata's does: a pass that came to its end is followed by a new one."""

    begins_at = given = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.given, self.begins_at = self.begins_at, 0
        for batch in islice(super().__iter__(), self.given, None):
            self.given += 1
            yield batch
        self.given = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begins_at = state["given"]


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        (DataLoader(Stream()), "IterableDataset"),
        (DataLoader(DATA, batch_sampler=[[1]]), "list knows the loader's batches"),
        (DataLoader(DATA, sampler=WeightedRandomSampler([1.0], 5)), "WeightedRandomSampler knows"),
        (DataLoader(DATA, sampler=RandomSampler(DATA, num_samples=8)), "RandomSampler knows"),
        (DataLoader(DATA, sampler=Mine(DATA, 1, 0)), "Mine knows the loader's order"),
        (DataLoader(DATA, sampler=Hard(DATA)), "Hard knows the loader's order"),
        (DataLoader(DATA, batch_size=None), "batch_size=None"),
        (["a", "b"], "a list is no DataLoader"),
        (DataLoader(DATA, num_workers=1, in_order=False), "in_order=False"),
    ],
)
def test_what_no_place_can_be_told_of_says_so(
    loader: Any, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert isinstance(place_in(loader, world_size=1), Passes)
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("loader", "tied"),
    [
        (DataLoader(DATA), True),
        (DataLoader(DATA, sampler=DistributedSampler(DATA, 2, 0)), False),
        (Stateful(DATA), True),
        (DataLoader(Stream()), False),
    ],
    ids=["of its own", "shared", "kept by the loader", "unknown"],
)
def test_a_place_that_is_each_ranks_own_ties_it_to_as_many(loader: Any, *, tied: bool) -> None:
    assert place_in(loader, world_size=2).tied is tied
    assert place_in(DataLoader(DATA), world_size=1).tied is False


def test_without_processes_of_its_own_a_loader_is_always_in_order() -> None:
    assert isinstance(place_in(DataLoader(DATA, in_order=False), world_size=1), Position)


class Alone:
    """Its own iterator, and begun anew at its end, as NVIDIA DALI's are."""

    given = 0

    def __iter__(self) -> Alone:
        return self

    def __next__(self) -> int:
        self.given = (self.given + 1) % 4
        if not self.given:
            raise StopIteration
        return self.given


def test_a_loader_may_be_its_own_iterator() -> None:
    loader = Alone()
    place = kept(loader)
    assert list(loader) == [1, 2, 3]
    assert epochs_of(loader, place, 7) == [0, 0, 0, 1, 1, 1, 2]


def test_a_sampler_in_the_batches_can_do_what_it_could() -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(DATA, 1, 0)
    loader: DataLoader[Any] = DataLoader(DATA, batch_sampler=BatchSampler(sampler, 4, False))
    place = known(loader, world_size=1)
    batches: Any = loader.batch_sampler
    inner: Any = batches.sampler
    assert inner is place
    inner.set_epoch(3)
    assert (sampler.epoch, inner.num_replicas) == (3, 1)
    assert copy.copy(place).given is sampler


def test_a_loader_may_keep_its_own_place() -> None:
    assert keeps_its_own(Stateful(DATA))
    assert not keeps_its_own(DataLoader(DATA))


def test_a_sampler_that_drops_the_rest_drops_it_after_a_change_too() -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(DATA, 5, 0, drop_last=True)
    loader: DataLoader[Any] = DataLoader(DATA, batch_size=4, sampler=sampler)
    place = known(loader, world_size=5)
    place.go_on(0, 90)
    assert sum(len(batch) for batch in numbers(loader)) == 1


def kept(loader: Any) -> Passes:
    place = place_in(loader, world_size=1)
    assert isinstance(place, Passes)
    return place


def epochs_of(loader: Any, place: Passes, steps: int) -> list[int]:
    """The epoch of each of so many steps."""
    told: list[int] = []
    while True:
        for _ in loader:
            place.advance()
            told.append(place.epoch)
            if len(told) == steps:
                return told


@pytest.mark.parametrize("kind", [Stateful, DataLoader])
def test_passes_are_counted_where_only_the_loader_knows_its_place(kind: Any) -> None:
    loader = kind(Stream(), batch_size=2) if kind is DataLoader else kind(DATA, batch_size=48)
    place = kept(loader)
    next(iter(loader))
    assert epochs_of(loader, place, 5) == [0, 0, 1, 1, 2]
    assert (isinstance(loader, kind), len(list(loader))) == (True, 2)


def test_a_pass_that_was_broken_off_counts() -> None:
    loader = Stateful(DATA, batch_size=4)
    place = kept(loader)
    for epoch in range(3):
        for _ in zip(range(2), loader, strict=False):
            place.advance()
            assert place.epoch == epoch


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5])
def test_a_loader_that_keeps_its_place_goes_on_in_its_epoch(steps: int) -> None:
    """Two batches are a pass: some are saved after its last."""
    first, second = Stateful(DATA, batch_size=48), Stateful(DATA, batch_size=48)
    before, after = kept(first), kept(second)
    told = epochs_of(first, before, steps)
    saved = before.state()
    after.go_on(before.epoch, before.consumed, saved)
    assert after.state() == saved, "until a batch is taken, it is what it was"
    assert told + epochs_of(second, after, 6 - steps) == [0, 0, 1, 1, 2, 2]


def test_a_loader_that_was_saved_after_a_pass_begins_the_next() -> None:
    first, second = Stateful(DATA, batch_size=48), Stateful(DATA, batch_size=48)
    before, after = kept(first), kept(second)
    for _ in first:
        before.advance()
    assert before.epoch == 1
    after.go_on(before.epoch, before.consumed, before.state())
    assert epochs_of(second, after, 3) == [1, 1, 2]


def test_who_looks_into_a_loader_that_goes_on_takes_nothing_away_from_it() -> None:
    loader = Stateful(DATA, batch_size=8)
    place = kept(loader)
    told: list[str] = []
    place.go_on(1, 9, {"loader": {"given": 9}}, lambda: told.append("the dice are put back"))
    (looked,) = next(iter(loader))
    rest = list(numbers(loader))
    assert (len(rest), rest[0], len(told)) == (3, looked.tolist(), 2)


def test_what_a_loader_kept_is_of_no_use_to_another_number_of_ranks() -> None:
    """Equal places are no proof that all read the same: samplers deal out what they count."""
    with pytest.raises(ConfigError, match="kept by 2 ranks, each its own"):
        kept(Stateful(DATA)).refuse_resized([{"loader": {"given": 3}}] * 2)


def test_without_a_state_of_its_loader_any_number_begins_the_epoch_anew() -> None:
    loader = DataLoader(Stream())
    place = kept(loader)
    place.refuse_resized([{}, {}])
    place.go_on_resized(2, 3, [{}, {}])
    assert epochs_of(loader, place, 5) == [2, 2, 2, 2, 3]


def test_what_cannot_tell_of_its_passes_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    loader = [1, 2]
    assert epochs_of(loader, kept(loader), 3) == [0, 0, 0]
    assert "checkpoint.epochs_unknown" in capsys.readouterr().err


class Ahead:
    """Gives a batch when it has fetched the next, as loaders for a GPU do."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        waiting: list[Any] = []
        for batch in self._loader:
            yield from waiting
            waiting = [batch]
        yield from waiting


@pytest.mark.parametrize("watched", ["what looks ahead", "what it looks into"])
def test_who_fetches_ahead_ends_no_pass_before_its_time(watched: str) -> None:
    inner: DataLoader[Any] = DataLoader(Stream())
    outer = Ahead(inner)
    place = kept(outer if watched == "what looks ahead" else inner)
    assert epochs_of(outer, place, 9) == [0, 0, 0, 0, 1, 1, 1, 1, 2]
