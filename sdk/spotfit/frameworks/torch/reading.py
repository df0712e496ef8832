"""A saved state into a running one, at any world size: torch plans, we fetch and check."""

from __future__ import annotations

import io
import warnings
from collections import defaultdict
from functools import partial
from typing import Any

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
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from spotfit.checkpoint.saved import Saved, Wanted
from spotfit.checkpoint.snapshot import Piece, name_of
from spotfit.core.errors import ConfigError
from spotfit.frameworks.torch.shares import unplain
from spotfit.frameworks.torch.state import State


def load_into(state: State, saved: Saved) -> None:
    """Overwrite every tensor and value of `state` with what was saved of it.

    Each rank reads what it needs, and meets nobody. Raises `IntegrityError` where bytes are
    missing or are not what was saved, and `ConfigError` where the state has another form.
    """
    reader = Reader(saved)
    _make_room(state["others"], saved)
    planner = _Planner()
    planner.set_up_planner(state, reader.read_metadata(), is_coordinator=False)
    _refuse_others(planner.state_dict, reader)
    reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()


def _make_room(others: State, saved: Saved) -> None:
    """What other objects keep is theirs to say: their tensors are those that were saved."""
    found: dict[str, dict[str, Piece]] = defaultdict(dict)
    for index in saved.indices:
        for piece in index.pieces:
            match piece.key:
                case ("others", str(owner), "tensors", str(name)):
                    found[owner][name] = piece
    for owner, split in others.items():
        here = split["tensors"]
        split["tensors"] = {
            name: here[name]
            if name in here and here[name].shape == piece.shape
            else torch.empty(piece.shape, dtype=_dtype(piece))
            for name, piece in found[owner].items()
        }


def _refuse_others(flat: State, reader: Reader) -> None:
    saved_as = reader.read_metadata().state_dict_metadata
    missing = sorted(flat.keys() - saved_as.keys())
    wrong = [
        f"{name} is {tuple(value.shape)}, was {tuple(saved.size)}"
        for name, value in flat.items()
        if isinstance(value, torch.Tensor)
        and isinstance(saved := saved_as.get(name), TensorStorageMetadata)
        and saved.size != value.shape
    ]
    if missing or wrong:
        told = [f"{name} was not saved" for name in missing] + wrong
        raise ConfigError(
            f"The checkpoint is of another training: {'; '.join(told[:5])}"
            f"{f' and {len(told) - 5} more' if len(told) > 5 else ''}.",
            do="Build the same model and optimizer as the run that saved it, or name a new run.",
        )


with warnings.catch_warnings():  # once told, never again: what is fetched is only looked at
    warnings.simplefilter("ignore")
    torch.frombuffer(b"0", dtype=torch.uint8)


class _Planner(DefaultLoadPlanner):
    """Values that are no tensors come as they are, never as a pickle."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        set_element(self.original_state_dict, self.mappings[name], value)


class Reader(StorageReader):
    """What torch asks where a state lies."""

    def __init__(self, saved: Saved) -> None:
        self._saved = saved
        self._pieces: dict[MetadataIndex, tuple[int, Piece]] = {}
        self._leaves: dict[str, Any] = {}
        for index in saved.indices:
            for piece in index.pieces:
                place = MetadataIndex(piece.name, torch.Size(piece.offsets))
                self._pieces.setdefault(place, (index.rank, piece))
            values = unplain(index.plain) if index.leaves else ()
            for key, value in zip(index.leaves, values, strict=True):
                self._leaves.setdefault(name_of(key), value)
        self._metadata = Metadata({**self._told_tensors(), **self._told_leaves()})

    def reset(self, checkpoint_id: Any = None) -> None:
        """There is nothing to begin anew."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, **_: Any) -> None:  # noqa: FBT001 - torch's
        """All is known."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Hand over all that the plan asks for."""
        wanted: dict[tuple[int, Piece], list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, self._leaves[item.storage_index.fqn])
            else:
                place = MetadataIndex(item.storage_index.fqn, item.storage_index.offset)
                wanted[self._pieces[place]].append(item)
        self._saved.read(
            [
                Wanted(rank, piece, partial(_copy, planner, piece, items))
                for (rank, piece), items in wanted.items()
            ]
        )
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False

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


def _copy(planner: LoadPlanner, piece: Piece, items: list[ReadItem], body: memoryview) -> None:
    source = as_tensor(piece, body)
    for item in items:
        box = source
        for dimension, (begin, length) in enumerate(
            zip(item.storage_offsets, item.lengths, strict=True)
        ):
            box = box.narrow(dimension, begin, length)
        target = planner.resolve_tensor(item).detach()
        target.copy_(box)
        planner.commit_tensor(item, target)


def _dtype(piece: Piece) -> torch.dtype:
    dtype = getattr(torch, piece.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype
