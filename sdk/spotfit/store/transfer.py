"""Upload and download of directories: concurrent, verified by hash, and resumable.

Content hashes of snapshot chunks: 128 bits, computed several times as fast as SHA-256.

The hash is the GMAC (RFC 4543) of the bytes under a constant, public key. Two chunks of 32 MiB
collide by chance with a probability below 2**-100. It is not collision resistant: it identifies
equal bytes, and does not authenticate who wrote them.
"""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TypeVar

import msgspec
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from spotfit.core.errors import ConfigError, IntegrityError, NotFoundError, StoreError
from spotfit.store.api import Store
from spotfit.store.local import atomic_write, is_partial_file
from spotfit.store.retry import repeat_read
from spotfit.store.url import validate_file_key, validate_key

# --- Content hashes of snapshot chunks ------------------------------------------------------------


# Part of the snapshot format: other values would make stored chunks unreadable.
_KEY = b"spotfit's marks."
_NONCE = bytes(12)


def compute_content_hash(body: bytes | bytearray | memoryview) -> str:
    """Return the hash of a snapshot chunk below 2 GiB: 128 bits as 32 hex digits.

    It identifies equal bytes and is compared when a chunk is read again. It is not collision
    resistant: it does not protect against deliberate modification.
    """
    # The body is authenticated data and nothing is encrypted: the result is the tag alone.
    return AESGCM(_KEY).encrypt(_NONCE, b"", body).hex()


# The transfer of a small file is mostly latency, so several run at once.
SMALL_FILE_BYTES = 256 * 2**10
# The store transfers larger files in parallel parts, so that few files saturate the network.
LARGE_FILE_BYTES = 8 * 2**20
MAX_FILE_CONCURRENCY = 32
_CONCURRENCY_BY_SIZE: Sequence[tuple[float, int]] = (
    (SMALL_FILE_BYTES, MAX_FILE_CONCURRENCY),
    (LARGE_FILE_BYTES, 8),
    (math.inf, 4),
)
"""Maximum size and concurrency of each class of files; bounds the memory in use."""


class FileRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One file of a directory, as it was uploaded."""

    name: str
    """Path below the directory, with '/'."""
    size_bytes: int
    sha256: str
    """Hex digest; '' if unknown."""
    source_prefix: str = ""
    """Folder that stores the file, if it is not the directory's own: it is shared."""
    content_hash: str = ""
    """Hash of a snapshot's chunk, instead of the SHA-256 (`store.transfer`)."""

    @property
    def has_digest(self) -> bool:
        """Whether the SHA-256 or content hash of the file is known, so that it can be verified."""
        return bool(self.sha256 or self.content_hash)


def upload_tree(
    store: Store,
    prefix: str,
    directory: Path,
    *,
    previous_records: Iterable[FileRecord] = (),
    concurrency: int = MAX_FILE_CONCURRENCY,
) -> tuple[FileRecord, ...]:
    """Upload every file of a local `directory` to the folder `prefix`; return their records.

    The records are sorted by name, the path below `directory`. Follows links to files within the
    directory and skips empty folders and temporary files of killed downloads. Files that equal
    their record in `previous_records` are not sent again: pass the records of a failed attempt,
    which its `StoreError` carries as `details["uploaded"]`. `concurrency` limits the transfers at
    once of each size class (small, medium, large). Blocks until all are sent. Raises `ConfigError`
    for a link out of the directory or a cycle of links, `IntegrityError` for a file that is
    deleted, or a large one that changes, during the upload.
    """
    root = directory.resolve()
    if not root.is_dir():
        problem = "is not a directory" if root.exists() else "does not exist"
        raise ConfigError(
            f"The directory to upload, {directory}, {problem}.",
            do="Pass the directory that holds the files.",
        )
    files = dict(_walk(root, "", (root,)))
    previous = {record.name: record for record in previous_records}
    sent: list[FileRecord] = []

    def send(name: str) -> None:
        path = files[name]
        if name in previous and _matches_record(path, previous[name]):
            sent.append(previous[name])
        else:
            sent.append(_upload_file(store, f"{prefix}/{name}", name=name, path=path))

    try:
        sizes = {name: path.stat().st_size for name, path in files.items()}
        _run_for_each(sizes, send, concurrency=concurrency)
    except FileNotFoundError as error:
        raise IntegrityError(
            f"The file {error.filename} was deleted before it was uploaded.",
            do=_REMEDY_FINISH_WRITING,
        ) from error
    except StoreError as error:
        # The caller passes these records to the next attempt, which sends the other files only.
        error.details["uploaded"] = tuple(sent)
        raise
    return tuple(sorted(sent, key=lambda record: record.name))


def download_tree(
    store: Store,
    prefix: str,
    directory: Path,
    records: Iterable[FileRecord] | None = None,
    *,
    concurrency: int = MAX_FILE_CONCURRENCY,
) -> None:
    """Download and verify the files of `records` from the folder `prefix` to a local `directory`.

    Without `records` (None) downloads all files below `prefix`, unverified; each record must have a
    hash (`FileRecord.has_digest`). Creates the directory. Files that already equal their record are
    kept, others replaced, and further files in the directory ignored. A file whose record has a
    `source_prefix` comes from that folder. `concurrency` limits the transfers at once of each size
    class (small, medium, large). Raises `IntegrityError`, naming the file, if one is missing or
    corrupt, or would be written outside of `directory`.
    """
    checks = {record.name: record for record in records or ()}
    if records is None:
        sizes = list_files(store, prefix)
    else:
        sizes = {name: record.size_bytes for name, record in checks.items()}
    directory.mkdir(parents=True, exist_ok=True)
    targets = _target_paths(directory.resolve(), sizes, source=store.url)

    def fetch(name: str) -> None:
        record, target = checks.get(name), targets[name]
        if record is not None and _matches_record(target, record):
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(target) as part:
            folder = record.source_prefix if record is not None and record.source_prefix else prefix
            download = partial(_download_file, store, f"{folder}/{name}", part, record)
            repeat_read(download, errors=(IntegrityError,))

    _run_for_each(sizes, fetch, concurrency=concurrency)


def list_files(store: Store, folder: str) -> dict[str, int]:
    """Return the sizes of the files in that folder, by their names relative to it, in bytes.

    `folder` is a key below the root of `store`. Files in subfolders are included as "sub/name"; {}
    for an empty or missing folder. Lists at each call. The objects with which other writers mark a
    folder in a bucket are not files.
    """
    prefix = f"{folder}/"
    # pyarrow, web consoles and others create an empty object "sub/" for each folder "sub", which a
    # listing names "sub". That of `folder` itself does not start with `prefix`.
    listed = {
        info.key.removeprefix(prefix): info.size_bytes
        for info in store.list(folder)
        if info.key.startswith(prefix)
    }
    markers = _parent_folders(listed)
    sizes = {name: size for name, size in listed.items() if size or name not in markers}
    # The marker of an empty folder looks like an empty file in the listing, but cannot be read.
    empty = [name for name, size in sizes.items() if not size]
    readable = concurrent_map(lambda name: _is_readable(store, f"{prefix}{name}"), empty)
    unreadable = {name for name, is_file in zip(empty, readable, strict=True) if not is_file}
    return {name: size for name, size in sizes.items() if name not in unreadable}


def _is_readable(store: Store, key: str) -> bool:
    try:
        store.get_range(key, 0, 0)
    except NotFoundError:
        return False
    except ConfigError:  # an unsafe name, which the caller rejects
        return True
    return True


def content_differs(path: Path, record: FileRecord) -> bool:
    """Whether the hash of the file at `path` differs from its record; False if the record has none.

    Reads the whole file, and does not compare sizes. Raises `OSError` if it cannot be read.
    """
    if record.content_hash:
        return compute_content_hash(path.read_bytes()) != record.content_hash
    return bool(record.sha256) and _sha256_of_file(path) != record.sha256


def download_bytes(store: Store, key: str) -> bytes:
    """Return an object of any size, held in memory. Raises `NotFoundError`.

    By way of a temporary file, because `Store.get` must be answered within the timeout of one
    request.
    """
    # By way of a file: `Store.get` has the short timeout of a single request, `get_file` transfers
    # parts.
    with tempfile.TemporaryDirectory(prefix="spotfit-") as folder:
        path = Path(folder, "object")
        store.get_file(key, path)
        return path.read_bytes()


# ── upload ───────────────────────────────────────────────────────────────────────────────────────


def _walk(folder: Path, prefix: str, ancestors: tuple[Path, ...]) -> Iterator[tuple[str, Path]]:
    """Yield the names and real paths of the files below; `ancestors` are the folders above."""
    for entry in sorted(folder.iterdir()):
        if is_partial_file(entry.name):  # left by a killed download
            continue
        try:
            name = validate_key(prefix + entry.name)
        except ConfigError as error:
            raise ConfigError(
                f"{str(entry)!r} cannot be uploaded: {error.message}",
                do="Rename the file or folder.",
            ) from error
        real = Path(os.path.realpath(entry)) if entry.is_symlink() else entry
        if not real.is_relative_to(ancestors[0]):
            raise _bad_entry_error(entry, "is a link to a place outside of the directory")
        if real in ancestors:
            raise _bad_entry_error(entry, "is a link to one of its parent directories")
        if real.is_dir():
            yield from _walk(real, f"{name}/", (*ancestors, real))
        elif real.is_file():
            yield name, real
        else:
            raise _bad_entry_error(entry, "is neither a file nor a directory")


def _bad_entry_error(entry: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"{entry} cannot be uploaded: it {reason}.",
        do="Replace it by a copy of the file or directory, or remove it.",
    )


def _upload_file(store: Store, key: str, *, name: str, path: Path) -> FileRecord:
    before = path.stat()
    if before.st_size <= LARGE_FILE_BYTES:
        # Read once, so that hash and object have the same bytes, even if the file changes.
        body = path.read_bytes()
        store.put(key, body)
        return FileRecord(name, len(body), hashlib.sha256(body).hexdigest())
    # A file too large for memory is read twice, for its hash and its upload, so it must be
    # unchanged in between.
    with ThreadPoolExecutor(1, "spotfit-hash") as executor:
        digest = executor.submit(_sha256_of_file, path)
        store.put_file(key, path)
        record = FileRecord(name, before.st_size, digest.result())
    after = path.stat()
    if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        raise IntegrityError(
            f"The file {path} changed during its upload.", do=_REMEDY_FINISH_WRITING
        )
    return record


_REMEDY_FINISH_WRITING = (
    "Finish writing the directory before reporting it, and do not change it during the upload."
)


# ── download ─────────────────────────────────────────────────────────────────────────────────────


def _parent_folders(names: Iterable[str]) -> frozenset[str]:
    return frozenset(str(folder) for name in names for folder in PurePosixPath(name).parents)


def _target_paths(directory: Path, names: Iterable[str], *, source: str) -> Mapping[str, Path]:
    """Return the path of each file. Raises `IntegrityError` for unsafe names."""
    # All names are checked before the first file is written. They come from a bucket, which
    # others may be able to write to.
    paths: dict[str, Path] = {}
    for name in names:
        try:
            path = paths[name] = directory / validate_file_key(name)
        except ConfigError as error:
            raise IntegrityError(
                f"No file was downloaded to {directory}: the name of the object {name!r} in the "
                f"storage is not a valid file name: {error.message}",
                do="It was not written by spotfit: rename or delete the object, then repeat the "
                "download.",
            ) from error
        if not path.parent.resolve().is_relative_to(directory):
            raise IntegrityError(
                f"The file {name!r} was not downloaded: a link in {directory} points outside of "
                "that directory.",
                do="Download to an empty directory.",
            )
    for name in _parent_folders(names) & paths.keys():
        raise IntegrityError(
            f"{name!r} below {source} cannot be downloaded to {directory}: it is both a file and a "
            "folder.",
            do="Rename or delete the file or the folder there, then repeat the download.",
        )
    return paths


def _download_file(store: Store, key: str, target: Path, record: FileRecord | None) -> None:
    try:
        store.get_file(key, target)
    except NotFoundError as error:
        raise IntegrityError(
            f"The file {key} is missing in {store.url}: it was deleted, or never uploaded.",
            do="Use another checkpoint, or restore the file from a backup.",
        ) from error
    if record is not None and not _matches_record(target, record):
        differing = "hash" if target.stat().st_size == record.size_bytes else "size"
        raise IntegrityError(
            f"The file {key} in {store.url} is corrupt: its {differing} differs from that of the "
            "uploaded file.",
            do="Use another checkpoint, or restore the file from a backup.",
            name=record.name,
        )


# ── both ─────────────────────────────────────────────────────────────────────────────────────────


def _run_for_each(
    sizes: Mapping[str, int], function: Callable[[str], None], *, concurrency: int
) -> None:
    """Call `function` for every name, by size class; the first error cancels the others."""
    with ExitStack() as stack:
        executors = [
            (
                max_bytes,
                stack.enter_context(ThreadPoolExecutor(min(concurrency, limit), "spotfit-files")),
            )
            for max_bytes, limit in _CONCURRENCY_BY_SIZE
        ]
        futures = []
        for name, size_bytes in sizes.items():
            executor = next(pool for max_bytes, pool in executors if size_bytes <= max_bytes)
            futures.append(executor.submit(function, name))
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            # Calls that run already are not interrupted; leaving the stack waits for them.
            for future in futures:
                future.cancel()
            raise


def _matches_record(path: Path, record: FileRecord) -> bool:
    try:
        same_size = path.stat().st_size == record.size_bytes
        return same_size and record.has_digest and not content_differs(path, record)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return False


def _sha256_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

MAX_CONCURRENCY = 16
_SEQUENTIAL_LIMIT = 2  # starting threads would take longer


def concurrent_map(function: Callable[[ItemT], ResultT], items: Iterable[ItemT]) -> list[ResultT]:
    """Return `function` of each item, in order, with up to `MAX_CONCURRENCY` calls at once.

    The calls run in threads, up to two items in the caller's own; it blocks until all have ended.
    Results are taken in the order of the items: the first exception in that order is raised, once
    the calls that run then have ended, and the others are cancelled. `function` must not be
    concurrent itself: the numbers of requests would multiply.
    """
    arguments = list(items)
    if len(arguments) <= _SEQUENTIAL_LIMIT:
        return [function(argument) for argument in arguments]
    with ThreadPoolExecutor(min(MAX_CONCURRENCY, len(arguments)), "spotfit-map") as executor:
        return list(executor.map(function, arguments))
