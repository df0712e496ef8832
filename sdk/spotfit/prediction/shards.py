"""The work of a prediction: shards, each read from one file or by the user's function."""

from __future__ import annotations

import hashlib
import posixpath
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from os import PathLike, fspath
from typing import Any, NamedTuple

from spotfit.core.errors import ConfigError, NotFoundError
from spotfit.core.input_checks import is_dataframe
from spotfit.core.units import format_count
from spotfit.prediction.batches import (
    Batch,
    BatchFormat,
    FileFormat,
    check_batch,
    decode_file,
    encode_file,
    file_format,
    is_readable_file,
    row_count,
    slice_rows,
    to_batch_format,
)
from spotfit.prediction.identity import digest_of, identity_of
from spotfit.store.api import Store
from spotfit.store.factory import open_store, with_bucket_region
from spotfit.store.transfer import concurrent_map, download_bytes, list_files
from spotfit.store.url import RootUrl

INPUT_FOLDER = "_inputs"
"""Folder of the output for rows that the caller has passed in memory."""
_NAME_DIGITS = 5  # as Spark and Ray name their parts; more shards have longer names


class FileSource(NamedTuple):
    """A file in a store that every machine can read."""

    folder_url: str
    name: str

    def read(self, batch_format: BatchFormat) -> Batch:
        """Download the file and return its rows. Raises `NotFoundError` or `IntegrityError`."""
        body = download_bytes(open_store(self.folder_url), self.name)
        return decode_file(body, file_format(self.name), batch_format)

    @property
    def path(self) -> str:
        """The path without scheme and options, such as "bucket/folder/file.parquet"."""
        return f"{RootUrl.parse(self.folder_url).path}/{self.name}"

    def __str__(self) -> str:
        return str(RootUrl.parse(self.folder_url).join(self.name))


class FunctionSource(NamedTuple):
    """An item that the user's function turns into rows, such as a shard number or a file name."""

    item: Any
    function: Callable[[Any], Any]

    def read(self, batch_format: BatchFormat) -> Batch:
        """Call the user's function, whose exceptions propagate, and return its rows."""
        batch = check_batch(self.function(self.item), source=f"read({self.item!r})")
        return to_batch_format(batch, batch_format)

    def __str__(self) -> str:
        return repr(self.item)


Source = FileSource | FunctionSource


@dataclass(frozen=True)
class Shard:
    """A part of the work with one output object, which is named by the shard."""

    name: str
    source: Source


@dataclass(frozen=True)
class Work:
    """The shards of a prediction, and what must be uploaded before they can be read."""

    shards: tuple[Shard, ...]
    fingerprint: str
    """Of the inputs: equal for equal inputs in every process."""
    uploads: tuple[tuple[str, Callable[[], bytes]], ...] = field(default=(), repr=False)
    """Keys in the output folder, and functions that return their content."""

    @property
    def _files(self) -> Iterator[FileSource]:
        sources = (shard.source for shard in self.shards)
        return (source for source in sources if isinstance(source, FileSource))

    def folder_urls(self) -> frozenset[str]:
        """Return the folders of the input files."""
        return frozenset(source.folder_url for source in self._files)

    def file_formats(self) -> frozenset[FileFormat]:
        """Return the formats of the input files."""
        return frozenset(file_format(source.name) for source in self._files)

    def upload(self, output: Store) -> None:
        """Write the rows that were passed in memory, unless they are there already."""
        present = list_files(output, INPUT_FOLDER)
        missing = [
            (key, encode) for key, encode in self.uploads if posixpath.basename(key) not in present
        ]
        concurrent_map(lambda upload: output.put(upload[0], upload[1]()), missing)

    def delete_uploads(self, output: Store) -> None:
        """Delete what `upload` has written. Idempotent."""
        concurrent_map(output.delete, [key for key, _ in self.uploads])


def plan_work(
    inputs: Any, *, read: Callable[[Any], Any] | None, rows_per_shard: int, output: Store
) -> Work:
    """Return the shards of these inputs.

    `inputs` are a DataFrame, an array or a dictionary of arrays, split into `rows_per_shard` rows;
    with `read` a sequence of its arguments; else a URL, or several, of files and folders. Rows in
    memory are to be uploaded to `output`. Lists folders, and checks that files exist. Raises
    `ConfigError` if there is no shard, or an input is missing or of an unknown format.
    """
    if read is not None:
        return _plan_items(list(_check_iterable(inputs)), read)
    if is_dataframe(inputs) or isinstance(inputs, Mapping) or hasattr(inputs, "__array__"):
        return _plan_rows(inputs, rows_per_shard, output)
    if hasattr(inputs, "write_parquet"):
        raise ConfigError(
            f"inputs= cannot be a {type(inputs).__name__}.",
            do="Pass the files of the dataset, or write it with write_parquet(url) and pass the "
            "url.",
        )
    is_single = isinstance(inputs, (str, PathLike))
    return _plan_files([inputs] if is_single else list(_check_iterable(inputs)))


def _check_iterable(inputs: Any) -> Iterable[Any]:
    if isinstance(inputs, Iterable):
        return inputs
    raise ConfigError(
        f"inputs= cannot be a {type(inputs).__name__}.",
        do="Pass URLs of files or folders, a DataFrame, numpy arrays, or a list of items with a "
        "function read= that reads one.",
    )


def _name_shards(sources: Sequence[Source]) -> tuple[Shard, ...]:
    if not sources:
        raise ConfigError(
            "inputs= has no shards, so there is nothing to predict.",
            do="Check the list, or the folder that it names.",
        )
    width = max(_NAME_DIGITS, len(str(len(sources) - 1)))
    return tuple(Shard(f"part-{n:0{width}}", source) for n, source in enumerate(sources))


# --- items of the user's function -----------------------------------------------------------------


def _plan_items(items: list[Any], read: Callable[[Any], Any]) -> Work:
    if not callable(read):
        raise ConfigError(
            f"read= must be a function, not a {type(read).__name__}.",
            do="Pass a function that takes one item of inputs= and returns its rows.",
        )
    shards = _name_shards([FunctionSource(item, read) for item in items])
    return Work(shards, digest_of([identity_of(read), *map(identity_of, items)]))


# --- files ----------------------------------------------------------------------------------------


def _plan_files(urls: list[Any]) -> Work:
    sources: list[FileSource] = []
    for url in urls:
        if not isinstance(url, (str, PathLike)):
            raise ConfigError(
                f"inputs= contains {url!r}, which is not a URL or path.",
                do="Pass URLs, or a function read= that reads one of the items.",
            )
        sources += _find_files(str(fspath(url)))
    _check_present(sources)
    for source in sources:
        file_format(source.name)
    return Work(_name_shards(sources), digest_of(source.path for source in sources))


def _find_files(url: str) -> list[FileSource]:
    """Return the file, or all files of known formats below the folder, sorted by name."""
    root = RootUrl.parse(url, setting="inputs=")
    if is_readable_file(root.prefix) and not url.endswith("/"):
        folder = replace(root, prefix=posixpath.dirname(root.prefix))
        return [FileSource(_machine_url(folder), posixpath.basename(root.path))]
    folder_url = _machine_url(root)
    # Files of other tools begin with '_' or '.', such as '_SUCCESS'.
    names = (
        info.key
        for info in open_store(folder_url).list()
        if not posixpath.basename(info.key).startswith(("_", "."))
    )
    return [FileSource(folder_url, name) for name in names if is_readable_file(name)]


def _machine_url(root: RootUrl) -> str:
    """Return the URL that machines open, with the region of an S3 bucket."""
    return with_bucket_region(open_store(root)).url


def _check_present(sources: Sequence[FileSource]) -> None:
    def is_missing(source: FileSource) -> bool:
        try:
            open_store(source.folder_url).get_range(source.name, 0, 0)
        except NotFoundError:
            return True
        return False

    missing = [
        str(source)
        for source, is_absent in zip(sources, concurrent_map(is_missing, sources), strict=True)
        if is_absent
    ]
    if missing:
        raise ConfigError(
            f"{format_count(len(missing), 'input file')} of {len(sources)} cannot be found: "
            f"{', '.join(missing[:3])}.",
            do="Correct the URLs in inputs=.",
        )


# --- rows in memory -------------------------------------------------------------------------------


def _plan_rows(rows: Any, rows_per_shard: int, output: Store) -> Work:
    """Return shards of a batch in memory, whose files are uploaded beside the output."""
    batch = check_batch(rows if is_dataframe(rows) else _plain(rows), source="inputs=")
    form: FileFormat = "parquet" if is_dataframe(batch) else "npz"
    parts = [
        slice_rows(batch, start, start + rows_per_shard)
        for start in range(0, row_count(batch), rows_per_shard)
    ]
    encoders = [partial(encode_file, part, form) for part in parts]
    digests = [hashlib.sha256(encode()).hexdigest() for encode in encoders]
    # Named by their content: an upload of other rows cannot be mistaken for these.
    keys = [f"{INPUT_FOLDER}/{digest[:32]}.{form}" for digest in digests]
    folder_url = output.subtree(INPUT_FOLDER).url
    sources = [FileSource(folder_url, posixpath.basename(key)) for key in keys]
    return Work(_name_shards(sources), digest_of(digests), tuple(zip(keys, encoders, strict=True)))


def _plain(rows: Any) -> Any:
    """Return other arrays, such as tensors on the CPU, as numpy arrays."""
    return rows if isinstance(rows, Mapping) else rows.__array__()
