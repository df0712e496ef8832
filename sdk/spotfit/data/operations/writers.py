"""Files that `write_*` and `materialize(url)` write, through the project's stores."""

from __future__ import annotations

import enum
import importlib
import re
import uuid
from collections import Counter, deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from spotfit.core.errors import (
    AlreadyExistsError,
    ConfigError,
    InfrastructureError,
    MissingExtraError,
    NotFoundError,
)
from spotfit.data.files import FileSet, PathOptions
from spotfit.data.formats.batch_formats import concat_blocks, empty_table
from spotfit.data.formats.tensor_storage import encode_tensors
from spotfit.data.operations.file_encoders import Encoder, parquet_encoder
from spotfit.data.plans.row_functions import block_rows
from spotfit.data.schema import check_columns
from spotfit.data.sources.file_source import FormatSource
from spotfit.data.sources.frame_writers import fsspec_url
from spotfit.data.sources.parquet import ParquetFormat
from spotfit.store.api import Store
from spotfit.store.factory import open_store, with_bucket_region
from spotfit.store.filesystem import open_filesystem_store
from spotfit.store.url import RootUrl

FILE_BYTES = 128 * 2**20
"""Decoded size of the rows of a file, unless the user sets numbers of rows."""
_UPLOADS = 4
"""Files that are encoded or uploaded at the same time; each is held in memory."""
_PART_UPLOADS = 2
"""The same for parts of operations, whose limit on memory includes these."""
_EMPTY_KEY = "empty.parquet"
_COMPLETE_KEY = "_SUCCESS"
"""An object beside files that are complete, as Spark and Hadoop write it, with their sizes."""
_NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"


class SaveMode(enum.StrEnum):
    """What to do where files exist already."""

    CREATE = "create"
    """Raise `AlreadyExistsError`."""
    APPEND = "append"
    """Add files."""
    OVERWRITE = "overwrite"
    """Delete them before the new ones are written."""
    IGNORE = "ignore"
    """Write nothing."""
    ERROR = "error"
    """Raise `AlreadyExistsError`."""
    UPSERT = "upsert"
    """Not supported for files."""


_ARGUMENT_FUNCTIONS = frozenset(
    {"arrow_parquet_args_fn", "arrow_csv_args_fn", "arrow_orc_args_fn", "pandas_json_args_fn"}
)
"""Arguments that are functions without arguments, which return arguments of the format."""
_IGNORED_ARGUMENTS = _ARGUMENT_FUNCTIONS | {
    *("try_create_dir", "arrow_open_stream_args", "ray_remote_args", "concurrency", "catalog"),
    *("min_bytes_per_file", "num_rows_per_file"),
}


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """Where and in which files rows are written. Arguments have the names and meaning of Ray's."""

    filesystem: Any = None
    filename_provider: Any = None
    partition_cols: Sequence[str] = ()
    min_rows_per_file: int | None = None
    max_rows_per_file: int | None = None
    mode: SaveMode | str = SaveMode.APPEND

    @classmethod
    def of_arguments(
        cls, method: str, arguments: Mapping[str, Any]
    ) -> tuple[WriteOptions, dict[str, Any]]:
        """Return the options among the arguments of a method, and the arguments of the format.

        Raises `ConfigError` for invalid values.
        """
        known = {name: value for name, value in arguments.items() if name in cls.__annotations__}
        known["partition_cols"] = tuple(known.get("partition_cols") or ())
        if (rows := arguments.get("num_rows_per_file")) is not None:  # the name before Ray 2.50
            known["min_rows_per_file"] = known.get("min_rows_per_file") or rows
        options = cls(**known)
        format_arguments = {
            name: value
            for name, value in arguments.items()
            if name not in known and name not in _IGNORED_ARGUMENTS
        }
        for name, value in arguments.items():
            if name in _ARGUMENT_FUNCTIONS and value is not None:
                format_arguments |= value()
        for name in ("min_rows_per_file", "max_rows_per_file"):
            rows = getattr(options, name)
            if rows is not None and rows < 1:
                raise ConfigError(f"{method}({name}={rows}) must be positive.", do="Correct it.")
        modes = [mode.value for mode in SaveMode if mode is not SaveMode.UPSERT]
        if getattr(options.mode, "value", options.mode) not in modes:
            raise ConfigError(
                f"{method}(mode={options.mode!r}) is not supported for files.",
                do=f"Use one of {', '.join(modes)}.",
            )
        return options, format_arguments


def write_files(
    store: Store, blocks: Iterable[pa.Table], suffix: str, encode: Encoder, options: WriteOptions
) -> list[str]:
    """Write all rows to files in `store`, and return their keys.

    A process that is killed leaves whole files only. Raises `AlreadyExistsError` by the mode.
    """
    if not _prepare(store, SaveMode(options.mode)):
        return []
    write_id, keys = uuid.uuid4().hex, []

    def write(task: int, file: _File) -> str:
        name = _file_name(options.filename_provider, write_id, task, suffix)
        key = f"{file.folder}{name}"
        store.put(key, encode(file.rows))
        return key

    with ThreadPoolExecutor(_UPLOADS, "spotfit-write") as executor:
        pending: deque[Future[str]] = deque()
        for task, file in enumerate(_cut_files(blocks, options)):
            pending.append(executor.submit(write, task, file))
            if len(pending) >= _UPLOADS:
                keys.append(pending.popleft().result())
        keys += [future.result() for future in pending]
    return keys


def write_rows(
    store: Store,
    blocks: Iterable[pa.Table],
    suffix: str,
    encode: Callable[[dict[str, Any]], bytes],
    options: WriteOptions,
) -> int:
    """Write a file for each row, and return their number."""
    if not _prepare(store, SaveMode(options.mode)):
        return 0
    write_id, count = uuid.uuid4().hex, 0
    with ThreadPoolExecutor(_UPLOADS, "spotfit-write") as executor:
        for task, block in enumerate(blocks):
            rows = block_rows(block)
            names = [
                _row_name(options.filename_provider, write_id, task, n, row, suffix)
                for n, row in enumerate(rows)
            ]
            bodies = executor.map(encode, rows)
            for _ in executor.map(store.put, names, bodies):
                count += 1
    return count


def open_folder(path: str | Path, filesystem: Any = None) -> Store:
    """Return the store at a path or URL, or at a path of a file system of pyarrow or fsspec."""
    if filesystem is not None:
        return open_filesystem_store(filesystem, str(path))
    address = str(path).removeprefix("local://")  # Ray's scheme of the client's own disk
    return with_bucket_region(open_store(address, setting="The path of the dataset's files"))


def _prepare(store: Store, mode: SaveMode) -> bool:
    """Return whether to write; deletes existing objects if the mode is OVERWRITE."""
    if mode is SaveMode.APPEND:
        return True
    existing = [info.key for info in store.list()]
    if mode is SaveMode.OVERWRITE:
        for key in existing:
            store.delete(key)
        return True
    if existing and mode is not SaveMode.IGNORE:
        raise AlreadyExistsError(
            f"{store.url} contains {len(existing)} objects already, and mode={mode.value!r}.",
            do='Choose another path, or mode="overwrite" or "append".',
        )
    return not existing


# --- Which rows go into which file ----------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _File:
    folder: str
    """'' or the directories of the partition, with a "/" at the end."""
    rows: pa.Table


def _cut_files(blocks: Iterable[pa.Table], options: WriteOptions) -> Iterator[_File]:
    pending: dict[str, _PendingRows] = {}
    for block in blocks:
        for folder, part in _partitions(block, options.partition_cols):
            rows = pending.setdefault(folder, _PendingRows([]))
            rows.blocks.append(part)
            yield from (_File(folder, table) for table in rows.cut(options, is_last=False))
    for folder, rows in pending.items():
        yield from (_File(folder, table) for table in rows.cut(options, is_last=True))


@dataclass
class _PendingRows:
    """Rows for the next file of a partition."""

    blocks: list[pa.Table]

    def cut(self, options: WriteOptions, *, is_last: bool) -> Iterator[pa.Table]:
        """Yield the rows of complete files, or of all if `is_last`; keep the others."""
        count = sum(block.num_rows for block in self.blocks)
        size = sum(block.nbytes for block in self.blocks)
        largest, smallest = options.max_rows_per_file, options.min_rows_per_file
        is_complete = size >= FILE_BYTES if smallest is None else count >= smallest
        if not count or not (is_last or is_complete or (largest and count >= largest)):
            return
        rows = concat_blocks(self.blocks)
        length = largest or count
        whole = count if is_last else max(count - count % length, min(count, length))
        yield from (rows.slice(first, length) for first in range(0, whole, length))
        self.blocks = [rows.slice(whole)] if whole < count else []


def _partitions(block: pa.Table, columns: Sequence[str]) -> Iterator[tuple[str, pa.Table]]:
    """Yield the rows of each partition without its columns, and its directories, as in Hive."""
    if not columns:
        yield "", block
        return
    check_columns("write_parquet(partition_cols=...)", columns, block.column_names)
    folders = [
        "".join(_directory(name, row[name]) for name in columns)
        for row in block.select(list(columns)).to_pylist()
    ]
    names = pa.array(folders)
    rest = block.drop_columns(list(columns))
    for folder in dict.fromkeys(folders):
        yield folder, rest.filter(pc.equal(names, folder))


def _directory(column: str, value: Any) -> str:
    return f"{column}={_NULL_PARTITION if value is None else quote(str(value), safe=' ')}/"


def _file_name(provider: Any, write_id: str, task: int, suffix: str) -> str:
    if provider is None:
        return f"{write_id}_{task:06d}.{suffix}"
    name: str = provider.get_filename_for_task(write_id, task)
    return name


def _row_name(
    provider: Any, write_id: str, task: int, number: int, row: dict[str, Any], suffix: str
) -> str:
    if provider is None:
        return f"{write_id}_{task:06d}_{number:06d}.{suffix}"
    name: str = provider.get_filename_for_row(row, write_id, task, 0, number)
    return name


# --- Files that spotfit reads again ---------------------------------------------------------------


def materialize(
    folder: Store,
    blocks: Iterable[pa.Table],
    schema: pa.Schema,
    row_group_bytes: int,
) -> FormatSource:
    """Write rows to Parquet files for fast reading, and return the source of these files.

    If an earlier call has written all files of this folder, nothing is written. Tensors are stored
    as bytes, see `tensor_storage`.
    """
    if not is_complete(folder):
        encode = parquet_encoder(row_group_bytes)
        write_options = WriteOptions(mode=SaveMode.OVERWRITE)
        encoded = (encode_tensors(block) for block in blocks)
        written = write_files(folder, encoded, "parquet", encode, write_options)
        if not written:
            folder.put(_EMPTY_KEY, encode(encode_tensors(empty_table(schema))))
        _mark_complete(folder, written or [_EMPTY_KEY])
    return stored_source(folder)


def is_complete(folder: Store) -> bool:
    """Return whether the folder has the files of a complete result, and no others."""
    try:
        expected = msgspec.json.decode(folder.get(_COMPLETE_KEY), type=dict[str, int])
    except (NotFoundError, msgspec.DecodeError):
        return False
    return _file_sizes(folder) == expected


def _mark_complete(folder: Store, keys: Iterable[str]) -> None:
    """Record the files of a result, which must be all files of the folder.

    Raises `InfrastructureError` if another process has written or deleted files meanwhile. What it
    changes later is found by `is_complete`.
    """
    sizes = _file_sizes(folder)
    if sizes.keys() != set(keys):
        raise InfrastructureError(
            f"Another process changed the files of {folder.url} while they were written.",
            do="Repeat the call when the other process has ended.",
        )
    folder.put(_COMPLETE_KEY, msgspec.json.encode(sizes))


def _file_sizes(folder: Store) -> dict[str, int]:
    return {one.key: one.size_bytes for one in folder.list() if one.key.endswith(".parquet")}


def stored_source(folder: Store) -> FormatSource:
    """Return the source of the files in a folder."""
    options = PathOptions(format_extensions=("parquet",))
    return FormatSource(FileSet.of_paths([folder.url], options, None), ParquetFormat())


class Piece(NamedTuple):
    """A file of a result: a part, or one of several pieces of a part with larger rows.

    The order of the rows is that of the tuples, and of the names of the files.
    """

    part: int
    number: int = 0
    pieces: int = 1

    def file_name(self, suffix: str) -> str:
        """Return the name of the file."""
        piece = f".{self.number:06d}-of-{self.pieces:06d}" if self.pieces > 1 else ""
        return f"{self.part:06d}{piece}{suffix}"


_PIECE = re.compile(r"(\d+)(?:\.(\d+)-of-(\d+))?")


class NumberedParts(Protocol):
    """Rows in parts, each of which is a file or several."""

    @property
    def tag(self) -> str:
        """What determines which rows a part has; part of the names of the files."""
        ...

    def read(self, complete: Collection[int]) -> Generator[tuple[Piece, pa.Table], None, None]:
        """Yield the pieces of parts, without those that are complete, in ascending order."""
        ...


def write_parts(
    folder: Store,
    parts: NumberedParts,
    schema: Callable[[], pa.Schema],
    row_group_bytes: int,
    *,
    is_repeatable: bool,
) -> FormatSource:
    """Write the parts to files as `materialize` does, and return the source of these files.

    If `is_repeatable`, parts that an interrupted call has written are not computed again: another
    call computes the same rows. `schema` returns the columns of an empty result. Raises
    `InfrastructureError` if another process writes to the folder.
    """
    encode = parquet_encoder(row_group_bytes)
    attempt = "" if is_repeatable else f"-{uuid.uuid4().hex}"
    suffix = f"-{parts.tag}{attempt}.parquet"
    pieces = _complete_pieces(folder, suffix)

    def write(piece: Piece, rows: pa.Table) -> None:
        folder.put(piece.file_name(suffix), encode(encode_tensors(rows)))

    with (
        ThreadPoolExecutor(_PART_UPLOADS, "spotfit-write") as executor,
        closing(parts.read({piece.part for piece in pieces})) as found,
    ):
        pending: deque[Future[None]] = deque()
        for piece, rows in found:
            pending.append(executor.submit(write, piece, rows))
            pieces.add(piece)
            if len(pending) >= _PART_UPLOADS:
                pending.popleft().result()
        for future in pending:
            future.result()
    if not pieces:
        folder.put(_EMPTY_KEY, encode(encode_tensors(empty_table(schema()))))
    _mark_complete(folder, [piece.file_name(suffix) for piece in pieces] or [_EMPTY_KEY])
    return stored_source(folder)


def _complete_pieces(folder: Store, suffix: str) -> set[Piece]:
    """Return the pieces of parts that are written; deletes other files of the folder."""
    found: dict[str, Piece] = {}
    keys = [info.key for info in folder.list()]
    for key in keys:
        match = _PIECE.fullmatch(key.removesuffix(suffix)) if key.endswith(suffix) else None
        if match is not None:
            piece = Piece(int(match[1]), int(match[2] or 0), int(match[3] or 1))
            if piece.number < piece.pieces and piece.file_name(suffix) == key:
                found[key] = piece
    written = Counter((piece.part, piece.pieces) for piece in found.values())
    complete = {
        key: piece
        for key, piece in found.items()
        if written[piece.part, piece.pieces] == piece.pieces
    }
    for key in keys:
        if key not in complete:
            folder.delete(key)
    return {*complete.values()}


# --- Other libraries ------------------------------------------------------------------------------


def export_to(
    read: Callable[[str], Any],
    path: str | Path | None,
    blocks: Iterable[pa.Table],
    *,
    url: Callable[[RootUrl], str] = fsspec_url,
) -> Any:
    """Write Parquet files below `path`, and return what `read` of another library makes of them.

    `url` returns the address as the library writes it. Raises `ConfigError` without a path.
    """
    if path is None:
        raise ConfigError(
            "Another library reads a dataset from files, and no place for them was given.",
            do="Pass path= with the URL of a folder, such as to_dask(path='s3://bucket/folder').",
        )
    folder = open_folder(path)
    options = WriteOptions(mode=SaveMode.CREATE)
    write_files(folder, blocks, "parquet", parquet_encoder(), options)
    return read(url(RootUrl.parse(folder.url)))


def import_library(module: str) -> Any:
    """Return a module of another library. Raises `MissingExtraError` if it is not installed."""
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        raise MissingExtraError(
            f"to_{package}() needs {missing.name!r}, which is not installed.",
            do=f"Run `pip install {package}` in the environment of this script.",
            module=missing.name,
        ) from missing
