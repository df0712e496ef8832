"""A directory or module of the user's as one archive, named by its content.

The same files give the same archive: sorted, without times or owners. Only files travel; links are
followed, empty directories stay behind.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from spotfit.core.errors import ShippingError
from spotfit.core.units import told_bytes

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

LIMIT_BYTES = 256 * 2**20

_IGNORE_FILES = (".gitignore", ".spotfitignore")  # the later has the last word
_NEVER = (
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


class Bundle(NamedTuple):
    """An archive, and what it was made from."""

    sha256: str
    body: bytes
    root: Path
    """The directory that unpacking would restore."""
    names: frozenset[str]

    def holds(self, module: ModuleType) -> bool:
        """Whether `module` can be imported from where the bundle is unpacked, under its name."""
        file = Path(module.__dict__.get("__file__") or "")
        below = module.__name__.replace(".", "/")
        if not file.is_relative_to(self.root):
            return False
        name = file.relative_to(self.root).as_posix()
        return name in self.names and name in {f"{below}.py", f"{below}/__init__.py"}


def bundle_directory(folder: Path, *, limit_bytes: int = LIMIT_BYTES) -> Bundle:
    """Everything below `folder`, except what .gitignore and .spotfitignore files in it name.

    A .spotfitignore is written like a .gitignore and has the last word: `!data/` takes along what
    git ignores. Raises `ShippingError`, naming the biggest files, when it is too big.
    """
    top = Path(os.path.abspath(folder))  # noqa: PTH100 - links stay as the user wrote them
    return _bundle(list(_files_below(top, within=top)), root=top, limit_bytes=limit_bytes)


def bundle_module(path: Path, *, limit_bytes: int = LIMIT_BYTES) -> Bundle:
    """A package's directory or a module's file, to be imported under its own name."""
    place = Path(os.path.abspath(path))  # noqa: PTH100 - links stay as the user wrote them
    if place.is_dir():
        files = list(_files_below(place, within=place.parent))
    else:
        files = [_File(place.name, place, place.stat())]
    return _bundle(files, root=place.parent, limit_bytes=limit_bytes)


class _File(NamedTuple):
    name: str
    path: Path
    stat: os.stat_result


class _Rules(NamedTuple):
    """One directory's ignore files; `base` is what names lose before they are matched."""

    base: int
    spec: GitIgnoreSpec


def _bundle(files: Sequence[_File], *, root: Path, limit_bytes: int) -> Bundle:
    if not files:
        raise ShippingError(
            f"Nothing in {root} would be taken along: it has no files, or all are ignored.",
            do="Name what to take in a .spotfitignore there, with '!' before it.",
        )
    _judge_weight(files, root, limit_bytes)
    body = _archive(sorted(files))
    names = frozenset(file.name for file in files)
    return Bundle(hashlib.sha256(body).hexdigest(), body, root, names)


def _files_below(top: Path, *, within: Path) -> Iterator[_File]:
    prefix = "" if top == within else f"{top.name}/"
    never = _Rules(len(prefix), _spec(_NEVER))
    yield from _walk(top, prefix, (never,), (os.path.realpath(top),))


def _walk(
    folder: Path, prefix: str, rules: tuple[_Rules, ...], above: tuple[str, ...]
) -> Iterator[_File]:
    """Depth first. `above` are the real directories we are in, so that links cannot go round."""
    rules = (*rules, *_rules_of(folder, prefix))
    for entry in _entries(folder):
        name = prefix + entry.name
        if entry.is_dir():
            real = os.path.realpath(entry)
            if real not in above and not _ignored(f"{name}/", rules):
                yield from _walk(Path(entry), f"{name}/", rules, (*above, real))
        elif entry.is_file() and not _ignored(name, rules):
            yield _File(name, Path(entry), entry.stat())


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        return list(os.scandir(folder))
    except OSError as refused:
        raise _unreadable(folder, refused) from refused


def _rules_of(folder: Path, prefix: str) -> Iterator[_Rules]:
    texts = [folder / name for name in _IGNORE_FILES]
    lines = [line for text in texts if text.is_file() for line in _lines(text)]
    if lines:
        yield _Rules(len(prefix), _spec(lines))


def _lines(text: Path) -> list[str]:
    return text.read_text(encoding="utf-8", errors="replace").splitlines()


def _spec(lines: Sequence[str]) -> GitIgnoreSpec:
    # Imported here: it costs 36 ms, and most runs bring no directory.
    from pathspec import GitIgnoreSpec

    return GitIgnoreSpec.from_lines(lines)


def _ignored(name: str, rules: Sequence[_Rules]) -> bool:
    """The innermost directory that has an opinion decides, as in git."""
    for each in reversed(rules):
        verdict = each.spec.check_file(name[each.base :]).include
        if verdict is not None:
            return verdict
    return False


def _judge_weight(files: Sequence[_File], root: Path, limit_bytes: int) -> None:
    total = sum(file.stat.st_size for file in files)
    if total <= limit_bytes:
        return
    biggest = sorted(files, key=lambda file: -file.stat.st_size)[:5]
    told = ", ".join(f"{file.name} ({told_bytes(file.stat.st_size)})" for file in biggest)
    raise ShippingError(
        f"{root} holds {told_bytes(total)} in {len(files)} files; the limit is "
        f"{told_bytes(limit_bytes)}. The biggest: {told}.",
        do="List what the machines do not need in a .spotfitignore there, and let the training "
        "function read data from storage.",
        size_bytes=total,
        limit_bytes=limit_bytes,
    )


def _archive(files: Sequence[_File]) -> bytes:
    buffer = io.BytesIO()
    packed = gzip.GzipFile("", "wb", compresslevel=1, fileobj=buffer, mtime=0)
    with packed, tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for file in files:
            body = _content(file)
            entry = tarfile.TarInfo(file.name)
            entry.size = len(body)
            entry.mode = 0o755 if file.stat.st_mode & 0o100 else 0o644
            archive.addfile(entry, io.BytesIO(body))
    return buffer.getvalue()


def _content(file: _File) -> bytes:
    try:
        return file.path.read_bytes()
    except OSError as refused:
        raise _unreadable(file.path, refused) from refused


def _unreadable(path: Path, refused: OSError) -> ShippingError:
    return ShippingError(
        f"{path} cannot be read: {refused.strerror}.",
        do="Make it readable, or list it in a .spotfitignore.",
    )
