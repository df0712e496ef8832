"""The same files give the same archive, and what is not wanted stays behind."""

import gzip
import io
import os
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


def entries(bundle: CodeArchive) -> list[tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(bundle.body))) as archive:
        return archive.getmembers()


def names(bundle: CodeArchive) -> list[str]:
    return [entry.name for entry in entries(bundle)]


def test_equal_files_give_equal_bundles(tmp_path: Path) -> None:
    files = {"train.py": "x", "lib/a.py": "a", "lib/ü.py": "b"}
    one = archive_directory(write(tmp_path / "one", files))
    other = write(tmp_path / "other", dict(reversed(files.items())))
    for path in other.rglob("*.py"):
        os.utime(path, (1, 1))
        path.chmod(0o600)
    assert archive_directory(other)[:2] == one[:2]
    assert names(one) == sorted(files)


def test_other_content_gives_another_name(tmp_path: Path) -> None:
    before = archive_directory(write(tmp_path, {"train.py": "x"}))
    after = archive_directory(write(tmp_path, {"train.py": "y"}))
    assert before.sha256 != after.sha256


def test_what_may_be_executed_stays_so(tmp_path: Path) -> None:
    write(tmp_path, {"run.sh": "", "plain.txt": ""})
    (tmp_path / "run.sh").chmod(0o700)
    assert [(e.name, oct(e.mode)) for e in entries(archive_directory(tmp_path))] == [
        ("plain.txt", "0o644"),
        ("run.sh", "0o755"),
    ]


def test_no_time_and_no_owner_travels(tmp_path: Path) -> None:
    (entry,) = entries(archive_directory(write(tmp_path, {"a": ""})))
    assert (entry.mtime, entry.uid, entry.gid, entry.uname) == (0, 0, 0, "")


def test_nobody_wants_caches_and_environments(tmp_path: Path) -> None:
    unwanted = (
        ".git/x",
        "a/__pycache__/b.pyc",
        ".venv/x",
        ".venv-3.12/x",
        "node_modules/x",
        "c.pyc",
    )
    write(tmp_path, dict.fromkeys((*unwanted, "a/b.py", ".env.example"), ""))
    assert names(archive_directory(tmp_path)) == [".env.example", "a/b.py"]


def test_gitignore_is_heeded_in_every_folder(tmp_path: Path) -> None:
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


def test_spotfitignore_has_the_last_word(tmp_path: Path) -> None:
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


def test_links_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    shared = write(tmp_path / "shared", {"conf.yaml": "a: 1"})
    top = write(tmp_path / "top", {"sub/train.py": ""})
    (top / "conf.yaml").symlink_to(shared / "conf.yaml")
    (top / "shared").symlink_to(shared)
    (top / "sub" / "up").symlink_to(top)
    (top / "broken").symlink_to(tmp_path / "gone")
    bundle = archive_directory(top)
    assert names(bundle) == ["conf.yaml", "shared/conf.yaml", "sub/train.py"]
    assert all(entry.isreg() for entry in entries(bundle))


def test_pipes_stay_behind(tmp_path: Path) -> None:
    write(tmp_path, {"a": ""})
    os.mkfifo(tmp_path / "pipe")
    assert names(archive_directory(tmp_path)) == ["a"]


def test_a_directory_too_big_names_its_biggest_files(tmp_path: Path) -> None:
    write(tmp_path, {"train.py": "x", "data/a.bin": "1" * 3000, "data/b.bin": "1" * 5000})
    with pytest.raises(ShippingError, match=r"data/b.bin \(4.9 KiB\), data/a.bin") as caught:
        archive_directory(tmp_path, limit_bytes=4096)
    assert ".spotfitignore" in caught.value.do


def test_a_directory_of_nothing_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {".gitignore": "*\n"})
    with pytest.raises(ShippingError, match="contains no files"):
        archive_directory(tmp_path)


def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    write(tmp_path, {"a": ""})
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ShippingError, match="a cannot be read: Permission denied"):
        archive_directory(tmp_path)


def test_a_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(ShippingError, match="gone cannot be read: No such file"):
        archive_directory(tmp_path / "gone")


def test_a_package_keeps_its_name(tmp_path: Path) -> None:
    write(tmp_path / "mine", {"__init__.py": "", "a.py": "", ".gitignore": "/b.py\n", "b.py": ""})
    assert names(archive_module(tmp_path / "mine")) == [
        "mine/.gitignore",
        "mine/__init__.py",
        "mine/a.py",
    ]


def test_a_module_is_one_file(tmp_path: Path) -> None:
    write(tmp_path, {"mine.py": "", "other.py": ""})
    assert names(archive_module(tmp_path / "mine.py")) == ["mine.py"]


def module(name: str, file: Path | None) -> ModuleType:
    made = ModuleType(name)
    if file is not None:
        made.__file__ = str(file)
    return made


def test_a_bundle_holds_what_can_be_imported_from_it(tmp_path: Path) -> None:
    write(tmp_path, {"pkg/__init__.py": "", "pkg/a.py": "", "src/lib/b.py": "", "no.pyc": ""})
    bundle = archive_directory(tmp_path)
    assert bundle.contains_module(module("pkg", tmp_path / "pkg/__init__.py"))
    assert bundle.contains_module(module("pkg.a", tmp_path / "pkg/a.py"))
    assert not bundle.contains_module(module("lib.b", tmp_path / "src/lib/b.py"))
    assert not bundle.contains_module(module("new", tmp_path / "new.py"))
    assert not bundle.contains_module(module("pkg.a", tmp_path.parent / "pkg/a.py"))
    assert not bundle.contains_module(module("built_in", None))


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
