"""Hugging Face Accelerate: its wrappers in a Checkpointer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from spotfit.torch.checkpoint.data_position import (
    LoaderPosition,
    SamplerPosition,
    track_data_position,
)

pytest.importorskip("accelerate")

from accelerate.data_loader import DataLoaderDispatcher, prepare_data_loader

EPOCHS = 2


def prepared(
    rank: int, ranks: int, samples: int, *, seed: int | None = 3, batch_size: int = 3, **how: Any
) -> Any:
    """Return the loader that Accelerate prepares for this rank; `seed` None does not shuffle."""
    torch.manual_seed(seed or 0)
    data = TensorDataset(torch.arange(samples))
    drop_last = how.pop("drop_last", False)
    loader: DataLoader[Any] = DataLoader(
        data, batch_size=batch_size, shuffle=seed is not None, drop_last=drop_last
    )
    options: dict[str, Any] = {"put_on_device": False, "use_seedable_sampler": True, **how}
    return prepare_data_loader(loader, num_processes=ranks, process_index=rank, **options)


def tracked(loader: Any, ranks: int) -> SamplerPosition:
    position = track_data_position(loader, world_size=ranks)
    assert isinstance(position, SamplerPosition)
    return position


def batches_of(loader: Any) -> Iterator[list[int]]:
    for (batch,) in loader:
        yield batch.tolist()


def trained_batches(loader: Any, position: SamplerPosition, epochs: int) -> Iterator[list[int]]:
    """Yield the batches of this rank; each counts when the next one is asked for."""
    while position.epoch < epochs:
        for batch in batches_of(loader):
            yield batch
            position.advance()


LAYOUTS = [
    {"drop_last": drop_last, "even_batches": even, "split_batches": split}
    for drop_last, even, split in itertools.product((False, True), repeat=3)
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("samples", [2, 24, 25, 29, 31])
def test_each_rank_reads_the_batches_that_accelerate_gives_it(
    layout: dict[str, bool], samples: int
) -> None:
    """In the order of Accelerate's seedable sampler, in every epoch and with its padding."""
    for rank, ranks in [(0, 2), (1, 2), (0, 4), (3, 4)]:
        size = {"batch_size": 8} if layout["split_batches"] else {}
        plain = prepared(rank, ranks, samples, **layout, **size)
        loader = prepared(rank, ranks, samples, **layout, **size)
        position = tracked(loader, ranks)
        for epoch in range(EPOCHS):
            expected = list(batches_of(plain))
            assert position.batches_per_epoch == len(expected)
            actual = []
            for batch in batches_of(loader):
                actual.append(batch)
                assert position.advance() == (len(actual) == len(expected))
            assert actual == expected
            assert (position.epoch, position.consumed) == (epoch + 1, 0)


@pytest.mark.parametrize("seedable", [True, False])
@pytest.mark.parametrize("stop", [1, 3, 4, 5, 8])
def test_a_resumed_rank_reads_the_rest_of_its_batches(stop: int, seedable: bool) -> None:
    """An epoch has four batches per rank, of which the last is padded."""
    how = {"use_seedable_sampler": seedable}
    for rank in (0, 2):
        undisturbed = prepared(rank, 3, 34, **how)
        expected = list(trained_batches(undisturbed, tracked(undisturbed, 3), EPOCHS))
        before = prepared(rank, 3, 34, **how)
        position = tracked(before, 3)
        trained = list(itertools.islice(trained_batches(before, position, EPOCHS), stop + 1))[:stop]
        after = prepared(rank, 3, 34, seed=99, **how)
        resumed = tracked(after, 3)
        resumed.resume(position.epoch, position.consumed, position.rank_state())
        assert after.iteration == position.epoch
        assert trained + list(trained_batches(after, resumed, EPOCHS)) == expected


def test_a_resized_group_divides_the_rest_of_the_epoch() -> None:
    """Three ranks train two batches each; then two ranks read what is left of 30 samples."""
    trained: list[int] = []
    states = []
    positions = set()
    for rank in range(3):
        loader = prepared(rank, 3, 30)
        position = tracked(loader, 3)
        for batch in itertools.islice(batches_of(loader), 2):
            trained += batch
            position.advance()
        states.append(position.rank_state())
        positions.add((position.epoch, position.consumed))
    assert positions == {(0, 18)}
    for rank in range(2):
        loader = prepared(rank, 2, 30)
        position = tracked(loader, 2)
        assert not position.is_bound_to_world_size
        position.reject_resize(states)
        position.resume_resized(0, 18, states)
        trained += itertools.chain.from_iterable(batches_of(loader))
    assert sorted(trained) == list(range(30))


def test_a_loader_that_is_not_shuffled_keeps_its_order() -> None:
    loader = prepared(1, 2, 12, seed=None)
    position = tracked(loader, 2)
    assert list(trained_batches(loader, position, 1)) == [[3, 4, 5], [9, 10, 11]]


@pytest.mark.parametrize("kind", ["dispatched", "sharded twice"])
def test_loaders_with_an_unknown_order_are_logged(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    data = TensorDataset(torch.arange(8))
    sampler: DistributedSampler[Any] = DistributedSampler(data, 2, 0)
    loader: Any = prepare_data_loader(
        DataLoader(data, sampler=sampler), num_processes=2, process_index=0, put_on_device=False
    )
    if kind == "dispatched":
        loader = DataLoaderDispatcher(data, batch_size=2)
    assert isinstance(track_data_position(loader, world_size=2), LoaderPosition)
    assert "checkpoint.data_position_unknown" in caplog.messages
