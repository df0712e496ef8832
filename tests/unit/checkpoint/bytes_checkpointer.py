"""A Checkpointer without a framework, whose state is a list of bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec

from spotfit.checkpoint.base_checkpointer import (
    DATASETS_KEY,
    BaseCheckpointer,
    CheckpointerSession,
    RankSavePlan,
    RestoreResult,
)
from spotfit.checkpoint.format import StateKey, TensorPiece, aligned_offsets
from spotfit.checkpoint.reader import ReadRequest, SavedState, whole_piece_sink
from spotfit.checkpoint.restore_candidates import RestorePlan
from spotfit.checkpoint.shm_arena import ShmArena
from spotfit.checkpoint.shm_segment import ShmSegment


def pieces_of(values: Sequence[bytes]) -> tuple[TensorPiece, ...]:
    """Return one piece per value."""
    starts = aligned_offsets(map(len, values))
    return tuple(
        TensorPiece(
            key=("state", n),
            dtype="uint8",
            shape=(len(value),),
            offsets=(0,),
            sizes=(len(value),),
            start=start,
            size_bytes=len(value),
        )
        for n, (value, start) in enumerate(zip(values, starts, strict=True))
    )


class BytesArena(ShmArena):
    """Copies bytes."""

    views: Sequence[memoryview] = ()

    def _map_pieces(self, segment: ShmSegment, pieces: Sequence[TensorPiece]) -> None:
        self.views = [segment.payload[piece.start : piece.end] for piece in pieces]

    def _copy(self, tensors: Sequence[bytes]) -> None:
        for view, value in zip(self.views, tensors, strict=True):
            view[:] = value

    def _unmap_pieces(self) -> None:
        self.views = ()


class BytesRestore:
    """Reads the pieces of rank 0."""

    rng_state: dict[str, Any] | None = None

    def __init__(self, resume_datasets: Callable[[Mapping[str, Any]], None]) -> None:
        self.values: dict[int, bytes] = {}
        self._resume_datasets = resume_datasets

    def plan(self, saved: SavedState) -> RestorePlan:
        def consume_into(n: int) -> Callable[[memoryview], None]:
            return lambda body: self.values.update({n: bytes(body)})

        pieces = saved.indices[0].pieces
        return RestorePlan(
            saved.plan_reads(
                ReadRequest(0, piece, whole_piece_sink(piece, consume_into(n)))
                for n, piece in enumerate(pieces)
            )
        )

    def check_compatibility(self, compatibilities: Sequence[Any]) -> None:
        pass

    def apply(self, saved: SavedState) -> int:
        self.rng_state = msgspec.json.decode(saved.indices[0].encoded_rank_state)
        self._resume_datasets(self.rng_state.get(DATASETS_KEY, {}))
        return saved.indices[0].epoch

    def roll_back(self) -> None:
        self.values = {}


class BytesCheckpointer(BaseCheckpointer):
    """Saves `values` of a single rank."""

    _save_planner = SimpleNamespace(largest_rank_bytes=0)

    def __init__(self, session: CheckpointerSession, **options: Any) -> None:
        save_at_end = options.pop("save_at_end", True)
        defaults = {"every": 2, "max_overhead": None, "total_steps": None, "per_rank": None}
        super().__init__(session, **(defaults | options))
        self.values: list[bytes] = []
        self.rng_states_set: list[dict[str, Any]] = []
        self._join_ranks()
        self._start(
            all_gather=lambda value: [value],
            broadcast=lambda value: value,
            save_at_end=save_at_end,
        )

    def step(self, *values: bytes, **options: Any) -> None:
        self.values = list(values)
        self._record_step(options.pop("metrics", None), **options)

    def save(self, *values: bytes) -> None:
        self.values = list(values)
        self._save_now(None)

    def restore(self) -> RestoreResult | None:
        operation = BytesRestore(self._session.resume_data)
        result = self._restore(operation)
        self.values = list(operation.values.values())
        return result

    def _make_arena(self, directories: Any, make_path: Any) -> BytesArena:
        return BytesArena(directories, make_path)

    def _plan_save(self) -> RankSavePlan:
        return RankSavePlan(pieces_of(self.values), self.values, (), [])

    def _plan_at_end(self) -> tuple[RankSavePlan, str]:
        return self._plan_save(), "digest"

    def _encode_values(self, values: Any, *, keys: Sequence[StateKey] = ()) -> bytes:
        return msgspec.json.encode(values)

    def _rng_state(self) -> dict[str, Any]:
        return {"seed": 7}

    def _set_rng_state(self, state: dict[str, Any]) -> None:
        self.rng_states_set.append(state)
