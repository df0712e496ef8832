"""Steps of a dataset that is read in one process."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest

from spotfit.data.batches import to_block
from spotfit.data.step_reader import LocalShuffle, SequentialReader, cut_blocks, shuffle_blocks


def blocks_of(*sizes: int) -> list[pa.Table]:
    """Return blocks of these numbers of rows, whose ids count up."""
    ends = np.cumsum(sizes)
    return [
        to_block({"id": np.arange(end - size, end)}) for size, end in zip(sizes, ends, strict=True)
    ]


def ids(block: pa.Table) -> list[int]:
    return block["id"].to_pylist()  # type: ignore[no-any-return]


def all_ids(blocks: Iterator[pa.Table]) -> list[int]:
    return [one for block in blocks for one in ids(block)]


# --- cuts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("drop_last", [False, True])
def test_cuts_have_the_rows_of_random_blocks_in_order(rng: random.Random, drop_last: bool) -> None:
    for _ in range(100):
        sizes = [rng.randrange(6) for _ in range(rng.randrange(1, 8))]
        size = rng.randrange(1, 9)
        cuts = [ids(block) for block in cut_blocks(iter(blocks_of(*sizes)), size, drop_last)]
        rows = list(range(sum(sizes)))
        expected = [rows[first : first + size] for first in range(0, len(rows), size)]
        if drop_last and expected and len(expected[-1]) < size:
            expected.pop()
        assert cuts == expected, (sizes, size)


def test_cuts_share_the_memory_of_their_block() -> None:
    (block,) = blocks_of(6)
    memory = block["id"].chunk(0).buffers()[1]
    for cut in cut_blocks(iter([block]), 4, drop_last=False):
        assert cut["id"].chunk(0).buffers()[1].address == memory.address


def test_only_the_blocks_of_a_cut_are_read() -> None:
    read = []

    def read_blocks() -> Iterator[pa.Table]:
        for block in blocks_of(2, 2, 2):
            read.append(block)
            yield block

    next(cut_blocks(read_blocks(), 3, drop_last=False))
    assert len(read) == 2


def test_a_block_with_many_chunks_is_cut_like_one_with_one_chunk() -> None:
    block = pa.concat_tables(blocks_of(1, 2, 3, 4))
    assert [ids(cut) for cut in cut_blocks(iter([block]), 4, drop_last=False)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
    ]


# --- shuffles -------------------------------------------------------------------------------------


@pytest.mark.parametrize("buffer_rows", [1, 2, 7, 100])
@pytest.mark.parametrize("sizes", [(30,), (1,) * 30, (11, 1, 18)])
def test_a_shuffle_has_every_row_once(buffer_rows: int, sizes: tuple[int, ...]) -> None:
    shuffled = all_ids(shuffle_blocks(iter(blocks_of(*sizes)), LocalShuffle(buffer_rows, 3)))
    assert sorted(shuffled) == list(range(30))


def test_a_shuffle_with_a_seed_is_the_same_in_every_pass() -> None:
    first, second = (
        all_ids(shuffle_blocks(iter(blocks_of(20, 20)), LocalShuffle(10, 3))) for _ in range(2)
    )
    assert first == second


@pytest.mark.parametrize("seed", [4, None])
def test_a_shuffle_with_another_seed_has_another_order(seed: int | None) -> None:
    first, second = (
        all_ids(shuffle_blocks(iter(blocks_of(20, 20)), LocalShuffle(10, one))) for one in (3, seed)
    )
    assert first != second


def test_rows_are_drawn_from_a_full_buffer() -> None:
    # Rows that leave first come from all parts of a buffer of blocks with one row each.
    (first,) = [
        ids(block)
        for block, _ in zip(
            shuffle_blocks(iter(blocks_of(*[1] * 100)), LocalShuffle(40, 3)), [0], strict=False
        )
    ]
    assert len(first) == 20
    assert max(first) > 40
    assert min(first) < 20


def test_the_buffer_is_not_larger_than_one_and_a_half_of_its_size() -> None:
    read = []

    def read_blocks() -> Iterator[pa.Table]:
        for block in blocks_of(*[1] * 100):
            read.append(block)
            yield block

    returned = 0
    for block in shuffle_blocks(read_blocks(), LocalShuffle(20, 3)):
        assert len(read) - returned <= 30
        returned += block.num_rows


# --- the reader -----------------------------------------------------------------------------------


def reader_of(*sizes: int, shuffle: LocalShuffle | None = None) -> SequentialReader:
    return SequentialReader(lambda: iter(blocks_of(*sizes)), runs_user_code=False, shuffle=shuffle)


def test_blocks_without_rows_are_no_steps() -> None:
    assert [ids(step) for step in reader_of(2, 0, 1).steps(None)] == [[0, 1], [2]]


def test_steps_have_the_requested_rows() -> None:
    assert [ids(step) for step in reader_of(2, 2, 1).steps(3)] == [[0, 1, 2], [3, 4]]


def test_the_only_rank_reads_the_rows_of_all_ranks() -> None:
    assert [ids(step) for step in reader_of(4).steps(3, is_global=True, drop_last=True)] == [
        [0, 1, 2]
    ]


def test_shuffled_rows_are_cut_into_steps() -> None:
    steps = [ids(step) for step in reader_of(5, 5, shuffle=LocalShuffle(6, 1)).steps(4)]
    assert [len(step) for step in steps] == [4, 4, 2]
    assert sorted(sum(steps, [])) == list(range(10))  # noqa: RUF017 - three short lists
