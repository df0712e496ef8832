"""Run the first Python example of the README with the spotfit that this interpreter has installed.

Used by `make dist` in an environment that contains only the wheel and its dependencies.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"
_TIMEOUT_S = 300


def main() -> int:
    """Return the exit code of the example."""
    found = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    if found is None:
        print("README.md has no Python example.")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(found[1].replace("/tmp/runs", f"{folder}/runs"))  # noqa: S108 - the text of the example
        # An empty HOME and working directory: nothing of the checkout may be found by accident.
        environment = {"HOME": folder, "PATH": os.environ["PATH"]}
        command = [sys.executable, str(script)]
        ended = subprocess.run(  # noqa: S603 - our own example
            command, cwd=folder, env=environment, timeout=_TIMEOUT_S, capture_output=True, text=True
        )
    print(ended.stdout[-2000:], ended.stderr[-4000:], sep="\n")
    if ended.returncode == 0 and "loss" not in ended.stdout:
        print("The example printed no metrics.")
        return 1
    return ended.returncode


if __name__ == "__main__":
    sys.exit(main())
