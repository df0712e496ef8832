"""`DataConfig`: how the workers of a training share the trainer's datasets."""

from __future__ import annotations

from typing import Any, Literal

from spotfit.core.errors import ConfigError, ConfigTypeError
from spotfit.core.input_checks import suggest_keywords
from spotfit.data.context import DataContext

_RESUME_MODES = ("exact", "epoch")


@suggest_keywords
class DataConfig:
    """How the workers of a training share the trainer's datasets.

    Args:
        datasets_to_split: "all", or a list of the datasets whose rows are split among the workers;
            every worker reads all rows of the others. The last step of an epoch gives each worker
            the same number of rows; a remainder is left out.
        execution_options: Accepted for compatibility with Ray Train; has no effect.
        enable_shard_locality: Accepted for compatibility with Ray Train; has no effect.
        resume: Where a dataset continues after a restart from a checkpoint: "exact", at the first
            row that was not trained on when the checkpoint was saved, or "epoch", at the begin of
            that epoch.
        num_workers: The smallest and the largest number of workers for which the order of rows is
            chosen, by default those of the run's `ScalingConfig`. With one range, one seed and one
            `global_batch_size`, runs train on the same batches whatever their `num_workers`, also
            outside the range; without `drop_last` the last batch of an epoch may differ. Groups
            above the smallest number have smaller windows of shuffled rows than with their own
            range; below it a worker holds more rows, above the largest number it reads more.

    Raises `ConfigError` for invalid values.
    """

    def __init__(
        self,
        datasets_to_split: Literal["all"] | list[str] = "all",
        execution_options: Any = None,
        enable_shard_locality: bool = True,  # noqa: FBT001, FBT002 - as in Ray Train
        *,
        resume: Literal["exact", "epoch"] = "exact",
        num_workers: tuple[int, int] | None = None,
    ) -> None:
        if datasets_to_split != "all" and not isinstance(datasets_to_split, list):
            raise ConfigTypeError(
                f"DataConfig(datasets_to_split={datasets_to_split!r}) must be 'all' or a list of "
                "names.",
                do="Write datasets_to_split=['train'].",
            )
        if resume not in _RESUME_MODES:
            raise ConfigError(
                f"DataConfig(resume={resume!r}) must be 'exact' or 'epoch'.",
                do="Omit it to continue at the row after the last one that was trained on.",
            )
        if num_workers is not None:
            self._check_num_workers(num_workers)
        self.datasets_to_split = datasets_to_split
        self.execution_options = execution_options
        self.enable_shard_locality = enable_shard_locality
        self.resume = resume
        self.num_workers = num_workers

    @property
    def overrides_configure(self) -> bool:
        """Whether a subclass overrides `configure`."""
        return type(self).configure is not DataConfig.configure

    def is_split(self, name: str) -> bool:
        """Return whether the rows of the dataset `name` are split among the workers."""
        return self.datasets_to_split == "all" or name in self.datasets_to_split

    def configure(
        self,
        datasets: dict[str, Any],
        world_size: int,
        worker_handles: Any,
        worker_node_ids: Any,
        **kwargs: Any,
    ) -> list[dict[str, Any]]:
        """Return the `DataIterator` of each dataset for each rank.

        A subclass may override it, for example to return `dataset.limit(100).iterator()`. Each
        worker calls it when a dataset is first asked for, with that dataset only; the result must
        not depend on the worker. `worker_handles` and `worker_node_ids` are None.
        """
        by_name = {
            name: (
                dataset.streaming_split(world_size, equal=True)
                if self.is_split(name)
                else [dataset.iterator() for _ in range(world_size)]
            )
            for name, dataset in datasets.items()
        }
        return [
            {name: iterators[rank] for name, iterators in by_name.items()}
            for rank in range(world_size)
        ]

    def _check_num_workers(self, num_workers: Any) -> None:
        match num_workers:
            case (int(low), int(high)) if 1 <= low <= high:
                pass
            case _:
                raise ConfigTypeError(
                    f"DataConfig(num_workers={num_workers!r}) must be the smallest and the largest "
                    "number of workers.",
                    do="Write num_workers=(1, 8).",
                )
        if self.overrides_configure:
            raise ConfigError(
                f"{type(self).__name__}(num_workers={num_workers}) has no effect, because "
                f"{type(self).__name__}.configure chooses the order.",
                do="Omit it.",
            )

    @staticmethod
    def default_ingest_options() -> Any:
        """Return the execution options of the current `DataContext`."""
        return DataContext.get_current().execution_options
