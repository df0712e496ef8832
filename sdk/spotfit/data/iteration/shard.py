"""One rank's shard of a dataset, and the position in it as one integer per epoch.

The position counts the rows of an epoch that all ranks together have taken. It is the same on all
ranks, and valid for any number of ranks. A shard goes through these states, where a pass is one
iteration:

| state | event | next |
|---|---|---|
| new | a pass begins | new |
| new | a batch counts as taken | started |
| started | the pass is exhausted, or abandoned | new, epoch + 1 |
| started | another pass begins | new, epoch + 1 |
| any | `resume` | resumed |
| resumed | a pass begins: it reads the rest of the epoch | resumed |
| resumed | a batch counts as taken, or the pass is exhausted | as in "started" |

A batch counts as taken when the next one is asked for, and at a report: prefetched batches are not
trained on yet. A `Checkpointer(loader=shard)` counts them by its steps instead, because a training
framework may ask for the next batch before it trains on one. Rows that the loop gets one by one
count in the same way; a step counts all of them.

Some loops take a fixed number of batches of each pass and begin the next one, so that a state which
is saved after the last of them is within an epoch that the loop does not continue. Therefore a
state with as many batches as the pass before had when the loop left it is that of the next epoch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import length_hint
from typing import TYPE_CHECKING, Any, NamedTuple

from spotfit.core.errors import ConfigError
from spotfit.data.order import OrderSettings, choose_lanes, choose_window_rows
from spotfit.host import log

if TYPE_CHECKING:
    from spotfit.data.loading.slice_tasks import SliceFeeders
    from spotfit.data.plans.row_plan import ShuffledRows

# Larger windows mix more rows, but the first batch waits until its windows are read.
_WINDOWS_BYTES = 64 * 2**20
"""Size of the windows that one rank holds by default, in an order with shuffled rows."""
_MIN_SLICE_ROWS = 8
"""The least number of rows that transforms get at a time."""
_MAX_SLICE_ROWS = 8192
"""The most rows, also for a larger `batch_size` of `map_batches`: they are held for each lane."""
MANIFEST_DIGITS = 16
"""Digits of the manifest's hash in a position: enough to notice that files have changed."""


class LocalShuffle(NamedTuple):
    """A shuffle of the rows that are in memory at the same time."""

    buffer_rows: int
    """Rows of a rank that are in memory."""
    seed: int | None
    """None: the run chooses one, and keeps it."""


@dataclass(frozen=True, kw_only=True)
class ShardGroup:
    """The ranks that share a dataset."""

    rank: int = 0
    world_size: int = 1
    world_sizes: tuple[int, ...] = (1,)
    """Numbers of ranks that the group may have during the run."""
    seed: int = 0
    """Seed of shuffles without a seed of their own; the same during the whole run."""
    equal: bool = True
    """Whether all ranks get equally many rows; a remainder at the end of an epoch is left out."""

    @property
    def least_step_rows(self) -> int:
        """A remainder of fewer rows is left out at the end of an epoch."""
        return self.world_size if self.equal else 1


class ResumedEnd(NamedTuple):
    """A pass that a restart had resumed within an epoch, and that the loop has exhausted."""

    epoch: int
    first_row: int


class _Yielded(NamedTuple):
    consumed: int
    """Rows of the epoch that all ranks together have taken with these batches."""
    batches: int


class _RowsInUse:
    """Rows of a block that the loop gets one by one, as many as the iterator has returned."""

    def __init__(self, rows: Sequence[Any], before: int, end: int, world_size: int) -> None:
        self.iterator = iter(rows)
        self._count = len(rows)
        self._before, self._end, self._world_size = before, end, world_size
        self._recorded = 0

    def take_new(self) -> list[_Yielded]:
        """Return what the loop has got since the last call; its last row apart from the others."""
        # Asked of the iterator: a call for each row would cost as much as the row.
        taken = self._count - length_hint(self.iterator)
        ends = [end for end in (taken - 1, taken) if end > self._recorded]
        new = []
        for end in ends:
            consumed = min(self._before + end * self._world_size, self._end)
            new.append(_Yielded(consumed, end - self._recorded))
            self._recorded = end
        return new


class ShardPosition:
    """The position of one rank's shard, and the order that it refers to.

    `restore` returns the state to resume, or None; it is called when the first pass begins.
    """

    def __init__(
        self,
        dataset: ShuffledRows,
        group: ShardGroup,
        *,
        name: str = "",
        restore: Callable[[], Mapping[str, Any] | None] = lambda: None,
        feeders: SliceFeeders | None = None,
    ) -> None:
        self.dataset = dataset
        self.group = group
        self.name = name
        self.feeders = feeders
        """What transforms the rows; None: this process."""
        self.epoch = 0
        self.consumed = 0
        """Rows of this epoch that all ranks together have taken, as of the last counted batch."""
        self._restore: Callable[[], Mapping[str, Any] | None] | None = restore
        self._order: OrderSettings | None = None
        self._has_started = False
        self._min_step_rows = 1
        """A remainder of fewer rows is left out at the end of an epoch."""
        self.counts_steps = False
        """Whether batches count by `count_step` only."""
        self._is_resumed = False
        self._yielded: deque[_Yielded] = deque()
        """Batches of the current pass that do not count yet."""
        self._rows: _RowsInUse | None = None
        """The rows of the current pass of which the loop gets one after the other."""
        self._pass: PassPosition | None = None
        """The current pass: an earlier one that is still iterated does not count."""
        self._pass_batches = 0
        """Batches of the current pass that count, also before a restart."""
        self._left_batches: int | None = None
        """The same of the previous pass, if the loop has left it before its end."""
        self.resumed_end: ResumedEnd | None = None
        """The latest pass, if it is one that a restart had resumed and the loop has exhausted."""

    @property
    def is_at_end(self) -> bool:
        """Whether no step of the epoch is left, according to the step size of the latest pass."""
        left = self.dataset.manifest.row_count - self.consumed
        return self._order is not None and left < self._min_step_rows

    def begin_pass(
        self,
        step_rows: int,
        *,
        drop_last: bool = False,
        local_shuffle: LocalShuffle | None = None,
    ) -> PassPosition:
        """Begin a pass with steps of `step_rows` rows of all ranks together.

        The last step may have fewer rows, unless `drop_last`. The pass reads the rest of the epoch
        after `resume`, else a whole epoch. The step size and the local shuffle of the pass that
        begins an epoch determine its order. Raises `ConfigError` if the position belongs to other
        rows.
        """
        self._resume_first_pass()
        self._collect_rows()
        if self._has_started:
            self._finish_epoch(is_left=self._pass is not None and not self._pass.is_exhausted)
        self._clear_yielded()
        self.resumed_end = None
        self._min_step_rows = step_rows if drop_last else self.group.least_step_rows
        # An epoch of which rows were taken keeps its order; one that was only looked at does not.
        if self._order is None or not self.consumed:
            self._order = choose_order(self.dataset, self.group, step_rows, local_shuffle)
        self._pass = PassPosition(self, self._order)
        return self._pass

    def count(self) -> None:
        """Count the batches that the current pass has yielded as taken; called at a report."""
        self._collect_rows()
        self._count_yielded()

    def count_step(self) -> None:
        """Count the oldest batch that does not count yet; called after a step of the training.

        Of a pass by rows, count all of them: a step may train on any number of rows.
        """
        self._collect_rows()
        for _ in range(len(self._yielded) if self._rows is not None else 1):
            self._count_oldest()

    def end_epoch(self) -> None:
        """End the epoch if a batch of it was taken, also if its pass is not exhausted."""
        self.count()
        if self.consumed:
            self._finish_epoch(is_left=False)

    @property
    def place_to_resume(self) -> tuple[int, int]:
        """The epoch and its row at which a restart from the current state continues."""
        if self.consumed and self._pass_batches == self._left_batches:
            return self.epoch + 1, 0
        return self.epoch, self.consumed

    def state(self) -> dict[str, Any]:
        """Return the position as plain data; {} if no pass has begun."""
        if self._order is None:
            return {}
        epoch, consumed = self.place_to_resume
        return {
            "epoch": epoch,
            "consumed": consumed,
            "batches": self._pass_batches if consumed else 0,
            "left_batches": self._left_batches,
            "manifest": self.dataset.manifest.position_digest[:MANIFEST_DIGITS],
            **self._order._asdict(),
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Let the next pass read the rest of the epoch of `state`, in its order.

        {} begins the first epoch. At the begin of an epoch the dataset may have other rows than
        before. Raises `ConfigError` if `state` is within an epoch of other rows.
        """
        self._restore, self._is_resumed = None, bool(state)
        self._has_started, self._pass, self._order = False, None, None
        self.epoch, self.consumed = state.get("epoch", 0), state.get("consumed", 0)
        # Positions of earlier versions do not have them.
        self._pass_batches = state.get("batches", 0)
        self._left_batches = state.get("left_batches")
        self.resumed_end = None
        self._clear_yielded()
        if not self.consumed:
            return
        if state["manifest"] != self.dataset.manifest.position_digest[:MANIFEST_DIGITS]:
            raise self._changed_error(state)
        self._order = OrderSettings(**{name: state[name] for name in OrderSettings._fields})
        if self.group.rank == 0:
            log.info(
                "data.resumed", dataset=self.name, epoch=self.epoch, consumed_rows=self.consumed
            )

    def resume_saved(self) -> bool:
        """Resume the saved position now instead of when the first pass begins.

        Returns whether there was one, or `resume` has set one before. Raises what `resume` raises.
        """
        self._resume_first_pass()
        return self._is_resumed

    def _resume_first_pass(self) -> None:
        if self._restore is None:
            return
        state, self._restore = self._restore(), None
        if state:
            self.resume(state)

    def _record_yielded(self, of_pass: PassPosition, yielded: _Yielded) -> None:
        # The batch before was trained on, because the loop asks for the next one.
        if of_pass is self._pass:
            self._count_yielded()
            self._yielded.append(yielded)

    def _record_rows(self, of_pass: PassPosition, rows: _RowsInUse) -> None:
        if of_pass is self._pass:
            self._collect_rows()
            self._rows = rows

    def _collect_rows(self) -> None:
        if self._rows is not None and self._pass is not None:
            for yielded in self._rows.take_new():
                self._record_yielded(self._pass, yielded)

    def _count_yielded(self) -> None:
        while self._yielded and not self.counts_steps:
            self._count_oldest()

    def _count_oldest(self) -> None:
        if self._yielded:
            (self.consumed, batches), self._has_started = self._yielded.popleft(), True
            self._pass_batches += batches

    def _clear_yielded(self) -> None:
        self._yielded.clear()
        self._rows = None

    def _end_pass(self, of_pass: PassPosition, *, is_exhausted: bool) -> None:
        if of_pass is not self._pass:
            return
        self._collect_rows()
        if is_exhausted:
            self._count_yielded()
            ends_epoch = not self._yielded
            if of_pass.first_row:
                self.resumed_end = ResumedEnd(of_pass.epoch, of_pass.first_row)
        else:
            ends_epoch = self._has_started and not self.counts_steps
        # Batches that were read ahead are still trained on: the next pass ends the epoch then.
        if ends_epoch:
            self._finish_epoch(is_left=not is_exhausted)

    def _finish_epoch(self, *, is_left: bool) -> None:
        self._left_batches = self._pass_batches if is_left else None
        self.epoch, self.consumed, self._pass_batches = self.epoch + 1, 0, 0
        self._clear_yielded()
        self._has_started, self._pass = False, None

    def _changed_error(self, state: Mapping[str, Any]) -> ConfigError:
        return ConfigError(
            f"The dataset {self.name!r} has other rows than when the checkpoint was saved, so its "
            f"position (row {state['consumed']} of epoch {state['epoch']}) is not valid.",
            do="Restore the files or the arguments of the dataset; or set DataConfig(resume="
            "'epoch'), which begins the epoch with the new rows.",
        )


class PassPosition:
    """A pass of a `ShardPosition`: where it begins, and what the training loop gets of it."""

    def __init__(self, shard: ShardPosition, order: OrderSettings) -> None:
        self._shard = shard
        self.order = order
        self.epoch = shard.epoch
        self.first_row = shard.consumed
        self.is_exhausted = False
        self._rows_end = shard.consumed

    def record_yielded(self, consumed: int) -> None:
        """Record that the loop gets a batch; `consumed` rows are taken once it counts."""
        self._shard._record_yielded(self, _Yielded(consumed, 1))  # noqa: SLF001 - one unit

    def record_rows(self, rows: Sequence[Any], consumed: int) -> Iterator[Any]:
        """Return an iterator over the rows of a block, each of which counts like a batch.

        `consumed` rows of all ranks together are taken with the last one.
        """
        world_size = self._shard.group.world_size
        in_use = _RowsInUse(rows, self._rows_end, consumed, world_size)
        self._rows_end = consumed
        self._shard._record_rows(self, in_use)  # noqa: SLF001 - one unit
        return in_use.iterator

    def end(self, *, is_exhausted: bool) -> None:
        """Record the end of the pass: all batches were taken, or the loop has left it.

        Has no effect once another pass has begun.
        """
        self.is_exhausted = self.is_exhausted or is_exhausted
        self._shard._end_pass(self, is_exhausted=is_exhausted)  # noqa: SLF001


def choose_order(
    dataset: ShuffledRows,
    group: ShardGroup,
    step_rows: int,
    local_shuffle: LocalShuffle | None = None,
) -> OrderSettings:
    """Return the order of a dataset's epochs for steps of `step_rows` rows of all ranks together.

    It depends on nothing that differs between ranks. One rank alone reads unshuffled rows in the
    order of the dataset. A local shuffle permutes the rows of windows whose rows a rank's buffer
    holds.
    """
    shuffle = dataset.shuffle_settings
    seed = group.seed if shuffle.seed is None else shuffle.seed
    if local_shuffle is not None:
        shuffle = shuffle._replace(kind="rows")
        seed = group.seed if local_shuffle.seed is None else local_shuffle.seed
    manifest = dataset.manifest
    is_sequential = group.world_sizes == (1,) and shuffle.kind != "rows"
    lanes = 1 if is_sequential else choose_lanes(step_rows, group.world_sizes, manifest.unit_count)
    window_rows = 0  # one unit; rows that stay in order need no larger window
    if local_shuffle is not None:
        window_rows = max(local_shuffle.buffer_rows * min(group.world_sizes) // lanes, 1)
    elif shuffle.kind == "rows":
        window_rows = shuffle.window_rows or choose_window_rows(
            manifest.unit_rows,
            manifest.unit_bytes,
            lanes,
            world_size=min(group.world_sizes),
            budget_bytes=_WINDOWS_BYTES,
        )
    return OrderSettings(
        seed=seed,
        lanes=lanes,
        window_rows=window_rows,
        shuffle=shuffle.kind,
        slice_rows=max(step_rows // lanes, _MIN_SLICE_ROWS, _requested_rows(dataset)),
    )


def _requested_rows(dataset: ShuffledRows) -> int:
    """Return the largest batch size that a transform asks for; 0 if there is none."""
    sizes = [getattr(transform, "batch_size", None) or 0 for transform in dataset.transforms]
    return min(max(sizes, default=0), _MAX_SLICE_ROWS)
