"""Migration of Jupyter notebooks: the code cells of one notebook are migrated as one script.

A cell uses the names that earlier cells import, so the cells are joined, with a marker statement
before each, and separated again afterwards. Lines of IPython syntax (`%pip install`, `!ls`) are
replaced by `pass` meanwhile, and cells that IPython passes to another program (`%%bash`) are left
out.
"""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import libcst as cst

from spotfit.core.errors import ConfigError
from spotfit.migrate.edit import RewrittenScript, rewrite_script
from spotfit.migrate.migration_plan import MigrationNote

_CELL_MARKER = re.compile(r"^__spotfit_cell_\d+__\n", re.MULTILINE)
_IPYTHON_LINE = re.compile(r"^([ \t]*)([%!].*)$", re.MULTILINE)
_REPLACED_LINE = re.compile(r"pass  # __spotfit_line_(\d+)__")
# The formats in which Jupyter and other programs write notebooks; nbformat's is the first.
_JSON_INDENTS = (1, 2, 4, None)


def rewrite_notebook(source: bytes, *, name: str = "<notebook>") -> RewrittenScript:
    """Return the migrated text of a notebook with notes that name code cells, counted from 1.

    `source` is the file's content in Jupyter's format, version 4; `name` names it in errors. Only
    sources of code cells change; outputs stay. A notebook of another language is returned
    unchanged. Raises `ConfigError` if it cannot be read, or its code is not valid Python.
    """
    try:
        notebook = json.loads(source)
        cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        codes = ["".join(cell["source"]) for cell in cells]
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{name} is not a Jupyter notebook of format 4: {type(error).__name__}: {error}",
            do="Open and save it with a current Jupyter, then migrate it again.",
        ) from error
    kernel = notebook.get("metadata", {}).get("kernelspec", {}).get("language", "python")
    if kernel != "python":
        return RewrittenScript(source, ())
    script, lines = _join_cells(codes)
    rewritten = rewrite_script(script.encode(), name=f"The code of {name}")
    notes = _to_cell_notes(rewritten.notes, script)
    if rewritten.text == script.encode():
        return RewrittenScript(source, notes)
    new_codes = _split_cells(rewritten.text.decode(), lines)
    for cell, old, new in zip(cells, codes, new_codes, strict=True):
        if not _is_foreign(old):
            is_text = isinstance(cell["source"], str)
            cell["source"] = new if is_text else new.splitlines(keepends=True)
    return RewrittenScript(_encode_like(source, notebook), notes)


def _is_foreign(code: str) -> bool:
    """Whether IPython passes the cell to another program, or to a magic function as a text."""
    return code.lstrip().startswith("%%")


def _join_cells(codes: Sequence[str]) -> tuple[str, list[str]]:
    """Return the cells as one script, and the lines of IPython that it does not contain."""
    lines: list[str] = []

    def hide(match: re.Match[str]) -> str:
        lines.append(match[2])
        return f"{match[1]}pass  # __spotfit_line_{len(lines) - 1}__"

    parts = []
    for n, code in enumerate(codes):
        text = "" if _is_foreign(code) else code
        # A line of Python may begin with `%`, in an expression that spans lines.
        if not _is_python(text):
            text = _IPYTHON_LINE.sub(hide, text)
        parts.append(f"__spotfit_cell_{n}__\n{text}\n")
    return "".join(parts), lines


def _is_python(text: str) -> bool:
    try:
        cst.parse_module(text)
    except cst.ParserSyntaxError:
        return False
    return True


def _split_cells(script: str, lines: Sequence[str]) -> list[str]:
    """Reverse `_join_cells` for the migrated script."""
    script = _REPLACED_LINE.sub(lambda match: lines[int(match[1])], script)
    return [part.removesuffix("\n") for part in _CELL_MARKER.split(script)[1:]]


def _to_cell_notes(notes: Sequence[MigrationNote], script: str) -> tuple[MigrationNote, ...]:
    """Return the notes with the number of the code cell and the line within it."""
    starts = [script.count("\n", 0, match.start()) + 1 for match in _CELL_MARKER.finditer(script)]
    located = []
    for note in notes:
        cell = bisect.bisect_left(starts, note.line)
        located.append(replace(note, cell=cell, line=note.line - starts[cell - 1]))
    return tuple(located)


def _encode_like(source: bytes, notebook: Any) -> bytes:
    """Encode the notebook in the format of `source`, so that only its changes differ."""
    unchanged, end = json.loads(source), "\n" if source.endswith(b"\n") else ""

    def encode(value: Any, indent: int | None, *, ascii_only: bool) -> bytes:
        return (json.dumps(value, indent=indent, ensure_ascii=ascii_only) + end).encode()

    for indent in _JSON_INDENTS:
        for ascii_only in (False, True):
            if encode(unchanged, indent, ascii_only=ascii_only) == source:
                return encode(notebook, indent, ascii_only=ascii_only)
    return encode(notebook, _JSON_INDENTS[0], ascii_only=False)
