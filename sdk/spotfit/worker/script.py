"""The training function of `spotfit run`: a script with command-line arguments, as `__main__`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

from spotfit.core.errors import WorkerDiedError


def run_script(config: dict[str, Any]) -> None:
    """Execute a Python script in this process as `python` would: as `__main__`, with its arguments.

    `config` has "script", a path relative to the working directory or with "is_module" the name of
    a module, and "arguments", a list of strings. Returns when the script ends or exits with status
    0. Raises the script's exceptions, and `WorkerDiedError` if it exits with another status.
    """
    script, arguments = config["script"], config["arguments"]
    try:
        if config["is_module"]:
            sys.argv = [script, *arguments]
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            # Absolute: spawned processes find it from another working directory.
            path = Path(script).resolve()
            sys.argv = [str(path), *arguments]
            # As Python does: imports of the script find its own folder first.
            sys.path.insert(0, str(path.parent))
            runpy.run_path(str(path), run_name="__main__")
    except SystemExit as exit_:
        if exit_.code not in (None, 0):
            raise WorkerDiedError(
                f"The script {script!r} has exited with {_status(exit_.code)}.",
                do="Read its last lines above: a script ends with status 0 after success.",
            ) from exit_


def _status(code: object) -> str:
    return f"status {code}" if isinstance(code, int) else f"the message {code!r}"
