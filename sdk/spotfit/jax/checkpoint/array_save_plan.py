"""ArraySavePlanner: which process writes which part of the arrays.

The sharding of an array says which processes hold which parts, so that every process computes the
same plan without a collective. A part that several processes hold is written once.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from spotfit.checkpoint.base_checkpointer import RankSavePlan
from spotfit.checkpoint.format import (
    DEDICATED_CHUNK_MIN_BYTES,
    StateKey,
    TensorPiece,
    aligned_offsets,
    dotted_name,
)
from spotfit.core.errors import ConfigError
from spotfit.jax.checkpoint.array_tree import ArraySpec, ArrayTree, Box, box_of
from spotfit.jax.checkpoint.array_values import encode_values

# Parts are split until a rank writes at least this many: the largest one can then unbalance the
# ranks by an eighth of their bytes at most.
_MIN_PARTS_PER_RANK = 8


class ArrayBlock(NamedTuple):
    """Rows of an array in the memory of this process, or of one of its devices."""

    array: Any
    rows: slice | None = None
    """None: all of the array."""

    def to_numpy(self) -> np.ndarray[Any, Any]:
        """Return the values in main memory; on the CPU they are those in use, not a copy."""
        values = np.asarray(self.array)
        return values if self.rows is None else values[self.rows]


class _Part(NamedTuple):
    """A box that one process writes, from the box in which processes hold it."""

    key: StateKey
    holding: Box
    written: Box
    holders: frozenset[int]
    size_bytes: int


class ArraySavePlanner:
    """Divides the arrays of a tree among the processes. Keeps the division while it is valid."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._specs: dict[StateKey, ArraySpec] | None = None
        """Of the arrays for which `_own_parts` were computed."""
        self._own_parts: list[_Part] = []
        self.largest_rank_bytes = 0
        """The largest number of bytes that any rank writes."""
        self.weakly_typed: list[StateKey] = []
        """The arrays of the last plan whose types are weak."""

    def plan(self, tree: ArrayTree) -> RankSavePlan:
        """Return this rank's share of the tree; its blocks share memory with the arrays.

        Plain values are written by rank 0. Raises `ConfigError` for descriptions of arrays.
        """
        _reject_descriptions(tree)
        if tree.specs != self._specs:
            self._divide(tree.specs)
            self._specs = dict(tree.specs)
            self.weakly_typed = [key for key, spec in tree.specs.items() if spec.is_weakly_typed]
        blocks = [_block_of(tree.arrays[part.key], part, tree.specs) for part in self._own_parts]
        starts = aligned_offsets(part.size_bytes for part in self._own_parts)
        pieces = tuple(
            TensorPiece(
                key=part.key,
                dtype=str(tree.specs[part.key].dtype),
                shape=tree.specs[part.key].shape,
                offsets=part.written[0],
                sizes=part.written[1],
                start=start,
                size_bytes=part.size_bytes,
            )
            for part, start in zip(self._own_parts, starts, strict=True)
        )
        values = tree.values if self._rank == 0 else {}
        return RankSavePlan(pieces, blocks, tuple(values), list(values.values()))

    def fingerprints(self, tree: ArrayTree) -> dict[StateKey, bytes]:
        """Return, by key, bytes that are equal on all ranks if the leaf is.

        Of all leaves that each process has for itself: plain values, arrays of numpy, and arrays of
        JAX that are not sharded over the processes. Other arrays are equal by definition. Raises
        `ConfigError` for descriptions of arrays.
        """
        _reject_descriptions(tree)
        found: dict[StateKey, bytes] = {}
        for key, spec in tree.specs.items():
            if spec.is_process_local:
                values = np.ascontiguousarray(tree.arrays[key])
                digest = hashlib.sha256(f"{spec.dtype} {spec.shape} ".encode())
                digest.update(values.reshape(-1).view(np.uint8).data)
                found[key] = digest.digest()
        for key, value in tree.values.items():
            body = encode_values([value], keys=[key])
            found[key] = hashlib.sha256(body).digest()
        return found

    def digest(self, tree: ArrayTree) -> str:
        """Return a digest of what is the same on all ranks, without any communication."""
        outline = [(key, spec.shape, str(spec.dtype)) for key, spec in tree.specs.items()]
        found = list(self.fingerprints(tree).items())
        return hashlib.sha256(repr((outline, found)).encode()).hexdigest()

    def _divide(self, specs: dict[StateKey, ArraySpec]) -> None:
        everyone = frozenset(range(self._world_size))
        held = [
            (key, box, holders)
            for key, spec in specs.items()
            for box, holders in (
                {spec.whole: everyone} if spec.is_process_local else spec.boxes()
            ).items()
        ]
        total_bytes = sum(_size_bytes(box, specs[key]) for key, box, _ in held)
        # Smaller parts would share chunks, so that a change of one uploads the others again.
        max_bytes = max(
            DEDICATED_CHUNK_MIN_BYTES, total_bytes / self._world_size / _MIN_PARTS_PER_RANK
        )
        parts = [
            _Part(key, box, block, holders, _size_bytes(block, specs[key]))
            for key, box, holders in held
            for block in _row_blocks(
                box,
                _size_bytes(box, specs[key]),
                max_bytes,
                # Its values may differ between processes after all: one of them writes all rows.
                1 if specs[key].is_process_local else len(holders),
            )
        ]
        self._own_parts = []
        loads_bytes = [0] * self._world_size
        # Greedy: the largest part first, to the holder with the fewest bytes so far.
        for part in sorted(parts, key=lambda part: part.size_bytes, reverse=True):
            writer = min(sorted(part.holders), key=loads_bytes.__getitem__)
            loads_bytes[writer] += part.size_bytes
            if writer == self._rank:
                self._own_parts.append(part)
        self.largest_rank_bytes = max(loads_bytes)


def _reject_descriptions(tree: ArrayTree) -> None:
    for key, array in tree.arrays.items():
        if isinstance(array, jax.ShapeDtypeStruct):
            raise ConfigError(
                f"{dotted_name(key)} is a jax.ShapeDtypeStruct, which has no values to save.",
                do="Pass the arrays of the training to Checkpointer.step and save.",
            )


def _size_bytes(box: Box, spec: ArraySpec) -> int:
    return math.prod(box[1]) * spec.dtype.itemsize


def _row_blocks(box: Box, size_bytes: int, max_bytes: float, writer_count: int) -> Iterator[Box]:
    """Yield the box, or blocks of its rows if several ranks may write them."""
    offsets, sizes = box
    if writer_count == 1 or size_bytes <= max_bytes or not sizes:
        yield box
        return
    block_rows = math.ceil(sizes[0] / math.ceil(size_bytes / max_bytes))
    for first in range(0, sizes[0], block_rows):
        rows = min(block_rows, sizes[0] - first)
        yield (offsets[0] + first, *offsets[1:]), (rows, *sizes[1:])


def _block_of(array: Any, part: _Part, specs: dict[StateKey, ArraySpec]) -> ArrayBlock:
    spec = specs[part.key]
    held = array if spec.is_process_local else _shard_data(array, part.holding, spec)
    if part.written == part.holding:
        return ArrayBlock(held)
    first = part.written[0][0] - part.holding[0][0]
    return ArrayBlock(held, slice(first, first + part.written[1][0]))


def _shard_data(array: Any, box: Box, spec: ArraySpec) -> Any:
    return next(
        shard.data for shard in array.addressable_shards if box_of(shard.index, spec.shape) == box
    )


def start_copies(blocks: Sequence[ArrayBlock]) -> None:
    """Start the transfer of the blocks' arrays from their devices to main memory."""
    for block in blocks:
        if not isinstance(block.array, np.ndarray):
            block.array.copy_to_host_async()
