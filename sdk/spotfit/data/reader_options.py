"""Arguments that all readers of files have in Ray Data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from spotfit.core.errors import ConfigError, ConfigTypeError
from spotfit.core.input_checks import did_you_mean
from spotfit.data.dataset import Dataset, Rows, ShuffleSettings
from spotfit.data.files import FileSet, PathOptions
from spotfit.data.manifest import Manifest
from spotfit.data.partitioning import Partitioning, PathPartitionFilter
from spotfit.data.source import Source
from spotfit.data.sources.file_source import FileFormat, FileSource
from spotfit.host import log

Paths = str | Path | Sequence[str | Path]

_UNNEEDED = frozenset(
    {
        "accelerator_type",
        "concurrency",
        "fallback_strategy",
        "label_selector",
        "max_calls",
        "memory",
        "meta_provider",
        "num_cpus",
        "num_gpus",
        "override_num_blocks",
        "parallelism",
        "ray_remote_args",
        "resources",
        "runtime_env",
    }
)
"""Arguments of Ray that choose how its tasks are scheduled."""


@dataclass(frozen=True)
class FileShuffleConfig:
    """The order of the files is shuffled, as `ray.data.FileShuffleConfig`.

    Here each epoch permutes row groups rather than files. `reseed_after_execution` is True: each
    epoch has another order, which the seed determines.
    """

    seed: int | None = None
    reseed_after_execution: bool = True


class FileArguments(NamedTuple):
    """What the readers pass on."""

    paths: Paths
    filesystem: Any = None
    partition_filter: PathPartitionFilter | Callable[[list[str]], Sequence[str]] | None = None
    partitioning: Partitioning | str | None = None
    include_paths: bool = False
    ignore_missing_paths: bool = False
    shuffle: Literal["files"] | FileShuffleConfig | None = None
    file_extensions: Sequence[str] | None = None


def read_files(
    arguments: FileArguments,
    file_format: FileFormat,
    *,
    columns: Sequence[str] | None = None,
    format_extensions: Sequence[str] | None = None,
) -> Dataset:
    """Return the dataset of files of a format, of which nothing is read yet."""
    source = FileSource(
        files=file_set(arguments, format_extensions),
        format=file_format,
        columns=None if columns is None else tuple(columns),
        partitioning=to_partitioning(arguments.partitioning),
        include_paths=arguments.include_paths,
    )
    return shuffled_dataset(source, arguments.shuffle)


def file_set(arguments: FileArguments, format_extensions: Sequence[str] | None) -> FileSet:
    """Return the files of the arguments. Raises `ConfigError` for invalid ones."""
    options = PathOptions(
        file_extensions=_to_extensions(arguments.file_extensions),
        format_extensions=_to_extensions(format_extensions),
        partition_filter=arguments.partition_filter,
        ignore_missing_paths=arguments.ignore_missing_paths,
    )
    return FileSet.of_paths(arguments.paths, options, arguments.filesystem)


def shuffled_dataset(
    source: Source, shuffle: Literal["files"] | FileShuffleConfig | None
) -> Dataset:
    """Return the dataset of a source, whose units are permuted if `shuffle` says so."""
    if shuffle is None:
        return Dataset.of_source(source)
    if shuffle != "files" and not isinstance(shuffle, FileShuffleConfig):
        raise ConfigError(
            f"shuffle={shuffle!r} is not supported.", do="Use 'files' or FileShuffleConfig(seed)."
        )
    seed = shuffle.seed if isinstance(shuffle, FileShuffleConfig) else None
    rows = Rows(lambda: Manifest.of_source(source))
    return Dataset(rows, (), ShuffleSettings("units", seed))


def to_partitioning(value: Partitioning | str | None) -> Partitioning | None:
    """Return the partitioning that an argument names."""
    if value is None or isinstance(value, Partitioning):
        return value
    if isinstance(value, str):
        if value != "hive":
            raise ConfigError(
                f"partitioning={value!r} is not supported.", do="Use 'hive' or Partitioning(…)."
            )
        return Partitioning("hive")
    # Such as that of ray.data.datasource, whose style is an enumeration.
    if hasattr(value, "style") and hasattr(value, "field_names"):
        style = getattr(value.style, "value", value.style)
        return Partitioning(style, value.base_dir, value.field_names, value.field_types or {})
    raise ConfigTypeError(
        f"partitioning is a {type(value).__name__}.", do="Pass 'hive', None or Partitioning(…)."
    )


def take_options(
    function: str,
    options: Mapping[str, Any],
    *,
    known: Sequence[str] = (),
    refused: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the options of a reader that are `known`.

    Arguments of Ray's scheduling are ignored, with a line in the log. Raises `ConfigError` for
    `refused` ones, whose values are remedies, and for unknown ones.
    """
    refused = refused or {}
    taken: dict[str, Any] = {}
    for name, value in options.items():
        if name in _UNNEEDED:
            log.debug("data.argument_ignored", function=function, argument=name)
        elif name in refused:
            if value:
                raise ConfigError(f"{function}({name}=…) is not supported.", do=refused[name])
        elif name in known:
            taken[name] = value
        else:
            raise ConfigError(
                f"{function}() has no argument {name!r}.",
                do=did_you_mean(name, [*known, *refused, *_UNNEEDED]),
            )
    return taken


def _to_extensions(extensions: Sequence[str] | str | None) -> tuple[str, ...] | None:
    if extensions is None:
        return None
    return (extensions,) if isinstance(extensions, str) else tuple(extensions)
