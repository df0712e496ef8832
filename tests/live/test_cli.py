"""`spotfit` at a shell: follow a run, end it, revive it."""

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
from tests.live.cloud import PATIENCE_S, Cloud, eventually
from tests.unit.localsim.live.stand_in import importable

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
    """What the command prints; it has to succeed."""
    done = subprocess.run(
        [sys.executable, "-m", "spotfit.cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
        env=dict(os.environ),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def wait_for_enough(config: Config) -> None:
    print("at work")
    Path(config["marks"], "at work").touch()
    while not Path(config["marks"], "enough").exists():
        time.sleep(0.01)


def test_a_run_is_looked_at_and_ended(cloud: Cloud) -> None:
    handle = cloud.submit(wait_for_enough)
    cloud.sees("at work")
    assert "state        running" in shell("status", cloud.url())
    shell("cancel", cloud.url())
    with pytest.raises(RunCancelledError, match="spotfit cancel"):
        handle.result(60)
    assert "the run is cancelled" in shell("story", cloud.url())
    assert "(rank 0) at work" in shell("logs", cloud.url())


def test_follow_shows_the_output_to_the_end(cloud: Cloud) -> None:
    handle = cloud.submit(wait_for_enough)
    cloud.sees("at work")
    main = "from spotfit.cli.main import main; main()"
    follower = cloud.driver(main, "follow", cloud.url())
    eventually(lambda: "(rank 0) at work" in follower.output)
    cloud.leave("enough")

    assert follower.ended() == 0
    assert "the run is finished" in follower.output
    handle.result(60)
    assert "(rank 0) at work" in shell("follow", cloud.url()), "also when it is over"


def test_sweep_revives_a_run_that_nobody_is_awake_for(cloud: Cloud) -> None:
    driver = cloud.driver(SCRIPT)
    cloud.sees("at work")
    driver.kill()
    for node in cloud.reclaimer.nodes():
        cloud.reclaimer.kill(node)
    cloud.leave("enough")

    assert "The run is finished" in shell("sweep", cloud.url(), "--for-s", str(PATIENCE_S))
    assert spotfit.attach(cloud.url()).result(60).return_value == "revived"


def hangs(*_: Any, **__: Any) -> None:
    """An agent that never comes to speak."""
    print("looking for a device that is not there", flush=True)
    signal.pause()


def test_logs_tell_what_a_machine_printed_whose_agent_never_spoke(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    importable(monkeypatch)
    handle = cloud.submit(wait_for_enough, local={"agent": f"{__name__}:hangs"})
    told = eventually(lambda: [line for line in handle.machine_logs() if "device" in line])
    assert told[0].endswith("/0) looking for a device that is not there")
    assert told[0] in shell("logs", cloud.url(), "--machine", "0")
    handle.cancel()
    with pytest.raises(RunCancelledError):
        handle.result(PATIENCE_S)
