"""A bundle is unpacked whole and once, or not at all, and never outside its folder."""

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
    packed = gzip.compress(buffer.getvalue())
    return packed, hashlib.sha256(packed).hexdigest()


def entry(name: str, kind: bytes = tarfile.REGTYPE, to: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, to
    return made


def test_what_was_bundled_is_restored(tmp_path: Path) -> None:
    top = tmp_path / "project"
    (top / "lib").mkdir(parents=True)
    (top / "lib" / "a.py").write_text("a = 1")
    (top / "run.sh").write_text("true")
    (top / "run.sh").chmod(0o755)
    bundle = archive_directory(top)
    store = MemoryStore()
    store.create(archive_key(bundle.sha256), bundle.body)
    place = ensure_unpacked(bundle.sha256, store=store, directory=tmp_path / "code")
    assert (place / "lib" / "a.py").read_text() == "a = 1"
    assert oct((place / "run.sh").stat().st_mode)[-3:] == "755"
    assert oct((place / "lib" / "a.py").stat().st_mode)[-3:] == "644"


def test_what_is_there_is_not_fetched_again(tmp_path: Path) -> None:
    body, sha256 = archive(entry("a"))
    unpack_archive(body, sha256, target=tmp_path / sha256)
    assert ensure_unpacked(sha256, store=MemoryStore(), directory=tmp_path) == tmp_path / sha256


def test_what_is_nowhere_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        ensure_unpacked("0" * 64, store=MemoryStore(), directory=tmp_path)


def test_being_second_is_no_error(tmp_path: Path) -> None:
    body, sha256 = archive(entry("a"), body=b"1")
    unpack_archive(body, sha256, target=tmp_path / sha256)
    unpack_archive(body, sha256, target=tmp_path / sha256)
    assert [path.name for path in tmp_path.iterdir()] == [sha256]


def test_other_content_is_refused(tmp_path: Path) -> None:
    body, sha256 = archive(entry("a"))
    with pytest.raises(IntegrityError, match="does not match its digest"):
        unpack_archive(body + b"\0", sha256, target=tmp_path / sha256)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "bad",
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
    ids=lambda bad: bad.name,
)
def test_nothing_but_files_below_is_written(tmp_path: Path, bad: tarfile.TarInfo) -> None:
    body, sha256 = archive(entry("good"), bad)
    with pytest.raises(IntegrityError):
        unpack_archive(body, sha256, target=tmp_path / "code" / sha256)
    assert not list((tmp_path / "code").iterdir())
    assert [path.name for path in tmp_path.iterdir()] == ["code"]


@pytest.mark.parametrize("broken", [b"no archive", gzip.compress(b"no archive" * 100)])
def test_what_is_no_archive_is_refused(tmp_path: Path, broken: bytes) -> None:
    with pytest.raises(IntegrityError, match="cannot be unpacked"):
        unpack_archive(broken, hashlib.sha256(broken).hexdigest(), target=tmp_path / "x")


def test_an_archive_cut_short_is_refused(tmp_path: Path) -> None:
    whole, _ = archive(entry("a"), body=bytes(range(256)) * 100)
    half = whole[: len(whole) // 2]
    with pytest.raises(IntegrityError, match="cannot be unpacked"):
        unpack_archive(half, hashlib.sha256(half).hexdigest(), target=tmp_path / "x")


def test_a_full_disk_is_not_blamed_on_the_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    body, sha256 = archive(entry("a"), body=b"1")
    monkeypatch.setattr("shutil.copyfileobj", refuse)
    with pytest.raises(OSError, match="No space left"):
        unpack_archive(body, sha256, target=tmp_path / "code" / sha256)
    assert not list((tmp_path / "code").iterdir())


def test_a_folder_that_cannot_be_renamed_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    body, sha256 = archive(entry("a"))
    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="cross-device"):
        unpack_archive(body, sha256, target=tmp_path / sha256)
