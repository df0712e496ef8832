"""`DatasetPipeline`: passes over a dataset, as scripts for Ray 1 and 2.0 to 2.5 write them.

Windows of blocks do not exist here: every dataset is read in windows of its order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, Generic, TypeVar

DatasetT = TypeVar("DatasetT", bound=Any)


class DatasetPipeline(Generic[DatasetT]):
    """`passes` passes over a dataset; None: without end.

    Methods that return a dataset, such as `map_batches`, apply to every pass. `iter_*` methods
    iterate over all passes one after the other.
    """

    def __init__(self, dataset: DatasetT, passes: int | None = 1) -> None:
        self._dataset = dataset
        self._passes = passes

    def repeat(self, times: int | None = None) -> DatasetPipeline[DatasetT]:
        """Return a pipeline of `times` times as many passes; None: without end."""
        is_endless = times is None or self._passes is None
        passes = None if is_endless else times * self._passes  # type: ignore[operator]
        return DatasetPipeline(self._dataset, passes)

    def iter_epochs(self, max_epoch: int = -1) -> Iterator[DatasetT]:
        """Yield the dataset once for each pass, at most `max_epoch` times unless that is -1."""
        for epoch in count():
            if epoch in (self._passes, max_epoch):
                return
            yield self._dataset

    def iter_datasets(self) -> Iterator[DatasetT]:
        """Yield the dataset once for each pass."""
        return self.iter_epochs()

    def rewindow(self, *, blocks_per_window: int, preserve_epoch: bool = True) -> Any:
        """Return this pipeline: windows are chosen by the order of the dataset."""
        return self

    def random_shuffle_each_window(self, *, seed: int | None = None, **_options: Any) -> Any:
        """Return a pipeline whose passes are shuffled."""
        return DatasetPipeline(self._dataset.random_shuffle(seed=seed), self._passes)

    def randomize_block_order_each_window(self, *, seed: int | None = None) -> Any:
        """Return a pipeline whose passes have their blocks in random order."""
        return DatasetPipeline(self._dataset.randomize_block_order(seed=seed), self._passes)

    def foreach_window(self, fn: Callable[[DatasetT], DatasetT]) -> DatasetPipeline[DatasetT]:
        """Return a pipeline of the dataset that the function returns for this one."""
        return DatasetPipeline(fn(self._dataset), self._passes)

    def split(self, n: int, *, equal: bool = False, locality_hints: Any = None) -> list[Any]:
        """Return `n` pipelines of the parts of the dataset."""
        parts = self._dataset.split(n, equal=equal)
        return [DatasetPipeline(part, self._passes) for part in parts]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        method = getattr(self._dataset, name)
        if name.startswith("iter_"):
            return lambda *args, **kwargs: (
                item
                for dataset in self.iter_epochs()
                for item in getattr(dataset, name)(*args, **kwargs)
            )

        def call(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            is_dataset = isinstance(result, type(self._dataset))
            return DatasetPipeline(result, self._passes) if is_dataset else result

        return call
