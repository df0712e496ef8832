"""Save plans: which rank writes which part of the state, and the encoding of non-tensor values.

Each rank writes the shards that only it holds. State that several ranks hold (replicated weights)
is divided among them, largest parts first, so that all ranks write about equally many bytes.
"""

from __future__ import annotations

import hashlib
import io
import math
import pickle
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from spotfit.checkpoint import value_codec
from spotfit.checkpoint.base_checkpointer import RankSavePlan, warn_rank_differences
from spotfit.checkpoint.format import (
    DEDICATED_CHUNK_MIN_BYTES,
    StateKey,
    TensorPiece,
    aligned_offsets,
)
from spotfit.checkpoint.value_codec import EncodedArray, ForeignValue, LeafDecoder
from spotfit.core.errors import ConfigError, IntegrityError
from spotfit.torch.checkpoint.training_state import OpaqueValue, StateDict

# Tensors are split until a rank writes at least this many: the largest one can then unbalance the
# ranks by an eighth of their bytes at most.
_MIN_TENSORS_PER_RANK = 8

_DENSE_TYPES = (torch.Tensor, torch.nn.Parameter)

_FRAMEWORK = "torch"
# torch.save writes a zip file; msgpack begins neither a list nor a dict with these bytes.
_TORCH_SAVE_MAGIC = b"PK\x03\x04"

AllGatherObjectFn = Callable[[Any], list[Any]]
"""A collective: takes one object per rank and returns those of all ranks, in rank order."""


class SavePlanCache:
    """Divides a state among the ranks: the first time by a collective, then locally.

    Tensors that appear later, which the global plan does not contain, are written by every rank
    that holds them. After 1, 2, 4, 8, … saves the ranks check together whether there are such
    tensors and make a new global plan: a changed state is balanced again soon, and the cost of the
    collectives vanishes in a long run.
    """

    def __init__(self, rank: int, all_gather: AllGatherObjectFn) -> None:
        self._rank = rank
        self._all_gather = all_gather
        self._save_count = 0
        self._planned_outline: Any = None
        """Outline of the state for which the last global plan was made."""
        self._items_outline: Any = None
        """Outline of the state for which `_items` were made."""
        self._are_replicas_equal = False
        """Whether the compared parts of the state were equal on all ranks at the first save."""
        self._items: list[WriteItem] = []
        self._planned_indices: set[MetadataIndex] = set()
        self._max_tensor_bytes = math.inf
        """Larger tensors are split into blocks of rows, which several ranks can write."""
        self.largest_rank_bytes = 0
        """The largest number of bytes that any rank writes, as of the last collective."""

    def plan(
        self, state: StateDict, *, unsynchronized: Collection[str] = (), last_save_bytes: int = 0
    ) -> RankSavePlan:
        """Return this rank's plan. Collective: all ranks call it for states of the same step.

        `state` is the result of `TrainingState.state_dict()`; the plan's tensors share memory with
        it. Only calls number 1, 2, 4, 8, … communicate. The tensors named in `unsynchronized` may
        differ between ranks; the first rank that holds one writes all of it, so that a restored
        tensor never mixes several ranks' values. `last_save_bytes` is the size of this rank's last
        save, including values; 0 before the first. Raises `ConfigError` on all ranks if a tensor
        that is split among ranks has several shapes.
        """
        planner, outline = _set_up_planner(state)
        self._save_count += 1
        is_power_of_two = self._save_count & (self._save_count - 1) == 0
        has_unplanned_tensors = False
        if is_power_of_two:
            # The sizes are gathered with it; the save scheduler estimates upload times from them.
            ranks = self._all_gather((outline != self._planned_outline, last_save_bytes))
            self.largest_rank_bytes = max(size_bytes for _, size_bytes in ranks)
            has_unplanned_tensors = any(is_new for is_new, _ in ranks)
        if has_unplanned_tensors:
            self._plan_globally(planner, outline, unsynchronized)
        elif outline != self._items_outline:
            self._plan_locally(planner, outline)
        return _build_rank_plan(planner, self._items)

    def plan_alone(
        self, state: StateDict, *, unsynchronized: Collection[str] = ()
    ) -> tuple[RankSavePlan, str]:
        """Return this rank's plan and the digest of what all ranks hold; no collective.

        For a save that other ranks may not take part in. Without an earlier `plan` every rank
        writes all that it holds. The digest is equal on all ranks whose replicated state is equal;
        '' if it was not at the first save. Raises `ConfigError` if the shape or dtype of a tensor
        differs from the last plan: it was changed since.
        """
        planner, outline = _set_up_planner(state)
        planned = {one for one in self._items_outline or () if len(one) > 1}
        if not planned.issubset(outline):
            changed = sorted(name for name, *_ in planned.difference(outline))
            raise ConfigError(
                f"{len(changed)} tensors have another shape or dtype than at the last step, or are "
                f"gone, for example {changed[0]}",
                do="Call Checkpointer.save() before the model is converted.",
            )
        if outline != self._items_outline:
            self._plan_locally(planner, outline)
        digest = ""
        if self._are_replicas_equal:
            samples = sorted(_fingerprints(planner.state_dict, exclude=unsynchronized).items())
            digest = hashlib.sha256(repr(samples).encode()).hexdigest()
        return _build_rank_plan(planner, self._items), digest

    def _plan_globally(
        self, planner: DefaultSavePlanner, outline: Any, unsynchronized: Collection[str]
    ) -> None:
        # Ranks are compared once: a difference that exists at all exists at the first save.
        is_first = self._planned_outline is None
        fingerprints = _fingerprints(planner.state_dict, exclude=unsynchronized) if is_first else {}
        ranks = self._all_gather(
            (planner.create_local_plan(), _splittable_names(planner.state_dict), fingerprints)
        )
        if is_first:
            self._are_replicas_equal = all(other == fingerprints for *_, other in ranks)
        if self._rank == 0:
            warn_rank_differences(
                [fingerprints for *_, fingerprints in ranks],
                do="wrap the model with prepare_model, or pass state that belongs to one rank in "
                "per_rank={...}",
            )
        self._max_tensor_bytes = _max_tensor_bytes([plan for plan, *_ in ranks])
        plans = [
            _split_large_tensors(plan, names, self._max_tensor_bytes) for plan, names, _ in ranks
        ]
        _reject_inconsistent_shapes(plans, exclude=unsynchronized)
        # Every rank computes the same assignment from the gathered plans.
        balanced = _balance_items(plans, unsynchronized)
        self._items = balanced[self._rank]
        self.largest_rank_bytes = max(
            self.largest_rank_bytes, *(sum(map(_item_size_bytes, items)) for items in balanced)
        )
        self._planned_indices = {item.index for plan in plans for item in plan.items}
        self._planned_outline = self._items_outline = outline

    def _plan_locally(self, planner: DefaultSavePlanner, outline: Any) -> None:
        current = {item.index for item in self._items}
        # Without a collective: items of the global plan stay with their ranks, and a new item is
        # written by every rank that holds it until the next global plan.
        plan = _split_large_tensors(
            planner.create_local_plan(),
            _splittable_names(planner.state_dict),
            self._max_tensor_bytes,
        )
        self._items = [
            item
            for item in plan.items
            if item.index in current or item.index not in self._planned_indices
        ]
        self._items_outline = outline


def _set_up_planner(state: StateDict) -> tuple[DefaultSavePlanner, list[tuple[Any, ...]]]:
    """Return torch's planner for the state, and the outline of the state."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state)
    # What a plan depends on: names, and shapes and dtypes of tensors. Values that are not
    # tensors are left out, because they are encoded again in every save.
    outline = [
        (name, value.shape, value.dtype) if isinstance(value, torch.Tensor) else (name,)
        for name, value in planner.state_dict.items()
    ]
    return planner, outline


# --- comparison of ranks -------------------------------------------------------------------------


def _fingerprints(flat: StateDict, *, exclude: Collection[str]) -> dict[str, bytes]:
    """Return, by name, bytes that are equal on all ranks if their replicated state is.

    They cover a few elements of each unsharded weight and the optimizers' options.
    """
    options = {
        name: repr(value).encode()
        for name, value in flat.items()
        if name.startswith("optimizer.param_groups.") and ".params" not in name
        if isinstance(value, bool | int | float | str | tuple)
    }
    weights = {
        name: value.detach()
        for name, value in flat.items()
        if name.startswith("model.") and type(value) in _DENSE_TYPES and name not in exclude
        if value.is_floating_point() and value.numel()
    }
    if not weights:
        return options
    # The first, a middle and the last element of each weight.
    samples = [
        weight[tuple(int((size - 1) * part) for size in weight.shape)].float()
        for weight in weights.values()
        for part in (0, 0.5, 1)
    ]
    # On one GPU the stack is transferred at once, instead of synchronizing for every element.
    if len({sample.device for sample in samples}) > 1:
        samples = [sample.cpu() for sample in samples]
    rows = torch.stack(samples).view(len(weights), -1).cpu().numpy()
    return {name: row.tobytes() for name, row in zip(weights, rows, strict=True)} | options


def _reject_inconsistent_shapes(plans: Sequence[SavePlan], exclude: Collection[str]) -> None:
    """Raise `ConfigError` on all ranks for split tensors whose full shape differs by rank."""
    shapes: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    split_names: set[str] = set()
    for item in chain.from_iterable(plan.items for plan in plans):
        if (write := item.tensor_data) is not None and item.index.fqn not in exclude:
            shapes[item.index.fqn].add(tuple(write.size))
            split_names |= {item.index.fqn} if write.chunk.sizes != write.size else set()
    # A tensor that is not split is written whole by one rank, whatever the other ranks hold.
    differing = [name for name, found in shapes.items() if len(found) > 1 and name in split_names]
    if differing:
        raise ConfigError(
            f"Checkpointer cannot save {len(differing)} tensors, because their shapes differ "
            f"between ranks, for example {differing[0]}: {sorted(shapes[differing[0]])}.",
            do="Pass state that belongs to one rank in per_rank={…}, or shard it as a DTensor.",
        )


# --- division among ranks ------------------------------------------------------------------------


def _max_tensor_bytes(plans: Sequence[SavePlan]) -> float:
    """Return the size above which tensors are split: a fraction of a rank's fair share."""
    if len(plans) == 1:
        return math.inf
    sizes = {item.index: _item_size_bytes(item) for plan in plans for item in plan.items}
    # Smaller pieces would share chunks, so that a change of one uploads the others again.
    return max(DEDICATED_CHUNK_MIN_BYTES, sum(sizes.values()) / len(plans) / _MIN_TENSORS_PER_RANK)


def _splittable_names(flat: StateDict) -> frozenset[str]:
    """Return the names of dense tensors.

    Tensor subclasses, such as quantized weights, may not be divisible by rows: one rank writes
    each of them.
    """
    return frozenset(name for name, value in flat.items() if type(value) in _DENSE_TYPES)


def _split_large_tensors(plan: SavePlan, names: Collection[str], max_bytes: float) -> SavePlan:
    """Return the plan with larger tensors of these names split into blocks of rows."""
    items: list[WriteItem] = []
    for item in plan.items:
        is_large = item.index.fqn in names and _item_size_bytes(item) > max_bytes
        items += _row_blocks(item, max_bytes) if is_large else [item]
    return replace(plan, items=items)


def _row_blocks(item: WriteItem, max_bytes: float) -> list[WriteItem]:
    write, size_bytes = item.tensor_data, _item_size_bytes(item)
    assert write is not None, "values that are not tensors have no size"
    rows = write.size[0]
    block_rows = math.ceil(rows / math.ceil(size_bytes / max_bytes))
    blocks = []
    for first_row in range(0, rows, block_rows):
        offsets = torch.Size((first_row, *write.chunk.offsets[1:]))
        sizes = torch.Size((min(block_rows, rows - first_row), *write.size[1:]))
        chunk = ChunkStorageMetadata(offsets, sizes)
        blocks.append(
            WriteItem(
                index=MetadataIndex(item.index.fqn, offsets),
                type=WriteItemType.SHARD,
                bytes_io_data=None,
                tensor_data=replace(write, chunk=chunk),
            )
        )
    return blocks


def _item_size_bytes(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0  # the size of a value is unknown until it is encoded
    item_bytes = item.tensor_data.properties.dtype.itemsize
    return math.prod(item.tensor_data.chunk.sizes) * item_bytes


def _balance_items(
    plans: Sequence[SavePlan], unsynchronized: Collection[str]
) -> list[list[WriteItem]]:
    """Assign each item to one of the ranks that hold it, and return the items of each rank.

    Greedy: the largest item first, to the rank with the fewest bytes so far; `unsynchronized` ones
    to their first holder. torch's own deduplication ignores sizes and does not distinguish blocks
    of one tensor.
    """
    holders: dict[MetadataIndex, list[int]] = defaultdict(list)
    sizes: dict[MetadataIndex, int] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            # One holder writes all blocks: the restored tensor must not mix values of ranks.
            if item.index.fqn not in unsynchronized or item.index not in holders:
                holders[item.index].append(rank)
                sizes[item.index] = _item_size_bytes(item)
    loads_bytes = [0] * len(plans)
    writers: dict[MetadataIndex, int] = {}
    for index in sorted(holders, key=sizes.__getitem__, reverse=True):
        writer = min(holders[index], key=loads_bytes.__getitem__)
        writers[index] = writer
        loads_bytes[writer] += sizes[index] or 1  # values are distributed, too
    return [
        [item for item in plan.items if writers[item.index] == rank]
        for rank, plan in enumerate(plans)
    ]


# --- this rank's plan ----------------------------------------------------------------------------


def _build_rank_plan(planner: DefaultSavePlanner, items: Sequence[WriteItem]) -> RankSavePlan:
    tensor_items = [item for item in items if item.type is not WriteItemType.BYTE_IO]
    tensors = [_resolve_tensor(planner, item) for item in tensor_items]
    # Aligned, so that a reader can view the bytes as tensors of any dtype without copying.
    starts = aligned_offsets(tensor.nbytes for tensor in tensors)
    pieces = []
    for item, tensor, start in zip(tensor_items, tensors, starts, strict=True):
        write = item.tensor_data
        assert write is not None, "only tensors have pieces"
        piece = TensorPiece(
            key=tuple(planner.mappings[item.index.fqn]),
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(write.size),
            offsets=tuple(write.chunk.offsets),
            sizes=tuple(write.chunk.sizes),
            start=start,
            size_bytes=tensor.nbytes,
        )
        pieces.append(piece)
    value_names = [item.index.fqn for item in items if item.type is WriteItemType.BYTE_IO]
    return RankSavePlan(
        pieces=tuple(pieces),
        tensors=tensors,
        value_keys=tuple(tuple(planner.mappings[name]) for name in value_names),
        values=[
            value.value if isinstance(value := planner.state_dict[name], OpaqueValue) else value
            for name in value_names
        ],
    )


def _resolve_tensor(planner: DefaultSavePlanner, item: WriteItem) -> torch.Tensor:
    """Return this rank's part of the tensor to write, or its block of rows."""
    value: Any = planner.state_dict[item.index.fqn]
    if item.type is WriteItemType.SHARD and type(value) in _DENSE_TYPES:
        # torch's planner resolves shards of DTensors only, not our blocks of a dense tensor.
        assert item.tensor_data is not None, "only tensors are split"
        chunk = item.tensor_data.chunk
        value = value.narrow(0, chunk.offsets[0], chunk.sizes[0])
    else:
        value = planner.resolve_data(item)
    local = value.to_local() if isinstance(value, DTensor) else value
    detached: torch.Tensor = local.detach()
    return detached


# --- values that are not tensors -----------------------------------------------------------------


def encode_values(values: Any, *, keys: Sequence[StateKey] = ()) -> bytes:
    """Encode values so that `decode_values` needs no pickled code.

    `values` is a list with one key each, or a dict without `keys`. numpy scalars become Python
    numbers. Values that only torch knows, such as sparse tensors, are written by torch.save. Raises
    `ConfigError`, with the name of the value, for objects that torch.load rejects with
    `weights_only=True`: data from a bucket must not be able to run code.
    """
    return value_codec.encode_values(values, keys=keys, encode_leaf=_encode_leaf)


def decode_values(body: bytes, source: str) -> Any:
    """Decode what `encode_values` returned, a list or dict, with its tensors on the CPU.

    Also what earlier versions wrote by torch.save. `source` says whose values they are. Raises
    `IntegrityError` with it if the bytes are corrupt or would run code.
    """
    if not body.startswith(_TORCH_SAVE_MAGIC):
        return value_codec.decode_values(body, source, _LEAF_DECODER)
    try:
        return _load_without_code(body)
    except ValueError as error:
        raise IntegrityError(
            f"The values that {source} saved are corrupt: torch.load(weights_only=True) rejects "
            "them.",
            do="Use another checkpoint (spotfit checkpoints ls lists them), or restore this one "
            "from a backup.",
        ) from error


def _encode_leaf(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is torch.Tensor and _is_plain_tensor(value):
        rows = value.detach().cpu().contiguous()
        body = rows.view(-1).view(torch.uint8).numpy().tobytes() if rows.numel() else b""
        return EncodedArray(str(value.dtype).removeprefix("torch."), tuple(value.shape), body)
    try:
        body = _torch_save_bytes(value)
        _load_without_code(body)
    except (ValueError, pickle.PicklingError, AttributeError, TypeError, RuntimeError):
        return value
    return ForeignValue(_FRAMEWORK, body)


def _is_plain_tensor(value: torch.Tensor) -> bool:
    """Return whether shape, dtype and bytes are all that the tensor has."""
    return (
        value.layout is torch.strided
        and not value.is_nested
        and not value.is_quantized
        and not value.requires_grad
        and not value.is_conj()
        and not value.is_neg()
        and value.device.type != "meta"
    )


def _decode_array(array: EncodedArray) -> torch.Tensor:
    try:
        dtype = getattr(torch, array.dtype)
        if not array.body and 0 in array.shape:
            return torch.empty(array.shape, dtype=dtype)
        # A copy, which the tensor may change.
        flat = torch.frombuffer(bytearray(array.body), dtype=torch.uint8)
        return flat.view(dtype).view(array.shape)
    except (AttributeError, TypeError, RuntimeError) as error:
        raise ValueError(str(error)) from error


def _decode_foreign(value: ForeignValue) -> Any:
    if value.framework != _FRAMEWORK:
        raise ValueError(f"a value of {value.framework} cannot be read by torch")
    return _load_without_code(value.body)


_LEAF_DECODER = LeafDecoder(array=_decode_array, foreign=_decode_foreign)


# Of bytes that are no archive, that end too early, or whose pickle has impossible instructions.
_LOAD_ERRORS = (
    pickle.UnpicklingError,
    RuntimeError,
    EOFError,
    LookupError,
    AttributeError,
    TypeError,
)


def _load_without_code(body: bytes) -> Any:
    """Read what torch.save wrote. Raises ValueError if it is corrupt or would run code."""
    try:
        return torch.load(io.BytesIO(body), map_location="cpu", weights_only=True)
    except _LOAD_ERRORS as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _torch_save_bytes(values: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(values, buffer)
    return buffer.getvalue()
