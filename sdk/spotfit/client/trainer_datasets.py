"""The `datasets=` of a trainer, checked before machines are rented."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from spotfit.client.run_config import qualified_type_name
from spotfit.core.errors import ConfigError, ConfigTypeError
from spotfit.core.input_checks import ErrorCollector, did_you_mean
from spotfit.core.units import format_count
from spotfit.data.data_config import DataConfig
from spotfit.host import log

if TYPE_CHECKING:
    from spotfit.data.dataset import Dataset
    from spotfit.data.plans.unit_manifest import UnitManifest

_READERS = {
    "pandas": "from_pandas",
    "numpy": "from_numpy",
    "pyarrow": "from_arrow",
    "datasets": "from_huggingface",
    "torch": "from_torch",
    "dask": "from_dask",
    "daft": "from_daft",
    "pyspark": "from_spark",
    "ray": "from_ray",
    "modin": "from_modin",
}
"""Functions of `spotfit.data` that make a dataset of another library's object, by its package."""


def check_datasets(datasets: Any, *, num_workers: Any) -> None:
    """Raise `ConfigError` for `datasets=` of a wrong type, or `ConfigErrors` for several.

    Without workers (`num_workers=0`) a dataset may be any object.
    """
    if not datasets:
        return
    if not isinstance(datasets, Mapping):
        raise ConfigTypeError(
            "The trainer's datasets= must be a dictionary by name, not "
            f"{qualified_type_name(datasets)}.",
            do="Write datasets={'train': ...}.",
        )
    if num_workers == 0:
        return
    errors = ErrorCollector()
    for name, dataset in datasets.items():
        if not callable(dataset):
            errors.check(lambda name=name, dataset=dataset: _check_type(name, dataset))  # type: ignore[misc]
    errors.raise_all()


def open_datasets(datasets: Mapping[str, Any]) -> dict[str, Dataset]:
    """Return the datasets with their files listed; a callable is called for its dataset.

    Raises `ConfigError`, or `ConfigErrors` with the problems of all datasets: a value that is no
    dataset, missing files, unknown columns.
    """
    errors = ErrorCollector()
    opened = {
        name: errors.check(lambda name=name, dataset=dataset: _open(name, dataset))  # type: ignore[misc]
        for name, dataset in datasets.items()
    }
    errors.raise_all()
    return opened


def check_configuration(
    datasets: Mapping[str, Dataset], config: DataConfig, *, num_workers: int
) -> None:
    """Call an overridden `DataConfig.configure` as the workers will.

    Raises `ConfigError`, or `ConfigErrors`, if it does not return an iterator for each rank. Warns
    of datasets that have fewer rows than there are workers.
    """
    from spotfit.data.iteration.shard import ShardGroup
    from spotfit.data.rank_shards import DatasetShards, TrainerDatasets

    if not config.overrides_configure:
        _warn_of_few_rows(datasets, config, num_workers)
        return
    group = ShardGroup(rank=num_workers - 1, world_size=num_workers, world_sizes=(num_workers,))
    shards = DatasetShards(TrainerDatasets(dict(datasets), config), group, dict)
    errors = ErrorCollector()
    for name in datasets:
        errors.check(partial(shards.get, name))
    errors.raise_all()


def _warn_of_few_rows(
    datasets: Mapping[str, Dataset], config: DataConfig, num_workers: int
) -> None:
    for name, dataset in datasets.items():
        rows = dataset.manifest.row_count
        if config.is_split(name) and 0 < rows < num_workers:
            log.warning(
                "data.fewer_rows_than_workers",
                dataset=name,
                rows=rows,
                workers=num_workers,
                do="the workers get none of them: leave the dataset out of "
                "DataConfig(datasets_to_split=[...]), so that each reads all rows",
            )


def check_names(config: DataConfig, datasets: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if `datasets_to_split` names a dataset that the trainer does not have."""
    if not datasets or config.datasets_to_split == "all":
        return
    for name in config.datasets_to_split:
        if name not in datasets:
            raise ConfigError(
                f"DataConfig(datasets_to_split={config.datasets_to_split!r}): the trainer has no "
                f"dataset {name!r}.",
                do=did_you_mean(name, datasets) or f"Known: {', '.join(sorted(datasets))}.",
            )


def datasets_identity(datasets: Mapping[str, Dataset]) -> list[Any]:
    """Return what determines the rows of opened datasets, for the fingerprint of a fit."""
    return [
        (
            name,
            dataset.manifest.digest,
            [transform.identity for transform in dataset.transforms],
            tuple(dataset.shuffle_settings),
        )
        for name, dataset in sorted(datasets.items())
    ]


def _open(name: str, dataset: Any) -> Dataset:
    from spotfit.data.files import next_listing

    since = next_listing()
    # As in Ray Train, a function is called when the training starts, not where it is written.
    opened = _check_type(name, dataset() if callable(dataset) else dataset)
    _list_units(opened)
    _check_files(name, opened, since)
    if opened.manifest.row_count == 0:
        log.warning("data.empty", dataset=name)
    _check_transforms(name, opened)
    return opened


def _list_units(dataset: Dataset) -> UnitManifest:
    """List the files; functions that select rows are called. Raises `ConfigError`."""
    from spotfit.data.user_functions import unknown_columns_reported

    try:
        return dataset.manifest
    except (KeyError, AttributeError):  # perhaps of a column
        with unknown_columns_reported():
            return dataset.manifest


def _check_files(name: str, dataset: Dataset, since: int) -> None:
    """Compare files that were listed earlier, such as for `count()`. Raises `ConfigError`."""
    from spotfit.data.files import path_of
    from spotfit.data.plans.row_plan import find_changed_files

    changed = find_changed_files(dataset.manifest, since=since)
    if changed:
        others = f" and {format_count(len(changed) - 1, 'other')}" if len(changed) > 1 else ""
        raise ConfigError(
            f"Files of the dataset {name!r} were changed or deleted after they were listed: "
            f"{path_of(changed[0])}{others}.",
            do="Create the dataset again before fit().",
        )


def _check_transforms(name: str, dataset: Dataset) -> None:
    """Transform the first rows, which finds unknown columns. Raises `ConfigError`.

    Other errors are only logged: a function may need a library or device of the machines.
    """
    try:
        dataset.schema()
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - a function of the user raises anything
        if isinstance(error, KeyError | AttributeError):
            _check_columns_of_functions(dataset)
        log.warning(
            "data.transforms_failed", dataset=name, reason=f"{type(error).__name__}: {error}"
        )


def _check_columns_of_functions(dataset: Dataset) -> None:
    """Transform the first rows again. Raises `ConfigError` if a function reads an unknown column.

    The key of another dictionary, such as `os.environ`, may exist on the machines.
    """
    from spotfit.data.user_functions import unknown_columns_reported

    try:
        with unknown_columns_reported():
            dataset.schema()
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - the caller logs that of the first call
        log.debug("data.transforms_failed_again", reason=f"{type(error).__name__}: {error}")


def _check_type(name: str, dataset: Any) -> Dataset:
    from spotfit.data.dataset import Dataset

    if isinstance(dataset, Dataset):
        return dataset
    reader = _READERS.get(type(dataset).__module__.partition(".")[0], "from_items")
    raise ConfigTypeError(
        f"The dataset {name!r} is a {qualified_type_name(dataset)}; workers read a "
        "spotfit.data.Dataset, or a function without arguments that returns one.",
        do=f"Write datasets={{{name!r}: spotfit.data.{reader}(...)}}, or use num_workers=0, where "
        "get_dataset_shard returns the object unchanged.",
    )
