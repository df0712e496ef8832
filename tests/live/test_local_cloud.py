"""The local cloud with real agents: reuse, preemption and cleanup of machines."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

import spotfit
from spotfit_localsim.live.preemption import at_step, scheduled_reclaims
from tests.live.cloud import LiveTestCloud

Config = dict[str, Any]


@pytest.fixture
def cloud(cold_cloud: LiveTestCloud) -> LiveTestCloud:
    """The tests look at all machines of the local cloud."""
    return cold_cloud


def machine_pid(_: Config) -> int:
    """Return the pid of the machine process, the grandparent of the worker."""
    fork_server_pid = os.getppid()
    return int(Path(f"/proc/{fork_server_pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_next_fit_reuses_waiting_machines(cloud: LiveTestCloud) -> None:
    first = cloud.fit(machine_pid, workers=2, nodes=2, name="one")
    machines = set(cloud.root.machines())
    second = cloud.fit(machine_pid, workers=2, nodes=2, name="two")
    assert set(cloud.root.machines()) == machines
    assert {first.return_value, second.return_value} <= {machine.pid for machine in machines}


def test_run_survives_scheduled_preemptions(cloud: LiveTestCloud) -> None:
    def train(config: Config) -> int:
        step = 0
        if saved := spotfit.get_checkpoint():
            with saved.as_directory() as folder:
                step = int(Path(folder, "step").read_text())
        while step < config["steps"]:
            spotfit.collective.barrier()
            time.sleep(0.01)
            step += 1
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "step").write_text(str(step))
                saved = spotfit.Checkpoint.from_directory(folder) if step % 10 == 0 else None
                spotfit.report({"step": step}, checkpoint=saved)
        return step

    plan = [at_step(30, node=1, notice_s=2.0), at_step(250, node=0)]
    with scheduled_reclaims(cloud.url(), plan, options=cloud.options(), seed=1) as schedule:
        result = cloud.fit(train, workers=2, nodes=2, config={"steps": 400})
    assert result.return_value == 400
    assert [reclaim.notice for reclaim in schedule.completed] == [True, False]
    assert len(cloud.rounds_opened()) >= 3


def test_run_waits_for_capacity(cloud: LiveTestCloud) -> None:
    """Every node is killed, without capacity for a while."""

    def train(config: Config) -> str:
        Path(config["marks"], "begun").touch()
        while not Path(config["marks"], "go").exists():
            time.sleep(0.02)
        return "done"

    handle = cloud.submit(train, workers=2, nodes=2)
    cloud.wait_for_mark("begun")
    cloud.reclaimer.set_capacity(0)
    for node in cloud.reclaimer.running_nodes():
        cloud.reclaimer.kill(node)
    cloud.write_mark("go")
    cloud.reclaimer.set_capacity(None)
    assert handle.result(timeout_s=90.0).return_value == "done"
