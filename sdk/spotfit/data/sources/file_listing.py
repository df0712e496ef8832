"""What files contain, by inspecting them once: several at a time, and not again in later listings.

Results are kept in the user's cache directory, by format and by address, size and version of each
file. A process without this cache inspects the files again, with the same result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

import msgspec
import pyarrow as pa

from spotfit.data.files import FileSet
from spotfit.data.progress import byte_progress
from spotfit.data.source import DataFile
from spotfit.data.sources.file_format import FileContent, FileFormat, FileUnit, OpenFile
from spotfit.host import log, machine
from spotfit.host.user_cache import prune_cached, read_cached, write_cached
from spotfit.store.transfer import concurrent_map

_LISTING_VERSION = 2
"""Must be increased when a format finds other units, sizes or columns in the same file."""
_MIN_CACHED_BYTES = 8 * 2**20
"""Inspecting smaller files takes less time than is worth a file in the cache."""
_CACHED_LISTINGS = 200
_LOGGED_BYTES = 2**30
"""Files of this size in total are reported when their inspection begins, which takes a while."""
_FOLDER = "listings"

_Contents = Mapping[DataFile, FileContent]


def inspect_files(
    paths: FileSet, file_format: FileFormat, files: Sequence[DataFile]
) -> list[FileContent]:
    """Return what each file contains. Raises `ConfigError` if one of them has another format."""
    name = _index_name(paths, file_format)
    total_bytes = sum(file.size_bytes for file in files)
    known = _read_index(name) if total_bytes >= _MIN_CACHED_BYTES else {}
    missing = [file for file in dict.fromkeys(files) if file not in known]
    contents = {**known, **_inspect(paths, file_format, missing)}
    if sum(file.size_bytes for file in missing) >= _MIN_CACHED_BYTES:
        _write_index(name, {file: contents[file] for file in files if file.version})
    return [contents[file] for file in files]


def _inspect(paths: FileSet, file_format: FileFormat, files: Sequence[DataFile]) -> _Contents:
    if not files:
        return {}
    total_bytes = sum(file.size_bytes for file in files)
    if total_bytes >= _LOGGED_BYTES:
        log.info("data.files_inspected", files=len(files), total_bytes=total_bytes)
    # A single large file is decoded by several threads, of several files each by one.
    threads = machine.cpu_count() // len(files)
    with byte_progress(total_bytes, "Listing files") as advance:

        def inspect(file: DataFile) -> FileContent:
            progress = _FileProgress(file.size_bytes, advance)
            opened = OpenFile(paths, file, threads if threads > 1 else 0, progress.advance)
            content = file_format.inspect(opened)
            progress.advance(file.size_bytes)
            return content

        return dict(zip(files, concurrent_map(inspect, files), strict=True))


class _FileProgress:
    """Reports the bytes of one file, each once."""

    def __init__(self, size_bytes: int, report: Callable[[int], None]) -> None:
        self._remaining_bytes = size_bytes
        self._report = report

    def advance(self, size_bytes: int) -> None:
        step = min(size_bytes, self._remaining_bytes)
        self._remaining_bytes -= step
        self._report(step)


# --- Cache ----------------------------------------------------------------------------------------


class _CachedFile(msgspec.Struct, array_like=True, frozen=True):
    file: DataFile
    schema: int
    """Index into the schemas."""
    units: tuple[FileUnit, ...]


class _Index(msgspec.Struct, frozen=True):
    schemas: tuple[bytes, ...]
    """In the IPC format of Arrow."""
    files: tuple[_CachedFile, ...]


def _index_name(paths: FileSet, file_format: FileFormat) -> str:
    locations = sorted({(location.store.url, location.key) for location in paths.locations})
    # Another version of pyarrow may find other types in the same values.
    content = repr((_LISTING_VERSION, pa.__version__, file_format.identity, locations))
    return f"{_FOLDER}/{hashlib.sha256(content.encode()).hexdigest()[:32]}.json"


def _read_index(name: str) -> _Contents:
    body = read_cached(name)
    if body is None:
        return {}
    try:
        index = msgspec.json.decode(body, type=_Index)
        schemas = [pa.ipc.read_schema(pa.py_buffer(schema)) for schema in index.schemas]
        return {one.file: FileContent(schemas[one.schema], one.units) for one in index.files}
    except (msgspec.DecodeError, pa.ArrowException, IndexError, OSError) as error:
        log.debug("data.listing_not_cached", file=name, reason=str(error))
        return {}


def _write_index(name: str, contents: _Contents) -> None:
    schemas: dict[bytes, int] = {}

    def schema_index(schema: pa.Schema) -> int:
        return schemas.setdefault(schema.serialize().to_pybytes(), len(schemas))

    files = tuple(
        _CachedFile(file, schema_index(content.schema), tuple(content.units))
        for file, content in contents.items()
    )
    if write_cached(name, msgspec.json.encode(_Index(tuple(schemas), files))):
        prune_cached(_FOLDER, keep=_CACHED_LISTINGS)
