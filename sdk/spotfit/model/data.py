"""`DataConfig`: which of a trainer's datasets are split among the workers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from spotfit.core.errors import ConfigError, ConfigTypeError, UnknownDatasetError
from spotfit.core.input_checks import did_you_mean

TRAIN_DATASET_KEY = "train"
"""The conventional name of the training dataset in `datasets={...}`."""


class DataConfig:
    """Which datasets are split among the workers; every worker reads the others completely.

    `datasets_to_split` is "all" or a list of dataset names. Trainers accept datasets only with
    `num_workers=0`, where nothing is split. `execution_options` and `enable_shard_locality` are
    accepted for compatibility with Ray Train and have no effect.
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
        """Not supported: always raises `ConfigError`, see `datasets_unsupported_error`."""
        raise datasets_unsupported_error()

    @staticmethod
    def default_ingest_options() -> Any:
        """Not supported: always raises `ConfigError`, see `datasets_unsupported_error`."""
        raise datasets_unsupported_error()


def datasets_unsupported_error() -> ConfigError:
    """The error for `datasets=` on a trainer with workers."""
    return ConfigError(
        "Distributed datasets (datasets=) are not supported yet.",
        do="Read the data in the training function; get_context() gives rank and world size.",
    )


def unknown_dataset_error(name: str | None, dataset_names: Iterable[str]) -> UnknownDatasetError:
    """The error for a dataset name that was not passed to the trainer."""
    hint = did_you_mean(str(name), dataset_names)
    return UnknownDatasetError(
        f"The trainer has no dataset {name!r}.",
        do=hint or "Pass it as the trainer's datasets={'train': ...}.",
    )
