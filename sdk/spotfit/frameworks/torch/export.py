"""A snapshot as one file of torch.save, put together from the shards of all ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from spotfit.checkpoint.export import tensors_of
from spotfit.checkpoint.saved import Saved, Wanted, at_once
from spotfit.checkpoint.snapshot import Piece
from spotfit.frameworks.torch.reading import as_tensor
from spotfit.frameworks.torch.shares import unplain
from spotfit.frameworks.torch.state import State, joined, put
from spotfit.store.parts import appearing


def export_torch(saved: Saved, path: Path, *, everything: bool = False) -> None:
    """Write the model's state dict, or with `everything` the whole state, as torch.save would.

    `torch.load(path)` reads it as it is. Raises `IntegrityError` where bytes are missing or are not
    what was saved.
    """
    state = whole_state(saved) if everything else whole_state(saved, only="model")
    with appearing(path) as draft, draft.open("xb") as file:  # torch refuses the draft's name
        torch.save(state if everything else state["model"], file)


def whole_state(saved: Saved, *, only: str | None = None) -> State:
    """All tensors whole, on the CPU, and all values, nested as they were; or one part of them."""
    state: State = {}
    wanted: list[Wanted] = []
    parts = {piece.key[0] for index in saved.indices for piece in index.pieces}
    for part in sorted(parts if only is None else parts & {only}, key=str):
        for key, pieces in tensors_of(saved, str(part)).items():
            first = pieces[0][1]
            whole = torch.empty(first.shape, dtype=getattr(torch, first.dtype))
            put(state, key, whole)
            wanted += [
                Wanted(rank, piece, at_once(piece, partial(_fill, whole, piece)))
                for rank, piece in pieces
            ]
    saved.read(wanted)
    for index in saved.indices:
        wanted_leaves = [key for key in index.leaves if only in (None, key[0])]
        values = dict(zip(index.leaves, unplain(index.plain), strict=True)) if wanted_leaves else {}
        for key in wanted_leaves:
            put(state, key, values[key])
    others = state.pop("others", {})
    return state | {
        name: joined(split["whole"], split.get("tensors", {})) for name, split in others.items()
    }


def _fill(whole: torch.Tensor, piece: Piece, body: memoryview) -> None:
    box = whole
    for dimension, (begin, length) in enumerate(zip(piece.offsets, piece.sizes, strict=True)):
        box = box.narrow(dimension, begin, length)
    box.copy_(as_tensor(piece, body))
