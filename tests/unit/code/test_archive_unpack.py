"""An archive is unpacked completely and once, or rejected, and only below its target."""

import gzip
import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from spotfit.code.archive import archive_directory, archive_key, ensure_unpacked, unpack_archive
from spotfit.core.errors import IntegrityError, NotFoundError
from spotfit.store.local import MemoryStore


def archive(*entries: tarfile.TarInfo, body: bytes = b"") -> tuple[bytes, str]:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for entry in entries:
            entry.size = len(body) if entry.isreg() else 0
            tar.addfile(entry, io.BytesIO(body))
    compressed = gzip.compress(buffer.getvalue())
    return compressed, hashlib.sha256(compressed).hexdigest()


def entry(name: str, kind: bytes = tarfile.REGTYPE, linkname: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, linkname
    return member


def test_archived_files_are_restored_with_their_modes(tmp_path: Path) -> None:
    top = tmp_path / "project"
    (top / "lib").mkdir(parents=True)
    (top / "lib" / "a.py").write_text("a = 1")
    (top / "run.sh").write_text("true")
    (top / "run.sh").chmod(0o755)
    bundle = archive_directory(top)
    store = MemoryStore()
    store.create(archive_key(bundle.sha256), bundle.body)
    target = ensure_unpacked(bundle.sha256, store=store, directory=tmp_path / "code")
    assert (target / "lib" / "a.py").read_text() == "a = 1"
    assert oct((target / "run.sh").stat().st_mode)[-3:] == "755"
    assert oct((target / "lib" / "a.py").stat().st_mode)[-3:] == "644"


def test_unpacked_archive_is_not_downloaded_again(tmp_path: Path) -> None:
    body, sha256 = archive(entry("a"))
    unpack_archive(body, sha256, target=tmp_path / sha256)
    assert ensure_unpacked(sha256, store=MemoryStore(), directory=tmp_path) == tmp_path / sha256


def test_missing_archive_raises_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        ensure_unpacked("0" * 64, store=MemoryStore(), directory=tmp_path)


def test_unpacking_twice_is_not_an_error(tmp_path: Path) -> None:
    body, sha256 = archive(entry("a"), body=b"1")
    unpack_archive(body, sha256, target=tmp_path / sha256)
    unpack_archive(body, sha256, target=tmp_path / sha256)
    assert [path.name for path in tmp_path.iterdir()] == [sha256]


def test_modified_archive_is_rejected(tmp_path: Path) -> None:
    body, sha256 = archive(entry("a"))
    with pytest.raises(IntegrityError, match="does not match its digest"):
        unpack_archive(body + b"\0", sha256, target=tmp_path / sha256)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "unsafe",
    [
        entry("/etc/passwd"),
        entry("../outside"),
        entry("a/../../outside"),
        entry("link", tarfile.SYMTYPE, "/etc"),
        entry("hard", tarfile.LNKTYPE, "/etc/passwd"),
        entry("device", tarfile.CHRTYPE),
        entry("pipe", tarfile.FIFOTYPE),
        entry("folder", tarfile.DIRTYPE),
        entry("."),
    ],
    ids=lambda unsafe: unsafe.name,
)
def test_unsafe_entries_are_rejected(tmp_path: Path, unsafe: tarfile.TarInfo) -> None:
    body, sha256 = archive(entry("safe"), unsafe)
    with pytest.raises(IntegrityError):
        unpack_archive(body, sha256, target=tmp_path / "code" / sha256)
    assert not list((tmp_path / "code").iterdir())
    assert [path.name for path in tmp_path.iterdir()] == ["code"]


@pytest.mark.parametrize(
    "body", [b"no archive", gzip.compress(b"no archive" * 100)], ids=["text", "gzip"]
)
def test_invalid_archive_is_rejected(tmp_path: Path, body: bytes) -> None:
    with pytest.raises(IntegrityError, match="cannot be unpacked"):
        unpack_archive(body, hashlib.sha256(body).hexdigest(), target=tmp_path / "x")


def test_truncated_archive_is_rejected(tmp_path: Path) -> None:
    complete, _ = archive(entry("a"), body=bytes(range(256)) * 100)
    truncated = complete[: len(complete) // 2]
    with pytest.raises(IntegrityError, match="cannot be unpacked"):
        unpack_archive(truncated, hashlib.sha256(truncated).hexdigest(), target=tmp_path / "x")


def test_full_disk_raises_os_error_and_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    body, sha256 = archive(entry("a"), body=b"1")
    monkeypatch.setattr("shutil.copyfileobj", raise_no_space)
    with pytest.raises(OSError, match="No space left"):
        unpack_archive(body, sha256, target=tmp_path / "code" / sha256)
    assert not list((tmp_path / "code").iterdir())


def test_failed_rename_raises_os_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_cross_device(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    body, sha256 = archive(entry("a"))
    monkeypatch.setattr(Path, "rename", raise_cross_device)
    with pytest.raises(OSError, match="cross-device"):
        unpack_archive(body, sha256, target=tmp_path / sha256)
