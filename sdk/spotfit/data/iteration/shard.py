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
framework may ask for the next batch before it trains on one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
        self._yielded: deque[int] = deque()
        """For each batch of the current pass that does not count yet: the rows taken with it."""
        self._pass: PassPosition | None = None
        """The current pass: an earlier one that is still iterated does not count."""

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
        if self._has_started:
            self._finish_epoch()
        self._yielded.clear()
        # Each rank gets the same number of rows of the last step, and at least one.
        self._min_step_rows = step_rows if drop_last else self.group.world_size
        # An epoch of which rows were taken keeps its order; one that was only looked at does not.
        if self._order is None or not self.consumed:
            self._order = choose_order(self.dataset, self.group, step_rows, local_shuffle)
        self._pass = PassPosition(self, self._order)
        return self._pass

    def count(self) -> None:
        """Count the batches that the current pass has yielded as taken; called at a report."""
        while self._yielded and not self.counts_steps:
            self.count_step()

    def count_step(self) -> None:
        """Count the oldest batch that does not count yet; called after a step of the training."""
        if self._yielded:
            self.consumed, self._has_started = self._yielded.popleft(), True

    def end_epoch(self) -> None:
        """End the epoch if a batch of it was taken, also if its pass is not exhausted."""
        self.count()
        if self.consumed:
            self._finish_epoch()

    def state(self) -> dict[str, Any]:
        """Return the position as plain data; {} if no pass has begun."""
        if self._order is None:
            return {}
        return {
            "epoch": self.epoch,
            "consumed": self.consumed,
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
        self._yielded.clear()
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

    def _record_yielded(self, of_pass: PassPosition, consumed: int) -> None:
        # The batch before was trained on, because the loop asks for the next one.
        if of_pass is self._pass:
            self.count()
            self._yielded.append(consumed)

    def _end_pass(self, of_pass: PassPosition, *, is_exhausted: bool) -> None:
        if of_pass is not self._pass:
            return
        if is_exhausted:
            self.count()
            ends_epoch = not self._yielded
        else:
            ends_epoch = self._has_started and not self.counts_steps
        # Batches that were read ahead are still trained on: the next pass ends the epoch then.
        if ends_epoch:
            self._finish_epoch()

    def _finish_epoch(self) -> None:
        self.epoch, self.consumed = self.epoch + 1, 0
        self._yielded.clear()
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

    def record_yielded(self, consumed: int) -> None:
        """Record that the loop gets a batch; `consumed` rows are taken once it counts."""
        self._shard._record_yielded(self, consumed)  # noqa: SLF001 - one unit

    def end(self, *, is_exhausted: bool) -> None:
        """Record the end of the pass: all batches were taken, or the loop has left it.

        Has no effect once another pass has begun.
        """
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
