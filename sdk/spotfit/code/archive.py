"""Content-addressed archives (`CodeArchive`) of a project directory or a Python module.

Archives are deterministic: entries are sorted and carry no timestamps or owners, so equal files
have equal SHA-256 digests. Symbolic links are followed; empty directories are omitted.

Unpacking of code archives on a node, once for all processes of the node.

The digest is verified before unpacking, and entries that would be written outside of the target
directory are rejected.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import shutil
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from spotfit.core.errors import IntegrityError, ShippingError
from spotfit.core.units import format_bytes, format_count
from spotfit.store.api import Store
from spotfit.store.retry import repeat_read
from spotfit.store.transfer import download_bytes

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

# An archive is held in memory, and every node downloads it before its workers can start.
MAX_ARCHIVE_BYTES = 256 * 2**20

_IGNORE_FILES = (".gitignore", ".spotfitignore")  # rules of the later file have precedence
# Caches and environments: large, specific to this machine, or recreated there.
_ALWAYS_IGNORED = (
    ".git",
    ".hg",
    ".svn",
    "__pycache__/",
    "*.py[co]",
    ".venv*/",
    "node_modules/",
    ".ipynb_checkpoints/",
    ".mypy_cache/",
    ".pytest_cache/",
    ".ruff_cache/",
    ".DS_Store",
)
_BUILT_IN_RULES = "built-in rules"
# An ignored directory may hold a data set with millions of files; counting must stay cheap.
_MAX_COUNTED_FILES = 10_000
_MAX_NAMES = 3  # of the largest excluded files of each rule file


class _ExcludedEntry(NamedTuple):
    """A file or a directory that an ignore rule excludes from an archive."""

    rule_source: str
    """Name of the ignore file, such as ".gitignore", or `_BUILT_IN_RULES`."""
    name: str
    path: Path


class CodeArchive(NamedTuple):
    """An archive (tar.gz) of the user's code, its digest, and the files that it was built from."""

    sha256: str
    body: bytes
    root: Path
    """The directory that file names in the archive are relative to."""
    file_names: frozenset[str]
    size_bytes: int = 0
    """Total size of the files, uncompressed."""
    excluded: tuple[_ExcludedEntry, ...] = ()

    def summary(self) -> str:
        """Return one line with the included and the excluded files, by the rules that exclude them.

        For example "/project: 8 files (60.0 KiB) uploaded; excluded by .gitignore: 5 files
        (1.2 MiB): train.bin, meta.pkl, ...". Reads the sizes of the excluded files; stops counting
        at 10,000 files of one entry.
        """
        included = f"{format_count(len(self.file_names), 'file')} ({format_bytes(self.size_bytes)})"
        parts = [f"{self.root}: {included} uploaded"]
        for source in sorted({entry.rule_source for entry in self.excluded}):
            entries = [entry for entry in self.excluded if entry.rule_source == source]
            parts.append(f"excluded by {source}: {_describe_excluded(entries)}")
        return "; ".join(parts)

    def contains_module(self, module: ModuleType) -> bool:
        """Whether `module` can be imported under its name from the unpacked archive.

        `upload_code_bundle` pickles the functions and classes of other modules of the project by
        value.
        """
        file = Path(module.__dict__.get("__file__") or "")
        module_path = module.__name__.replace(".", "/")
        if not file.is_relative_to(self.root):
            return False
        name = file.relative_to(self.root).as_posix()
        return name in self.file_names and name in {
            f"{module_path}.py",
            f"{module_path}/__init__.py",
        }


def archive_directory(folder: Path, *, limit_bytes: int = MAX_ARCHIVE_BYTES) -> CodeArchive:
    """Archive all files below `folder` that .gitignore and .spotfitignore files do not exclude.

    For `working_dir` of `worker_runtime_env`. A .spotfitignore has the syntax of a .gitignore and
    takes precedence over it: `!data/` includes files that git ignores. `.git`, caches such as
    `__pycache__`, and `.venv*` are excluded unless one of these files includes them. The archive is
    held in memory; equal files give an equal digest. Raises `ShippingError` if there are no files,
    if they exceed `limit_bytes` together (uncompressed), or if one cannot be read.
    """
    top = Path(os.path.abspath(folder))  # noqa: PTH100 - symbolic links must not be resolved
    entries = list(_list_entries(top, relative_to=top))
    return _build_archive(entries, root=top, limit_bytes=limit_bytes)


def archive_module(path: Path, *, limit_bytes: int = MAX_ARCHIVE_BYTES) -> CodeArchive:
    """Archive a package directory or a module file, importable under its own name.

    For `py_modules` of `worker_runtime_env`: `src/mypkg` gives entries such as `mypkg/__init__.py`.
    `path` must exist. Ignore files in a directory apply, and `ShippingError` is raised, as in
    `archive_directory`.
    """
    source = Path(os.path.abspath(path))  # noqa: PTH100 - symbolic links must not be resolved
    entries: list[_SourceFile | _ExcludedEntry]
    if source.is_dir():
        entries = list(_list_entries(source, relative_to=source.parent))
    else:
        entries = [_SourceFile(source.name, source, source.stat())]
    return _build_archive(entries, root=source.parent, limit_bytes=limit_bytes)


class _SourceFile(NamedTuple):
    name: str
    path: Path
    stat: os.stat_result


class _IgnoreRules(NamedTuple):
    """The compiled ignore files of one directory."""

    prefix_length: int
    """Length of the directory's prefix, which is removed from file names before matching."""
    spec: GitIgnoreSpec
    sources: tuple[str, ...]
    """The file of each pattern."""


def _describe_excluded(entries: Sequence[_ExcludedEntry]) -> str:
    if entries[0].rule_source == _BUILT_IN_RULES:  # caches and environments: not worth counting
        names = sorted({PurePosixPath(entry.name).name for entry in entries})
        return ", ".join(names[:_MAX_NAMES]) + (", ..." if len(names) > _MAX_NAMES else "")
    sizes = [(entry.name, *_count_files(entry.path)) for entry in entries]
    files, size_bytes = sum(size[1] for size in sizes), sum(size[2] for size in sizes)
    is_partial = any(size[1] >= _MAX_COUNTED_FILES for size in sizes)
    largest = sorted(sizes, key=lambda size: -size[2])
    names = [name for name, _, _ in largest[:_MAX_NAMES]]
    more = ", ..." if len(sizes) > _MAX_NAMES else ""
    counted = f"{format_count(files, 'file')} ({format_bytes(size_bytes)})"
    return f"{'at least ' if is_partial else ''}{counted}: {', '.join(names)}{more}"


def _count_files(path: Path) -> tuple[int, int]:
    """Return number and total size of the files below a path, at most `_MAX_COUNTED_FILES`."""
    count = size_bytes = 0
    if not path.is_dir():
        with suppress(OSError):  # deleted meanwhile
            size_bytes = path.lstat().st_size
        return 1, size_bytes
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):  # deleted meanwhile
                size_bytes += Path(folder, name).lstat().st_size
            count += 1
            if count >= _MAX_COUNTED_FILES:
                return count, size_bytes
    return count, size_bytes


def _build_archive(
    entries: Sequence[_SourceFile | _ExcludedEntry], *, root: Path, limit_bytes: int
) -> CodeArchive:
    files = [entry for entry in entries if isinstance(entry, _SourceFile)]
    excluded = tuple(entry for entry in entries if isinstance(entry, _ExcludedEntry))
    if not files:
        raise ShippingError(
            f"The directory {root} contains no files to upload: it is empty, or all files are "
            "ignored.",
            do="Include files in a .spotfitignore in that directory, with '!' before the pattern.",
        )
    total = sum(file.stat.st_size for file in files)
    if total > limit_bytes:
        largest = sorted(files, key=lambda file: -file.stat.st_size)[:5]
        listing = ", ".join(f"{file.name} ({format_bytes(file.stat.st_size)})" for file in largest)
        raise ShippingError(
            f"The directory {root} contains {format_bytes(total)} in {len(files)} files; the "
            f"limit is {format_bytes(limit_bytes)}. The largest files: {listing}.",
            do="List files that the machines do not need in a .spotfitignore in that directory, "
            "and read training data from storage.",
            size_bytes=total,
            limit_bytes=limit_bytes,
        )
    # Sorted: the order of directory entries differs between file systems.
    body = _pack_tar(sorted(files))
    names = frozenset(file.name for file in files)
    return CodeArchive(hashlib.sha256(body).hexdigest(), body, root, names, total, excluded)


def _list_entries(top: Path, *, relative_to: Path) -> Iterator[_SourceFile | _ExcludedEntry]:
    prefix = "" if top == relative_to else f"{top.name}/"
    built_in = (_BUILT_IN_RULES,) * len(_ALWAYS_IGNORED)
    always_ignored = _IgnoreRules(len(prefix), _compile_rules(_ALWAYS_IGNORED), built_in)
    yield from _walk(
        top, prefix=prefix, rules=(always_ignored,), ancestors=(os.path.realpath(top),)
    )


def _walk(
    folder: Path, *, prefix: str, rules: tuple[_IgnoreRules, ...], ancestors: tuple[str, ...]
) -> Iterator[_SourceFile | _ExcludedEntry]:
    """List files and excluded entries depth first.

    `ancestors` are the resolved parent directories; they stop cycles of symbolic links.
    """
    files = [file for name in _IGNORE_FILES if (file := folder / name).is_file()]
    lines = [
        (line, file.name)
        for file in files
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines()
        if line  # as pathspec does: `sources` has an item for each of its patterns
    ]
    if lines:
        patterns, sources = zip(*lines, strict=True)
        rules = (*rules, _IgnoreRules(len(prefix), _compile_rules(patterns), sources))
    try:
        entries = list(os.scandir(folder))
    except OSError as error:
        raise _unreadable_error(folder, error) from error
    for entry in entries:
        name = prefix + entry.name
        if entry.is_dir():
            real = os.path.realpath(entry)
            # A '/' at the end: patterns such as 'build/' match directories only.
            if real in ancestors:
                continue
            if source := _excluding_source(f"{name}/", rules):
                yield _ExcludedEntry(source, f"{name}/", Path(entry))
            else:
                yield from _walk(
                    Path(entry), prefix=f"{name}/", rules=rules, ancestors=(*ancestors, real)
                )
        elif entry.is_file():
            if source := _excluding_source(name, rules):
                yield _ExcludedEntry(source, name, Path(entry))
            else:
                yield _SourceFile(name, Path(entry), entry.stat())


def _compile_rules(lines: Sequence[str]) -> GitIgnoreSpec:
    # Imported lazily: the import costs 36 ms, and most runs upload no directory.
    from pathspec import GitIgnoreSpec

    return GitIgnoreSpec.from_lines(lines)


def _excluding_source(name: str, rules: Sequence[_IgnoreRules]) -> str:
    """Apply the rules of the innermost directory that has a matching pattern, as git does.

    Returns the file of the pattern that excludes the name, or '' if none does.
    """
    for directory_rules in reversed(rules):
        match = directory_rules.spec.check_file(name[directory_rules.prefix_length :])
        if match.include is not None:
            assert match.index is not None
            return directory_rules.sources[match.index] if match.include else ""
    return ""


def _pack_tar(files: Sequence[_SourceFile]) -> bytes:
    buffer = io.BytesIO()
    # Level 1: source code compresses well at any level, and the caller waits for the upload.
    # No name and no time in the header, because equal files must give equal digests.
    packed = gzip.GzipFile("", "wb", compresslevel=1, fileobj=buffer, mtime=0)
    with packed, tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for file in files:
            try:
                body = file.path.read_bytes()
            except OSError as error:
                raise _unreadable_error(file.path, error) from error
            entry = tarfile.TarInfo(file.name)
            # The size of what was read: the file may have changed since it was listed.
            entry.size = len(body)
            # Only the executable bit, as in git: other bits depend on the umask of the user.
            entry.mode = 0o755 if _is_executable(file, body) else 0o644
            archive.addfile(entry, io.BytesIO(body))
    return buffer.getvalue()


def _is_executable(file: _SourceFile, body: bytes) -> bool:
    # Windows has no executable bit: there it is a script if its first line names an interpreter.
    return body.startswith(b"#!") if sys.platform == "win32" else bool(file.stat.st_mode & 0o100)


def _unreadable_error(path: Path, error: OSError) -> ShippingError:
    return ShippingError(
        f"{path} cannot be read: {error.strerror}. It is part of the code that is uploaded.",
        do="Make the file readable, or list it in a .spotfitignore.",
    )


# --- Unpacking of code archives on a node ---------------------------------------------------------


def archive_key(sha256: str) -> str:
    """Return the object key of a code archive, relative to the root of the run's store.

    For example `".spotfit/code/<sha256>.tar.gz"`. `sha256` is the digest of the archive in hex.
    """
    return f".spotfit/code/{sha256}.tar.gz"


def ensure_unpacked(sha256: str, *, store: Store, directory: Path) -> Path:
    """Return the directory of the archive's files; download and unpack them if it is missing.

    The result is `directory/<sha256>`. Called on nodes, with the run's store. Safe to call from
    several processes at once: the directory is created atomically. Raises `IntegrityError` if the
    archive does not match its digest or contains unsafe paths, `NotFoundError` or another
    `StoreError` if it cannot be downloaded.
    """
    target = directory / sha256
    if not target.is_dir():
        repeat_read(
            lambda: unpack_archive(
                download_bytes(store, archive_key(sha256)), sha256, target=target
            ),
            errors=(IntegrityError,),
        )
    return target


def unpack_archive(body: bytes, sha256: str, *, target: Path) -> None:
    """Verify the archive `body` against its digest and unpack it to directory `target`, atomically.

    No error if `target` exists and is not empty: it is left unchanged. Raises `IntegrityError` if
    the digest differs, the archive is damaged, or an entry is not a regular file below `target`;
    `OSError` if the disk cannot be written.
    """
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
        do="Check which accounts may write to the storage of the run, then start the run again.",
        sha256=sha256,
    )
