"""Files of the user's cache: where they are, and that a write cannot damage them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spotfit.host.user_cache import prune_cached, read_cached, write_cached


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "spotfit"


def test_written_file_is_read(cache: Path) -> None:
    assert read_cached("prices/1.json") is None
    assert write_cached("prices/1.json", b"one")
    assert write_cached("prices/1.json", b"two")
    assert read_cached("prices/1.json") == b"two"
    assert [path.name for path in (cache / "prices").iterdir()] == ["1.json"]
    assert (cache / "prices").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("base", ["", "relative/path"])
def test_without_an_absolute_path_the_cache_is_in_the_home_directory(
    base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", base)
    assert write_cached("one", b"1")
    assert (Path.home() / ".cache/spotfit/one").read_bytes() == b"1"


def test_failed_write_keeps_the_previous_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cached("one", b"1")

    def fail(_self: Path, _target: Path) -> Path:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    assert not write_cached("one", b"2")
    assert read_cached("one") == b"1"
    assert [path.name for path in cache.iterdir()] == ["one"]


def test_unwritable_directory_is_no_error(cache: Path) -> None:
    cache.parent.mkdir(exist_ok=True)
    cache.write_text("a file where the directory would be")
    assert not write_cached("one", b"1")
    assert read_cached("one") is None


def test_files_that_were_written_first_are_deleted(cache: Path) -> None:
    for age, name in enumerate("abc"):
        write_cached(f"folder/{name}", b"1")
        os.utime(cache / "folder" / name, ns=(0, -age * 10**9 + 10**12))
    prune_cached("folder", keep=2)
    assert {path.name for path in (cache / "folder").iterdir()} == {"a", "b"}
    prune_cached("missing", keep=2)
