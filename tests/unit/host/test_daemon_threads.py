"""The exit of a process whose daemon threads are in calls of client libraries."""

from __future__ import annotations

import subprocess
import sys

import pytest

CALL_OF_AN_EXTENSION = """
import gc
import threading
import time

import pydantic
from spotfit.host.daemon_threads import start_daemon_thread

started = threading.Event()


# The function of the user is called by a frame of pydantic's Rust extension.
@pydantic.validate_call
def call():
    started.set()
    time.sleep(0.3)


start_daemon_thread("call", call)
started.wait()
# The finalization collects garbage, and takes longer than the call.
gc.callbacks.append(lambda phase, _: time.sleep(0.6) if phase == "start" else None)
"""

HANGING_CALL = """
import time

from spotfit.host import daemon_threads

daemon_threads._MAX_EXIT_WAIT_S = 0.1
daemon_threads.start_daemon_thread("call", lambda: time.sleep(600))
"""


def run_python(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )


def test_the_exit_waits_for_a_call_below_frames_of_an_extension() -> None:
    pytest.importorskip("pydantic")
    done = run_python(CALL_OF_AN_EXTENSION)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_exit_does_not_wait_for_a_call_that_hangs() -> None:
    done = run_python(HANGING_CALL)
    assert (done.returncode, done.stderr) == (0, "")
