"""Archives are deterministic and leave out excluded files."""

import gzip
import io
import os
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

from spotfit.code import archive as archives
from spotfit.code.archive import CodeArchive, archive_directory, archive_module
from spotfit.core.errors import ShippingError


def write(top: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(text)
    return top


def entries(archive: CodeArchive) -> list[tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(archive.body))) as tar:
        return tar.getmembers()


def names(archive: CodeArchive) -> list[str]:
    return [entry.name for entry in entries(archive)]


def test_equal_files_give_equal_archives(tmp_path: Path) -> None:
    files = {"train.py": "x", "lib/a.py": "a", "lib/ü.py": "b"}
    one = archive_directory(write(tmp_path / "one", files))
    other = write(tmp_path / "other", dict(reversed(files.items())))
    for path in other.rglob("*.py"):
        os.utime(path, (1, 1))
        path.chmod(0o600)
    assert archive_directory(other)[:2] == one[:2]
    assert names(one) == sorted(files)


def test_different_content_gives_a_different_digest(tmp_path: Path) -> None:
    before = archive_directory(write(tmp_path, {"train.py": "x"}))
    after = archive_directory(write(tmp_path, {"train.py": "y"}))
    assert before.sha256 != after.sha256


def test_executable_files_stay_executable(tmp_path: Path) -> None:
    write(tmp_path, {"run.sh": "", "plain.txt": ""})
    (tmp_path / "run.sh").chmod(0o700)
    assert [(e.name, oct(e.mode)) for e in entries(archive_directory(tmp_path))] == [
        ("plain.txt", "0o644"),
        ("run.sh", "0o755"),
    ]


def test_archive_has_neither_times_nor_owners(tmp_path: Path) -> None:
    (entry,) = entries(archive_directory(write(tmp_path, {"a": ""})))
    assert (entry.mtime, entry.uid, entry.gid, entry.uname) == (0, 0, 0, "")


def test_caches_and_environments_are_excluded(tmp_path: Path) -> None:
    excluded = (
        ".git/x",
        "a/__pycache__/b.pyc",
        ".venv/x",
        ".venv-3.12/x",
        "node_modules/x",
        "c.pyc",
    )
    write(tmp_path, dict.fromkeys((*excluded, "a/b.py", ".env.example"), ""))
    assert names(archive_directory(tmp_path)) == [".env.example", "a/b.py"]


def test_gitignore_applies_in_every_folder(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            ".gitignore": "*.log\n/data/\n!keep.log\n",
            "a.log": "",
            "keep.log": "",
            "data/big": "",
            "lib/data/small": "",
            "lib/.gitignore": "secret\n!b.log\n",
            "lib/secret": "",
            "lib/b.log": "",
            "lib/c.log": "",
            "secret": "",
        },
    )
    expected = [".gitignore", "keep.log", "lib/.gitignore", "lib/b.log", "lib/data/small", "secret"]
    assert names(archive_directory(tmp_path)) == expected


def test_spotfitignore_overrides_gitignore(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            ".gitignore": "weights.bin\n",
            ".spotfitignore": "!weights.bin\nnotes/\n.spotfitignore\n.gitignore\n",
            "weights.bin": "",
            "notes/today": "",
        },
    )
    assert names(archive_directory(tmp_path)) == ["weights.bin"]


def test_links_are_followed_except_cycles(tmp_path: Path) -> None:
    shared = write(tmp_path / "shared", {"conf.yaml": "a: 1"})
    top = write(tmp_path / "top", {"sub/train.py": ""})
    (top / "conf.yaml").symlink_to(shared / "conf.yaml")
    (top / "shared").symlink_to(shared)
    (top / "sub" / "up").symlink_to(top)
    (top / "broken").symlink_to(tmp_path / "missing")
    archive = archive_directory(top)
    assert names(archive) == ["conf.yaml", "shared/conf.yaml", "sub/train.py"]
    assert all(entry.isreg() for entry in entries(archive))


def test_pipes_are_excluded(tmp_path: Path) -> None:
    write(tmp_path, {"a": ""})
    os.mkfifo(tmp_path / "pipe")
    assert names(archive_directory(tmp_path)) == ["a"]


def test_error_for_a_large_directory_names_its_largest_files(tmp_path: Path) -> None:
    write(tmp_path, {"train.py": "x", "data/a.bin": "1" * 3000, "data/b.bin": "1" * 5000})
    with pytest.raises(ShippingError, match=r"data/b.bin \(4.9 KiB\), data/a.bin") as caught:
        archive_directory(tmp_path, limit_bytes=4096)
    assert ".spotfitignore" in caught.value.do


def test_directory_without_files_is_rejected(tmp_path: Path) -> None:
    write(tmp_path, {".gitignore": "*\n"})
    with pytest.raises(ShippingError, match="contains no files"):
        archive_directory(tmp_path)


def test_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_permission_error(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    write(tmp_path, {"a": ""})
    monkeypatch.setattr(Path, "read_bytes", raise_permission_error)
    with pytest.raises(ShippingError, match="a cannot be read: Permission denied"):
        archive_directory(tmp_path)


def test_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ShippingError, match="missing cannot be read: No such file"):
        archive_directory(tmp_path / "missing")


def test_files_of_a_package_are_below_its_name(tmp_path: Path) -> None:
    write(
        tmp_path / "package", {"__init__.py": "", "a.py": "", ".gitignore": "/b.py\n", "b.py": ""}
    )
    assert names(archive_module(tmp_path / "package")) == [
        "package/.gitignore",
        "package/__init__.py",
        "package/a.py",
    ]


def test_archive_of_a_module_is_one_file(tmp_path: Path) -> None:
    write(tmp_path, {"module.py": "", "other.py": ""})
    assert names(archive_module(tmp_path / "module.py")) == ["module.py"]


def module(name: str, file: Path | None) -> ModuleType:
    created = ModuleType(name)
    if file is not None:
        created.__file__ = str(file)
    return created


def test_archive_contains_the_modules_that_are_importable_from_it(tmp_path: Path) -> None:
    write(tmp_path, {"pkg/__init__.py": "", "pkg/a.py": "", "src/lib/b.py": "", "no.pyc": ""})
    archive = archive_directory(tmp_path)
    assert archive.contains_module(module("pkg", tmp_path / "pkg/__init__.py"))
    assert archive.contains_module(module("pkg.a", tmp_path / "pkg/a.py"))
    assert not archive.contains_module(module("lib.b", tmp_path / "src/lib/b.py"))
    assert not archive.contains_module(module("new", tmp_path / "new.py"))
    assert not archive.contains_module(module("pkg.a", tmp_path.parent / "pkg/a.py"))
    assert not archive.contains_module(module("built_in", None))


# --- the summary ---------------------------------------------------------------------------------


def test_the_summary_names_what_each_rule_file_excludes(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            ".gitignore": "# data\n\n*.bin\ndata/\n",
            ".spotfitignore": "\nnotes.txt\n",
            "train.py": "x" * 1024,
            "train.bin": "x" * 2048,
            "val.bin": "x",
            "data/a/tokens": "x" * 3072,
            "data/b": "x",
            "notes.txt": "12",
            "sub/.gitignore": "*.log\n",
            "sub/x.log": "",
            ".git/HEAD": "",
            "sub/__pycache__/x.pyc": "",
        },
    )
    assert archive_directory(tmp_path).summary() == (
        f"{tmp_path}: 4 files (1.0 KiB) uploaded; "
        "excluded by .gitignore: 5 files (5.0 KiB): data/, train.bin, val.bin, ...; "
        "excluded by .spotfitignore: 1 file (2 B): notes.txt; "
        "excluded by built-in rules: .git, __pycache__"
    )


def test_a_file_that_a_later_rule_includes_is_not_reported(tmp_path: Path) -> None:
    write(tmp_path, {".gitignore": "*.bin", ".spotfitignore": "!a.bin", "a.bin": "x"})
    archive = archive_directory(tmp_path)
    assert "a.bin" in names(archive)
    assert "excluded" not in archive.summary()


def test_counting_excluded_files_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "_MAX_COUNTED_FILES", 3)
    write(tmp_path, {".gitignore": "data/", "a.py": ""} | {f"data/{n}": "x" for n in range(9)})
    summary = archive_directory(tmp_path).summary()
    assert "excluded by .gitignore: at least 3 files (3 B): data/" in summary


def test_scripts_are_executable_in_an_archive_of_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")  # which has no executable bit
    top = write(tmp_path, {"run.sh": "#!/bin/sh\n", "train.py": "x"})
    modes = {entry.name: entry.mode for entry in entries(archive_directory(top))}
    assert modes == {"run.sh": 0o755, "train.py": 0o644}
