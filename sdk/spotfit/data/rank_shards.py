"""The datasets of a trainer, as they travel to the workers, and the shards of one worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from spotfit.core.errors import ConfigError
from spotfit.data.data_config import DataConfig
from spotfit.data.dataset import Dataset
from spotfit.data.iteration.data_iterator import DataIterator
from spotfit.data.iteration.shard import ShardGroup, ShardPosition
from spotfit.data.plans.row_plan import ShuffledRows
from spotfit.host import log
from spotfit.model.config import unknown_dataset_error

if TYPE_CHECKING:
    import torch

    from spotfit.data.feeding.worker_feeders import WorkerFeeders

PositionReader = Callable[[], Mapping[str, Mapping[str, Any]]]


@dataclass(frozen=True)
class TrainerDatasets:
    """The trainer's datasets and their configuration; pickled with the training function."""

    datasets: dict[str, Dataset]
    config: DataConfig = field(default_factory=DataConfig)


class DatasetShards:
    """The shards of one rank.

    `read_positions` returns the positions of the checkpoint to resume from. It is called when a
    shard is first iterated, and returns {} to begin with the first epoch. `device` is the name of
    the rank's device, such as "cuda:0", to which batches are copied by default; "auto" is torch's
    current CUDA device, if there is one. `feeders` transform the trainer's datasets.
    """

    def __init__(
        self,
        trainer_datasets: TrainerDatasets,
        group: ShardGroup,
        read_positions: PositionReader,
        *,
        device: str = "cpu",
        feeders: WorkerFeeders | None = None,
    ) -> None:
        self._datasets = trainer_datasets.datasets
        self._config = trainer_datasets.config
        self._group = group
        self._device = device
        self._feeders = feeders
        if feeders is not None:
            feeders.measure_wait(self._waited_s)
        self._read_positions = read_positions
        self._iterators: dict[str, DataIterator] = {}

    def add(self, name: str, dataset: Dataset) -> None:
        """Add a dataset that became known after the trainer's other ones."""
        self._datasets = {**self._datasets, name: dataset}

    def get(self, name: str | None) -> DataIterator:
        """Return this rank's shard; the same object on every call.

        Raises `UnknownDatasetError` (a KeyError), and `ConfigError` for a `configure` that does not
        return a `DataIterator` for this rank.
        """
        if name not in self._datasets:
            raise unknown_dataset_error(name, self._datasets)
        assert name is not None
        if name not in self._iterators:
            self._iterators[name] = self._open(name)
        return self._iterators[name]

    def positions(self) -> dict[str, dict[str, Any]]:
        """Return the position of each shard that was iterated, for a checkpoint.

        The batches that the training function has now count as taken.
        """
        states = {}
        for name, iterator in self._iterators.items():
            iterator.position.count()
            if state := iterator.position.state():
                states[name] = {**state, "world_size": self._group.world_size}
        return states

    def resume(self, positions: Mapping[str, Mapping[str, Any]]) -> None:
        """Let the shards continue at these positions, and begin others with their first epoch.

        Called when a `Checkpointer` has restored a state. Raises `ConfigError` if a position
        belongs to other rows.
        """
        self._read_positions = lambda: positions
        for name, iterator in self._iterators.items():
            iterator.position.resume(self._position_of(name))

    def end_error(self) -> ConfigError | None:
        """Return the error if a pass that a restart had resumed was the last one and is exhausted.

        For a training function that has raised StopIteration: it has asked for more.
        """
        for name, iterator in self._iterators.items():
            if (end := iterator.position.resumed_end) is not None:
                return ConfigError(
                    "The training function has raised StopIteration: it asked for more batches of "
                    f"the dataset {name!r} than were left of epoch {end.epoch}, which a restart "
                    f"has resumed at row {end.first_row}.",
                    do="Iterate with a for loop, which ends with the epoch; or, if the function "
                    "takes a fixed number of batches of each epoch, set dataset_config="
                    "DataConfig(resume='epoch'): after a restart the epoch then begins again.",
                    retryable=False,
                )
        return None

    def _open(self, name: str) -> DataIterator:
        dataset, group = self._datasets[name], self._group
        if self._config.overrides_configure:
            return self._open_configured(name)
        if not self._config.is_split(name):
            group = ShardGroup(seed=group.seed)
        elif (sizes := self._config.num_workers) is not None:
            group = replace(group, world_sizes=tuple(range(sizes[0], sizes[1] + 1)))
        return self._track(name, dataset, group)

    def _open_configured(self, name: str) -> DataIterator:
        datasets = {name: self._datasets[name]}
        by_rank = self._config.configure(
            datasets, self._group.world_size, worker_handles=None, worker_node_ids=None
        )
        try:
            configured = by_rank[self._group.rank][name]
        except (IndexError, KeyError, TypeError) as error:
            raise self._configure_error(name, "has no entry for this rank") from error
        if not isinstance(configured, DataIterator):
            raise self._configure_error(name, f"returned a {type(configured).__name__}")
        position = configured.position
        # A part that only this rank reads belongs to its number of ranks.
        return self._track(name, position.dataset, position.group)

    def _track(self, name: str, dataset: ShuffledRows, group: ShardGroup) -> DataIterator:
        feeders = self._feeders.open(name, dataset) if self._feeders is not None else None
        position = ShardPosition(
            dataset, group, name=name, restore=lambda: self._position_of(name), feeders=feeders
        )
        return DataIterator(position, default_device=self._default_device)

    def _waited_s(self) -> float | None:
        """Return for how long the training loop has waited for batches; None before the first."""
        iterators = [one for one in self._iterators.values() if one.batch_count]
        return sum(one.waiting_s for one in iterators) if iterators else None

    def _default_device(self) -> torch.device:
        import torch

        if self._device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(self._device)

    def _position_of(self, name: str) -> Mapping[str, Any]:
        saved = self._read_positions().get(name, {})
        if not saved:
            return {}
        state = {key: value for key, value in saved.items() if key != "world_size"}
        if self._config.overrides_configure and saved["world_size"] != self._group.world_size:
            log.warning(
                "data.position_unknown",
                dataset=name,
                reason="DataConfig.configure may return other rows for another number of workers",
            )
            return {}
        # Without the order, which would bind the epoch to the rows of the checkpoint.
        return {"epoch": saved["epoch"]} if self._config.resume == "epoch" else state

    def _configure_error(self, name: str, reason: str) -> ConfigError:
        return ConfigError(
            f"{type(self._config).__name__}.configure {reason} for the dataset {name!r}.",
            do="Return a list with one dictionary of DataIterators for each rank: "
            "[{name: dataset.iterator()}, …].",
        )
