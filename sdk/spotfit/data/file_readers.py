"""`read_*`: datasets of files, with the names and arguments of `ray.data`.

Nothing is read until rows, their number or their columns are asked for. Every reader also has the
arguments of `FileOptions`. Paths are files, folders or a list of them: local, `s3://`, `gs://`,
`az://`, or in a `filesystem`; `s3://anonymous@bucket/…` is a public bucket.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import pyarrow as pa
import pyarrow.csv
import pyarrow.json

from spotfit.core.errors import ConfigError
from spotfit.data.dataset import Dataset
from spotfit.data.reader_options import (
    FileOptions,
    Paths,
    file_set,
    read_files,
    refuse,
    shuffled_dataset,
    to_partitioning,
)
from spotfit.data.sources.csv_files import CsvParser
from spotfit.data.sources.images import COLUMN, DecodeImages, find_image_mode
from spotfit.data.sources.json_files import JsonFormat
from spotfit.data.sources.line_files import LineFormat
from spotfit.data.sources.numpy_files import NumpyFormat
from spotfit.data.sources.orc import OrcFormat
from spotfit.data.sources.parquet import ParquetFormat
from spotfit.data.sources.text_files import TextParser
from spotfit.data.sources.tfrecords import TfRecordFormat
from spotfit.data.sources.webdataset import DecodeSamples, WebDatasetFormat
from spotfit.data.sources.whole_files import WholeFileSource

_PARQUET_REMEDIES = {
    "filter": "Call filter(expr=…) on the dataset.",
    "include_row_hash": "Add a column with map_batches().",
    "skip_paths": "Select the files with partition_filter.",
    "catalog": "Pass the paths of the files.",
    "dataset_kwargs": "Pass the other arguments of read_parquet().",
}


class ParquetOptions(FileOptions, total=False):
    """Further arguments of Ray, which are refused; `use_threads` is accepted without effect."""

    filter: Any
    include_row_hash: bool
    skip_paths: Any
    catalog: Any
    dataset_kwargs: Any
    use_threads: bool


def read_parquet(
    paths: Paths,
    *,
    columns: Sequence[str] | None = None,
    tensor_column_schema: Mapping[str, tuple[Any, tuple[int, ...]]] | None = None,
    schema: pa.Schema | None = None,
    **options: Unpack[ParquetOptions],
) -> Dataset:
    """Return the dataset of Parquet files; a unit is a row group.

    Only `columns` are read; None: all. `tensor_column_schema` has element type and shape of binary
    columns whose bytes are tensors. `schema` replaces the types of the files, and adds columns that
    some of them lack. `partitioning` is "hive" if it is not given. Tensors that Ray Data has
    written are read as such. Raises `ConfigError`, also for missing files and columns when the
    dataset is listed.
    """
    others = refuse("read_parquet", options, _PARQUET_REMEDIES)
    others.pop("use_threads", None)
    return read_files(
        "read_parquet",
        paths,
        ParquetFormat(dict(tensor_column_schema or {})),
        {"partitioning": "hive", **others},
        extensions=("parquet", "parq", "pq"),
        columns=columns,
        schema=schema,
    )


IMAGE_EXTENSIONS = ("png", "jpg", "jpeg", "tif", "tiff", "bmp", "gif")
_PICKLE_REMEDY = {"allow_pickle": "Convert the arrays to numbers, or the files to Parquet."}
_TF_SCHEMA_REMEDY = {"tf_schema": "Pass schema=, an Arrow schema of the columns."}
_WEBDATASET_REMEDIES = {
    "fileselect": "Select columns with suffixes.",
    "filerename": "Rename columns with rename_columns().",
    "expand_json": "Take the fields of the column in map().",
}
_COMPRESSED = ("", ".gz", ".br", ".zst", ".lz4", ".bz2")


def read_orc(paths: Paths, **options: Unpack[FileOptions]) -> Dataset:
    """Return the dataset of ORC files; a unit is a stripe."""
    return read_files("read_orc", paths, OrcFormat(), options, extensions=["orc"])


def read_csv(
    paths: Paths,
    *,
    read_options: pyarrow.csv.ReadOptions | None = None,
    parse_options: pyarrow.csv.ParseOptions | None = None,
    convert_options: pyarrow.csv.ConvertOptions | None = None,
    arrow_open_stream_args: Mapping[str, Any] | None = None,
    **options: Unpack[FileOptions],
) -> Dataset:
    """Return the dataset of CSV files, with pyarrow's options; a unit is about 8 MiB of lines.

    The files are parsed once when the dataset is listed, which finds the types of the columns; a
    column with values of several types is text. `partitioning` is "hive" if it is not given.
    """
    parser = CsvParser(
        read_options or pyarrow.csv.ReadOptions(),
        parse_options or pyarrow.csv.ParseOptions(),
        convert_options or pyarrow.csv.ConvertOptions(),
    )
    return read_files(
        "read_csv",
        paths,
        LineFormat(parser, _compression("read_csv", arrow_open_stream_args)),
        {"partitioning": "hive", **options},
    )


def read_json(
    paths: Paths,
    *,
    lines: bool = False,
    read_options: pyarrow.json.ReadOptions | None = None,
    parse_options: pyarrow.json.ParseOptions | None = None,
    arrow_open_stream_args: Mapping[str, Any] | None = None,
    **options: Unpack[FileOptions],
) -> Dataset:
    """Return the dataset of JSON files: one object per line, or a list of objects as a document.

    With `lines`, files have one object per line only. A unit is about 8 MiB of lines, or a whole
    document. `read_options` has no effect. `partitioning` is "hive" if it is not given.
    """
    compression = _compression("read_json", arrow_open_stream_args)
    parse = parse_options or pyarrow.json.ParseOptions()
    return read_files(
        "read_json",
        paths,
        JsonFormat(lines, parse, compression),
        {"partitioning": "hive", **options},
        extensions=[f"{kind}{end}" for kind in ("json", "jsonl") for end in _COMPRESSED],
    )


def read_text(
    paths: Paths,
    *,
    encoding: str = "utf-8",
    drop_empty_lines: bool = True,
    arrow_open_stream_args: Mapping[str, Any] | None = None,
    **options: Unpack[FileOptions],
) -> Dataset:
    """Return the dataset of the lines of text files, in the column `text`."""
    parser = TextParser(encoding, drop_empty_lines)
    compression = _compression("read_text", arrow_open_stream_args)
    return read_files("read_text", paths, LineFormat(parser, compression), options)


def read_numpy(
    paths: Paths, *, allow_pickle: bool = False, **options: Unpack[FileOptions]
) -> Dataset:
    """Return the dataset of `.npy` files: the rows of their arrays in the column `data`.

    Raises `ConfigError` for `allow_pickle`: a pickle runs code when it is loaded.
    """
    refuse("read_numpy", {"allow_pickle": allow_pickle}, _PICKLE_REMEDY)
    return read_files("read_numpy", paths, NumpyFormat(), options, extensions=["npy"])


def read_binary_files(
    paths: Paths,
    *,
    arrow_open_stream_args: Mapping[str, Any] | None = None,
    **options: Unpack[FileOptions],
) -> Dataset:
    """Return the dataset of whole files, in the column `bytes`; a unit is at most 64 files."""
    if _compression("read_binary_files", arrow_open_stream_args):
        raise ConfigError(
            "read_binary_files() does not decompress files.", do="Use map() to decompress `bytes`."
        )
    source = WholeFileSource(
        file_set("read_binary_files", paths, options, None),
        column="bytes",
        partitioning=to_partitioning(options.get("partitioning")),
        include_paths=bool(options.get("include_paths")),
    )
    return shuffled_dataset(source, options.get("shuffle"))


def read_images(
    paths: Paths,
    *,
    size: tuple[int, int] | None = None,
    mode: str | None = None,
    arrow_open_file_args: Mapping[str, Any] | None = None,
    **options: Unpack[FileOptions],
) -> Dataset:
    """Return the dataset of images as arrays (height, width[, channels]) in the column `image`.

    Images are resized to `size` (height, width) and converted to `mode` of Pillow, for example
    "RGB". With a size they are tensors, else lists. Without a mode, all must have that of the
    first. Images are decoded when batches are made, and are read as files until then. Needs the
    extra `images`. Raises `ConfigError` and `MissingExtraError`.
    """
    if size is not None and (len(size) != 2 or min(size) <= 0):
        raise ConfigError(
            f"read_images(size={size!r}) is not a size.", do="Pass (height, width) in pixels."
        )
    source = WholeFileSource(
        file_set("read_images", paths, options, IMAGE_EXTENSIONS),
        column=COLUMN,
        partitioning=to_partitioning(options.get("partitioning")),
        include_paths=True,  # for errors
        probe=find_image_mode,
    )
    decode = DecodeImages(
        None if size is None else (int(size[0]), int(size[1])),
        mode,
        keep_paths=bool(options.get("include_paths")),
    )
    return shuffled_dataset(source, options.get("shuffle")).with_transform(decode)


def read_tfrecords(
    paths: Paths,
    *,
    tf_schema: Any = None,
    schema: pa.Schema | None = None,
    arrow_open_stream_args: Mapping[str, Any] | None = None,
    **options: Unpack[FileOptions],
) -> Dataset:
    """Return the dataset of TFRecord files of `tf.train.Example` messages, without TensorFlow.

    Columns are bytes, float32 and int64; those with one value in each of the first 1000 records of
    a file are values, others lists. `schema` states other columns and types. All headers are read
    when the dataset is listed. Raises `ConfigError` for `tf_schema`.
    """
    refuse("read_tfrecords", {"tf_schema": tf_schema}, _TF_SCHEMA_REMEDY)
    tf_format = TfRecordFormat(_compression("read_tfrecords", arrow_open_stream_args))
    return read_files(
        "read_tfrecords",
        paths,
        tf_format,
        options,
        extensions=[f"{kind}{end}" for kind in ("tfrecord", "tfrecords") for end in _COMPRESSED],
        schema=schema,
    )


def read_webdataset(
    paths: Paths,
    *,
    decoder: bool | None = True,
    suffixes: Sequence[str] | None = None,
    arrow_open_stream_args: Mapping[str, Any] | None = None,
    fileselect: Any = None,
    filerename: Any = None,
    verbose_open: bool = False,
    expand_json: bool = False,
    **options: Unpack[FileOptions],
) -> Dataset:
    """Return the dataset of WebDataset's tar files: `__key__`, a column per extension, `__url__`.

    Files with the extensions `suffixes` are read; None: all. Known extensions are decoded, unless
    `decoder` is None or False: text, `cls` numbers, images, JSON, NumPy arrays and MessagePack. All
    headers are read when the dataset is listed. `verbose_open` has no effect.
    """
    refused = {"fileselect": fileselect, "filerename": filerename, "expand_json": expand_json}
    refuse("read_webdataset", refused, _WEBDATASET_REMEDIES)
    if not (decoder is None or isinstance(decoder, bool)) or callable(suffixes):
        raise ConfigError(
            "read_webdataset() does not call functions.",
            do="Pass decoder=None and call map() on the dataset; pass suffixes as a list.",
        )
    tar_format = WebDatasetFormat(
        None if suffixes is None else tuple(suffixes),
        _compression("read_webdataset", arrow_open_stream_args),
    )
    dataset = read_files(
        "read_webdataset", paths, tar_format, options, extensions=("tar", "tar.gz", "tgz")
    )
    return dataset.with_transform(DecodeSamples()) if decoder else dataset


def _compression(function: str, stream_options: Mapping[str, Any] | None) -> str | None:
    options = dict(stream_options or {})
    compression = options.pop("compression", None)
    options.pop("buffer_size", None)
    if options:
        raise ConfigError(
            f"{function}(arrow_open_stream_args=…) has unsupported keys: {', '.join(options)}.",
            do="Pass only 'compression'.",
        )
    return None if compression in (None, "detect") else str(compression)
