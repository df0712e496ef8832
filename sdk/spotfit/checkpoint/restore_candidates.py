"""Selection of the state to restore: the newest one that all ranks can read.

Rank 0 finds candidates, newest first, and broadcasts each. Every rank plans what to read; after
the plans of all ranks were compared, every rank reads. The ranks of a node read together.

    state      event                                            next
    offered    any rank cannot open or plan it (corrupt)        offered (the next candidate)
    offered    it does not fit the model of any rank            ConfigError on all ranks
    planned    any rank fails to read it (corrupt)              offered (the next candidate)
    planned    all ranks have read it                           restored
    (no candidate is left)                                      IntegrityError, or None for none
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from spotfit.checkpoint.node_sharing import (
    RING_SUFFIX,
    NodeGroup,
    create_shared_ring,
    needed_chunk_mask,
    read_with_node_group,
)
from spotfit.checkpoint.reader import (
    ChunkRead,
    SavedState,
    SavedStateDescriptor,
    describe_saved_state,
    read_chunks,
)
from spotfit.checkpoint.snapshot_channel import IN_MEMORY_NAME, SnapshotChannel
from spotfit.core.clock import Clock
from spotfit.core.errors import ConfigError, IntegrityError
from spotfit.host import log

AllGatherFn = Callable[[Any], list[Any]]
"""A collective: returns the values of all ranks, by rank."""

BroadcastFn = Callable[[Any], Any]
"""A collective: returns the value of rank 0."""


class RankContext(Protocol):
    """The ranks of this process, as a training context reports them."""

    def get_world_rank(self) -> int:
        """Return the rank of this process among all workers of the round, from 0."""
        ...

    def get_node_rank(self) -> int:
        """Return the number of this process's node among the nodes of the round, from 0."""
        ...

    def get_local_world_size(self) -> int:
        """Return the number of workers on this process's node."""
        ...


class RestorePlan(NamedTuple):
    """What this rank will read of a state."""

    reads: Sequence[ChunkRead]
    compatibility: Any = None
    """How the state fits this rank's model; gathered from all ranks before any of them reads."""


PlanFn = Callable[[SavedState], RestorePlan]
"""Plans without side effects. Raises `IntegrityError`; `ConfigError` if the state does not fit."""

CheckCompatibilityFn = Callable[[Sequence[Any]], None]
"""Takes the `compatibility` of all ranks. Raises `ConfigError`, on all ranks or on none."""


class _RestoreCandidate(NamedTuple):
    """A state that rank 0 has found."""

    name: str
    opened: SavedStateDescriptor | None
    error: str = ""
    """Why it could not be opened."""


class _RankRestoreStatus(NamedTuple):
    """One rank's view of a candidate, gathered from all ranks."""

    error: str | None
    incompatibility: ConfigError | None
    compatibility: Any
    node_rank: int
    needed_chunks: int
    """Mask of the chunks it must fetch."""
    ring_path: Path | None
    """Its shared ring; None if it has none."""


class RestoreSelector:
    """Restores one rank of a Checkpointer; all ranks must make the same calls."""

    def __init__(
        self,
        channel: SnapshotChannel,
        context: RankContext,
        *,
        all_gather: AllGatherFn,
        broadcast: BroadcastFn,
        clock: Clock,
    ) -> None:
        self._channel = channel
        self._node_rank = context.get_node_rank()
        self._rank = context.get_world_rank()
        self._local_world_size = context.get_local_world_size()
        self._all_gather = all_gather
        self._broadcast = broadcast
        self._clock = clock

    def read_newest(
        self,
        plan: PlanFn,
        check_compatibility: CheckCompatibilityFn = lambda _: None,
        *,
        has_saved: bool = False,
    ) -> SavedState | None:
        """Read the newest readable state on all ranks, for `Checkpointer.restore`, and return it.

        None if there is no checkpoint with a snapshot, and no readable state in memory. A
        collective that blocks until all ranks have read. `plan` is called on every rank for each
        candidate that it can open, `check_compatibility` if no rank finds that corrupt; the sinks
        in the plan receive the bytes. Starts with the state that the round began from, or, if this
        round `has_saved`, with the latest checkpoint. A corrupt state is logged, and an earlier one
        is tried.

        Raises `IntegrityError` if checkpoints exist but none is readable, and `ConfigError` on all
        ranks if a state does not fit one of them; then nothing of it was read.
        """
        if has_saved:
            # A barrier: in local mode the ranks upload themselves, and all must have finished.
            self._all_gather(None)
        candidates = self._candidates(has_saved=has_saved) if self._rank == 0 else iter(())
        saved, found_any = None, False
        # Broadcast instead of gathering: torch pads gathered objects to the largest, which holds
        # the indices of all ranks.
        while saved is None and (candidate := self._broadcast(next(candidates, None))) is not None:
            found_any = found_any or candidate.name != IN_MEMORY_NAME
            saved = self._try_read(candidate, plan, check_compatibility)
        if saved is None and found_any:
            raise IntegrityError(
                "None of this run's checkpoints can be read: files of each are missing or corrupt.",
                do="Search the log for checkpoint.corrupt, which names the files, and restore "
                "them from a backup, or start a run with another RunConfig(name=...).",
            )
        return saved

    def _candidates(self, *, has_saved: bool) -> Iterator[_RestoreCandidate]:
        """Yield the states of Checkpointers, newest first. Opens each only when it is needed."""
        channel = self._channel
        names: Iterator[str] = iter(())
        if has_saved:
            names = channel.committed_checkpoints()
        else:
            yield from _open_as_candidate(IN_MEMORY_NAME, channel.open_in_memory)
            if channel.initial_checkpoint is not None:
                names = chain((channel.initial_checkpoint,), channel.earlier_checkpoints())
        for name in names:
            yield from _open_as_candidate(name, partial(channel.open_checkpoint, name))

    def _try_plan(
        self, candidate: _RestoreCandidate, plan: PlanFn
    ) -> tuple[SavedState | None, RestorePlan, str | None, ConfigError | None]:
        """Open and plan; returns errors instead of raising them: the other ranks wait for this."""
        if candidate.opened is None:
            return None, RestorePlan(()), candidate.error, None
        try:
            saved = self._channel.reopen(candidate.opened)
            return saved, plan(saved), None, None
        except IntegrityError as error:
            return None, RestorePlan(()), str(error), None
        except ConfigError as error:
            return None, RestorePlan(()), None, error

    def _try_read(
        self, candidate: _RestoreCandidate, plan: PlanFn, check_compatibility: CheckCompatibilityFn
    ) -> SavedState | None:
        """Read the candidate on all ranks; None if it is corrupt for any of them."""
        saved, (reads, compatibility), error, incompatibility = self._try_plan(candidate, plan)
        with self._shared_ring(reads) as ring_path:
            statuses = self._all_gather(
                _RankRestoreStatus(
                    error=error,
                    incompatibility=incompatibility,
                    compatibility=compatibility,
                    node_rank=self._node_rank,
                    needed_chunks=needed_chunk_mask(reads),
                    ring_path=ring_path,
                )
            )
            problem = _first_error(status.error for status in statuses)
            if problem is None:
                # After corruption: the compatibility of a corrupt state is unknown. A rank's own
                # error first: it names this rank's parameters.
                mismatches = (incompatibility, *(status.incompatibility for status in statuses))
                if mismatch := next(filter(None, mismatches), None):
                    raise mismatch
                check_compatibility([status.compatibility for status in statuses])
                # Gathered again: a state that one rank cannot read is used by none of them.
                problem = _first_error(self._all_gather(self._read_chunks(reads, statuses)))
        if problem is None:
            return saved
        log.error(
            "checkpoint.corrupt",
            name=candidate.name,
            reason=problem,
            fallback="an earlier checkpoint",
        )
        # Later snapshots must not reference its chunks.
        if candidate.name != IN_MEMORY_NAME:
            self._channel.mark_corrupt(candidate.name)
        return None

    @contextmanager
    def _shared_ring(self, reads: Sequence[ChunkRead]) -> Iterator[Path | None]:
        """Create this rank's shared ring; yields None if it needs none or memory is short."""
        if self._local_world_size == 1 or not needed_chunk_mask(reads):
            yield None
            return
        # In the directory of the segments, which is shared memory if the node has it.
        path = self._channel.new_segment_path(self._channel.segment_dirs[0]).with_suffix(
            RING_SUFFIX
        )
        with create_shared_ring(
            path,
            local_world_size=self._local_world_size,
            chunk_count=len(reads),
            slot_bytes=max(read.chunk.size_bytes for read in reads),
        ) as is_created:
            yield path if is_created else None

    def _read_chunks(
        self, reads: Sequence[ChunkRead], statuses: Sequence[_RankRestoreStatus]
    ) -> str | None:
        """Read and deliver the chunks; returns why it failed, None for success."""
        group = self._node_group(statuses)
        try:
            if group is None:
                read_chunks(reads)
            else:
                read_with_node_group(reads, group, self._clock)
        except IntegrityError as error:
            return str(error)  # the other ranks wait for this rank's result
        return None

    def _node_group(self, statuses: Sequence[_RankRestoreStatus]) -> NodeGroup | None:
        """Return the ranks of this node that fetch chunks; None if this rank reads alone."""
        local_ranks = [
            rank
            for rank, status in enumerate(statuses)
            if status.node_rank == self._node_rank and status.needed_chunks
        ]
        rings = [path for rank in local_ranks if (path := statuses[rank].ring_path) is not None]
        # Without a ring of any rank, all ranks of the node read alone: each decides by the same
        # statuses.
        if self._rank not in local_ranks or len(local_ranks) == 1 or len(rings) < len(local_ranks):
            return None
        return NodeGroup(
            local_index=local_ranks.index(self._rank),
            ring_paths=rings,
            chunk_masks=[statuses[rank].needed_chunks for rank in local_ranks],
        )


def _open_as_candidate(
    name: str, opener: Callable[[], SavedState | None]
) -> Iterator[_RestoreCandidate]:
    """Yield the candidate, unless the checkpoint holds no snapshot."""
    try:
        saved = opener()
    except IntegrityError as error:
        yield _RestoreCandidate(name, None, str(error))
    else:
        if saved is not None:
            yield _RestoreCandidate(name, describe_saved_state(saved))


def _first_error(errors: Iterable[str | None]) -> str | None:
    return next(filter(None, errors), None)
