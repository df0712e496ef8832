"""ArrayRestore: one rank's part in a restore of a pytree, into arrays as the template describes.

Arrays of JAX are immutable: a restore reads into new memory and changes nothing before `apply`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from spotfit.checkpoint.base_checkpointer import (
    DATASETS_KEY,
    PER_RANK_KEY,
    RNG_STATE_KEY,
    load_per_rank,
    reject_resized_per_rank,
    warn_restore_differences,
)
from spotfit.checkpoint.format import StateKey, TensorPiece, dotted_name
from spotfit.checkpoint.reader import ChunkSink, ReadRequest, SavedState, whole_piece_sink
from spotfit.checkpoint.restore_candidates import RestorePlan
from spotfit.core.errors import ConfigError, IntegrityError
from spotfit.frameworks.host_rng import set_host_rng_state
from spotfit.jax.checkpoint.array_arena import piece_as_array
from spotfit.jax.checkpoint.array_tree import (
    STATE_SECTION,
    ArraySpec,
    ArrayTree,
    Box,
    box_of,
    has_numbers,
)
from spotfit.jax.checkpoint.array_values import decode_values, dtype_of
from spotfit.jax.checkpoint.state_template import is_converted, why_not_restorable

Buffers = dict[tuple[StateKey, Box], np.ndarray[Any, Any]]
"""The memory that is read into, by array and box."""
WEAKLY_TYPED_KEY = "weakly_typed"
"""Key of a rank's state with the keys of the arrays whose types are weak."""
_MAX_NAMES = 5
_REMEDY = (
    "Pass a pytree with the same leaves as that of the run that saved the checkpoint, or use a new "
    "RunConfig(name=...)."
)
_USE_EARLIER = "Use an earlier checkpoint: `spotfit checkpoints ls` lists those of the run."


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
        self._specs: dict[StateKey, ArraySpec] = {}
        """Of what is read: the saved arrays."""
        self._values: dict[StateKey, Any] = {}
        """The other leaves that were saved."""
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
        weakly_typed = _weakly_typed_keys(saved, self._template)
        self._specs = {
            key: _spec_to_read(self._template.leaf(key), _saved_spec(key, pieces, weakly_typed))
            for key in pieces
        }
        for key, spec in self._specs.items():
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
        self._buffers, self._specs, self._values, self._dtype_changes = {}, {}, {}, []

    def apply(self, saved: SavedState) -> int:
        """Create the arrays, load the rank's own objects, and return the epoch.

        Called on every rank once all ranks have read. RNG states are set if the world size is the
        saved one. Raises `ConfigError` if an object rejects its state.
        """
        leaves = {
            key: _as_template(value, self._template.leaf(key))
            for key, value in self._values.items()
        }
        for key, spec in self._specs.items():
            boxes = {box: self._buffers.pop((key, box)) for box in spec.local_boxes()}
            leaves[key] = _create(spec, boxes)
        self.state = self._template.unflatten(leaves)
        is_same_size = self._world_size == len(saved.indices)
        # Ranks beyond the saved ones take the positions of rank 0: they are the same on all ranks.
        rank_state = _rank_state(saved, self._rank if is_same_size else 0)
        if self._rank == 0:
            self._warn_differences(rank_state.get(PER_RANK_KEY, {}))
        self._resume_datasets(rank_state.get(DATASETS_KEY, {}))
        if is_same_size:
            load_per_rank(self._per_rank, rank_state)
            self.rng_state = rank_state[RNG_STATE_KEY]
            set_host_rng_state(rank_state[RNG_STATE_KEY])
        return saved.indices[0].epoch

    def _warn_differences(self, saved_per_rank: Mapping[str, Any]) -> None:
        warn_restore_differences(
            unused=sorted(saved_per_rank.keys() - self._per_rank),
            new=sorted(self._per_rank.keys() - saved_per_rank),
            dtype_changes=self._dtype_changes,
            do="to restore them, pass them to Checkpointer under these names in per_rank={...}",
        )

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
        wanted = set(self._template.keys)
        problems = [
            *(f"{_name(key)} was not saved" for key in wanted - names),
            *(f"{_name(key)} would be lost" for key in names - wanted),
        ]
        for key in names & wanted:
            initial = self._template.leaf(key)
            found = _saved_spec(key, pieces) if key in pieces else self._values[key]
            if reason := why_not_restorable(initial, found):
                problems.append(f"{_name(key)} is {reason}")
            elif is_converted(initial, found):
                self._dtype_changes.append(f"{_name(key)} is {initial.dtype}, was {found.dtype}")
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


def _saved_spec(
    key: StateKey,
    pieces: Mapping[StateKey, list[tuple[int, TensorPiece]]],
    weakly_typed: Collection[StateKey] = (),
) -> ArraySpec:
    (shape, dtype), *others = {(piece.shape, _saved_dtype(key, piece)) for _, piece in pieces[key]}
    if others:
        raise IntegrityError(
            f"The array {dotted_name(key)} was saved with several shapes or dtypes.",
            do=_USE_EARLIER,
        )
    return ArraySpec(shape, dtype, is_weakly_typed=key in weakly_typed)


def _saved_dtype(key: StateKey, piece: TensorPiece) -> np.dtype[Any]:
    try:
        dtype = dtype_of(piece.dtype)
    except (TypeError, ValueError, SyntaxError):
        dtype = None
    if dtype is None or not has_numbers(dtype):
        raise IntegrityError(
            f"The array {dotted_name(key)} was saved with the dtype {piece.dtype!r}, which has no "
            "numbers.",
            do=_USE_EARLIER,
        )
    return dtype


def _weakly_typed_keys(saved: SavedState, template: ArrayTree) -> frozenset[StateKey]:
    keys = _rank_state(saved, 0).get(WEAKLY_TYPED_KEY)
    if keys is None:
        # Earlier versions did not save them, and gave scalars the types of the template.
        specs = template.specs.items()
        keys = [key for key, spec in specs if spec.is_weakly_typed and not spec.shape]
    return frozenset(keys)


def _spec_to_read(initial: Any, found: ArraySpec) -> ArraySpec:
    """Return the description of the leaf that the saved array becomes.

    Weak types are those of `found`, as they decide about the dtypes of results.
    """
    if not isinstance(initial, ArraySpec):
        # A number that was an array: with a dtype of its own it is a scalar of numpy.
        is_number = found.is_weakly_typed or found.dtype == bool
        return found._replace(is_weakly_typed=is_number, is_numpy_scalar=True)
    has_dtype = initial.sharding is not None and initial.dtype == found.dtype
    return initial._replace(is_weakly_typed=has_dtype and found.is_weakly_typed)


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
    found, boxes = [], []
    for source in pieces:
        piece = source[1]
        common = _intersect(box, (piece.offsets, piece.sizes))
        if common is None:
            continue
        boxes.append(common)
        is_whole = common == box == (piece.offsets, piece.sizes)
        target = _Target(
            buffer,
            to_buffer=_slices(common, box[0]),
            from_piece=_slices(common, piece.offsets),
            is_whole=is_whole and piece.dtype == str(buffer.dtype) and buffer.size > 0,
        )
        found.append((source, target))
    saved_elements = sum(math.prod(sizes) for _, sizes in boxes)
    has_repeated = saved_elements > buffer.size or (
        saved_elements == buffer.size and _have_common_elements(boxes)
    )
    if has_repeated or saved_elements < buffer.size:
        raise IntegrityError(
            f"The array {name} is incomplete: {saved_elements} elements were saved for "
            f"{buffer.size}{', some of them several times' * has_repeated}.",
            do=_USE_EARLIER,
        )
    return found


def _have_common_elements(boxes: Sequence[Box]) -> bool:
    """Return whether two of the boxes, none of which is empty, have a common part."""
    if len(boxes) < 2 or not boxes[0][0]:
        return len(boxes) > 1
    starts = np.array([offsets for offsets, _ in boxes])
    ends = starts + np.array([sizes for _, sizes in boxes])
    # Along the dimension with the most offsets, each box is compared with those that begin in it.
    axis = max(range(starts.shape[1]), key=lambda n: len(np.unique(starts[:, n])))
    order = np.argsort(starts[:, axis])
    starts, ends = starts[order], ends[order]
    for n, end in enumerate(np.searchsorted(starts[:, axis], ends[:, axis])):
        others = slice(n + 1, end)
        if ((starts[others] < ends[n]) & (starts[n] < ends[others])).all(axis=1).any():
            return True
    return False


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


def _as_template(value: Any, initial: Any) -> Any:
    """Return a leaf that was no array: also a number where the template has an array."""
    if not isinstance(initial, ArraySpec):
        return value
    spec = initial._replace(is_weakly_typed=initial.sharding is not None)
    return _create(spec, {spec.whole: np.asarray(value, spec.dtype)})


def _create(spec: ArraySpec, boxes: Mapping[Box, np.ndarray[Any, Any]]) -> Any:
    """Return the leaf that the template describes, with the values that were read."""
    if spec.sharding is None:
        values = boxes[spec.whole]
        if spec.is_weakly_typed:
            return values.item()
        return values[()] if spec.is_numpy_scalar else values
    array = _create_array(spec, boxes)
    if spec.is_weakly_typed:
        return _weakly_typed(array, spec)
    if spec.key_implementation is None:
        return array
    return jax.random.wrap_key_data(array, impl=spec.key_implementation)


def _create_array(spec: ArraySpec, boxes: Mapping[Box, np.ndarray[Any, Any]]) -> Any:
    whole = boxes.get(spec.whole)
    # An array that is not committed to a device can be combined with arrays on any devices.
    if not spec.is_committed and whole is not None:
        return jax.numpy.asarray(whole)
    if spec.is_process_local and whole is not None:
        return jax.device_put(whole, spec.sharding)
    return jax.make_array_from_callback(
        spec.shape, spec.sharding, lambda index: boxes[box_of(index, spec.shape)]
    )


def _weakly_typed(array: Any, spec: ArraySpec) -> Any:
    """Return the array with a weak type: combined with others it takes their dtype."""

    def convert(values: Any) -> Any:
        # JAX has no conversion for it, but a new array of a Python number, which is updated.
        weak = jax.numpy.full(spec.shape, np.zeros((), spec.dtype).item())
        if weak.dtype != values.dtype:
            return values
        return weak.at[...].set(values, out_sharding=jax.typeof(values).sharding)

    return jax.jit(convert, out_shardings=spec.sharding if spec.is_committed else None)(array)
