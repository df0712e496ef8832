"""The command line of the migration: reads scripts, shows or writes the result, lists manual work.

Exit codes: 0 if the migration is complete, 1 if manual work is left, 2 if a script could not be
parsed.

Finding scripts in directories, and replacing them atomically.
"""

from __future__ import annotations

import difflib
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spotfit.cli import render
from spotfit.core.errors import ConfigError, ConfigErrors, SpotfitError
from spotfit.host.plugins import require_module

if TYPE_CHECKING:
    from spotfit.migrate.edit import RewrittenScript

# --- Finding scripts in directories, and replacing them atomically --------------------------------


NOTEBOOK_SUFFIX = ".ipynb"
_SKIPPED_DIRECTORIES = {"__pycache__", "node_modules", "site-packages"}


def find_scripts(paths: Iterable[Path]) -> list[Path]:
    """Return all given files, and all Python files and notebooks in the given directories, once.

    Skips hidden directories, virtual environments and installed packages below the directories;
    files are accepted with any suffix. Raises `ConfigError` for a path that does not exist.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if not path.exists():
            raise ConfigError(
                f"The script or directory {path} does not exist.",
                do="Correct the path; pass scripts or directories.",
            )
        found |= dict.fromkeys(_scripts_below(path) if path.is_dir() else [path])
    return list(found)


def write_script(script: Path, text: bytes) -> None:
    """Replace the content of the file `script` atomically.

    Permissions and symbolic links are preserved. Raises OSError.
    """
    # rename() would replace a symbolic link by a file, and is atomic only within a directory.
    target = script.resolve()
    temporary = target.with_name(f".{target.name}.spotfit")
    temporary.write_bytes(text)
    shutil.copymode(target, temporary)
    temporary.replace(target)


def _scripts_below(directory: Path) -> Iterator[Path]:
    for parent, subdirectories, names in os.walk(directory):
        # os.walk() descends into what remains in this list. Every virtual environment has a
        # pyvenv.cfg (PEP 405).
        subdirectories[:] = sorted(
            name
            for name in subdirectories
            if not name.startswith(".")
            and name not in _SKIPPED_DIRECTORIES
            and not Path(parent, name, "pyvenv.cfg").exists()
        )
        yield from (
            Path(parent, name) for name in sorted(names) if name.endswith((".py", NOTEBOOK_SUFFIX))
        )


EXIT_MANUAL_WORK_LEFT, EXIT_FAILED = 1, 2

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
Scripts = Annotated[list[Path], typer.Argument(help="Scripts, notebooks, or directories of them.")]
Write = Annotated[bool, typer.Option("--write", help="Change the files.")]
Diff = Annotated[bool, typer.Option("--diff", help="Show what would change (the default).")]


@app.command()
def migrate(
    scripts: Scripts,
    write_files: Write = False,  # noqa: FBT002 - a flag of the command line
    diff: Diff = False,  # noqa: FBT002
) -> None:
    """Migrate Ray Train scripts and notebooks: imports, and the names that depend on them.

    Shows the changes as a diff; changes the files only with --write. Lists code that needs manual
    changes, with line numbers. Running it again changes nothing. Exit code: 0 if the migration is
    complete, 1 if manual changes are left, 2 if a script could not be parsed.
    """
    require_module("libcst", extra="migrate")
    # All scripts are rewritten before the first is written: an unexpected error changes none.
    rewritten, failures = _rewrite_all(find_scripts(scripts))
    for script, (old, new) in rewritten.items():
        if write_files and new.text != old:
            write_script(script, new.text)
        if diff or not write_files:
            # Undecodable bytes are replaced for display only; the file is written as bytes.
            before, after = (t.decode(errors="replace").splitlines() for t in (old, new.text))
            name = script.as_posix().lstrip("/")
            diff_lines = difflib.unified_diff(before, after, f"a/{name}", f"b/{name}", lineterm="")
            render.lines(diff_lines)
    # After all diffs, where they are not scrolled away.
    for script, (old, new) in rewritten.items():
        manual = len(new.manual_notes)
        result = "migrated" if new.text != old else "nothing to migrate"
        left = f"{manual or 'no'} manual change{'' if manual == 1 else 's'} left"
        # Scripts that do not use Ray are not mentioned.
        if new.text != old or new.notes:
            render.lines([f"{script}: {result}, {left}"])
        render.lines(f"  {note.location}: {note.what}: {note.do}" for note in new.notes)
    if failures:  # at the end: scripts that do not parse must not prevent the others
        raise ConfigErrors(failures)
    if any(new.manual_notes for _, new in rewritten.values()):
        raise typer.Exit(EXIT_MANUAL_WORK_LEFT)


def main() -> None:
    """Run the command line `python -m spotfit.migrate` and exit the process.

    Exit code 0 if the migration is complete, 1 if manual changes are left. A `SpotfitError` is
    printed without a traceback; exit code 2.
    """
    try:
        app(prog_name="python -m spotfit.migrate")
    except SpotfitError as error:
        render.error(error)
        sys.exit(EXIT_FAILED)


def _rewrite_all(
    scripts: list[Path],
) -> tuple[dict[Path, tuple[bytes, RewrittenScript]], list[SpotfitError]]:
    """Return old text and result of each script, and the errors of scripts that do not parse."""
    # These need libcst, an optional dependency.
    from spotfit.migrate.edit import rewrite_script
    from spotfit.migrate.notebook import rewrite_notebook

    rewritten: dict[Path, tuple[bytes, RewrittenScript]] = {}
    failures: list[SpotfitError] = []
    for script in scripts:
        old = script.read_bytes()
        rewrite = rewrite_notebook if script.suffix == NOTEBOOK_SUFFIX else rewrite_script
        try:
            rewritten[script] = old, rewrite(old, name=str(script))
        except SpotfitError as failure:
            failures.append(failure)
    return rewritten, failures
