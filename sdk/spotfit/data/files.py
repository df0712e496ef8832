"""The files that paths of the user name, read through the stores of spotfit."""

from __future__ import annotations

import itertools
import posixpath
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from spotfit.core.cached import cached_property
from spotfit.core.errors import (
    ConfigError,
    ConfigTypeError,
    MissingExtraError,
    NotFoundError,
    ObjectChangedError,
)
from spotfit.data.source import DataFile
from spotfit.host import plugins
from spotfit.store.api import ObjectInfo, Store
from spotfit.store.factory import open_store, with_bucket_region
from spotfit.store.filesystem import open_filesystem_store
from spotfit.store.transfer import concurrent_map
from spotfit.store.url import RootUrl

_SETTING = "A path of the dataset"
# Ray's and pyarrow's way to name a public bucket that is read without credentials.
_ANONYMOUS = "anonymous@"
_OWN_SCHEMES = frozenset({"az", "file", "gcs", "gs", "memory", "s3", "s3a"})
_UNSIGNED = {"skip_signature": "true"}
_listing_numbers = itertools.count()


def next_listing() -> int:
    """Return a number that is less than those of all later listings of this process."""
    return next(_listing_numbers)


class PathOptions(NamedTuple):
    """Which files of the paths are read."""

    file_extensions: tuple[str, ...] | None = None
    """Of all files; None: those that the format has, of files in folders."""
    format_extensions: tuple[str, ...] | None = None
    partition_filter: Callable[[list[str]], Sequence[str]] | None = None
    ignore_missing_paths: bool = False


class _Location(NamedTuple):
    """A path of the user: a file, or a folder of files."""

    text: str
    store: Store
    key: str
    """'' is the root of the store."""


@dataclass(frozen=True, eq=False)
class FileSet:
    """Files by path. Immutable; can be pickled, with the credentials of the user's file system."""

    locations: tuple[_Location, ...]
    options: PathOptions

    @classmethod
    def of_paths(
        cls, paths: str | Path | Sequence[str | Path], options: PathOptions, filesystem: Any = None
    ) -> FileSet:
        """Return the files of these paths, which are files or folders. Sends no request.

        With `filesystem`, of fsspec or pyarrow, paths are within it. Raises `ConfigError` for
        invalid paths.
        """
        texts = [paths] if isinstance(paths, str | Path) else list(paths)
        if not texts:
            raise ConfigError("The list of paths is empty.", do="Pass at least one file or folder.")
        for text in texts:
            if not isinstance(text, str | Path):
                raise ConfigTypeError(
                    f"{_SETTING} is a {type(text).__name__}.", do="Pass strings or pathlib.Path."
                )
        stores: dict[str, Store] = {}
        return cls(tuple(_locate(str(text), filesystem, stores) for text in texts), options)

    def list_files(self) -> tuple[DataFile, ...]:
        """Return all files with their versions: paths in their order, files of a folder sorted.

        Files and folders whose names begin with '.' or '_' are skipped in folders. Raises
        `ConfigError` for missing paths, and if no file is left.
        """
        vars(self)["_listing_number"] = next(_listing_numbers)
        found = concurrent_map(self._list_location, self.locations)
        files = [file for files in found for file in files]
        if not files:
            raise ConfigError(
                f"There are no files to read in {self._paths_text()}.",
                do=f"Check the paths{self._filters_text()}. Names that begin with '.' or '_' are "
                "skipped.",
            )
        if self.options.partition_filter is None:
            return tuple(files)
        kept = set(self.options.partition_filter([path_of(file) for file in files]))
        return tuple(file for file in files if path_of(file) in kept)

    def find_changed(self, files: Sequence[DataFile], *, since: int) -> list[DataFile]:
        """Return those of `files` that now have another version, or are missing.

        `since` is from `next_listing()`: files that were listed afterwards are not listed again.
        Raises `ConfigError` as `list_files` does.
        """
        if vars(self).get("_listing_number", -1) > since:
            return []
        listed = {(file.url, file.key): file for file in self.list_files()}
        return [file for file in files if listed.get((file.url, file.key)) != file]

    def read(self, file: DataFile, start: int = 0, length: int | None = None) -> bytes:
        """Return a part of a file. Raises `ConfigError` if it was changed or deleted."""
        return bytes(self.read_view(file, start, length))

    def read_view(
        self, file: DataFile, start: int = 0, length: int | None = None
    ) -> bytes | memoryview:
        """Return a part of a file, if possible without a copy; see `read`."""
        length = file.size_bytes - start if length is None else length
        try:
            body = self._store_of(file).get_range(file.key, start, length, version=file.version)
        except (NotFoundError, ObjectChangedError) as error:
            raise _changed_file_error(file) from error
        if len(body) != length:
            raise _changed_file_error(file)
        return body

    @cached_property
    def _regional_stores(self) -> Mapping[str, Store]:
        """The stores by the URL that was given, with the regions of their buckets."""
        return {
            location.store.url: with_bucket_region(location.store) for location in self.locations
        }

    @cached_property
    def _stores_by_url(self) -> Mapping[str, Store]:
        return {store.url: store for store in self._regional_stores.values()}

    def _store_of(self, file: DataFile) -> Store:
        return self._stores_by_url.get(file.url) or open_store(file.url, setting=_SETTING)

    def _list_location(self, location: _Location) -> list[DataFile]:
        store = self._regional_stores[location.store.url]
        if location.key and not location.text.endswith("/"):
            try:
                found = store.head(location.key)
            except NotFoundError:
                pass  # it may be a folder
            else:
                files = [_to_data_file(store, found)]
                return files if self._is_kept(found.key, is_named=True) else []
        listed = [*store.list(location.key)]
        if not listed and not self.options.ignore_missing_paths:
            raise _missing_path_error(location.text)
        return [
            _to_data_file(store, found)
            for found in _without_folders(listed)
            if not _is_hidden(found.key.removeprefix(location.key))
            and self._is_kept(found.key, is_named=False)
        ]

    def _is_kept(self, key: str, *, is_named: bool) -> bool:
        extensions = self.options.file_extensions
        if extensions is None and not is_named:
            extensions = self.options.format_extensions
        return extensions is None or key.lower().endswith(
            tuple(f".{extension.lower().lstrip('.')}" for extension in extensions)
        )

    def _paths_text(self) -> str:
        first = self.locations[0].text
        others = len(self.locations) - 1
        return f"{first} and {others} other paths" if others else first

    def _filters_text(self) -> str:
        extensions = self.options.file_extensions or self.options.format_extensions
        return f", or pass file_extensions other than {', '.join(extensions)}" if extensions else ""


def path_of(file: DataFile) -> str:
    """Return the path without its scheme, as Ray and pyarrow write it: `bucket/folder/file`."""
    try:
        root = RootUrl.parse(file.url).path
    except ConfigError:  # a file system of the user
        root = file.url.partition("://")[2]
    return f"{root.rstrip('/')}/{file.key}"


def _locate(text: str, filesystem: Any, stores: dict[str, Store]) -> _Location:
    store, key = _open_root(text, filesystem)
    return _Location(text, stores.setdefault(store.url, store), key)


def _open_root(text: str, filesystem: Any) -> tuple[Store, str]:
    """Return the store of the bucket or of the parent folder of a path, and the key in it."""
    if filesystem is not None:
        return _open_in_filesystem(filesystem, text.partition("://")[2] or text)
    scheme, separator, rest = text.partition("://")
    is_anonymous = bool(separator) and rest.startswith(_ANONYMOUS)
    if is_anonymous:
        text = f"{scheme}://{rest.removeprefix(_ANONYMOUS)}"
    try:
        root = RootUrl.parse(text, setting=_SETTING)
    except ConfigError:
        found = _find_fsspec(text)
        if found is None:
            raise
        return _open_in_filesystem(*found)
    return _open_parent(root, _UNSIGNED if is_anonymous else None)


def _open_parent(root: RootUrl, credentials: Mapping[str, str] | None) -> tuple[Store, str]:
    if root.scheme == "file":
        parent, _, name = root.prefix.rpartition("/")
        return open_store(replace(root, prefix=parent)), name
    # One store for all paths in a bucket.
    return open_store(replace(root, prefix=""), credentials=credentials), root.prefix


def _open_in_filesystem(filesystem: Any, path: str) -> tuple[Store, str]:
    from spotfit.store.objects import ObjectStore

    store = open_filesystem_store(filesystem, path)
    if isinstance(store, ObjectStore):
        return _open_parent(RootUrl.parse(store.url), store.credentials)
    parent, name = posixpath.split(path.rstrip("/"))
    return open_filesystem_store(filesystem, parent), name


def _find_fsspec(text: str) -> tuple[Any, str] | None:
    """Return fsspec's file system of a URL whose scheme spotfit does not support itself."""
    scheme, separator, _ = text.partition("://")
    if not separator or scheme in _OWN_SCHEMES:  # what is invalid in their URLs may be a secret
        return None
    try:
        fsspec = plugins.require_module("fsspec.core", extra="s3")
        filesystem, path = fsspec.url_to_fs(text)
    except (MissingExtraError, ImportError, ValueError):  # unknown to fsspec as well
        return None
    return filesystem, path


def _to_data_file(store: Store, found: ObjectInfo) -> DataFile:
    return DataFile(store.url, found.key, found.size_bytes, found.version)


def _without_folders(listed: Sequence[ObjectInfo]) -> list[ObjectInfo]:
    """Drop the empty objects by which some tools mark folders of a bucket."""
    parents = {key for found in listed for key in _parents(found.key)}
    return [found for found in listed if found.size_bytes or found.key not in parents]


def _parents(key: str) -> list[str]:
    parts = key.split("/")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts))]


def _is_hidden(key: str) -> bool:
    return any(part.startswith((".", "_")) for part in key.split("/"))


def _missing_path_error(text: str) -> ConfigError:
    remedy = "Correct the path, or pass ignore_missing_paths=True."
    if "*" in text:
        remedy = "Pass the folder, with file_extensions or partition_filter: '*' is not expanded."
    return ConfigError(f"{text} is neither a file nor a folder with files.", do=remedy)


def _changed_file_error(file: DataFile) -> ConfigError:
    return ConfigError(
        f"{path_of(file)} was changed or deleted after the dataset was listed.",
        do="Write new data to new files, and do not replace files of a dataset that is in use. "
        "Start a new run to read the new content.",
        path=path_of(file),
    )
