"""Datasets of trainers that own the training loop: tables, or what they are loaded from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from spotfit.core.errors import ConfigError, ConfigTypeError
from spotfit.core.input_checks import did_you_mean
from spotfit.core.lazy_names import is_loaded_instance

TRAIN = "train"


class Table(NamedTuple):
    """Features and labels of some rows, as a pandas DataFrame and a Series of the same length."""

    features: Any
    labels: Any


def check_datasets(trainer: str, datasets: Any, label_column: Any) -> dict[str, Any]:
    """Return the datasets by name.

    Each is a DataFrame, a `spotfit.data.Dataset`, or a function that returns one of them. Called
    before machines are requested: functions are not called, and columns of the others are checked.
    Raises `ConfigError` or `ConfigTypeError`; `trainer` is the class for messages.
    """
    if not isinstance(datasets, Mapping) or TRAIN not in datasets:
        raise ConfigError(
            f"{trainer}(datasets={_describe(datasets)}) must have a dataset 'train'.",
            do="Write datasets={'train': frame}, or a function without arguments that returns the "
            "DataFrame.",
        )
    if not isinstance(label_column, str):
        raise ConfigTypeError(
            f"{trainer}(label_column={label_column!r}) must be the name of a column.",
            do="Write label_column='target'.",
        )
    for name, dataset in datasets.items():
        if is_table(dataset):
            _check_label(dataset.columns, name, label_column)
        elif _is_dataset(dataset):
            _check_label(dataset.schema().names, name, label_column)
        elif not callable(dataset):
            raise ConfigTypeError(
                f"{trainer}: the dataset {name!r} is a {type(dataset).__name__}.",
                do="Pass a pandas DataFrame, a spotfit.data.Dataset, or a function without "
                "arguments that returns one.",
            )
    return dict(datasets)


def is_table(value: Any) -> bool:
    """Whether the value has the columns and rows of a pandas DataFrame."""
    return hasattr(value, "columns") and hasattr(value, "iloc")


def _is_dataset(value: Any) -> bool:
    return is_loaded_instance(value, "spotfit.data.dataset", "Dataset")


def load_table(dataset: Any, name: str, label_column: str) -> Table:
    """Return features and labels of all rows of a dataset of `check_datasets`.

    Calls it if it is a function. Raises `ConfigError` if the result has no column `label_column`,
    and what the function raises.
    """
    frame = _load_frame(dataset, name)
    _check_label(frame.columns, name, label_column)
    return Table(frame.drop(columns=[label_column]), frame[label_column])


def rows_of_rank(table: Table, name: str, *, rank: int, world_size: int) -> Table:
    """Return every `world_size`-th row, beginning with row `rank`: the parts of all ranks are
    disjoint. Raises `ConfigError` if there are fewer rows than workers."""
    if len(table.labels) < world_size:
        raise ConfigError(
            f"The dataset {name!r} has {len(table.labels)} rows for {world_size} workers.",
            do="Set ScalingConfig(num_workers=...) to at most the number of rows.",
        )
    part = slice(rank, None, world_size)
    return Table(table.features.iloc[part], table.labels.iloc[part])


def _load_frame(dataset: Any, name: str) -> Any:
    loaded = dataset() if callable(dataset) else dataset
    if is_table(loaded):
        return loaded
    if not _is_dataset(loaded):
        raise ConfigTypeError(
            f"The function of the dataset {name!r} returned a {type(loaded).__name__}.",
            do="Return a pandas DataFrame or a spotfit.data.Dataset.",
        )
    return loaded.to_pandas()


def _check_label(names: Iterable[Any], name: str, label_column: str) -> None:
    columns = [str(column) for column in names]
    if label_column not in columns:
        raise ConfigError(
            f"The dataset {name!r} has no column {label_column!r}.",
            do=did_you_mean(label_column, columns[:20]) or "Pass label_column= with its label.",
        )


def _describe(datasets: Any) -> str:
    return str(sorted(datasets)) if isinstance(datasets, Mapping) else repr(datasets)[:80]
