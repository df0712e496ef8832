"""A folder of shared memory goes with its owner, however that one ends."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

from spotfit.host.shared_memory import folder_for

_HOLDS = """
import sys, time, pathlib
from spotfit.host.shared_memory import folder_for
with folder_for("other", pathlib.Path(sys.argv[1])) as folder:
    (folder / "big").write_text("x")
    print("there", flush=True)
    sys.stdin.read()
"""


def test_it_is_the_users_own_and_goes_with_the_block(tmp_path: Path) -> None:
    with folder_for("me", tmp_path) as folder:
        (folder / "x").write_text("x")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not list(tmp_path.iterdir())


def test_what_a_killed_owner_left_is_freed_by_the_next(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDS, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"there\n"
    left = tmp_path / f"spotfit-{os.getuid()}-other"
    with folder_for("me", tmp_path):
        assert left.exists(), "its owner lives"
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    assert left.exists()
    with folder_for("me", tmp_path):
        assert not left.exists()
