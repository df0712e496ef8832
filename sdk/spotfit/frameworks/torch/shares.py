"""Who writes what: each rank the shards it holds, and its share of what all ranks hold alike."""

from __future__ import annotations

import io
import math
import operator
import pickle
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from spotfit.checkpoint.snapshot import OWN_CHUNK_BYTES, Key, Piece, name_of, starts
from spotfit.core.errors import ConfigError, IntegrityError
from spotfit.frameworks.torch.state import State, Whole
from spotfit.host import log

_FRACTION = 8
"""No more than such a part of what a rank has to write hangs on where one tensor ends."""

_ROWS = (torch.Tensor, torch.nn.Parameter)

_BIG = 2**63
"""Whole numbers up to here are read by every reader of torch's."""

Gather = Callable[[Any], list[Any]]
"""Every rank gives something, and gets what all gave, by rank."""


class Share(NamedTuple):
    """What this rank writes of a state."""

    pieces: tuple[Piece, ...]
    tensors: list[torch.Tensor]
    """One for each piece, still the ones in use."""
    leaves: tuple[Key, ...]
    values: list[Any]
    """One for each leaf."""

    @property
    def shape(self) -> tuple[Any, ...]:
        """What must be the same for the next share to fit into this one's place."""
        return self.pieces, self.leaves

    @property
    def size_bytes(self) -> int:
        """How much its tensors take."""
        return max((piece.end for piece in self.pieces), default=0)


class Shares:
    """Deals a state out, the first time together with all ranks, then for itself.

    Later a rank looks at its own state only. What it finds there that was never dealt out it
    writes, too, though others may hold the same; every doubling of the saves all ranks deal anew
    where one of them found any.
    """

    def __init__(self, rank: int, gather: Gather) -> None:
        self._rank = rank
        self._gather = gather
        self._saves = 0
        self._dealt_of: Any = None
        """The outline of the state that was last dealt out together."""
        self._known: Any = None
        """The outline that `_mine` is for."""
        self._mine: list[WriteItem] = []
        self._dealt: set[MetadataIndex] = set()
        self._cut_bytes = math.inf
        """Tensors bigger than that were cut, that ranks may share them."""
        self.largest_bytes = 0
        """How much the rank that has most to write writes in a save, as far as all were told."""

    def of(self, state: State, *, drifting: Collection[str] = (), last_bytes: int = 0) -> Share:
        """This rank's share. All ranks have to ask, for states of the same step.

        Of tensors whose names are `drifting` ranks may hold different ones: the first who holds
        one writes it, that all which is restored comes from one rank. `last_bytes` is what this
        rank's last save took, with what is no tensor: whenever ranks speak, they tell.
        """
        planner = DefaultSavePlanner()
        planner.set_up_planner(state)
        outline = _outline(planner.state_dict)
        self._saves += 1
        if self._saves & (self._saves - 1) == 0 and self._any_new(outline, last_bytes):
            self._deal(planner, outline, drifting)
        elif outline != self._known:
            self._find_mine(planner, outline)
        return _share(planner, self._mine)

    def _any_new(self, outline: Any, last_bytes: int) -> bool:
        """Whether any rank holds what was not dealt out."""
        told = self._gather((outline != self._dealt_of, last_bytes))
        self.largest_bytes = max(size_bytes for _, size_bytes in told)
        return any(new for new, _ in told)

    def _deal(self, planner: DefaultSavePlanner, outline: Any, drifting: Collection[str]) -> None:
        first = self._dealt_of is None
        looks = _looks(planner.state_dict, but=drifting) if first else {}
        told = self._gather((planner.create_local_plan(), _divisible(planner.state_dict), looks))
        if self._rank == 0:
            _tell_of_others([looks for *_, looks in told])
        self._cut_bytes = _cut_bytes([plan for plan, *_ in told])
        plans = [_cut(plan, names, self._cut_bytes) for plan, names, _ in told]
        _refuse_patchwork(plans, but=drifting)
        dealt = _dealt(_left_to_the_first(plans, drifting))
        self._mine = dealt[self._rank]
        self.largest_bytes = max(self.largest_bytes, *(sum(map(_size_bytes, one)) for one in dealt))
        self._dealt = {item.index for plan in plans for item in plan.items}
        self._dealt_of = self._known = outline

    def _find_mine(self, planner: DefaultSavePlanner, outline: Any) -> None:
        held = {item.index: item for item in self._mine}
        plan = planner.create_local_plan()
        items = _cut(plan, _divisible(planner.state_dict), self._cut_bytes).items
        self._mine = [item for item in items if item.index in held or item.index not in self._dealt]
        self._known = outline


def _looks(flat: State, *, but: Collection[str]) -> dict[str, bytes]:
    """What ranks hold alike looks alike, by name: a few numbers of each weight that is no shard,
    and the options of optimizers."""
    return _weights(flat, but) | {
        name: repr(value).encode()
        for name, value in flat.items()
        if name.startswith("optimizer.param_groups.") and ".params" not in name
        if isinstance(value, bool | int | float | str | tuple)
    }


def _weights(flat: State, but: Collection[str]) -> dict[str, bytes]:
    weights = {
        name: value.detach()
        for name, value in flat.items()
        if name.startswith("model.") and type(value) in _ROWS and name not in but
        if value.is_floating_point() and value.numel()
    }
    if not weights:
        return {}
    numbers = [one[place].float() for one in weights.values() for place in _places(one)]
    rows = _on_one(numbers).view(len(weights), -1).cpu().numpy()
    return {name: row.tobytes() for name, row in zip(weights, rows, strict=True)}


def _places(weight: torch.Tensor) -> list[tuple[int, ...]]:
    """Of its first number, one in the middle and the last."""
    return [tuple(int((size - 1) * part) for size in weight.shape) for part in (0, 0.5, 1)]


def _on_one(numbers: Sequence[torch.Tensor]) -> torch.Tensor:
    """All of them, on the device of the first: they come over from a GPU at once."""
    if len({one.device for one in numbers}) > 1:
        return torch.stack([one.cpu() for one in numbers])
    return torch.stack(list(numbers))


def _tell_of_others(looks: Sequence[Mapping[str, bytes]]) -> None:
    """What ranks hold differently would come back from this rank and that."""
    found: dict[str, set[bytes]] = defaultdict(set)
    for one in looks:
        for name, look in one.items():
            found[name].add(look)
    differ = [name for name, seen in found.items() if len(seen) > 1]
    if differ:
        log.warning(
            "checkpoint.ranks_differ",
            parts=len(differ),
            such_as=differ[0],
            why="ranks hold different ones, and of each only one rank's is kept",
            do="have prepare_model wrap the model, or keep what is each rank's own in own={...}",
        )


def _refuse_patchwork(plans: Sequence[SavePlan], but: Collection[str]) -> None:
    """Raises `ConfigError`, on all ranks, for parts that no one tensor could be made of again."""
    shapes: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    in_parts: set[str] = set()
    for item in chain.from_iterable(plan.items for plan in plans):
        if (told := item.tensor_data) is not None and item.index.fqn not in but:
            shapes[item.index.fqn].add(tuple(told.size))
            in_parts |= {item.index.fqn} if told.chunk.sizes != told.size else set()
    differ = [name for name, found in shapes.items() if len(found) > 1 and name in in_parts]
    if differ:
        raise ConfigError(
            f"{len(differ)} tensors have other shapes on other ranks, {differ[0]} for one: "
            f"{sorted(shapes[differ[0]])}.",
            do="Keep what is each rank's own in own={…}, or shard it as torch's DTensor.",
        )


def _cut_bytes(plans: Sequence[SavePlan]) -> float:
    """How big a tensor may be that one rank writes alone: a fraction of what each has to write."""
    if len(plans) == 1:
        return math.inf
    sizes = {item.index: _size_bytes(item) for plan in plans for item in plan.items}
    return max(OWN_CHUNK_BYTES, sum(sizes.values()) / len(plans) / _FRACTION)


def _divisible(flat: State) -> frozenset[str]:
    """The names of those that are rows of numbers. What another class of tensor keeps, such as
    weights that are scaled or packed, only that class may divide: it is written by one rank."""
    return frozenset(name for name, value in flat.items() if type(value) in _ROWS)


def _cut(plan: SavePlan, names: Collection[str], cut_bytes: float) -> SavePlan:
    """The same, with every tensor of these `names` that is bigger in blocks of its rows."""
    items: list[WriteItem] = []
    for item in plan.items:
        bigger = item.index.fqn in names and _size_bytes(item) > cut_bytes
        items += _blocks(item, cut_bytes) if bigger else [item]
    return replace(plan, items=items)


def _blocks(item: WriteItem, cut_bytes: float) -> list[WriteItem]:
    told, size_bytes = item.tensor_data, _size_bytes(item)
    assert told is not None  # it is no leaf
    rows = told.size[0]
    step = math.ceil(rows / math.ceil(size_bytes / cut_bytes))
    blocks = []
    for begin in range(0, rows, step):
        offsets = torch.Size((begin, *told.chunk.offsets[1:]))
        sizes = torch.Size((min(step, rows - begin), *told.size[1:]))
        chunk = ChunkStorageMetadata(offsets, sizes)
        index = MetadataIndex(item.index.fqn, offsets)
        blocks.append(WriteItem(index, WriteItemType.SHARD, None, replace(told, chunk=chunk)))
    return blocks


def _size_bytes(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0  # of values nobody knows
    item_bytes = item.tensor_data.properties.dtype.itemsize
    return math.prod(item.tensor_data.chunk.sizes) * item_bytes


def _dealt(plans: Sequence[SavePlan]) -> list[list[WriteItem]]:
    """Each item to one of those who hold it: the biggest first, each to who has the least by then.

    Torch's own deals in the order of names, and takes a block for the whole tensor.
    """
    holders: dict[MetadataIndex, list[int]] = defaultdict(list)
    sizes: dict[MetadataIndex, int] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            holders[item.index].append(rank)
            sizes[item.index] = _size_bytes(item)
    loads_bytes = [0] * len(plans)
    writers: dict[MetadataIndex, int] = {}
    for index in sorted(holders, key=sizes.__getitem__, reverse=True):
        writer = min(holders[index], key=loads_bytes.__getitem__)
        writers[index] = writer
        loads_bytes[writer] += sizes[index] or 1
    return [
        [item for item in plan.items if writers[item.index] == rank]
        for rank, plan in enumerate(plans)
    ]


def _left_to_the_first(plans: Sequence[SavePlan], names: Collection[str]) -> list[SavePlan]:
    """The same plans, but what has one of these names only the first writes who would."""
    taken: set[MetadataIndex] = set()
    left: list[SavePlan] = []
    for plan in plans:
        items = [item for item in plan.items if item.index not in taken]
        taken |= {item.index for item in items if item.index.fqn in names}
        left.append(replace(plan, items=items))
    return left


def _outline(flat: State) -> list[tuple[Any, ...]]:
    """What a plan depends on: which tensors there are, and what else."""
    return [
        (name, value.shape, value.dtype) if isinstance(value, torch.Tensor) else (name,)
        for name, value in flat.items()
    ]


def _share(planner: DefaultSavePlanner, items: Sequence[WriteItem]) -> Share:
    cut = [item for item in items if item.type is not WriteItemType.BYTE_IO]
    tensors = [_held(_found(planner, item)) for item in cut]
    places = starts(tensor.nbytes for tensor in tensors)
    pieces = tuple(
        _piece(planner.mappings[item.index.fqn], item, tensor, start)
        for item, tensor, start in zip(cut, tensors, places, strict=True)
    )
    leaves = [item.index.fqn for item in items if item.type is WriteItemType.BYTE_IO]
    return Share(
        pieces,
        tensors,
        tuple(tuple(planner.mappings[name]) for name in leaves),
        [_opened(planner.state_dict[name]) for name in leaves],
    )


def _found(planner: DefaultSavePlanner, item: WriteItem) -> Any:
    """The tensor, or the block of its rows, that is written."""
    whole = planner.state_dict[item.index.fqn]
    if item.type is not WriteItemType.SHARD or type(whole) not in _ROWS:
        return planner.resolve_data(item)
    assert item.tensor_data is not None  # it is no leaf
    chunk = item.tensor_data.chunk
    return whole.narrow(0, chunk.offsets[0], chunk.sizes[0])


def _opened(value: Any) -> Any:
    return value.value if isinstance(value, Whole) else value


def _held(tensor: Any) -> torch.Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    held: torch.Tensor = local.detach()
    return held


def _piece(key: Any, item: WriteItem, tensor: torch.Tensor, start: int) -> Piece:
    told = item.tensor_data
    assert told is not None  # it is no leaf
    return Piece(
        tuple(key),
        str(tensor.dtype).removeprefix("torch."),
        tuple(told.size),
        tuple(told.chunk.offsets),
        tuple(told.chunk.sizes),
        start,
        tensor.nbytes,
    )


# --- what is no tensor ---------------------------------------------------------------------------


def plain(values: Any, *, of: Sequence[Key] = ()) -> bytes:
    """Values as torch saves them. Raises `ConfigError` for what only a pickle could hold.

    A pickle is code: nothing that comes from a bucket is unpickled. `values` are a list, with the
    keys they are `of`, or a dictionary; numbers of numpy become Python's.
    """
    ours = _of_python(values)
    parts = zip(of, ours, strict=True) if of else _parts(ours)
    strange = [(key, part) for key, part in parts if _is_strange(part)]
    if strange:
        names = chain.from_iterable(_strange_in(name_of(key), part) for key, part in strange)
        raise ConfigError(
            f"The state of {', '.join(names)} holds objects that only a pickle could keep.",
            do="Have its state_dict() return tensors, numbers, texts, and lists and dictionaries "
            "of them.",
        )
    return _saved(ours)


def unplain(body: bytes) -> Any:
    """What was saved. Raises `IntegrityError` where it would run code."""
    try:
        return torch.load(io.BytesIO(body), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as strange:
        raise IntegrityError(f"Its values cannot be read: {strange}") from strange


def _saved(values: Any) -> bytes:
    sink = io.BytesIO()
    torch.save(values, sink)
    return sink.getvalue()


def _of_python(value: Any) -> Any:
    """The same with numpy's numbers as Python's, and the very same where there are none."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (dict, OrderedDict):
        parts = {_of_python(key): _of_python(part) for key, part in value.items()}
        return value if all(new is old for new, old in _pairs(parts, value)) else type(value)(parts)
    if type(value) in (list, tuple):
        items = [_of_python(part) for part in value]
        return value if all(map(operator.is_, items, value)) else type(value)(items)
    return value


def _pairs(one: dict[Any, Any], other: dict[Any, Any]) -> Iterator[tuple[Any, Any]]:
    """Keys with keys, and values with values."""
    yield from zip(one, other, strict=True)
    yield from zip(one.values(), other.values(), strict=True)


def _parts(value: Any) -> Iterator[tuple[Key, Any]]:
    if type(value) in (dict, OrderedDict):
        yield from (((str(name),), part) for name, part in value.items())
    elif type(value) in (list, tuple):
        yield from (((place,), part) for place, part in enumerate(value))


def _strange_in(name: str, value: Any) -> list[str]:
    """The names of what would not be read again, as far in as it can be told."""
    if not _is_strange(value):
        return []
    inner = [one for key, part in _parts(value) for one in _strange_in(name_of((name, *key)), part)]
    return inner or [name]


def _is_strange(value: Any) -> bool:
    """Whether it would not be read again. Only what is not plainly harmless is tried."""
    if _is_harmless(value):
        return False
    try:
        unplain(_saved(value))
    except (IntegrityError, pickle.PicklingError, AttributeError, TypeError, RuntimeError):
        return True
    return False


def _is_harmless(value: Any) -> bool:
    kind = type(value)
    if kind in (list, tuple):
        return all(map(_is_harmless, value))
    if kind is dict:
        return all(map(_is_harmless, value)) and all(map(_is_harmless, value.values()))
    if kind is int:
        return bool(abs(value) < _BIG)
    if kind is torch.Tensor:
        return value.layout is torch.strided and not value.is_quantized
    return kind in (float, bool, str, type(None))
