"""ArrayRestore: one rank's part in a restore of a pytree, into arrays as the template describes.

Arrays of JAX are immutable: a restore reads into new memory and changes nothing before `apply`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from spotfit.checkpoint.base_checkpointer import (
    DATASETS_KEY,
    PER_RANK_KEY,
    RNG_STATE_KEY,
    load_object_state,
    reject_resized_per_rank,
)
from spotfit.checkpoint.format import StateKey, TensorPiece, dotted_name
from spotfit.checkpoint.reader import ChunkSink, ReadRequest, SavedState, whole_piece_sink
from spotfit.checkpoint.restore_candidates import RestorePlan
from spotfit.core.errors import ConfigError, IntegrityError
from spotfit.frameworks.host_rng import set_host_rng_state
from spotfit.host import log
from spotfit.jax.checkpoint.array_arena import piece_as_array
from spotfit.jax.checkpoint.array_tree import STATE_SECTION, ArraySpec, ArrayTree, Box, box_of
from spotfit.jax.checkpoint.array_values import decode_values

Buffers = dict[tuple[StateKey, Box], np.ndarray[Any, Any]]
"""The memory that is read into, by array and box."""
_MAX_NAMES = 5
_REMEDY = (
    "Pass a pytree with the same leaves as that of the run that saved the checkpoint, or use a new "
    "RunConfig(name=...)."
)


class _Target(NamedTuple):
    """Where a part of a piece goes."""

    buffer: np.ndarray[Any, Any]
    """The complete memory of a box."""
    to_buffer: tuple[slice, ...]
    from_piece: tuple[slice, ...]
    is_whole: bool
    """Whether the piece is exactly the buffer, of the same dtype."""


class ArrayRestore:
    """One rank's part in one `Checkpointer.restore()`."""

    def __init__(
        self,
        template: ArrayTree,
        per_rank: Mapping[str, Any],
        *,
        rank: int,
        world_size: int,
        resume_datasets: Callable[[Mapping[str, Any]], None],
    ) -> None:
        """Prepare a restore into a pytree like `template`, whose arrays are not used."""
        self._template = template
        self._per_rank = per_rank
        self._rank = rank
        self._world_size = world_size
        self._resume_datasets = resume_datasets
        self._buffers: Buffers = {}
        self._values: dict[StateKey, Any] = {}
        self._dtype_changes: list[str] = []
        self.rng_state: dict[str, Any] | None = None
        """The RNG states that `apply` has set; None at another world size."""
        self.state: Any = None
        """The restored pytree, after `apply`."""

    def plan(self, saved: SavedState) -> RestorePlan:
        """Allocate this rank's parts of all arrays, and return the reads of them.

        Raises `ConfigError` if the pytree does not match `saved`, and `IntegrityError` if parts are
        missing.
        """
        self.roll_back()
        pieces, self._values = _saved_pieces(saved), _saved_values(saved)
        self._reject_mismatches(saved, pieces)
        reject_resized_per_rank(
            self._per_rank,
            _rank_state(saved, 0),
            saved_size=len(saved.indices),
            world_size=self._world_size,
        )
        targets: dict[tuple[int, TensorPiece], list[_Target]] = defaultdict(list)
        for key, spec in self._template.specs.items():
            for box in spec.local_boxes():
                buffer = self._buffers[key, box] = np.empty(box[1], spec.dtype)
                for source, target in _overlaps(buffer, box, pieces[key], dotted_name(key)):
                    targets[source].append(target)
        requests = [
            ReadRequest(rank, piece, _sink_for(piece, piece_targets))
            for (rank, piece), piece_targets in targets.items()
        ]
        return RestorePlan(saved.plan_reads(requests))

    def check_compatibility(self, compatibilities: Sequence[Any]) -> None:
        """Do nothing: every rank has compared the complete pytree."""

    def roll_back(self) -> None:
        """Release what was read. Idempotent."""
        self._buffers, self._values, self._dtype_changes = {}, {}, []

    def apply(self, saved: SavedState) -> int:
        """Create the arrays, load the rank's own objects, and return the epoch.

        Called on every rank once all ranks have read. RNG states are set if the world size is the
        saved one. Raises `ConfigError` if an object rejects its state.
        """
        leaves = dict(self._values)
        for key, spec in self._template.specs.items():
            boxes = {box: self._buffers.pop((key, box)) for box in spec.local_boxes()}
            leaves[key] = _create(spec, boxes)
        self.state = self._template.unflatten(leaves)
        if self._dtype_changes and self._rank == 0:
            log.warning(
                "checkpoint.dtype_changed",
                weights=len(self._dtype_changes),
                example=self._dtype_changes[0],
            )
        is_same_size = self._world_size == len(saved.indices)
        # Ranks beyond the saved ones take the positions of rank 0: they are the same on all ranks.
        rank_state = _rank_state(saved, self._rank if is_same_size else 0)
        self._resume_datasets(rank_state.get(DATASETS_KEY, {}))
        if is_same_size:
            for name, state in rank_state.get(PER_RANK_KEY, {}).items():
                if name in self._per_rank:
                    load_object_state(state, name, self._per_rank[name])
            self.rng_state = rank_state[RNG_STATE_KEY]
            set_host_rng_state(rank_state[RNG_STATE_KEY])
        return saved.indices[0].epoch

    def _reject_mismatches(
        self, saved: SavedState, pieces: Mapping[StateKey, list[tuple[int, TensorPiece]]]
    ) -> None:
        names = pieces.keys() | self._values.keys()
        if any(key[0] != STATE_SECTION for key in names):
            raise ConfigError(
                f"The checkpoint {saved.name} was not saved by spotfit.jax.Checkpointer.",
                do="Use the Checkpointer of the framework that has saved it, or a new "
                "RunConfig(name=...).",
            )
        specs, values = self._template.specs, self._template.values
        problems = [
            *(f"{_name(key)} was not saved" for key in specs.keys() - pieces.keys()),
            *(f"{_name(key)} was not saved" for key in values.keys() - self._values.keys()),
            *(f"{_name(key)} would be lost" for key in names - specs.keys() - values.keys()),
        ]
        for key in specs.keys() & pieces.keys():
            piece, spec = pieces[key][0][1], specs[key]
            if piece.shape != spec.shape:
                problems.append(f"{_name(key)} is {spec.shape}, was {piece.shape}")
            if piece.dtype != str(spec.dtype):
                self._dtype_changes.append(f"{_name(key)} is {spec.dtype}, was {piece.dtype}")
        if problems:
            more = len(problems) - _MAX_NAMES
            raise ConfigError(
                "The checkpoint does not match the pytree of the Checkpointer: "
                f"{'; '.join(sorted(problems)[:_MAX_NAMES])}{f' and {more} more' * (more > 0)}.",
                do=_REMEDY,
            )


def _saved_pieces(saved: SavedState) -> dict[StateKey, list[tuple[int, TensorPiece]]]:
    """Return all pieces of each array, with the ranks that have saved them."""
    pieces: dict[StateKey, list[tuple[int, TensorPiece]]] = defaultdict(list)
    for index in saved.indices:
        for piece in index.pieces:
            pieces[piece.key].append((index.rank, piece))
    return dict(pieces)


def _saved_values(saved: SavedState) -> dict[StateKey, Any]:
    found: dict[StateKey, Any] = {}
    for index in saved.indices:
        if index.value_keys and index.value_keys[0][0] == STATE_SECTION:
            values = decode_values(index.encoded_values, f"rank {index.rank} of {saved.name}")
            found |= dict(zip(index.value_keys, values, strict=True))
    return found


def _rank_state(saved: SavedState, rank: int) -> dict[str, Any]:
    index = saved.indices[rank]
    state: dict[str, Any] = decode_values(index.encoded_rank_state, f"rank {rank} of {saved.name}")
    return state


def _name(key: StateKey) -> str:
    return dotted_name(key[1:]) or "the state"


def _overlaps(
    buffer: np.ndarray[Any, Any],
    box: Box,
    pieces: Sequence[tuple[int, TensorPiece]],
    name: str,
) -> list[tuple[tuple[int, TensorPiece], _Target]]:
    """Return the pieces that fill the buffer. Raises `IntegrityError` if they do not."""
    found, elements = [], 0
    for source in pieces:
        piece = source[1]
        common = _intersect(box, (piece.offsets, piece.sizes))
        if common is None:
            continue
        elements += math.prod(common[1])
        is_whole = common == box == (piece.offsets, piece.sizes)
        target = _Target(
            buffer,
            to_buffer=_slices(common, box[0]),
            from_piece=_slices(common, piece.offsets),
            is_whole=is_whole and piece.dtype == str(buffer.dtype) and buffer.size > 0,
        )
        found.append((source, target))
    if elements != buffer.size:
        raise IntegrityError(
            f"The array {name} is incomplete: {elements} of {buffer.size} elements were saved.",
            do="Use an earlier checkpoint: `spotfit checkpoints ls` lists those of the run.",
        )
    return found


def _intersect(one: Box, other: Box) -> Box | None:
    """Return the common part of two boxes; None without one. Scalars have a common part."""
    starts = [max(a, b) for a, b in zip(one[0], other[0], strict=True)]
    ends = [min(a + size_a, b + size_b) for a, size_a, b, size_b in zip(*one, *other, strict=True)]
    if any(end <= start for start, end in zip(starts, ends, strict=True)):
        return None
    sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return tuple(starts), sizes


def _slices(box: Box, origin: Sequence[int]) -> tuple[slice, ...]:
    """Return the index of the box in an array that begins at `origin`."""
    return tuple(
        slice(offset - first, offset - first + size)
        for offset, size, first in zip(*box, origin, strict=True)
    )


def _sink_for(piece: TensorPiece, targets: Sequence[_Target]) -> ChunkSink:
    """Return how the piece's bytes reach its targets; a whole piece chunk by chunk."""
    first = targets[0]
    if len(targets) == 1 and first.is_whole:
        memory = first.buffer.reshape(-1).view(np.uint8)
        return lambda offset, body: np.copyto(
            memory[offset : offset + len(body)], np.frombuffer(body, np.uint8)
        )

    def copy_boxes(body: memoryview) -> None:
        source = piece_as_array(piece, body)
        for target in targets:
            # Another dtype is converted, which is logged.
            np.copyto(target.buffer[target.to_buffer], source[target.from_piece], casting="unsafe")

    return whole_piece_sink(piece, copy_boxes)


def _create(spec: ArraySpec, boxes: Mapping[Box, np.ndarray[Any, Any]]) -> Any:
    """Return the leaf that the template describes, with the values that were read."""
    if spec.sharding is None:
        values = boxes[spec.whole]
        return values[()] if spec.is_numpy_scalar else values
    array = _create_array(spec, boxes)
    if spec.key_implementation is None:
        return array
    return jax.random.wrap_key_data(array, impl=spec.key_implementation)


def _create_array(spec: ArraySpec, boxes: Mapping[Box, np.ndarray[Any, Any]]) -> Any:
    whole = boxes.get(spec.whole)
    # Types decide about results: a weakly typed scalar takes the type of what it is combined with.
    if spec.is_weakly_typed and whole is not None and not spec.shape:
        scalar = whole.item()
        if not spec.is_committed:
            return jax.numpy.asarray(scalar)
        # device_put accepts arrays for the devices of this process only.
        return jax.jit(lambda: scalar, out_shardings=spec.sharding)()
    # An array that is not committed to a device can be combined with arrays on any devices.
    if not spec.is_committed and whole is not None:
        return jax.numpy.asarray(whole)
    if spec.is_process_local and whole is not None:
        return jax.device_put(whole, spec.sharding)
    return jax.make_array_from_callback(
        spec.shape, spec.sharding, lambda index: boxes[box_of(index, spec.shape)]
    )
