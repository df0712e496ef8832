"""Who writes what: each rank the shards it holds, and its share of what all ranks hold alike."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from spotfit.checkpoint.snapshot import Key, Piece, starts
from spotfit.core.errors import ConfigError
from spotfit.frameworks.torch.state import State, Whole

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

    def of(self, state: State) -> Share:
        """This rank's share. All ranks have to ask, for states of the same step."""
        planner = DefaultSavePlanner()
        planner.set_up_planner(state)
        outline = _outline(planner.state_dict)
        self._saves += 1
        if self._saves & (self._saves - 1) == 0 and any(self._gather(outline != self._dealt_of)):
            self._deal(planner, outline)
        elif outline != self._known:
            self._find_mine(planner.create_local_plan(), outline)
        return _share(planner, self._mine)

    def _deal(self, planner: DefaultSavePlanner, outline: Any) -> None:
        plans = self._gather(planner.create_local_plan())
        dealt, _ = planner.create_global_plan(plans)
        self._mine = dealt[self._rank].items
        self._dealt = {item.index for plan in plans for item in plan.items}
        self._dealt_of = self._known = outline

    def _find_mine(self, plan: SavePlan, outline: Any) -> None:
        held = {item.index: item for item in self._mine}
        self._mine = [
            item for item in plan.items if item.index in held or item.index not in self._dealt
        ]
        self._known = outline


def _outline(flat: State) -> list[tuple[Any, ...]]:
    """What a plan depends on: which tensors there are, and what else."""
    return [
        (name, value.shape, value.dtype) if isinstance(value, torch.Tensor) else (name,)
        for name, value in flat.items()
    ]


def _share(planner: DefaultSavePlanner, items: Sequence[WriteItem]) -> Share:
    cut = [item for item in items if item.type is not WriteItemType.BYTE_IO]
    tensors = [_held(planner.resolve_data(item)) for item in cut]
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


def plain(values: Any, *, of: Sequence[Key] = (), check: bool = True) -> bytes:
    """Values as torch saves them. A `check` raises `ConfigError` for what only a pickle could hold.

    A pickle is code: nothing that comes from a bucket is unpickled.
    """
    body = _saved(values)
    try:
        if check:
            unplain(body)
    except pickle.UnpicklingError:
        names = [".".join(map(str, key)) for key in of]
        strange = [name for name, value in zip(names, values, strict=False) if _is_strange(value)]
        raise ConfigError(
            f"The state of {', '.join(strange) or 'this training'} holds objects that only a "
            "pickle could keep.",
            do="Have its state_dict() return tensors, numbers, texts, and lists and dictionaries "
            "of them.",
        ) from None
    return body


def unplain(body: bytes) -> Any:
    """What was saved. Raises `pickle.UnpicklingError` where it would run code."""
    return torch.load(io.BytesIO(body), map_location="cpu", weights_only=True)


def _saved(values: Any) -> bytes:
    sink = io.BytesIO()
    torch.save(values, sink)
    return sink.getvalue()


def _is_strange(value: Any) -> bool:
    try:
        unplain(_saved(value))
    except (pickle.UnpicklingError, pickle.PicklingError, AttributeError, TypeError):
        return True
    return False
