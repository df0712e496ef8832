"""Checkpoint: a directory of files, here or in a bucket, as the user holds it."""

from __future__ import annotations

import hashlib
import os
import posixpath
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec

from spotfit.checkpoint.saved import Saved, open_folder
from spotfit.checkpoint.shared import own_folder, shared_directory, together
from spotfit.core.codec import UNREADABLE
from spotfit.core.errors import ConfigError, IntegrityError, NotFoundError
from spotfit.host import dice
from spotfit.store.api import Store
from spotfit.store.filesystem import store_on
from spotfit.store.opening import in_arrow, open_store
from spotfit.store.transfer import FileRecord, differs, download_tree
from spotfit.store.url import RootUrl, checked_key

METADATA = ".metadata.json"
_notes = msgspec.json.Decoder(dict[str, Any])
_GONE = {
    "from_dict": "write a file into a directory and use Checkpoint.from_directory(directory)",
    "to_dict": "read its files: with checkpoint.as_directory() as directory",
    "from_bytes": "write a file into a directory and use Checkpoint.from_directory(directory)",
    "to_bytes": "read its files: with checkpoint.as_directory() as directory",
    "from_uri": "use Checkpoint(uri)",
    "to_uri": "use checkpoint.path and checkpoint.filesystem",
    "uri": "use checkpoint.path and checkpoint.filesystem",
    "get_internal_representation": "use checkpoint.path and checkpoint.filesystem",
    "get_preprocessor": "keep it in a file of the checkpoint, or in its metadata",
    "set_preprocessor": "keep it in a file of the checkpoint, or in its metadata",
}


class Address(NamedTuple):
    """Where something lies in a file system that the user gave."""

    path: str
    filesystem: Any


class _Named(type):
    """Tells of names that are gone when they are asked of the class itself."""

    def __getattr__(cls, name: str) -> Any:
        raise _no_such(cls.__name__, name)


class Checkpoint(metaclass=_Named):
    """A directory of files that a training function reported, or is about to.

    `path` is its folder without a scheme: an absolute local path, or 'bucket/folder'. It can be
    pickled, and read from any machine that reaches its storage.
    """

    path: str

    def __init__(self, path: str | os.PathLike[str], filesystem: Any = None) -> None:
        """The folder at `path`: an absolute local path or a URL, or a path within `filesystem`.

        `filesystem` is one of pyarrow or fsspec, or a `Store`. Nothing is read yet.
        """
        text = os.fspath(path)
        self._given = filesystem
        self._files: tuple[FileRecord, ...] | None = None
        self._id = dice.new_secret_bytes(16).hex()
        if filesystem is None:
            root = _root(text)
            self.path = root.path
            self._store: Store = open_store(_above(root))
            self._folder = posixpath.basename(root.path)
        else:
            self.path = text.rstrip("/")
            self._store, self._folder = _within(filesystem, self.path)

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Self:
        """A checkpoint of that local directory. Nothing is copied until it is reported."""
        return cls(Path(path).expanduser().absolute())

    @classmethod
    def in_store(
        cls,
        store: Store,
        folder: str,
        *,
        files: Sequence[FileRecord] | None = None,
        within: Address | None = None,
    ) -> Self:
        """The checkpoint in that folder of a run's store.

        With `files`, those make it up and are checked when they are read; all processes of a node
        then share one download. `within` is the run's place as the user gave it.
        """
        self = cls.__new__(cls)
        self._given = None if within is None else within.filesystem
        self._store, self._folder = store, folder
        self.path = f"{path_of(store) if within is None else within.path}/{folder}"
        self._files = None if files is None else tuple(files)
        self._id = dice.new_secret_bytes(16).hex()
        if files is not None:
            told = msgspec.json.encode([store.url, folder, self._files])
            self._id = hashlib.sha256(told).hexdigest()[:32]
        return self

    @property
    def filesystem(self) -> Any:
        """The file system in which `path` means this checkpoint.

        The one it was made with; else pyarrow's, if pyarrow is installed and knows such storage;
        else our own `Store`, rooted at the checkpoint's folder.
        """
        if self._given is not None:
            return self._given
        return arrow_or_own(self._store.under(self._folder))

    @contextmanager
    def as_directory(self) -> Iterator[str]:
        """A local directory with its files, to read from.

        A local checkpoint's own directory; else a temporary one, downloaded once a node and
        removed when its last reader is done. Raises `IntegrityError`, naming the file, where one
        is missing or is not what was reported.
        """
        if self.local_directory is not None and self._is_whole_there:
            _check(self.local_directory, self._checked_files())
            yield str(self.local_directory)
            return
        with shared_directory(self._temporary(), self._download) as directory:
            yield str(directory)

    def to_directory(self, path: str | os.PathLike[str] | None = None) -> str:
        """Copy its files to `path`, or to a temporary directory that stays, and say where.

        Whoever asks for the same while another process of this machine is at it waits for that one.
        """
        target = self._temporary().with_suffix(".kept") if path is None else Path(path).expanduser()
        together(target.absolute(), own_folder(Path(tempfile.gettempdir())), self._copy)
        return str(target)

    def get_metadata(self) -> dict[str, Any]:
        """What was noted about it; empty when nothing was.

        Raises `IntegrityError` for notes that are none, such as a file of yours under that name.
        """
        try:
            return _notes.decode(self._store.get(self._metadata_key))
        except NotFoundError:
            return {}
        except UNREADABLE as unreadable:
            raise IntegrityError(
                f"{METADATA} of the checkpoint at {self.path} holds no notes: {unreadable}",
                do="Read it as a file, or have set_metadata() write new ones in its place.",
                file=METADATA,
            ) from None

    def set_metadata(self, metadata: dict[str, Any]) -> None:
        """Note this about it, and forget what was noted before."""
        self._store.put(self._metadata_key, msgspec.json.encode(metadata))

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        """Note this as well."""
        self.set_metadata({**self.get_metadata(), **metadata})

    def snapshot(self) -> Saved:
        """What a Checkpointer saved in it, checked as it is read.

        Raises `ConfigError` where that is nothing, and `IntegrityError` for damage.
        """
        return open_folder(self._store, self._folder, self._files)

    def bare(self) -> Checkpoint:
        """The same files without anything else the caller may have hung on: for another process."""
        return Checkpoint.in_store(self._store, self._folder, files=self._files)

    def folder_below(self, store: Store) -> str | None:
        """Its folder as a key below the root of `store`; None if it does not lie there."""
        here, above = f"{path_of(self._store)}/{self._folder}", path_of(store)
        if self.local_directory is not None:
            here, above = os.path.realpath(here), os.path.realpath(above)
        return here.removeprefix(f"{above}/") if here.startswith(f"{above}/") else None

    @property
    def local_directory(self) -> Path | None:
        """Its directory, if that is on this machine."""
        return Path(path_of(self._store), self._folder) if _is_local(self._store) else None

    @property
    def _metadata_key(self) -> str:
        return f"{self._folder}/{METADATA}"

    def _temporary(self) -> Path:
        return own_folder(Path(tempfile.gettempdir())) / f"checkpoint_tmp_{self._id}"

    def _copy(self, target: Path) -> None:
        if self.local_directory is None or not self._is_whole_there:
            self._download(target)
            return
        if not self.local_directory.is_dir():
            raise _nothing_at(self.path)
        _check(self.local_directory, self._checked_files())
        shutil.copytree(self.local_directory, target, dirs_exist_ok=True)

    def _download(self, directory: Path) -> None:
        if self._files is None:
            if not any(self._store.list(self._folder)):
                raise _nothing_at(self.path)
            download_tree(self._store, self._folder, directory)
            return
        files = self._checked_files()
        download_tree(self._store, self._folder, directory, [one for one in files if one.tells])
        for record in files:
            if not record.tells:
                self._fetch(record, directory)
        with suppress(NotFoundError):  # there are no notes
            (directory / METADATA).write_bytes(self._store.get(self._metadata_key))

    def _fetch(self, record: FileRecord, directory: Path) -> None:
        """A file nobody has hashed: only its size is known."""
        place = directory / checked_key(record.name)
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._store.get_file(f"{record.at or self._folder}/{record.name}", place)
        except NotFoundError as missing:
            raise _broken(self.path, record, "is missing") from missing
        if place.stat().st_size != record.size_bytes:
            raise _broken(self.path, record, "is not what was reported")

    @property
    def _is_whole_there(self) -> bool:
        """Whether its folder holds all of its files: some may lie in those of earlier checkpoints,
        and one that was reported without any has no folder."""
        return self._files is None or (self._files != () and not any(one.at for one in self._files))

    def _checked_files(self) -> list[FileRecord]:
        """Its files, without the notes: those may change after it was reported."""
        return [file for file in self._files or () if file.name != METADATA]

    def __fspath__(self) -> str:
        raise TypeError(
            "A Checkpoint is no path: its files may be in a bucket. "
            "Use `with checkpoint.as_directory() as directory`, or checkpoint.to_directory()."
        )

    def __getattr__(self, name: str) -> Any:
        raise _no_such(type(self).__name__, name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Checkpoint) and self._address == other._address

    def __hash__(self) -> int:
        return hash(self._address)

    @property
    def _address(self) -> tuple[str, str]:
        return (self._store.url, self._folder)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(filesystem={self._kind}, path={self.path})"

    @property
    def _kind(self) -> str:
        return "local" if self.local_directory is not None else self._store.url.partition(":")[0]


def _no_such(owner: str, name: str) -> AttributeError:
    if name in _GONE:
        return AttributeError(f"Checkpoint.{name} is no more: {_GONE[name]}.")
    return AttributeError(f"{owner!r} has no attribute {name!r}")


def _nothing_at(path: str) -> NotFoundError:
    return NotFoundError(
        f"There is no checkpoint at {path}.", do="Was it dropped, or never uploaded?"
    )


def arrow_or_own(store: Store) -> Any:
    """pyarrow's file system for that store, if pyarrow is here and knows such; else the store."""
    return in_arrow(store) or store


def _root(text: str) -> RootUrl:
    if "://" not in text and not text.startswith(("/", "~")):
        raise ConfigError(
            f"Checkpoint({text!r}): a relative path means something else on every machine.",
            do="Give an absolute path or a URL, or use Checkpoint.from_directory(path).",
        )
    return RootUrl.parse(text)


def _above(root: RootUrl) -> RootUrl:
    if not root.prefix:
        raise ConfigError(
            f"{root} is a whole bucket, not a folder in one.", do="Give the checkpoint's folder."
        )
    above = posixpath.dirname(root.prefix)
    return RootUrl(root.scheme, root.bucket, above, root.endpoint, root.region, root.account)


def _within(filesystem: Any, path: str) -> tuple[Store, str]:
    above, folder = posixpath.split(path)
    if not folder:
        raise ConfigError("The path of a checkpoint is empty.", do="Give its folder.")
    if hasattr(filesystem, "get_range") and hasattr(filesystem, "under"):
        return (filesystem.under(above) if above else filesystem), folder
    return store_on(filesystem, above), folder


def path_of(store: Store) -> str:
    """Where the store is rooted, without a scheme."""
    try:
        return RootUrl.parse(store.url).path
    except ConfigError:  # a file system the user brought has addresses of its own
        return store.url.partition("://")[2] or store.url


def _is_local(store: Store) -> bool:
    return "://" not in store.url or store.url.startswith("file://")


def _check(directory: Path, files: Sequence[FileRecord]) -> None:
    """Compare what lies in a local folder with what was reported. Raises `IntegrityError`."""
    for record in files:
        path = directory / record.name
        if not path.is_file():
            raise _broken(str(directory), record, "is missing")
        if path.stat().st_size != record.size_bytes or differs(path, record):
            raise _broken(str(directory), record, "is not what was reported")


def _broken(place: str, record: FileRecord, how: str) -> IntegrityError:
    return IntegrityError(
        f"The file {record.name!r} of the checkpoint in {place} {how}.",
        do="Start from another checkpoint: remove this one's folder and name another, or restore "
        "the file from a copy.",
        file=record.name,
    )
