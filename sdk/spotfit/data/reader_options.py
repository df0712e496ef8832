"""Arguments that all readers of files have in Ray Data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypedDict

import pyarrow as pa

from spotfit.core.errors import ConfigError, ConfigTypeError
from spotfit.core.input_checks import did_you_mean
from spotfit.data.dataset import Dataset
from spotfit.data.files import FileSet, PathOptions
from spotfit.data.source import Source
from spotfit.data.sources.file_format import FileFormat
from spotfit.data.sources.file_source import FormatSource
from spotfit.data.sources.partitioning import Partitioning
from spotfit.host import log

Paths: TypeAlias = str | Path | Sequence[str | Path]


@dataclass(frozen=True)
class FileShuffleConfig:
    """The order of the files is shuffled, as with `ray.data.FileShuffleConfig`.

    Here each epoch permutes row groups rather than files, in an order that the seed and the epoch
    determine; `reseed_after_execution` has no effect.
    """

    seed: int | None = None
    reseed_after_execution: bool = True


class SchedulingOptions(TypedDict, total=False):
    """Arguments of Ray that choose how its tasks are scheduled. They have no effect here."""

    accelerator_type: str | None
    concurrency: int | None
    fallback_strategy: Any
    label_selector: Any
    max_calls: int | None
    memory: float | None
    meta_provider: Any
    num_cpus: float | None
    num_gpus: float | None
    override_num_blocks: int | None
    parallelism: int
    ray_remote_args: dict[str, Any] | None
    resources: dict[str, float] | None
    runtime_env: dict[str, Any] | None


class FileOptions(SchedulingOptions, total=False):
    """Arguments of all readers of files."""

    filesystem: Any
    """Of fsspec or pyarrow; paths are then within it."""
    partition_filter: Callable[[list[str]], Sequence[str]] | None
    """Returns the paths that are read, such as a `PathPartitionFilter`."""
    partitioning: Partitioning | str | None
    """How folders name columns; "hive" reads `year=2024`."""
    include_paths: bool
    """Add the path of each row's file in the column `path`."""
    ignore_missing_paths: bool
    shuffle: Literal["files"] | FileShuffleConfig | None
    file_extensions: Sequence[str] | str | None
    """Read only files that end so. None: in folders, those of the format."""


def read_files(
    function: str,
    paths: Paths,
    file_format: FileFormat,
    options: Mapping[str, Any],
    *,
    extensions: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    schema: pa.Schema | None = None,
) -> Dataset:
    """Return the dataset of files of a format, of which nothing is read yet.

    `options` are the `FileOptions` of `function`, `extensions` those of the format. Raises
    `ConfigError` for invalid or unknown options.
    """
    source = FormatSource(
        files=file_set(function, paths, options, extensions),
        format=file_format,
        columns=None if columns is None else tuple(columns),
        stated_schema=schema,
        partitioning=to_partitioning(options.get("partitioning")),
        include_paths=bool(options.get("include_paths")),
    )
    return shuffled_dataset(source, options.get("shuffle"))


def file_set(
    function: str, paths: Paths, options: Mapping[str, Any], extensions: Sequence[str] | None
) -> FileSet:
    """Return the files of a reader. Raises `ConfigError` for invalid or unknown options."""
    ignore_scheduling(function, options, known=FileOptions.__annotations__)
    return FileSet.of_paths(
        paths,
        PathOptions(
            file_extensions=_to_extensions(options.get("file_extensions")),
            format_extensions=_to_extensions(extensions),
            partition_filter=options.get("partition_filter"),
            ignore_missing_paths=bool(options.get("ignore_missing_paths")),
        ),
        options.get("filesystem"),
    )


def shuffled_dataset(
    source: Source, shuffle: Literal["files"] | FileShuffleConfig | None
) -> Dataset:
    """Return the dataset of a source, whose units are permuted if `shuffle` says so."""
    dataset = Dataset.of_source(source)
    if shuffle is None:
        return dataset
    if shuffle == "files":
        return dataset.randomize_block_order()
    if hasattr(shuffle, "seed"):  # also that of ray.data
        return dataset.randomize_block_order(seed=shuffle.seed)
    raise ConfigError(
        f"shuffle={shuffle!r} is not supported.", do="Use 'files' or FileShuffleConfig(seed)."
    )


def ignore_scheduling(
    function: str, options: Mapping[str, Any], *, known: Mapping[str, Any] | Sequence[str] = ()
) -> None:
    """Log the options of Ray's scheduling. Raises `ConfigError` for options that are not known."""
    for name in options:
        if name in SchedulingOptions.__annotations__:
            log.debug("data.argument_ignored", function=function, argument=name)
        elif name not in known:
            raise ConfigError(
                f"{function}() has no argument {name!r}.",
                do=did_you_mean(name, {*known, *SchedulingOptions.__annotations__}),
            )


def refuse(
    function: str, options: Mapping[str, Any], remedies: Mapping[str, str]
) -> dict[str, Any]:
    """Return the other options than those of `remedies`, which spotfit does not support.

    Raises `ConfigError` if one of them has a value.
    """
    for name, remedy in remedies.items():
        if options.get(name) is not None and options[name] is not False:
            raise ConfigError(f"{function}({name}=…) is not supported.", do=remedy)
    return {name: value for name, value in options.items() if name not in remedies}


def to_partitioning(value: Any) -> Partitioning | None:
    """Return the partitioning of an argument. Raises `ConfigError` for an unknown one."""
    if value is None or isinstance(value, Partitioning):
        return value
    if isinstance(value, str):
        if value != "hive":
            raise ConfigError(
                f"partitioning={value!r} is not supported.", do="Use 'hive' or Partitioning(…)."
            )
        return Partitioning("hive")
    if hasattr(value, "style") and hasattr(value, "field_names"):  # that of ray.data
        style = getattr(value.style, "value", value.style)
        return Partitioning(style, value.base_dir, value.field_names, value.field_types or {})
    raise ConfigTypeError(
        f"partitioning is a {type(value).__name__}.", do="Pass 'hive', None or Partitioning(…)."
    )


def _to_extensions(extensions: Sequence[str] | str | None) -> tuple[str, ...] | None:
    if extensions is None:
        return None
    return (extensions,) if isinstance(extensions, str) else tuple(extensions)
