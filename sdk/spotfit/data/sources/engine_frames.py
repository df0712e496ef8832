"""Rows of the user's Dask, Spark, Daft, Ray or Modin, which are written once and read as files.

The library writes Parquet files when the dataset is listed. Workers read the files, and need
neither the library nor its cluster. A record beside the files, which is created atomically, names
the complete ones: a later listing with the same key or content reads these.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import msgspec

from spotfit.core.errors import AlreadyExistsError, ConfigError, IntegrityError, NotFoundError
from spotfit.data.captured_values import digest_captured
from spotfit.data.files import FileSet, PathOptions
from spotfit.data.sources.file_source import FormatSource
from spotfit.data.sources.frame_writers import FrameWriter, check_can_write
from spotfit.data.sources.parquet import ParquetFormat
from spotfit.host import log
from spotfit.store.api import Store
from spotfit.store.factory import open_store, with_bucket_region
from spotfit.store.transfer import concurrent_map
from spotfit.store.url import RootUrl, validate_file_key

_ACCESS = ("storage_options", "filesystem", "io_config")
"""Options of how to access the folder, such as credentials, which may change between writes."""
_HASHED_BYTES = 8 * 2**20
"""Read by one request while the content of a file is hashed."""

_run_folder: ContextVar[Store | None] = ContextVar("spotfit-run-folder", default=None)


@contextmanager
def frames_written_in(run: Store) -> Iterator[None]:
    """Write frames without a path of their own below the directory of a run."""
    token = _run_folder.set(run)
    try:
        yield
    finally:
        _run_folder.reset(token)


class WrittenRows(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The record of complete files."""

    folder: str
    """The folder of the files, below that of the record."""
    files: tuple[tuple[str, int], ...]
    """Name and size of each file, in the order of the rows."""


@dataclass(frozen=True, eq=False)
class WrittenFrame:
    """Rows of an object of another library, and where their files are."""

    writer: FrameWriter
    path: str | None = None
    """Folder for the files and their records; None: in the directory of the run."""
    key: str | None = None
    """Name of the rows; None: the hash of their files."""

    def to_source(self) -> FormatSource:
        """Write the rows unless that was done, and return the source of the files.

        Raises `ConfigError` if there is no place for files, or if the library cannot write, and
        `IntegrityError` for a record with names outside of its folder.
        """
        root = self._open_root()
        name = None if self.key is None else self._record_name(self.key)
        rows = None if name is None else self._find_record(root, name)
        if rows is None:
            rows = self._write(root, name)
        self._check_complete(root, rows)
        folder = RootUrl.parse(root.url).join(rows.folder)
        paths = [str(folder.join(name)) for name, _ in rows.files]
        return FormatSource(FileSet.of_paths(paths, PathOptions()), ParquetFormat())

    def _open_root(self) -> Store:
        library, run = self.writer.library, _run_folder.get()
        if self.path is not None:
            root = open_store(self.path, setting=f"The path of from_{library}()")
        elif run is not None:
            root = run.subtree(".spotfit/data")
        else:
            raise ConfigError(
                f"{library} writes the rows of from_{library}() to files, and no place for them "
                "was given.",
                do=f"Pass path='s3://bucket/folder' to from_{library}(). Without it, fit() of a "
                "trainer writes them to the directory of its run.",
            )
        check_can_write(library, RootUrl.parse(root.url))
        return with_bucket_region(root)

    def _record_name(self, key: str) -> str:
        """Return the key, with the hash of options that may change the files. `ConfigError`."""
        options = {name: one for name, one in self.writer.options.items() if name not in _ACCESS}
        if not options:
            return key
        digest = digest_captured(sorted(options.items()))
        if digest is None:
            raise ConfigError(
                f"from_{self.writer.library}(key={key!r}) cannot compare write_options "
                f"{', '.join(sorted(options))} with those of earlier rows: an object in them "
                "cannot be pickled.",
                do="Leave out key=, or pass options that can be pickled.",
            )
        return f"{key}.{digest[:16]}"

    def _write(self, root: Store, name: str | None) -> WrittenRows:
        folder = uuid.uuid4().hex
        log.info("data.frame_write_started", library=self.writer.library, url=root.url)
        try:
            names = self.writer.write(RootUrl.parse(root.url).join(folder))
        except Exception as error:  # the library runs functions of the user
            raise self._write_error(root, f"{type(error).__name__}: {error}") from error
        sizes = _list_files(root, folder)
        ordered = sorted(sizes) if names is None else names
        if not ordered or sizes.keys() != set(ordered):
            expected = " files" if names is None else f" of {len(names)} files"
            raise self._write_error(root, f"this process finds {len(sizes)}{expected} there")
        files = tuple((name, sizes[name]) for name in ordered)
        content = name or _content_hash(root, folder, files)
        return self._commit(root, content, WrittenRows(folder, files))

    def _commit(self, root: Store, content: str, rows: WrittenRows) -> WrittenRows:
        """Create the record of the rows; return the earlier one of the same rows if it exists."""
        try:
            root.create(self._record_key(content), msgspec.json.encode(rows))
        except AlreadyExistsError:
            for name, _ in rows.files:
                root.delete(f"{rows.folder}/{name}")
            earlier = self._find_record(root, content)
            assert earlier is not None
            return earlier
        return rows

    def _find_record(self, root: Store, content: str) -> WrittenRows | None:
        try:
            body = root.get(self._record_key(content))
        except NotFoundError:
            return None
        try:
            rows = msgspec.json.decode(body, type=WrittenRows)
        except msgspec.DecodeError as error:
            raise self._record_error(root, content, str(error)) from error
        try:
            for name in (rows.folder, *(name for name, _ in rows.files)):
                validate_file_key(name)
        except ConfigError as error:  # a name that leads out of the folder
            raise IntegrityError(
                f"{root.url}/{self._record_key(content)} names a file that spotfit has not "
                f"written: {error.message}",
                do="Find out who else writes to this folder. Delete the record, so that the rows "
                "are written again.",
            ) from error
        log.info("data.frame_reused", library=self.writer.library, url=root.url, key=content)
        return rows

    def _record_key(self, content: str) -> str:
        return f"{self.writer.library}-{content}.json"

    def _check_complete(self, root: Store, rows: WrittenRows) -> None:
        if not {*rows.files} <= {*_list_files(root, rows.folder).items()}:
            raise ConfigError(
                f"The files of from_{self.writer.library}() in {root.subtree(rows.folder).url} "
                "were changed or deleted.",
                do="Delete the folder and the record beside it that names it, so that they are "
                "written again.",
            )

    def _record_error(self, root: Store, content: str, reason: str) -> ConfigError:
        return ConfigError(
            f"{root.url}/{self._record_key(content)} is not a record of files: {reason}",
            do="Delete it, so that the rows are written again.",
        )

    def _write_error(self, root: Store, reason: str) -> ConfigError:
        library = self.writer.library
        return ConfigError(
            f"{library} could not write the rows of from_{library}() below {root.url}: {reason}.",
            do=f"Give the processes of {library} access to this folder: they write with their own "
            "credentials, and this process lists the files. Options of the writer, such as "
            "storage_options or filesystem, are in write_options=; another folder is path=.",
        )


def _list_files(root: Store, folder: str) -> dict[str, int]:
    """Return names and sizes of the Parquet files of a folder."""
    return {
        info.key.removeprefix(f"{folder}/"): info.size_bytes
        for info in root.list(folder)
        if info.key.endswith((".parquet", ".parq"))
    }


def _content_hash(root: Store, folder: str, files: Sequence[tuple[str, int]]) -> str:
    """Return the SHA-256 of the bytes of all files, in their order."""

    def hash_file(file: tuple[str, int]) -> str:
        name, size = file
        digest = hashlib.sha256()
        for start in range(0, size, _HASHED_BYTES):
            digest.update(root.get_range(f"{folder}/{name}", start, _HASHED_BYTES))
        return digest.hexdigest()

    return hashlib.sha256("".join(concurrent_map(hash_file, files)).encode()).hexdigest()
