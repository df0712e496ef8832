"""Bundles on a node: fetched once, verified, and unpacked where all its processes find them."""

from __future__ import annotations

import gzip
import hashlib
import io
import shutil
import tarfile
import tempfile
import zlib
from pathlib import Path, PurePosixPath

from spotfit.core.errors import IntegrityError
from spotfit.store.api import Store
from spotfit.store.transfer import fetched


def code_key(sha256: str) -> str:
    """Where a bundle lies below the run's root."""
    return f".spotfit/code/{sha256}.tar.gz"


def unpacked(sha256: str, *, store: Store, into: Path) -> Path:
    """The directory with the bundle's files, fetched and unpacked if it is not there yet.

    May be called by several processes at once: the directory appears whole or not at all. Raises
    `IntegrityError` if the bundle is not the one that was named, or would write elsewhere.
    """
    place = into / sha256
    if not place.is_dir():
        unpack_bundle(fetched(store, code_key(sha256)), sha256, place=place)
    return place


def unpack_bundle(body: bytes, sha256: str, *, place: Path) -> None:
    """Verify, then unpack to `place`, which appears whole; being second is no error."""
    if hashlib.sha256(body).hexdigest() != sha256:
        raise _untrusted(sha256, "its content is not what its name says")
    place.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f"{sha256[:12]}.", dir=place.parent))
    try:
        _extract(body, sha256, draft)
        draft.chmod(0o755)
        _rename(draft, place)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _rename(draft: Path, place: Path) -> None:
    try:
        draft.rename(place)
    except OSError:
        if not place.is_dir():  # otherwise somebody was first, with the same content
            raise


def _extract(body: bytes, sha256: str, folder: Path) -> None:
    try:
        with tarfile.open(fileobj=io.BytesIO(body), mode="r:gz") as archive:
            for entry in archive:
                _judge(entry, sha256)
                _write(archive, entry, folder)
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error) as broken:
        raise _untrusted(sha256, f"it cannot be unpacked: {broken}") from broken


def _judge(entry: tarfile.TarInfo, sha256: str) -> None:
    """Only plain files below the folder; `bundle` makes nothing else."""
    name = PurePosixPath(entry.name)
    if not entry.isreg():
        raise _untrusted(sha256, f"{entry.name!r} is no plain file")
    if name.is_absolute() or ".." in name.parts or not name.parts or "\0" in entry.name:
        raise _untrusted(sha256, f"{entry.name!r} would be written elsewhere")


def _write(archive: tarfile.TarFile, entry: tarfile.TarInfo, folder: Path) -> None:
    """Written out by hand: no owner, time or mode of the archive's choosing is applied."""
    path = folder / entry.name
    path.parent.mkdir(parents=True, exist_ok=True)
    with archive.extractfile(entry) as source, path.open("xb") as target:  # type: ignore[union-attr]
        shutil.copyfileobj(source, target)
    path.chmod(0o755 if entry.mode & 0o100 else 0o644)


def _untrusted(sha256: str, why: str) -> IntegrityError:
    return IntegrityError(
        f"The bundle {sha256[:12]}… was not unpacked: {why}.",
        do="See who else may write to the bucket, then start the run again.",
        sha256=sha256,
    )
