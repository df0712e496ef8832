"""The `spotfit` command: follow, cancel and sweep a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import spotfit
from spotfit.core.errors import RunCancelledError
from tests.live.cloud import TIMEOUT_S, LiveTestCloud, eventually
from tests.unit.localsim.live.local_cloud_harness import make_importable

Config = dict[str, Any]

SCRIPT = """
    import os, time
    from pathlib import Path
    import spotfit

    def train(config):
        print("at work")
        Path(config["marks"], "at work").touch()
        while not Path(config["marks"], "enough").exists():
            time.sleep(0.01)
        return "revived"

    if __name__ == "__main__":
        spotfit.DataParallelTrainer(
            train,
            train_loop_config={"marks": os.environ["MARKS"]},
            run_config=spotfit.RunConfig("run", os.environ["STORAGE"]),
        ).fit()
"""


def shell(*arguments: str) -> str:
    """Return the output of a command, which must succeed."""
    done = subprocess.run(
        [sys.executable, "-m", "spotfit.cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
        env=dict(os.environ),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def wait_for_enough(config: Config) -> None:
    print("at work")
    Path(config["marks"], "at work").touch()
    while not Path(config["marks"], "enough").exists():
        time.sleep(0.01)


def test_status_and_cancel_of_a_running_run(cloud: LiveTestCloud) -> None:
    handle = cloud.submit(wait_for_enough)
    cloud.wait_for_mark("at work")
    assert "state        running" in shell("status", cloud.url())
    shell("cancel", cloud.url())
    with pytest.raises(RunCancelledError, match="spotfit cancel"):
        handle.result(60)
    assert "run cancelled" in shell("events", cloud.url())
    assert "(rank 0) at work" in shell("logs", cloud.url())


def test_follow_shows_the_output_until_the_end(cloud: LiveTestCloud) -> None:
    handle = cloud.submit(wait_for_enough)
    cloud.wait_for_mark("at work")
    main = "from spotfit.cli.main import main; main()"
    follower = cloud.driver(main, "follow", cloud.url())
    eventually(lambda: "(rank 0) at work" in follower.output)
    cloud.write_mark("enough")

    assert follower.wait() == 0
    assert "run finished" in follower.output
    handle.result(60)
    assert "(rank 0) at work" in shell("follow", cloud.url()), "also after the end"


def test_sweep_requests_machines_for_a_run_that_lost_all(cloud: LiveTestCloud) -> None:
    driver = cloud.driver(SCRIPT)
    cloud.wait_for_mark("at work")
    driver.kill()
    for node in cloud.reclaimer.running_nodes():
        cloud.reclaimer.kill(node)
    cloud.write_mark("enough")

    assert "The run is finished" in shell("sweep", cloud.url(), "--duration-s", str(TIMEOUT_S))
    assert spotfit.attach(cloud.url()).result(60).return_value == "revived"


def hangs(*_: Any, **__: Any) -> None:
    """An agent that never joins."""
    print("looking for a device that is not there", flush=True)
    signal.pause()


def test_logs_of_a_machine_whose_agent_never_joined(
    cloud: LiveTestCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_importable(monkeypatch)
    handle = cloud.submit(wait_for_enough, local_options={"agent": f"{__name__}:hangs"})
    result = eventually(lambda: [line for line in handle.machine_logs() if "device" in line])
    assert result[0].endswith("/0) looking for a device that is not there")
    assert result[0] in shell("logs", cloud.url(), "--machine", "0")
    handle.cancel()
    with pytest.raises(RunCancelledError):
        handle.result(TIMEOUT_S)
