"""StateLoadPlan: which saved bytes go into which tensors of a running state, at any world size.

torch's load planner computes which saved pieces overlap which shards. This module describes the
saved state to it, prepares tensors that do not exist yet, and turns the plan into `ReadRequest`s.
"""

from __future__ import annotations

import io
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.tensor import DTensor, empty

from spotfit.checkpoint.format import StateKey, TensorPiece, dotted_name
from spotfit.checkpoint.reader import ChunkSink, ReadRequest, SavedState, whole_piece_sink
from spotfit.torch.checkpoint.compatibility import (
    MODEL_PREFIX,
    OPTIMIZER_COMPONENT,
    OPTIMIZER_STATE_PREFIX,
    PARAM_GROUPS_PREFIX,
    StateComponent,
    reject_mismatches,
    reject_other_optimizer_type,
)
from spotfit.torch.checkpoint.save_plan import decode_values
from spotfit.torch.checkpoint.training_state import (
    CPU_PLACEMENT,
    StateDict,
    is_expanded,
    placement_of,
    set_by_key,
)

_PARAM_GROUPS_KEY = ("optimizer", "param_groups")
"""First parts of the keys of param_groups; the group's index and the option follow."""
_EXTRA_STATE_SUFFIX = "_extra_state"
"""End of the names of torch's extra state, which modules save besides their weights."""


class StateLoadPlan:
    """What one rank reads of a saved state, and where it goes in the running state.

    Creating it allocates missing tensors in `state` and loads values that are not tensors; no
    chunk is read. Raises `ConfigError` if the state does not match what was saved.
    """

    def __init__(self, state: StateDict, saved: SavedState) -> None:
        index = SavedStateIndex(saved)
        self.unsaved_options = _drop_new_options(state, saved)
        """Options of saved param_groups that were not saved; they keep their current values."""
        # Before groups are added to `state`: it must still describe this rank's optimizers.
        unclaimed_optimizer_names = _unclaimed_optimizer_names(state, saved, index)
        _allocate_object_tensors(state, saved, index)
        _allocate_param_groups(state, saved)
        _allocate_extra_state(state, saved)
        # Not the coordinator and no global plan: each rank plans its own reads without collectives.
        planner = _ValueLoadPlanner()
        planner.set_up_planner(state, index.metadata, is_coordinator=False)
        # Checked before torch plans: its errors name neither all differences nor a remedy.
        _reject_mismatches(planner.state_dict, index.metadata)
        plan = planner.finish_plan(planner.create_local_plan())
        self.reads = saved.plan_reads(index.read_requests(plan, planner))
        """The chunks this rank needs; the state is complete when all have been delivered."""
        saved_weights = {
            name for name in index.metadata.state_dict_metadata if name.startswith(MODEL_PREFIX)
        }
        self.unclaimed_names = unclaimed_optimizer_names | (
            saved_weights - planner.state_dict.keys()
        )
        """Saved names of model and optimizers that this rank's state does not have."""
        self.dtype_changes = [
            f"{name} is {_dtype_name(value.dtype)}, was {_dtype_name(weight.properties.dtype)}"
            for name, weight in index.metadata.state_dict_metadata.items()
            if name.startswith(MODEL_PREFIX)
            and isinstance(value := planner.state_dict.get(name), torch.Tensor)
            and isinstance(weight, TensorStorageMetadata)
            and weight.properties.dtype != value.dtype
        ]
        """Descriptions of weights whose dtype differs from the saved one."""


def _allocate_object_tensors(state: StateDict, saved: SavedState, index: SavedStateIndex) -> None:
    """Give stateful objects the tensors that were saved, whatever they hold at the moment.

    An object may create tensors late, such as an average at its first update. Objects of which
    nothing was saved are removed from `state`: they keep their current state.
    """
    saved_tensors: dict[str, dict[str, TensorPiece]] = defaultdict(dict)
    for key, piece in saved_entries(saved):
        match key:
            case ("stateful_objects", str(owner), "tensors", str(name)) if piece is not None:
                saved_tensors[owner][name] = piece
    weights, components = _weight_tensors(state), saved_components(saved)
    new = [name for name in state["stateful_objects"] if ("extra", name) not in components]
    for owner in new:
        del state["stateful_objects"][owner]
    for owner, parts in state["stateful_objects"].items():
        # Those of the current tensors; torch would look for them in the checkpoint.
        parts.pop("placements", None)
        placements = index.value(f"stateful_objects.{owner}.placements", {})
        current = parts["tensors"]
        parts["tensors"] = {
            name: current[name]
            if name in current
            and current[name].shape == piece.shape
            and not is_expanded(current[name])
            else allocate_tensor_for(piece, placements.get(name, CPU_PLACEMENT), weights)
            for name, piece in saved_tensors[owner].items()
        }


def _weight_tensors(state: StateDict) -> dict[str, torch.Tensor]:
    return {name: one for name, one in state["model"].items() if isinstance(one, torch.Tensor)}


def _drop_new_options(state: StateDict, saved: SavedState) -> list[str]:
    """Remove options that were not saved from `state` and return their names.

    torch's schedulers write options into param_groups, and newer versions of torch have more of
    them. Raises `ConfigError` for another optimizer class.
    """
    if OPTIMIZER_COMPONENT not in saved_components(saved):
        state.pop("optimizer", None)
        return []
    saved_options, new_options = saved_group_options(saved), set[str]()
    for position, group in enumerate(state.get("optimizer", {}).get("param_groups", ())):
        if position in saved_options:
            reject_other_optimizer_type(saved_options[position], group.keys())
            for name in group.keys() - saved_options[position]:
                del group[name]
                new_options.add(name)
    return [f"optimizer's {name}" for name in sorted(new_options)]


def saved_group_options(saved: SavedState) -> Mapping[int, set[str]]:
    """Return the names of the saved options, such as "lr", by the index of their param_group.

    Of all ranks and optimizers together; empty without a saved optimizer. Reads nothing.
    """
    options: dict[int, set[str]] = defaultdict(set)
    for key, _ in saved_entries(saved):
        if key[:2] == _PARAM_GROUPS_KEY:
            options[int(key[2])].add(str(key[3]))
    return options


def _allocate_param_groups(state: StateDict, saved: SavedState) -> None:
    """Add the saved param_groups beyond the current ones to `state`.

    Saved groups are assigned to current ones by their weights, not by their index, so that all of
    them have to be read.
    """
    groups = state.get("optimizer", {}).get("param_groups", [])
    current_count = len(groups)
    for key, piece in saved_entries(saved) if groups else ():
        if key[:2] == _PARAM_GROUPS_KEY and int(key[2]) >= current_count:
            new = None if piece is None else torch.empty(piece.shape, dtype=torch_dtype(piece))
            set_by_key(groups, key[2:], new)


def _allocate_extra_state(state: StateDict, saved: SavedState) -> None:
    """Resize the tensors in modules' extra state to the saved shapes, which may have grown."""
    pieces = {
        piece.name: piece
        for key, piece in saved_entries(saved)
        if piece is not None and key[0] == "model" and str(key[1]).endswith(_EXTRA_STATE_SUFFIX)
    }
    weights = _weight_tensors(state)
    for name, value in state["model"].items() if pieces else ():
        if name.endswith(_EXTRA_STATE_SUFFIX):
            state["model"][name] = _resize_tensors(
                value, f"{MODEL_PREFIX}{name}", pieces=pieces, weights=weights
            )


def _resize_tensors(
    value: Any,
    name: str,
    *,
    pieces: Mapping[str, TensorPiece],
    weights: Mapping[str, torch.Tensor],
) -> Any:
    """Return a copy of the nested value with tensors of the saved shapes."""
    resize = partial(_resize_tensors, pieces=pieces, weights=weights)
    if isinstance(value, torch.Tensor):
        piece = pieces.get(name)
        if piece is None or piece.shape == tuple(value.shape):
            return value
        return allocate_tensor_for(piece, placement_of(value), weights)
    if type(value) in (dict, OrderedDict):
        return type(value)((key, resize(part, f"{name}.{key}")) for key, part in value.items())
    if type(value) is list:
        return [resize(part, f"{name}.{n}") for n, part in enumerate(value)]
    return value


def allocate_tensor_for(
    piece: TensorPiece, placement: tuple[str, bool], weights: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Return an uninitialized tensor for a piece whose object has no such tensor yet.

    It has the whole tensor's shape and the piece's dtype. `placement` is from `placement_of` when
    it was saved; `weights` are this rank's by name. It is on the weights' device if it was saved
    from such a device, else on the CPU. If it was sharded, it is sharded like the weight with its
    name and shape, else like one of its shape, else replicated.
    """
    device, was_sharded = placement
    sharded = {name: one for name, one in weights.items() if isinstance(one, DTensor)}
    if was_sharded and sharded:
        same_shape = [name for name, one in sharded.items() if one.shape == piece.shape]
        same_name = [name for name in same_shape if str(piece.key[-1]).endswith(f"/{name}")]
        for name in (same_name or same_shape)[:1]:
            return torch.empty_like(sharded[name], dtype=torch_dtype(piece), requires_grad=False)
        mesh = next(iter(sharded.values())).device_mesh
        return empty(piece.shape, dtype=torch_dtype(piece), device_mesh=mesh)
    # The saved device number may not exist here: use the weights' device of the same type.
    devices = [one.device for one in weights.values() if one.device.type == device]
    return torch.empty(
        piece.shape, dtype=torch_dtype(piece), device=devices[0] if devices else None
    )


def _reject_mismatches(flat: StateDict, metadata: Metadata) -> None:
    saved_metadata = metadata.state_dict_metadata
    missing = sorted(flat.keys() - saved_metadata.keys())
    mismatches = [
        f"{name} is {tuple(value.shape)}, was {tuple(saved.size)}"
        for name, value in flat.items()
        if isinstance(value, torch.Tensor)
        and isinstance(saved := saved_metadata.get(name), TensorStorageMetadata)
        and saved.size != value.shape
    ]
    reject_mismatches(missing, mismatches)


def _unclaimed_optimizer_names(
    state: StateDict, saved: SavedState, index: SavedStateIndex
) -> frozenset[str]:
    """Return saved state of weights in none of this rank's param_groups, and groups it lacks.

    Empty groups that no longer exist do not count: their options apply to no weight.
    """
    groups = state.get("optimizer", {}).get("param_groups", ())
    current = {name for group in groups for name in group["params"]}
    keys = [key for key, _ in saved_entries(saved)]
    saved_names = {str(key[2]) for key in keys if key[:2] == ("optimizer", "state")}
    saved_positions = {int(key[2]) for key in keys if key[:2] == _PARAM_GROUPS_KEY}
    saved_empty = sum(
        index.value(f"{PARAM_GROUPS_PREFIX}{position}.params", None) == []
        for position in saved_positions
    )
    current_empty = sum(not group["params"] for group in groups)
    count = len(groups) + max(0, saved_empty - current_empty)
    return frozenset(
        (
            *(f"{OPTIMIZER_STATE_PREFIX}{name}" for name in saved_names - current),
            *(f"{PARAM_GROUPS_PREFIX}{n}" for n in saved_positions if n >= count),
        )
    )


def saved_components(saved: SavedState) -> frozenset[StateComponent]:
    """Return the optimizer and `extra` components that the ranks together have saved.

    Such as ("optimizer", "optimizer") and ("extra", "scheduler"); model, loader and `per_rank` are
    not included. Reads nothing.
    """
    keys = {key[:2] for key, _ in saved_entries(saved)}
    optimizer = {OPTIMIZER_COMPONENT} if any(key[0] == "optimizer" for key in keys) else set()
    return frozenset(
        optimizer | {("extra", str(key[1])) for key in keys if key[0] == "stateful_objects"}
    )


def saved_entries(saved: SavedState) -> Iterator[tuple[StateKey, TensorPiece | None]]:
    """Yield the keys that the ranks have saved, with the piece, or None for other values.

    In the order of the ranks; a tensor in several pieces, or a value of several ranks, occurs
    several times. Reads nothing.
    """
    for index in saved.indices:
        yield from ((piece.key, piece) for piece in index.pieces)
        yield from ((key, None) for key in index.value_keys)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# torch warns once per process that a tensor over a read-only buffer could be written to. The
# buffers of a restore are only read: trigger the warning here, where it is suppressed.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.frombuffer(b"0", dtype=torch.uint8)


class _ValueLoadPlanner(DefaultLoadPlanner):
    """Loads values that are not tensors as objects; torch's planner would unpickle bytes."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Set a saved value in the state that is loaded; torch calls it for non-tensors."""
        name = read_item.dest_index.fqn
        set_element(self.original_state_dict, self.mappings[name], value)


class SavedStateIndex:
    """The pieces and values of all ranks' indices, and their description for torch's planner."""

    def __init__(self, saved: SavedState) -> None:
        self._pieces: dict[MetadataIndex, tuple[int, TensorPiece]] = {}
        self._values: dict[str, Any] = {}
        # setdefault: of replicated state that several ranks have saved, the first copy is read.
        for index in saved.indices:
            for piece in index.pieces:
                box = MetadataIndex(piece.name, torch.Size(piece.offsets))
                self._pieces.setdefault(box, (index.rank, piece))
            source = f"rank {index.rank} of {saved.name}"
            values = decode_values(index.encoded_values, source) if index.value_keys else ()
            for key, value in zip(index.value_keys, values, strict=True):
                self._values.setdefault(dotted_name(key), value)
        pieces_by_name: dict[str, list[TensorPiece]] = defaultdict(list)
        for _, piece in self._pieces.values():
            pieces_by_name[piece.name].append(piece)
        # In torch's terms a piece is a chunk of a tensor; our chunks do not occur in its plan.
        tensor_metadata = {
            name: TensorStorageMetadata(
                TensorProperties(torch_dtype(pieces[0])),
                torch.Size(pieces[0].shape),
                [
                    ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))
                    for piece in pieces
                ],
            )
            for name, pieces in pieces_by_name.items()
        }
        value_metadata = {name: BytesStorageMetadata() for name in self._values}
        self.metadata = Metadata({**tensor_metadata, **value_metadata})

    def value(self, name: str, default: Any) -> Any:
        """Return a saved value that is not a tensor, or `default` if it was not saved.

        `name` is dotted, as "optimizer.param_groups.0.lr". The first rank's value is returned.
        """
        return self._values.get(name, default)

    def read_requests(self, plan: LoadPlan, planner: LoadPlanner) -> list[ReadRequest]:
        """Return the pieces that the plan needs; values that are not tensors are loaded now.

        `plan` is this rank's, made by `planner` for the current state. The sinks write the pieces'
        bytes into its tensors. No chunk is read here; several tensors that need one piece share a
        request.
        """
        items: dict[tuple[int, TensorPiece], list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, self._values[item.storage_index.fqn])
            else:
                box = MetadataIndex(item.storage_index.fqn, item.storage_index.offset)
                # One piece may fill several tensors: it is read once.
                items[self._pieces[box]].append(item)
        return [
            ReadRequest(rank, piece, _sink_for(planner, piece, piece_items))
            for (rank, piece), piece_items in items.items()
        ]


def piece_as_tensor(piece: TensorPiece, body: memoryview) -> torch.Tensor:
    """Return the piece as a CPU tensor that shares memory with `body`, which must not change.

    `body` has all bytes of the piece; the shape is that of the piece, not of the whole tensor.
    """
    if not piece.size_bytes:  # torch.frombuffer rejects empty buffers
        return torch.empty(piece.sizes, dtype=torch_dtype(piece))
    return torch.frombuffer(body, dtype=torch.uint8).view(torch_dtype(piece)).view(piece.sizes)


def _sink_for(planner: LoadPlanner, piece: TensorPiece, items: Sequence[ReadItem]) -> ChunkSink:
    """Return how the piece's bytes are written to its tensors.

    A whole piece for a contiguous tensor of the same dtype is copied chunk by chunk, as chunks
    arrive. Any other piece is assembled first.
    """
    targets = [planner.resolve_tensor(item).detach() for item in items]

    def copy_boxes(body: memoryview) -> None:
        source = piece_as_tensor(piece, body)
        for item, target in zip(items, targets, strict=True):
            target.copy_(narrow_to_box(source, item.storage_offsets, item.lengths))

    target = targets[0]
    is_whole = len(items) == 1 and tuple(items[0].lengths) == piece.sizes and piece.size_bytes
    # Conjugate and negative views store other bits than the values that were saved.
    has_saved_layout = target.is_contiguous() and not target.is_conj() and not target.is_neg()
    if not (is_whole and has_saved_layout and target.dtype == torch_dtype(piece)):
        return whole_piece_sink(piece, copy_boxes)
    memory = target.view(-1).view(torch.uint8)
    if memory.device.type == "cpu" and type(memory) is torch.Tensor:
        # numpy copies within main memory a third faster than torch.
        array = memory.numpy()
        return lambda offset, body: np.copyto(
            array[offset : offset + len(body)], np.frombuffer(body, dtype=np.uint8)
        )

    def copy_chunk(offset: int, body: memoryview) -> None:
        memory[offset : offset + len(body)].copy_(torch.frombuffer(body, dtype=torch.uint8))

    return copy_chunk


def narrow_to_box(
    tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]
) -> torch.Tensor:
    """Return a view of the box with these offsets and sizes, one of each per dimension."""
    for dimension, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dimension, offset, size)
    return tensor


def torch_dtype(piece: TensorPiece) -> torch.dtype:
    """Return the torch dtype of a piece, which stores its name, such as 'float32'."""
    dtype = getattr(torch, piece.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype
