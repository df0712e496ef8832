"""The shards of all replicas contain each sample once, apart from padding."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotfit.torch.checkpoint.replica_shards import BatchShards, StridedShards

SIZES = st.integers(1, 5)


def batch_shards(replicas: int, batch_size: int, **options: Any) -> list[BatchShards]:
    options = {"drop_last": False, "even_batches": True, **options}
    return [
        BatchShards(batch_size=batch_size, num_replicas=replicas, replica=rank, **options)
        for rank in range(replicas)
    ]


@given(replicas=SIZES, batch_size=SIZES, end=st.integers(0, 40), start=st.integers(0, 40))
def test_padded_shards_have_equal_sizes_and_contain_each_sample(
    replicas: int, batch_size: int, end: int, start: int
) -> None:
    strided = [StridedShards(replicas, rank) for rank in range(replicas)]
    for shards in (strided, batch_shards(replicas, batch_size)):
        start = min(start, end)
        parts = [shard.indices(start, end) for shard in shards]
        assert [len(part) for part in parts] == [shard.count(start, end) for shard in shards]
        assert len({len(part) for part in parts}) == 1
        every = sorted(index for part in parts for index in part)
        assert every == list(range(start, start + len(every)))
        assert every[: end - start] == list(range(start, end))
        assert len(every) - (end - start) < replicas * batch_size + replicas


@given(replicas=SIZES, batch_size=SIZES, end=st.integers(0, 40), start=st.integers(0, 40))
def test_uneven_batches_are_not_padded(
    replicas: int, batch_size: int, end: int, start: int
) -> None:
    start = min(start, end)
    shards = batch_shards(replicas, batch_size, even_batches=False)
    parts = [shard.indices(start, end) for shard in shards]
    assert sorted(index for part in parts for index in part) == list(range(start, end))
    assert [len(part) for part in parts] == [shard.count(start, end) for shard in shards]


@pytest.mark.parametrize(("end", "sizes"), [(11, [4, 4]), (12, [6, 6]), (17, [8, 8])])
def test_dropped_samples_do_not_suffice_for_a_batch_of_each_replica(
    end: int, sizes: list[int]
) -> None:
    two = batch_shards(2, 2, drop_last=True) if end != 12 else batch_shards(2, 3, drop_last=True)
    assert [len(shard.indices(0, end)) for shard in two] == sizes
    assert StridedShards(2, 0, drop_last=True).count(0, 11) == 5


def test_a_replica_reads_every_nth_batch() -> None:
    assert list(batch_shards(3, 2)[1].indices(0, 14)) == [2, 3, 8, 9, 14, 15]
    assert list(StridedShards(3, 1).indices(0, 7)) == [1, 4, 7]
