"""A saved state into a running one, at any world size: torch plans, we fetch and check."""

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

from spotfit.checkpoint.saved import Saved, Take, Wanted, at_once, read_alone
from spotfit.checkpoint.snapshot import Key, Piece, name_of
from spotfit.frameworks.torch.fitting import (
    GROUPS,
    KNOWN,
    MODEL,
    OPTIMIZER,
    Part,
    refuse_other_kind,
    refuse_others,
)
from spotfit.frameworks.torch.shares import unplain
from spotfit.frameworks.torch.state import CPU, State, home_of, is_expanded, put

_A_GROUP = ("optimizer", "param_groups")
"""What the keys of groups of weights begin with."""
_EXTRA = "_extra_state"
"""What the names of what modules keep beside their weights end with."""


class Loading:
    """What of a saved state goes where in a running one. Nothing is fetched before it is told to.

    Raises `ConfigError` where the state has another form than what was saved.
    """

    def __init__(self, state: State, saved: Saved) -> None:
        reader = Reader(saved)
        self.anew = _leave_new_options(state, saved)
        """What was not saved of groups of weights that were, and keeps the value it has."""
        unlearned = _unlearned(state, saved) | _gone_groups(state, saved, reader)
        _make_room(state, saved, reader)
        _make_room_for_groups(state, saved)
        _make_room_beside_weights(state, saved)
        planner = _Planner()
        planner.set_up_planner(state, reader.metadata, is_coordinator=False)
        _refuse_others(planner.state_dict, reader.metadata)
        plan = planner.finish_plan(planner.create_local_plan())
        self.orders = saved.orders(reader.wanted(plan, planner))
        """Chunks that this rank needs: when all are handed over, the state is what was saved."""
        self.left = _left(planner.state_dict, reader.metadata) | unlearned
        """The names of what was saved of a model and its optimizers, and this rank has no place
        for."""
        self.cast = _cast(planner.state_dict, reader.metadata)
        """Which weights have other types of numbers now than they had."""


def load_into(state: State, saved: Saved) -> None:
    """Overwrite every tensor and value of `state` with what was saved of it.

    Each rank reads what it needs, and meets nobody. Raises `IntegrityError` where bytes are
    missing or are not what was saved, and `ConfigError` where the state has another form.
    """
    read_alone(Loading(state, saved).orders)


def _make_room(state: State, saved: Saved, reader: Reader) -> None:
    """What other objects keep is theirs to say: their tensors are those that were saved.

    Of whom nothing was saved has nothing to go on from.
    """
    found: dict[str, dict[str, Piece]] = defaultdict(dict)
    for index in saved.indices:
        for piece in index.pieces:
            match piece.key:
                case ("others", str(owner), "tensors", str(name)):
                    found[owner][name] = piece
    weights, known = _weights(state), kept_beside(saved)
    for owner in [owner for owner in state["others"] if ("extra", owner) not in known]:
        del state["others"][owner]
    for owner, split in state["others"].items():
        split.pop("homes", None)
        homes = reader.value(f"others.{owner}.homes", {})
        here = split["tensors"]
        split["tensors"] = {
            name: here[name]
            if name in here and _has_room(here[name], piece)
            else room_for(piece, homes.get(name, CPU), weights)
            for name, piece in found[owner].items()
        }


def _has_room(here: torch.Tensor, piece: Piece) -> bool:
    return here.shape == piece.shape and not is_expanded(here)


def _weights(state: State) -> dict[str, torch.Tensor]:
    return {name: one for name, one in state["model"].items() if isinstance(one, torch.Tensor)}


def _leave_new_options(state: State, saved: Saved) -> list[str]:
    """Only what was saved of optimizers is read: torch's schedulers write options of their own into
    groups, and a later torch knows more of them. Raises `ConfigError` for another kind."""
    if OPTIMIZER not in kept_beside(saved):
        state.pop("optimizer", None)
        return []
    had, new = options_in(saved), set[str]()
    for place, group in enumerate(state.get("optimizer", {}).get("param_groups", ())):
        if place in had:
            refuse_other_kind(had[place], group.keys())
            for name in group.keys() - had[place]:
                del group[name]
                new.add(name)
    return [f"optimizer's {name}" for name in sorted(new)]


def options_in(saved: Saved) -> Mapping[int, set[str]]:
    """What was saved of each group of weights."""
    found: dict[int, set[str]] = defaultdict(set)
    for key in _keys(saved):
        if key[:2] == _A_GROUP:
            found[int(key[2])].add(str(key[3]))
    return found


def _make_room_for_groups(state: State, saved: Saved) -> None:
    """For groups beyond those that are there: what was kept goes by its weights, not by place."""
    groups = state.get("optimizer", {}).get("param_groups", [])
    there = len(groups)
    for index in saved.indices if groups else ():
        for piece in index.pieces:
            if piece.key[:2] == _A_GROUP and int(piece.key[2]) >= there:
                put(groups, piece.key[2:], torch.empty(piece.shape, dtype=_dtype(piece)))
        for key in index.leaves:
            if key[:2] == _A_GROUP and int(key[2]) >= there:
                put(groups, key[2:], None)


def _make_room_beside_weights(state: State, saved: Saved) -> None:
    """What modules keep beside their weights is theirs to say, too: its tensors may have grown."""
    pieces = {
        piece.name: piece
        for index in saved.indices
        for piece in index.pieces
        if piece.key[0] == "model" and str(piece.key[1]).endswith(_EXTRA)
    }
    weights = _weights(state)
    for name, value in state["model"].items() if pieces else ():
        if name.endswith(_EXTRA):
            state["model"][name] = _fitted(value, f"{MODEL}{name}", pieces, weights)


def _fitted(
    value: Any, name: str, pieces: Mapping[str, Piece], weights: Mapping[str, torch.Tensor]
) -> Any:
    """The same, with tensors of the shapes that were saved."""
    if isinstance(value, torch.Tensor):
        piece = pieces.get(name)
        if piece is None or piece.shape == tuple(value.shape):
            return value
        return room_for(piece, home_of(value), weights)
    if type(value) in (dict, OrderedDict):
        parts = value.items()
        return type(value)(
            (key, _fitted(one, f"{name}.{key}", pieces, weights)) for key, one in parts
        )
    if type(value) is list:
        return [_fitted(one, f"{name}.{n}", pieces, weights) for n, one in enumerate(value)]
    return value


def room_for(
    piece: Piece, home: tuple[str, bool], weights: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """For a tensor that its object has not made yet: on the weights' device if it was on such a
    one; and if it was sharded, like the weight it is named after, or else one of its shape."""
    device, was_sharded = home
    shards = {name: one for name, one in weights.items() if isinstance(one, DTensor)}
    if was_sharded and shards:
        alike = [name for name, one in shards.items() if one.shape == piece.shape]
        named = [name for name in alike if str(piece.key[-1]).endswith(f"/{name}")]
        for name in (named or alike)[:1]:
            return torch.empty_like(shards[name], dtype=_dtype(piece), requires_grad=False)
        mesh = next(iter(shards.values())).device_mesh
        return empty(piece.shape, dtype=_dtype(piece), device_mesh=mesh)
    there = [one.device for one in weights.values() if one.device.type == device]
    return torch.empty(piece.shape, dtype=_dtype(piece), device=there[0] if there else None)


def _refuse_others(flat: State, metadata: Metadata) -> None:
    saved_as = metadata.state_dict_metadata
    missing = sorted(flat.keys() - saved_as.keys())
    wrong = [
        f"{name} is {tuple(value.shape)}, was {tuple(saved.size)}"
        for name, value in flat.items()
        if isinstance(value, torch.Tensor)
        and isinstance(saved := saved_as.get(name), TensorStorageMetadata)
        and saved.size != value.shape
    ]
    refuse_others(missing, wrong)


def _left(flat: State, metadata: Metadata) -> frozenset[str]:
    saved = {name for name in metadata.state_dict_metadata if name.startswith(MODEL)}
    return frozenset(saved - flat.keys())


def _unlearned(state: State, saved: Saved) -> frozenset[str]:
    """Weights of which an optimizer kept something, and none of this rank's learns them."""
    groups = state.get("optimizer", {}).get("param_groups", ())
    learned = {name for group in groups for name in group["params"]}
    kept = {str(key[2]) for key in _keys(saved) if key[:2] == ("optimizer", "state")}
    return frozenset(KNOWN + name for name in kept - learned)


def _gone_groups(state: State, saved: Saved, reader: Reader) -> frozenset[str]:
    """Groups of weights that the optimizers had beyond those of this rank's.

    Those that had no weights, and are gone, count for nothing.
    """
    groups = state.get("optimizer", {}).get("param_groups", ())
    kept = {int(key[2]) for key in _keys(saved) if key[:2] == _A_GROUP}
    were_empty = sum(reader.value(f"{GROUPS}{place}.params", None) == [] for place in kept)
    are_empty = sum(not group["params"] for group in groups)
    there = len(groups) + max(0, were_empty - are_empty)
    return frozenset(f"{GROUPS}{place}" for place in kept if place >= there)


def kept_beside(saved: Saved) -> frozenset[Part]:
    """What was saved of all ranks together, beside the model."""
    keys = {key[:2] for key in _keys(saved)}
    optimizer = {OPTIMIZER} if any(key[0] == "optimizer" for key in keys) else set()
    return frozenset(optimizer | {("extra", str(key[1])) for key in keys if key[0] == "others"})


def _keys(saved: Saved) -> Iterator[Key]:
    for index in saved.indices:
        yield from (piece.key for piece in index.pieces)
        yield from index.leaves


def _cast(flat: State, metadata: Metadata) -> list[str]:
    return [
        f"{name} is {_word(value.dtype)}, was {_word(saved.properties.dtype)}"
        for name, saved in metadata.state_dict_metadata.items()
        if name.startswith(MODEL)
        and isinstance(value := flat.get(name), torch.Tensor)
        and isinstance(saved, TensorStorageMetadata)
        and saved.properties.dtype != value.dtype
    ]


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


with warnings.catch_warnings():  # once told, never again: what is fetched is only looked at
    warnings.simplefilter("ignore")
    torch.frombuffer(b"0", dtype=torch.uint8)


class _Planner(DefaultLoadPlanner):
    """Values that are no tensors come as they are, never as a pickle."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        set_element(self.original_state_dict, self.mappings[name], value)


class Reader:
    """Where a state lies, in words of torch's planner."""

    def __init__(self, saved: Saved) -> None:
        self._pieces: dict[MetadataIndex, tuple[int, Piece]] = {}
        self._leaves: dict[str, Any] = {}
        for index in saved.indices:
            for piece in index.pieces:
                place = MetadataIndex(piece.name, torch.Size(piece.offsets))
                self._pieces.setdefault(place, (index.rank, piece))
            values = unplain(index.plain) if index.leaves else ()
            for key, value in zip(index.leaves, values, strict=True):
                self._leaves.setdefault(name_of(key), value)
        self.metadata = Metadata({**self._told_tensors(), **self._told_leaves()})

    def value(self, name: str, default: Any) -> Any:
        """One that is no tensor."""
        return self._leaves.get(name, default)

    def wanted(self, plan: LoadPlan, planner: LoadPlanner) -> list[Wanted]:
        """All pieces that the plan asks for; values that are no tensors are handed over at once."""
        items: dict[tuple[int, Piece], list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, self._leaves[item.storage_index.fqn])
            else:
                place = MetadataIndex(item.storage_index.fqn, item.storage_index.offset)
                items[self._pieces[place]].append(item)
        return [
            Wanted(rank, piece, _taking(planner, piece, asked))
            for (rank, piece), asked in items.items()
        ]

    def _told_tensors(self) -> dict[str, TensorStorageMetadata]:
        boxes: dict[str, list[Piece]] = defaultdict(list)
        for _, piece in self._pieces.values():
            boxes[piece.name].append(piece)
        return {
            name: TensorStorageMetadata(
                TensorProperties(_dtype(pieces[0])),
                torch.Size(pieces[0].shape),
                [
                    ChunkStorageMetadata(torch.Size(one.offsets), torch.Size(one.sizes))
                    for one in pieces
                ],
            )
            for name, pieces in boxes.items()
        }

    def _told_leaves(self) -> dict[str, BytesStorageMetadata]:
        return {name: BytesStorageMetadata() for name in self._leaves}


def as_tensor(piece: Piece, body: memoryview) -> torch.Tensor:
    """The piece; it looks at these bytes, which must not change."""
    if not piece.size_bytes:
        return torch.empty(piece.sizes, dtype=_dtype(piece))
    return torch.frombuffer(body, dtype=torch.uint8).view(_dtype(piece)).view(piece.sizes)


def _taking(planner: LoadPlanner, piece: Piece, items: Sequence[ReadItem]) -> Take:
    """How the piece gets to its tensors: run by run where it is one run of memory there, too."""
    targets = [planner.resolve_tensor(item).detach() for item in items]
    if len(items) == 1 and piece.size_bytes:
        target = targets[0]
        whole = tuple(items[0].lengths) == piece.sizes
        if whole and target.is_contiguous() and _means_its_bytes(target, piece):
            return _run_into(target.view(-1).view(torch.uint8))
    return at_once(piece, partial(_boxes, piece, items, targets))


def _means_its_bytes(target: torch.Tensor, piece: Piece) -> bool:
    """Not of another type, nor a view that turns the sign of what lies in memory."""
    return target.dtype == _dtype(piece) and not target.is_conj() and not target.is_neg()


def _run_into(target: torch.Tensor) -> Take:
    """numpy copies within main memory a third faster than torch does."""
    if target.device.type != "cpu" or type(target) is not torch.Tensor:
        return partial(_run, target)
    return partial(_run_here, target.numpy())


def _run(target: torch.Tensor, at: int, body: memoryview) -> None:
    target[at : at + len(body)].copy_(torch.frombuffer(body, dtype=torch.uint8))


def _run_here(target: np.ndarray, at: int, body: memoryview) -> None:
    np.copyto(target[at : at + len(body)], np.frombuffer(body, dtype=np.uint8))


def _boxes(
    piece: Piece, items: Sequence[ReadItem], targets: Sequence[torch.Tensor], body: memoryview
) -> None:
    source = as_tensor(piece, body)
    for item, target in zip(items, targets, strict=True):
        box = source
        for dimension, (begin, length) in enumerate(
            zip(item.storage_offsets, item.lengths, strict=True)
        ):
            box = box.narrow(dimension, begin, length)
        target.copy_(box)


def _dtype(piece: Piece) -> torch.dtype:
    dtype = getattr(torch, piece.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype
