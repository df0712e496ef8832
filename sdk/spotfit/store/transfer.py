"""Directories to and from a store: in parallel, checked by hash, and resumed where they stopped."""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path, PurePosixPath

import msgspec

from spotfit.core.errors import ConfigError, IntegrityError, NotFoundError, StoreError
from spotfit.store.api import Store
from spotfit.store.marks import mark_of
from spotfit.store.parts import appearing, is_part
from spotfit.store.url import checked_key

SMALL_BYTES = 256 * 2**10
"""Of files up to this size many travel at once: each waits for its answer, none fills the wire."""

BIG_BYTES = 8 * 2**20
"""Files bigger than this travel in parts, few at a time: the parts of one fill the wire."""

MOST_AT_ONCE = 32
_AT_ONCE: Sequence[tuple[float, int]] = ((SMALL_BYTES, MOST_AT_ONCE), (BIG_BYTES, 8), (math.inf, 4))
"""Up to which size how many; whatever the sizes, little of them is in memory at a time."""


class FileRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One file of a directory: its name below it with '/', its size, its SHA-256 in hex or ''."""

    name: str
    size_bytes: int
    sha256: str
    at: str = ""
    """Whose folder it lies in, if not its own directory's: it was there already and is shared."""
    mark: str = ""
    """Of a snapshot's chunk, in place of the SHA-256 (`store.marks`)."""

    @property
    def tells(self) -> bool:
        """Whether it tells more of what is in the file than how long it is."""
        return bool(self.sha256 or self.mark)


def upload_tree(
    store: Store,
    prefix: str,
    directory: Path,
    *,
    known: Iterable[FileRecord] = (),
    workers: int = MOST_AT_ONCE,
) -> tuple[FileRecord, ...]:
    """Put every file of `directory` under `prefix`, and say what they are, by name.

    Links to files within the directory are followed, empty folders are left out. A file that is
    still what `known` says of it is not sent again: pass the records of an attempt that failed,
    which its error carries as `facts["uploaded"]`. Raises `ConfigError` for a link that leads out
    or in circles, `IntegrityError` for a file that changes meanwhile.
    """
    files = _files_of(directory)
    before = {record.name: record for record in known}
    sent: list[FileRecord] = []

    def send(name: str) -> None:
        path = files[name]
        if name in before and _is(path, before[name]):
            sent.append(before[name])
        else:
            sent.append(_send(store, f"{prefix}/{name}", name, path))

    try:
        _each({name: path.stat().st_size for name, path in files.items()}, send, workers=workers)
    except FileNotFoundError as error:
        raise IntegrityError(
            f"{error.filename} vanished before it was uploaded.", do=_WRITE_FIRST
        ) from error
    except StoreError as error:
        error.facts["uploaded"] = tuple(sent)
        raise
    return tuple(sorted(sent, key=lambda record: record.name))


def download_tree(
    store: Store,
    prefix: str,
    directory: Path,
    records: Iterable[FileRecord] | None = None,
    *,
    workers: int = MOST_AT_ONCE,
) -> None:
    """Bring the files of `records` from `prefix` into `directory`, checked, or all there are.

    A file already there and equal to its record is kept; others of that name are replaced, further
    ones left alone. A shared one comes from the folder that its record names. Nothing is ever
    written outside `directory`. Raises `IntegrityError`, naming the file, where one is missing, is
    not what its record says, or has a name that climbs out.
    """
    checks = {record.name: record for record in records or ()}
    sizes = (
        _listed(store, prefix)
        if records is None
        else {name: record.size_bytes for name, record in checks.items()}
    )
    directory.mkdir(parents=True, exist_ok=True)
    places = _places(directory.resolve(), sizes)

    def fetch(name: str) -> None:
        record, place = checks.get(name), places[name]
        if record is not None and _is(place, record):
            return
        place.parent.mkdir(parents=True, exist_ok=True)
        with appearing(place) as part:
            folder = record.at if record is not None and record.at else prefix
            _fetch(store, f"{folder}/{name}", part, record)

    _each(sizes, fetch, workers=workers)


def differs(path: Path, record: FileRecord) -> bool:
    """Whether the file holds something else than the record tells."""
    if record.mark:
        return mark_of(path.read_bytes()) != record.mark
    return bool(record.sha256) and _digest(path) != record.sha256


def fetched(store: Store, key: str) -> bytes:
    """A whole object that may be big: by way of a file, whose parts have time on a slow wire.

    Raises `NotFoundError`.
    """
    with tempfile.TemporaryDirectory(prefix="spotfit-") as folder:
        place = Path(folder, "whole")
        store.get_file(key, place)
        return place.read_bytes()


# ── up ───────────────────────────────────────────────────────────────────────────────────────────


def _files_of(directory: Path) -> Mapping[str, Path]:
    root = directory.resolve()
    if not root.is_dir():
        raise ConfigError(f"{directory} is no directory.", do="Give the one that holds the files.")
    return dict(_walk(root, "", (root,)))


def _walk(folder: Path, prefix: str, above: tuple[Path, ...]) -> Iterator[tuple[str, Path]]:
    """Names and real paths of the files below; `above` are the folders we came through."""
    for entry in sorted(folder.iterdir()):
        if is_part(entry.name):  # of a download that was killed
            continue
        name = checked_key(prefix + entry.name)
        real = Path(os.path.realpath(entry)) if entry.is_symlink() else entry
        if not real.is_relative_to(above[0]):
            raise _bad_entry(entry, "is a link that leads out of the directory")
        if real in above:
            raise _bad_entry(entry, "is a link that leads in circles")
        if real.is_dir():
            yield from _walk(real, f"{name}/", (*above, real))
        elif real.is_file():
            yield name, real
        else:
            raise _bad_entry(entry, "is neither a file nor a folder")


def _bad_entry(entry: Path, why: str) -> ConfigError:
    return ConfigError(f"{entry} {why}.", do="Copy what it stands for to its place, or remove it.")


def _send(store: Store, key: str, name: str, path: Path) -> FileRecord:
    before = path.stat()
    if before.st_size <= BIG_BYTES:
        body = path.read_bytes()
        store.put(key, body)
        return FileRecord(name, len(body), hashlib.sha256(body).hexdigest())
    with ThreadPoolExecutor(1, "spotfit-hash") as beside:
        digest = beside.submit(_digest, path)
        store.put_file(key, path)
        record = FileRecord(name, before.st_size, digest.result())
    after = path.stat()
    if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        raise IntegrityError(f"{path} changed while it was uploaded.", do=_WRITE_FIRST)
    return record


_WRITE_FIRST = (
    "Finish writing the directory before it is handed over, and leave it alone until then."
)


# ── down ─────────────────────────────────────────────────────────────────────────────────────────


def _listed(store: Store, prefix: str) -> Mapping[str, int]:
    """Sizes by name; an empty object that stands for a folder is none of the files."""
    sizes = {found.key.removeprefix(f"{prefix}/"): found.size_bytes for found in store.list(prefix)}
    folders = _folders_of(sizes)
    return {name: size for name, size in sizes.items() if size or name not in folders}


def _folders_of(names: Iterable[str]) -> frozenset[str]:
    return frozenset(str(folder) for name in names for folder in PurePosixPath(name).parents)


def _places(directory: Path, names: Iterable[str]) -> Mapping[str, Path]:
    """Where each file goes; `IntegrityError` before anything is written if one may not go there."""
    places = {name: _place(directory, name) for name in names}
    for name in _folders_of(names) & places.keys():
        raise IntegrityError(f"{name!r} is a file and a folder in the storage.")
    return places


def _place(directory: Path, name: str) -> Path:
    try:
        place = directory / checked_key(name)
    except ConfigError as error:
        raise IntegrityError(
            f"The storage names a file {name!r}, which no file may be called."
        ) from error
    if not place.parent.resolve().is_relative_to(directory):
        raise IntegrityError(
            f"{name!r} would be written outside of {directory}, through a link in it.",
            do="Download into an empty directory.",
        )
    return place


def _fetch(store: Store, key: str, part: Path, record: FileRecord | None) -> None:
    try:
        store.get_file(key, part)
    except NotFoundError as error:
        raise IntegrityError(f"{key} is missing in {store.url}.") from error
    if record is not None and not _is(part, record):
        raise IntegrityError(
            f"{key} in {store.url} is not what was uploaded: its size or hash differs.",
            do="It was damaged or replaced; use another checkpoint.",
            name=record.name,
        )


# ── both ─────────────────────────────────────────────────────────────────────────────────────────


def _each(sizes: Mapping[str, int], call: Callable[[str], None], *, workers: int) -> None:
    """`call` for every name, small and big files side by side; the first error ends it."""
    with ExitStack() as stack:
        lanes = [
            (up_to, stack.enter_context(ThreadPoolExecutor(min(workers, most), "spotfit-files")))
            for up_to, most in _AT_ONCE
        ]
        jobs = [_lane(lanes, size_bytes).submit(call, name) for name, size_bytes in sizes.items()]
        try:
            for job in as_completed(jobs):
                job.result()
        except BaseException:
            for job in jobs:
                job.cancel()
            raise


def _lane(lanes: Iterable[tuple[float, ThreadPoolExecutor]], size_bytes: int) -> ThreadPoolExecutor:
    return next(lane for up_to, lane in lanes if size_bytes <= up_to)


def _is(path: Path, record: FileRecord) -> bool:
    try:
        same_size = path.stat().st_size == record.size_bytes
        return same_size and record.tells and not differs(path, record)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return False


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
