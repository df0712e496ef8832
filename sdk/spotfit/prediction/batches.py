"""Batches of rows: numpy columns or pandas DataFrames, read from and written to files.

Parquet, CSV and JSON lines need pyarrow, which is imported on use like numpy and pandas.
"""

from __future__ import annotations

import io
import posixpath
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

from spotfit.core.errors import ConfigError, IntegrityError
from spotfit.core.input_checks import did_you_mean, is_dataframe
from spotfit.host.plugins import require_module

if TYPE_CHECKING:
    import numpy as np

Batch: TypeAlias = Any
"""A dictionary of numpy arrays of equal length, by column name, or a pandas DataFrame."""
BatchFormat: TypeAlias = Literal["numpy", "pandas"]
FileFormat: TypeAlias = Literal["parquet", "csv", "jsonl", "npy", "npz"]

EXTRA = "predict"
"""The extra of spotfit that installs numpy, pandas and pyarrow."""
ARRAY_COLUMN = "data"
"""Column name of a plain numpy array, as in Ray Data."""
OUTPUT_FORMATS: Mapping[str, FileFormat] = {".parquet": "parquet", ".jsonl": "jsonl", ".npz": "npz"}
_FORMATS: Mapping[str, FileFormat] = {
    **OUTPUT_FORMATS,
    ".csv": "csv",
    ".json": "jsonl",
    ".ndjson": "jsonl",
    ".npy": "npy",
}
_ARROW_FORMATS = ("parquet", "csv", "jsonl")


def file_format(name: str) -> FileFormat:
    """Return the format of a file by the suffix of its name. Raises `ConfigError` if unknown."""
    suffix = posixpath.splitext(name)[1].lower()
    if suffix not in _FORMATS:
        raise ConfigError(
            f"The suffix of the input file {name!r} does not select a format.",
            do=f"{did_you_mean(suffix, _FORMATS)} For other files, pass their names as inputs= and "
            "a function that reads one as read=.",
        )
    return _FORMATS[suffix]


def is_readable_file(name: str) -> bool:
    """Return whether the suffix of a file name is that of a known format."""
    return posixpath.splitext(name)[1].lower() in _FORMATS


def require_numpy() -> Any:
    """Import and return numpy. Raises `MissingExtraError`."""
    return require_module("numpy", extra=EXTRA)


def require_packages(
    *, reads: Collection[FileFormat], writes: FileFormat, batch_format: BatchFormat
) -> None:
    """Import the packages that read and write these formats. Raises `MissingExtraError`."""
    require_numpy()
    if batch_format == "pandas":
        require_module("pandas", extra=EXTRA)
    # JSON lines are written without pyarrow, and read with it.
    if writes == "parquet" or not set(reads).isdisjoint(_ARROW_FORMATS):
        require_module("pyarrow", extra=EXTRA)


# --- rows -----------------------------------------------------------------------------------------


def check_batch(value: Any, *, source: str) -> Batch:
    """Return `value` as a batch; a plain array becomes the column "data".

    `source` names its origin in the error, such as "The predictor". Raises `ConfigError` if it is
    no batch, or its columns have different lengths.
    """
    numpy = require_numpy()
    if is_dataframe(value):
        return value
    if isinstance(value, numpy.ndarray):
        value = {ARRAY_COLUMN: value}
    if not isinstance(value, Mapping) or not value:
        raise ConfigError(
            f"{source} returned a {type(value).__name__}, which is not a batch.",
            do="Return a dictionary of numpy arrays by column name, a numpy array, or a pandas "
            "DataFrame.",
        )
    columns = {str(name): numpy.asarray(column) for name, column in value.items()}
    lengths = {name: len(column) if column.ndim else -1 for name, column in columns.items()}
    if len(set(lengths.values())) > 1 or -1 in lengths.values():
        raise ConfigError(
            f"{source} returned columns of different lengths, or values without rows: {lengths}.",
            do="Return one value per row in each column.",
        )
    return columns


def row_count(batch: Batch) -> int:
    """Return the number of rows."""
    return len(batch) if is_dataframe(batch) else len(next(iter(batch.values()), ()))


def slice_rows(batch: Batch, start: int, stop: int) -> Batch:
    """Return the rows from `start` to before `stop`, as a view where possible."""
    if is_dataframe(batch):
        return batch.iloc[start:stop]
    return {name: column[start:stop] for name, column in batch.items()}


def split_rows(batch: Batch, size: int | None) -> Iterator[Batch]:
    """Yield batches of `size` rows, the last one smaller; with None one of all rows.

    Yields one batch without rows for a batch without rows, so that outputs have their columns.
    """
    rows = row_count(batch)
    if size is None or rows <= size:
        yield batch
        return
    for start in range(0, rows, size):
        yield slice_rows(batch, start, start + size)


def concatenate(batches: Sequence[Batch]) -> Batch:
    """Return one batch with the rows of all. Raises `ConfigError` if their columns differ."""
    first = batches[0]
    if len(batches) == 1:
        return first
    names = _column_names(first)
    for batch in batches[1:]:
        if _column_names(batch) != names or is_dataframe(batch) != is_dataframe(first):
            raise ConfigError(
                f"The predictor returned columns {_column_names(batch)} after {names}.",
                do="Return the same columns for each batch.",
            )
    if is_dataframe(first):
        return require_module("pandas", extra=EXTRA).concat(batches, ignore_index=True)
    numpy = require_numpy()
    return {name: numpy.concatenate([batch[name] for batch in batches]) for name in names}


def to_batch_format(batch: Batch, batch_format: BatchFormat) -> Batch:
    """Return the batch as numpy columns, or as a DataFrame for "pandas"."""
    if is_dataframe(batch):
        return batch if batch_format == "pandas" else _frame_to_columns(batch)
    if batch_format == "numpy":
        return batch
    pandas = require_module("pandas", extra=EXTRA)
    # An array with more dimensions becomes a column of arrays.
    return pandas.DataFrame(
        {name: column if column.ndim == 1 else list(column) for name, column in batch.items()}
    )


def _frame_to_columns(frame: Any) -> dict[str, np.ndarray]:
    numpy = require_numpy()
    columns = {str(name): frame[name].to_numpy() for name in frame.columns}
    return {name: _stack_arrays(column, numpy) for name, column in columns.items()}


def _stack_arrays(column: np.ndarray, numpy: Any) -> np.ndarray:
    """Return a column of arrays of equal shape as one array, other columns unchanged."""
    is_nested = column.dtype == object and all(isinstance(one, numpy.ndarray) for one in column)
    if not is_nested or not len(column) or len({one.shape for one in column}) > 1:
        return column
    stacked: np.ndarray = numpy.stack(list(column))
    return stacked


def select_columns(batch: Batch, columns: Sequence[str] | None, *, argument: str) -> Batch:
    """Return a batch with these columns only; all for None. Raises `ConfigError` for others."""
    if columns is None:
        return batch
    known = _column_names(batch)
    if missing := [name for name in columns if name not in known]:
        raise ConfigError(
            f"{argument} names {', '.join(missing)}, but the rows have {', '.join(known)}.",
            do=f"Correct {argument}.",
        )
    if is_dataframe(batch):
        return batch[list(columns)]
    return {name: batch[name] for name in columns}


def _column_names(batch: Batch) -> list[str]:
    return [str(name) for name in (batch.columns if is_dataframe(batch) else batch)]


# --- files ----------------------------------------------------------------------------------------


def decode_file(body: bytes, file_format: FileFormat, batch_format: BatchFormat) -> Batch:
    """Return the rows of a file as a batch.

    Raises `IntegrityError` for a file that is not of its format, and `MissingExtraError`. Nothing
    is unpickled: numpy files with objects are refused.
    """
    if file_format in _ARROW_FORMATS:
        return _decode_table(body, file_format, batch_format)
    numpy = require_numpy()
    try:
        loaded = numpy.load(io.BytesIO(body), allow_pickle=False)
        columns = {ARRAY_COLUMN: loaded} if file_format == "npy" else dict(loaded)
    except (ValueError, OSError, EOFError) as error:
        raise _not_of_format_error(file_format, error) from error
    return to_batch_format(check_batch(columns, source="A numpy file"), batch_format)


def _decode_table(body: bytes, file_format: FileFormat, batch_format: BatchFormat) -> Batch:
    arrow = require_module("pyarrow", extra=EXTRA)
    try:
        match file_format:
            case "parquet":
                reader = require_module("pyarrow.parquet", extra=EXTRA)
                table = reader.read_table(arrow.BufferReader(body))
            case "csv":
                table = require_module("pyarrow.csv", extra=EXTRA).read_csv(io.BytesIO(body))
            case _:
                table = require_module("pyarrow.json", extra=EXTRA).read_json(io.BytesIO(body))
    except arrow.ArrowInvalid as error:
        raise _not_of_format_error(file_format, error) from error
    if batch_format == "pandas":
        return table.to_pandas()
    from spotfit.data.formats.column_arrays import column_to_numpy

    numpy = require_numpy()
    return {
        name: _stack_arrays(column_to_numpy(table.column(name)), numpy)
        for name in table.column_names
    }


def _not_of_format_error(file_format: str, error: Exception) -> IntegrityError:
    return IntegrityError(
        f"The content of the file is not {file_format}: {error}",
        do="Correct the file or its name. numpy files must not contain Python objects.",
    )


def encode_file(batch: Batch, file_format: FileFormat) -> bytes:
    """Return the batch as a file. Equal batches give equal bytes with equal package versions.

    Raises `ConfigError` for a column that the format cannot hold, and `MissingExtraError`.
    """
    match file_format:
        case "parquet":
            return _encode_parquet(batch)
        case "jsonl":
            return _encode_json_lines(batch)
        case _:
            return _encode_npz(to_batch_format(batch, "numpy"))


def _encode_parquet(batch: Batch) -> bytes:
    arrow = require_module("pyarrow", extra=EXTRA)
    parquet = require_module("pyarrow.parquet", extra=EXTRA)
    sink = io.BytesIO()
    try:
        if is_dataframe(batch):
            table = arrow.Table.from_pandas(batch, preserve_index=False)
        else:
            table = arrow.table({name: _to_arrow(column) for name, column in batch.items()})
        parquet.write_table(table, sink)
    except (arrow.ArrowException, TypeError) as error:
        raise _unsupported_column_error("parquet", error) from error
    return sink.getvalue()


def _to_arrow(column: np.ndarray) -> Any:
    arrow = require_module("pyarrow", extra=EXTRA)
    if column.ndim == 1:
        return arrow.array(column)
    # Lists of fixed size keep the shape of the rows.
    inner = _to_arrow(column.reshape(-1, *column.shape[2:]))
    return arrow.FixedSizeListArray.from_arrays(inner, column.shape[1])


def _encode_json_lines(batch: Batch) -> bytes:
    names = _column_names(batch)
    columns = [
        _to_python(batch[name]) for name in (batch.columns if is_dataframe(batch) else batch)
    ]
    rows = [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
    try:
        return msgspec.json.Encoder(enc_hook=_to_json).encode_lines(rows)
    except TypeError as error:
        raise _unsupported_column_error("jsonl", error) from error


def _to_python(column: Any) -> list[Any]:
    # Times of numpy would become integers.
    is_time = getattr(column.dtype, "kind", "") in "mM"
    values: list[Any] = (column.astype(str) if is_time else column).tolist()
    return values


def _to_json(value: Any) -> Any:
    """Return arrays and numpy scalars in cells as Python values."""
    convert = getattr(value, "tolist", None)
    if convert is None:
        raise TypeError(f"values of type {type(value).__name__} have no form in JSON")
    return convert()


def _encode_npz(columns: Mapping[str, np.ndarray]) -> bytes:
    numpy = require_numpy()
    sink = io.BytesIO()
    # numpy.savez takes columns as keywords, so that one of its own could not be a column.
    with zipfile.ZipFile(sink, "w") as archive:
        for name, column in columns.items():
            try:
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    numpy.lib.format.write_array(file, column, allow_pickle=False)
            except ValueError as error:
                raise _unsupported_column_error("npz", error) from error
    return sink.getvalue()


def _unsupported_column_error(file_format: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"The predictions cannot be written as {file_format}: {error}",
        do="Return numbers, text, or arrays of equal shape in each column, or set another "
        "output_format=.",
    )


def count_rows(body: bytes, file_format: FileFormat) -> int:
    """Return the number of rows of an output file."""
    if file_format == "jsonl":
        return body.count(b"\n")
    if file_format == "parquet":
        arrow = require_module("pyarrow", extra=EXTRA)
        reader = require_module("pyarrow.parquet", extra=EXTRA)
        rows: int = reader.read_metadata(arrow.BufferReader(body)).num_rows
        return rows
    return row_count(decode_file(body, file_format, "numpy"))
