from __future__ import annotations

from spotfit.data.loading.lane_blocks import BlockCache, LaneBlock
from spotfit.data.order import EpochOrder, LaneRange, OrderSettings
from spotfit.data.source import int_array

ORDER = EpochOrder(int_array([100]), OrderSettings(lanes=2), 0)


def block_of_ten(lane: int, row: int) -> LaneBlock:
    return LaneBlock(lane, row // 10 * 10, row // 10 * 10 + 10, row // 10)


def test_rows_across_blocks_have_a_piece_of_each() -> None:
    pieces = BlockCache(ORDER, block_of_ten).pieces(LaneRange(0, 7, 15))

    assert [(piece.block.number, piece.first, piece.rows) for piece in pieces] == [
        (0, 7, 3),
        (1, 0, 10),
        (2, 0, 2),
    ]


def test_a_block_is_the_same_until_it_is_released() -> None:
    cache = BlockCache(ORDER, block_of_ten)
    block = cache.pieces(LaneRange(1, 0, 5))[0].block
    cache.pieces(LaneRange(1, 12, 5))

    assert cache.pieces(LaneRange(1, 5, 5))[0].block is block
    # Row 9 of lane 1 is at place 19.
    assert list(cache.release(19)) == []
    assert list(cache.release(20)) == [block]
    assert cache.pieces(LaneRange(1, 5, 5))[0].block is not block


def test_a_block_is_released_at_a_multiple_of_rows() -> None:
    cache = BlockCache(ORDER, block_of_ten, release_multiple=16)
    block = cache.pieces(LaneRange(0, 0, 5))[0].block

    assert list(cache.release(30)) == []
    assert list(cache.release(31)) == [block]


def test_the_last_block_is_released_at_the_end_of_its_lane() -> None:
    cache = BlockCache(ORDER, block_of_ten, release_multiple=64)
    block = cache.pieces(LaneRange(1, 45, 5))[0].block

    assert list(cache.release(100)) == [block]
