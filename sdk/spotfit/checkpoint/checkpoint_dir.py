"""`Checkpoint`, the user's handle of a checkpoint: a directory of files, local or in a bucket.

Temporary directories that are filled once per node and shared by several processes.

File locks (flock) coordinate the processes: the kernel releases the lock of a killed process, so
a crash never blocks the others. Locks also exclude two blocks of one process from each other,
because each opens the lock file itself. Windows has no flock, and no workers that could share a
directory: there every block has a directory of its own.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec

from spotfit.checkpoint.reader import SavedState, open_snapshot_folder
from spotfit.core.codec import DECODE_ERRORS
from spotfit.core.errors import (
    CheckpointNotFoundError,
    ConfigError,
    IntegrityError,
    NotFoundError,
    StorePermissionError,
)
from spotfit.host import system
from spotfit.store.api import Store
from spotfit.store.factory import open_store, to_arrow_filesystem
from spotfit.store.filesystem import open_filesystem_store
from spotfit.store.transfer import FileRecord, content_differs, download_tree
from spotfit.store.url import RootUrl, validate_key

if sys.platform != "win32":
    import fcntl

# --- Temporary directories ------------------------------------------------------------------------


@contextmanager
def shared_directory(directory: Path, fill: Callable[[Path], None]) -> Iterator[Path]:
    """Yield `directory`, filled by exactly one of its readers and removed by the last.

    For `Checkpoint.as_directory`: readers are all blocks, of any process on this machine, that pass
    the same path. Its parent must exist; the lock files are created there. Blocks while another
    process fills the directory.

    `fill` writes into the directory that it is passed (`<directory>.part`), which may hold the
    remains of a killed process. If it raises, the exception propagates, `directory` does not
    appear, and the next reader calls `fill` again. On Windows each reader has a directory of its
    own beside `directory`.
    """
    if sys.platform == "win32":
        with tempfile.TemporaryDirectory(
            prefix=f"{directory.name}.", dir=directory.parent, ignore_cleanup_errors=True
        ) as own:
            fill(Path(own))
            yield Path(own)
        return
    while True:
        lock = _lock_file(_reader_lock_path(directory), fcntl.LOCK_SH)
        if directory.is_dir():
            break
        os.close(lock)
        # Then again: the last reader may remove the directory before this process locks it.
        _fill_exclusively(directory, fill)
    try:
        yield directory
    finally:
        try:
            # Fails while another reader holds its lock: the last one removes the directory.
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
                _reader_lock_path(directory).unlink(missing_ok=True)
        finally:
            os.close(lock)


def fill_once(target: Path, lock_folder: Path, fill: Callable[[Path], None]) -> None:
    """Call `fill(target)`, unless another process finishes doing so during this call.

    For `Checkpoint.to_directory`. Waits for another process of this machine that fills the same
    target, and fills the target itself if that one fails. A call that starts later fills it again.
    An exception of `fill` propagates and may leave the target incomplete. `lock_folder` must exist
    and be private to this user; a small lock file per target remains in it. On Windows it does not
    wait and always fills the target.
    """
    if sys.platform == "win32":
        return fill(target)
    name = hashlib.sha256(os.fsencode(target)).hexdigest()[:32]
    lock = os.open(lock_folder / f"{name}.filling", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # The lock file counts completed fills. A count that grew while this process waited means
        # that the target is as new as the call; an unchanged one that it may be outdated.
        count_before = _fill_count(lock)
        fcntl.flock(lock, fcntl.LOCK_EX)
        count = _fill_count(lock)
        if count == count_before:
            fill(target)
            os.pwrite(lock, f"{count + 1}".encode(), 0)
    finally:
        os.close(lock)


def _fill_count(lock: int) -> int:
    return int(os.pread(lock, 32, 0) or b"0")


def private_folder(parent: Path) -> Path:
    """Return a folder below `parent` that only this user can access, and create it if absent.

    `parent` is the system's directory for temporary files; the folder is for example
    `/tmp/spotfit-checkpoints-1000`, with the user's number. Raises `StorePermissionError` if the
    name exists but is not such a folder. On Windows `parent` itself is private to the user.
    """
    if sys.platform == "win32":
        folder = parent / "spotfit-checkpoints"
        folder.mkdir(exist_ok=True)
        return folder
    folder = parent / f"spotfit-checkpoints-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    # /tmp is shared: another user may have created the name first, also as a link (hence lstat).
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise StorePermissionError(
            f"The path {folder} is not a directory that only user {os.getuid()} can access: other "
            "users could change checkpoints in it.",
            do=f"Remove {folder}, or set TMPDIR to a directory of your own.",
        )
    return folder


def _fill_exclusively(directory: Path, fill: Callable[[Path], None]) -> None:
    # A lock apart from the readers' lock: a process that waits for the directory to be filled
    # must not wait until a reader is done with it.
    part = directory.with_name(f"{directory.name}.part")
    fill_lock_path = directory.with_name(f"{directory.name}.fill")
    lock = _lock_file(fill_lock_path, fcntl.LOCK_EX)
    try:
        if not directory.is_dir():
            part.mkdir(parents=True, exist_ok=True)
            fill(part)
            part.rename(directory)  # atomic: readers see no directory or a complete one
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        _reader_lock_path(directory).unlink(missing_ok=True)
        raise
    finally:
        # Unlinked while it is locked: `_lock_file` of a waiting process detects that.
        fill_lock_path.unlink(missing_ok=True)
        os.close(lock)


def _lock_file(path: Path, operation: int) -> int:
    """Open and lock the file that is at `path` once the lock is held."""
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, operation)
        # The previous owner may have unlinked the file while this process waited: then a lock on
        # it excludes no one who opens the path now.
        with suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(lock)):
                return lock
        os.close(lock)


def _reader_lock_path(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.lock")


# Ray's name and format: checkpoints can be moved between the two libraries.
METADATA_FILE = ".metadata.json"
DEFAULT_METADATA_FILE = ".default_metadata.json"
"""Metadata that spotfit has added, which apply if the user's metadata have none of their keys."""
_metadata_decoder = msgspec.json.Decoder(dict[str, Any])
# Methods of `ray.train.Checkpoint` in earlier versions of Ray, and what replaces them.
_REMOVED_METHODS = {
    "from_dict": "write a file into a directory and use Checkpoint.from_directory(directory)",
    "to_dict": "read the files of the checkpoint: with checkpoint.as_directory() as directory",
    "from_bytes": "write a file into a directory and use Checkpoint.from_directory(directory)",
    "to_bytes": "read the files of the checkpoint: with checkpoint.as_directory() as directory",
    "from_uri": "use Checkpoint(uri)",
    "to_uri": "use checkpoint.path and checkpoint.filesystem",
    "uri": "use checkpoint.path and checkpoint.filesystem",
    "get_internal_representation": "use checkpoint.path and checkpoint.filesystem",
    "get_preprocessor": "use spotfit.data.preprocessors.preprocessor_of_metadata("
    "checkpoint.get_metadata())",
    "set_preprocessor": "use checkpoint.update_metadata("
    "spotfit.data.preprocessors.checkpoint_metadata(preprocessor))",
}


class StorageLocation(NamedTuple):
    """A path in a file system that the user passed."""

    path: str
    filesystem: Any


class _RemovedMethodsMeta(type):
    """Explains removed methods that are looked up on the class, such as `Checkpoint.from_dict`."""

    def __getattr__(cls, name: str) -> Any:
        raise _missing_attribute_error(cls.__name__, name)


class Checkpoint(metaclass=_RemovedMethodsMeta):
    """A directory of files that a training function reported, or is about to.

    `path` is its folder without a scheme: an absolute local path, or 'bucket/folder'. A checkpoint
    can be pickled, and read on any machine with access to its storage.
    """

    path: str

    def __init__(self, path: str | os.PathLike[str], filesystem: Any = None) -> None:
        """Refer to the folder at `path`: an absolute local path or URL, or a path in `filesystem`.

        For example `"s3://bucket/run/checkpoint_000001"`, or with a `filesystem` from pyarrow or
        fsspec, or a `Store`, `"bucket/run/checkpoint_000001"`. Reads nothing, so the folder may be
        missing. Raises `ConfigError` if `path` is relative, a whole bucket or empty.
        """
        text = os.fspath(path)
        self._user_filesystem = filesystem
        self._expected_files: tuple[FileRecord, ...] | None = None
        # Unknown contents may change, so each object downloads its own copy.
        self._cache_id = system.new_secret_bytes(16).hex()
        if filesystem is None:
            if "://" not in text and not text.startswith("~") and not Path(text).is_absolute():
                raise ConfigError(
                    f"Checkpoint({text!r}): a relative path has a different meaning on every "
                    "machine.",
                    do="Pass an absolute path or a URL, or use Checkpoint.from_directory(path).",
                )
            root = RootUrl.parse(text, setting="Checkpoint(path)")
            if not root.prefix:
                raise ConfigError(
                    f"Checkpoint({text!r}) is a bucket, not a folder in a bucket.",
                    do="Pass the folder of the checkpoint: "
                    f"'{text.rstrip('/')}/run/checkpoint_000001'.",
                )
            self.path = root.path
            # The parent is the root of the store: only then is the folder a key in it.
            self._store: Store = open_store(replace(root, prefix=posixpath.dirname(root.prefix)))
            self._folder = posixpath.basename(root.path)
        else:
            self.path = text.rstrip("/")
            parent, self._folder = posixpath.split(self.path)
            if not self._folder:
                raise ConfigError(
                    f"Checkpoint({text!r}) names no folder: the path is empty.",
                    do="Pass the path of the checkpoint's folder within the file system: "
                    "'bucket/run/checkpoint_000001'.",
                )
            if hasattr(filesystem, "get_range") and hasattr(filesystem, "subtree"):  # a Store
                self._store = filesystem.subtree(parent) if parent else filesystem
            else:
                self._store = open_filesystem_store(filesystem, parent)

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Self:
        """Return a checkpoint of that local directory. Nothing is copied until it is reported.

        A relative path is resolved now, against the current directory. The directory may be
        missing: if it still is when it is reported, the upload fails with
        `CheckpointNotFoundError`, which is a FileNotFoundError.
        """
        return cls(Path(path).expanduser().absolute())

    @classmethod
    def from_store(
        cls,
        store: Store,
        folder: str,
        *,
        files: Sequence[FileRecord] | None = None,
        location: StorageLocation | None = None,
    ) -> Self:
        """Return the checkpoint in that folder of a run's store, for example `"checkpoint_000001"`.

        Called by spotfit's own processes; reads nothing. With `files` the checkpoint consists of
        those, which are verified when they are read, and all processes of a node share one
        download. With None it consists of all files in the folder, unverified, and each object
        downloads its own copy. `location` is the run's storage as the user passed it; by default
        `path` and `filesystem` are those of `store`.
        """
        self = cls.__new__(cls)
        self._user_filesystem = None if location is None else location.filesystem
        self._store, self._folder = store, folder
        self.path = f"{store_path(store) if location is None else location.path}/{folder}"
        self._expected_files = None if files is None else tuple(files)
        self._cache_id = system.new_secret_bytes(16).hex()
        if files is not None:
            # Equal files give equal ids, by which processes of a node share one download.
            identity = msgspec.json.encode([store.url, folder, self._expected_files])
            # 128 bits: collisions are negligible, and the directory name stays short.
            self._cache_id = hashlib.sha256(identity).hexdigest()[:32]
        return self

    @property
    def filesystem(self) -> Any:
        """The file system of `path`: the one that the user passed, else pyarrow's for the storage.

        If pyarrow is not installed or does not support the storage, it is spotfit's `Store` of the
        checkpoint's folder: its keys are relative to that folder, and `path` is not valid in it.
        """
        if self._user_filesystem is not None:
            return self._user_filesystem
        return pyarrow_filesystem_or_store(self._store.subtree(self._folder))

    @contextmanager
    def as_directory(self) -> Iterator[str]:
        """Yield a local directory with its files; treat it as read-only.

        A local checkpoint yields its own directory, if that has all of its files. Otherwise they
        are downloaded before the block to a temporary directory, which its last reader removes. A
        run's checkpoint is downloaded once per node and verified: `IntegrityError` names a file
        that is missing or corrupt. One created from a path is not verified, and each object
        downloads it separately. Raises `CheckpointNotFoundError` (a FileNotFoundError) if the
        folder in the bucket is empty.
        """
        if self.local_directory is not None and self._is_self_contained:
            # Verified at each use: nothing protects a local folder from changes after the report.
            _verify_files(self.local_directory, self._files_to_verify())
            yield str(self.local_directory)
            return
        with shared_directory(self._temporary_path(), self._download) as directory:
            yield str(directory)

    def to_directory(self, path: str | os.PathLike[str] | None = None) -> str:
        """Copy its files to `path`, or to a temporary directory that is kept; returns the path.

        Blocks until all files are copied. Other files in the target stay, equal names are replaced.
        Concurrent calls with the same target on one machine copy once. Raises
        `CheckpointNotFoundError` (a FileNotFoundError) if there is no such checkpoint, and
        `IntegrityError` if a file is missing or corrupt.
        """
        # Not the name used by as_directory(), which removes its directory after the last reader.
        target = (
            self._temporary_path().with_suffix(".kept") if path is None else Path(path).expanduser()
        )
        fill_once(target.absolute(), private_folder(Path(tempfile.gettempdir())), self._copy_to)
        return str(target)

    def check_exists(self) -> None:
        """Raise `CheckpointNotFoundError` (a FileNotFoundError) if its folder has no files.

        Lists the folder. Not for a run's checkpoint whose files are in folders of earlier ones.
        """
        if self._is_self_contained and not any(True for _ in self._store.list(self._folder)):
            raise _not_found_error(self.path)

    def get_metadata(self) -> dict[str, Any]:
        """Return the user's metadata from the file `.metadata.json`; {} if none was set.

        With the preprocessor of the trainer's dataset "train", if there is one and the user's
        metadata have none. Reads the storage at each call. Raises `IntegrityError` if a file is not
        a JSON object.
        """
        metadata = self._read_metadata(METADATA_FILE)
        files = self._expected_files
        if files is None or any(file.name == DEFAULT_METADATA_FILE for file in files):
            defaults = self._read_metadata(DEFAULT_METADATA_FILE)
            # All or none: they may be two forms of the same value.
            if not defaults.keys() & metadata.keys():
                return {**defaults, **metadata}
        return metadata

    def _read_metadata(self, file: str) -> dict[str, Any]:
        try:
            return _metadata_decoder.decode(self._store.get(f"{self._folder}/{file}"))
        except NotFoundError:
            return {}
        except DECODE_ERRORS as error:
            raise IntegrityError(
                f"The metadata file {file} of the checkpoint at {self.path} is corrupt: it is not "
                f"a JSON object ({error}).",
                do="Replace the metadata with Checkpoint.set_metadata(), or correct the file.",
                file=file,
            ) from None

    def set_metadata(self, metadata: dict[str, Any]) -> None:
        """Replace the user's metadata, the file `.metadata.json` in the checkpoint's folder.

        Writes to the storage at once, also for a checkpoint that is already committed. Use values
        that JSON has: a tuple is read back as a list, a datetime as text. Raises `TypeError` for
        those that cannot be encoded.
        """
        self._store.put(self._metadata_key, msgspec.json.encode(metadata))

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        """Add these keys to the user's metadata, replacing equal ones.

        Reads and rewrites the file `.metadata.json`: of concurrent updates one may be lost. Raises
        `IntegrityError` if the present file is not a JSON object, and `TypeError` for values that
        cannot be encoded. See `set_metadata`.
        """
        self.set_metadata({**self._read_metadata(METADATA_FILE), **metadata})

    def open_snapshot(self) -> SavedState:
        """Open the snapshot that a `Checkpointer` saved in this checkpoint.

        For `spotfit.torch.export_checkpoint`, which then reads its tensors. Here only the index of
        each rank is read. Raises `ConfigError` if the folder is missing or holds no snapshot, and
        `IntegrityError` if an index is missing or corrupt.
        """
        return open_snapshot_folder(self._store, self._folder, self._expected_files)

    def without_extras(self) -> Checkpoint:
        """Return a plain `Checkpoint` of the same files, which another process can unpickle.

        For upload jobs: a user-defined subclass and its attributes may not be importable there.
        """
        return Checkpoint.from_store(self._store, self._folder, files=self._expected_files)

    def folder_relative_to(self, store: Store) -> str | None:
        """Return its folder as a key below the root of `store`; None if it is not in that store.

        For example `"checkpoint_000001"`, if `store` is the run's. Links in local paths are
        resolved; the folder need not exist.
        """
        folder, root = f"{store_path(self._store)}/{self._folder}", store_path(store)
        # Links: a user may report a path that leads to the run's directory by another way.
        if self.local_directory is not None:
            folder, root = _resolve_links(folder), _resolve_links(root)
        return folder.removeprefix(f"{root}/") if folder.startswith(f"{root}/") else None

    @property
    def local_directory(self) -> Path | None:
        """Its directory on this machine, which may not exist; None in a bucket or other storage."""
        url = self._store.url
        is_local = "://" not in url or url.startswith("file://")
        return Path(store_path(self._store), self._folder) if is_local else None

    @property
    def _metadata_key(self) -> str:
        return f"{self._folder}/{METADATA_FILE}"

    def _temporary_path(self) -> Path:
        return private_folder(Path(tempfile.gettempdir())) / f"checkpoint_tmp_{self._cache_id}"

    # --- files -------------------------------------------------------------------------------

    def _copy_to(self, target: Path) -> None:
        if self.local_directory is None or not self._is_self_contained:
            self._download(target)
            return
        if self.local_directory.is_file():
            raise CheckpointNotFoundError(
                f"The checkpoint {self.path} is a file, not a directory.",
                do="Pass the directory that contains the file.",
            )
        if not self.local_directory.is_dir():
            raise _not_found_error(self.path)
        _verify_files(self.local_directory, self._files_to_verify())
        shutil.copytree(self.local_directory, target, dirs_exist_ok=True)

    def _download(self, directory: Path) -> None:
        if self._expected_files is None:
            if not any(self._store.list(self._folder)):
                raise _not_found_error(self.path)
            download_tree(self._store, self._folder, directory)
            return
        files = self._files_to_verify()
        hashed = [record for record in files if record.has_digest]
        download_tree(self._store, self._folder, directory, records=hashed)
        # Only the sizes of the others are known: users wrote them to a folder of their own.
        for record in (record for record in files if not record.has_digest):
            target = directory / validate_key(record.name)
            target.parent.mkdir(parents=True, exist_ok=True)
            key = f"{record.source_prefix or self._folder}/{record.name}"
            try:
                self._store.get_file(key, target)
            except NotFoundError as error:
                raise _integrity_error(self.path, record, "is missing") from error
            if target.stat().st_size != record.size_bytes:
                raise _integrity_error(self.path, record, "is corrupt: its size has changed")
        with suppress(NotFoundError):  # no metadata was set
            (directory / METADATA_FILE).write_bytes(self._store.get(self._metadata_key))

    @property
    def _is_self_contained(self) -> bool:
        """Whether its folder exists and holds all of its files.

        Files may be stored in the folders of earlier checkpoints, and a checkpoint without files
        has no folder.
        """
        return self._expected_files is None or (
            self._expected_files != ()
            and not any(record.source_prefix for record in self._expected_files)
        )

    def _files_to_verify(self) -> list[FileRecord]:
        # Metadata may be set after the report.
        return [file for file in self._expected_files or () if file.name != METADATA_FILE]

    def __fspath__(self) -> str:
        # Without it the error of open(checkpoint) would only name the expected types.
        raise TypeError(
            "A Checkpoint is not a path: its files may be in a bucket. "
            "Use `with checkpoint.as_directory() as directory`, or checkpoint.to_directory()."
        )

    def __getattr__(self, name: str) -> Any:
        raise _missing_attribute_error(type(self).__name__, name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Checkpoint) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    @property
    def _identity(self) -> tuple[str, str]:
        return (self._store.url, self._folder)

    def __repr__(self) -> str:
        scheme = "local" if self.local_directory is not None else self._store.url.partition(":")[0]
        return f"{type(self).__name__}(filesystem={scheme}, path={self.path})"


def _resolve_links(path: str) -> str:
    return Path(os.path.realpath(path)).as_posix()


def _missing_attribute_error(owner: str, name: str) -> AttributeError:
    if name in _REMOVED_METHODS:
        return AttributeError(
            f"Checkpoint.{name} is no longer supported. Instead, {_REMOVED_METHODS[name]}."
        )
    return AttributeError(f"{owner!r} has no attribute {name!r}")


def _not_found_error(path: str) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(
        f"There is no checkpoint at {path}.",
        do="Correct the path, or list the checkpoints of the run with `spotfit checkpoints ls`: "
        "this one was never uploaded, or was deleted because of num_to_keep.",
    )


def pyarrow_filesystem_or_store(store: Store) -> Any:
    """Return pyarrow's file system for the storage of `store`; the store itself if there is none.

    For user code. Paths in pyarrow's file system begin with `store_path(store)`; keys of the store
    are relative to its root. There is none if pyarrow is not installed or does not support the
    storage.
    """
    return to_arrow_filesystem(store) or store


def store_path(store: Store) -> str:
    """Return the path of the store's root without a scheme: `"bucket/run"` or `"/data/run"`."""
    try:
        return RootUrl.parse(store.url).path
    except ConfigError:  # the scheme of a user's file system, such as hdfs
        return store.url.partition("://")[2] or store.url


def write_default_metadata(directory: Path, metadata: Mapping[str, Any]) -> None:
    """Write metadata that apply if the user's metadata have none of their keys.

    In local mode, to the directory of a checkpoint; a worker's upload writes them for a run.
    """
    (directory / DEFAULT_METADATA_FILE).write_bytes(msgspec.json.encode(metadata))


def _verify_files(directory: Path, files: Sequence[FileRecord]) -> None:
    """Compare files of a local folder with their records. Raises `IntegrityError`."""
    for record in files:
        path = directory / record.name
        if not path.is_file():
            raise _integrity_error(str(directory), record, "is missing")
        # The size first: a comparison of contents reads the whole file.
        if path.stat().st_size != record.size_bytes:
            raise _integrity_error(str(directory), record, "is corrupt: its size differs")
        if content_differs(path, record):
            raise _integrity_error(str(directory), record, "is corrupt: its hash differs")


def _integrity_error(location: str, record: FileRecord, problem: str) -> IntegrityError:
    return IntegrityError(
        f"The file {record.name!r} of the checkpoint in {location} {problem}.",
        do="Restore the file from a backup, or start from another checkpoint: remove the folder of "
        "this one and pass another.",
        file=record.name,
    )
