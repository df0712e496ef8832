"""The command: reads scripts, shows or writes what becomes of them, and lists what it left.

Exit codes: 0 when everything was moved, 1 when something is left to do by hand, 2 when a script
could not be read.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spotfit.cli import render
from spotfit.core.errors import ConfigErrors, SpotfitError
from spotfit.host.extras import need
from spotfit.migrate.scripts import scripts_in, write

if TYPE_CHECKING:
    from spotfit.migrate.rewrite import Rewritten

LEFT, FAILED = 1, 2

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
Scripts = Annotated[list[Path], typer.Argument(help="Scripts, or directories of scripts.")]
Write = Annotated[bool, typer.Option("--write", help="Change the files.")]
Diff = Annotated[bool, typer.Option("--diff", help="Show what would change (the default).")]


@app.command()
def migrate(
    scripts: Scripts,
    write_files: Write = False,  # noqa: FBT002 - a flag of the command line
    diff: Diff = False,  # noqa: FBT002
) -> None:
    """Move Ray Train scripts to spotfit: their imports, and what hangs on them.

    What cannot be moved is listed with its line and what to do. Running it again changes nothing.
    """
    need("libcst", extra="migrate")
    moved, failures = _move_all(scripts_in(scripts))
    for script, (old, new) in moved.items():
        if write_files and new.text != old:
            write(script, new.text)
        if diff or not write_files:
            render.lines(_diff(script, old, new.text))
    for script, (old, new) in moved.items():
        render.lines(_told(script, new, changed=new.text != old))
    if failures:
        raise ConfigErrors(failures)
    if any(new.left for _, new in moved.values()):
        raise typer.Exit(LEFT)


def main() -> None:
    """The entry point; our errors become a sentence and exit code 2."""
    try:
        app(prog_name="python -m spotfit.migrate")
    except SpotfitError as problem:
        render.error(problem)
        sys.exit(FAILED)


def _move_all(
    scripts: list[Path],
) -> tuple[dict[Path, tuple[bytes, Rewritten]], list[SpotfitError]]:
    """Each script's old text and what becomes of it, and what stood in the way elsewhere."""
    from spotfit.migrate.rewrite import rewrite

    moved: dict[Path, tuple[bytes, Rewritten]] = {}
    failures: list[SpotfitError] = []
    for script in scripts:
        old = script.read_bytes()
        try:
            moved[script] = old, rewrite(old, name=str(script))
        except SpotfitError as failure:
            failures.append(failure)
    return moved, failures


def _diff(script: Path, old: bytes, new: bytes) -> Iterator[str]:
    before, after = (text.decode(errors="replace").splitlines() for text in (old, new))
    name = script.as_posix().lstrip("/")
    yield from difflib.unified_diff(before, after, f"a/{name}", f"b/{name}", lineterm="")


def _told(script: Path, new: Rewritten, *, changed: bool) -> Iterator[str]:
    if changed or new.notes:
        left = f"{len(new.left)} left to do by hand" if new.left else "nothing left to do by hand"
        yield f"{script}: {'moved' if changed else 'nothing to move'}, {left}"
    for note in new.notes:
        yield f"  line {note.line}: {note.what}: {note.do}"
