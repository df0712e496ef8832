"""Unpacking of code archives on a node, once for all processes of the node.

The digest is verified before unpacking, and entries that would be written outside of the target
directory are rejected.
"""

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
from spotfit.store.transfer import download_bytes


def archive_key(sha256: str) -> str:
    """Return the key of a code archive, relative to the run's root."""
    return f".spotfit/code/{sha256}.tar.gz"


def ensure_unpacked(sha256: str, *, store: Store, directory: Path) -> Path:
    """Return the directory with the archive's files; download and unpack them if it is missing.

    Safe to call from several processes at once: the directory is created atomically. Raises
    `IntegrityError` if the archive does not match its digest, or contains unsafe paths.
    """
    target = directory / sha256
    if not target.is_dir():
        unpack_archive(download_bytes(store, archive_key(sha256)), sha256, target=target)
    return target


def unpack_archive(body: bytes, sha256: str, *, target: Path) -> None:
    """Verify the archive and unpack it to `target` atomically. No error if `target` exists."""
    if hashlib.sha256(body).hexdigest() != sha256:
        raise _untrusted_archive_error(sha256, "its content does not match its digest")
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f"{sha256[:12]}.", dir=target.parent))
    try:
        # In a directory beside the target: rename is atomic within one file system only.
        _extract(body, sha256, draft)
        draft.chmod(0o755)  # mkdtemp creates directories that only their owner may enter
        draft.rename(target)
    except OSError:
        # Another process may have unpacked the same content in the meantime.
        if not target.is_dir():
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _extract(body: bytes, sha256: str, folder: Path) -> None:
    try:
        with tarfile.open(fileobj=io.BytesIO(body), mode="r:gz") as archive:
            for entry in archive:
                _extract_member(archive, entry, folder, sha256)
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise _untrusted_archive_error(sha256, f"it cannot be unpacked: {error}") from error


def _extract_member(
    archive: tarfile.TarFile, entry: tarfile.TarInfo, folder: Path, sha256: str
) -> None:
    # Only regular files below the directory: `spotfit.code.archive` creates no other entries.
    name = PurePosixPath(entry.name)
    if not entry.isreg():
        raise _untrusted_archive_error(sha256, f"{entry.name!r} is not a regular file")
    if name.is_absolute() or ".." in name.parts or not name.parts or "\0" in entry.name:
        raise _untrusted_archive_error(
            sha256, f"{entry.name!r} would be written outside of the target directory"
        )
    # Not tarfile.extract: owner, time and mode from the archive must not be applied.
    path = folder / entry.name
    path.parent.mkdir(parents=True, exist_ok=True)
    # Mode 'x': two entries of one name are an error.
    with archive.extractfile(entry) as source, path.open("xb") as target:  # type: ignore[union-attr]
        shutil.copyfileobj(source, target)
    path.chmod(0o755 if entry.mode & 0o100 else 0o644)


def _untrusted_archive_error(sha256: str, reason: str) -> IntegrityError:
    return IntegrityError(
        f"The code archive {sha256[:12]}… was not unpacked: {reason}.",
        do="Check which accounts may write to the bucket, then start the run again.",
        sha256=sha256,
    )
