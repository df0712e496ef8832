"""Data positions: at every world size no sample is repeated or skipped."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from types import ModuleType
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
from spotfit.torch.checkpoint.data_position import (
    LoaderPosition,
    SamplerPosition,
    is_stateful_loader,
    track_data_position,
)
from spotfit.torch.data_loader import shard_data_loader

SAMPLES = 96
DATA = TensorDataset(torch.arange(SAMPLES))
Own = dict[str, Any]


def loader_of(rank: int, world_size: int, *, shuffle: bool = True, batch: int = 4) -> Any:
    plain: DataLoader[Any] = DataLoader(DATA, batch_size=batch, shuffle=shuffle)
    return shard_data_loader(plain, world_size=world_size, rank=rank)


def track(loader: DataLoader[Any], *, world_size: int) -> SamplerPosition:
    place = track_data_position(loader, world_size=world_size)
    assert isinstance(place, SamplerPosition)
    return place


def sharded_loader(
    rank: int, world_size: int, **how: Any
) -> tuple[DataLoader[Any], SamplerPosition]:
    loader = loader_of(rank, world_size, **how)
    place = track(loader, world_size=world_size)
    return loader, place


def numbers(loader: DataLoader[Any]) -> Iterator[list[int]]:
    for (batch,) in loader:
        yield batch.tolist()


def flatten(batches: Iterable[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


def read_batches(
    world_size: int, begin: tuple[int, int, Own], batches: int, **how: Any
) -> tuple[list[int], tuple[int, int, Own]]:
    """Return the samples that all ranks read in these batches, and their position then."""
    epoch, consumed, own = begin
    samples: list[int] = []
    ends = set()
    for rank in range(world_size):
        loader, place = sharded_loader(rank, world_size, **how)
        place.reject_resize([own])
        place.resume_resized(epoch, consumed, [own])
        for _, batch in zip(range(batches), numbers(loader), strict=False):
            samples += batch
            place.advance()
        ends.add((place.epoch, place.consumed))
        own = place.rank_state()
    ((epoch, consumed),) = ends
    return samples, (epoch, consumed, own)


@given(sizes=st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=4))
def test_resized_groups_read_each_sample_once(sizes: list[int]) -> None:
    samples: list[int] = []
    where: tuple[int, int, Own] = (3, 0, {})
    for world_size, batches in [*((size, 2) for size in sizes), (1, SAMPLES)]:
        if where[0] == 3:  # an epoch that was read to its end is over
            more, where = read_batches(world_size, where, batches)
            samples += more
    often = Counter(samples)
    assert often.keys() == set(range(SAMPLES))
    assert often.total() - SAMPLES < max(sizes), "only the last batch was filled up"


def test_without_interruption_the_order_is_torch_s() -> None:
    for rank in (0, 1):
        plain = loader_of(rank, 2)
        loader, place = sharded_loader(rank, 2)
        for epoch in (0, 1):
            for one in (plain, loader):
                one.sampler.set_epoch(epoch)  # type: ignore[union-attr]
            for actual, expected in zip(numbers(loader), numbers(plain), strict=True):
                assert actual == expected
                place.advance()


def test_a_resumed_epoch_continues_in_its_order() -> None:
    loader, place = sharded_loader(1, 2)
    whole = list(numbers(loader))
    again, place = sharded_loader(1, 2)
    place.resume(0, 5 * 8)
    assert list(numbers(again)) == whole[5:]


def test_the_last_batch_is_padded_on_all_ranks() -> None:
    batches = [len(list(numbers(sharded_loader(rank, 5)[0]))) for rank in range(5)]
    assert len(set(batches)) == 1


def test_epochs_are_counted_and_their_end_is_known() -> None:
    loader, place = sharded_loader(0, 2)
    recorded = []
    for _ in range(2):
        for _ in numbers(loader):
            place.advance()
            recorded.append((place.epoch, place.is_at_end))
    assert recorded == [(epoch, step == 11) for epoch in (0, 1) for step in range(12)]


def test_inspecting_the_loader_begins_no_epoch() -> None:
    loader, place = sharded_loader(0, 2)
    next(numbers(loader))
    epochs = []
    for _ in numbers(loader):
        place.advance()
        epochs.append(place.epoch)
    assert epochs == [0] * 12


def test_inspecting_the_loader_before_resuming_skips_nothing() -> None:
    loader, place = sharded_loader(0, 2)
    recorded: list[str] = []
    place.resume(1, 5 * 8, restore_rng=lambda: recorded.append("RNG state restored"))
    (looked,) = next(iter(loader))
    rest = list(numbers(loader))
    assert (len(rest), rest[0], place.epoch) == (12 - 5, looked.tolist(), 1)
    assert len(recorded) == 2, "inspecting the loader also draws a base seed"
    place.advance()
    next(numbers(loader))
    assert (place.epoch, len(recorded)) == (2, 2)


def test_after_the_last_batch_the_rest_of_the_epoch_is_empty() -> None:
    loader, place = sharded_loader(0, 2)
    place.resume(1, SAMPLES)
    assert list(numbers(loader)) == []
    assert len(list(numbers(loader))) == 12
    assert place.epoch == 2


def test_random_order_is_replaced_by_a_reproducible_one() -> None:
    first, second = (list(numbers(sharded_loader(0, 1)[0])) for _ in range(2))
    assert first == second
    assert sorted(flatten(first)) == list(range(SAMPLES))
    assert flatten(first) != list(range(SAMPLES))


def test_a_state_saved_after_an_epoch_resumes_with_the_next() -> None:
    loader, before = sharded_loader(0, 2)
    for _ in numbers(loader):
        before.advance()
    assert (before.epoch, before.consumed) == (1, 0)
    again, after = sharded_loader(0, 2)
    recorded: list[str] = []
    after.resume(
        before.epoch, 0, before.rank_state(), lambda: recorded.append("RNG state restored")
    )
    assert len(list(numbers(again))) == 12
    assert after.epoch == 1
    assert recorded == [], "the loader had not drawn its base seed yet"


def test_iterating_without_training_does_not_end_an_epoch() -> None:
    loader, place = sharded_loader(0, 2)
    first, second = list(numbers(loader)), list(numbers(loader))
    assert (place.epoch, first) == (0, second)


def test_the_rng_state_is_restored_when_the_first_pass_has_begun() -> None:
    loader, place = sharded_loader(0, 1)
    recorded: list[str] = []
    place.resume(0, 4, restore_rng=lambda: recorded.append("now"))
    batches = numbers(loader)
    assert recorded == []
    next(batches)
    place.advance()
    list(numbers(loader))
    assert recorded == ["now"]


def test_ranks_of_one_replica_read_the_same_samples() -> None:
    """Four ranks in two replicas read as their DistributedSampler divides the data."""

    def loader(rank: int) -> DataLoader[Any]:
        sampler: DistributedSampler[Any] = DistributedSampler(DATA, 2, rank // 2, seed=9)
        return DataLoader(DATA, batch_size=4, sampler=sampler)

    for rank in range(4):
        actual = loader(rank)
        place = track(actual, world_size=4)
        recorded = []
        for batch, as_torch_has_it in zip(numbers(actual), numbers(loader(rank)), strict=True):
            place.advance()
            assert batch == as_torch_has_it
            recorded.append((place.consumed, place.is_at_end))
        assert recorded[-2:] == [(SAMPLES - 8, False), (SAMPLES, True)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_rank_s_own_dataset_is_read_completely(shuffle: bool) -> None:
    loader: DataLoader[Any] = DataLoader(DATA, batch_size=4, shuffle=shuffle)
    place = track(loader, world_size=3)
    samples = []
    for batch in numbers(loader):
        samples += batch
        place.advance()
        assert place.consumed == len(samples)
    assert sorted(samples) == list(range(SAMPLES))
    assert place.epoch == 1


def test_ranks_with_other_seeds_read_in_other_orders() -> None:
    def order(seed: int) -> list[int]:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            loader: DataLoader[Any] = DataLoader(DATA, shuffle=True)
            track(loader, world_size=2)
        return flatten(numbers(loader))

    assert order(1) == order(1) != order(2)


def plain(world_size: int) -> SamplerPosition:
    return track(DataLoader(DATA, shuffle=True), world_size=world_size)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (plain(2), plain(3)),
        (plain(2), plain(1)),
        (plain(1), plain(2)),
        (sharded_loader(0, 2)[1], plain(3)),
        (plain(2), sharded_loader(0, 3)[1]),
    ],
)
def test_separate_positions_are_rejected_at_another_world_size(
    before: SamplerPosition, after: SamplerPosition
) -> None:
    with pytest.raises(ConfigError, match="only at the world size"):
        after.reject_resize([before.rank_state()])


def test_a_loader_state_is_rejected_at_another_world_size() -> None:
    with pytest.raises(ConfigError, match="only at the world size"):
        sharded_loader(0, 2)[1].reject_resize([{"loader_state": {}}])


def test_a_standard_batch_sampler_keeps_its_order() -> None:
    def loader(rank: int) -> DataLoader[Any]:
        sampler: DistributedSampler[Any] = DistributedSampler(DATA, 2, rank, seed=7)
        return DataLoader(DATA, batch_sampler=BatchSampler(sampler, 5, drop_last=True))

    for rank in (0, 1):
        actual, again = loader(rank), loader(rank)
        torch_batches = list(numbers(loader(rank)))
        place, next_place = (track(one, world_size=2) for one in (actual, again))
        for _, batch in zip(range(3), numbers(actual), strict=False):
            assert batch == torch_batches[place.consumed // 10]
            place.advance()
        next_place.resume(place.epoch, place.consumed, place.rank_state())
        assert list(numbers(again)) == torch_batches[3:]
        assert len(torch_batches) == 9, "the last three samples are dropped"


def test_the_generator_s_seed_determines_the_order_and_is_saved() -> None:
    def loader(seed: int) -> tuple[DataLoader[Any], SamplerPosition]:
        generator = torch.Generator().manual_seed(seed)
        one: DataLoader[Any] = DataLoader(DATA, batch_size=4, shuffle=True, generator=generator)
        return one, track(one, world_size=1)

    (first, place), (second, other) = loader(1), loader(2)
    order = list(numbers(first))
    assert order != list(numbers(second))
    other.resume(0, 8, place.rank_state())
    assert list(numbers(second)) == order[2:]


def looked_at(loader: DataLoader[Any], place: SamplerPosition) -> None:
    next(iter(loader))


def evaluated_with(loader: DataLoader[Any], place: SamplerPosition) -> None:
    gone_through(loader, place)
    list(loader)


def gone_through(loader: DataLoader[Any], place: SamplerPosition) -> None:
    for _ in loader:
        place.advance()


@pytest.mark.parametrize("done", [looked_at, evaluated_with, gone_through])
def test_the_next_pass_has_the_same_random_numbers(done: Any) -> None:
    """A loader draws a base seed at the beginning of each pass."""

    def random_numbers_in_a_pass(loader: DataLoader[Any]) -> float:
        batches = iter(loader)
        next(batches)
        return float(torch.rand(1))

    torch.manual_seed(7)
    loader, place = sharded_loader(0, 1)
    done(loader, place)
    generator, saved = torch.get_rng_state(), (place.epoch, place.consumed, place.rank_state())
    undisturbed = random_numbers_in_a_pass(loader)
    again, resumed = sharded_loader(0, 1)
    torch.set_rng_state(generator)
    resumed.resume(*saved, lambda: torch.set_rng_state(generator))
    assert random_numbers_in_a_pass(again) == undisturbed


@pytest.mark.parametrize("persists", [True, False])
def test_a_loader_with_persistent_workers_draws_one_base_seed(*, persists: bool) -> None:
    loader: DataLoader[Any] = DataLoader(
        DATA, batch_size=4, num_workers=1, persistent_workers=persists
    )
    place = track(loader, world_size=1)
    assert not place.rank_state()["sampler_position"]["is_pass_open"]

    def begin() -> Iterator[int]:
        iter(place)  # torch does, and has its processes read
        return iter(range(24))

    for _ in place.iterate_pass(begin):
        place.advance()
    assert (place.epoch, place.rank_state()["sampler_position"]["is_pass_open"]) == (1, persists)


def test_a_prefetched_epoch_is_resumed_without_another_draw() -> None:
    loader, place = sharded_loader(0, 1)
    fetched = list(loader)
    assert not place.rank_state()["sampler_position"]["is_pass_open"]
    for _ in fetched[:5]:
        place.advance()
    assert place.rank_state()["sampler_position"]["is_pass_open"]


def test_a_second_position_uses_the_original_sampler() -> None:
    loader, first = sharded_loader(1, 2)
    second = track(loader, world_size=2)
    assert second.user_sampler is first.user_sampler


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(4)


class UserSampler(DistributedSampler[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter([7] * len(self))


class Hard(RandomSampler):
    def __iter__(self) -> Iterator[int]:
        return iter([7] * len(self))


class Stateful(DataLoader[Any]):
    """A stateful loader like torchdata's: after a complete pass the next one starts at 0."""

    begins_at = yielded = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.yielded, self.begins_at = self.begins_at, 0
        for batch in islice(super().__iter__(), self.yielded, None):
            self.yielded += 1
            yield batch
        self.yielded = 0

    def state_dict(self) -> dict[str, int]:
        return {"yielded": self.yielded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begins_at = state["yielded"]


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        (DataLoader(Stream()), "IterableDataset"),
        (DataLoader(DATA, batch_sampler=[[1]]), "batches of a custom list are unknown"),
        (
            DataLoader(DATA, sampler=WeightedRandomSampler([1.0], 5)),
            "order of a WeightedRandomSampler is unknown",
        ),
        (
            DataLoader(DATA, sampler=RandomSampler(DATA, num_samples=8)),
            "order of a RandomSampler is unknown",
        ),
        (DataLoader(DATA, sampler=UserSampler(DATA, 1, 0)), "order of a UserSampler is unknown"),
        (DataLoader(DATA, sampler=Hard(DATA)), "order of a Hard is unknown"),
        (DataLoader(DATA, batch_size=None), "batch_size=None"),
        (["a", "b"], "a list is not a DataLoader"),
        (DataLoader(DATA, num_workers=1, in_order=False), "in_order=False"),
    ],
)
def test_unknown_positions_are_logged(
    loader: Any, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert isinstance(track_data_position(loader, world_size=1), LoaderPosition)
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("loader", "is_bound"),
    [
        (DataLoader(DATA), True),
        (DataLoader(DATA, sampler=DistributedSampler(DATA, 2, 0)), False),
        (Stateful(DATA), True),
        (DataLoader(Stream()), False),
    ],
    ids=["of its own", "shared", "kept by the loader", "unknown"],
)
def test_separate_positions_are_bound_to_the_world_size(loader: Any, *, is_bound: bool) -> None:
    assert track_data_position(loader, world_size=2).is_bound_to_world_size is is_bound
    assert track_data_position(DataLoader(DATA), world_size=1).is_bound_to_world_size is False


def test_without_workers_a_loader_is_always_in_order() -> None:
    assert isinstance(
        track_data_position(DataLoader(DATA, in_order=False), world_size=1), SamplerPosition
    )


class Alone:
    """A loader that is its own iterator and restarts at its end, like NVIDIA DALI's."""

    yielded = 0

    def __iter__(self) -> Alone:
        return self

    def __next__(self) -> int:
        self.yielded = (self.yielded + 1) % 4
        if not self.yielded:
            raise StopIteration
        return self.yielded


def test_a_loader_may_be_its_own_iterator() -> None:
    loader = Alone()
    place = track_passes(loader)
    assert list(loader) == [1, 2, 3]
    assert epochs_of(loader, place, 7) == [0, 0, 0, 1, 1, 1, 2]


def test_methods_of_the_replaced_sampler_are_forwarded() -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(DATA, 1, 0)
    loader: DataLoader[Any] = DataLoader(DATA, batch_sampler=BatchSampler(sampler, 4, False))
    place = track(loader, world_size=1)
    batches: Any = loader.batch_sampler
    inner: Any = batches.sampler
    assert inner is place
    inner.set_epoch(3)
    assert (sampler.epoch, inner.num_replicas) == (3, 1)
    assert copy.copy(place).user_sampler is sampler


def test_a_stateful_loader_is_recognized() -> None:
    assert is_stateful_loader(Stateful(DATA))
    assert not is_stateful_loader(DataLoader(DATA))
    assert is_stateful_loader(Adapted(Stateful(DATA)))
    assert not is_stateful_loader(Adapted(DataLoader(DATA)))


class Adapted:
    """Wraps a loader as Accelerate does: it has the wrapped one's class, and always a state."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.base_dataloader = loader

    __class__ = property(lambda self: type(self.base_dataloader))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.base_dataloader, name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.base_dataloader)

    def state_dict(self) -> Any:
        return self.base_dataloader.state_dict()  # type: ignore[attr-defined]

    def load_state_dict(self, state: Any) -> None:
        self.base_dataloader.load_state_dict(state)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [DataLoader, Stateful])
def test_the_position_in_a_loader_of_accelerate_is_restored(kind: Any) -> None:
    first: Any = Adapted(kind(DATA, batch_size=16))
    second: Any = Adapted(kind(DATA, batch_size=16))
    before, after = (track_data_position(loader, world_size=1) for loader in (first, second))
    trained = [next(numbers(first))]
    before.advance()
    after.resume(before.epoch, before.consumed, before.rank_state())
    trained += numbers(second)
    assert flatten(trained) == list(range(SAMPLES))


class BatchSamplerShard:
    """Has the attributes of Accelerate's; tests/frameworks compares with the real one."""

    def __init__(self, batches: Any, *, num_processes: int, process_index: int) -> None:
        self.batch_sampler = batches
        self.num_processes, self.process_index = num_processes, process_index
        self.split_batches, self.even_batches, self.drop_last = False, True, False

    def __iter__(self) -> Iterator[list[int]]:
        raise AssertionError("the position must replace the iterator")

    def __len__(self) -> int:
        return len(self.batch_sampler) // self.num_processes


@pytest.mark.parametrize("trained", [1, 2])
def test_batches_that_accelerate_shards_are_read_once_after_a_resize(
    trained: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three ranks have different seeds until they share one; then two ranks read the rest."""
    module = ModuleType("accelerate.data_loader")
    module.BatchSamplerShard = BatchSamplerShard  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def sharded(rank: int, ranks: int) -> tuple[DataLoader[Any], SamplerPosition]:
        generator = torch.Generator().manual_seed(rank)
        batches: Any = BatchSampler(RandomSampler(DATA, generator=generator), 4, drop_last=False)
        shard: Any = BatchSamplerShard(batches, num_processes=ranks, process_index=rank)
        loader: DataLoader[Any] = DataLoader(DATA, batch_sampler=shard)
        position = track(loader, world_size=ranks)
        assert position.requires_common_seed
        position.seed = 5
        return loader, position

    samples: list[int] = []
    states = []
    for rank in range(3):
        loader, before = sharded(rank, 3)
        for batch in islice(numbers(loader), trained):
            samples += batch
            before.advance()
        states.append(before.rank_state())
    for rank in range(2):
        loader, after = sharded(rank, 2)
        after.reject_resize(states)
        after.resume_resized(0, trained * 12, states)
        samples += flatten(numbers(loader))
    assert Counter(samples).keys() == set(range(SAMPLES))
    assert len(samples) - SAMPLES < 8, "only the last batches were filled up"


def test_a_sampler_with_drop_last_also_drops_after_a_resize() -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(DATA, 5, 0, drop_last=True)
    loader: DataLoader[Any] = DataLoader(DATA, batch_size=4, sampler=sampler)
    place = track(loader, world_size=5)
    place.resume(0, 90)
    assert sum(len(batch) for batch in numbers(loader)) == 1


def track_passes(loader: Any) -> LoaderPosition:
    place = track_data_position(loader, world_size=1)
    assert isinstance(place, LoaderPosition)
    return place


def epochs_of(loader: Any, place: LoaderPosition, steps: int) -> list[int]:
    """Return the epoch of each step."""
    recorded: list[int] = []
    while True:
        for _ in loader:
            place.advance()
            recorded.append(place.epoch)
            if len(recorded) == steps:
                return recorded


@pytest.mark.parametrize("kind", [Stateful, DataLoader])
def test_passes_over_other_loaders_are_counted(kind: Any) -> None:
    loader = kind(Stream(), batch_size=2) if kind is DataLoader else kind(DATA, batch_size=48)
    place = track_passes(loader)
    next(iter(loader))
    assert epochs_of(loader, place, 5) == [0, 0, 1, 1, 2]
    assert (isinstance(loader, kind), len(list(loader))) == (True, 2)


def test_an_incomplete_pass_counts() -> None:
    loader = Stateful(DATA, batch_size=4)
    place = track_passes(loader)
    epochs = []
    for _ in range(3):
        for _ in zip(range(2), loader, strict=False):
            place.advance()
            epochs.append(place.epoch)
    assert epochs == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5])
def test_a_stateful_loader_resumes_within_its_epoch(steps: int) -> None:
    """A pass has two batches; some states are saved after the last one."""
    first, second = Stateful(DATA, batch_size=48), Stateful(DATA, batch_size=48)
    before, after = track_passes(first), track_passes(second)
    recorded = epochs_of(first, before, steps)
    saved = before.rank_state()
    after.resume(before.epoch, before.consumed, saved)
    assert after.rank_state() == saved, "the state is unchanged until a batch is read"
    assert recorded + epochs_of(second, after, 6 - steps) == [0, 0, 1, 1, 2, 2]


def test_a_stateful_loader_saved_after_a_pass_begins_the_next() -> None:
    first, second = Stateful(DATA, batch_size=48), Stateful(DATA, batch_size=48)
    before, after = track_passes(first), track_passes(second)
    for _ in first:
        before.advance()
    assert before.epoch == 1
    after.resume(before.epoch, before.consumed, before.rank_state())
    assert epochs_of(second, after, 3) == [1, 1, 2]


def test_a_stateful_loader_whose_pass_is_not_exhausted_begins_the_next_epoch() -> None:
    loader = Stateful(DATA, batch_size=4)
    position = track_data_position(loader, world_size=1)
    for _ in islice(iter(loader), len(loader)):
        position.advance()
    position.end_epoch()
    position.end_epoch()
    assert (position.epoch, position.consumed) == (1, 0)
    resumed_loader = Stateful(DATA, batch_size=4)
    resumed = track_data_position(resumed_loader, world_size=1)
    resumed.resume(position.epoch, position.consumed, position.rank_state())
    assert len(list(resumed_loader)) == len(loader)


def test_inspecting_a_resumed_loader_skips_nothing() -> None:
    loader = Stateful(DATA, batch_size=8)
    place = track_passes(loader)
    recorded: list[str] = []
    place.resume(
        1, 9, {"loader_state": {"yielded": 9}}, lambda: recorded.append("RNG state restored")
    )
    (looked,) = next(iter(loader))
    rest = list(numbers(loader))
    assert (len(rest), rest[0], len(recorded)) == (3, looked.tolist(), 2)


def test_the_state_of_a_loader_is_rejected_at_another_world_size() -> None:
    """Without a loader state nothing binds the position to a world size."""
    with pytest.raises(ConfigError, match="was saved, which is 2"):
        track_passes(Stateful(DATA)).reject_resize([{"loader_state": {"yielded": 3}}] * 2)


def test_without_a_loader_state_any_world_size_restarts_the_epoch() -> None:
    loader = DataLoader(Stream())
    place = track_passes(loader)
    place.reject_resize([{}, {}])
    place.resume_resized(2, 3, [{}, {}])
    assert epochs_of(loader, place, 5) == [2, 2, 2, 2, 3]


def test_loaders_whose_class_cannot_change_are_logged(capsys: pytest.CaptureFixture[str]) -> None:
    loader = [1, 2]
    assert epochs_of(loader, track_passes(loader), 3) == [0, 0, 0]
    assert "checkpoint.epochs_unknown" in capsys.readouterr().err


class Ahead:
    """Yields a batch after it has fetched the next one, like prefetching loaders."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        waiting: list[Any] = []
        for batch in self._loader:
            yield from waiting
            waiting = [batch]
        yield from waiting


@pytest.mark.parametrize("watched", ["what looks ahead", "what it looks into"])
def test_a_prefetching_loop_does_not_end_a_pass_early(watched: str) -> None:
    inner: DataLoader[Any] = DataLoader(Stream())
    outer = Ahead(inner)
    place = track_passes(outer if watched == "what looks ahead" else inner)
    assert epochs_of(outer, place, 9) == [0, 0, 0, 0, 1, 1, 1, 1, 2]
