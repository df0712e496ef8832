"""DataConfig: which of a trainer's datasets the workers share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from spotfit.core.errors import ConfigError, ConfigTypeError, UnknownDatasetError
from spotfit.core.nearest import did_you_mean

TRAIN_DATASET_KEY = "train"
"""The name under which the dataset to train on is usually given."""


class DataConfig:
    """Which datasets are split among the workers; the others are read whole by each of them.

    `datasets_to_split` is "all" or a list of names. Trainers take datasets with `num_workers=0`
    only, where nothing is split.
    """

    def __init__(
        self,
        datasets_to_split: str | list[str] = "all",
        execution_options: Any = None,
        enable_shard_locality: bool = True,  # noqa: FBT001, FBT002 - as in Ray Train
    ) -> None:
        if datasets_to_split != "all" and not isinstance(datasets_to_split, list):
            raise ConfigTypeError(
                f"datasets_to_split must be 'all' or a list of names, not {datasets_to_split!r}.",
                do="Write datasets_to_split=['train'].",
            )
        self.datasets_to_split = datasets_to_split
        self.execution_options = execution_options
        self.enable_shard_locality = enable_shard_locality

    def configure(
        self,
        datasets: dict[str, Any],
        world_size: int,
        worker_handles: Any,
        worker_node_ids: Any,
        **kwargs: Any,
    ) -> list[dict[str, Any]]:
        """Not offered yet; see `no_datasets_on_workers`."""
        raise no_datasets_on_workers()

    @staticmethod
    def default_ingest_options() -> Any:
        """Not offered yet; see `no_datasets_on_workers`."""
        raise no_datasets_on_workers()


def no_datasets_on_workers() -> ConfigError:
    """What is told to those who give a trainer datasets for its workers."""
    return ConfigError(
        "Workers are not fed with `datasets` yet.",
        do="Read the data in the training function; get_context() tells which share is whose.",
    )


def unknown_dataset(name: str | None, known: Iterable[str]) -> UnknownDatasetError:
    """What is told to those who ask for a dataset that nobody gave."""
    hint = did_you_mean(str(name), known)
    return UnknownDatasetError(
        f"The trainer was given no dataset {name!r}.",
        do=hint or "Pass it as the trainer's datasets={'train': ...}.",
    )
